"""This module reads the bytes of the driver's context-switch log and tells who was resident when. Pure.

Every record is checked against the one before it. Whatever does not fit (a number missing, an order that cannot be)
raises Doubt: what is doubtful is not published, and the caller goes back to the driver's samples.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from podgpu.gpu.nvml.switches.attribution import Residency, Stay

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
_LAST_NUMBER = _NUMBERS - 1
_LONGEST_SWITCH_NS = 1_000_000
"""A switch takes 80 to 90 µs on an H200. After a pause longer than this nobody was resident."""


class Doubt(Exception):
    """The log cannot be trusted at this point; `reason` is a word for the metric, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Switch = tuple[bool, int, int, int, int]
"""A process came onto an engine (True) or its context was saved; its pid; when; the GPU instance (`WHOLE_GPU` where MIG
does not cut it) and the compute instance. A bare tuple: there are thousands a second."""


class RecordReader:
    """Reads chunk after chunk of one GPU's log; numbers run on over all of its engines."""

    def __init__(self) -> None:
        self._next = -1

    def read(self, chunk: bytes) -> Iterator[Switch]:
        """To be read to its end. Raises Doubt for a number that is missing, and for what is no context switch."""
        if len(chunk) % RECORD.size:
            raise Doubt("bad_record", f"the context-switch log ends in a part of a record ({len(chunk)} bytes)")
        due = self._next
        for kind, _, _, tag, _, number, _, pid, _, instance, compute, at in RECORD.iter_unpack(chunk):
            if kind != FECS_RECORD or (tag != SWITCHED_IN and tag != SAVED):
                raise Doubt("bad_record", f"the context-switch log holds a record of type {kind}, tag {tag}")
            if number != due and due >= 0:
                lost = (number - due) % _NUMBERS
                raise Doubt("sequence_gap", f"{lost} records are missing in the context-switch log")
            due = number + 1 if number < _LAST_NUMBER else 0
            yield tag == SWITCHED_IN, pid, at, instance, compute
        self._next = due


@dataclass(slots=True)
class Timeline:
    """Who was resident on one engine, window after window. It begins at `now`, not knowing who is."""

    now: int
    lead: int = 0
    """Nanoseconds of every stay that are part of the switch: restoring and saving, when no work is done."""
    slice_work: int = 0
    """What is worked in a stay that ended because its time slice was over, for whoever divides the windows."""
    _coming: array[int] = field(default_factory=partial(array, "Q"))
    """When, of the switches that lie past the end of the last window. Numbers only: there may be 10,000 a second."""
    _who: array[int] = field(default_factory=partial(array, "q"))
    """Of each, the process that was switched in, or `~` the one that was saved."""
    _last: tuple[bool, int, int] | None = None
    _resident: tuple[int, int] | None = None
    """The process, and when it was switched in."""
    _saved_at: int = -_LONGEST_SWITCH_NS

    def add(self, resident: bool, pid: int, at: int) -> None:
        """Raises Doubt when it does not follow from the one before."""
        if self._last is not None:
            was_resident, last_pid, last_at = self._last
            if at < last_at:
                raise Doubt("disorder", "the context-switch log runs backwards in time")
            if was_resident == resident:
                raise Doubt("disorder", "the context-switch log has two switches of the same kind in a row")
            if was_resident and last_pid != pid:
                raise Doubt("disorder", "the context-switch log saves a process that was not resident")
        self._last = resident, pid, at
        self._coming.append(at)
        self._who.append(pid if resident else ~pid)

    def window(self, until: int) -> Residency:
        """All that was from the end of the last window to `until`."""
        since = at = self.now
        stays: list[Stay] = []
        switching = unknown = 0
        lead, on_engine, saved_at = self.lead, self._resident, self._saved_at
        count = bisect_left(self._coming, until)
        for switched_at, who in zip(self._coming[:count], self._who[:count], strict=True):
            moment = switched_at if switched_at > at else at
            if who >= 0:
                if switched_at - saved_at < _LONGEST_SWITCH_NS:
                    switching += moment - at
                else:
                    unknown += moment - at
                on_engine = who, switched_at
            else:
                works_from = (since if on_engine is None else on_engine[1]) + lead
                begin = works_from if works_from > at else at
                if begin < moment:
                    stays.append(Stay(~who, works_from, begin, moment))
                    switching += begin - at
                else:
                    switching += moment - at
                on_engine, saved_at = None, switched_at
            at = moment
        if on_engine is not None:
            works_from = on_engine[1] + lead
            begin = min(max(at, works_from), until)
            switching += begin - at
            if begin < until:
                stays.append(Stay(on_engine[0], works_from, begin, until))
        elif until - saved_at < _LONGEST_SWITCH_NS:
            switching += until - at
        else:
            unknown += until - at
        del self._coming[:count], self._who[:count]
        self._resident, self._saved_at, self.now = on_engine, saved_at, until
        return Residency(since, until, stays, switching, unknown, self.slice_work)
