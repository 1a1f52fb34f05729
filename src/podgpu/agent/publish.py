"""Builds the node's document from the results of the three loops, renders it on request, and logs changes."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec

from podgpu import __version__
from podgpu.agent.allocation_turn import AllocationPart
from podgpu.agent.counter_feeds import COUNTERS
from podgpu.agent.health import GpuHealth
from podgpu.agent.process_metrics import process_families
from podgpu.agent.telemetry_turn import TelemetryPart
from podgpu.agent.usage_turn import UsagePart
from podgpu.clock import FaultLog
from podgpu.errors import few_of
from podgpu.holders.unmapped import describe, explain
from podgpu.metrics.encode import NO_METRICS, Body, Exposition, Family, encode
from podgpu.metrics.families import THROTTLE_REASONS
from podgpu.metrics.fields import fields
from podgpu.metrics.gpu_manager import render_gpu_manager
from podgpu.metrics.names import gpu_figures, in_legacy_units, slot_figures
from podgpu.metrics.render import Policy, render_dcgm, render_podgpu, render_self
from podgpu.model import (
    RESERVATION,
    Device,
    DeviceState,
    EntityState,
    Holder,
    MigInstance,
    NodeState,
    PodLabels,
    Reading,
    SourceStatus,
    Unmapped,
    Workload,
    XidCount,
    encode_node,
    source_statuses,
)

_log = logging.getLogger("podgpu")
K = TypeVar("K")
T = TypeVar("T")
ExpositionName = Literal["fresh", "stale", "gpu_manager"]
SIMULATED = "simulated"  # name of the telemetry source of the demo
_LARGE = 2_000  # series; a larger exposition takes milliseconds and is rendered outside the event loop
_NO_FIGURES = (
    *("uuid", "index", "model", "pci_bus_id", "minor", "maker", "mig_enabled", "hidden", "conditions", "last_holders"),
)
MAX_LINES = 5  # log lines per source and reason in one round; the rest is summarised
FAULT_SECONDS = 60.0  # minimum interval between two log lines about the same fault of a source
_SAME_FAULT = {"hung": "deadline"}  # a slow call is reported as `deadline` in its own turn and as `hung` in later turns


@dataclass(frozen=True)
class NodeParts:
    """Latest results of the three loops. Immutable."""

    telemetry: TelemetryPart = field(default_factory=TelemetryPart)
    allocation: AllocationPart = field(default_factory=AllocationPart)
    usage: UsagePart = field(default_factory=UsagePart)
    health: tuple[GpuHealth, ...] = ()
    xids: Mapping[str, tuple[tuple[XidCount, ...], int]] = field(default_factory=dict)  # by device: counts, newest XID
    clock_events: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)  # by device
    counter_sources: tuple[SourceStatus, ...] = ()
    counter_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    pod_labels: PodLabels = field(default_factory=dict)
    configured: frozenset[int] = frozenset()  # ids of the fields in the counter file
    taken_at: float | None = None
    exporter_id: str = ""
    interval: float | None = None

    @property
    def sources(self) -> tuple[SourceStatus, ...]:
        return (*self.telemetry.sources, *self.allocation.sources, *self.usage.sources, *self.counter_sources)


# -- the document --------------------------------------------------------------------------------------------------


def build_node_state(parts: NodeParts, node: str) -> NodeState:
    telemetry, allocation, usage = parts.telemetry, parts.allocation, parts.usage
    errors: Counter[tuple[str, str]] = Counter()
    for counts in (telemetry.errors, allocation.errors, parts.counter_errors, usage.errors):
        errors.update(counts)
    names = fields()
    return NodeState(
        producer="podgpu",
        version=__version__,
        node=node,
        exporter_id=parts.exporter_id,
        interval_seconds=parts.interval,
        taken_at=parts.taken_at,
        holders_at=allocation.at,
        usage_at=usage.at,
        simulated=any(source.name == SIMULATED for source in telemetry.sources),
        gpus_expected=telemetry.gpus_expected,
        gpus_visible=telemetry.gpus_visible,
        gpus_lost=telemetry.gpus_lost,
        devices=tuple(_DeviceBuilder(parts).build_gpus()),
        namespaces=usage.usage.namespaces,
        sources=tuple(source_statuses(parts.sources, errors, allocation.unmapped)),
        entities=tuple(
            EntityState(o.kind, dict(o.labels), {names[i].name: v for i, v in o.values.items()})
            for o in telemetry.others
        ),
        vcuda=tuple(
            msgspec.structs.replace(request, uid=allocation.api_uids.get(request.uid, request.uid))
            for request in allocation.vcuda
        ),
        pod_labels={"/".join(pod): dict(labels) for pod, labels in parts.pod_labels.items()},
        dropped={names[i].name: count for i, count in telemetry.dropped.items()},
    )


class _DeviceBuilder:
    """Builds the state of each device from the results of the loops."""

    def __init__(self, parts: NodeParts) -> None:
        telemetry = parts.telemetry
        self._parts = parts
        self._shown = {device.key for device in telemetry.selected}
        self._readings = {reading.device.key: reading for reading in telemetry.readings}
        self._health = {health.device.uuid: health for health in parts.health}
        self._holders = _group_holders(parts)
        self._unsupported: dict[str, list[int]] = {}
        for key, number in telemetry.unsupported:
            self._unsupported.setdefault(key, []).append(number)

    def build_gpus(self) -> Iterator[DeviceState]:
        instances: dict[str, list[MigInstance]] = {}
        devices = self._find_devices()
        for device in devices.values():
            if device.gi_id is not None:
                instance = MigInstance(
                    id=device.gi_id, profile=device.profile, uuids=device.mig_uuids, **self._build_slot(device)
                )
                instances.setdefault(device.uuid, []).append(instance)
        for device in devices.values():
            if device.gi_id is None:
                yield self._build_gpu(device, tuple(instances.get(device.uuid, ())))

    def _find_devices(self) -> dict[str, Device]:
        """Returns the shown devices, hidden ones with holders, usage or XIDs, and the GPUs of MIG instances."""
        telemetry = self._parts.telemetry
        known = {device.key: device for device in telemetry.devices}
        devices = {device.key: device for device in telemetry.selected}
        for health in self._parts.health:
            devices.setdefault(health.device.key, health.device)
        for key in (*self._holders, *self._parts.xids):
            uuid, _, instance = key.partition("/gi")
            gpu = devices.setdefault(uuid, known.get(uuid) or Device(None, uuid, "", ""))
            if instance and key not in devices:
                devices[key] = known.get(key) or replace(gpu, gi_id=int(instance), profile="")
        for device in list(devices.values()):
            if device.gi_id is not None and device.uuid not in devices:
                devices[device.uuid] = replace(device, gi_id=None, profile="", mig_uuids=())
        return devices

    def _build_gpu(self, device: Device, instances: tuple[MigInstance, ...]) -> DeviceState:
        slot, reading = self._build_slot(device), self._readings.get(device.key)
        health = self._health.get(device.uuid, GpuHealth(device))
        values = {} if reading is None else reading.values
        throttled = {reason: values.get(number) for number, reason in THROTTLE_REASONS.items()}
        return DeviceState(
            uuid=device.uuid,
            index=device.index,
            model=device.model,
            pci_bus_id=device.pci_bus_id,
            minor=device.minor,
            maker=device.maker,
            mig_enabled=device.mig_enabled,
            throttled_ns={reason: ns for reason, ns in throttled.items() if isinstance(ns, int)},
            conditions=health.conditions,
            healthy=health.healthy,
            last_holders=health.last_holders,
            instances=instances,
            **gpu_figures(_read_figures(reading)),  # type: ignore[arg-type]
            **slot,
        )

    def _build_slot(self, device: Device) -> dict[str, Any]:
        parts, key, names = self._parts, device.key, fields()
        reading = self._readings.get(key)
        details = () if reading is None else reading.details
        figures, usage = slot_figures(_read_figures(reading)), parts.usage.usage.devices.get(key)
        if figures["memory_used_bytes"] is None and usage is not None:
            figures["memory_used_bytes"] = usage.memory_used_bytes
        xids, last_xid = parts.xids.get(key, ((), None))
        return {
            "hidden": key not in self._shown,
            **figures,
            "usage": usage,
            "holders": tuple(self._holders.get(key, ())),
            "fields": None if reading is None else {names[i].name: value for i, value in reading.values.items()},
            "details": tuple((names[d.field].name, dict(d.labels), d.value) for d in details),
            "unsupported": tuple(names[i].name for i in self._unsupported.get(key, ()) if i in parts.configured),
            "xids": xids,
            "last_xid": last_xid,
            "clock_events": dict(parts.clock_events.get(key, {})),
        }


def _group_holders(parts: NodeParts) -> dict[str, list[Holder]]:
    """Joins assignments and usage by device key."""
    uids = parts.allocation.api_uids
    holders: dict[str, list[Holder]] = {}
    by_device = sorted(parts.usage.usage.holders.items())
    usages = {key: {workload.key: (workload, usage) for workload, usage in entries} for key, entries in by_device}
    for a in parts.allocation.assignments:
        _, usage = usages.get(a.device, {}).pop(a.holder.key, (None, None))
        given: dict[str, Any] = {"source": a.source, "share_ratio": a.share, "replica": a.replica}
        holder = Holder(**_members(a.holder, uids), **given, labels=dict(a.attributes), usage=usage)
        holders.setdefault(a.device, []).append(holder)
    for key, entries in usages.items():
        for workload, usage in entries.values():
            holders.setdefault(key, []).append(Holder(**_members(workload, uids), usage=usage))
    for key in parts.allocation.reserved:
        holders.setdefault(key, []).append(Holder(source=RESERVATION))
    return holders


def _members(workload: Workload, uids: Mapping[str, str]) -> dict[str, Any]:
    """Replaces the kubelet's UID of a static pod by the one in the API server, if known."""
    members = msgspec.structs.asdict(workload)
    members["uid"] = uids.get(workload.uid, workload.uid)
    return members


