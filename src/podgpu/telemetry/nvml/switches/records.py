"""Records reads the bytes of the driver's context-switch log and tells who was resident when. Pure.

Every record is checked against the one before it. Whatever does not fit (a number missing, an order that cannot be)
raises Doubt: what is doubtful is not published, and the caller goes back to the driver's samples.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.telemetry.nvml.switches.attribution import Residency, Stay

RECORD = struct.Struct("<HHIBBHIIHBBQ")
"""type, subtype, vardata | tag, vmid, number, context, pid, reserved, GPU instance, compute instance, nanoseconds."""
FECS_RECORD = 2
SWITCHED_IN = 6
SAVED = 7
HIDDEN_PID = 0
"""What a listener without CAP_SYS_ADMIN reads for processes of other users."""
KERNEL_PID = 0xFFFFFFFF
WHOLE_GPU = 255
_NUMBERS = 1 << 16
_LONGEST_SWITCH_NS = 1_000_000
"""A switch takes 80 to 90 µs on an H200. After a pause longer than this nobody was resident."""


class Doubt(Exception):
    """The log cannot be trusted at this point; `reason` is a word for the metric, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Switch(NamedTuple):
    """One process came onto an engine (`resident`) or its context was saved. A tuple: there are thousands a second."""

    resident: bool
    pid: int
    at: int
    instance: int
    """The GPU instance; `WHOLE_GPU` where MIG does not cut it."""
    compute_instance: int


class RecordReader:
    """Reads chunk after chunk of one GPU's log; numbers run on over all of its engines."""

    def __init__(self) -> None:
        self._last = -1

    def read(self, chunk: bytes) -> list[Switch]:
        """Raises Doubt for a number that is missing and for a record that is no context switch."""
        if len(chunk) % RECORD.size:
            raise Doubt("bad_record", f"the context-switch log ends in a part of a record ({len(chunk)} bytes)")
        switches, last = [], self._last
        for kind, _, _, tag, _, number, _, pid, _, instance, compute, at in RECORD.iter_unpack(chunk):
            if kind != FECS_RECORD or (tag != SWITCHED_IN and tag != SAVED):
                raise Doubt("bad_record", f"the context-switch log holds a record of type {kind}, tag {tag}")
            if number != last + 1 and last >= 0 and number != (last + 1) % _NUMBERS:
                lost = (number - last - 1) % _NUMBERS
                raise Doubt("sequence_gap", f"{lost} records are missing in the context-switch log")
            last = number
            switches.append(Switch(tag == SWITCHED_IN, pid, at, instance, compute))
        self._last = last
        return switches


@dataclass(slots=True)
class Timeline:
    """Who was resident on one engine, window after window. It begins at `now`, not knowing who is."""

    now: int
    lead: int = 0
    """Nanoseconds of every stay that are part of the switch: restoring and saving, when no work is done."""
    _coming: deque[Switch] = field(default_factory=deque)
    _last: Switch | None = None
    _resident: Switch | None = None
    _saved_at: int = -_LONGEST_SWITCH_NS

    def add(self, switch: Switch) -> None:
        """Raises Doubt when it does not follow from the one before."""
        last = self._last
        if last is not None:
            if switch.at < last.at:
                raise Doubt("disorder", "the context-switch log runs backwards in time")
            if last.resident == switch.resident:
                raise Doubt("disorder", "the context-switch log has two switches of the same kind in a row")
            if last.resident and last.pid != switch.pid:
                raise Doubt("disorder", "the context-switch log saves a process that was not resident")
        self._last = switch
        self._coming.append(switch)

    def window(self, until: int) -> Residency:
        """All that was from the end of the last window to `until`."""
        since = at = self.now
        stays: list[Stay] = []
        switching = unknown = 0
        coming, lead, resident, saved_at = self._coming, self.lead, self._resident, self._saved_at
        while coming and coming[0].at < until:
            switch = coming.popleft()
            moment = max(switch.at, at)
            if switch.resident:
                if switch.at - saved_at < _LONGEST_SWITCH_NS:
                    switching += moment - at
                else:
                    unknown += moment - at
                resident = switch
            else:
                began = (since if resident is None else resident.at) + lead
                switching += _enter(stays, switch.pid, began, at, moment)
                resident, saved_at = None, switch.at
            at = moment
        if resident is not None:
            switching += _enter(stays, resident.pid, resident.at + lead, at, until)
        elif until - saved_at < _LONGEST_SWITCH_NS:
            switching += until - at
        else:
            unknown += until - at
        self._resident, self._saved_at, self.now = resident, saved_at, until
        return Residency(since, until, stays, switching, unknown)


def _enter(stays: list[Stay], pid: int, works_from: int, since: int, until: int) -> int:
    """Enters a stay without its lead; how much of it the lead was."""
    begin = min(max(since, works_from), until)
    if begin < until:
        stays.append(Stay(pid, works_from, begin, until))
    return begin - since
