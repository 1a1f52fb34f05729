"""Fixtures: a simulated /proc, a clock, and a ContainerFinder that uses both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.node.usage.containers import ContainerFinder
from tests.nodes.clock import FakeClock
from tests.simulated import FaultyProc


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def root() -> Iterator[Path]:
    """Yields a folder that all users may read, because some tests change the user. tmp_path is
    private.
    """
    path = Path(tempfile.mkdtemp(prefix="podgpu-proc-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def proc(root: Path) -> FaultyProc:
    return FaultyProc(root / "proc")


@pytest.fixture
def finder(proc: FaultyProc, clock: FakeClock) -> ContainerFinder:
    return ContainerFinder(str(proc.root), clock.monotonic)
