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
from collections.abc import Generator, Iterable, Iterator, Mapping
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

# So that `pytest` finds tests.nodes and tests.web as `python -m pytest` does.
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


WAITING = {
    "deploy/test_alerts_live.py": 41,
    "endurance/test_attack.py": 32,
    "cluster/test_prom_live.py": 29,
    "agent/test_gpu_faults.py": 26,
    "browser/test_cluster_page.py": 24,
    "web/test_connections.py": 21,
    "faults/test_process.py": 18,
    "test_billing.py": 14,
    "browser/test_history.py": 13,
    "agent/test_kubelet_faults.py": 13,
    "cli/test_ill_api_server.py": 13,
    "endurance/test_soak.py": 10,
    "web/test_signals.py": 10,
    "kube/test_watch.py": 9,
    "deploy/test_dashboards.py": 9,
    "cli/test_doctor_configuration.py": 9,
    "browser/test_broken.py": 8,
    "agent/test_health.py": 8,
    "deploy/test_rules_autoscaling.py": 7,
    "browser/test_money.py": 6,
    "deploy/test_12239.py": 6,
    "metrics/test_openmetrics.py": 6,
    "top/test_tmux.py": 5,
    "cli/test_config_file.py": 5,
    "compose/test_allocations.py": 5,
    "cli/test_doctor.py": 5,
    "top/test_command.py": 5,
    "browser/test_states.py": 5,
    "hook/test_life.py": 5,
}
WORKING = {
    "test_bench.py": 18,
    "test_doc_commands.py": 14,
    "cli/test_cluster.py": 10,
    "deploy/test_image.py": 10,
    "cluster/test_hostile.py": 10,
    "fetch/test_large_answers.py": 8,
    "deploy/test_chart.py": 8,
    "cluster/test_prom_real_history.py": 8,
    "test_churn.py": 7,
    "web/test_tls.py": 7,
    "agent/test_usage_methods.py": 6,
    "compose/test_demo.py": 6,
    "browser/test_demo_page.py": 6,
    "top/test_terminal.py": 5,
}
"""Files of five seconds and more, with how many they take: those that mostly wait, and those that keep a core busy."""


def _in_step(files: Iterable[Path], seconds: Mapping[Path, int]) -> Iterator[tuple[float, Path]]:
    """Each with how far its kind is when its turn comes, the longest first: a worker that takes up a long file when the
    rest are done keeps everybody waiting."""
    ordered = sorted(files, key=lambda path: -seconds.get(path, 0))
    ends = list(itertools.accumulate(seconds.get(path, 1) for path in ordered))
    return ((end / ends[-1], path) for path, end in zip(ordered, [0, *ends], strict=False))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest-xdist deals files out in this order. Who waits and who works go in step: so the cores have something to do
    from the first to the last."""
    tests = Path(__file__).parent
    seconds = {tests / name: long for name, long in (WAITING | WORKING).items()}
    files = dict.fromkeys(item.path for item in items)
    waiting = [path for path in files if str(path.relative_to(tests)) in WAITING]
    working = [path for path in files if str(path.relative_to(tests)) not in WAITING]
    turns = sorted([*_in_step(waiting, seconds), *_in_step(working, seconds)], key=lambda turn: turn[0])
    place = {path: number for number, (_, path) in enumerate(turns)}
    items.sort(key=lambda item: place[item.path])


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
