"""Files that are written atomically."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from podgpu.errors import UsageError
from podgpu.files import AtomicFile


def test_written_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    AtomicFile(str(path)).write(b"a 1\n")
    assert path.read_bytes() == b"a 1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    AtomicFile(str(path), mode=0o600).write(b"a 2\n")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"a 2\n", 0o600)
    assert os.listdir(tmp_path) == ["gpu.prom"]


def test_refused_paths(tmp_path: Path) -> None:
    (tmp_path / "link.prom").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe.prom")
    for name in (".", "link.prom", "pipe.prom", "missing/gpu.prom"):
        with pytest.raises(UsageError, match="--out"):
            AtomicFile(str(tmp_path / name))


def test_later_symbolic_link_is_replaced(tmp_path: Path) -> None:
    file = AtomicFile(str(tmp_path / "gpu.prom"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    file.path.symlink_to(victim)
    file.write(b"a 1\n")
    assert victim.read_bytes() == b"mine"
    assert not file.path.is_symlink()
