"""Makes figures of a node's document. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from podgpu.figures.alerts import NodeState as AlertInput
from podgpu.figures.alerts import alerts_of
from podgpu.figures.device import Condition, DeviceFigures, HolderFigures, ProcessFigures, Trouble, View, is_there
from podgpu.metrics.conditions import LOST
from podgpu.model import Workload, device_key
from podgpu.node_state import DeviceState, Holder, HolderUsage, MigInstance, NodeState, SlotUsage

_NS = 1_000_000_000
_MJ = 1000
Processes = Mapping[str, Sequence[ProcessFigures]]  # by device key


def view_of_state(state: NodeState, node: str, processes: Processes | None = None) -> View:
    slots = ((gpu, slot) for gpu in state.devices for slot in _slots(gpu) if not slot.hidden)
    devices = tuple(_figures(gpu, slot, node, processes or {}) for gpu, slot in slots)
    failed = [source for source in state.sources if source.up is False]
    trouble = Trouble(tuple(source.name for source in failed), state.gpus_lost or 0)
    alerts = alerts_of([AlertInput(node, devices, trouble=trouble)])
    broken = (alert.text for alert in alerts if alert.uuid or alert.severity == "broken")
    notes = (*broken, *(f"{source.name}: {source.message or source.error}" for source in failed))
    return View(devices, notes, simulated=state.simulated, alerts=alerts, trouble=trouble)


def _slots(gpu: DeviceState) -> Iterator[DeviceState | MigInstance]:
    yield gpu
    yield from gpu.instances


def _figures(gpu: DeviceState, slot: DeviceState | MigInstance, node: str, processes: Processes) -> DeviceFigures:
    """Conditions are the GPU's, also for an instance."""
    instance = slot if isinstance(slot, MigInstance) else None
    conditions = tuple(Condition.of(c.name, c.since or 0.0, c.detail) for c in gpu.conditions)
    usage = slot.usage or SlotUsage()
    return DeviceFigures(
        uuid=gpu.uuid,
        index=-1 if gpu.index is None else gpu.index,
        model=gpu.model,
        node=node,
        instance="" if instance is None else str(instance.id),
        profile="" if instance is None else instance.profile,
        utilization=slot.utilization_ratio,
        memory_used=slot.memory_used_bytes,
        memory_total=slot.memory_total_bytes,
        power_watts=gpu.power_mw / 1000 if instance is None and gpu.power_mw is not None else None,
        temperature=gpu.temperature_celsius if instance is None else None,
        energy_joules=_divided(usage.energy_mj, _MJ),
        holders=tuple(_holders(slot.holders, any(c.name == LOST for c in gpu.conditions))),
        conditions=conditions,
        present=is_there(conditions),
        last_holders=() if instance is not None else gpu.last_holders,
        processes=tuple(processes.get(device_key(gpu.uuid, None if instance is None else instance.id), ())),
    )


def _holders(holders: Sequence[Holder], lost: bool) -> Iterator[HolderFigures]:
    """Nothing runs on a lost GPU, so its holders have no figures."""
    for holder in holders:
        if not holder.key or (lost and not holder.source):
            continue
        usage = HolderUsage() if lost or holder.usage is None else holder.usage
        workload = Workload(holder.namespace, holder.pod, holder.container, holder.uid, holder.container_id, holder.job)
        yield HolderFigures(
            workload,
            usage.utilization_ratio,
            usage.memory_used_bytes,
            usage.processes,
            _divided(usage.busy_ns, _NS),
            _divided(usage.idle_ns, _NS),
            _divided(usage.energy_mj, _MJ),
            holder.share_ratio,
            usage.idle_since,
        )


def _divided(value: int | None, by: int) -> float | None:
    return None if value is None else value / by
