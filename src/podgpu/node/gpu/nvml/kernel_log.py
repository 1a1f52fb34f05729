"""Reads XID errors from the kernel log, which names the process that caused most of them.

NVML reports an XID without its process. The log is read from /dev/kmsg. In a container without this
device, it is read with the system call syslog, which needs CAP_SYSLOG, but no device.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from podgpu.errors import SourceError

_log = logging.getLogger(__name__)
DEFAULT_PATH = "/dev/kmsg"
_WAIT_SECONDS = 0.1
"""Interval of reading the log without /dev/kmsg. A process that failed exits soon afterwards."""
_MAX_WAIT_SECONDS = 0.5  # for a record, before `stopped` is checked
_MAX_RECORD = 8192  # the kernel's limit of a record
_MAX_RECORDS = 10_000  # in one turn, because a broken GPU may log without end
_TAIL_BYTES = 64 * 1024  # of the system call
_MAX_KEPT = 1024  # XID lines
_SYSLOG_ACTION_READ_ALL = 3
_ADVICE = (
    "give podgpu CAP_SYSLOG (chart: exporter.xidBlame=true), "
    "or run it as root where /dev/kmsg exists"
)
# prio,sequence,microseconds,flags;text
_RECORD = re.compile(r"(\d+),\d+,\d+,[^;]*;(.*)")
# <prio>[seconds][caller] text, often without the caller
_LINE = re.compile(r"<(\d+)>\[ *(\d+\.\d+)\](?:\[[^]]*\])? (.*)")
# Some lines of an XID have no pid, or `<unknown>`.
_XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)(?:\.\d+)?"
    r"(?: GPU-I:(\d+))?[^)]*\): (\d+), pid='?(\d+)'?(?:, name=([^,]{1,64}))?"
)

PciSlot = tuple[int, int, int]  # domain, bus, device


class KernelXid(NamedTuple):
    """An XID line of the kernel log that names a process."""

    slot: PciSlot
    gi_id: int | None  # MIG GPU instance, if the line names one
    xid: int
    pid: int
    program: str
    at: float  # Unix time at which podgpu read the line


def parse_xid(text: str, at: float) -> KernelXid | None:
    """Parses the text of a record. Returns None if it is no XID with a process.

    `at`: see `KernelXid`.
    """
    match = _XID.match(text)
    if match is None:
        return None

    domain, bus, device, instance, xid, pid, program = match.groups(default="")
    slot = int(domain, 16), int(bus, 16), int(device, 16)
    gi_id = int(instance) if instance else None
    return KernelXid(slot, gi_id, int(xid), int(pid), program.strip(), at)


def parse_slot(pci_bus_id: str) -> PciSlot | None:
    """Parses a PCI bus id such as 00000000:04:00.0."""
    with suppress(ValueError):
        domain, bus, device_and_function = pci_bus_id.split(":")
        device, _, _ = device_and_function.partition(".")
        return int(domain, 16), int(bus, 16), int(device, 16)
    return None


class KernelLog:
    """Keeps the newest XID lines. `poll` is called by one thread, `lines` by any."""

    def __init__(self, path: str, wall: Callable[[], float]) -> None:
        """Begins at the end of the log. Raises SourceError if the log cannot be read."""
        self._wall = wall
        self._lines: deque[KernelXid] = deque(maxlen=_MAX_KEPT)
        self._fd: int | None = None  # None if the log is read with the system call
        self._last_stamp = 0.0  # time of the newest line, in seconds since boot

        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            if path != DEFAULT_PATH:
                raise SourceError("kernel_log", f"{path} cannot be read: {e.strerror}") from e
            # Skips the lines until now.
            self._read_tail()
        else:
            # Fails for a pipe, which has no old lines.
            with suppress(OSError):
                os.lseek(self._fd, 0, os.SEEK_END)

    @property
    def lines(self) -> list[KernelXid]:
        return list(self._lines)

    def poll(self) -> list[KernelXid]:
        """Reads the new records, and returns their XID lines."""
        new = []
        for text in self._read_new():
            line = parse_xid(text, self._wall())
            if line is not None:
                new.append(line)

        self._lines.extend(new)
        return new

    def run(self, stopped: threading.Event, handle: Callable[[KernelXid], object]) -> None:
        """Reads the log until `stopped` is set. Calls `handle` for each XID line."""
        while not stopped.is_set():
            for line in self.poll():
                handle(line)
            if self._fd is not None:
                select.select([self._fd], [], [], _MAX_WAIT_SECONDS)
            # `select` returns at once for a regular file, which would make this a busy loop.
            stopped.wait(_WAIT_SECONDS)
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _read_new(self) -> Iterator[str]:
        if self._fd is None:
            yield from self._read_tail()
            return

        for _ in range(_MAX_RECORDS):
            try:
                data = os.read(self._fd, _MAX_RECORD)
            except BrokenPipeError:
                # Records were overwritten before podgpu read them. The next one is still there.
                continue
            except OSError:
                # There is no new record.
                return
            # The end of a regular file.
            if not data:
                return

            for line in data.decode(errors="replace").splitlines():
                match = _RECORD.match(line)
                if match is not None and _is_from_kernel(match[1]):
                    yield match[2]

    def _read_tail(self) -> list[str]:
        """Returns the text of the lines that were logged since the last call."""
        texts = []
        newest = self._last_stamp
        for line in _read_syslog().splitlines():
            match = _LINE.match(line)
            if match is None:
                continue

            stamp = float(match[2])
            newest = max(newest, stamp)
            if stamp > self._last_stamp and _is_from_kernel(match[1]):
                texts.append(match[3])

        self._last_stamp = newest
        return texts


def _is_from_kernel(priority: str) -> bool:
    """Returns False for a line that a program has written: only the kernel has the facility 0."""
    return int(priority) < 8


def _read_syslog() -> str:
    """Returns the end of the kernel log. Raises SourceError if that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_TAIL_BYTES)
    size = libc.klogctl(_SYSLOG_ACTION_READ_ALL, buffer, _TAIL_BYTES)
    if size < 0:
        why = os.strerror(ctypes.get_errno())
        raise SourceError("kernel_log", f"the kernel log cannot be read ({why}): {_ADVICE}")
    return buffer.raw[:size].decode(errors="replace")


def open_kernel_log(path: str, wall: Callable[[], float]) -> KernelLog | None:
    """Opens the kernel log. Returns None if `path` is `none`, or if the log cannot be read.

    This is no error: then most XIDs have no known cause.
    """
    if path == "none":
        return None
    try:
        return KernelLog(path, wall)
    except SourceError as e:
        _log.info("%s", e)
        return None
