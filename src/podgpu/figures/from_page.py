"""Figures from an exporter's page: podgpu's, or dcgm-exporter's under any of its names, without holders' use. Pure.

`PageLayout` finds out which series make which figure. That takes longer than to read the figures, and an exporter's
pages have the same series for hours: whoever reads many pages keeps the layout, and fills it with the next values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from podgpu.catalog import families as f
from podgpu.catalog.fields import field_named, fields
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

NODE_LABELS = ("Hostname", "hostname", "node", "instance")
_UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
_MODEL_LABELS = ("modelName", "model_name")
_POD_LABELS = (("namespace", "pod", "container"), ("pod_namespace", "pod_name", "container_name"))
_INSTANCE_LABELS = ("GPU_I_ID", "GPU_I_PROFILE")
_EXPORTED_LABELS = (("exported_namespace", "exported_pod", "exported_container"),)
_HOLDER_FIGURES = {
    f.CONTAINER_UTILIZATION.name: 0,
    f.CONTAINER_MEMORY.name: 1,
    f.CONTAINER_PROCESSES.name: 2,
    f.CONTAINER_BUSY.name: 3,
    f.CONTAINER_IDLE.name: 4,
    f.CONTAINER_ENERGY.name: 5,
    f.ALLOCATION_SHARE.name: 6,
}
"""Name -> its place among the figures of `HolderFigures`, behind the holder."""
_OTHERS = frozenset(
    spec.name
    for spec in (f.BUILD_INFO, f.SOURCE_UP, f.DEVICE_ENERGY, f.DEVICE_MEMORY, f.ALLOCATION_INFO, f.DEVICE_COUNT)
)
_NOWHERE = -1
"""Where a page's values end there is one more, None: what is not on the page."""
_MOST_DIGITS = 9
_MOST = 1e18
"""Of anything: an exabyte, 30 billion years. What says more is a broken counter."""
_DCGM_BLANK = 0x7FFFFFF0
"""From here on DCGM's marks for "no value" begin. No field here, in %, MiB, W or degrees, has so much."""
Labels = Mapping[str, str]


def view_of_page(families: Iterable[ParsedFamily], measured: str = "") -> View:
    samples = samples_named(families, figure_names(measured))
    return PageLayout(samples, measured).view([s.value for s in samples])


@lru_cache(maxsize=16)
def figure_names(measured: str = "") -> frozenset[str]:
    """Of all series that figures are made of; `measured` is a field's name of any generation, or any other series'."""
    return frozenset(_field_names(measured)) | _HOLDER_FIGURES.keys() | _OTHERS


@lru_cache(maxsize=16)
def _field_names(measured: str) -> dict[str, tuple[int, bool]]:
    """Name -> field and whether MIG instances have their own."""
    wanted = [fields()[number] for number in FIELDS]
    known = field_named(measured)
    if known is not None:
        wanted.append(known)
    found = {name: (one.id, one.per_instance) for one in wanted for name in one.names}
    if measured and known is None:
        found[measured] = (_UNKNOWN_FIELD, True)
    return found


_UNKNOWN_FIELD = 0


def samples_named(families: Iterable[ParsedFamily], names: frozenset[str]) -> list[ParsedSample]:
    """Those with a figure: what is not a number, or endless, is not there."""
    return [
        sample
        for family in families
        if family.name in names
        for sample in family.samples
        if sample.name in names and math.isfinite(sample.value)
    ]


# What is found


class _Place(NamedTuple):
    """What a label set says. Many series share one, so it is looked at once."""

    uuid: str
    instance: str
    model: str
    holder: Workload | None
    who: Who


@dataclass(slots=True)
class _Found:
    """One device, as far as the page was read. Figures are places in the list of values."""

    labels: Labels
    fields: dict[int, dict[Who, int]] = field(default_factory=dict)
    """Field -> where its value is on the series of each holder; of nobody: ()."""
    holders: dict[Who, tuple[Workload, list[int]]] = field(default_factory=dict)
    energy: int = _NOWHERE
    memory: int = _NOWHERE


class _Spot(NamedTuple):
    device: _Found
    who: Who
    slots: list[int]
    """Of the holder's figures."""
    is_instance: bool


class _Holder(NamedTuple):
    holder: Workload
    slots: tuple[int, ...]

    def figures(self, values: Sequence[float | None]) -> HolderFigures:
        utilization, memory, processes, *others = (values[slot] for slot in self.slots)
        return HolderFigures(self.holder, utilization, _whole(memory), _whole(processes), *others)


