"""Splits the usage of one device in one reading among the workloads.

The shares of the workloads and the unattributed remainder always add up exactly to the value of the
device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

from msgspec import structs

from podgpu.metrics.mig import slices_of_profile
from podgpu.metrics.usage_methods import HIDDEN_USERS, MPS
from podgpu.model import (
    HIDDEN_PID,
    NS,
    Device,
    DeviceTotals,
    DeviceUsage,
    HolderUsage,
    ProcessWaits,
    WaitPart,
    Workload,
    parts_of,
)

K = TypeVar("K")
Owner = Workload | Literal["host", "unknown"]  # "host": not in a pod; "unknown": not determined
SHARE_UNITS = 1_000_000
"""Shares are integers in millionths of a device. The smallest real shares are 1/100."""
_NO_WAIT = HolderUsage(wait_ns=0, wait_min_ns=0, wait_max_ns=0, wait_ratio=0.0)


@dataclass(frozen=True, slots=True)
class OwnedProcess:
    """One process on one device in one reading. Values that are not reported are None."""

    pid: int
    owner: Owner
    busy_ns: int | None  # None for MPS clients
    memory: int | None = None
    only_busy: bool = False  # it ended since the last reading, or is an MPS server


@dataclass(frozen=True, slots=True)
class Division:
    """A value of a device, split among workloads.

    If a workload is not listed, its share is unknown, not 0.
    """

    total: int | None = None  # None if not reported
    parts: Mapping[Workload, int] | None = None  # None if nothing is known about any workload

    @property
    def unattributed(self) -> int | None:
        if self.total is None:
            return None
        return self.total - sum((self.parts or {}).values())

    @property
    def without_series(self) -> int | None:
        """The total minus the shares of workloads that have their own metrics.

        So all metrics add up to the total.
        """
        if self.total is None:
            return None
        parts = self.parts or {}
        return self.total - sum(part for workload, part in parts.items() if workload.has_labels)

    def part(self, workload: Workload) -> int | None:
        if self.parts is None:
            return None
        return self.parts.get(workload)


class Bounds(NamedTuple):
    """The busy time of a workload in nanoseconds. Unknown values are None."""

    least: int | None = None
    most: int | None = None


class AllocatedTime(NamedTuple):
    """What a holder did with its share of a device, in nanoseconds. Unknown values are None."""

    total: int | None = None
    idle: int | None = None
    underused: int | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """The waiting times of the workloads on one device. The defaults are for unknown times."""

    usages: Mapping[Workload, HolderUsage] = field(default_factory=dict)
    of_others: HolderUsage = field(default_factory=HolderUsage)  # if not in `usages`
    pressure_ns: int | None = None  # time in which a workload waited


@dataclass(slots=True)
class _WaitSum:
    estimate: int = 0
    least: int = 0
    most: int = 0
    runners: Counter[Owner] = field(default_factory=Counter)  # workloads for which it waited


@dataclass(frozen=True, slots=True)
class OwnedUsage:
    """The usage of one device, with its holders and the owners of its processes.

    The device is allocatable: a whole GPU or a MIG instance.
    """

    usage: DeviceUsage  # `window_ns` is 0 if the device did not answer
    holders: Mapping[Workload, float | None] = field(default_factory=dict)
    """Share of each holder. None if unknown."""
    processes: tuple[OwnedProcess, ...] | None = None
    """None if not visible, for example without hostPID."""
    mps_busy_ns: int | None = None
    """Busy time of the MPS server. None unless its clients have several owners."""
    by_samples: frozenset[Owner] = frozenset()
    """Owners whose busy time is divided by the driver's samples, because the log hides them."""

    @property
    def device(self) -> Device:
        return self.usage.device

    @property
    def owners(self) -> set[Owner]:
        """The owners of all processes. Empty if processes are not visible."""
        return {process.owner for process in self.processes or ()}

    @property
    def slices(self) -> int:
        return slices_of_profile(self.device.profile) or 1

    def measure(
        self, workloads: Iterable[Workload], busy: Division, elapsed_ns: int
    ) -> tuple[DeviceTotals, dict[Workload, HolderUsage]]:
        """Returns the usage of the device and of the workloads since the last reading.

        `busy`: result of `attribute_busy`.
        """
        window_ns = self.usage.window_ns
        memory = self._attribute_memory()
        processes = self._count_processes()
        bounds = self._bound_busy(busy)
        waits = self._attribute_waits(busy)

        usages = {}
        for workload in workloads:
            busy_ns = busy.part(workload)
            idle_ns = self.compute_idle(workload, busy, elapsed_ns)
            allocated = self._measure_allocated(workload, busy, idle_ns, elapsed_ns)
            least, most = bounds.get(workload, Bounds())
            usages[workload] = structs.replace(
                waits.usages.get(workload, waits.of_others),
                utilization_ratio=compute_ratio(busy_ns, window_ns),
                memory_used_bytes=memory.part(workload),
                processes=processes.get(workload),
                allocated_ns=allocated.total,
                busy_ns=busy_ns,
                busy_min_ns=least,
                busy_max_ns=most,
                idle_ns=idle_ns,
                wasted_idle_ns=allocated.idle,
                wasted_underused_ns=allocated.underused,
            )

        method, method_limit = self._name_method(busy)
        device = DeviceTotals(
            utilization_ratio=compute_ratio(busy.total, window_ns),
            memory_used_bytes=memory.total,
            busy_ns=busy.total,
            unattributed_memory_bytes=None if memory.parts is None else memory.without_series,
            unattributed_busy_ns=busy.without_series,
            method=method,
            method_limit=method_limit,
            pressure_ratio=compute_ratio(waits.pressure_ns, window_ns),
        )
        return device, usages

    def _name_method(self, busy: Division) -> tuple[str, str]:
        """Returns `DeviceTotals.method` and `DeviceTotals.method_limit`."""
        if self.mps_busy_ns is not None:
            return "mps", MPS
        if busy.parts is None:
            return "", self.usage.method_limit
        if not self.by_samples:
            return self.usage.method, self.usage.method_limit

        # If all busy processes were hidden, the log has divided nothing.
        users = {owner for owner, busy_ns in self._list_busy() if busy_ns}
        method = "samples" if users <= self.by_samples else self.usage.method
        return method, HIDDEN_USERS

    def _list_busy(self) -> list[tuple[Owner, int | None]]:
        return [(process.owner, process.busy_ns) for process in self.processes or ()]

    def attribute_busy(self, ended_owner: Workload | None) -> Division:
        """Splits the device's busy time among the workloads.

        The driver does not report processes that have ended. `ended_owner` owned all processes that
        ended since the last reading, so it gets the busy time that no running process accounts for.
        """
        usage = self.usage
        total = usage.busy_ns
        if total is not None:
            total = min(total, usage.window_ns)
        if self.processes is None:
            return Division(total)
        if usage.process_busy_ns is None:
            return self._attribute_to_only_holder(total)

        parts, others = self._sum_by_owner(self._list_busy())
        measured = sum(parts.values()) + others
        # Samples are inexact and processes can run concurrently, so the sum can be too large.
        if measured > usage.window_ns:
            # The key None is for the share of the others.
            scaled = divide_exactly(usage.window_ns, {**parts, None: others})
            return Division(usage.window_ns, {workload: scaled[workload] for workload in parts})

        # The total is at least the sum of its parts.
        if total is None or measured > total:
            return Division(measured, parts)

        # The log of context switches also has processes that have ended. If a process has no busy
        # time, the difference may belong to it.
        if ended_owner in parts and usage.method == "samples" and self._is_all_reported():
            parts[ended_owner] += total - measured
        return Division(total, parts)

    def _attribute_to_only_holder(self, total: int | None) -> Division:
        """Attributes the total to the holder if there is only one, and it owns all processes."""
        is_alone = len(self.holders) == 1 and self.owners <= self.holders.keys()
        if total is None or not is_alone:
            return Division(total)
        return Division(total, dict.fromkeys(self.holders, total))

    def _is_all_reported(self) -> bool:
        return all(process.busy_ns is not None for process in self.processes or ())

    def _attribute_memory(self) -> Division:
        """Splits the memory in use.

        The total is the device's value, or the sum of its processes if that is larger.
        """
        total = self.usage.memory_used
        if self.processes is None:
            return Division(total)

        reported: list[tuple[Owner, int | None]] = []
        for process in self.processes:
            # The driver lists no memory for a process that has ended, or for an MPS server.
            memory = 0 if process.only_busy else process.memory
            reported.append((process.owner, memory))
        parts, _ = self._sum_by_owner(reported)
        if total is not None:
            total = max(total, sum(parts.values()))
        return Division(total, parts)

    def _count_processes(self) -> Mapping[Workload, int]:
        """Counts the running processes of each workload.

        Workloads with an unknown number are omitted.
        """
        if self.processes is None:
            return {}
        running = [(process.owner, int(not process.only_busy)) for process in self.processes]
        counts, _ = self._sum_by_owner(running)
        return counts

    def compute_idle(self, workload: Workload, busy: Division, elapsed_ns: int) -> int | None:
        """Returns the idle time since the last reading.

        It is None if it is uncertain, or if the workload is not a holder. The driver takes about
        six samples per second and attributes each to one process. While another process is busy, a
        process can run for milliseconds without being sampled, so its idle time is uncertain.
        Context switches show idle time exactly.
        """
        part = busy.part(workload)
        if part is None or workload not in self.holders:
            return None
        if part or not self.usage.window_ns:
            return 0

        own_ns = [busy_ns for owner, busy_ns in self._list_busy() if owner == workload]
        if any(own_ns):
            return 0
        # Without a process, or on an idle device, nothing can be missed.
        if own_ns and busy.total and self._is_by_samples(workload):
            return None
        return elapsed_ns

    def _is_by_samples(self, workload: Workload) -> bool:
        """Returns True if the driver's samples divide the workload's busy time."""
        return self.usage.method == "samples" or workload in self.by_samples

    def _measure_allocated(
        self, workload: Workload, busy: Division, idle_ns: int | None, elapsed_ns: int
    ) -> AllocatedTime:
        """Returns the allocated time of a workload, with its idle and its under-used part.

        The under-used time is only as long as is certain. In one reading, the driver's samples are
        too few to split the busy time of the device, so all of it counts as used by the holder.
        The time of context switches counts as used, too.
        """
        share = self.holders.get(workload)
        if share is None:
            return AllocatedTime()

        allocated_ns = round(share * elapsed_ns)
        window_ns = self.usage.window_ns
        if not window_ns or idle_ns is None:
            return AllocatedTime(allocated_ns)
        if idle_ns:
            return AllocatedTime(allocated_ns, allocated_ns, 0)

        used_ns = busy.total or 0
        if not self._is_by_samples(workload):
            used_ns = (busy.part(workload) or 0) + self.usage.switching_ns
        # The driver's window is not exactly as long as the time since the last reading.
        underused_ns = allocated_ns - used_ns * elapsed_ns // window_ns
        return AllocatedTime(allocated_ns, 0, max(0, underused_ns))

    def _bound_busy(self, busy: Division) -> dict[Workload, Bounds]:
        """Returns the minimum and maximum busy time of each workload.

        The attributed time lies between them. An MPS client has no minimum. Its maximum is the busy
        time of the MPS server.
        """
        usage = self.usage
        if self.mps_busy_ns is not None:
            maximum = Bounds(None, self.mps_busy_ns)
            bounds = {}
            for owner, busy_ns in self._list_busy():
                if busy_ns is None and isinstance(owner, Workload):
                    bounds[owner] = maximum
            return bounds

        if not usage.bounded or busy.parts is None or busy.total is None:
            return {}
        if usage.resident_ns is not None:
            return self._bound_by_residency(usage.resident_ns, busy.parts, busy.total)
        return self._bound_by_samples(busy.parts, busy.total)

    def _bound_by_residency(
        self, resident_ns: Mapping[int, int], parts: Mapping[Workload, int], total: int
    ) -> dict[Workload, Bounds]:
        """A process runs only while its context is resident, but may be idle then."""
        owners = self._map_owners()
        resident: Counter[Owner | None] = Counter()
        saving: Counter[Owner | None] = Counter()
        for pid, ns in resident_ns.items():
            owner = owners.get(pid)
            resident[owner] += ns
            saving[owner] += self.usage.saving_ns.get(pid, 0)

        worked = max(0, total - self.usage.switching_ns)
        bounds = {}
        for workload, part in parts.items():
            most = resident[workload]
            if workload in self.by_samples:
                # Some of the hidden processes may belong to the workload.
                most += resident_ns.get(HIDDEN_PID, 0)

            # The others worked for at most this long, so the rest of the work is its own.
            others = resident.total() - resident[workload] + saving[workload]
            least = min(resident[workload], part, max(0, worked - others))
            bounds[workload] = Bounds(least, max(part, min(most, worked)))
        return bounds

    def _bound_by_samples(
        self, parts: Mapping[Workload, int], total: int
    ) -> dict[Workload, Bounds]:
        """Samples are certain only without other users.

        With others, the driver may have attributed to one what another did.
        """
        users = self.owners
        bounds = {}
        for workload, part in parts.items():
            if users == {workload}:
                bounds[workload] = Bounds(part, part)
            elif workload in users:
                bounds[workload] = Bounds(0, total)
            else:
                # None of its processes is listed any more.
                bounds[workload] = Bounds(0, part)
        return bounds

    def _map_owners(self) -> dict[int, Owner]:
        return {process.pid: process.owner for process in self.processes or ()}

    def _attribute_waits(self, busy: Division) -> Waits:
        """Returns the waiting times. A process that waits for its own workload does not count.

        Waiting plus busy time never exceeds the window.
        """
        waits = self.usage.waits
        window_ns = self.usage.window_ns
        if waits is None or not window_ns:
            return Waits()

        usages = {}
        waited_ns = 0
        for workload, total in self._sum_waits(waits).items():
            limit = window_ns - (busy.part(workload) or 0)
            estimate = min(limit, total.estimate)
            parts = divide_exactly(estimate, total.runners)
            usages[workload] = HolderUsage(
                wait_ns=estimate,
                wait_min_ns=min(limit, total.least),
                wait_max_ns=min(limit, total.most),
                wait_ratio=estimate / window_ns,
                waits_for=_name_runners(parts, window_ns),
            )
            waited_ns += estimate

        # It is unknown which of the hidden processes waited.
        for owner in self.by_samples:
            if isinstance(owner, Workload):
                usages[owner] = HolderUsage()
        return Waits(usages, _NO_WAIT, min(waits.pressure_ns, waited_ns, window_ns))

    def _sum_waits(self, waits: ProcessWaits) -> dict[Workload, _WaitSum]:
        """Adds up for how long the processes of each workload waited for others."""
        owners = self._map_owners()
        sums: defaultdict[Workload, _WaitSum] = defaultdict(_WaitSum)
        waited_for_others: Counter[int] = Counter()
        for (pid, runner_pid), ns in waits.pairs.items():
            owner = owners.get(pid)
            runner = owners.get(runner_pid, "host")
            if isinstance(owner, Workload) and runner != owner:
                sums[owner].runners[runner] += ns
                waited_for_others[pid] += ns

        for pid, (estimate, least, most) in waits.processes.items():
            owner = owners.get(pid)
            if not isinstance(owner, Workload):
                continue
            # Also makes the entry of a workload that did not wait.
            total = sums[owner]
            if not estimate:
                continue
            # The rest of the time, it waited for processes of its own workload.
            share = min(1.0, waited_for_others[pid] / estimate)
            total.estimate += int(estimate * share)
            total.least += int(least * share)
            total.most += int(most * share)
        return sums

    def compute_shares(self) -> dict[Workload | None, int]:
        """Returns the share of each workload in millionths of the device.

        The key None has the unallocated share. Shares that add up to more than 1 are scaled down.
        An unknown share counts as 1 for a single holder, and as 0 for one of several holders.
        """
        default = 1.0 if len(self.holders) == 1 else 0.0
        weights: dict[Workload | None, int] = {}
        for holder, share in self.holders.items():
            if share is None:
                share = default
            weights[holder] = round(share * SHARE_UNITS)

        free = SHARE_UNITS - sum(weights.values())
        weights[None] = max(0, free)
        return divide_exactly(SHARE_UNITS, weights)

    def _sum_by_owner(
        self, amounts: Sequence[tuple[Owner, int | None]]
    ) -> tuple[dict[Workload, int], int]:
        """Returns the sum of each workload, and the sum of all other amounts.

        Omits a workload if one of its amounts is not reported. Also omits holders without processes
        if a process has an unknown owner, because the process may belong to one of them.
        """
        users = set()
        holders = set(self.holders)
        unreported = set()
        for owner, amount in amounts:
            if amount is None:
                unreported.add(owner)
            if isinstance(owner, Workload):
                users.add(owner)
            # An amount of 0 does not matter, whoever owns it.
            elif owner == "unknown" and amount != 0:
                holders.clear()

        # Sorted, so that rounding does not depend on the order of a set.
        known = sorted((users | holders) - unreported, key=parts_of)
        parts = dict.fromkeys(known, 0)
        others = 0
        for owner, amount in amounts:
            if isinstance(owner, Workload) and owner in parts:
                parts[owner] += amount or 0
            else:
                others += amount or 0
        return parts, others


