"""An atomic file is complete or unchanged, whatever happens."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podgpu.errors import UsageError
from podgpu.files import AtomicFile

WRITE = (
    "import resource, signal, sys; from podgpu.files import AtomicFile;"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
    "AtomicFile(sys.argv[1]).write(b'#' * 5000)"
)


def test_written_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    AtomicFile(str(path)).write(b"a 1\n")
    assert path.read_bytes() == b"a 1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    AtomicFile(str(path), mode=0o600).write(b"a 2\n")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"a 2\n", 0o600)
    assert os.listdir(tmp_path) == ["gpu.prom"]


def test_failed_write_keeps_the_previous_file(tmp_path: Path) -> None:
    """A limit on file sizes simulates a full disk: a part is written, then an error occurs."""
    path = tmp_path / "gpu.prom"
    path.write_bytes(b"old 1\n")
    done = subprocess.run([sys.executable, "-c", WRITE, path], capture_output=True, text=True, check=False)
    assert "the previous file is unchanged" in done.stderr
    assert path.read_bytes() == b"old 1\n"
    assert os.listdir(tmp_path) == ["gpu.prom"]


def test_readers_see_complete_files_even_if_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    code = (
        "import sys; from podgpu.files import AtomicFile; f = AtomicFile(sys.argv[1]); n = 0\n"
        "while True: n += 1; f.write(b'%d\\n' % n * 200_000)"
    )
    for pause in (0.3, 0.31, 0.33):
        writer = subprocess.Popen([sys.executable, "-c", code, path])
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        kill_at = time.monotonic() + pause
        while time.monotonic() < kill_at:
            assert len(set(path.read_bytes().splitlines())) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        lines = path.read_bytes().splitlines()
        assert (len(set(lines)), len(lines)) == (1, 200_000)
    AtomicFile(str(path)).write(b"")
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
