"""One turn of the usage loop: reads the activity of processes on each GPU and attributes it to containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from podgpu.agent.telemetry_turn import TelemetryResult
from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.gpu.source import Telemetry, UsageAnswer
from podgpu.holders.annotations import find_reserved
from podgpu.holders.merge import LAST_RESORT
from podgpu.holders.reader import AllocationResult
from podgpu.model import (
    NS,
    Device,
    DeviceUsage,
    HolderUsage,
    NamespaceUsage,
    RunningProcess,
    SlotUsage,
    SourceStatus,
    Workload,
    WorkloadKey,
)
from podgpu.usage.attribution import GpuTurn, make_turns
from podgpu.usage.containers import ContainerFinder, NameSource, OwnersByPid, ProcessOwners
from podgpu.usage.ledger import Ledger
from podgpu.workers import ErrorCounts, Result, Workers

SOURCE = "usage"
SWITCHES = "switches"
_KUBELET = "kubelet"  # the only source that lists every container of the node

Results = Mapping[str, Result[UsageAnswer]]


@dataclass(frozen=True, slots=True)
class UsageResult:
    """Usage by device. In MIG mode, energy belongs to the GPU, and everything else to its instances."""

    holders: Mapping[str, Mapping[WorkloadKey, tuple[Workload, HolderUsage]]] = field(
        default_factory=dict
    )  # by device key
    devices: Mapping[str, SlotUsage] = field(default_factory=dict)  # by device key
    namespaces: tuple[NamespaceUsage, ...] = ()  # including containers that have ended
    at: float | None = None  # Unix time
    sources: tuple[SourceStatus, ...] = ()
    processes: Mapping[str, Sequence[RunningProcess]] = field(default_factory=dict)  # by device key


class UsageTurn:
    def __init__(
        self,
        telemetry: Telemetry,
        finder: ContainerFinder,
        names: NameSource,
        workers: Workers,
        errors: ErrorCounts,
        deadline: float,
        clock: Clock,
        unallocated_after: float,
    ) -> None:
        self._telemetry = telemetry
        self._processes = ProcessOwners(finder, names)
        self._workers = workers
        self._errors = errors
        self._deadline = deadline
        self._clock = clock
        self._ledger = Ledger(unallocated_after=unallocated_after)
        self._charged_at: float | None = None
        self._shared: frozenset[str] = frozenset()  # keys of devices with processes of several containers
        self._lacking: frozenset[tuple[str, str, str]] = frozenset()  # unsupported: (worker, value, reason)

    def collect(self, telemetry: TelemetryResult, result: AllocationResult) -> UsageResult:
        gpus = [device for device in telemetry.listed if not device.is_instance]
        began, began_at = self._clock.monotonic(), self._clock.wall()
        results = self._workers.run(
            {_worker(g): partial(self._telemetry.usage, g, self._shared) for g in gpus}, self._deadline
        )
        usages = [u for result in results.values() if result.value is not None for u in result.value.usages]
        self._count_errors(results)
        owners = self._processes.find(_pids_of(usages))
        for reason in owners.unknown.values():
            self._errors.add(SOURCE, reason)
        self._shared = frozenset(usage.device.key for usage in usages if _is_shared(usage, owners))
        elapsed = 0 if self._charged_at is None else round((began - self._charged_at) * NS)
        self._charged_at = began
        turns = make_turns(telemetry.devices, usages, result.allocation.assignments, owners)
        self._ledger.charge(turns, elapsed, _find_unallocated(turns, result))
        reported = {source.device for source in telemetry.sources if not source.up}
        failed = {g.uuid: error for g in gpus if (error := results[_worker(g)].error) and g.uuid not in reported}
        status = self._make_status(self._clock.monotonic() - began, owners, failed)
        return UsageResult(
            self._ledger.list_holders(began_at),
            self._ledger.list_devices(),
            self._ledger.list_namespaces(),
            at=began_at,
            sources=(status, *_switches_status(results)),
            processes={usage.device.key: _list_processes(usage, owners) for usage in usages},
        )

    def _count_errors(self, results: Results) -> None:
        answers = {worker: result.value for worker, result in results.items() if result.value is not None}
        reasons = [result.error.reason for result in results.values() if isinstance(result.error, SourceError)]
        for answer in answers.values():
            reasons += [*answer.errors, *("bad_value" for _ in answer.dropped)]
            for reason in answer.switches.errors if answer.switches is not None else ():
                self._errors.add(SWITCHES, reason)
        # An unsupported value is counted as an error once per GPU, not in every turn.
        kept = {lack for lack in self._lacking if lack[0] in results.keys() - answers.keys()}
        lacking = kept | {(worker, *lack) for worker, answer in answers.items() for lack in answer.lacks}
        reasons += [reason for _, _, reason in lacking - self._lacking]
        self._lacking = frozenset(lacking)
        for reason in reasons:
            self._errors.add(SOURCE, reason)

    def _make_status(self, seconds: float, owners: OwnersByPid, failed: Mapping[str, Exception]) -> SourceStatus:
        """Returns an error if podgpu is not in the host's PID namespace, because the driver then lists no processes."""
        try:
            self._processes.require_permission()
        except SourceError as e:
            if e.reason not in owners.unknown.values():  # other errors are already counted for each process
                self._errors.add(SOURCE, e.reason)
            return SourceStatus(SOURCE, False, seconds, e.reason, str(e))
        for uuid, error in failed.items():
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            message = f"container usage of {uuid}{others} is unknown and omitted: {error}"
            return SourceStatus(SOURCE, False, seconds, getattr(error, "reason", "error"), message)
        return SourceStatus(SOURCE, True, seconds)


