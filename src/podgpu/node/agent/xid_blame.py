"""Finds the process and the container that caused an XID error.

The kernel log names the process of most XIDs. Without it, a process is named only if it is the
single candidate: it worked just before the XID, and has not worked since. Otherwise the cause is
unknown, because a wrong name is worse than none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    culprit: Workload | None = None  # None if the cause, or its container, is unknown
    pid: int = 0  # 0 if the cause is unknown
    program: str = ""
    affected: tuple[Workload, ...] = ()  # other workloads that used the device


class _Candidate(NamedTuple):
    """A process that may have caused an XID, because it has not been seen at work since."""

    pid: int
    has_worked: bool  # before the XID


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
    _list_kernel_xids: Callable[[], Sequence[KernelXid]]
    _wall: Callable[[], float]
    _new: deque[ErrorEvent] = field(default_factory=lambda: deque(maxlen=_MAX_PENDING))
    _pending: list[ErrorEvent] = field(default_factory=list)
    # By device key, oldest reading first.
    _readings: defaultdict[str, deque[_DeviceReading]] = field(
        default_factory=partial(defaultdict, deque)
    )
    # PCI address by device key. None if the driver reports none.
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
        owners_here = {pid: owners.get(pid, NOT_IN_POD) for pid in pids}

        readings = self._readings[key]
        readings.append(_DeviceReading(now, worked, usage.last_resident, owners_here))
        while now - readings[0].at > _KEPT_SECONDS:
            readings.popleft()

    def _decide(self, event: ErrorEvent, now: float) -> Verdict | None:
        """Returns None if the cause may be known later."""
        if now - event.at < _LINE_AFTER:
            # The kernel's line may still follow.
            return None
        line = self._find_line(event)
        if line is not None:
            return self._blame(event, line.pid, line.program)

        readings = self._readings[event.device]
        has_seen_others = bool(readings) and readings[-1].at - event.at >= _DECIDE_AFTER
        if not has_seen_others and now - event.at < _GIVE_UP:
            return None

        pid = self._find_sole_candidate(event)
        if pid is None:
            users = self._list_users(event)
            return Verdict(event.device, event.code, event.at, affected=tuple(users))
        return self._blame(event, pid)

    def _find_line(self, event: ErrorEvent) -> KernelXid | None:
        """Returns the kernel's line about an event. None if there is none, or it is ambiguous."""
        lines = self._list_lines(event)
        if not lines:
            return None

        def measure_distance(line: KernelXid) -> float:
            return abs(line.at - event.at)

        nearest = min(lines, key=measure_distance)
        for line in lines:
            is_close = measure_distance(line) - measure_distance(nearest) < _SAME_FAULT
            if is_close and not self._have_same_owner(line.pid, nearest.pid):
                return None
        return nearest

    def _list_lines(self, event: ErrorEvent) -> list[KernelXid]:
        """Returns the kernel's lines that may be about an event."""
        slot = self._slots.get(event.device)
        _, gi_id = split_key(event.device)
        same_xid = []
        other_xid = []
        for line in self._list_kernel_xids():
            if line.slot != slot or not _is_of_instance(line, gi_id):
                continue
            delay = line.at - event.at
            if line.xid == event.code and -_LINE_BEFORE <= delay <= _LINE_AFTER:
                same_xid.append(line)
            elif abs(delay) <= _SAME_FAULT:
                other_xid.append(line)
        # An XID 31 can have a line of XID 13 only.
        return same_xid or other_xid

    def _have_same_owner(self, pid: int, other_pid: int) -> bool:
        if pid == other_pid:
            return True
        owner = self._find_owner(pid)
        other_owner = self._find_owner(other_pid)
        if owner is None or other_owner is None or owner.workload is None:
            return False
        return owner.workload == other_owner.workload

    def _find_sole_candidate(self, event: ErrorEvent) -> int | None:
        """Returns a process of the only workload that can have caused the XID.

        A process whose context failed cannot work afterwards. So the candidates are processes that
        worked before and have not been seen at work since.
        """
        readings = self._readings[event.device]
        candidates = _list_stopped(readings, event.at)
        # The log of context switches does not cover this time, so less exact readings are used.
        if candidates is None:
            candidates = _list_not_at_work(readings, event.at)

        workloads = set()
        for candidate in candidates:
            owner = self._find_owner(candidate.pid)
            if owner is None or owner.workload is None:
                return None
            workloads.add(owner.workload)
        if len(workloads) > 1:
            return None

        for candidate in candidates:
            if candidate.has_worked:
                return candidate.pid
        # No candidate was seen at work, so one that worked too briefly to be seen was the cause.
        return None

    def _blame(self, event: ErrorEvent, pid: int, program: str = "") -> Verdict:
        """`program`: as the kernel log names it."""
        culprit = None
        affected = self._list_users(event)
        owner = self._find_owner(pid)
        # If the owner is unknown or has a problem, only the process is known, not its container.
        if owner is not None and not owner.problem:
            # A process that belongs to no pod and to no user has an empty workload.
            culprit = owner.workload or owner.container or Workload()
            program = program or owner.command
            affected = [user for user in affected if user != culprit]

        return Verdict(event.device, event.code, event.at, culprit, pid, program, tuple(affected))

    def _list_users(self, event: ErrorEvent) -> list[Workload]:
        """Returns the workloads that had processes on the device at the time of the event."""
        users: dict[Workload, None] = {}  # keys only, in order
        for reading in self._readings[event.device]:
            if abs(reading.at - event.at) <= _WORKED_BEFORE:
                for pid in sorted(reading.owners):
                    workload = reading.owners[pid].workload
                    if workload is not None:
                        users[workload] = None
        return list(users)[:_MAX_AFFECTED]


