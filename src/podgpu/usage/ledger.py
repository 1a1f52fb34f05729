"""Adds up the usage of workloads, devices and namespaces since the exporter started.

`attribution` divides the usage of a single turn. The ledger adds up the turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs

from podgpu.model import (
    NS,
    HolderUsage,
    NamespaceUsage,
    SlotUsage,
    UsageMethod,
    WaitPart,
    Workload,
    WorkloadKey,
    parts_of,
)
from podgpu.usage.attribution import (
    SHARE_UNITS,
    DeviceTurn,
    Division,
    GpuTurn,
    Owner,
    Waiting,
    attribute_busy,
    attribute_memory,
    attribute_waits,
    bound_busy,
    compute_idle,
    count_processes,
    divide_by_share,
    divide_exactly,
)

MAX_CLOSED_ACCOUNTS = 1_000  # kept, because counters continue if a workload returns after a source lost it
MAX_NAMESPACES = 5_000  # combinations of namespace and GPU model; the least recently used is evicted


class UsageCounters(Struct):
    """Counters of a workload or a namespace, named as in HolderUsage. Each is None until its first value."""

    allocated_ns: int | None = None
    busy_ns: int | None = None
    idle_ns: int | None = None
    energy_mj: int | None = None
    busy_min_ns: int | None = None
    busy_max_ns: int | None = None
    wait_ns: int | None = None
    wait_min_ns: int | None = None
    wait_max_ns: int | None = None

    def add(self, increment: UsageCounters) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, _plus(getattr(self, name), getattr(increment, name)))


@dataclass(slots=True, eq=False)
class Account:
    """Usage of one workload on one device, while it holds the device or has a process there."""

    workload: Workload
    counters: UsageCounters = field(default_factory=UsageCounters)
    namespace: UsageCounters = field(default_factory=UsageCounters)  # shared by all accounts of the namespace and model
    is_holder: bool = False
    has_process: bool = False
    is_measured: bool = True  # False if the driver does not report busy times of its processes
    memory: int | None = None
    processes: int | None = None
    utilization: float | None = None  # busy fraction of the last turn
    power_ratio: float | None = None  # fraction of the GPU's energy between the last two readings
    idle_streak_ns: int | None = None  # idle time since it was last busy
    is_mps_client: bool = False  # its busy time is not known, only that of the MPS server
    wait_ratio: float | None = None  # part of the last turn in which it waited; None if unknown
    waits_for: tuple[WaitPart, ...] = ()
    unallocated_ns: int = 0  # time for which it has used the device without an allocation

    def charge(self, increment: UsageCounters) -> None:
        """Adds to the counters of the workload and of its namespace."""
        self.counters.add(increment)
        self.namespace.add(increment)
        may_have_run = increment.busy_ns is not None and (increment.busy_ns > 0 or increment.idle_ns is None)
        self.idle_streak_ns = 0 if may_have_run else _plus(self.idle_streak_ns, increment.idle_ns)

    def extend_bounds(self, bounds: tuple[int | None, int] | None, part: int | None) -> tuple[int | None, int | None]:
        """Returns the increments of the bounds. Without new bounds, existing ones increase by the attributed time."""
        if bounds is not None and bounds[0] is None and self.counters.busy_max_ns is None:
            return None, bounds[1] + (self.counters.busy_ns or 0)
        if bounds is None and self.counters.busy_max_ns is not None:
            return part if self.counters.busy_min_ns is not None else None, part
        return bounds or (None, None)

    def update_waits(
        self, turn: DeviceTurn, workload: Workload, waiting: Waiting | None
    ) -> tuple[int | None, int | None, int | None]:
        """Sets the waiting times of the last turn and returns the increments of the counters.

        Without context switches the waiting time is unknown, except that a workload does not wait if it is alone on the
        device.
        """
        window_ns = turn.usage.window_ns
        self.waits_for, self.wait_ratio = (), None
        if waiting is None or not window_ns:
            is_alone = turn.processes is not None and {process.owner for process in turn.processes} <= {workload}
            if self.counters.wait_ns is None or not is_alone:
                return None, None, None
            self.wait_ratio = 0.0
            return 0, 0, 0
        figures = waiting.workloads.get(workload, (0, 0, 0))
        self.wait_ratio = figures[0] / window_ns
        runners = sorted(waiting.pairs.get(workload, {}).items(), key=lambda pair: -pair[1])
        self.waits_for = tuple(_make_wait_part(owner, ns / window_ns) for owner, ns in runners if ns)
        return figures

    def to_usage(self, at: float, unallocated_after_ns: int) -> HolderUsage:
        """Omits counters that are not being updated while the workload may be running."""
        counters = self.counters
        if not self.is_measured:
            busy_max_ns = counters.busy_max_ns if self.is_mps_client else None
            counters = UsageCounters(counters.allocated_ns, busy_max_ns=busy_max_ns)
        if self.wait_ratio is None:
            counters = structs.replace(counters, wait_ns=None, wait_min_ns=None, wait_max_ns=None)
        streak_ns = self.idle_streak_ns if self.is_measured else None
        return HolderUsage(
            **structs.asdict(counters),
            utilization_ratio=self.utilization,
            memory_used_bytes=self.memory,
            processes=self.processes,
            wait_ratio=self.wait_ratio,
            waits_for=self.waits_for,
            power_ratio=self.power_ratio,
            idle_since=at - streak_ns / NS if streak_ns else None,
            unallocated_since=at - self.unallocated_ns / NS if self.unallocated_ns >= unallocated_after_ns else None,
        )


@dataclass(slots=True)
class DeviceAccount:
    """Usage of one device, and the part of it that no workload with series has."""

    busy_ns: int | None = None
    unattributed_busy_ns: int | None = None
    energy_mj: int | None = None
    unattributed_energy_mj: int | None = None
    memory: Division = field(default_factory=Division)
    utilization: float | None = None  # busy fraction of the last turn
    method: UsageMethod | None = None
    pressure_ratio: float | None = None
    has_seen_processes: bool = False  # until then, unattributed figures are not reported

    def to_usage(self) -> SlotUsage:
        return SlotUsage(
            utilization_ratio=self.utilization,
            memory_used_bytes=self.memory.total,
            busy_ns=self.busy_ns,
            energy_mj=self.energy_mj,
            unattributed_memory_bytes=None if self.memory.parts is None else self.memory.without_series,
            unattributed_busy_ns=self.unattributed_busy_ns if self.has_seen_processes else None,
            unattributed_energy_mj=self.unattributed_energy_mj if self.has_seen_processes else None,
            method=self.method or "",
            pressure_ratio=self.pressure_ratio,
        )


@dataclass(frozen=True, slots=True)
class _Charged:
    """One device of a turn, after its time was attributed."""

    device: DeviceTurn
    busy: Division
    accounts: Mapping[Workload, Account]


@dataclass(slots=True)
class EnergyWindow:
    """Collects the weights used to split the energy between two readings of a GPU's energy counter.

    Each turn has the weight power × time. It is split among accounts in proportion to busy time × compute slices or, if
    the GPU was idle, in proportion to the holders' shares. An account that was closed within the window, and its
    namespace, still receive their share.
    """

    weights: Counter[Account] = field(default_factory=Counter)
    unattributed: int = 0

    def add(self, gpu: GpuTurn, charged: Sequence[_Charged], elapsed_ns: int) -> None:
        answers = [one for one in charged if one.device.usage.window_ns]
        if not answers:
            return  # the next answer of the GPU also covers this turn
        power_mw = None if gpu.usage is None else gpu.usage.power_mw
        weight = (power_mw or 1) * elapsed_ns
        by_use, unattributed_use = Counter[Account](), 0
        by_share, unattributed_share = Counter[Account](), gpu.free_slices * SHARE_UNITS
        for one in answers:
            device, busy, slices = one.device, one.busy, one.device.slices
            unattributed = device.usage.window_ns if busy.unattributed is None else busy.unattributed
            unattributed_use += unattributed * slices  # unknown busy time is unattributed
            shares, unheld = divide_by_share(device, SHARE_UNITS), SHARE_UNITS
            for workload, part in (busy.parts or {}).items():
                account = one.accounts[workload]
                by_use[account] += part * slices
                by_share[account] += shares.get(workload, 0) * slices
                unheld -= shares.get(workload, 0)
            unattributed_share += unheld * slices
        if unattributed_use or any(by_use.values()):
            parts = divide_exactly(weight, by_use, unattributed_use)
        else:
            parts = divide_exactly(weight, by_share, unattributed_share)
        self.weights.update(parts)
        self.unattributed += weight - sum(parts.values())


class Ledger:
    """Adds up the usage of all devices of a node. Not thread-safe."""

    def __init__(self, max_namespaces: int = MAX_NAMESPACES, unallocated_after: float = 60.0) -> None:
        """Use without an allocation is reported after `unallocated_after` seconds, because it is normal while a pod
        starts or ends.
        """
        self._max_namespaces = max_namespaces
        self._unallocated_after_ns = round(unallocated_after * NS)
        self._accounts: dict[str, dict[WorkloadKey, Account]] = {}  # accounts of the last turn, by device key
        self._closed: dict[tuple[str, WorkloadKey], Account] = {}  # closed accounts, oldest first
        self._devices: dict[str, DeviceAccount] = {}  # includes removed devices, which may return
        self._listed: set[str] = set()  # devices and GPUs of the last turn
        self._namespaces: dict[
            tuple[str, str, str], UsageCounters
        ] = {}  # by namespace, model, profile; oldest use first
        self._owners: dict[str, dict[int, Owner]] = {}  # last known owners, by device key and pid
        self._windows: dict[str, EnergyWindow] = {}  # by GPU UUID

    def charge(
        self, gpus: Sequence[GpuTurn], elapsed_ns: int, unallocated: Collection[tuple[str, WorkloadKey]] = ()
    ) -> None:
        """Adds one turn. `elapsed_ns` is the monotonic time since the previous turn.

        `unallocated` contains device and workload of each use without an allocation.

        Devices that are not in `gpus` are removed from the snapshot. If they return, their counters continue.
        """
        self._remove_missing(gpus)
        for gpu in gpus:
            charged = [self._charge_time(device, elapsed_ns) for device in gpu.devices]
            for one in charged:
                for workload, account in one.accounts.items():
                    is_allocated = (one.device.device.key, workload.key) not in unallocated
                    account.unallocated_ns = 0 if is_allocated else account.unallocated_ns + elapsed_ns
            if gpu.usage is not None:
                self._charge_energy(gpu, gpu.usage.energy_mj, charged, elapsed_ns)
        self._evict()

    def list_holders(self, at: float) -> dict[str, Sequence[tuple[Workload, HolderUsage]]]:
        """Returns the usage of holders and other users by device key. `at` is the Unix time of the last turn."""
        return {
            key: tuple(
                (account.workload, account.to_usage(at, self._unallocated_after_ns))
                for _, account in sorted(accounts.items())
            )
            for key, accounts in self._accounts.items()
        }

    def list_devices(self) -> dict[str, SlotUsage]:
        """Returns the usage by device key. In MIG mode, the GPU has the energy, and its instances have the rest."""
        return {key: account.to_usage() for key, account in self._devices.items() if key in self._listed}

    def list_namespaces(self) -> tuple[NamespaceUsage, ...]:
        return tuple(
            NamespaceUsage(*key, counters.allocated_ns or 0, counters.busy_ns, counters.energy_mj)
            for key, counters in sorted(self._namespaces.items())
        )

    def _charge_time(self, turn: DeviceTurn, elapsed_ns: int) -> _Charged:
        """Adds allocated, busy and idle time to the counters, and sets the gauges."""
        key, window_ns = turn.device.key, turn.usage.window_ns
        accounts = self._update_accounts(turn)
        busy = attribute_busy(turn, self._find_ended_owner(turn))
        memory, processes, bounds = attribute_memory(turn), count_processes(turn), bound_busy(turn, busy)
        waiting = attribute_waits(turn, busy)
        for workload, account in accounts.items():
            share, part = turn.holders.get(workload), busy.part(workload)
            allocated = None if share is None else round(share * elapsed_ns)
            idle = compute_idle(turn, workload, busy, elapsed_ns)
            account.is_mps_client = workload in bounds and turn.mps_busy_ns is not None
            busy_bounds = account.extend_bounds(bounds.get(workload), part)
            waits = account.update_waits(turn, workload, waiting)
            account.charge(UsageCounters(allocated, part, idle, None, *busy_bounds, *waits))
            account.utilization = part / window_ns if part is not None and window_ns else None
            account.memory = None if memory.parts is None else memory.parts.get(workload)
            account.processes = processes.get(workload)
            if turn.processes is not None and turn.usage.process_busy_ns is not None:
                account.is_measured = part is not None or (account.is_measured and not account.has_process)
        device = self._devices.setdefault(key, DeviceAccount())
        device.busy_ns = _plus(device.busy_ns, busy.total)
        device.unattributed_busy_ns = _plus(device.unattributed_busy_ns, busy.without_series)
        device.utilization = busy.total / window_ns if busy.total is not None and window_ns else None
        device.memory = memory
        device.pressure_ratio = waiting.pressure_ns / window_ns if waiting is not None and window_ns else None
        device.method = None if busy.parts is None else turn.usage.method
        if turn.mps_busy_ns is not None:
            device.method = "mps"
        device.has_seen_processes |= turn.processes is not None
        return _Charged(turn, busy, accounts)

    def _charge_energy(self, gpu: GpuTurn, energy_mj: int | None, charged: Sequence[_Charged], elapsed_ns: int) -> None:
        """Adds the turn to the window. If the energy counter was read, closes the window and divides its energy."""
        window = self._windows.setdefault(gpu.uuid, EnergyWindow())
        window.add(gpu, charged, elapsed_ns)
        device = self._devices.setdefault(gpu.uuid, DeviceAccount())
        device.has_seen_processes |= any(one.device.processes is not None for one in charged)
        if energy_mj is not None:
            self._windows[gpu.uuid] = EnergyWindow()
            parts = divide_exactly(energy_mj, window.weights, window.unattributed)
            for account, part in parts.items():
                account.charge(UsageCounters(energy_mj=part))
            for account in (account for one in charged for account in one.accounts.values()):
                account.power_ratio = parts[account] / energy_mj if energy_mj and account in parts else None
            device.energy_mj = _plus(device.energy_mj, energy_mj)
            rest = energy_mj - sum(part for account, part in parts.items() if account.workload.has_labels)
            device.unattributed_energy_mj = _plus(device.unattributed_energy_mj, rest)
        if device.energy_mj is not None:
            for account in (one.accounts[workload] for one in charged for workload in one.busy.parts or ()):
                if account.counters.energy_mj is None:  # start at 0 before the next reading of the energy counter
                    account.charge(UsageCounters(energy_mj=0))

    def _find_ended_owner(self, turn: DeviceTurn) -> Workload | None:
        """Returns the holder that owned all processes that ended since the last turn, or None."""
        if turn.processes is None:
            return None
        before = self._owners.get(turn.device.key, {})
        now = self._owners[turn.device.key] = {p.pid: p.owner for p in turn.processes if not p.ended}
        ended = {_key(owner) for pid, owner in before.items() if _key(now.get(pid)) != _key(owner)}
        return next((holder for holder in turn.holders if ended == {holder.key}), None)

    def _update_accounts(self, turn: DeviceTurn) -> Mapping[Workload, Account]:
        """Opens the accounts of holders and users of the device, and closes all others."""
        key, accounts = turn.device.key, dict[Workload, Account]()
        before = self._accounts.get(key, {})
        users = {process.owner for process in turn.processes or () if isinstance(process.owner, Workload)}
        for workload in turn.holders.keys() | users:
            account = accounts[workload] = self._open(turn, workload, before.get(workload.key))
            account.is_holder = workload in turn.holders
            account.has_process = workload in users or (turn.processes is None and account.has_process)
        if turn.processes is None:  # assume that processes of non-holders still run
            keys = {workload.key for workload in accounts}
            running = (one for one in before.values() if one.has_process and not one.is_holder)
            accounts |= {one.workload: one for one in running if one.workload.key not in keys}
        self._accounts[key] = {workload.key: account for workload, account in accounts.items()}
        self._closed |= {(key, name): one for name, one in before.items() if name not in self._accounts[key]}
        return accounts

    def _open(self, turn: DeviceTurn, workload: Workload, account: Account | None) -> Account:
        """Returns the current account, a reopened one, or a new one. A pod with a new UID gets a new account."""
        closed = self._closed.pop((turn.device.key, workload.key), None)
        if account is None and closed is not None and workload.uid and closed.workload.uid == workload.uid:
            account = closed
        if account is None or (workload.uid and account.workload.uid not in ("", workload.uid)):
            account = Account(workload)
        elif not workload.uid:
            workload = structs.replace(workload, uid=account.workload.uid)
        account.workload = workload
        if workload.namespace:
            model = (workload.namespace, turn.device.model, turn.device.profile)
            account.namespace = self._namespaces[model] = self._namespaces.pop(model, UsageCounters())
        return account

    def _remove_missing(self, gpus: Sequence[GpuTurn]) -> None:
        devices = {turn.device.key for gpu in gpus for turn in gpu.devices}
        self._listed = devices | {gpu.uuid for gpu in gpus}
        for key in self._accounts.keys() - devices:
            self._closed |= {(key, name): account for name, account in self._accounts.pop(key).items()}
            self._owners.pop(key, None)
        self._windows = {uuid: window for uuid, window in self._windows.items() if uuid in self._listed}

    def _evict(self) -> None:
        for closed in list(self._closed)[:-MAX_CLOSED_ACCOUNTS]:
            del self._closed[closed]
        for key in list(self._namespaces)[: -self._max_namespaces]:
            del self._namespaces[key]


def _key(owner: Owner | None) -> WorkloadKey | str | None:
    return owner.key if isinstance(owner, Workload) else owner


def _make_wait_part(owner: Owner, ratio: float) -> WaitPart:
    return WaitPart(*parts_of(owner), ratio=ratio) if isinstance(owner, Workload) else WaitPart(ratio=ratio)


def _plus(counter: int | None, increment: int | None) -> int | None:
    return counter if increment is None else (counter or 0) + increment