def _read_figures(reading: Reading | None) -> dict[str, float]:
    if reading is None:
        return {}
    numbers = {i: value for i, value in reading.values.items() if not isinstance(value, str)}
    return {fields()[i].name: value for i, value in in_legacy_units(numbers).items()}


def add_memory(devices: Iterable[Device], readings: Iterable[Reading]) -> tuple[Device, ...]:
    """Adds the total memory, from which allocation sources compute shares."""
    totals = {reading.device.key: slot_figures(_read_figures(reading))["memory_total_bytes"] for reading in readings}
    return tuple(replace(device, memory_bytes=totals.get(device.key)) for device in devices)


def remove_figures(state: NodeState) -> NodeState:
    """Keeps only identity, conditions and sources. Served when the figures are too old."""
    return msgspec.structs.replace(
        state, stale=True, devices=tuple(map(_remove_device_figures, state.devices)), namespaces=(), entities=()
    )


def _remove_device_figures(gpu: DeviceState) -> DeviceState:
    instances = tuple(MigInstance(id=i.id, profile=i.profile, uuids=i.uuids, hidden=i.hidden) for i in gpu.instances)
    return DeviceState(instances=instances, **{member: getattr(gpu, member) for member in _NO_FIGURES})


# -- published data ------------------------------------------------------------------------------------------------


