"""Records reads the bytes of the driver's context-switch log and tells who was resident when. Pure.

Every record is checked against the one before it. Whatever does not fit (a number missing, an order that cannot be)
raises Doubt: what is doubtful is not published, and the caller goes back to the driver's samples.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from podgpu.telemetry.switches.attribution import Residency, Stay

RECORD = struct.Struct("<HHIBBHIIHBBQ")
"""type, subtype, vardata | tag, vmid, number, context, pid, reserved, GPU instance, compute instance, nanoseconds."""
FECS_RECORD = 2
SWITCHED_IN = 6
SAVED = 7
HIDDEN_PID = 0
"""What a listener without CAP_SYS_ADMIN reads for processes of other users."""
KERNEL_PID = 0xFFFFFFFF
_NO_INSTANCE = 255
_NUMBERS = 1 << 16
_LONGEST_SWITCH_NS = 1_000_000
"""A switch takes 80 to 90 µs on an H200. After a pause longer than this nobody was resident."""


class Doubt(Exception):
    """The log cannot be trusted at this point; `reason` is a word for the metric, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Switch:
    """One process came onto an engine (`resident`) or its context was saved."""

    resident: bool
    pid: int
    at: int
    instance: int | None
    """The GPU instance; None on a GPU that is not cut by MIG."""
    compute_instance: int | None


class Sequence:
    """Reads chunk after chunk of one GPU's log; numbers run on over all of its engines."""

    def __init__(self) -> None:
        self._last: int | None = None

    def read(self, chunk: bytes) -> Iterator[Switch]:
        """Raises Doubt for a number that is missing and for a record that is no context switch."""
        if len(chunk) % RECORD.size:
            raise Doubt("bad_record", f"the context-switch log ends in a part of a record ({len(chunk)} bytes)")
        for kind, _, _, tag, _, number, _, pid, _, instance, compute, at in RECORD.iter_unpack(chunk):
            if kind != FECS_RECORD or tag not in (SWITCHED_IN, SAVED):
                raise Doubt("bad_record", f"the context-switch log holds a record of type {kind}, tag {tag}")
            if self._last is not None and number != (self._last + 1) % _NUMBERS:
                lost = (number - self._last - 1) % _NUMBERS
                raise Doubt("sequence_gap", f"{lost} records are missing in the context-switch log")
            self._last = number
            yield Switch(tag == SWITCHED_IN, pid, at, _instance(instance), _instance(compute))


@dataclass(slots=True)
class Timeline:
    """Who was resident on one engine, window after window. It begins at `now`, not knowing who is."""

    now: int
    lead: int = 0
    """Nanoseconds of every stay that are part of the switch: restoring and saving, when no work is done."""
    _coming: deque[Switch] = field(default_factory=deque)
    _resident: Switch | None = None
    _saved_at: int | None = None

    def add(self, switch: Switch) -> None:
        """Raises Doubt when it does not follow from the one before."""
        last = self._coming[-1] if self._coming else self._resident
        at = last.at if last is not None else self._saved_at
        if at is not None and switch.at < at:
            raise Doubt("disorder", "the context-switch log runs backwards in time")
        if last is not None and last.resident == switch.resident:
            raise Doubt("disorder", "the context-switch log has two switches of the same kind in a row")
        if last is not None and last.resident and last.pid != switch.pid:
            raise Doubt("disorder", "the context-switch log saves a process that was not resident")
        self._coming.append(switch)

    def window(self, until: int) -> Residency:
        """All that was from the end of the last window to `until`."""
        since, at = self.now, self.now
        stays: list[Stay] = []
        switching = unknown = 0
        while self._coming and self._coming[0].at < until:
            switch = self._coming.popleft()
            moment = max(switch.at, at)
            if switch.resident:
                paused = switch.at - self._saved_at if self._saved_at is not None else _LONGEST_SWITCH_NS
                quick = paused < _LONGEST_SWITCH_NS
                switching, unknown = switching + (moment - at) * quick, unknown + (moment - at) * (not quick)
                self._resident = switch
            else:
                resident = self._resident or Switch(True, switch.pid, since, switch.instance, switch.compute_instance)
                switching += self._stay(stays, resident, at, moment)
                self._resident, self._saved_at = None, switch.at
            at = moment
        if self._resident is not None:
            switching += self._stay(stays, self._resident, at, until)
        else:
            in_a_switch = self._saved_at is not None and until - self._saved_at < _LONGEST_SWITCH_NS
            switching, unknown = switching + (until - at) * in_a_switch, unknown + (until - at) * (not in_a_switch)
        self.now = until
        return Residency(since, until, stays, switching, unknown)

    def _stay(self, stays: list[Stay], resident: Switch, since: int, until: int) -> int:
        """Enters a stay without its lead; how much of it the lead was."""
        works_from = min(max(since, resident.at + self.lead), until)
        if works_from < until:
            stays.append(Stay(resident.pid, resident.at + self.lead, works_from, until))
        return works_from - since


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else number
