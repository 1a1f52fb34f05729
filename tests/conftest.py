"""The flag that rewrites the golden files, and short temporary folders for sockets."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
