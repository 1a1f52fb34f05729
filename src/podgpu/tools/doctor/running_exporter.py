"""Finds the exporter that runs in the same container as `podgpu doctor`, and its arguments."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple

_MAX_CMDLINE = 64 * 1024


class RunningExporter(NamedTuple):
    pid: int
    arguments: tuple[str, ...]  # those after `podgpu exporter`. They are never printed.


def find_exporter(proc: str) -> RunningExporter | None:
    """Returns the exporter in this mount namespace, which is that of the container.

    Its pid is not always 1, because with `hostPID` the container sees all processes of the node.
    """
    our_namespace = _read_mount_namespace(proc, "self")
    if our_namespace is None:
        return None

    pids = [int(name) for name in os.listdir(proc) if name.isdecimal()]
    for pid in sorted(pids):
        if _read_mount_namespace(proc, str(pid)) == our_namespace:
            arguments = _find_arguments(_read_cmdline(proc, pid))
            if arguments is not None:
                return RunningExporter(pid, tuple(arguments))

    return None


def _read_mount_namespace(proc: str, process: str) -> str | None:
    try:
        return os.readlink(f"{proc}/{process}/ns/mnt")
    except OSError:
        # The process ended, or it belongs to another user, as those of other containers may.
        return None


def _read_cmdline(proc: str, pid: int) -> list[str]:
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            words = file.read(_MAX_CMDLINE).split(b"\0")
    except OSError:
        return []
    # Each word ends with a zero byte, so nothing follows the last one.
    return [os.fsdecode(word) for word in words[:-1]]


def _find_arguments(words: Sequence[str]) -> Sequence[str] | None:
    """Returns what follows `podgpu exporter`, which may itself be arguments of Python."""
    for following, (program, command) in enumerate(pairwise(words), start=2):
        if PurePath(program).name == "podgpu" and command == "exporter":
            return words[following:]
    return None