def compute_ratio(part: int | None, whole: int) -> float | None:
    if part is not None and whole:
        return part / whole
    return None


def _name_runners(parts: Mapping[Owner, int], window_ns: int) -> tuple[WaitPart, ...]:
    """Returns the workloads that ran while another waited, longest first."""
    runners = []
    for runner, ns in sorted(parts.items(), key=itemgetter(1), reverse=True):
        if not ns:
            continue
        workload = runner if isinstance(runner, Workload) else Workload()
        names = parts_of(workload)
        runners.append(WaitPart(*names, seconds=ns / NS, ratio=ns / window_ns))
    return tuple(runners)


def divide_exactly(total: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Splits an integer in proportion to weights. If all weights are 0, all shares are 0.

    Rounds the running sum, not each share. So the shares add up to the total exactly, and each is
    off by less than 1.
    """
    whole = sum(weights.values())
    if not whole:
        return dict.fromkeys(weights, 0)
    parts: dict[K, int] = {}
    weight_so_far = 0
    divided = 0
    for key, weight in weights.items():
        weight_so_far += weight
        # total * weight_so_far / whole, rounded to the nearest integer
        divided_now = (2 * total * weight_so_far + whole) // (2 * whole)
        parts[key] = divided_now - divided
        divided = divided_now
    return parts
