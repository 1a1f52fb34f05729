"""This module makes figures of an exposition: podgpu's, or dcgm-exporter's under any of its names, without
holders' use. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from podgpu.catalog import families as f
from podgpu.catalog.conditions import FIELD_CONDITIONS, XID, conditions, xid_needs_action
from podgpu.catalog.names import meaning
from podgpu.errors import few_of
from podgpu.exposition.parse import ParsedFamily, ParsedSample
from podgpu.figures.alerts import NodeState, alerts_of
from podgpu.figures.device import (
    FIELDS,
    POWER,
    SIMULATED,
    TEMPERATURE,
    Condition,
    DeviceFigures,
    HolderFigures,
    Trouble,
    View,
    in_order,
    is_there,
    memory_of,
    utilization_of,
)
from podgpu.figures.figure_names import (
    HEALTH_FIELDS,
    UNKNOWN_FIELD,
    Labels,
    field_names,
    first_label,
    names_printed,
    places_of,
)
from podgpu.model import Who, Workload

NODE_LABELS = ("Hostname", "hostname", "node", "instance")
_INSTANCE_LABELS = ("GPU_I_ID", "GPU_I_PROFILE")
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
_WHOLE_FIGURES = (1, 2)
"""Those of them that are whole numbers."""
_OTHERS = frozenset(
    spec.name
    for spec in (
        *(f.BUILD_INFO, f.SOURCE_UP, f.DEVICE_ENERGY, f.DEVICE_MEMORY, f.ALLOCATION_INFO, f.DEVICE_COUNT),
        *(f.CONDITION_SINCE, f.LAST_HOLDER),
    )
)
"""What tells that a GPU is broken where nobody says so in words: in dcgm-exporter's expositions."""
_MOST_DIGITS = 9
_MOST = 1e18
"""Of anything: an exabyte, 30 billion years. What says more is a broken counter."""
_MOST_LOST = 1e6
_MOST_SOURCES, _LONGEST_SOURCE = 64, 64
"""Of what an exporter cannot read: each of its GPUs is one, and every name is told."""
_DCGM_BLANK = 0x7FFFFFF0
"""From here on DCGM's marks for "no value" begin. No field here, in %, MiB, W or degrees, has so much of it."""


class ExpositionFigures(NamedTuple):
    view: View
    nodes: tuple[str, ...]
    """Every name of a node in the exposition, in its order."""
    is_podgpu: bool


def view_of_exposition(families: Iterable[ParsedFamily], measured: str = "", beside: tuple[int, ...] = ()) -> View:
    """With what is wrong in words."""
    samples = samples_named(families, figure_names(measured, beside))
    view, nodes, _ = figures_of(samples, measured, beside=beside)
    alerts = alerts_of([NodeState(nodes[0] if nodes else "", view.devices, trouble=view.trouble)])
    return replace(view, notes=(*(alert.text for alert in alerts), *view.notes), alerts=alerts)


def figures_of(
    samples: Sequence[ParsedSample],
    measured: str = "",
    node_labels: Sequence[str] = NODE_LABELS,
    address: str = "",
    beside: tuple[int, ...] = (),
) -> ExpositionFigures:
    """`samples`: those of `samples_named`; one that is not a figure is passed over. `address` stands for the node where
    no label names it. A device is known by UUID, instance and model: what names no model goes to the first that has
    one."""
    builder = _Builder(samples, measured, beside)
    nodes = tuple(dict.fromkeys(filter(None, (first_label(labels, node_labels) for labels in builder.hosts()))))
    notes = (f"the exporter cannot read: {few_of(builder.down)}",) if builder.down else ()
    devices = tuple(builder.devices(node_labels, nodes[0] if nodes else address))
    trouble = Trouble(tuple(builder.down), builder.lost)
    view = View(devices, notes, simulated=builder.simulated, trouble=trouble)
    return ExpositionFigures(view, nodes, builder.is_podgpu)