class Published:
    """The document, its JSON and its metrics text after one turn.

    Each is built on the first request, then cached. Concurrent requests share the result. Never waits for a driver.
    """

    def __init__(self, parts: NodeParts, policy: Policy, read_at: float) -> None:
        self.parts = parts
        self._policy = policy
        self.read_at = read_at  # monotonic time of the last telemetry turn
        self._rendering = threading.RLock()
        self._building = threading.Lock()  # separate lock, because probes must not wait for a rendering
        self._state: NodeState | None = None
        self._bodies: dict[bool, Body] = {}
        self._expositions: dict[ExpositionName, Exposition] = {}

    @property
    def state(self) -> NodeState:
        if self._state is None:
            with self._building:
                if self._state is None:
                    self._state = build_node_state(self.parts, self._policy.hostname)
        return self._state

    def node_json(self, fresh: bool) -> Body:
        """Returns the response of `/api/v1/node`, without figures if they are not fresh."""
        return self._once(
            self._bodies, fresh, lambda: Body.of(encode_node(self.state if fresh else remove_figures(self.state)))
        )

    @property
    def fresh(self) -> Exposition:
        return self._exposition(
            "fresh",
            lambda: (
                *render_dcgm(self.state, self._policy),
                *render_podgpu(self.state, self._policy),
                *self._self_families(),
                *self._gpu_manager_families(),
            ),
        )

    @property
    def stale(self) -> Exposition:
        """Metrics about the exporter only. Served when the figures are too old."""
        return self._exposition("stale", self._self_families)

    @property
    def gpu_manager(self) -> Exposition:
        """Metrics with the names of gpu-manager only."""
        return self._exposition("gpu_manager", self._gpu_manager_families) if self._policy.gpu_manager else NO_METRICS

    def _self_families(self) -> list[Family]:
        proc = self._policy.process_metrics
        return [*render_self(self.state), *(process_families(proc) if proc else ())]

    def _gpu_manager_families(self) -> list[Family]:
        return render_gpu_manager(self.state, self._policy) if self._policy.gpu_manager else []

    def exposition_if_made(self, name: ExpositionName) -> Exposition | None:
        return self._expositions.get(name)

    @property
    def is_large(self) -> bool:
        """Estimates before rendering whether the exposition has more than _LARGE series."""
        parts = self.parts
        assignments = len(parts.allocation.assignments)
        virtual = assignments if self._policy.virtual_gpus else 0
        users = sum(len(holders) for holders in parts.usage.usage.holders.values())
        series = len(self._policy.counters) * (len(parts.telemetry.readings) + virtual)
        return series + assignments + 9 * users > _LARGE

    def _exposition(self, name: ExpositionName, families: Callable[[], Iterable[Family]]) -> Exposition:
        return self._once(self._expositions, name, lambda: Exposition.of(encode(families())))

    def _once(self, made: dict[K, T], name: K, make: Callable[[], T]) -> T:
        value = made.get(name)
        if value is None:
            with self._rendering:
                value = made.get(name)
                if value is None:
                    value = made[name] = make()
        return value


