"""This module sorts an exposition's samples by the device and the holder they are about, by names and labels. Pure.

It keeps the numbers of samples in place of their values; only of fields of health it has to look at the value, as they
tell of a device only where something is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.figures.device import SIMULATED, Condition
from podgpu.figures.figure_names import HEALTH_FIELDS, UNKNOWN_FIELD, Labels, field_names, places_of
from podgpu.metrics import families as f
from podgpu.metrics.conditions import FIELD_CONDITIONS, XID, conditions, xid_needs_action
from podgpu.metrics.names import Meaning, meaning
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Who, Workload

_INSTANCE_LABELS = ("GPU_I_ID", "GPU_I_PROFILE")
HOLDER_FIGURES = {
    f.CONTAINER_UTILIZATION.name: 0,
    f.CONTAINER_MEMORY.name: 1,
    f.CONTAINER_PROCESSES.name: 2,
    f.CONTAINER_BUSY.name: 3,
    f.CONTAINER_IDLE.name: 4,
    f.CONTAINER_ENERGY.name: 5,
    f.ALLOCATION_SHARE.name: 6,
}
"""Name -> its place among the figures of `HolderFigures`, behind the holder."""
MOST = 1e18
"""Of anything: an exabyte, 30 billion years. What says more is a broken counter."""
DCGM_BLANK = 0x7FFFFFF0
"""From here on DCGM's marks for "no value" begin. No field here, in %, MiB, W or degrees, has so much of it."""
ABSENT = -1
"""The number of the sample that tells what none tells."""


def meant(value: float) -> float | None:
    """None: it cannot be."""
    return value if 0 <= value <= MOST else None


def condition_of_field(number: int, value: float | None) -> Condition | None:
    """What a field of health tells, where it tells of anything."""
    if not value or value >= DCGM_BLANK:
        return None
    if number in FIELD_CONDITIONS:
        return Condition.of(FIELD_CONDITIONS[number], None)
    return Condition.of(XID, None, str(int(value))) if xid_needs_action(int(value)) else None


@dataclass(slots=True)
class FoundDevice:
    """One device, as far as the samples were looked at. Numbers are those of samples."""

    labels: Labels
    fields: dict[int, dict[Who, list[int]]] = field(default_factory=dict)
    """Field -> its samples on the series of each holder; of nobody: ()."""
    holders: dict[Who, tuple[Workload, list[int]]] = field(default_factory=dict)
    energy: int = ABSENT
    memory: int = ABSENT
    conditions: dict[str, tuple[str, int]] = field(default_factory=dict)
    told: list[tuple[int, int]] = field(default_factory=list)
    given: set[Who] = field(default_factory=set)
    last_holders: list[Workload] = field(default_factory=list)


class _Spot(NamedTuple):
    device: FoundDevice
    who: Who
    figures: list[int]
    """Of the holder."""
    is_instance: bool


class SortedSamples:
    def __init__(self, samples: Sequence[ParsedSample], measured: str, beside: tuple[int, ...]) -> None:
        self._fields = field_names(measured, beside)
        known = meaning(measured)
        self.measured = known.field.id if known else UNKNOWN_FIELD
        self.devices: dict[tuple[str, str, str], FoundDevice] = {}
        """By UUID, instance and model."""
        self.units: list[tuple[int, str, Meaning]] = []
        self.sources: list[tuple[str, int]] = []
        self.lost: list[int] = []
        self.is_podgpu = False
        self.simulated = False
        self.lasts = True
        self._spots: dict[int, _Spot] = {}
        self._hosts: list[Labels] = []
        of_devices = [s.labels for s in samples if s.name not in (f.BUILD_INFO.name, f.SOURCE_UP.name)]
        self._places = places_of(of_devices)
        for at, (name, labels, value, _) in enumerate(samples):
            self._take(at, name, labels, value)

    def _take(self, at: int, name: str, labels: Labels, value: float) -> None:
        if name in self._fields:
            number, per_instance, unit = self._fields[name]
            if number in HEALTH_FIELDS and number != self.measured:
                self.lasts = False
                if condition_of_field(number, meant(value)) is not None:
                    self._gpu(labels).told.append((number, at))
                return
            spot = self._spot(labels)
            device, who = spot.device, spot.who
            if spot.is_instance and not per_instance:
                # dcgm-exporter repeats a GPU's own figures on its MIG instances: they stay the GPU's.
                device, who = self._gpu(labels), ()
            if unit is not None:
                self.units.append((at, name, unit))
            device.fields.setdefault(number, {}).setdefault(who, []).append(at)
        elif name in HOLDER_FIGURES:
            if self._places[id(labels)].holder is not None:
                self._spot(labels).figures[HOLDER_FIGURES[name]] = at
        else:
            self._take_other(at, name, labels)

    def _take_other(self, at: int, name: str, labels: Labels) -> None:
        if name == f.BUILD_INFO.name:
            self.is_podgpu = True
        elif name == f.SOURCE_UP.name:
            source = labels.get("source", "?")
            self.simulated |= source == SIMULATED
            self.sources.append((source, at))
        elif name == f.DEVICE_COUNT.name:
            self._hosts.append(labels)
            if labels.get("state") == "lost":
                self.lost.append(at)
        elif name == f.DEVICE_ENERGY.name:
            self._spot(labels).device.energy = at
        elif name == f.DEVICE_MEMORY.name:
            self._spot(labels).device.memory = at
        elif name == f.CONDITION_SINCE.name:
            condition, detail = labels.get("condition", ""), labels.get("detail", "")
            if condition in conditions():  # a newer exporter may know more
                self._gpu(labels).conditions[condition] = detail, at
        elif name == f.LAST_HOLDER.name:
            holder = self._places[id(labels)].holder
            if holder is not None:
                self._gpu(labels).last_holders.append(holder)
        elif name == f.ALLOCATION_INFO.name and self._places[id(labels)].holder is not None:
            spot = self._spot(labels)
            spot.device.given.add(spot.who)

    def _spot(self, labels: Labels) -> _Spot:
        """Where the figures of series with these labels go."""
        spot = self._spots.get(id(labels))
        if spot is None:
            place = self._places[id(labels)]
            device = self._device((place.uuid, place.instance, place.model), labels)
            figures = [ABSENT] * len(HOLDER_FIGURES)
            if place.holder is not None:
                figures = device.holders.setdefault(place.who, (place.holder, figures))[1]
            spot = self._spots[id(labels)] = _Spot(device, place.who, figures, bool(place.instance))
        return spot

    def _gpu(self, labels: Labels) -> FoundDevice:
        place = self._places[id(labels)]
        of_gpu = {name: value for name, value in labels.items() if name not in _INSTANCE_LABELS}
        return self._device((place.uuid, "", place.model), of_gpu)

    def _device(self, key: tuple[str, str, str], labels: Labels) -> FoundDevice:
        found = self.devices.get(key)
        if found is None:
            found = self.devices[key] = FoundDevice(labels)
        elif len(labels) > len(found.labels):
            found.labels = labels  # podgpu_allocation_info names no model and no node
        return found

    def hosts(self) -> Iterator[Labels]:
        for found in self.devices.values():
            yield found.labels
        yield from self._hosts
