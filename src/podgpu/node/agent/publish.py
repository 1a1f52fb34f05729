"""Builds the node's document from the latest readings, renders it on request, and logs changes."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from podgpu import __version__
from podgpu.clock import Clock, FaultLog
from podgpu.errors import few_of
from podgpu.metrics.conditions import ORPHANED, UNALLOCATED
from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import NO_LABELS, Body, Family, Sample, encode, families_in
from podgpu.metrics.fields import THROTTLE_REASONS, by_name, fields
from podgpu.metrics.labels import Policy
from podgpu.metrics.protobuf import encode_protobuf
from podgpu.metrics.render import render_gpu_manager, render_own, render_self
from podgpu.metrics.values import device_figures, gpu_figures, in_legacy_units
from podgpu.model import (
    RESERVATION,
    Allocation,
    Assignment,
    Condition,
    Device,
    DeviceState,
    EntityState,
    FieldValues,
    GpuOrInstance,
    GpuReading,
    Holder,
    MigInstance,
    NodeState,
    Orphan,
    PodLabels,
    RunningProcess,
    SourceStatus,
    Unmapped,
    encode_node,
    group_by,
    group_by_key,
    split_key,
)
from podgpu.node.agent.gpus import TelemetryResult
from podgpu.node.agent.health import MAX_DETAIL, DeviceHealth, GpuHealth, HealthReport
from podgpu.node.agent.usage_collector import UsageResult
from podgpu.node.holders.annotations import find_reserved
from podgpu.node.holders.unmapped_log import UnmappedLog
from podgpu.once import computed_once
from podgpu.workers import ErrorCounts

_log = logging.getLogger("podgpu")
RenderedText = Literal[
    "fresh",
    "fresh_protobuf",
    "stale",
    "stale_protobuf",
    "gpu_manager",
    "fresh_json",
    "stale_json",
]
"""Metrics text or JSON. The stale variants omit all values. They are served if values are old."""
UnsupportedField = tuple[str, str]  # field and device key
COUNTERS = "counters"  # name of the source that reads the counter file
_STARTED_AT = time.time()
_IDENTITY = ("uuid", "index", "model", "pci_bus_id", "minor", "maker", "mig_enabled")
_NO_FIGURES = (*_IDENTITY, "hidden", "conditions", "last_holders")
_UNUSED = GpuOrInstance()
_NO_EVENTS = DeviceHealth()
_UNCHECKED = GpuHealth()
_UNREAD = GpuReading({})
_POWER_LIMIT = 164  # DCGM_FI_DEV_ENFORCED_POWER_LIMIT
_FAULT_SECONDS = 60.0  # minimum time between two log lines about the same fault
_GIB = 1024**3
_NAMED = 2  # users or processes in the text of a condition
_SAME_FAULT = {"hung": "deadline"}  # a call that hangs is first reported as `deadline`


# The document


def build_node_state(
    telemetry: TelemetryResult,
    allocation: Allocation,
    usage: UsageResult,
    health: HealthReport,
    unsupported: Iterable[UnsupportedField],
    pod_labels: PodLabels,
    **members: Any,
) -> NodeState:
    """Builds the document from the latest readings.

    `unsupported`: result of `list_unsupported`.
    `members`: other fields of `NodeState`.
    """
    holders = _join_holders(allocation, usage)
    devices = _build_gpus(telemetry, holders, usage, health, unsupported)
    entities: list[EntityState] = []
    for reading in telemetry.readings.values():
        entities.extend(reading.entities)
    vcuda = [allocation.with_api_uid(request) for request in allocation.vcuda]

    labels_of = {}
    for pod, labels in pod_labels.items():
        labels_of["/".join(pod)] = dict(labels)

    dropped = {}
    for number, count in telemetry.dropped.items():
        dropped[fields()[number].name] = count

    return NodeState(
        producer="podgpu",
        version=__version__,
        taken_at=telemetry.at,
        holders_at=allocation.at,
        usage_at=usage.at,
        simulated=any(source.name == "simulated" for source in telemetry.sources),
        gpus_expected=telemetry.gpus_expected,
        gpus_visible=telemetry.gpus_visible,
        gpus_lost=telemetry.gpus_lost,
        devices=devices,
        namespaces=usage.namespaces,
        entities=tuple(entities),
        vcuda=tuple(vcuda),
        pod_labels=labels_of,
        dropped=dropped,
        **members,
    )


def _join_holders(allocation: Allocation, usage: UsageResult) -> dict[str, list[Holder]]:
    """Returns the holders of each device, by device key. Those with an allocation come first."""
    assigned = group_by(allocation.assignments, lambda each: each.device)
    holders: dict[str, list[Holder]] = {}
    for key in dict.fromkeys([*assigned, *usage.devices]):
        users = {user.key: user for user in usage.devices.get(key, _UNUSED).holders}

        own = []
        for assignment in assigned.get(key, ()):
            user = users.pop(assignment.holder.key, None)
            own.append(_make_holder(assignment, user))
        # Those that use the device without an allocation.
        own += users.values()

        if own:
            processes = usage.processes.get(key, ())
            running = [_add_running(holder, processes) for holder in own]
            holders[key] = [allocation.with_api_uid(holder) for holder in running]

    for key in find_reserved(allocation):
        holders.setdefault(key, []).append(Holder(source=RESERVATION))
    return holders


def _make_holder(assignment: Assignment, user: Holder | None) -> Holder:
    """`user`: the same workload with its usage. None if it does not use the device."""
    members = structs.asdict(assignment.holder)

    if user is not None:
        members |= {"user": user.user, "usage": user.usage}
    return Holder(
        **members,
        source=assignment.source,
        share_ratio=assignment.share,
        replica=assignment.replica,
        labels=dict(assignment.attributes),
    )


def _add_running(holder: Holder, processes: Iterable[RunningProcess]) -> Holder:
    """Adds the holder's own processes. On a node with Kubernetes, documents list no processes."""
    if not holder.user:
        return holder

    running = []
    for process in processes:
        if process.owner is not None and process.owner.key == holder.key:
            running.append(structs.replace(process, owner=None))
    return structs.replace(holder, running=tuple(running))


