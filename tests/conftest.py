"""The flag that rewrites the golden files, short temporary folders for sockets, how properties are explored, and which
files go first. And that no test reads anything of the machine it runs on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run and no wall clock: a red run means a change. PODGPU_EXPLORE=1 draws anew.
settings.register_profile(
    "podgpu",
    derandomize="PODGPU_EXPLORE" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("podgpu")
_PROVIDERS = sys.modules.get("hypothesis.internal.conjecture.providers")
if settings.default.derandomize and hasattr(_PROVIDERS, "is_local_module_file"):
    # Hypothesis also draws constants out of the sources that are loaded: which are, that hangs on what ran before.
    _PROVIDERS.is_local_module_file = lambda path: False  # type: ignore[union-attr]

# Else every worker, and every command that a test starts, compiles anew what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# helm, promtool and Prometheus are Go's and run for a moment, a seventh of which is looking for garbage.
os.environ.setdefault("GOGC", "400")

# So that `pytest` finds tests.nodes and tests.serve as `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.host.guard import NOTES, on_no_node, watch, without_what_means_something  # noqa: E402

_notes = Path(tempfile.mkdtemp(prefix="podgpu-tests-")) / "read"
_read: list[str] = []
without_what_means_something(keep=("PODGPU_EXPLORE",))
on_no_node(str(_notes.parent))
os.environ[NOTES] = str(_notes)
os.environ["PYTHONPATH"] = str(Path(__file__).parent / "host")
atexit.register(shutil.rmtree, _notes.parent)
watch(_read.append)


@pytest.fixture(autouse=True)
def _nothing_of_this_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """A session's fixtures are charged to the test that is the first to need them."""
    yield
    read, _read[:] = _read[:], []
    if _notes.exists():
        read += _notes.read_text(encoding="utf-8").splitlines()
        _notes.unlink()
    if request.node.get_closest_marker("reads_host") is None:
        assert sorted(set(read)) == [], "what runs the tests must not matter to them: give the path by an option"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write what comes out to tests/nodes/*/expected.prom instead of comparing",
    )


WAITING = (
    *("deploy/test_alerts_live.py", "endurance/test_attack.py", "cluster/test_prom_live.py"),
    *("agent/test_gpu_faults.py", "serve/test_connections.py", "faults/test_process.py"),
    *("agent/test_kubelet_faults.py", "cli/test_ill_api_server.py", "serve/test_signals.py", "kube/test_watch.py"),
    *("deploy/test_dashboards.py", "cli/test_doctor_configuration.py", "agent/test_health.py"),
    *("deploy/test_rules_autoscaling.py", "deploy/test_12239.py", "exposition/test_openmetrics.py"),
    *("top/test_tmux.py",),
)
WORKING = (
    *("browser/test_cluster_page.py", "test_bench.py", "test_doc_commands.py", "test_billing.py"),
    *("browser/test_history.py", "deploy/test_image.py", "cli/test_cluster.py", "endurance/test_soak.py"),
    *("cluster/test_hostile.py", "fetch/test_large_answers.py", "deploy/test_chart.py", "browser/test_broken.py"),
    *("browser/test_demo_page.py", "cluster/test_prom_real_history.py", "test_churn.py", "serve/test_tls.py"),
    *("agent/test_usage_methods.py", "browser/test_money.py", "cli/test_demo.py", "top/test_terminal.py"),
    *("cli/test_config_file.py", "compose/test_allocations.py"),
)
"""Files of five seconds and more, the longest first: those that mostly wait, and those that keep a core busy."""


def _longest() -> Iterator[str]:
    """One that waits, then two that work: so the cores have something to do. They come before all others: a worker that
    takes up a long file when the rest are done keeps everybody waiting."""
    working = iter(WORKING)
    for waiting in WAITING:
        yield from (waiting, *itertools.islice(working, 2))
    yield from working


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, else the order they came in: pytest-xdist deals them out in this order."""
    tests = Path(__file__).parent
    place = {tests / name: number for number, name in enumerate(_longest())}
    if gone := [str(path) for path in place if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py names long files that are not there: {', '.join(gone)}")
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is collected is no garbage: it is not looked for meanwhile, and later not in nine thousand tests. And it is
    looked for seldom: tests make much and keep little."""
    gc.disable()
    try:
        _compile_a_share(session.config.args)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 10, 10)


def _compile_a_share(arguments: list[str]) -> None:
    """Each worker begins with other files than the rest. After a change, or in a fresh checkout, pytest rewrites the
    asserts of every file and keeps the result: the workers would all do so with the same file at the same time."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    files = sorted(path for argument in arguments for path in Path(argument).resolve().rglob("test_*.py"))
    for path in files[number::workers] if workers > 1 else ():
        with contextlib.suppress(Exception):  # collecting tells of it
            importlib.import_module(".".join(path.relative_to(Path(__file__).parents[1]).with_suffix("").parts))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: pytest's names are too long for a socket path."""
    path = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    yield path
    shutil.rmtree(path)
