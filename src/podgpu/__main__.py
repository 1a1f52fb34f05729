"""Starts podgpu, as `podgpu` or `python -m podgpu`."""

import signal

# Until main() runs, Ctrl-C ends the process without a traceback. Python's default handler would raise inside an import.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from podgpu.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