def _find_working(usage: DeviceUsage) -> frozenset[int] | None:
    """Returns the processes that worked in the time window of a reading. None if unknown."""
    busy_ns = usage.process_busy_ns
    if busy_ns is None or usage.method == "mps":
        return None
    resident_ns = usage.resident_ns or {}
    worked = {pid for pid, ns in busy_ns.items() if ns}
    worked |= {pid for pid, ns in resident_ns.items() if ns}
    return frozenset(worked)


def _list_stopped(readings: Iterable[_DeviceReading], at: float) -> list[_Candidate] | None:
    """Returns the processes that were last at work just before this time, by the log of switches.

    The one that worked last is first. None if the log was not read all the time.
    """
    begin = at - _EXACT_BEFORE
    earlier = [reading for reading in readings if reading.at < begin]
    if not earlier:
        return None
    # The log covers the begin if it was already read at the end of the last earlier reading.
    covering = [earlier[-1]]
    covering += [reading for reading in readings if reading.at >= begin]

    last_worked: dict[int, float] = {}
    for reading in covering:
        if reading.last_worked is None:
            return None
        last_worked.update(reading.last_worked)
    if HIDDEN_PID in last_worked:
        return None

    last_worked.pop(KERNEL_PID, None)
    stopped = []
    for pid, worked_at in last_worked.items():
        if begin <= worked_at <= at + _EXACT_AFTER:
            stopped.append((worked_at, pid))
    stopped.sort(reverse=True)
    return [_Candidate(pid, has_worked=True) for _, pid in stopped]


def _list_not_at_work(readings: Iterable[_DeviceReading], at: float) -> list[_Candidate]:
    """Returns the processes before this time that were not seen at work since, by readings.

    A process can occur twice. Empty if a reading has no times of processes.
    """
    before = [reading for reading in readings if at - _WORKED_BEFORE <= reading.at <= at]
    # Their time windows begin after the XID.
    after = [reading for reading in readings if reading.at - at > _WINDOW_SECONDS]
    worked_before = _unite_working(before)
    worked_after = _unite_working(after)
    if worked_before is None or worked_after is None:
        return []

    candidates = []
    for reading in before:
        for pid in sorted(reading.owners.keys() - worked_after):
            candidates.append(_Candidate(pid, has_worked=pid in worked_before))
    return candidates


def _unite_working(readings: Sequence[_DeviceReading]) -> set[int] | None:
    """Returns the processes that worked in any of the readings.

    None if there are no readings, or if some processes at work are not known.
    """
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
