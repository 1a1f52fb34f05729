"""Converts the cluster's state and its view to flat devices, for `top`, `history` and `autoscale`.

Goes when these packages read `ClusterState` and `View` themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from podgpu.cluster.alerts import Alert, describe_condition
from podgpu.cluster.parts import BLIND, HeldPart, Totals, is_lost
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import NodeEntry, gpu_id
from podgpu.cluster.used import used_value
from podgpu.cluster.view import GpuView, HolderView, InstanceView, View
from podgpu.figures.device import Condition, DeviceFigures, HolderFigures, ProcessFigures
from podgpu.model import DeviceState, MigInstance, Workload

_NS, _MJ = 1_000_000_000, 1000
Processes = Mapping[str, Sequence[ProcessFigures]]
"""Device key -> processes."""


def flat_devices(node: NodeEntry, settings: ViewSettings) -> Iterator[DeviceFigures]:
    held: dict[tuple[str, int | None], list[HeldPart]] = {}
    for part in node.held:
        held.setdefault((gpu_id(part.gpu), None if part.instance is None else part.instance.id), []).append(part)
    for gpu in node.gpus:
        uuid = gpu_id(gpu)
        if not gpu.hidden:
            yield _flat(node, gpu, None, held.get((uuid, None), ()), settings)
        for instance in gpu.instances:
            if not instance.hidden:
                yield _flat(node, gpu, instance, held.get((uuid, instance.id), ()), settings)


def _flat(
    node: NodeEntry,
    gpu: DeviceState,
    instance: MigInstance | None,
    held: Iterable[HeldPart],
    settings: ViewSettings,
) -> DeviceFigures:
    slot = instance or gpu
    usage = slot.usage
    used = slot.memory_used_bytes
    return DeviceFigures(
        uuid=gpu_id(gpu),
        index=-1 if gpu.index is None else gpu.index,
        model=gpu.model,
        node=node.name,
        instance="" if instance is None else str(instance.id),
        profile="" if instance is None else instance.profile,
        utilization=slot.utilization_ratio,
        memory_used=usage.memory_used_bytes if used is None and usage is not None else used,
        memory_total=slot.memory_total_bytes,
        power_watts=None if instance is not None or gpu.power_mw is None else gpu.power_mw / 1000,
        temperature=None if instance is not None else gpu.temperature_celsius,
        energy_joules=None if usage is None or usage.energy_mj is None else usage.energy_mj / _MJ,
        measured=used_value(slot, settings),
        holders=tuple(_flat_holder(part) for part in held),
        conditions=tuple(Condition(c.name, c.since, *describe_condition(c)) for c in gpu.conditions),
        present=not is_lost(gpu),
        last_holders=gpu.last_holders,
    )


def _flat_holder(part: HeldPart) -> HolderFigures:
    usage = part.holder.usage
    if usage is None:
        return HolderFigures(part.holder, share=part.holder.share_ratio, idle_since=part.idle_since)
    return HolderFigures(
        part.holder,
        usage.utilization_ratio,
        usage.memory_used_bytes,
        usage.processes,
        None if usage.busy_ns is None else usage.busy_ns / _NS,
        None if usage.idle_ns is None else usage.idle_ns / _NS,
        None if usage.energy_mj is None else usage.energy_mj / _MJ,
        part.holder.share_ratio,
        part.idle_since,
    )


# For `top`


@dataclass(frozen=True, slots=True)
class FlatView:
    """One reading of one source."""

    devices: tuple[DeviceFigures, ...] = ()
    notes: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    taken_at: float | None = None
    simulated: bool = False
    currency: str = ""
    old_nodes: frozenset[str] = frozenset()
    totals: Totals = field(default_factory=lambda: Totals(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0))


def flat_view(view: View, processes: Processes | None = None) -> FlatView:
    notes = list(view.notes)
    for node in view.nodes:
        if node.old:
            age = "" if node.age_seconds is None else f": {node.age_seconds:.0f} s"
            notes.append(f"{node.name} is stale{age}")
        notes += [f"{node.name}: {text}" for text in node.notes]
    return FlatView(
        totals=view.totals,
        devices=tuple(
            _device_of_view(gpu, part, node.name, processes or {})
            for node in view.nodes
            for gpu in node.gpus
            for part in _slots(gpu)
        ),
        notes=tuple(notes),
        alerts=tuple(view.alerts),
        taken_at=view.taken_at,
        simulated=view.simulated,
        currency=view.currency,
        old_nodes=frozenset(node.name for node in view.nodes if node.old),
    )


def _slots(gpu: GpuView) -> list[GpuView | InstanceView]:
    return [gpu, *gpu.instances]


def _device_of_view(gpu: GpuView, part: GpuView | InstanceView, node: str, processes: Processes) -> DeviceFigures:
    instance = part.id if isinstance(part, InstanceView) else ""
    return DeviceFigures(
        uuid=gpu.uuid,
        index=-1 if gpu.index is None else gpu.index,
        model=gpu.model,
        node=node,
        instance=instance,
        profile=part.profile if isinstance(part, InstanceView) else "",
        utilization=part.utilization_ratio,
        memory_used=part.memory_used_bytes,
        memory_total=part.memory_total_bytes,
        power_watts=part.power_watts,
        temperature=part.temperature_celsius,
        energy_joules=part.energy_joules,
        holders=tuple(_holder_of_view(holder) for holder in part.holders),
        conditions=tuple(Condition(c.condition, c.since, c.says or c.condition, c.do) for c in part.conditions),
        present=not part.absent,
        last_holders=part.last_holders,
        price_per_hour=part.price_per_hour,
        processes=tuple(processes.get(f"{gpu.uuid}/gi{instance}" if instance else gpu.uuid, ())),
    )


def _holder_of_view(of: HolderView) -> HolderFigures:
    return HolderFigures(
        Workload(of.namespace, of.pod, of.container, of.uid, of.container_id, of.job),
        of.utilization_ratio,
        of.memory_used_bytes,
        of.processes,
        of.busy_seconds,
        of.idle_seconds,
        of.energy_joules,
        of.share_ratio,
        of.idle_since,
        of.owner,
        of.cost_per_hour,
    )


@dataclass(slots=True)
class PhysicalGpu:
    """A GPU with its MIG instances."""

    own: DeviceFigures | None = None
    instances: list[DeviceFigures] = field(default_factory=list)

    @property
    def devices(self) -> list[DeviceFigures]:
        return self.instances if self.own is None else [self.own, *self.instances]


def physical_gpus(devices: Iterable[DeviceFigures]) -> list[PhysicalGpu]:
    found: dict[str, PhysicalGpu] = {}
    for device in devices:
        gpu = found.setdefault(device.uuid, PhysicalGpu())
        if device.instance:
            gpu.instances.append(device)
        else:
            gpu.own = gpu.own or device
    return list(found.values())


def is_blind(device: DeviceFigures) -> bool:
    """Whether no figure of it is current."""
    return not device.present or any(condition.name in BLIND for condition in device.conditions)
