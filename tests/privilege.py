"""Runs tests without root privileges, and mounts file systems for them."""

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
    """Runs the block as the user nobody, because root may open every file."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"root cannot become nobody here: {error}")
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def mounted_disk(disk: Path, options: str = "size=1m") -> Iterator[None]:
    """Mounts a small file system. Skips the test if that is not permitted."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextmanager
def mounted_file(path: Path) -> Iterator[None]:
    """Mounts an empty JSON list from another file system on the path, like a single file in a
    pod.
    """
    path.write_text("[]")
    disk = path.with_name("disk")
    with mounted_disk(disk):
        (disk / "file").write_text("[]")
        subprocess.run(["mount", "--bind", disk / "file", path], check=True)
        yield
        subprocess.run(["umount", path], check=True)
