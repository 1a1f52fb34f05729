"""This module decides how much less a round may ask for, by what a whole one has told a moment ago. Pure.

A slim round leaves out what does not change while a GPU is there: how much memory it has, its model, its node's name,
under which of many series its target can be found. Whatever it brings that the last whole round did not have makes it
no round at all: it is asked again, whole. So what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.cluster.prom.layouts import AllSeries
from podgpu.cluster.prom.queries import Part, timed_names
from podgpu.cluster.prom.targets import Labels, Target, Targets
from podgpu.cluster.reading import NodeReading
from podgpu.figures.device import FB_USED, has_identity
from podgpu.metrics import families as f
from podgpu.metrics.names import names_of
from podgpu.metrics.parse import ParsedSample

WHOLE_EVERY = 60.0
"""Seconds. For so long a GPU may be told with the memory it had when it was last looked at."""
DeviceKey = tuple[str, str]
Answers = Sequence[tuple[Part, Sequence[ParsedSample]]]
_Place = tuple[str, str, str, str]


class Told(NamedTuple):
    """What a round was answered."""

    answers: Answers
    targets: Targets
    times: Mapping[Target, float]
    """Of each target's newest sample, Unix time."""
    series: AllSeries
    """Those of the answers."""


@dataclass(frozen=True, slots=True)
class Slim:
    """How to ask less."""

    finding: tuple[str, ...]
    """Every target has a series with one of these names."""
    memory: tuple[str, ...]
    """Every GPU that tells how much of its memory is used does so under one of these names."""
    totals: Mapping[DeviceKey, int]


@dataclass(slots=True)
class WholeRound:
    """The last of them."""

    at: float = float("-inf")
    slim: Slim | None = None
    """None: there are GPUs that only a whole round tells all about."""
    _places: frozenset[_Place] = frozenset()
    _without_up: frozenset[Target] = frozenset()

    def plan(self, at: float) -> Slim | None:
        """`at`: Unix time by the server's clock. None: this round has to be whole."""
        return self.slim if 0 <= at - self.at < WHOLE_EVERY else None

    def take(self, told: Told, oldest: float, at: float, nodes: Iterable[NodeReading]) -> None:
        """`oldest`: a target not heard of since is looked for everywhere."""
        found = _Found(told.answers, told.targets, told.series)
        devices = [device for node in nodes for device in node.devices]
        self.at = at
        self._places = found.places
        self._without_up = found.targets_without_up()
        is_clear = found.is_clear and all(has_identity(device.uuid) for device in devices)
        finding = found.finding()
        self.slim = None
        if is_clear and finding and found.all_since(oldest, told.times):
            totals = {device.key: device.memory_total for device in devices if device.memory_total is not None}
            self.slim = Slim(finding, found.memory_names(), totals)

    def explains(self, told: Told, oldest: float) -> bool:
        """Whether a slim round brought nothing new."""
        found = _Found(told.answers, told.targets, told.series)
        return (
            found.is_clear
            and found.places <= self._places
            and found.targets_without_up() <= self._without_up
            and found.all_since(oldest, told.times)
        )


@dataclass(slots=True)
class _Found:
    """What the labels of a round's samples tell."""

    answers: Answers
    by: Targets
    series: AllSeries
    places: frozenset[_Place] = frozenset()
    is_clear: bool = True
    """Every GPU is among those that its own labels tell all about."""

    def __post_init__(self) -> None:
        told: dict[int, Labels] = {}
        for part, samples in self.answers:
            if part.identifies:
                told.update({id(labels): labels for _, labels, _, _ in samples})
        self.places = frozenset(map(_place, told.values()))
        self.is_clear = {_uuid(labels) for labels in self.series.label_sets} <= {"", *(of[1] for of in self.places)}

    @property
    def targets(self) -> Iterable[Target]:
        return self.series.by_target.keys()

    def all_since(self, oldest: float, times: Mapping[Target, float]) -> bool:
        return all(times.get(target, 0.0) >= oldest for target in self.targets)

    def targets_without_up(self) -> frozenset[Target]:
        return frozenset(target for target in self.targets if target[:2] not in self.by.own_pods)

    def finding(self) -> tuple[str, ...]:
        """Names that every target has one of, those with few series first; none: there is no such choice."""
        having: dict[str, set[Target]] = {name: set() for name in (f.SNAPSHOT_TIMESTAMP.name, *timed_names())}
        for _, samples in self.answers:
            for name, labels, _, _ in samples:
                if name in having:
                    having[name].add(self.by.of(labels))
        chosen: list[str] = []
        left = set(self.targets)
        for name, targets in having.items():
            if left & targets:
                chosen.append(name)
                left -= targets
        return () if left else tuple(chosen)

    def memory_names(self) -> tuple[str, ...]:
        used, own = set(), set()
        names = names_of(FB_USED)
        for _, samples in self.answers:
            used |= {_device(s.labels) for s in samples if s.name in names}
            own |= {_device(s.labels) for s in samples if s.name == f.DEVICE_MEMORY.name}
        return (*names, f.DEVICE_MEMORY.name) if own - used else names


def _place(labels: Labels) -> _Place:
    return labels.get("instance", ""), _uuid(labels), labels.get("GPU_I_ID", ""), labels.get("GPU_I_PROFILE", "")


def _device(labels: Labels) -> tuple[str, str]:
    return _uuid(labels), labels.get("GPU_I_ID", "")


def _uuid(labels: Labels) -> str:
    return labels.get("UUID") or labels.get("uuid") or labels.get("gpu_uuid", "")