def _build_gpus(
    telemetry: TelemetryResult,
    holders: Mapping[str, Sequence[Holder]],
    usage: UsageResult,
    health: HealthReport,
    unsupported: Iterable[UnsupportedField],
) -> tuple[DeviceState, ...]:
    known = {device.uuid for device in telemetry.devices}
    used = list(holders)
    for key, device_health in health.devices.items():
        uuid, _ = split_key(key)
        # XIDs of GPUs that `podgpu forget` removed are omitted.
        if device_health.xids and uuid in known:
            used.append(key)

    devices = _find_devices(telemetry, used)

    by_key = group_by_key((key, name) for name, key in unsupported)
    builder = _DeviceBuilder(telemetry, telemetry.values, holders, usage, health, by_key)

    gpus = []
    instances: defaultdict[str, list[MigInstance]] = defaultdict(list)
    for device in devices.values():
        if device.gi_id is None:
            gpus.append(device)
        else:
            instances[device.uuid].append(builder.build_instance(device, device.gi_id))
    return tuple(builder.build_gpu(gpu, instances[gpu.uuid]) for gpu in gpus)


@dataclass(frozen=True, slots=True)
class _DeviceBuilder:
    """Builds the devices of the document. All mappings have device keys."""

    _telemetry: TelemetryResult
    _values: Mapping[str, FieldValues]  # of selected devices
    _holders: Mapping[str, Sequence[Holder]]
    _usage: UsageResult
    _health: HealthReport
    _unsupported: Mapping[str, Sequence[str]]

    def build_instance(self, device: Device, number: int) -> MigInstance:
        members = self._build_members(device)
        return MigInstance(id=number, profile=device.profile, uuids=device.mig_uuids, **members)

    def build_gpu(self, device: Device, instances: Sequence[MigInstance]) -> DeviceState:
        values = self._values.get(device.uuid, {})
        health = self._health.gpus.get(device.uuid, _UNCHECKED)
        members = self._build_members(device)

        users = list(members["holders"])
        orphans = list(members["orphans"])
        for instance in instances:
            users += instance.holders
            orphans += instance.orphans
        unallocated = _find_unallocated_use(users)
        orphaned = _find_orphans(orphans)

        throttled_ns = {}
        for number, reason in THROTTLE_REASONS.items():
            ns = values.get(number)
            if isinstance(ns, int):
                throttled_ns[reason] = ns

        reading = self._telemetry.readings.get(device.uuid, _UNREAD)
        limit = reading.slow_values.get(_POWER_LIMIT)
        return DeviceState(
            **{member: getattr(device, member) for member in _IDENTITY},
            **members,
            **gpu_figures(_read_figures(values)),  # type: ignore[arg-type]
            # A GPU that is not selected has no values, and so no details.
            details=reading.details if values else (),
            power_limit_mw=round(limit * 1000) if isinstance(limit, float) else None,
            throttled_ns=throttled_ns,
            instances=tuple(instances),
            conditions=(*health.conditions, *unallocated, *orphaned),
            healthy=health.healthy,
            failures=health.failures,
            last_holders=health.last_holders,
        )

    def _build_members(self, device: Device) -> dict[str, Any]:
        """Returns the members of `GpuOrInstance`."""
        key = device.key
        values = self._values.get(key)
        totals = self._usage.devices.get(key, _UNUSED).usage
        figures = device_figures(_read_figures(values or {}))
        if figures["memory_used_bytes"] is None and totals is not None:
            figures["memory_used_bytes"] = totals.memory_used_bytes

        holders = self._holders.get(key, ())
        unsupported = self._unsupported.get(key, ())
        health = self._health.devices.get(key, _NO_EVENTS)
        return {
            "hidden": device not in self._telemetry.selected,
            **figures,
            "usage": totals,
            "holders": tuple(holders),
            "orphans": self._usage.orphans.get(key, ()),
            "fields": None if values is None else by_name(values),
            "unsupported": tuple(unsupported),
            **structs.asdict(health),
        }


