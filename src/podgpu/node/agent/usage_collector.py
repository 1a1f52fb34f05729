"""Reads the usage of each GPU by process, and attributes it to containers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from msgspec import structs

from podgpu.clock import Clock
from podgpu.errors import SourceError, StartError
from podgpu.known import select_known
from podgpu.model import (
    HIDDEN_PID,
    NS,
    Allocation,
    Assignment,
    Device,
    DeviceUsage,
    GpuOrInstance,
    NamespaceUsage,
    Orphan,
    RunningProcess,
    SourceStatus,
    Workload,
    WorkloadKey,
    group_by,
    split_key,
)
from podgpu.node.agent.gpus import TelemetryResult
from podgpu.node.agent.orphans import OrphanWatch
from podgpu.node.agent.xid_blame import Verdict, XidBlame
from podgpu.node.gpu.source import Telemetry
from podgpu.node.holders import kubelet_answers
from podgpu.node.holders.reader import LAST_RESORT
from podgpu.node.usage.containers import NOT_IN_POD, ProcessOwner, ProcessOwners
from podgpu.node.usage.ledger import Ledger
from podgpu.node.usage.split import OwnedProcess, OwnedUsage, Owner, divide_exactly
from podgpu.workers import ErrorCounts, Workers

OwnersByPid = Mapping[int, ProcessOwner]
SOURCE = "usage"
SWITCHES = "switches"


@dataclass(frozen=True, slots=True)
class UsageResult:
    # by device key: documents that have only `usage` and the users as `holders`
    devices: Mapping[str, GpuOrInstance] = field(default_factory=dict)
    processes: Mapping[str, Sequence[RunningProcess]] = field(default_factory=dict)
    namespaces: tuple[NamespaceUsage, ...] = ()  # includes containers that have ended
    at: float | None = None  # Unix time
    sources: tuple[SourceStatus, ...] = ()
    verdicts: tuple[Verdict, ...] = ()  # causes of XIDs that were decided in this reading
    orphans: Mapping[str, tuple[Orphan, ...]] = field(default_factory=dict)  # by device key


@dataclass(frozen=True, slots=True)
class _Reading:
    """The answers and errors of all GPUs, by UUID."""

    answers: dict[str, DeviceUsage] = field(default_factory=dict)
    # A StartError has no reason. The telemetry loop ends the process because of it.
    errors: dict[str, SourceError | StartError] = field(default_factory=dict)
    usages: list[DeviceUsage] = field(default_factory=list)  # of GPUs and their MIG instances

    def list_pids(self) -> set[int]:
        """Returns the pids of all processes, including those that were busy and have ended."""
        pids: set[int] = set()
        for usage in self.usages:
            pids.update(process.pid for process in usage.processes or ())
            pids.update(usage.process_busy_ns or ())
        return pids - {HIDDEN_PID}


@dataclass(eq=False)
class UsageCollector:
    _telemetry: Telemetry
    _processes: ProcessOwners
    _ledger: Ledger
    _workers: Workers
    _errors: ErrorCounts
    _deadline: float
    _clock: Clock
    blame: XidBlame
    _orphans: OrphanWatch
    _charged_at: float | None = None
    _shared: frozenset[str] = frozenset()  # keys of devices with processes of several containers
    _lacking: set[tuple[str, str, str]] = field(default_factory=set)
    """UUID, name and reason of unsupported values."""

    def collect(self, telemetry: TelemetryResult, allocation: Allocation) -> UsageResult:
        began = self._clock.monotonic()
        began_at = self._clock.wall()
        reading = self._read_gpus(telemetry)
        owners = self._processes.find(reading.list_pids())
        self._count_errors(reading, owners)

        shared = [usage.device for usage in reading.usages if _is_shared(usage, owners)]
        self._shared = frozenset(device.key for device in shared)

        owned = add_owners(telemetry.devices, reading.usages, allocation.assignments, owners)
        unallocated = _find_unallocated(owned, allocation)
        elapsed_ns = self._take_elapsed_ns(began)
        self._ledger.charge(owned, reading.answers, elapsed_ns, began_at, unallocated)

        # GPUs that cannot be read at all already have a status.
        reported = {source.device for source in telemetry.sources if not source.up}
        failed = {uuid: e for uuid, e in reading.errors.items() if uuid not in reported}
        status = self._make_status(self._clock.monotonic() - began, owners, failed)
        statuses = [status, *_switches_status(reading.answers.values())]

        processes = {usage.device.key: _list_processes(usage, owners) for usage in reading.usages}
        verdicts = self.blame.decide(reading.usages, owners)
        return UsageResult(
            devices=self._ledger.list_devices(),
            processes=processes,
            namespaces=self._ledger.list_namespaces(),
            at=began_at,
            sources=tuple(statuses),
            verdicts=tuple(verdicts),
            orphans=self._orphans.find(reading.usages, owners, allocation, began_at),
        )

    def _take_elapsed_ns(self, now: float) -> int:
        """Returns the time since the last call. 0 for the first one."""
        before = self._charged_at
        self._charged_at = now
        if before is None:
            return 0
        return round((now - before) * NS)

    def _read_gpus(self, telemetry: TelemetryResult) -> _Reading:
        gpus = []
        jobs = {}
        for device in telemetry.devices:
            if not device.is_instance and device.uuid not in telemetry.absent:
                gpus.append(device)
                jobs[f"usage-{device.uuid}"] = partial(
                    self._telemetry.usage, device, self._shared, self._processes.find_early
                )
        results = self._workers.run(jobs, self._deadline)

        reading = _Reading()
        for gpu, result in zip(gpus, results.values(), strict=True):
            if result.error is not None:
                reading.errors[gpu.uuid] = result.error
            if result.value is not None:
                reading.answers[gpu.uuid] = result.value
                reading.usages.extend((result.value, *result.value.instances))
        return reading

    def _count_errors(self, reading: _Reading, owners: OwnersByPid) -> None:
        reasons = [owner.problem for owner in owners.values()]
        reasons += [getattr(error, "reason", "") for error in reading.errors.values()]
        for uuid, answer in reading.answers.items():
            problems = answer.problems
            reasons += problems.errors
            reasons += ["bad_value"] * len(problems.dropped)
            for name, lack in problems.lacks:
                # Counts an unsupported value once per GPU instead of in every reading.
                if (uuid, name, lack) not in self._lacking:
                    self._lacking.add((uuid, name, lack))
                    reasons.append(lack)
            if problems.switches is not None:
                for reason in problems.switches.errors:
                    self._errors.add(SWITCHES, reason)

        for reason in filter(None, reasons):
            self._errors.add(SOURCE, reason)

    def _make_status(
        self, seconds: float, owners: OwnersByPid, failed: Mapping[str, SourceError | StartError]
    ) -> SourceStatus:
        """Returns a failure if processes are not visible or a GPU cannot be read."""
        try:
            self._processes.require_permission()
        except SourceError as e:
            # If the owners have this problem, it is already counted for each process.
            if all(owner.problem != e.reason for owner in owners.values()):
                self._errors.add(SOURCE, e.reason)
            return SourceStatus(SOURCE, False, seconds, e.reason, str(e))

        if not failed:
            return SourceStatus(SOURCE, True, seconds)

        [(uuid, error), *more] = failed.items()
        others = f" (and {len(more)} more)" if more else ""
        message = f"container usage of {uuid}{others} is unknown and omitted: {error}"
        return SourceStatus(SOURCE, False, seconds, getattr(error, "reason", "error"), message)


def add_owners(
    devices: Iterable[Device],
    usages: Iterable[DeviceUsage],
    assignments: Iterable[Assignment],
    owners: OwnersByPid,
) -> dict[str, list[OwnedUsage]]:
    """Adds holders and owners of processes to the usage of all devices.

    Returns the usages of each GPU, by UUID. `devices`: all devices. Those that did not answer are
    included, because they can have holders.
    """
    answers = {usage.device.key: usage for usage in usages}
    known = {device.key: device for device in devices}
    known |= {key: usage.device for key, usage in answers.items()}
    held = group_by(
        [assignment for assignment in assignments if assignment.holder.key],
        lambda assignment: assignment.device,
    )

    owned: dict[str, list[OwnedUsage]] = {}
    for key in sorted(known.keys() | held.keys()):
        uuid, gi_id = split_key(key)
        gpu = known.get(uuid) or Device(None, uuid)
        own = owned.setdefault(uuid, [])

        if gpu.mig_enabled and gi_id is None:
            # Its instances have its usage.
            usage = None
            has_accounts = False
        else:
            usage = answers.get(key)
            # An instance without usage no longer exists if its GPU answered.
            has_accounts = usage is not None or uuid not in answers
        if not has_accounts and key not in held:
            continue

        if usage is None:
            device = known.get(key) or replace(gpu, gi_id=gi_id)
            usage = DeviceUsage(device, window_ns=0)
        own.append(add_owners_to_device(usage, held.get(key, ()), owners))
    return owned


def add_owners_to_device(
    usage: DeviceUsage, assignments: Sequence[Assignment], owners: OwnersByPid
) -> OwnedUsage:
    """Combines the usage, holders and processes of one device."""
    if usage.processes is None:
        holders, _ = _merge_workloads((), assignments)
        return OwnedUsage(usage, holders)

    listed = {process.pid: process for process in usage.own_processes}
    busy_ns = usage.process_busy_ns or {}
    # A process that ended during the reading may have worked, but is not listed.
    worked = {pid for pid, ns in busy_ns.items() if ns != 0 and pid != HIDDEN_PID}
    pids = sorted(listed.keys() | worked)

    owner_of = {pid: owners.get(pid, NOT_IN_POD) for pid in pids}
    holders, workloads = _merge_workloads(owner_of.values(), assignments)
    held = {holder.key for holder in holders}

    processes = []
    for pid in pids:
        owner = _find_owner(owner_of[pid], workloads, held)
        if pid in listed:
            process = OwnedProcess(pid, owner, busy_ns.get(pid, 0), listed[pid].memory)
        else:
            process = OwnedProcess(pid, owner, busy_ns[pid], only_busy=True)
        processes.append(process)

    # Each of these steps can change the owner or the busy time of processes.
    processes, mps_busy_ns = _attribute_mps(processes, usage, owner_of)
    processes, by_samples = _attribute_hidden(processes, usage, owner_of)
    return OwnedUsage(usage, holders, tuple(processes), mps_busy_ns, by_samples)


def _attribute_hidden(
    processes: list[OwnedProcess], usage: DeviceUsage, owner_of: OwnersByPid
) -> tuple[list[OwnedProcess], frozenset[Owner]]:
    """Attributes the busy time of processes whose pids the context-switch log hides.

    If all hidden processes have the same owner, it gets this time. Otherwise, the driver's samples
    divide it, and the second value contains the owners.
    """
    hidden_ns = (usage.process_busy_ns or {}).get(HIDDEN_PID)
    if not hidden_ns:
        return processes, frozenset()

    hidden = {pid for pid, owner in owner_of.items() if owner.may_be_hidden}
    # The log names these.
    hidden.difference_update(usage.resident_ns or ())
    owners = _list_owners(processes, hidden)
    if not owners:
        # Any container may have been busy, so the part of each is unknown.
        return [*processes, _make_hidden("unknown", hidden_ns)], frozenset()
    if len(owners) == 1:
        [owner] = owners
        return [*processes, _make_hidden(owner, hidden_ns)], frozenset()

    weights = {pid: usage.sampled_busy_ns.get(pid, 0) for pid in sorted(hidden)}
    if not any(weights.values()):
        # The parts of these owners are unknown. Those of all other containers are known.
        processes = _change(processes, hidden, busy_ns=None)
        return [*processes, _make_hidden("host", hidden_ns)], owners

    for pid, part in divide_exactly(hidden_ns, weights).items():
        processes = _change(processes, (pid,), busy_ns=part)
    return processes, owners


def _make_hidden(owner: Owner, busy_ns: int) -> OwnedProcess:
    return OwnedProcess(HIDDEN_PID, owner, busy_ns, only_busy=True)


def _list_owners(processes: Iterable[OwnedProcess], pids: Collection[int]) -> frozenset[Owner]:
    return frozenset(process.owner for process in processes if process.pid in pids)


def _change(
    processes: Iterable[OwnedProcess], pids: Collection[int], **changes: Any
) -> list[OwnedProcess]:
    """Returns all processes, with these changes to those in `pids`."""
    changed = []
    for process in processes:
        if process.pid in pids:
            process = replace(process, **changes)
        changed.append(process)
    return changed


def _merge_workloads(
    owners: Iterable[ProcessOwner], assignments: Sequence[Assignment]
) -> tuple[dict[Workload, float | None], dict[WorkloadKey, Workload]]:
    """Returns the share of each holder, and users and holders by key.

    A holder gets the UID and user of its processes if its source has none.
    """
    workloads: dict[WorkloadKey, Workload] = {}
    for owner in owners:
        if owner.workload:
            workloads.setdefault(owner.workload.key, owner.workload)

    shares = {}
    for assignment in assignments:
        holder = assignment.holder
        known = workloads.get(holder.key, holder)
        uid = holder.uid or known.uid
        workloads[holder.key] = structs.replace(holder, uid=uid, user=known.user)
        shares[holder.key] = assignment.share

    holders = {workloads[key]: shares[key] for key in sorted(shares)}
    return holders, workloads


def _find_owner(
    owner: ProcessOwner, workloads: Mapping[WorkloadKey, Workload], held: Collection[WorkloadKey]
) -> Owner:
    """`held`: the keys of the holders of the device."""
    outside: Owner = "unknown" if owner.problem else "host"
    user = owner.workload
    if user is None or not user.key:
        return outside
    # If a scheduler lists jobs on the device, processes of users beside them are no workloads.
    if user.user and held and user.key not in held:
        return outside

    workload = workloads[user.key]
    if user.uid and workload.uid not in ("", user.uid):
        # The pod was recreated with the same name, and this process is of the old one.
        return "host"
    return workload


def _attribute_mps(
    processes: list[OwnedProcess], usage: DeviceUsage, owner_of: OwnersByPid
) -> tuple[list[OwnedProcess], int | None]:
    """Attributes the busy time of MPS servers.

    The driver reports only the server's time, for all its clients. If all clients have the same
    owner, it gets this time. Otherwise, the time is returned as the second value, and the busy time
    of each client is unknown.
    """
    server_pids = {pid for pid, owner in owner_of.items() if owner.is_mps_server}
    servers = [process for process in processes if process.pid in server_pids]
    clients = _find_mps_clients(usage)
    client_owners = _list_owners(processes, clients)
    if servers and len(client_owners) == 1:
        [owner] = client_owners
        # The server is no process of the container.
        return _change(processes, server_pids, owner=owner, only_busy=True), None

    processes = _change(processes, server_pids, owner="host")
    processes = _change(processes, clients, busy_ns=None)
    if not clients:
        return processes, None
    if not servers:
        # The servers are not visible: all busy time of the device is theirs.
        return processes, usage.busy_ns or 0
    return processes, sum(server.busy_ns or 0 for server in servers)


def _find_mps_clients(usage: DeviceUsage) -> set[int]:
    """Returns the clients whose busy time the driver does not report."""
    reported = usage.process_busy_ns or {}
    clients = {process.pid for process in usage.own_processes if process.mps}
    return clients - reported.keys()


def _find_unallocated(
    usages: Mapping[str, Sequence[OwnedUsage]], allocation: Allocation
) -> set[tuple[str, WorkloadKey]]:
    """Returns device key and workload key of each pod that uses a device without an allocation.

    Returns nothing if the kubelet does not answer or the node has no device plugin. Omits pods with
    an unmapped allocation, and devices that a scheduler has reserved for unknown pods.
    """
    if not kubelet_answers(allocation):
        return set()

    allocated = set()
    for assignment in allocation.assignments:
        if assignment.source not in LAST_RESORT:
            allocated.add((assignment.device, assignment.holder.key))
    if not allocated and not allocation.offered:
        return set()

    unclear = {request.pod_name for request in allocation.vcuda}
    unclear.update(entry.holder.pod_name for entry in allocation.unmapped)

    reserved = allocation.reserved
    used: set[tuple[str, WorkloadKey]] = set()
    for key, pod in _list_users(usages):
        if key not in reserved and pod.pod_name not in unclear:
            used.add((key, pod.key))
    return used - allocated


def _list_users(usages: Mapping[str, Sequence[OwnedUsage]]) -> Iterator[tuple[str, Workload]]:
    """Yields the key of each device with each pod that uses it."""
    for owned in chain.from_iterable(usages.values()):
        for owner in owned.owners:
            if isinstance(owner, Workload) and owner.pod:
                yield owned.device.key, owner


def _list_processes(usage: DeviceUsage, owners: OwnersByPid) -> list[RunningProcess]:
    processes = []
    for process in usage.processes or ():
        owner = owners.get(process.pid, NOT_IN_POD)
        workload = owner.workload or owner.container

        ratio = None
        if usage.process_busy_ns is not None and usage.window_ns:
            # Without its pid in the log, a process may have been hidden.
            unnamed = None if HIDDEN_PID in usage.process_busy_ns else 0
            busy_ns = usage.process_busy_ns.get(process.pid, unnamed)
            if busy_ns is not None:
                ratio = busy_ns / usage.window_ns

        processes.append(
            RunningProcess(process.pid, process.memory, ratio, workload, owner.command)
        )
    return processes


def _is_shared(usage: DeviceUsage, owners: OwnersByPid) -> bool:
    """Returns True if several workloads use the device. Other processes count one by one."""
    users = set()
    for process in usage.own_processes:
        users.add(owners[process.pid].workload or process.pid)
    return len(users) > 1


def _switches_status(answers: Iterable[DeviceUsage]) -> list[SourceStatus]:
    """Returns the status of the context-switch logs. Empty if no GPU uses a log."""
    logs = select_known(answer.problems.switches for answer in answers)
    if not logs:
        return []

    for log in logs:
        if log.fallback:
            return [SourceStatus(SWITCHES, False, 0.0, log.fallback_reason, log.fallback)]
    return [SourceStatus(SWITCHES, True, 0.0)]