@lru_cache(maxsize=16)
def figure_names(measured: str = "", beside: tuple[int, ...] = ()) -> frozenset[str]:
    """Of all series that figures are made of; `measured` is a field's name of any generation, or any other series'."""
    return frozenset(field_names(measured, beside)) | _HOLDER_FIGURES.keys() | _OTHERS


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


@dataclass(slots=True)
class _Found:
    """One device, as far as the exposition was read."""

    labels: Labels
    fields: dict[int, dict[Who, float | None]] = field(default_factory=dict)
    """Field -> its value on the series of each holder; of nobody: ()."""
    holders: dict[Who, tuple[Workload, list[float | None]]] = field(default_factory=dict)
    energy: float | None = None
    memory: float | None = None
    conditions: dict[str, Condition] = field(default_factory=dict)
    """As the exporter says."""
    told: dict[str, Condition] = field(default_factory=dict)
    """As its fields say."""
    given: set[Who] = field(default_factory=set)
    """Those of the holders who were given it, whether or not they work on it."""
    last_holders: list[Workload] = field(default_factory=list)


class _Spot(NamedTuple):
    device: _Found
    who: Who
    figures: list[float | None]
    """Of the holder."""
    is_instance: bool


class _Builder:
    def __init__(self, samples: Sequence[ParsedSample], measured: str, beside: tuple[int, ...]) -> None:
        self._fields = names_printed(samples, measured, beside)
        self._beside = beside
        known = meaning(measured)
        self._measured = known.field.id if known else UNKNOWN_FIELD
        self._found: dict[tuple[str, str, str], _Found] = {}
        self._spots: dict[int, _Spot] = {}
        self._hosts: list[Labels] = []
        self.down: list[str] = []
        self.lost = 0
        self.is_podgpu = False
        self.simulated = False
        of_devices = [s.labels for s in samples if s.name not in (f.BUILD_INFO.name, f.SOURCE_UP.name)]
        self._places = places_of(of_devices)
        for name, labels, value, _ in samples:
            self._take(name, labels, value if 0 <= value <= _MOST else None)

    def _take(self, name: str, labels: Labels, value: float | None) -> None:
        if name in self._fields:
            number, per_instance, unit = self._fields[name]
            if number in HEALTH_FIELDS and number != self._measured:
                self._take_health(number, labels, value)
                return
            spot = self._spot(labels)
            device, who = spot.device, spot.who
            if spot.is_instance and not per_instance:
                # dcgm-exporter repeats a GPU's own figures on its MIG instances: they stay the GPU's.
                device, who = self._gpu(labels), ()
            if unit is not None and value is not None:
                value = unit.value(value)
            known = device.fields.setdefault(number, {})
            if value is not None or who not in known:  # the same figure may stand there under two names
                known[who] = value
        elif name in _HOLDER_FIGURES:
            if self._places[id(labels)].holder is not None:
                place = _HOLDER_FIGURES[name]
                self._spot(labels).figures[place] = _whole(value) if place in _WHOLE_FIGURES else value
        else:
            self._take_other(name, labels, value)

    def _take_other(self, name: str, labels: Labels, value: float | None) -> None:
        if name == f.BUILD_INFO.name:
            self.is_podgpu = True
        elif name == f.SOURCE_UP.name:
            source = labels.get("source", "?")
            self.simulated |= source == SIMULATED
            if value == 0 and len(self.down) < _MOST_SOURCES:
                self.down.append(source[:_LONGEST_SOURCE])
        elif name == f.DEVICE_COUNT.name:
            self._hosts.append(labels)
            if labels.get("state") == "lost" and value and value < _MOST_LOST:
                self.lost = round(value)
        elif name == f.DEVICE_ENERGY.name:
            self._spot(labels).device.energy = value
        elif name == f.DEVICE_MEMORY.name:
            self._spot(labels).device.memory = value
        elif name == f.CONDITION_SINCE.name:
            condition, detail = labels.get("condition", ""), labels.get("detail", "")
            if condition in conditions():  # a newer exporter may know more
                self._gpu(labels).conditions[condition] = Condition.of(condition, value, detail)
        elif name == f.LAST_HOLDER.name:
            holder = self._places[id(labels)].holder
            if holder is not None:
                self._gpu(labels).last_holders.append(holder)
        elif name == f.ALLOCATION_INFO.name and self._places[id(labels)].holder is not None:
            spot = self._spot(labels)
            spot.device.given.add(spot.who)

    def _take_health(self, number: int, labels: Labels, value: float | None) -> None:
        """podgpu says it in words, and since when: `_conditions` leaves this out there."""
        if not value or value >= _DCGM_BLANK:
            return
        if number in FIELD_CONDITIONS:
            condition = Condition.of(FIELD_CONDITIONS[number], None)
        elif xid_needs_action(int(value)):
            condition = Condition.of(XID, None, str(int(value)))
        else:
            return
        self._gpu(labels).told.setdefault(condition.name, condition)

    def _conditions(self) -> dict[str, tuple[Condition, ...]]:
        """UUID -> what is wrong with the GPU, and so with its instances."""
        found: dict[str, tuple[Condition, ...]] = {}
        for (uuid, instance, _), of in self._found.items():
            known = of.conditions if self.is_podgpu else {**of.told, **of.conditions}
            if known and not instance:
                found[uuid] = in_order({c.name: c for c in (*found.get(uuid, ()), *known.values())}.values())
        return found

    def _spot(self, labels: Labels) -> _Spot:
        """Where the figures of series with these labels go."""
        spot = self._spots.get(id(labels))
        if spot is None:
            place = self._places[id(labels)]
            device = self._device((place.uuid, place.instance, place.model), labels)
            figures: list[float | None] = [None] * len(_HOLDER_FIGURES)
            if place.holder is not None:
                figures = device.holders.setdefault(place.who, (place.holder, figures))[1]
            spot = self._spots[id(labels)] = _Spot(device, place.who, figures, bool(place.instance))
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

    def devices(self, node_labels: Sequence[str], node: str) -> Iterator[DeviceFigures]:
        broken = self._conditions()
        for (uuid, instance, model), found in self._found.items():
            labels, wrong = found.labels, broken.get(uuid, ())
            present = not wrong or is_there(wrong)
            holders = found.holders if present else {who: of for who, of in found.holders.items() if who in found.given}
            index = labels.get("gpu", "")
            values = ((number, self._value(found, number)) for number in FIELDS)
            known = {number: value for number, value in values if value is not None}
            used, total = memory_of(known, found.memory)
            yield DeviceFigures(
                uuid,
                int(index) if index.isdecimal() and len(index) <= _MOST_DIGITS else -1,
                intern(model),
                first_label(labels, node_labels) or node,
                intern(instance),
                intern(labels.get("GPU_I_PROFILE", "")),
                utilization_of(known),
                used,
                total,
                known.get(POWER),
                known.get(TEMPERATURE),
                found.energy,
                self._value(found, self._measured),
                tuple(self._values_beside(found)),
                tuple([HolderFigures(holder, *figures) for holder, figures in holders.values()]),  # type: ignore[arg-type]
                wrong,
                present,
                tuple(found.last_holders),
            )

    def _values_beside(self, found: _Found) -> Iterator[tuple[int, float]]:
        for number in self._beside:
            value = self._value(found, number)
            if value is not None:
                yield number, value

    def _value(self, found: _Found, number: int) -> float | None:
        """Virtual GPUs have a series per holder: of power podgpu gives each its part, all else is repeated."""
        by_holder = found.fields.get(number)
        if by_holder is None:
            return None
        if () in by_holder:
            value = by_holder[()]
        else:
            parts = [part for part in by_holder.values() if part is not None]
            add_up = sum if self.is_podgpu and number == POWER else max
            value = add_up(parts) if parts else None
        return value if value is not None and value < _DCGM_BLANK else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
