"""Only one exporter of a node writes, also if two share a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from podgpu.writers.node_lock import NodeLock


def test_one_of_two_has_the_lock_until_it_ends(tmp_path: Path) -> None:
    first, second = NodeLock(str(tmp_path)), NodeLock(str(tmp_path))
    assert first.acquire()
    assert first.acquire(), "it has the lock already"
    assert not second.acquire()
    assert second.problem == "", "this is normal"
    first.release()
    assert second.acquire()
    assert not first.acquire()
    second.release()


def test_waiting_for_the_lock_opens_no_more_files(tmp_path: Path) -> None:
    first, second = NodeLock(str(tmp_path)), NodeLock(str(tmp_path))
    assert first.acquire()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert not second.acquire()
    assert len(os.listdir("/proc/self/fd")) == before
    first.release()


@pytest.mark.parametrize(
    ("name", "reason"), [("file", "Not a directory"), ("missing", "No such file or directory")]
)
def test_without_its_directory_nobody_has_the_lock(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    lock = NodeLock(str(tmp_path / name))
    assert not lock.acquire()
    assert lock.problem == f"cannot open {tmp_path / name}: {reason}"
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    assert lock.acquire()
    assert lock.problem == ""
    lock.release()
