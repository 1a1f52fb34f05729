"""Splits the usage of devices among workloads, and adds up the usage of each workload.

The shares of the workloads and the unattributed remainder always add up exactly to the value of the
device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec import structs

from podgpu.known import add_known
from podgpu.metrics.mig import slices_of_gpu, slices_of_profile
from podgpu.metrics.usage_methods import HIDDEN_USERS, MPS
from podgpu.model import (
    HIDDEN_PID,
    NS,
    Device,
    DeviceTotals,
    DeviceUsage,
    Document,
    GpuOrInstance,
    Holder,
    HolderUsage,
    NamespaceUsage,
    ProcessWaits,
    WaitPart,
    Workload,
    WorkloadKey,
    parts_of,
)

K = TypeVar("K")
Owner = Workload | Literal["host", "unknown"]  # "host": not in a pod; "unknown": not determined
_SHARE_UNITS = 1_000_000
"""Shares are integers in millionths of a device. The smallest real shares are 1/100."""
_MAX_CLOSED_ACCOUNTS = 1_000
"""Closed accounts are kept, so that counters continue if a workload returns."""
_MAX_NAMESPACES = 5_000
"""Combinations of namespace and GPU model. The least recently used is evicted."""
_WASTED = ("wasted_idle_ns", "wasted_underused_ns")
_NAMESPACE_COUNTERS = ("allocated_ns", "busy_ns", *_WASTED, "energy_mj")
_DEVICE_COUNTERS = ("busy_ns", "energy_mj", "unattributed_busy_ns", "unattributed_energy_mj")
_MEASURED = ("busy_ns", "busy_min_ns", "busy_max_ns", "idle_ns", *_WASTED, "energy_mj")
_WAITS = ("wait_ns", "wait_min_ns", "wait_max_ns")
COUNTERS = ("allocated_ns", *_MEASURED, *_WAITS)
_NO_WAIT = HolderUsage(wait_ns=0, wait_min_ns=0, wait_max_ns=0, wait_ratio=0.0)


# One reading


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
        memory = self.attribute_memory()
        processes = self.count_processes()
        bounds = self.bound_busy(busy)
        waits = self.attribute_waits(busy)

        usages = {}
        for workload in workloads:
            busy_ns = busy.part(workload)
            idle_ns = self.compute_idle(workload, busy, elapsed_ns)
            allocated = self.measure_allocated(workload, busy, idle_ns, elapsed_ns)
            least, most = bounds.get(workload, Bounds())
            usages[workload] = structs.replace(
                waits.usages.get(workload, waits.of_others),
                utilization_ratio=_ratio(busy_ns, window_ns),
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
            utilization_ratio=_ratio(busy.total, window_ns),
            memory_used_bytes=memory.total,
            busy_ns=busy.total,
            unattributed_memory_bytes=None if memory.parts is None else memory.without_series,
            unattributed_busy_ns=busy.without_series,
            method=method,
            method_limit=method_limit,
            pressure_ratio=_ratio(waits.pressure_ns, window_ns),
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
            # Busy time is attributed only if one holder owns all processes.
            is_alone = len(self.holders) == 1 and self.owners <= self.holders.keys()
            if total is None or not is_alone:
                return Division(total)
            return Division(total, dict.fromkeys(self.holders, total))

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

    def _is_all_reported(self) -> bool:
        return all(process.busy_ns is not None for process in self.processes or ())

    def attribute_memory(self) -> Division:
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

    def count_processes(self) -> Mapping[Workload, int]:
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

    def measure_allocated(
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

    def bound_busy(self, busy: Division) -> dict[Workload, Bounds]:
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

    def attribute_waits(self, busy: Division) -> Waits:
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
            weights[holder] = round(share * _SHARE_UNITS)

        free = _SHARE_UNITS - sum(weights.values())
        weights[None] = max(0, free)
        return divide_exactly(_SHARE_UNITS, weights)

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


# The sum of all readings


@dataclass(slots=True, eq=False)
class Account:
    """Usage of one workload on one device.

    An account is open while the workload holds or uses the device.
    """

    workload: Workload
    opened_at: float  # Unix time
    usage: HolderUsage = field(default_factory=HolderUsage)
    """A counter is None until it has its first value."""
    namespace: tuple[str, str, str] | None = None  # key in `Ledger._namespaces`
    is_holder: bool = False
    has_process: bool = False
    is_measured: bool = True  # False if the driver does not report busy times of its processes
    is_mps_client: bool = False  # if True, only the busy time of the MPS server is known
    idle_streak_ns: int = 0  # measured idle time since the workload was last busy
    unallocated_ns: int = 0  # how long the workload has used the device without an allocation

    def add(self, window: HolderUsage, is_alone: bool) -> None:
        """Adds the usage since the last reading: counters grow, gauges are replaced.

        `is_alone`: no other workload uses the device, so this one does not wait.
        """
        before = self.usage
        self.is_mps_client = window.busy_min_ns is None and window.busy_max_ns is not None

        changes = _sums(before, window, COUNTERS) | self._add_unbounded(window)
        if is_alone and window.wait_ns is None and before.wait_ns is not None:
            changes["wait_ratio"] = 0.0
        self.usage = structs.replace(window, **changes, power_ratio=before.power_ratio)

        if window.busy_ns == 0 and window.idle_ns is not None:
            self.idle_streak_ns += window.idle_ns
        elif window.busy_ns is not None:
            self.idle_streak_ns = 0

    def _add_unbounded(self, window: HolderUsage) -> dict[str, int | None]:
        """Returns the bounds if only the sum or only the window has them.

        Without bounds, the busy time is certain.
        """
        before = self.usage
        bounds: dict[str, int | None] = {}
        if window.busy_max_ns is None and before.busy_max_ns is not None:
            bounds["busy_max_ns"] = add_known(before.busy_max_ns, window.busy_ns)
            # The sum of an MPS client has no minimum.
            if before.busy_min_ns is not None:
                bounds["busy_min_ns"] = add_known(before.busy_min_ns, window.busy_ns)
        elif self.is_mps_client and before.busy_max_ns is None:
            bounds["busy_max_ns"] = add_known(before.busy_ns, window.busy_max_ns)
        return bounds

    def to_holder(self, at: float, unallocated_after_ns: int) -> Holder:
        """Returns workload and usage.

        Sets a counter to None if the workload may have run without being counted.
        """
        unknown: set[str] = set()
        if self.usage.wait_ratio is None:
            unknown.update(_WAITS)
        if not self.is_measured:
            unknown.update(_MEASURED + _WAITS)
        # The maximum of an MPS client is known, although its busy time is not.
        if self.is_mps_client:
            unknown.discard("busy_max_ns")

        changes: dict[str, Any] = dict.fromkeys(unknown)
        changes["counted_since"] = self.opened_at
        if self.is_measured and self.idle_streak_ns:
            changes["idle_since"] = at - self.idle_streak_ns / NS
        if self.unallocated_ns >= unallocated_after_ns:
            changes["unallocated_since"] = at - self.unallocated_ns / NS

        usage = structs.replace(self.usage, **changes)
        return Holder(**structs.asdict(self.workload), usage=usage)


class Ledger:
    """Adds up the usage of all devices of a node. Not thread-safe."""

    def __init__(
        self, max_namespaces: int = _MAX_NAMESPACES, unallocated_after: float = 60.0
    ) -> None:
        """`unallocated_after`: seconds after which use without an allocation is reported.

        Shorter use is normal.
        """
        self._max_namespaces = max_namespaces
        self._unallocated_after_ns = round(unallocated_after * NS)

        # accounts of the last reading, by device key
        self._accounts: dict[str, dict[WorkloadKey, Account]] = {}
        self._closed: dict[tuple[str, WorkloadKey], Account] = {}  # closed accounts, oldest first
        self._devices: dict[str, DeviceTotals] = {}  # includes removed devices, which may return
        self._have_processes: set[str] = set()  # devices whose processes were visible at least once
        self._listed: set[str] = set()  # keys of the devices and GPUs in the last reading

        # by namespace, model, profile; oldest first
        self._namespaces: dict[tuple[str, str, str], NamespaceUsage] = {}
        # last known owners (workload key, "host" or "unknown"), by device key and pid
        self._owners: dict[str, dict[int, WorkloadKey | str]] = {}

        # sums since the last reading of the energy counter, by GPU UUID; see `_add_energy_weights`
        self._energy_weights: dict[str, Counter[Account | None]] = {}

        self._read_at = 0.0  # Unix time of the last reading
        self._counted_since = 0.0  # Unix time of the reading before

    def charge(
        self,
        usages: Mapping[str, Sequence[OwnedUsage]],
        gpus: Mapping[str, DeviceUsage],
        elapsed_ns: int,
        at: float,
        unallocated: Collection[tuple[str, WorkloadKey]] = (),
    ) -> None:
        """Adds the usage since the last call. `at`: Unix time of the reading.

        `usages` maps the UUID of a GPU to its devices (the GPU itself or, in MIG mode, its
        instances). Other devices are removed from the snapshot. If a removed device returns, its
        counters continue. `gpus` maps UUIDs to the usage of GPUs that answered. `unallocated`
        contains (device key, workload key) for each workload that uses a device without an
        allocation.
        """
        self._read_at = at
        self._counted_since = at - elapsed_ns / NS
        self._remove_missing(usages)
        for uuid, devices in usages.items():
            busy = []
            for owned in devices:
                busy.append(self._charge_time(owned, elapsed_ns))
            if uuid in gpus:
                self._add_energy_weights(gpus[uuid], devices, busy, elapsed_ns)
                self._charge_energy(gpus[uuid], devices)

        self._charge_unallocated(unallocated, elapsed_ns)
        self._evict()

    def assume_idle(self, seconds: float) -> None:
        """Counts holders that are idle now as idle for `seconds` longer.

        The demo needs this, because it has a past.
        """
        for accounts in self._accounts.values():
            for account in accounts.values():
                if account.idle_streak_ns and account.is_holder:
                    account.idle_streak_ns += round(seconds * NS)

    def list_devices(self) -> dict[str, GpuOrInstance]:
        """Returns the usage and the users of each device.

        In MIG mode, the GPU itself has only energy, and its instances have all other usage.
        Unattributed busy time and energy are None until the device's processes have been visible.
        """
        devices = {}
        for key in sorted(self._listed):
            totals = self._devices.get(key)  # None for a GPU in MIG mode until its energy is known
            if totals is not None and key not in self._have_processes:
                totals = structs.replace(
                    totals, unattributed_busy_ns=None, unattributed_energy_mj=None
                )

            holders = []
            for _, account in sorted(self._accounts.get(key, {}).items()):
                holders.append(account.to_holder(self._read_at, self._unallocated_after_ns))
            devices[key] = GpuOrInstance(usage=totals, holders=tuple(holders))
        return devices

    def list_namespaces(self) -> tuple[NamespaceUsage, ...]:
        return tuple(usage for _, usage in sorted(self._namespaces.items()))

    def _charge_time(self, owned: OwnedUsage, elapsed_ns: int) -> Division:
        """Adds all usage except energy to the accounts and to the device. Returns the busy time."""
        key = owned.device.key
        accounts = self._update_accounts(owned)
        busy = owned.attribute_busy(self._find_ended_owner(owned))
        device, usages = owned.measure(accounts, busy, elapsed_ns)
        before = self._devices.get(key) or DeviceTotals(counted_since=self._counted_since)
        sums = _sums(before, device, _DEVICE_COUNTERS)
        self._devices[key] = structs.replace(device, **sums, counted_since=before.counted_since)

        has_energy = self._devices.get(owned.device.uuid, device).energy_mj is not None
        is_visible = owned.processes is not None
        is_busy_reported = is_visible and owned.usage.process_busy_ns is not None
        owners = owned.owners
        for workload, usage in usages.items():
            # It has used no known energy until the energy counter is read again.
            if has_energy and usage.busy_ns is not None:
                usage = structs.replace(usage, energy_mj=0)
            account = accounts[workload]
            account.add(usage, is_alone=is_visible and owners <= {workload})
            if is_busy_reported:
                # Without a process, there was nothing to measure.
                was_measured = account.is_measured and not account.has_process
                account.is_measured = usage.busy_ns is not None or was_measured
            self._charge_namespace(account, usage)

        if is_visible:
            self._have_processes.add(key)
        return busy

    def _charge_unallocated(
        self, unallocated: Collection[tuple[str, WorkloadKey]], elapsed_ns: int
    ) -> None:
        for key, accounts in self._accounts.items():
            for name, account in accounts.items():
                if (key, name) in unallocated:
                    account.unallocated_ns += elapsed_ns
                else:
                    account.unallocated_ns = 0

    def _add_energy_weights(
        self,
        gpu: DeviceUsage,
        devices: Sequence[OwnedUsage],
        busy: Sequence[Division],
        elapsed_ns: int,
    ) -> None:
        """Adds what each account counts for when the energy of this time is known.

        Each usage reading has the weight power × time, which `_weigh` splits among the accounts.
        """
        uuid = gpu.device.uuid
        # Without power, energy is read every time, so it is only split by time.
        power = gpu.power_mw or 1
        weight = power * elapsed_ns
        weights = self._energy_weights.setdefault(uuid, Counter())
        weights.update(divide_exactly(weight, self._weigh(gpu.device, devices, busy)))

        if any(owned.processes is not None for owned in devices):
            self._have_processes.add(uuid)

    def _charge_energy(self, gpu: DeviceUsage, devices: Sequence[OwnedUsage]) -> None:
        """Splits the energy since the last reading of the GPU's energy counter among the accounts.

        Accounts that were closed since that reading also get a share.
        """
        if gpu.energy_mj is None:
            return

        uuid = gpu.device.uuid
        parts = divide_exactly(gpu.energy_mj, self._energy_weights.pop(uuid))
        unattributed = gpu.energy_mj
        for account, part in parts.items():
            # The key None is for unattributed energy.
            if account is None:
                continue
            energy_mj = add_known(account.usage.energy_mj, part)
            account.usage = structs.replace(account.usage, energy_mj=energy_mj)
            self._charge_namespace(account, HolderUsage(energy_mj=part))
            if account.workload.has_labels:
                unattributed -= part

        for owned in devices:
            for account in self._accounts[owned.device.key].values():
                power_ratio = _ratio(parts.get(account), gpu.energy_mj)
                account.usage = structs.replace(account.usage, power_ratio=power_ratio)

        device = self._devices.get(uuid) or DeviceTotals(counted_since=self._counted_since)
        window = DeviceTotals(energy_mj=gpu.energy_mj, unattributed_energy_mj=unattributed)
        self._devices[uuid] = structs.replace(device, **_sums(device, window, _DEVICE_COUNTERS))

    def _weigh(
        self, gpu: Device, devices: Sequence[OwnedUsage], busy: Sequence[Division]
    ) -> Counter[Account | None]:
        """Returns the weight of each account: busy time × slices.

        On an idle GPU, the weight is allocated share × slices. If no device answered, returns no
        weights, because the next reading also covers this time.
        """
        by_use = Counter[Account | None]()
        by_share = Counter[Account | None]()
        for owned, division in zip(devices, busy, strict=True):
            if not owned.usage.window_ns:
                continue
            slices = owned.slices
            accounts = self._accounts[owned.device.key]
            shares = owned.compute_shares()
            unheld = _SHARE_UNITS
            for workload, part in (division.parts or {}).items():
                account = accounts[workload.key]
                share = shares.get(workload, 0)
                by_use[account] += part * slices
                by_share[account] += share * slices
                unheld -= share
            by_share[None] += unheld * slices

            unattributed = division.unattributed
            if unattributed is None:
                # It is unknown whether the device was busy, so nobody gets its energy.
                unattributed = owned.usage.window_ns
            by_use[None] += unattributed * slices

        if by_share and gpu.mig_enabled:
            # slices that belong to no MIG instance
            free = slices_of_gpu(gpu.model) - sum(owned.slices for owned in devices)
            by_share[None] += max(0, free) * _SHARE_UNITS
        if any(by_use.values()):
            return by_use
        return by_share

    def _charge_namespace(self, account: Account, window: HolderUsage) -> None:
        key = account.namespace
        if key is None:
            return
        before = self._namespaces.get(key) or self._new_namespace(key)
        sums = _sums(before, window, _NAMESPACE_COUNTERS)
        self._namespaces[key] = structs.replace(before, **sums)

    def _new_namespace(self, key: tuple[str, str, str]) -> NamespaceUsage:
        return NamespaceUsage(*key, allocated_ns=0, counted_since=self._counted_since)

    def _find_ended_owner(self, owned: OwnedUsage) -> Workload | None:
        """Returns the owner of all processes that ended since the last reading.

        Returns None if they have several owners. Remembers the owners for the next reading.
        """
        if owned.processes is None:
            return None

        key = owned.device.key
        owners_before = self._owners.get(key, {})
        owners: dict[int, WorkloadKey | str] = {}
        for process in owned.processes:
            if not process.only_busy:
                owner = process.owner
                owners[process.pid] = owner.key if isinstance(owner, Workload) else owner
        self._owners[key] = owners

        # A process that now has another owner has ended, too.
        ended = {owner for pid, owner in owners_before.items() if owners.get(pid) != owner}
        for holder in owned.holders:
            if ended == {holder.key}:
                return holder
        return None

    def _update_accounts(self, owned: OwnedUsage) -> Mapping[Workload, Account]:
        """Opens the accounts of workloads that hold or use the device, and closes all others."""
        key = owned.device.key
        before = self._accounts.get(key, {})
        is_visible = owned.processes is not None
        users = {owner for owner in owned.owners if isinstance(owner, Workload)}

        accounts: dict[Workload, Account] = {}
        for workload in owned.holders.keys() | users:
            account = self._open(owned, workload, before.get(workload.key))
            account.is_holder = workload in owned.holders
            if is_visible:
                account.has_process = workload in users
            accounts[workload] = account
        open_accounts = {workload.key: account for workload, account in accounts.items()}

        for name, account in before.items():
            if name in open_accounts:
                continue
            # Not visible: assume that workloads without an allocation still run.
            if not is_visible and account.has_process and not account.is_holder:
                open_accounts[name] = account
                accounts[account.workload] = account
            else:
                self._closed[key, name] = account
        self._accounts[key] = open_accounts
        return accounts

    def _open(self, owned: OwnedUsage, workload: Workload, account: Account | None) -> Account:
        """Returns the open account, or reopens or creates one.

        `account`: the open account of this name, if there is one.
        """
        closed = self._closed.pop((owned.device.key, workload.key), None)
        account = _find_same_pod(workload.uid, account, closed)
        if account is None:
            account = Account(workload, self._counted_since)
        elif not workload.uid:
            # This time, the source did not report the UID.
            workload = structs.replace(workload, uid=account.workload.uid)
        account.workload = workload

        if workload.namespace:
            key = workload.namespace, owned.device.model, owned.device.profile
            account.namespace = key
            # Moves it to the end, as the most recently used.
            usage = self._namespaces.pop(key, None) or self._new_namespace(key)
            self._namespaces[key] = usage
        return account

    def _remove_missing(self, usages: Mapping[str, Sequence[OwnedUsage]]) -> None:
        keys: set[str] = set()
        for devices in usages.values():
            keys.update(owned.device.key for owned in devices)
        self._listed = keys | usages.keys()

        # A GPU in MIG mode is listed, but has no accounts.
        for key in self._accounts.keys() - keys:
            for name, account in self._accounts.pop(key).items():
                self._closed[key, name] = account
            self._owners.pop(key, None)

        for uuid in self._energy_weights.keys() - self._listed:
            del self._energy_weights[uuid]

    def _evict(self) -> None:
        """Removes the oldest closed accounts and namespaces if there are too many."""
        for closed in list(self._closed)[:-_MAX_CLOSED_ACCOUNTS]:
            del self._closed[closed]
        for key in list(self._namespaces)[: -self._max_namespaces]:
            del self._namespaces[key]


def _find_same_pod(uid: str, account: Account | None, closed: Account | None) -> Account | None:
    """Returns which of a workload's two accounts is of this pod, or None for a new pod.

    `uid`: empty if it is unknown.
    """
    if account is not None:
        is_other = uid and account.workload.uid not in ("", uid)
        return None if is_other else account
    # Without a UID, a pod may be a new one with the same name.
    if closed is not None and uid and uid == closed.workload.uid:
        return closed
    return None


def _sums(before: Document, window: Document, counters: Iterable[str]) -> dict[str, Any]:
    """Returns the sums of these counters. A counter is None until its first value."""
    return {name: add_known(getattr(before, name), getattr(window, name)) for name in counters}


def _ratio(part: int | None, whole: int) -> float | None:
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
