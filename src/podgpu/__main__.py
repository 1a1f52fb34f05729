"""Starts podgpu, as `podgpu` or `python -m podgpu`."""

from _signal import SIG_DFL, SIGINT, signal  # type: ignore[import-not-found]  # `signal` itself imports other modules

# Until main() runs, Ctrl-C ends the process without a traceback. Python's default handler would
# raise inside an import.
signal(SIGINT, SIG_DFL)

from podgpu.cli import main  # noqa: E402
from podgpu.cli.main import kubectl_main as kubectl_main  # noqa: E402

if __name__ == "__main__":
    main()
