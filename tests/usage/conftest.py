"""A temporary /proc others may enter too, and a clock the test turns."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.usage.containers import ContainerFinder
from tests.simulated import FaultyProc

_IN_MEMORY = "/dev/shm"  # like the real one; on some disks each of 100,000 processes costs a millisecond


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root() -> Iterator[Path]:
    """Not tmp_path: only its owner may enter that, and some tests read as somebody else."""
    path = Path(tempfile.mkdtemp(prefix="podgpu-proc-", dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def proc(root: Path) -> FaultyProc:
    return FaultyProc(root / "proc")


@pytest.fixture
def finder(proc: FaultyProc, clock: Clock) -> ContainerFinder:
    return ContainerFinder(str(proc.root), clock)
