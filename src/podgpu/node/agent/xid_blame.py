"""Finds the process and the container that caused an XID error.

The kernel log names the process of most XIDs. Without it, a process is named only if it is the
single candidate: it worked just before the XID, and has not worked since. Otherwise the cause is
unknown, because a wrong name is worse than none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.metrics.conditions import xid_spec
from podgpu.model import HIDDEN_PID, DeviceUsage, ErrorEvent, Workload, split_key
from podgpu.node.gpu.nvml.kernel_log import KernelXid, parse_slot
from podgpu.node.gpu.nvml.switch_attribution import KERNEL_PID
from podgpu.node.usage.containers import NOT_IN_POD, ProcessOwner

_LINE_BEFORE = 2.0  # maximum time by which the kernel's line is read before NVML's event
_LINE_AFTER = 1.0
_SAME_FAULT = 0.5  # lines within this time may belong to the same event, also those of other XIDs
_DECIDE_AFTER = 3.0  # seconds; by then, all other processes that work have been seen at work
_WORKED_BEFORE = 2.5  # seconds
_WINDOW_SECONDS = 1.2  # length of a usage reading's time window
_EXACT_BEFORE = 1.0
"""The same as `_WORKED_BEFORE` if the log of context switches tells when each process worked.

NVML reports an XID at most 0.27 s after the failed context was last on the engine (H200).
"""
_EXACT_AFTER = 0.05  # maximum error between the clocks of the GPU and this host, in seconds
_GIVE_UP = 30.0  # if the GPU is no longer read
_KEPT_SECONDS = 15.0
_MAX_PENDING = 1000
_MAX_AFFECTED = 16

FindOwner = Callable[[int], ProcessOwner | None]


class Verdict(NamedTuple):
    """The cause of one XID."""

    device: str  # `Device.key`
    xid: int
    at: float
    culprit: Workload | None = None  # None if the cause is unknown
    pid: int = 0
    program: str = ""
    affected: tuple[Workload, ...] = ()  # other workloads that used the device


class _DeviceReading(NamedTuple):
    """The processes of one device in one reading."""

    at: float
    worked: frozenset[int] | None  # None if unknown
    last_worked: Mapping[int, float] | None  # Unix time by pid; None without a log of switches
    owners: Mapping[int, ProcessOwner]


@dataclass(eq=False)
class XidBlame:
    """`add` may be called by any thread, the other methods by the usage loop only."""

    _find_owner: FindOwner  # owner of a process that may have ended
    _lines: Callable[[], Sequence[KernelXid]]
    _wall: Callable[[], float]
    _new: deque[ErrorEvent] = field(default_factory=lambda: deque(maxlen=_MAX_PENDING))
    _pending: list[ErrorEvent] = field(default_factory=list)
    _readings: dict[str, deque[_DeviceReading]] = field(default_factory=dict)
    _slots: dict[str, tuple[int, int, int] | None] = field(default_factory=dict)

    def add(self, events: Iterable[ErrorEvent]) -> None:
        """Adds events whose cause is an application. Others have no culprit."""
        for event in events:
            if xid_spec(event.code).cause == "application":
                self._new.append(event)

    def decide(
        self, usages: Iterable[DeviceUsage], owners: Mapping[int, ProcessOwner]
    ) -> list[Verdict]:
        """Stores a usage reading, and returns the causes of the events that can be decided now."""
        now = self._wall()
        for usage in usages:
            self._store(usage, owners, now)
        while self._new:
            self._pending.append(self._new.popleft())

        verdicts = []
        pending = []
        for event in self._pending:
            verdict = self._decide(event, now)
            if verdict is None:
                pending.append(event)
            else:
                verdicts.append(verdict)
        self._pending = pending[-_MAX_PENDING:]
        return verdicts

    def _store(self, usage: DeviceUsage, owners: Mapping[int, ProcessOwner], now: float) -> None:
        if not usage.window_ns:
            # The next reading covers this time too.
            return
        key = usage.device.key
        self._slots[key] = parse_slot(usage.device.pci_bus_id)
        worked = _find_working(usage)
        pids = {process.pid for process in usage.own_processes}
        pids |= worked or set()
        readings = self._readings.setdefault(key, deque())
        own = {pid: owners.get(pid, NOT_IN_POD) for pid in pids}
        readings.append(_DeviceReading(now, worked, usage.last_resident, own))
        while readings and now - readings[0].at > _KEPT_SECONDS:
            readings.popleft()

    def _decide(self, event: ErrorEvent, now: float) -> Verdict | None:
        """Returns None if the cause may be known later."""
        if now - event.at < _LINE_AFTER:
            return None
        line = self._find_line(event)
        if line is not None:
            return self._blame(event, line.pid, line.program)

        readings = self._readings.get(event.device)
        last_at = readings[-1].at if readings else 0.0
        if last_at - event.at < _DECIDE_AFTER and now - event.at < _GIVE_UP:
            return None
        pid = self._find_sole_candidate(event)
        if pid is None:
            return self._make_unknown(event)
        return self._blame(event, pid)

    def _find_line(self, event: ErrorEvent) -> KernelXid | None:
        """Returns the kernel's line about an event. None if there is none, or it is ambiguous."""
        slot = self._slots.get(event.device)
        _, gi_id = split_key(event.device)
        same = []
        others = []
        for line in self._lines():
            if line.slot != slot or not _is_of_instance(line, gi_id):
                continue
            later = line.at - event.at
            if line.xid == event.code and -_LINE_BEFORE <= later <= _LINE_AFTER:
                same.append(line)
            elif abs(later) <= _SAME_FAULT:
                # An XID 31 can have a line of XID 13 only.
                others.append(line)
        chosen = same or others
        if not chosen:
            return None

        chosen.sort(key=lambda line: abs(line.at - event.at))
        nearest = chosen[0]
        distance = abs(nearest.at - event.at)
        for line in chosen:
            is_close = abs(line.at - event.at) - distance < _SAME_FAULT
            if is_close and not self._have_same_owner(line, nearest):
                return None
        return nearest

    def _have_same_owner(self, one: KernelXid, other: KernelXid) -> bool:
        if one.pid == other.pid:
            return True
        owner = self._find_owner(one.pid)
        other_owner = self._find_owner(other.pid)
        if owner is None or other_owner is None or owner.workload is None:
            return False
        return owner.workload == other_owner.workload

    def _find_sole_candidate(self, event: ErrorEvent) -> int | None:
        """Returns a process of the only workload that can have caused the XID.

        A process whose context failed cannot work afterwards. So the candidates are processes that
        worked before and have not been seen at work since.
        """
        readings = self._readings.get(event.device, ())
        candidates = _list_stopped(readings, event.at)
        if candidates is None:
            candidates = _list_not_at_work(readings, event.at)
        if not candidates:
            return None

        workloads = set()
        for pid in candidates:
            owner = self._find_owner(pid)
            workloads.add(None if owner is None else owner.workload)
        if len(workloads) != 1 or None in workloads:
            return None
        return next((pid for pid, worked in candidates.items() if worked), None)

    def _blame(self, event: ErrorEvent, pid: int, program: str = "") -> Verdict:
        owner = self._find_owner(pid)
        users = self._list_users(event)
        verdict = Verdict(
            event.device, event.code, event.at, pid=pid, program=program, affected=users
        )
        if owner is None or owner.problem:
            # The process is known, but not its container.
            return verdict

        # A process that belongs to no pod and to no user has an empty workload.
        culprit = owner.workload or owner.container or Workload()
        affected = [user for user in users if user != culprit]
        return verdict._replace(
            culprit=culprit, program=program or owner.command, affected=tuple(affected)
        )

    def _make_unknown(self, event: ErrorEvent) -> Verdict:
        return Verdict(event.device, event.code, event.at, affected=self._list_users(event))

    def _list_users(self, event: ErrorEvent) -> tuple[Workload, ...]:
        """Returns the workloads that had processes on the device at the time of the event."""
        users: dict[Workload, None] = {}
        for reading in self._readings.get(event.device, ()):
            if abs(reading.at - event.at) <= _WORKED_BEFORE:
                for pid in sorted(reading.owners):
                    workload = reading.owners[pid].workload
                    if workload is not None:
                        users[workload] = None
        return tuple(users)[:_MAX_AFFECTED]


