"""Configuration of all tests: golden files, hypothesis, the order of files, and a guard against
reads of host files.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Every run uses the same examples. PODGPU_EXPLORE=1 draws new ones.
settings.register_profile(
    "podgpu",
    derandomize="PODGPU_EXPLORE" not in os.environ,
    max_examples=100 if "PODGPU_EXPLORE" in os.environ else 50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("podgpu")

# Without bytecode files, every command that a test starts would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Makes tests.nodes importable with `pytest`, as it is with `python -m pytest`.
_TREE = Path(__file__).parents[1]
sys.path.insert(0, str(_TREE))
# In a worktree, the virtual environment has the package of another tree.
_SOURCE = str(_TREE / "src")
sys.path.insert(0, _SOURCE)

from tests.certificates import certificates  # noqa: E402, F401 - a fixture
from tests.host.guard import NOTES, clear_environment, install_hook, set_node_paths  # noqa: E402
from tests.simulated import stop_after_test  # noqa: E402

_notes = Path(tempfile.mkdtemp(prefix="podgpu-tests-")) / "read"
_read: list[str] = []
_KEPT = ("EXPLORE", "BOOKS_RUNS", "KUBE_BIN", "RECEIVERS")
clear_environment(keep=tuple(f"PODGPU_{name}" for name in _KEPT))
set_node_paths(str(_notes.parent))
os.environ[NOTES] = str(_notes)
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "host"), _SOURCE])
atexit.register(shutil.rmtree, _notes.parent)
install_hook(_read.append)


@pytest.fixture(autouse=True)
def _does_not_read_the_host(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    read, _read[:] = _read[:], []
    if _notes.exists():
        read += _notes.read_text(encoding="utf-8").splitlines()
        _notes.unlink()
    if request.node.get_closest_marker("reads_host") is None:
        assert sorted(set(read)) == [], (
            "the test read files of the host: pass the path as an option"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write tests/nodes/*/expected.prom instead of comparing",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs async test functions."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# Duration of slow files in seconds. They start first, because a slow file that starts last delays
# the end.
SLOW = {
    "fleet/test_prometheus_ranges.py": 45,
    "browser/test_fit.py": 40,
    "test_doc_commands.py": 36,
    "agent/test_gpu_faults.py": 34,
    "browser/test_broken.py": 28,
    "deploy/test_alerts_live.py": 27,
    "agent/test_usage_methods.py": 24,
    "cli/test_demo.py": 23,
    "faults/test_process.py": 23,
    "deploy/test_chart.py": 22,
    "browser/test_demo_page.py": 20,
    "endurance/test_soak.py": 20,
    "test_bench.py": 18,
    "deploy/test_rules.py": 16,
    "agent/test_health.py": 15,
    "cli/test_cluster.py": 14,
    "agent/test_kubelet_faults.py": 13,
    "fleet/test_prometheus_live.py": 13,
    "cli/test_ill_api_server.py": 12,
    "test_billing.py": 12,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    items.sort(key=lambda item: -SLOW.get(str(item.path.relative_to(tests)), 0))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restores the logging configuration, which commands change."""
    server = logging.getLogger("aiohttp.server")
    handlers, level, filters = logging.root.handlers[:], logging.root.level, server.filters[:]
    yield
    logging.root.handlers[:], server.filters[:] = handlers, filters
    logging.root.setLevel(level)


class _TrackedConnection(sqlite3.Connection):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _open_databases.add(self)

    def close(self) -> None:
        super().close()
        _open_databases.discard(self)


_open_databases: weakref.WeakSet[_TrackedConnection] = weakref.WeakSet()
_connect = sqlite3.connect


def _connect_tracked(*args: Any, **options: Any) -> sqlite3.Connection:
    return _connect(*args, **{"factory": _TrackedConnection, **options})


sqlite3.connect = _connect_tracked  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _closes_databases() -> Iterator[None]:
    """Fails a test that leaves a connection to SQLite open.

    Python 3.13 and later warn about these too, but only when the connection is collected, which
    may be in another test.
    """
    before = set(_open_databases)
    yield
    left_open = set(_open_databases) - before
    for connection in left_open:
        connection.close()
    assert not left_open, "close every HistoryStore, and stop every HistoryRecorder"


@pytest.fixture(autouse=True)
def _stop_nodes(_closes_databases: None) -> Iterator[None]:
    """Stops the simulated nodes that the test created. Those of a module's fixture were created
    before, and stay.
    """
    first = len(stop_after_test)
    yield
    while len(stop_after_test) > first:
        stop_after_test.pop()()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a temporary folder with a short name, because tmp_path is too long for a socket
    path.
    """
    path = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    yield path
    shutil.rmtree(path)
