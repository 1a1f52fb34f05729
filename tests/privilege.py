"""Permissions and mounts: what is forbidden is seen as nobody, because root may open everything."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


@contextmanager
def without_privilege() -> Iterator[None]:
    """Effective ids are the whole process's on Linux."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"root opens everything, and cannot become nobody here: {error}")
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def mounted_file(path: Path) -> Iterator[None]:
    """An empty JSON list that is mounted on the path from another file system, like a single file in a pod."""
    disk = path.with_name("disk")
    disk.mkdir()
    path.write_text("[]")
    command = ["mount", "-t", "tmpfs", "tmpfs", disk]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        (disk / "file").write_text("[]")
        subprocess.run(["mount", "--bind", disk / "file", path], check=True)
        yield
        subprocess.run(["umount", path], check=True)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