def list_unsupported(
    telemetry: TelemetryResult, configured: Collection[int]
) -> list[UnsupportedField]:
    """Returns name and device key of each configured field that a selected device lacks."""
    names = fields()
    shown = {device.key for device in telemetry.selected}

    unsupported = []
    for reading in telemetry.readings.values():
        for key, number in reading.unsupported:
            if number in configured and key in shown:
                unsupported.append((names[number].name, key))
    return unsupported


def _find_devices(telemetry: TelemetryResult, used: Iterable[str]) -> dict[str, Device]:
    """Returns the devices of the document, by key.

    `used`: keys of devices to include even if they are not selected.
    """
    known = {device.key: device for device in telemetry.devices}
    keys = [device.key for device in telemetry.selected]
    keys += used

    devices: dict[str, Device] = {}
    for key in keys:
        uuid, gi_id = split_key(key)
        gpu = devices.setdefault(uuid, known.get(uuid) or Device(None, uuid))
        if gi_id is not None:
            devices[key] = known.get(key) or replace(gpu, gi_id=gi_id)
    return devices


def _find_unallocated_use(holders: Iterable[Holder]) -> list[Condition]:
    users = []
    times = []
    for holder in holders:
        since = holder.known_usage.unallocated_since
        if since is not None:
            users.append(holder.text)
            times.append(since)
    if not users:
        return []
    return [Condition(UNALLOCATED, min(times), few_of(users, _NAMED)[:MAX_DETAIL])]


def _find_orphans(orphans: Sequence[Orphan]) -> list[Condition]:
    if not orphans:
        return []

    by_size = sorted(orphans, key=attrgetter("memory_used_bytes"), reverse=True)
    texts = [_describe_orphan(orphan) for orphan in by_size]
    since = min(orphan.since for orphan in orphans)
    return [Condition(ORPHANED, since, few_of(texts, _NAMED)[:MAX_DETAIL])]