class _Device(NamedTuple):
    uuid: str
    number: int
    model: str
    node: str
    instance: str
    profile: str
    slots: tuple[int, ...]
    """Of FIELDS, then energy, memory and what is measured."""
    holders: tuple[_Holder, ...]

    def figures(self, values: Sequence[float | None]) -> DeviceFigures:
        *of_fields, energy, memory, measured = (values[slot] for slot in self.slots)
        known = {
            number: value
            for number, value in zip(FIELDS, of_fields, strict=True)
            if value is not None and value < _DCGM_BLANK
        }
        used, total = memory_of(known, memory)
        return DeviceFigures(
            self.uuid,
            self.number,
            self.model,
            self.node,
            self.instance,
            self.profile,
            utilization_of(known),
            used,
            total,
            known.get(POWER),
            known.get(TEMPERATURE),
            energy,
            None if measured is None or measured >= _DCGM_BLANK else measured,
            tuple([holder.figures(values) for holder in self.holders]),
        )


class PageLayout:
    """`samples`: those of `samples_named`; `view` wants their values in that order. A sample that is not a figure is
    passed over. A device is known by UUID, instance and model: what names no model goes to the first that has one.
    """

    def __init__(
        self,
        samples: Sequence[ParsedSample],
        measured: str = "",
        node_labels: Sequence[str] = NODE_LABELS,
        address: str = "",
    ) -> None:
        """`address` stands for the node where no label names it."""
        builder = _Builder(samples, measured)
        self.nodes: tuple[str, ...] = tuple(
            dict.fromkeys(filter(None, (_first(ls, node_labels) for ls in builder.hosts())))
        )
        """Every name of a node on the page, in its order."""
        self.is_podgpu = builder.is_podgpu
        self._down = tuple(builder.sources)
        self._merged: list[tuple[bool, tuple[int, ...]]] = []
        self._devices = tuple(builder.devices(node_labels, self.nodes[0] if self.nodes else address, self._merged))

    @property
    def has_devices(self) -> bool:
        return bool(self._devices)

    def view(self, values: Sequence[float]) -> View:
        every: list[float | None] = [value if 0 <= value <= _MOST else None for value in values]
        for is_sum, slots in self._merged:
            parts = [part for slot in slots if (part := every[slot]) is not None]
            every.append((sum(parts) if is_sum else max(parts)) if parts else None)
        every.append(None)
        down = [source for source, slot in self._down if values[slot] == 0]
        notes = (f"the exporter cannot read: {', '.join(down)}",) if down else ()
        return View(tuple([device.figures(every) for device in self._devices]), notes)


