"""The file is whole or as it was, whatever happens."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.atomic_file import AtomicFile, OutputError, Owner
from podgpu.errors import UsageError

WRITE = (
    "import resource, signal, sys; from podgpu.atomic_file import AtomicFile;"
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_written_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    AtomicFile(str(path), owner=Owner(65534, 12)).write(b"a 1\n")
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 12)


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    """The kernel's limit on file sizes stands for a full disk: part is written, then an error comes."""
    path = tmp_path / "gpu.prom"
    path.write_bytes(b"old 1\n")
    done = subprocess.run([sys.executable, "-c", WRITE, path], capture_output=True, text=True, check=False)
    assert "the previous one is still there" in done.stderr
    assert path.read_bytes() == b"old 1\n"
    assert os.listdir(tmp_path) == ["gpu.prom"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_full_disk(full_disk: Path) -> None:
    path = full_disk / "gpu.prom"
    file = AtomicFile(str(path))
    file.write(b"old 1\n")
    with pytest.raises(OutputError, match="No space left on device"):
        file.write(b"#" * 200_000)
    assert path.read_bytes() == b"old 1\n"
    assert os.listdir(full_disk) == ["gpu.prom"]
    file.write(b"new 1\n")
    assert path.read_bytes() == b"new 1\n"


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    code = (
        "import sys; from podgpu.atomic_file import AtomicFile; f = AtomicFile(sys.argv[1]); n = 0\n"
        "while True: n += 1; f.write(b'%d\\n' % n * 200_000)"
    )
    for pause in (0.3, 0.31, 0.33, 0.37):
        writer = subprocess.Popen([sys.executable, "-c", code, path])
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(pause)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        lines = path.read_bytes().splitlines()
        assert (len(set(lines)), len(lines)) == (1, 200_000)
    for left in tmp_path.glob(".gpu.prom.*"):
        os.utime(left, (0, 0))
    AtomicFile(str(path))
    assert os.listdir(tmp_path) == ["gpu.prom"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    file = AtomicFile(str(tmp_path / "gpu.prom"))
    file.write(b"0\n" * 50_000)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            file.write(b"%d\n" % (number % 10) * 50_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            lines = file.path.read_bytes().splitlines()
            assert (len(set(lines)), len(lines)) == (1, 50_000)
    finally:
        stop.set()
        writer.join()


def test_places_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link.prom").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe.prom")
    for name in (".", "link.prom", "pipe.prom", "missing/gpu.prom"):
        with pytest.raises(UsageError, match="--out"):
            AtomicFile(str(tmp_path / name))


def test_a_link_put_there_later_is_replaced_and_not_followed(tmp_path: Path) -> None:
    file = AtomicFile(str(tmp_path / "gpu.prom"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    file.path.symlink_to(victim)
    file.write(b"a 1\n")
    assert victim.read_bytes() == b"mine"
    assert not file.path.is_symlink()
