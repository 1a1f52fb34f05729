"""Builds the published `NodeState` from the parts that the three cadences read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from podgpu import __version__
from podgpu import model as old
from podgpu.figures.device import POWER, SIMULATED, TEMPERATURE, memory_of, utilization_of
from podgpu.metrics.families import THROTTLE_REASONS
from podgpu.metrics.fields import fields
from podgpu.metrics.names import in_legacy_units
from podgpu.node_state import (
    Condition,
    DeviceState,
    EntityState,
    Holder,
    HolderUsage,
    MigInstance,
    NamespaceUsage,
    NodeState,
    SlotUsage,
    VcudaRequest,
    XidCount,
    source_statuses,
)

NS = 1_000_000_000
COUNTERS = ("processes", "allocated_ns", "busy_ns", "busy_min_ns", "busy_max_ns", "idle_ns", "energy_mj")
TOTALS = ("busy_ns", "energy_mj", "unattributed_busy_ns", "unattributed_energy_mj")
"""Members with the same name in `DeviceTotals` and `DeviceUsage`."""


def from_snapshot(of: old.Snapshot, node: str = "", exporter_id: str = "", interval: float | None = None) -> NodeState:
    parts = _Parts(of)
    instances: dict[str, list[MigInstance]] = {}
    for device in parts.devices.values():
        if device.gi_id is not None:
            own = MigInstance(id=device.gi_id, profile=device.profile, uuids=device.mig_uuids, **parts.slot(device))
            instances.setdefault(device.uuid, []).append(own)
    gpus = [device for device in parts.devices.values() if device.gi_id is None]
    names = {i: f.name for i, f in fields().items()}
    return NodeState(
        producer="podgpu",
        version=__version__,
        node=node,
        exporter_id=exporter_id,
        interval_seconds=interval,
        taken_at=of.taken_at or None,
        usage_at=of.usage.at or None,
        simulated=any(o.source == SIMULATED for o in of.outcomes),
        gpus_expected=of.device_count.expected,
        gpus_visible=of.device_count.visible,
        gpus_lost=of.device_count.lost,
        devices=tuple(parts.gpu(gpu, tuple(instances.get(gpu.uuid, ()))) for gpu in gpus),
        namespaces=tuple(_namespace(t) for t in of.usage.namespaces),
        sources=tuple(source_statuses(of.outcomes, of.errors, of.unmapped)),
        entities=tuple(
            EntityState(o.kind, dict(o.labels), {names[i]: v for i, v in o.values.items()}) for o in of.others
        ),
        vcuda=tuple(VcudaRequest(**_names(r.holder), cores=r.cores, memory_blocks=r.memory_blocks) for r in of.vcuda),
        pod_labels={"/".join(pod): dict(labels) for pod, labels in of.pod_labels.items()},
        dropped={names[i]: n for i, n in of.dropped.items()},
    )


class _Parts:
    """The lists of a snapshot, by device."""

    def __init__(self, of: old.Snapshot) -> None:
        self.of = of
        self.shown = {d.key for d in of.devices}
        self.devices = {d.key: d for d in of.devices}
        for health in of.health:
            self.devices.setdefault(health.device.key, health.device)
        for device in list(self.devices.values()):
            if device.gi_id is not None and device.uuid not in self.devices:
                self.devices[device.uuid] = replace(device, gi_id=None, profile="", mig_uuids=())
        for key in [entry.device for entries in (of.assignments, of.usage.containers, of.xids) for entry in entries]:
            uuid, _, instance = key.partition("/gi")
            gpu = self.devices.setdefault(uuid, old.Device(-1, uuid, "", ""))
            if instance:
                self.devices.setdefault(key, replace(gpu, gi_id=int(instance), profile=""))
        self.readings = {r.device.key: r for r in of.readings}
        self.totals = {t.device: t for t in of.usage.devices}
        self.health = {h.device.key: h for h in of.health}

    def slot(self, device: old.Device) -> dict[str, Any]:
        of, key, names = self.of, device.key, fields()
        reading, totals = self.readings.get(key), self.totals.get(key, old.DeviceTotals(key))
        values = (
            {}
            if reading is None
            else in_legacy_units({i: v for i, v in reading.values.items() if not isinstance(v, str)})
        )
        used, total = memory_of(values, totals.memory_used)
        events = {event for device_key, event in (*of.clock_events, *of.clock_event_totals) if device_key == key}
        return {
            "hidden": key not in self.shown,
            "utilization_ratio": utilization_of(values),
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "usage": None
            if key not in self.totals
            else SlotUsage(
                memory_used_bytes=totals.memory_used,
                **{name: getattr(totals, name) for name in TOTALS},
                unattributed_memory_bytes=totals.unattributed_memory,
                method=totals.method or "",
            ),
            "holders": tuple(self._holders(key)),
            "fields": None if reading is None else {names[i].name: v for i, v in reading.values.items()},
            "details": ()
            if reading is None
            else tuple((names[d.field].name, dict(d.labels), d.value) for d in reading.details),
            "unsupported": tuple(names[i].name for device_key, i in of.unsupported if device_key == key),
            "xids": tuple(XidCount(t.xid, t.total, t.last_seen, t.in_window) for t in of.xids if t.device == key),
            "last_xid": of.last_xid.get(key),
            "clock_events": {
                e: (of.clock_events.get((key, e), 0), of.clock_event_totals.get((key, e), 0)) for e in sorted(events)
            },
        }

    def gpu(self, device: old.Device, instances: tuple[MigInstance, ...]) -> DeviceState:
        slot, health = self.slot(device), self.health.get(device.key, old.DeviceHealth(device))
        values = slot["fields"] or {}
        reading = self.readings.get(device.key)
        numbers = (
            {}
            if reading is None
            else in_legacy_units({i: v for i, v in reading.values.items() if not isinstance(v, str)})
        )
        throttled = {reason: values.get(fields()[i].name) for i, reason in THROTTLE_REASONS.items()}
        return DeviceState(
            uuid=device.uuid,
            index=device.index if device.index >= 0 else None,
            model=device.model,
            pci_bus_id=device.pci_bus_id,
            minor=device.minor,
            maker=device.maker,
            mig_enabled=device.mig_enabled,
            power_mw=None if POWER not in numbers else round(numbers[POWER] * 1000),
            temperature_celsius=numbers.get(TEMPERATURE),
            throttled_ns={reason: ns for reason, ns in throttled.items() if isinstance(ns, int)},
            conditions=tuple(Condition(*finding) for finding in health.findings),
            healthy=health.fine,
            last_holders=health.last_holders,
            instances=instances,
            **slot,
        )

    def _holders(self, key: str) -> Iterator[Holder]:
        used = {u.holder.who: u for u in self.of.usage.containers if u.device == key}
        for a in self.of.assignments:
            if a.device == key:
                usage = used.pop(a.holder.who, None)
                own = None if usage is None else self._usage(usage)
                yield Holder(
                    **_names(a.holder),
                    source=a.source,
                    share_ratio=a.share,
                    replica=a.replica,
                    labels=dict(a.attributes),
                    usage=own,
                )
        for usage in used.values():
            yield Holder(**_names(usage.holder), usage=self._usage(usage))  # type: ignore[arg-type]

    def _usage(self, of: old.ContainerUsage) -> HolderUsage:
        at = self.of.usage.at or self.of.taken_at
        return HolderUsage(
            utilization_ratio=of.utilization,
            memory_used_bytes=of.memory,
            **{name: getattr(of, name) for name in COUNTERS},
            power_ratio=of.power_part,
            idle_since=at - of.idle_run_ns / NS if of.idle_run_ns else None,
        )


def _names(of: old.Workload) -> dict[str, str]:
    return {name: getattr(of, name) for name in old.WORKLOAD_PARTS}


def _namespace(of: old.NamespaceTotals) -> NamespaceUsage:
    model, _, profile = of.model.partition(" MIG ")
    return NamespaceUsage(of.namespace, model, profile, of.allocated_ns, of.busy_ns, of.energy_mj)


def without_figures(state: NodeState) -> NodeState:
    """Identity, conditions and sources only. Served when the figures are too old."""
    return msgspec.structs.replace(
        state, stale=True, devices=tuple(map(_device_without_figures, state.devices)), namespaces=(), entities=()
    )


def _device_without_figures(gpu: DeviceState) -> DeviceState:
    return DeviceState(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        pci_bus_id=gpu.pci_bus_id,
        minor=gpu.minor,
        maker=gpu.maker,
        mig_enabled=gpu.mig_enabled,
        hidden=gpu.hidden,
        conditions=gpu.conditions,
        last_holders=gpu.last_holders,
        instances=tuple(MigInstance(id=i.id, profile=i.profile, uuids=i.uuids, hidden=i.hidden) for i in gpu.instances),
    )