def _describe_orphan(orphan: Orphan) -> str:
    gib = orphan.memory_used_bytes / _GIB
    text = f"pid {orphan.pid}"
    if orphan.program:
        text += f" ({orphan.program})"
    if orphan.former and orphan.former.text:
        text += f" of {orphan.former.text}"
    return f"{text} holds {gib:.1f} GiB"


def _read_figures(values: FieldValues) -> dict[str, float]:
    """Returns the numbers by name of the field, in the units of dcgm-exporter 4.8."""
    numbers = {}
    for number, value in values.items():
        if not isinstance(value, str):
            numbers[number] = value

    names = fields()
    return {names[number].name: value for number, value in in_legacy_units(numbers).items()}


def add_memory(devices: Iterable[Device], values: Mapping[str, FieldValues]) -> tuple[Device, ...]:
    """Sets the total memory of each device. Allocation sources need it to compute shares."""
    totals = {}
    for key, own in values.items():
        figures = device_figures(_read_figures(own))
        totals[key] = figures["memory_total_bytes"]

    sized = []
    for device in devices:
        memory = totals.get(device.key)
        sized.append(replace(device, memory_bytes=memory))
    return tuple(sized)


def remove_figures(state: NodeState) -> NodeState:
    """Removes all values from the document. Keeps identities, conditions and sources."""
    devices = []
    for gpu in state.devices:
        members = {member: getattr(gpu, member) for member in _NO_FIGURES}
        instances = []
        for instance in gpu.instances:
            bare = MigInstance(
                id=instance.id,
                profile=instance.profile,
                uuids=instance.uuids,
                hidden=instance.hidden,
            )
            instances.append(bare)

        devices.append(DeviceState(instances=tuple(instances), **members))
    return structs.replace(state, stale=True, devices=tuple(devices), namespaces=(), entities=())


# Published data


@dataclass(slots=True)
class LatestResults:
    """The last result of each loop."""

    telemetry: TelemetryResult = field(default_factory=TelemetryResult)
    allocation: Allocation = field(default_factory=Allocation)
    usage: UsageResult = field(default_factory=UsageResult)
    counters: tuple[SourceStatus, ...] = ()  # empty if the counters cannot change


class Publisher:
    """Combines the latest results of the loops, and logs what changes."""

    def __init__(
        self,
        clock: Clock,
        errors: ErrorCounts,
        read_pod_labels: Callable[[], PodLabels],
        *,
        node: str,
        interval_seconds: float,
    ) -> None:
        self._errors = errors
        self._read_pod_labels = read_pod_labels
        self._changes = ChangeLog(clock.monotonic)
        # These members of the documents never change.
        self._constants = {
            "node": node,
            "interval_seconds": interval_seconds,
            "exporter_id": secrets.token_hex(8),
            "counted_since": clock.wall(),
        }

    def make(
        self, results: LatestResults, health: HealthReport, policy: Policy, read_at: float
    ) -> Published:
        """`read_at`: monotonic time of the last telemetry reading."""
        telemetry = results.telemetry
        allocation = results.allocation
        usage = results.usage

        configured = {counter.field.id for counter in policy.counters}
        unsupported = list_unsupported(telemetry, configured)
        sources = telemetry.sources + allocation.sources + usage.sources + results.counters
        self._changes.report(sources, unsupported, allocation.unmapped)

        build = partial(
            build_node_state,
            telemetry,
            allocation,
            usage,
            health,
            unsupported=unsupported,
            pod_labels=self._read_pod_labels(),
            sources=self._errors.add_to(sources, allocation.unmapped),
            **self._constants,
        )
        return Published(build, policy, read_at)


