"""Adds up the usage of each workload and device over all readings.

Splits the energy of each GPU, too, because its counter is read less often than the usage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from podgpu.known import add_known
from podgpu.metrics.mig import slices_of_gpu
from podgpu.model import (
    NS,
    Device,
    DeviceTotals,
    DeviceUsage,
    Document,
    GpuOrInstance,
    Holder,
    HolderUsage,
    NamespaceUsage,
    Workload,
    WorkloadKey,
)
from podgpu.node.usage.split import (
    SHARE_UNITS,
    Division,
    OwnedUsage,
    compute_ratio,
    divide_exactly,
)

DividedDevice = tuple[OwnedUsage, Division]
"""The usage of a device, and how its busy time is divided."""
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
            divided = []
            for owned in devices:
                busy = self._charge_time(owned, elapsed_ns)
                divided.append((owned, busy))
            if uuid in gpus:
                self._add_energy_weights(gpus[uuid], divided, elapsed_ns)
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
        before = self._get_totals(key)
        sums = _sums(before, device, _DEVICE_COUNTERS)
        self._devices[key] = structs.replace(device, **sums, counted_since=before.counted_since)

        is_visible = owned.processes is not None
        owners = owned.owners
        for workload, usage in usages.items():
            is_alone = is_visible and owners <= {workload}
            self._charge_account(accounts[workload], usage, owned, is_alone=is_alone)
        if is_visible:
            self._have_processes.add(key)
        return busy

    def _charge_account(
        self, account: Account, usage: HolderUsage, owned: OwnedUsage, *, is_alone: bool
    ) -> None:
        has_energy = self._get_totals(owned.device.uuid).energy_mj is not None
        # It has used no known energy until the energy counter is read again.
        if has_energy and usage.busy_ns is not None:
            usage = structs.replace(usage, energy_mj=0)

        account.add(usage, is_alone)
        if owned.processes is not None and owned.usage.process_busy_ns is not None:
            # Without a process, there was nothing to measure.
            was_measured = account.is_measured and not account.has_process
            account.is_measured = usage.busy_ns is not None or was_measured
        self._charge_namespace(account, usage)

    def _get_totals(self, key: str) -> DeviceTotals:
        """Returns the sums of a GPU or MIG instance until now."""
        return self._devices.get(key) or DeviceTotals(counted_since=self._counted_since)

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
        self, gpu: DeviceUsage, divided: Sequence[DividedDevice], elapsed_ns: int
    ) -> None:
        """Adds what each account counts for when the energy of this time is known.

        Each usage reading has the weight power × time, which is split by busy time. The energy of
        an idle GPU is split by allocated shares.
        """
        uuid = gpu.device.uuid
        # Without power, energy is read every time, so it is only split by time.
        power = gpu.power_mw or 1
        weight = power * elapsed_ns
        parts = self._weigh_busy(divided)
        if not any(parts.values()):
            parts = self._weigh_shares(gpu.device, divided)
        weights = self._energy_weights.setdefault(uuid, Counter())
        weights.update(divide_exactly(weight, parts))

        if any(owned.processes is not None for owned, _ in divided):
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
                power_ratio = compute_ratio(parts.get(account), gpu.energy_mj)
                account.usage = structs.replace(account.usage, power_ratio=power_ratio)

        device = self._get_totals(uuid)
        window = DeviceTotals(energy_mj=gpu.energy_mj, unattributed_energy_mj=unattributed)
        self._devices[uuid] = structs.replace(device, **_sums(device, window, _DEVICE_COUNTERS))

    def _weigh_busy(self, divided: Iterable[DividedDevice]) -> Counter[Account | None]:
        """Returns busy time × slices of each account. The key None is for unattributed time."""
        weights = Counter[Account | None]()
        for owned, busy in divided:
            if not owned.usage.window_ns:
                continue
            slices = owned.slices
            accounts = self._accounts[owned.device.key]
            for workload, part in (busy.parts or {}).items():
                weights[accounts[workload.key]] += part * slices

            unattributed = busy.unattributed
            if unattributed is None:
                # It is unknown whether the device was busy, so nobody gets its energy.
                unattributed = owned.usage.window_ns
            weights[None] += unattributed * slices
        return weights

    def _weigh_shares(
        self, gpu: Device, divided: Sequence[DividedDevice]
    ) -> Counter[Account | None]:
        """Returns allocated share × slices of each account. The key None is for the rest.

        Returns no weights if no device answered, because the next reading also covers this time.
        """
        weights = Counter[Account | None]()
        for owned, busy in divided:
            if not owned.usage.window_ns:
                continue
            slices = owned.slices
            accounts = self._accounts[owned.device.key]
            shares = owned.compute_shares()
            unheld = SHARE_UNITS
            for workload in busy.parts or ():
                share = shares.get(workload, 0)
                weights[accounts[workload.key]] += share * slices
                unheld -= share
            weights[None] += unheld * slices

        if weights and gpu.mig_enabled:
            # slices that belong to no MIG instance
            free = slices_of_gpu(gpu.model) - sum(owned.slices for owned, _ in divided)
            weights[None] += max(0, free) * SHARE_UNITS
        return weights

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
