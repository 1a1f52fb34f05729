"""This module makes figures of the agent's own snapshot. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podgpu.figures.alerts import NodeState, alerts_of
from podgpu.figures.device import (
    POWER,
    SIMULATED,
    TEMPERATURE,
    Condition,
    DeviceFigures,
    HolderFigures,
    ProcessFigures,
    Trouble,
    View,
    is_there,
    memory_of,
    utilization_of,
)
from podgpu.metrics.conditions import LOST
from podgpu.metrics.names import in_legacy_units
from podgpu.model import ContainerUsage, Device, DeviceHealth, DeviceTotals, Snapshot, Value, Who, physical

_NS = 1_000_000_000
_MJ = 1000
Processes = Mapping[str, Sequence[ProcessFigures]]
"""Device key -> what runs there."""


def view_of_snapshot(snapshot: Snapshot, node: str, processes: Processes | None = None) -> View:
    values = {r.device.key: _numbers(r.values) for r in snapshot.readings}
    totals = {t.device: t for t in snapshot.usage.devices}
    health = {h.device.uuid: h for h in snapshot.health}
    holders = _holders(snapshot)
    devices = tuple(
        _figures(
            device,
            node,
            values.get(device.key, {}),
            totals.get(device.key, DeviceTotals(device.key)),
            tuple(holders.get(device.key, {}).values()),
            tuple((processes or {}).get(device.key, ())),
            health.get(device.uuid, DeviceHealth(device)),
        )
        for device in snapshot.devices
    )
    failed = [o for o in snapshot.outcomes if not o.ok]
    trouble = Trouble(tuple(o.source for o in failed), snapshot.device_count.lost)
    alerts = alerts_of([NodeState(node, devices, trouble=trouble)])
    broken = (alert.text for alert in alerts if alert.uuid or alert.severity == "broken")
    notes = (*broken, *(f"{o.source}: {o.message or o.error}" for o in failed))
    simulated = any(o.source == SIMULATED for o in snapshot.outcomes)
    return View(devices, notes, simulated=simulated, alerts=alerts, trouble=trouble)


def _figures(
    device: Device,
    node: str,
    values: Mapping[int, float],
    totals: DeviceTotals,
    holders: tuple[HolderFigures, ...],
    processes: tuple[ProcessFigures, ...],
    health: DeviceHealth,
) -> DeviceFigures:
    """`health` is the GPU's, also of an instance: what is wrong with the one is wrong with the other."""
    used, total = memory_of(values, totals.memory_used)
    conditions = tuple(Condition.of(*finding) for finding in health.findings)
    return DeviceFigures(
        uuid=device.uuid,
        index=device.index,
        model=device.model,
        node=node,
        instance="" if device.gi_id is None else str(device.gi_id),
        profile=device.profile,
        utilization=utilization_of(values),
        memory_used=used,
        memory_total=total,
        power_watts=values.get(POWER),
        temperature=values.get(TEMPERATURE),
        energy_joules=_divided(totals.energy_mj, _MJ),
        holders=holders,
        conditions=conditions,
        present=is_there(conditions),
        last_holders=() if device.is_instance else health.last_holders,
        processes=processes,
    )


def _holders(snapshot: Snapshot) -> dict[str, dict[Who, HolderFigures]]:
    """Who was given a device, and who works on it: with figures where there are any."""
    found: dict[str, dict[Who, HolderFigures]] = {}
    for assignment in snapshot.assignments:
        if who := assignment.holder.who:
            found.setdefault(assignment.device, {})[who] = HolderFigures(assignment.holder, share=assignment.share)
    told_at = snapshot.usage.at or snapshot.taken_at
    lost = {h.device.uuid for h in snapshot.health if any(finding.condition == LOST for finding in h.findings)}
    for usage in snapshot.usage.containers:
        if physical(usage.device) in lost:
            continue  # it works on nothing, whatever it used before
        if who := usage.holder.who:
            of_device = found.setdefault(usage.device, {})
            given = of_device.get(who)
            of_device[who] = _holder_figures(usage, given.share if given else None, told_at)
    return found


def _holder_figures(usage: ContainerUsage, share: float | None, told_at: float) -> HolderFigures:
    return HolderFigures(
        usage.holder,
        usage.utilization,
        usage.memory,
        usage.processes,
        _divided(usage.busy_ns, _NS),
        _divided(usage.idle_ns, _NS),
        _divided(usage.energy_mj, _MJ),
        share,
        _idle_since(usage, told_at),
    )


def _idle_since(usage: ContainerUsage, told_at: float) -> float | None:
    """By when usage was told: telemetry may be read much more rarely."""
    return told_at - usage.idle_run_ns / _NS if usage.idle_run_ns else None


def _numbers(values: Mapping[int, Value]) -> dict[int, float]:
    return in_legacy_units({field: value for field, value in values.items() if not isinstance(value, str)})


def _divided(value: int | None, by: int) -> float | None:
    return None if value is None else value / by