def _find_unallocated(gpus: Iterable[GpuTurn], result: AllocationResult) -> set[tuple[str, WorkloadKey]]:
    """Returns device and workload of each pod that uses a device without an allocation.

    Returns nothing while the kubelet does not answer, or if the node has no device plugin. Omits pods with an
    unmapped allocation, and devices that are reserved for unknown pods.
    """
    allocation = result.allocation
    allocated = {(a.device, a.holder.key) for a in allocation.assignments if a.source not in LAST_RESORT}
    is_known = any(source.name == _KUBELET and source.up for source in result.sources)
    if not is_known or not (allocated or allocation.offered):
        return set()
    unclear = {(one.namespace, one.pod) for one in (*(u.holder for u in allocation.unmapped), *allocation.vcuda)}
    reserved = find_reserved(allocation)
    used = {
        (turn.device.key, process.owner)
        for gpu in gpus
        for turn in gpu.devices
        for process in turn.processes or ()
        if isinstance(process.owner, Workload) and process.owner.pod and turn.device.key not in reserved
    }
    return {
        (key, owner.key)
        for key, owner in used
        if (key, owner.key) not in allocated and (owner.namespace, owner.pod) not in unclear
    }


def _list_processes(usage: DeviceUsage, owners: OwnersByPid) -> list[RunningProcess]:
    named = {**owners.nameless, **owners.workloads}
    processes = []
    for process in usage.processes or ():
        pid = process.pid
        busy_ns = None if usage.process_busy_ns is None else usage.process_busy_ns.get(pid, 0)
        ratio = busy_ns / usage.window_ns if busy_ns is not None and usage.window_ns else None
        processes.append(RunningProcess(pid, process.memory, ratio, named.get(pid), owners.commands.get(pid, "")))
    return processes


def _pids_of(usages: Iterable[DeviceUsage]) -> set[int]:
    listed = {process.pid for usage in usages for process in usage.processes or ()}
    return listed.union(*(usage.process_busy_ns or () for usage in usages))


def _is_shared(usage: DeviceUsage, owners: OwnersByPid) -> bool:
    pids = {process.pid for process in usage.processes or () if process.device == usage.device.key}
    return len({owners.workloads.get(pid, pid) for pid in pids}) > 1


def _switches_status(results: Results) -> list[SourceStatus]:
    """Returns the status of the context switch log, if it is enabled."""
    answers = [result.value for result in results.values() if result.value is not None]
    statuses = [answer.switches for answer in answers if answer.switches is not None]
    if not statuses:
        return []
    fallback = next((status for status in statuses if status.fallback), None)
    if fallback is None:
        return [SourceStatus(SWITCHES, True, 0.0)]
    return [SourceStatus(SWITCHES, False, 0.0, fallback.fallback_reason, fallback.fallback)]


def _worker(gpu: Device) -> str:
    return f"usage-{gpu.uuid}"
