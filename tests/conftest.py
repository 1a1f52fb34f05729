"""The flag that rewrites the golden files, short temporary folders for sockets, and how properties are explored."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
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

# So that `pytest` finds tests.nodes and tests.serve as `python -m pytest` does.
sys.path.insert(0, str(Path(__file__).parents[1]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write what comes out to tests/nodes/*/expected.prom instead of comparing",
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: pytest's names are too long for a socket path."""
    path = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    yield path
    shutil.rmtree(path)
