"""Reads the usage of each GPU by process, and attributes it to containers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from podgpu.agent.telemetry import TelemetryResult
from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.gpu.source import Telemetry
from podgpu.holders.reader import LAST_RESORT
from podgpu.model import (
    NS,
    Allocation,
    Assignment,
    Device,
    DeviceTotals,
    DeviceUsage,
    Holder,
    NamespaceUsage,
    RunningProcess,
    SourceStatus,
    UsageProblems,
    Workload,
    WorkloadKey,
    group_by_key,
    split_key,
)
from podgpu.usage.containers import NOT_IN_POD, ProcessOwner, ProcessOwners
from podgpu.usage.ledger import Ledger, OwnedProcess, OwnedUsage, Owner
from podgpu.workers import ErrorCounts, Workers

OwnersByPid = Mapping[int, ProcessOwner]
SOURCE = "usage"
SWITCHES = "switches"
_KUBELET = "kubelet"  # the only source that lists all allocations of the node


@dataclass(frozen=True, slots=True)
class UsageResult:
    """Usage by device key. In MIG mode, the GPU itself has only energy, and its instances have all other usage."""

    holders: Mapping[str, Mapping[WorkloadKey, Holder]] = field(default_factory=dict)
    devices: Mapping[str, DeviceTotals] = field(default_factory=dict)
    namespaces: tuple[NamespaceUsage, ...] = ()  # includes containers that have ended
    at: float | None = None  # Unix time
    sources: tuple[SourceStatus, ...] = ()
    processes: Mapping[str, Sequence[RunningProcess]] = field(default_factory=dict)


@dataclass(eq=False)
class UsageCollector:
    _telemetry: Telemetry
    _processes: ProcessOwners
    _ledger: Ledger
    _workers: Workers
    _errors: ErrorCounts
    _deadline: float
    _clock: Clock
    _charged_at: float | None = None
    _shared: frozenset[str] = frozenset()  # keys of devices with processes of several containers
    _lacking: set[tuple[str, str, str]] = field(default_factory=set)  # UUID, name and reason of unsupported values

    def collect(self, telemetry: TelemetryResult, allocation: Allocation) -> UsageResult:
        gpus = [d for d in telemetry.devices if not d.is_instance and d.uuid not in telemetry.absent]
        began, began_at = self._clock.monotonic(), self._clock.wall()
        jobs = {f"usage-{g.uuid}": partial(self._telemetry.usage, g, self._shared) for g in gpus}
        results = dict(zip(gpus, self._workers.run(jobs, self._deadline).values(), strict=True))
        answers = {g.uuid: result.value for g, result in results.items() if result.value is not None}
        errors = {g.uuid: result.error for g, result in results.items() if result.error is not None}
        usages = [usage for answer in answers.values() for usage in (answer, *answer.instances)]
        listed = {process.pid for usage in usages for process in usage.processes or ()}
        owners = self._processes.find(listed.union(*(usage.process_busy_ns or () for usage in usages)))
        problems = {uuid: answer.problems for uuid, answer in answers.items()}
        reasons = *(owner.problem for owner in owners.values()), *(getattr(e, "reason", "") for e in errors.values())
        self._count_errors(problems, reasons)
        self._shared = frozenset(usage.device.key for usage in usages if _is_shared(usage, owners))
        elapsed = 0 if self._charged_at is None else round((began - self._charged_at) * NS)
        self._charged_at = began
        owned = add_owners(telemetry.devices, usages, allocation.assignments, owners)
        whole_gpus = {usage.device.uuid: usage for usage in usages if not usage.device.is_instance}
        self._ledger.charge(owned, whole_gpus, elapsed, _find_unallocated(owned, allocation))
        reported = {source.device for source in telemetry.sources if not source.up}
        failed = {uuid: error for uuid, error in errors.items() if uuid not in reported}
        status = self._make_status(self._clock.monotonic() - began, owners, failed)
        return UsageResult(
            self._ledger.list_holders(began_at),
            self._ledger.list_devices(),
            self._ledger.list_namespaces(),
            at=began_at,
            sources=(status, *_switches_status(problems.values())),
            processes={usage.device.key: _list_processes(usage, owners) for usage in usages},
        )

    def _count_errors(self, problems: Mapping[str, UsageProblems], reasons: Iterable[str]) -> None:
        # Counts an unsupported value once per GPU instead of in every reading.
        lacking = {(uuid, *lack) for uuid, own in problems.items() for lack in own.lacks} - self._lacking
        self._lacking |= lacking
        counted = [*filter(None, reasons), *(reason for _, _, reason in lacking)]
        for own in problems.values():
            counted += [*own.errors, *("bad_value" for _ in own.dropped)]
            for reason in own.switches.errors if own.switches is not None else ():
                self._errors.add(SWITCHES, reason)
        for reason in counted:
            self._errors.add(SOURCE, reason)

    def _make_status(self, seconds: float, owners: OwnersByPid, failed: Mapping[str, Exception]) -> SourceStatus:
        """Returns the status of this source: a failure if processes are not visible or a GPU cannot be read."""
        try:
            self._processes.require_permission()
        except SourceError as e:
            if all(
                owner.problem != e.reason for owner in owners.values()
            ):  # otherwise, it is already counted for each process
                self._errors.add(SOURCE, e.reason)
            return SourceStatus(SOURCE, False, seconds, e.reason, str(e))
        for uuid, error in failed.items():
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            message = f"container usage of {uuid}{others} is unknown and omitted: {error}"
            return SourceStatus(SOURCE, False, seconds, getattr(error, "reason", "error"), message)
        return SourceStatus(SOURCE, True, seconds)


def add_owners(
    devices: Iterable[Device], usages: Iterable[DeviceUsage], assignments: Iterable[Assignment], owners: OwnersByPid
) -> dict[str, list[OwnedUsage]]:
    """Adds holders and owners of processes to the usage of all devices. Returns the usages of each GPU, by UUID.

    `devices`: all devices. Those that did not answer are included, because they can have holders.
    """
    answers = {usage.device.key: usage for usage in usages}
    known = {device.key: device for device in devices} | {key: usage.device for key, usage in answers.items()}
    held = group_by_key((assignment.device, assignment) for assignment in assignments if assignment.holder.key)
    owned: defaultdict[str, list[OwnedUsage]] = defaultdict(list)
    for key in sorted(known.keys() | held.keys()):
        uuid, gi_id = split_key(key)
        gpu = known.get(uuid) or Device(None, uuid, "", "")
        device = known.get(key) or replace(gpu, gi_id=gi_id)
        is_whole_mig_gpu = gpu.mig_enabled and gi_id is None
        is_unlisted = uuid in answers and key not in answers  # a MIG instance that no longer exists
        own = owned[uuid]
        if key in held or not (is_whole_mig_gpu or is_unlisted):
            usage = None if is_whole_mig_gpu else answers.get(key)
            own.append(add_owners_to_device(usage or DeviceUsage(device, 0), held.get(key, ()), owners))
    return owned


def add_owners_to_device(usage: DeviceUsage, assignments: Sequence[Assignment], owners: OwnersByPid) -> OwnedUsage:
    """Combines the usage, holders and processes of one device."""
    listed = {process.pid: process for process in usage.processes or () if process.device == usage.device.key}
    busy = usage.process_busy_ns or {}
    pids = sorted(listed.keys() | {pid for pid, ns in busy.items() if ns != 0}) if usage.processes is not None else []
    owner_of = {pid: owners.get(pid, NOT_IN_POD) for pid in pids}
    workloads = _merge_workloads((owner.workload for owner in owner_of.values() if owner.workload), assignments)
    shares = {assignment.holder.key: assignment.share for assignment in assignments}
    processes = []
    for pid in pids:
        owner, memory = _find_owner(owner_of[pid], workloads, shares), listed[pid].memory if pid in listed else None
        processes.append(OwnedProcess(pid, owner, busy.get(pid, 0), memory, only_busy=pid not in listed))
    clients = {pid for pid, process in listed.items() if process.mps and pid not in busy}
    servers = {pid for pid, owner in owner_of.items() if owner.is_mps_server}
    processes, mps_busy_ns = _attribute_mps(processes, clients, servers, usage.busy_ns)
    holders = {workloads[key]: shares[key] for key in sorted(shares)}
    return OwnedUsage(usage, holders, None if usage.processes is None else tuple(processes), mps_busy_ns)


def _merge_workloads(users: Iterable[Workload], assignments: Iterable[Assignment]) -> dict[WorkloadKey, Workload]:
    """Returns users and holders by key. A holder gets the UID and user of its processes if its source has none."""
    workloads: dict[WorkloadKey, Workload] = {}
    for user in users:
        workloads.setdefault(user.key, user)
    for holder in (assignment.holder for assignment in assignments):
        same = workloads.get(holder.key, holder)
        workloads[holder.key] = structs.replace(holder, uid=holder.uid or same.uid, user=same.user)
    return workloads


def _find_owner(owner: ProcessOwner, workloads: Mapping[WorkloadKey, Workload], held: Collection[WorkloadKey]) -> Owner:
    """Returns "host" for processes of a pod that was recreated. The new pod has the same name, but another UID."""
    user = owner.workload
    if user is None or not user.key or (user.user and held and user.key not in held):
        return "unknown" if owner.problem else "host"
    workload = workloads[user.key]
    return "host" if user.uid and workload.uid and user.uid != workload.uid else workload


def _attribute_mps(
    processes: list[OwnedProcess], clients: Collection[int], server_pids: Collection[int], busy_ns: int | None
) -> tuple[list[OwnedProcess], int | None]:
    """Attributes the busy time of MPS servers. The driver reports only the server's time, for all its clients.

    If all clients have the same owner, it gets this time. Otherwise, the time is returned as the second value, and the
    busy time of each client is unknown. `busy_ns`: busy time of the device, used if the server is not visible.
    """
    servers = [process for process in processes if process.pid in server_pids]
    client_owners = {process.owner for process in processes if process.pid in clients}
    sole_owner = client_owners.pop() if servers and len(client_owners) == 1 else None
    attributed = []
    for process in processes:
        if process.pid in server_pids:
            only_busy = process.only_busy or sole_owner is not None  # the server is no process of the container
            process = replace(process, owner=sole_owner or "host", only_busy=only_busy)
        if process.pid in clients and sole_owner is None:
            process = replace(process, busy_ns=None)
        attributed.append(process)
    if not clients or sole_owner is not None:
        return attributed, None
    return attributed, sum(server.busy_ns or 0 for server in servers) if servers else busy_ns or 0


def _find_unallocated(
    usages: Mapping[str, Sequence[OwnedUsage]], allocation: Allocation
) -> set[tuple[str, WorkloadKey]]:
    """Returns device key and workload key of each pod that uses a device without an allocation.

    Returns nothing if the kubelet does not answer or the node has no device plugin. Omits pods with an unmapped
    allocation, and devices that a scheduler has reserved for unknown pods.
    """
    allocated = {(a.device, a.holder.key) for a in allocation.assignments if a.source not in LAST_RESORT}
    is_known = any(source.name == _KUBELET and source.up for source in allocation.sources)
    if not is_known or not (allocated or allocation.offered):
        return set()
    unclear = {(one.namespace, one.pod) for one in (*(u.holder for u in allocation.unmapped), *allocation.vcuda)}
    reserved = {entry.device_id for entry in allocation.unmapped if entry.reason == "reserved"}
    return {
        (owned.device.key, owner.key)
        for devices in usages.values()
        for owned in devices
        for owner in {process.owner for process in owned.processes or ()}
        if isinstance(owner, Workload) and owner.pod and (owner.namespace, owner.pod) not in unclear
        if owned.device.key not in reserved and (owned.device.key, owner.key) not in allocated
    }


def _list_processes(usage: DeviceUsage, owners: OwnersByPid) -> list[RunningProcess]:
    processes = []
    for process in usage.processes or ():
        pid, owner = process.pid, owners.get(process.pid, NOT_IN_POD)
        busy_ns = None if usage.process_busy_ns is None else usage.process_busy_ns.get(pid, 0)
        ratio = busy_ns / usage.window_ns if busy_ns is not None and usage.window_ns else None
        processes.append(RunningProcess(pid, process.memory, ratio, owner.workload or owner.container, owner.command))
    return processes


def _is_shared(usage: DeviceUsage, owners: OwnersByPid) -> bool:
    pids = {process.pid for process in usage.processes or () if process.device == usage.device.key}
    return len({owners[pid].workload or pid for pid in pids}) > 1


def _switches_status(problems: Iterable[UsageProblems]) -> list[SourceStatus]:
    """Returns the status of the context-switch logs. Empty if no GPU uses a log."""
    statuses = [own.switches for own in problems if own.switches is not None]
    failed = [SourceStatus(SWITCHES, False, 0.0, s.fallback_reason, s.fallback) for s in statuses if s.fallback]
    return failed[:1] or [SourceStatus(SWITCHES, True, 0.0) for _ in statuses[:1]]