# -- log -----------------------------------------------------------------------------------------------------------


class ChangeLog:
    """Logs changes since the last publication, each once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._faults: FaultLog[tuple[str, str]] = FaultLog(clock, FAULT_SECONDS)  # by source and GPU UUID
        self._unsupported: set[tuple[str, int]] = set()
        self._unmapped: frozenset[Unmapped] = frozenset()

    def report(self, parts: NodeParts) -> None:
        for source in parts.sources:
            self._report_source(source)
        present = {(source.name, source.device) for source in parts.sources}
        if any(device for _, device in present):  # without a driver no GPU is listed, so keep their faults
            self._faults.remove(lambda key: key not in present and key[0].startswith("gpu"))
        self._report_unsupported(entry for entry in parts.telemetry.unsupported if entry[1] in parts.configured)
        self._report_unmapped(frozenset(parts.allocation.unmapped))

    def _report_source(self, source: SourceStatus) -> None:
        key = source.name, source.device
        name = f"{source.name} ({source.device})" if source.device else source.name
        if source.up and self._faults.recover(key):
            _log.info("%s: answers again", name)
        # If an edit replaces one mistake in the counters by another, only the message changes.
        fault = source.message if source.name == COUNTERS else _SAME_FAULT.get(source.error, source.error)
        if not source.up and self._faults.fail(key, fault):
            message = source.message.removeprefix(f"{source.name}: ")
            _log.warning("%s: %s; podgpu continues and retries", name, message)

    def _report_unsupported(self, unsupported: Iterable[tuple[str, int]]) -> None:
        new: defaultdict[int, list[str]] = defaultdict(list)
        for key, number in unsupported:
            if (key, number) not in self._unsupported:
                self._unsupported.add((key, number))
                new[number].append(key)
        for number, keys in new.items():
            _log.warning("%s is not supported by %s and has no series there", fields()[number].name, few_of(keys))

    def _report_unmapped(self, unmapped: frozenset[Unmapped]) -> None:
        new: defaultdict[tuple[str, str], list[Unmapped]] = defaultdict(list)
        for assignment in sorted(unmapped - self._unmapped, key=lambda a: (a.device_id, describe(a))):
            new[assignment.source, assignment.reason].append(assignment)
        self._unmapped = unmapped
        for (source, reason), entries in sorted(new.items()):
            explanation = explain(entries[0])
            level = logging.INFO if explanation.harmless else logging.WARNING
            for assignment in entries[:MAX_LINES]:
                _log.log(
                    level,
                    "%s: %s: %s (%s); %s",
                    *(source, describe(assignment), explanation.reason, reason, explanation.advice),
                )
            if len(entries) > MAX_LINES:
                more = len(entries) - MAX_LINES
                _log.log(
                    level, "%s: %d more with the same reason (%s); run podgpu doctor to list all", source, more, reason
                )
