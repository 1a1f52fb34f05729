"""Figures from an exporter's page: podgpu's, or dcgm-exporter's under any of its names, without holders' use. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from podgpu.catalog import families as f
from podgpu.catalog.fields import Field, field_named
from podgpu.exposition.parse import ParsedFamily, ParsedSample
from podgpu.figures.device import (
    FIELDS,
    POWER,
    TEMPERATURE,
    DeviceFigures,
    HolderFigures,
    View,
    Who,
    memory_of,
    utilization_of,
    who_is,
)
from podgpu.model import Workload

_NODE_LABELS = ("Hostname", "hostname", "node", "instance")
_POD_LABELS = (("namespace", "pod", "container"), ("pod_namespace", "pod_name", "container_name"))
_CONTAINER_FIGURES = {
    f.CONTAINER_UTILIZATION.name: "utilization",
    f.CONTAINER_MEMORY.name: "memory",
    f.CONTAINER_PROCESSES.name: "processes",
    f.CONTAINER_BUSY.name: "busy_seconds",
    f.CONTAINER_IDLE.name: "idle_seconds",
    f.CONTAINER_ENERGY.name: "energy_joules",
}
_WHOLE_NUMBERS = frozenset({"memory", "processes"})
Labels = Mapping[str, str]


@dataclass(slots=True)
class _Found:
    """One device, as far as the page was read."""

    labels: Labels
    values: dict[int, dict[Who, float]] = field(default_factory=dict)
    """Field -> its value on the series of each holder; of nobody: ()."""
    holders: dict[Who, HolderFigures] = field(default_factory=dict)
    energy: float | None = None
    memory: float | None = None


class _Page:
    def __init__(self, families: Iterable[ParsedFamily]) -> None:
        self._devices: dict[tuple[str, str], _Found] = {}
        self.down: list[str] = []
        self.is_podgpu = False
        for family in families:
            self._take(family)

    def _take(self, family: ParsedFamily) -> None:
        known = field_named(family.name)
        for sample in family.samples:
            if not math.isfinite(sample.value):
                continue
            if known is not None and known.id in FIELDS:
                self._take_field(known, sample)
            elif sample.name in _CONTAINER_FIGURES:
                self._take_container(_CONTAINER_FIGURES[sample.name], sample)
            else:
                self._take_other(sample)

    def _take_field(self, known: Field, sample: ParsedSample) -> None:
        """dcgm-exporter repeats a GPU's own figures on its MIG instances: they stay the GPU's."""
        holder = self._take_holder(sample.labels)
        device = self._device(sample.labels)
        if sample.labels.get("GPU_I_ID") and not known.per_instance:
            device, holder = self._device(_of_gpu(sample.labels)), ()
        device.values.setdefault(known.id, {})[holder] = sample.value

    def _take_container(self, figure: str, sample: ParsedSample) -> None:
        who = self._take_holder(sample.labels)
        if who:
            holders = self._device(sample.labels).holders
            value = round(sample.value) if figure in _WHOLE_NUMBERS else sample.value
            holders[who] = replace(holders[who], **{figure: value})  # type: ignore[arg-type]

    def _take_other(self, sample: ParsedSample) -> None:
        if sample.name == f.BUILD_INFO.name:
            self.is_podgpu = True
        elif sample.name == f.SOURCE_UP.name and sample.value == 0:
            self.down.append(sample.labels.get("source", "?"))
        elif sample.name == f.DEVICE_ENERGY.name:
            self._device(sample.labels).energy = sample.value
        elif sample.name == f.DEVICE_MEMORY.name:
            self._device(sample.labels).memory = sample.value
        elif sample.name == f.ALLOCATION_INFO.name:
            self._take_holder(sample.labels)

    def _take_holder(self, labels: Labels) -> Who:
        holder = _holder(labels)
        if holder is None:
            return ()
        self._device(labels).holders.setdefault(who_is(holder), HolderFigures(holder))
        return who_is(holder)

    def _device(self, labels: Labels) -> _Found:
        key = _uuid(labels), labels.get("GPU_I_ID", "")
        found = self._devices.setdefault(key, _Found(labels))
        if len(labels) > len(found.labels):
            found.labels = labels  # podgpu_allocation_info names no model and no node
        return found

    def devices(self) -> tuple[DeviceFigures, ...]:
        return tuple(self._figures(uuid, instance, found) for (uuid, instance), found in self._devices.items())

    def _figures(self, uuid: str, instance: str, found: _Found) -> DeviceFigures:
        labels = found.labels
        values = {known: self._of_device(known, by_holder) for known, by_holder in found.values.items()}
        used, total = memory_of(values, found.memory)
        return DeviceFigures(
            uuid=uuid,
            index=int(labels["gpu"]) if labels.get("gpu", "").isdecimal() else -1,
            model=labels.get("modelName", ""),
            node=next((labels[name] for name in _NODE_LABELS if labels.get(name)), ""),
            instance=instance,
            profile=labels.get("GPU_I_PROFILE", ""),
            utilization=utilization_of(values),
            memory_used=used,
            memory_total=total,
            power_watts=values.get(POWER),
            temperature=values.get(TEMPERATURE),
            energy_joules=found.energy,
            holders=tuple(found.holders.values()),
        )

    def _of_device(self, known: int, by_holder: Mapping[Who, float]) -> float:
        """Virtual GPUs have a series per holder: of power podgpu gives each its part, all else is repeated."""
        if () in by_holder:
            return by_holder[()]
        return sum(by_holder.values()) if self.is_podgpu and known == POWER else max(by_holder.values())


def view_of_page(families: Iterable[ParsedFamily]) -> View:
    page = _Page(families)
    notes = (f"the exporter cannot read: {', '.join(page.down)}",) if page.down else ()
    return View(page.devices(), notes)


def _uuid(labels: Labels) -> str:
    return labels.get("UUID") or labels.get("uuid") or f"gpu {labels.get('gpu', '?')}"


def _of_gpu(labels: Labels) -> Labels:
    return {name: value for name, value in labels.items() if name not in ("GPU_I_ID", "GPU_I_PROFILE")}


def _holder(labels: Labels) -> Workload | None:
    if labels.get("hpc_job"):
        return Workload(job=labels["hpc_job"])
    for names in _POD_LABELS:
        namespace, pod, container = (labels.get(name, "") for name in names)
        if pod:
            return Workload(namespace, pod, container)
    if labels.get("pod_uid") or labels.get("container_id"):
        return Workload(uid=labels.get("pod_uid", ""), container_id=labels.get("container_id", ""))
    return None