@dataclass(eq=False)
class Published:
    """The document after one reading, its JSON and its metrics text.

    They are built on the first request, in the thread that needs them, and then cached. Building
    never waits for a driver.
    """

    _build: Callable[[], NodeState]
    _policy: Policy
    read_at: float  # monotonic time of the last telemetry reading
    rendered: dict[RenderedText, Body] = field(default_factory=dict)

    _rendering: threading.Lock = field(default_factory=threading.Lock)

    @computed_once
    def state(self) -> NodeState:
        return self._build()

    @property
    def fresh(self) -> Body:
        return self.render("fresh")

    def render(self, text: RenderedText) -> Body:
        with self._rendering:
            if text not in self.rendered:
                self.rendered[text] = Body(self._encode(text))
            return self.rendered[text]

    def _encode(self, text: RenderedText) -> bytes:
        state = self.state
        match text:
            case "fresh":
                return encode(self._render_metrics())
            case "fresh_protobuf":
                return encode_protobuf(self._render_metrics())
            case "stale":
                return encode(self._render_self())
            case "stale_protobuf":
                return encode_protobuf(self._render_self())
            case "gpu_manager":
                return encode(render_gpu_manager(state, self._policy))
            case "fresh_json":
                return encode_node(state)
            case "stale_json":
                return encode_node(remove_figures(state))

    def _render_metrics(self) -> list[Family]:
        policy = self._policy

        families = [*render_dcgm(self.state, policy), *render_own(self.state, policy)]
        if policy.process_metrics:
            families += process_families()
        if policy.gpu_manager:
            families += render_gpu_manager(self.state, policy)
        return families

    def _render_self(self) -> list[Family]:
        families = list(render_self(self.state))
        if self._policy.process_metrics:
            families += process_families()
        return families


def process_families() -> list[Family]:
    """Returns the metrics of the exporter's own process.

    Their names are those of Prometheus' client libraries.
    """
    page = resource.getpagesize()
    size, resident, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    if max_memory == resource.RLIM_INFINITY:
        max_memory = 2**64 - 1

    values = {
        "process_cpu_seconds_total": time.process_time(),
        "process_max_fds": max_files,
        # minus the descriptor that lists the directory
        "process_open_fds": len(os.listdir("/proc/self/fd")) - 1,
        "process_resident_memory_bytes": int(resident) * page,
        "process_start_time_seconds": _STARTED_AT,
        "process_virtual_memory_bytes": int(size) * page,
        "process_virtual_memory_max_bytes": max_memory,
    }

    families = []
    for name, spec in families_in("process").items():
        families.append(spec.of([Sample(NO_LABELS, values[name])]))
    return families


# Log


class ChangeLog:
    """Logs changes of sources, unsupported fields and unmapped assignments, each once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # by source and GPU UUID
        self._faults: FaultLog[tuple[str, str]] = FaultLog(clock, _FAULT_SECONDS)
        self._unsupported: set[UnsupportedField] = set()
        self._unmapped = UnmappedLog()

    def report(
        self,
        sources: Iterable[SourceStatus],
        unsupported: Iterable[UnsupportedField],
        unmapped: Iterable[Unmapped],
    ) -> None:
        """`unsupported`: result of `list_unsupported`."""
        self._report_sources(sources)
        self._report_unsupported(set(unsupported))
        self._unmapped.report(unmapped)

    def _report_sources(self, sources: Iterable[SourceStatus]) -> None:
        for source in sources:
            key = source.name, source.device
            name = f"{source.name} ({source.device})" if source.device else source.name
            if source.up:
                if self._faults.recover(key):
                    _log.info("%s: answers again", name)
                continue

            fault = _SAME_FAULT.get(source.error, source.error)
            if source.name == COUNTERS and source.error == "malformed":
                # Compares mistakes in the counter file by message, so that another one is logged.
                fault = source.message

            if self._faults.fail(key, fault):
                message = source.message.removeprefix(f"{source.name}: ")
                _log.warning("%s: %s; podgpu continues and retries", name, message)

    def _report_unsupported(self, unsupported: set[UnsupportedField]) -> None:
        new = group_by_key(sorted(unsupported - self._unsupported))
        self._unsupported |= unsupported
        for name, keys in new.items():
            _log.warning("%s is not supported by %s and has no series there", name, few_of(keys))
