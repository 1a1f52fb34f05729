"""Counts what workloads, devices and namespaces used since the exporter started.

`attribution` divides a single turn. The ledger adds up the turns, while workloads and devices come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from msgspec import structs

from podgpu.model import HolderUsage, NamespaceUsage, SlotUsage, UsageMethod, Workload, WorkloadKey
from podgpu.usage.attribution import (
    SHARE_UNITS,
    DeviceTurn,
    Division,
    GpuTurn,
    Owner,
    attribute_busy,
    attribute_memory,
    bound_busy,
    compute_idle,
    count_processes,
    divide,
    divide_by_share,
)

MAX_CLOSED_ACCOUNTS = 1_000  # a source can lose a holder for some time; then its counters continue
MAX_NAMESPACES = 5_000  # pairs of namespace and GPU model; the least recently used one is evicted
_NS = 1_000_000_000


@dataclass(slots=True)
class Counters:
    """Counters of a workload or a namespace. Each is None until it is first known."""

    allocated_ns: int | None = None
    busy_ns: int | None = None
    idle_ns: int | None = None
    energy_mj: int | None = None
    busy_min_ns: int | None = None
    busy_max_ns: int | None = None

    def add(self, increment: Counters) -> None:
        for name in _COUNTERS:
            setattr(self, name, _plus(getattr(self, name), getattr(increment, name)))


_COUNTERS = tuple(counter.name for counter in fields(Counters))


@dataclass(slots=True, eq=False)
class Account:
    """One workload on one device, as long as it holds the device or has a process there."""

    workload: Workload
    counters: Counters = field(default_factory=Counters)
    namespace: Counters = field(default_factory=Counters)  # shared by all accounts of the namespace and model
    is_holder: bool = False
    has_process: bool = False
    is_measured: bool = True  # False while the driver does not report the busy time of its processes
    memory: int | None = None
    processes: int | None = None
    utilization: float | None = None  # part of the last turn in which it was busy
    power_ratio: float | None = None  # its part of the energy between the last two readings
    idle_streak_ns: int | None = None  # idle time since it was last busy

    def charge(self, increment: Counters) -> None:
        """Adds to the counters of the workload and of its namespace."""
        self.counters.add(increment)
        self.namespace.add(increment)
        may_have_run = increment.busy_ns is not None and (increment.busy_ns > 0 or increment.idle_ns is None)
        self.idle_streak_ns = 0 if may_have_run else _plus(self.idle_streak_ns, increment.idle_ns)

    def to_usage(self, at: float) -> HolderUsage:
        """Leaves out counters that stand still although the workload may be running."""
        counters = self.counters if self.is_measured else Counters(self.counters.allocated_ns)
        streak_ns = self.idle_streak_ns if self.is_measured else None
        return HolderUsage(
            utilization_ratio=self.utilization,
            memory_used_bytes=self.memory,
            processes=self.processes,
            allocated_ns=counters.allocated_ns,
            busy_ns=counters.busy_ns,
            busy_min_ns=counters.busy_min_ns,
            busy_max_ns=counters.busy_max_ns,
            idle_ns=counters.idle_ns,
            energy_mj=counters.energy_mj,
            power_ratio=self.power_ratio,
            idle_since=at - streak_ns / _NS if streak_ns else None,
        )


@dataclass(slots=True)
class DeviceAccount:
    """What one device used, and how much of that is unattributed."""

    busy_ns: int | None = None
    unattributed_busy_ns: int | None = None
    energy_mj: int | None = None
    unattributed_energy_mj: int | None = None
    memory: Division = field(default_factory=Division)
    utilization: float | None = None  # part of the last turn in which the device was busy
    method: UsageMethod | None = None
    has_seen_processes: bool = False  # before, everything is unattributed, and that means nothing

    def to_usage(self) -> SlotUsage:
        return SlotUsage(
            utilization_ratio=self.utilization,
            memory_used_bytes=self.memory.total,
            busy_ns=self.busy_ns,
            energy_mj=self.energy_mj,
            unattributed_memory_bytes=None if self.memory.parts is None else self.memory.unattributed,
            unattributed_busy_ns=self.unattributed_busy_ns if self.has_seen_processes else None,
            unattributed_energy_mj=self.unattributed_energy_mj if self.has_seen_processes else None,
            method=self.method or "",
        )


@dataclass(frozen=True, slots=True)
class UsageSnapshot:
    """The state of a ledger. In MIG mode the GPU has the energy, and its instances have everything else."""

    holders: Mapping[str, Sequence[tuple[Workload, HolderUsage]]] = field(default_factory=dict)  # by device key
    devices: Mapping[str, SlotUsage] = field(default_factory=dict)
    namespaces: tuple[NamespaceUsage, ...] = ()  # including containers that have ended


@dataclass(frozen=True, slots=True)
class _Charged:
    """One device of a turn whose time has been charged."""

    device: DeviceTurn
    busy: Division
    accounts: Mapping[Workload, Account]


@dataclass(slots=True)
class EnergyWindow:
    """The turns between two readings of a GPU's energy counter. The energy is divided by their weights.

    Each turn has a weight of power × time. It is divided by busy time × compute slices, or by the shares held if
    nothing ran. An account that was closed within the window still pays its part, and so does its namespace.
    """

    weights: Counter[Account] = field(default_factory=Counter)
    unattributed: int = 0

    def add(self, gpu: GpuTurn, charged: Sequence[_Charged], elapsed_ns: int) -> None:
        answers = [one for one in charged if one.device.usage.window_ns]
        if not answers:
            return  # the next figures of the GPU cover this turn, too
        weight = (gpu.power_mw or 1) * elapsed_ns
        by_use, unattributed_use = Counter[Account](), 0
        by_share, unattributed_share = Counter[Account](), gpu.free_slices * SHARE_UNITS
        for one in answers:
            device, busy, slices = one.device, one.busy, one.device.slices
            unattributed = device.usage.window_ns if busy.unattributed is None else busy.unattributed
            unattributed_use += unattributed * slices  # an unknown busy time counts as busy: no other pays for it
            shares, unheld = divide_by_share(device, SHARE_UNITS), SHARE_UNITS
            for workload, part in (busy.parts or {}).items():
                account = one.accounts[workload]
                by_use[account] += part * slices
                by_share[account] += shares.get(workload, 0) * slices
                unheld -= shares.get(workload, 0)
            unattributed_share += unheld * slices
        if unattributed_use or any(by_use.values()):
            parts = divide(weight, by_use, unattributed_use)
        else:
            parts = divide(weight, by_share, unattributed_share)
        self.weights.update(parts)
        self.unattributed += weight - sum(parts.values())


class Ledger:
    """The usage of all devices of a node. Not thread-safe."""

    def __init__(self, max_namespaces: int = MAX_NAMESPACES) -> None:
        self.evicted_namespaces = 0
        self._max_namespaces = max_namespaces
        self._accounts: dict[str, dict[WorkloadKey, Account]] = {}  # by device key, of the last turn
        self._closed: dict[tuple[str, WorkloadKey], Account] = {}  # by device key, oldest first
        self._devices: dict[str, DeviceAccount] = {}  # including devices that may come back
        self._listed: set[str] = set()  # devices and GPUs of the last turn
        self._namespaces: dict[tuple[str, str, str], Counters] = {}  # by namespace, model, profile; oldest use first
        self._owners: dict[str, dict[int, Owner]] = {}  # by device key and pid, when last visible
        self._windows: dict[str, EnergyWindow] = {}  # by GPU UUID

    def charge(self, gpus: Sequence[GpuTurn], elapsed_ns: int) -> None:
        """Adds one turn. `elapsed_ns` is the time since the previous turn by the monotonic clock.

        Devices that are not in `gpus` are removed. If they come back, their counters continue.
        """
        self._remove_missing(gpus)
        for gpu in gpus:
            charged = [self._charge_time(device, elapsed_ns) for device in gpu.devices]
            if gpu.answered:
                self._charge_energy(gpu, charged, elapsed_ns)
        self._evict()

    def snapshot(self, at: float) -> UsageSnapshot:
        """`at` is the Unix time of the last turn."""
        return UsageSnapshot(
            {
                key: tuple((account.workload, account.to_usage(at)) for _, account in sorted(accounts.items()))
                for key, accounts in self._accounts.items()
            },
            {key: account.to_usage() for key, account in self._devices.items() if key in self._listed},
            tuple(
                NamespaceUsage(*key, counters.allocated_ns or 0, counters.busy_ns, counters.energy_mj)
                for key, counters in sorted(self._namespaces.items())
            ),
        )

    def _charge_time(self, turn: DeviceTurn, elapsed_ns: int) -> _Charged:
        """Charges allocated, busy and idle time, and sets the gauges."""
        key, window_ns = turn.device.key, turn.usage.window_ns
        accounts = self._update_accounts(turn)
        busy = attribute_busy(turn, self._find_ended_owner(turn))
        memory, processes, bounds = attribute_memory(turn), count_processes(turn), bound_busy(turn, busy)
        for workload, account in accounts.items():
            share, part = turn.holders.get(workload), busy.part(workload)
            allocated = None if share is None else round(share * elapsed_ns)
            idle = compute_idle(turn, workload, busy, elapsed_ns)
            account.charge(Counters(allocated, part, idle, None, *bounds.get(workload, ())))
            account.utilization = part / window_ns if part is not None and window_ns else None
            account.memory = None if memory.parts is None else memory.parts.get(workload)
            account.processes = processes.get(workload)
            if turn.processes is not None and turn.usage.process_busy_ns is not None:
                account.is_measured = part is not None or (account.is_measured and not account.has_process)
        device = self._devices.setdefault(key, DeviceAccount())
        device.busy_ns = _plus(device.busy_ns, busy.total)
        device.unattributed_busy_ns = _plus(device.unattributed_busy_ns, busy.unattributed)
        device.utilization = busy.total / window_ns if busy.total is not None and window_ns else None
        device.memory = memory
        device.method = None if busy.parts is None else turn.usage.method
        device.has_seen_processes |= turn.processes is not None
        return _Charged(turn, busy, accounts)

    def _charge_energy(self, gpu: GpuTurn, charged: Sequence[_Charged], elapsed_ns: int) -> None:
        """Adds the turn to the window. A reading of the counter closes the window and divides its energy."""
        window = self._windows.setdefault(gpu.uuid, EnergyWindow())
        window.add(gpu, charged, elapsed_ns)
        device = self._devices.setdefault(gpu.uuid, DeviceAccount())
        device.has_seen_processes |= any(one.device.processes is not None for one in charged)
        if gpu.energy_mj is not None:
            self._windows[gpu.uuid] = EnergyWindow()
            parts = divide(gpu.energy_mj, window.weights, window.unattributed)
            for account, part in parts.items():
                account.charge(Counters(energy_mj=part))
            for account in (account for one in charged for account in one.accounts.values()):
                account.power_ratio = parts[account] / gpu.energy_mj if gpu.energy_mj and account in parts else None
            device.energy_mj = _plus(device.energy_mj, gpu.energy_mj)
            rest = gpu.energy_mj - sum(parts.values())
            device.unattributed_energy_mj = _plus(device.unattributed_energy_mj, rest)
        if device.energy_mj is not None:
            for account in (one.accounts[workload] for one in charged for workload in one.busy.parts or ()):
                if account.counters.energy_mj is None:  # the counter exists before the next reading
                    account.charge(Counters(energy_mj=0))

    def _find_ended_owner(self, turn: DeviceTurn) -> Workload | None:
        """Returns the holder whose processes ended since the last turn, if no other owner's ended."""
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
        if turn.processes is None:  # assume that processes still run, except those of holders that lost the device
            keys = {workload.key for workload in accounts}
            running = (one for one in before.values() if one.has_process and not one.is_holder)
            accounts |= {one.workload: one for one in running if one.workload.key not in keys}
        self._accounts[key] = {workload.key: account for workload, account in accounts.items()}
        self._closed |= {(key, name): one for name, one in before.items() if name not in self._accounts[key]}
        return accounts

    def _open(self, turn: DeviceTurn, workload: Workload, account: Account | None) -> Account:
        """Returns the present account, a closed one, or a new one. A pod with a new UID gets a new account."""
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
            account.namespace = self._namespaces[model] = self._namespaces.pop(model, Counters())
        return account

    def _remove_missing(self, gpus: Sequence[GpuTurn]) -> None:
        devices = {turn.device.key for gpu in gpus for turn in gpu.devices}
        self._listed = devices | {gpu.uuid for gpu in gpus}
        for key in self._accounts.keys() - devices:
            self._closed |= {(key, name): account for name, account in self._accounts.pop(key).items()}
            self._owners.pop(key, None)
        self._windows = {uuid: window for uuid, window in self._windows.items() if uuid in self._listed}

    def _evict(self) -> None:
        for place in list(self._closed)[:-MAX_CLOSED_ACCOUNTS]:
            del self._closed[place]
        for key in list(self._namespaces)[: -self._max_namespaces]:
            del self._namespaces[key]
            self.evicted_namespaces += 1


def _key(owner: Owner | None) -> WorkloadKey | str | None:
    return owner.key if isinstance(owner, Workload) else owner


def _plus(counter: int | None, increment: int | None) -> int | None:
    return counter if increment is None else (counter or 0) + increment
