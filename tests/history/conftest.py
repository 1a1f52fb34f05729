"""Where the history's tests keep it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.figures import HandClock


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 2 MiB, where one can be mounted here."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
