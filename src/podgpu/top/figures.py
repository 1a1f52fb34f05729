"""Flat devices: each GPU and MIG instance of a view in one object, as the table's lines need them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podgpu.cluster.alerts import Alert
from podgpu.cluster.parts import BLIND, Totals
from podgpu.cluster.view import GpuView, HolderView, InstanceView, View
from podgpu.metrics.conditions import conditions, words_for
from podgpu.model import Workload, WorkloadKey, WorkloadOwner


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    pid: int
    memory: int | None = None
    utilization: float | None = None
    owner: Workload | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    name: str
    since: float | None
    says: str
    do: str

    @classmethod
    def of(cls, name: str, since: float | None, detail: str = "") -> Condition:
        return cls(name, since, *words_for(name, detail))

    @property
    def severity(self) -> str:
        """`broken` or `warning`."""
        spec = conditions().get(self.name)
        return "broken" if spec is None else spec.severity


@dataclass(frozen=True, slots=True)
class HolderFigures:
    holder: Workload
    utilization: float | None = None
    memory: int | None = None
    processes: int | None = None
    busy_seconds: float | None = None
    idle_seconds: float | None = None
    energy_joules: float | None = None
    share: float | None = None
    idle_since: float | None = None
    owner: WorkloadOwner | None = None
    cost_per_hour: float | None = None

    @property
    def who(self) -> WorkloadKey:
        return self.holder.key


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A GPU, or with `instance` one MIG instance of it."""

    uuid: str
    index: int
    model: str = ""
    node: str = ""
    instance: str = ""
    profile: str = ""
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_watts: float | None = None
    temperature: float | None = None
    energy_joules: float | None = None
    holders: tuple[HolderFigures, ...] = ()
    conditions: tuple[Condition, ...] = ()
    present: bool = True
    last_holders: tuple[Workload, ...] = ()
    price_per_hour: float | None = None
    processes: tuple[ProcessFigures, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.uuid, self.instance

    @property
    def place(self) -> tuple[str, int, str, int, str]:
        number = int(self.instance) if self.instance.isdecimal() and len(self.instance) < 10 else -1
        return self.node, self.index, self.uuid, number, self.instance


def holder_text(workload: Workload) -> str:
    return workload.text or "-"


Processes = Mapping[str, Sequence[ProcessFigures]]
"""Device key -> processes."""


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