class _Builder:
    def __init__(self, samples: Sequence[ParsedSample], measured: str) -> None:
        self._fields = _field_names(measured)
        known = field_named(measured)
        self._measured = known.id if known else _UNKNOWN_FIELD
        self._count = len(samples)
        self._found: dict[tuple[str, str, str], _Found] = {}
        self._spots: dict[int, _Spot] = {}
        self._hosts: list[Labels] = []
        self.sources: list[tuple[str, int]] = []
        self.is_podgpu = False
        of_devices = [s.labels for s in samples if s.name not in (f.BUILD_INFO.name, f.SOURCE_UP.name)]
        self._places = _places(of_devices)
        for slot, sample in enumerate(samples):
            self._take(slot, sample.name, sample.labels)

    def _take(self, slot: int, name: str, labels: Labels) -> None:
        if name in self._fields:
            number, per_instance = self._fields[name]
            spot = self._spot(labels)
            device, who = spot.device, spot.who
            if spot.is_instance and not per_instance:
                # dcgm-exporter repeats a GPU's own figures on its MIG instances: they stay the GPU's.
                device, who = self._gpu(labels), ()
            device.fields.setdefault(number, {})[who] = slot
        elif name in _HOLDER_FIGURES:
            if self._places[id(labels)].holder is not None:
                self._spot(labels).slots[_HOLDER_FIGURES[name]] = slot
        else:
            self._take_other(slot, name, labels)

    def _take_other(self, slot: int, name: str, labels: Labels) -> None:
        if name == f.BUILD_INFO.name:
            self.is_podgpu = True
        elif name == f.SOURCE_UP.name:
            self.sources.append((labels.get("source", "?"), slot))
        elif name == f.DEVICE_COUNT.name:
            self._hosts.append(labels)
        elif name == f.DEVICE_ENERGY.name:
            self._spot(labels).device.energy = slot
        elif name == f.DEVICE_MEMORY.name:
            self._spot(labels).device.memory = slot
        elif name == f.ALLOCATION_INFO.name and self._places[id(labels)].holder is not None:
            self._spot(labels)

    def _spot(self, labels: Labels) -> _Spot:
        """Where the figures of series with these labels go."""
        spot = self._spots.get(id(labels))
        if spot is None:
            place = self._places[id(labels)]
            device = self._device((place.uuid, place.instance, place.model), labels)
            slots = [_NOWHERE] * len(_HOLDER_FIGURES)
            if place.holder is not None:
                slots = device.holders.setdefault(place.who, (place.holder, slots))[1]
            spot = self._spots[id(labels)] = _Spot(device, place.who, slots, bool(place.instance))
        return spot

    def _gpu(self, labels: Labels) -> _Found:
        place = self._places[id(labels)]
        of_gpu = {name: value for name, value in labels.items() if name not in _INSTANCE_LABELS}
        return self._device((place.uuid, "", place.model), of_gpu)

    def _device(self, key: tuple[str, str, str], labels: Labels) -> _Found:
        found = self._found.setdefault(key, _Found(labels))
        if len(labels) > len(found.labels):
            found.labels = labels  # podgpu_allocation_info names no model and no node
        return found

    # What it comes to

    def hosts(self) -> Iterator[Labels]:
        for found in self._found.values():
            yield found.labels
        yield from self._hosts

    def devices(
        self, node_labels: Sequence[str], node: str, merged: list[tuple[bool, tuple[int, ...]]]
    ) -> Iterator[_Device]:
        """What is to be `merged` gets places behind the page's own values."""
        for (uuid, instance, model), found in self._found.items():
            labels = found.labels
            energy, memory, measured = found.energy, found.memory, self._slot(found, self._measured, merged)
            of_fields = [self._slot(found, number, merged) for number in FIELDS]
            index = labels.get("gpu", "")
            yield _Device(
                uuid,
                int(index) if index.isdecimal() and len(index) <= _MOST_DIGITS else -1,
                intern(model),
                _first(labels, node_labels) or node,
                intern(instance),
                intern(labels.get("GPU_I_PROFILE", "")),
                (*of_fields, energy, memory, measured),
                tuple(_Holder(holder, tuple(slots)) for holder, slots in found.holders.values()),
            )

    def _slot(self, found: _Found, number: int, merged: list[tuple[bool, tuple[int, ...]]]) -> int:
        """Virtual GPUs have a series per holder: of power podgpu gives each its part, all else is repeated."""
        by_holder = found.fields.get(number, {})
        if () in by_holder:
            return by_holder[()]
        if len(by_holder) <= 1:
            return next(iter(by_holder.values()), _NOWHERE)
        merged.append((self.is_podgpu and number == POWER, tuple(by_holder.values())))
        return self._count + len(merged) - 1


# Labels


def _places(label_sets: Iterable[Labels]) -> dict[int, _Place]:
    """By the id of the labels, which those of equal text share."""
    places: dict[int, _Place] = {}
    models: dict[tuple[str, str], str] = {}
    for labels in label_sets:
        if id(labels) not in places:
            place = places[id(labels)] = _place(labels)
            if place.model:
                models.setdefault((place.uuid, place.instance), place.model)
                models.setdefault((place.uuid, ""), place.model)
    for key, place in places.items():
        if not place.model and (place.uuid, place.instance) in models:
            places[key] = place._replace(model=models[place.uuid, place.instance])
    return places


def _place(labels: Labels) -> _Place:
    uuid = _first(labels, _UUID_LABELS) or f"gpu {labels.get('gpu', '?')}"
    holder = holder_of(labels)
    who = who_is(holder) if holder else ()
    return _Place(uuid, labels.get("GPU_I_ID", ""), _first(labels, _MODEL_LABELS), holder, who)


def holder_of(labels: Labels) -> Workload | None:
    """Who holds what the series is about; `exported_pod` is what Prometheus makes of a page's own `pod`."""
    get = labels.get
    if job := get("hpc_job"):
        return Workload(job=job)
    for names in _EXPORTED_LABELS if "exported_pod" in labels else _POD_LABELS:
        if pod := get(names[1]):
            return Workload(intern(get(names[0], "")), intern(pod), intern(get(names[2], "")))
    uid, container_id = get("pod_uid", ""), get("container_id", "")
    return Workload(uid=uid, container_id=container_id) if uid or container_id else None


def _first(labels: Labels, names: Iterable[str]) -> str:
    for name in names:
        if value := labels.get(name):
            return value
    return ""


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
