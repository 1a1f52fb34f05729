"""This module names what has readings and is no GPU (NVSwitches, NVLinks, CPUs and their cores) by its labels. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from podgpu.device_selection import Selection
from podgpu.gpu.dcgm.entities import GpuEntities, Layout
from podgpu.gpu.dcgm.structs import EntityGroup, link_id
from podgpu.gpu.dcgm.values import Entity
from podgpu.model import OtherReading, Value

SWITCH_LINK = "SWITCH_LINK"
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Part:
    kind: str
    """As in `Field.level`, but for the links of a switch, which have other fields than those of a GPU."""
    entity: Entity
    labels: Pairs

    def reading(self, values: Mapping[int, Value]) -> OtherReading:
        return OtherReading("LINK" if self.kind == SWITCH_LINK else self.kind, self.labels, values)


def node_parts(layout: Layout, switches: Selection, cpus: Selection) -> list[Part]:
    """What `-s` and `-p` choose of the switches with their links and of the CPUs with their cores."""
    return [*_switch_parts(layout, switches), *_cpu_parts(layout, cpus)]


def _switch_parts(layout: Layout, chosen: Selection) -> Iterator[Part]:
    for switch, links in layout.switches.items():
        name = ("nvswitch", f"nvswitch{switch}")
        if chosen.shows("g", switch):
            yield Part("SWITCH", Entity(EntityGroup.SWITCH, switch), (name,))
        for link in links:
            if chosen.shows("i", link):
                entity = Entity(EntityGroup.LINK, link_id(EntityGroup.SWITCH, switch, link))
                yield Part(SWITCH_LINK, entity, (("nvlink", str(link)), name))


def _cpu_parts(layout: Layout, chosen: Selection) -> Iterator[Part]:
    for cpu, cores in layout.cpus.items():
        if chosen.shows("g", cpu):
            yield Part("CPU", Entity(EntityGroup.CPU, cpu), (("cpu", str(cpu)),))
        for core in cores:
            if chosen.shows("i", core):
                labels = (("cpucore", str(core)), ("cpu", str(cpu)))
                yield Part("CPU_CORE", Entity(EntityGroup.CPU_CORE, core), labels)


def gpu_links(gpu: GpuEntities, values: Mapping[Entity, Mapping[int, Value]]) -> Iterator[OtherReading]:
    """Numbered from 1, as dcgm-exporter does; but a link that is down keeps its number, and the others theirs."""
    device = gpu.device
    of_gpu = (
        ("gpu", str(device.index)),
        ("gpu_uuid", device.uuid),
        ("pci_bus_id", device.pci_bus_id),
        ("device", device.name),
        ("model_name", device.model),
    )
    for entity, link in gpu.link_entities.items():
        if values.get(entity):
            yield OtherReading("LINK", (("nvlink", str(link + 1)), *of_gpu), values[entity])