def _find_working(usage: DeviceUsage) -> frozenset[int] | None:
    """Returns the processes that worked in the time window of a reading. None if unknown."""
    busy_ns = usage.process_busy_ns
    if busy_ns is None or usage.method == "mps":
        return None
    resident_ns = usage.resident_ns or {}
    worked = {pid for pid, ns in busy_ns.items() if ns}
    worked |= {pid for pid, ns in resident_ns.items() if ns}
    return frozenset(worked)


def _list_stopped(readings: Iterable[_DeviceReading], at: float) -> dict[int, bool] | None:
    """Returns the processes that were last at work just before this time, by the log of switches.

    The one that worked last is first. None if the log was not read all the time.
    """
    recent: list[_DeviceReading] = []
    covers_begin = False
    for reading in readings:
        if reading.at < at - _EXACT_BEFORE:
            # The following reading begins where this one ended.
            recent = []
            covers_begin = True
        recent.append(reading)

    last_worked: dict[int, float] = {}
    for reading in recent:
        if reading.last_worked is None:
            return None
        last_worked.update(reading.last_worked)
    if not covers_begin or HIDDEN_PID in last_worked:
        return None

    last_worked.pop(KERNEL_PID, None)
    stopped = []
    for pid, worked_at in last_worked.items():
        if at - _EXACT_BEFORE <= worked_at <= at + _EXACT_AFTER:
            stopped.append((worked_at, pid))
    return {pid: True for _, pid in sorted(stopped, reverse=True)}


def _list_not_at_work(readings: Iterable[_DeviceReading], at: float) -> dict[int, bool]:
    """Returns the processes before this time that were not seen at work since, by readings.

    The value is True if the process worked before. Empty if a reading has no times of processes.
    """
    before = [one for one in readings if -_WORKED_BEFORE <= one.at - at <= 0.0]
    # Their time windows begin after the XID.
    after = [one for one in readings if one.at - at > _WINDOW_SECONDS]
    worked_before = _unite_working(before)
    worked_after = _unite_working(after)
    if worked_before is None or worked_after is None:
        return {}

    candidates = {}
    for reading in before:
        for pid in sorted(reading.owners.keys() - worked_after):
            # A process that never worked did not cause it; then the cause was too short-lived.
            candidates[pid] = pid in worked_before
    return candidates


def _unite_working(readings: Sequence[_DeviceReading]) -> set[int] | None:
    """Returns the processes that worked in any of the readings. None if not all are known."""
    working: set[int] = set()
    for reading in readings:
        if reading.worked is None:
            return None
        working |= reading.worked
    if not readings or HIDDEN_PID in working:
        return None
    return working


def _is_of_instance(line: KernelXid, gi_id: int | None) -> bool:
    """Returns True if the line can be about the instance. None: the GPU itself."""
    return gi_id is None or line.gi_id in (None, gi_id)
