"""This module says what a backend gives in one round, whatever it asked: the one shape the view is assembled from.
Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from podgpu.figures.device import DeviceFigures, Owner, Trouble

_LAST_MOMENT = 1e11
"""Some three thousand years from now. A clock that shows more is none."""
MOST_CLOCK_ERROR = 86_400.0
"""Seconds. A clock that is off by a time zone is a clock all the same; one of 1970 was never set."""
_EARLY = 1 / 16
"""A round that ends this part of an interval too early is the next one's: timers and clocks do not quite agree."""


class NamespaceCounters(NamedTuple):
    """One node's `podgpu_namespace_*` counters of one namespace and model, as they stand. None: not exported."""

    namespace: str
    model: str
    allocated_seconds: float | None = None
    busy_seconds: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One node as one target told it. Two targets may tell of one node: the view settles that."""

    target: str
    """Whom it was read from: an exporter's URL without secrets, or Prometheus' `instance`."""
    node: str
    """Its name; an address where the exposition has no name."""
    named: bool = True
    """False: `node` is only the target's address, so one node may be here under several."""
    devices: tuple[DeviceFigures, ...] = ()
    namespaces: tuple[NamespaceCounters, ...] = ()
    read_at: float = 0.0
    """Monotonic time at which this was true: of the scrape, or of Prometheus' newest sample."""
    taken_at: float | None = None
    """By the node's own clock, Unix time; None: the exporter does not tell."""
    skew_seconds: float | None = None
    """How far the node's clock seems to be ahead of ours."""
    notes: tuple[str, ...] = ()
    listed: bool | None = None
    """Whether its target is still among those to be asked; None: there is no such list (Prometheus has its own)."""
    dated: bool = True
    """False: by its own clock it was taken at no time that could be meant as now, so it does not count as fresh."""
    simulated: bool = False
    """Its figures are made up by podgpu's simulated driver."""
    trouble: Trouble = field(default_factory=Trouble)
    tells_lost: bool = True
    """Its exporter says itself which GPUs are lost, as podgpu's do; others leave them out."""


class Scope(NamedTuple):
    """What a figure is about: the cluster, a namespace, a node, a model or a workload owner; unused parts are empty."""

    scope: str
    namespace: str = ""
    node: str = ""
    model: str = ""
    owner_kind: str = ""
    owner_name: str = ""


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """How one target, or the Prometheus server, fared when it was last asked."""

    target: str
    seconds: float
    error: str = ""
    """Reason word, empty when all went well."""
    message: str = ""

    @property
    def said(self) -> str:
        """What went wrong, with the target named once."""
        text = self.message or self.error
        return text if text.startswith(self.target) else f"{self.target}: {text}"


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The latest of every target; those that failed are here as they last were."""

    nodes: tuple[NodeReading, ...] = ()
    outcomes: tuple[TargetOutcome, ...] = ()
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(target, reason) -> how often since the start."""
    notes: tuple[str, ...] = ()
    """Warnings of the backend as a whole, such as Prometheus' own."""
    owners: Mapping[tuple[str, str], Owner] = field(default_factory=dict)
    """(namespace, pod) -> what made the pod."""
    rolling: Mapping[Scope, float] | None = None
    """Mean over the window, computed by Prometheus, as ratios; None: the view computes it from the rounds."""
    idle_for: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(UUID, instance) -> seconds for which Prometheus knows the device to have been idle, at least."""


class Backend(Protocol):
    async def turn(self) -> None:
        """One round. Ends within its deadlines whatever the world does; what failed is in `reading`."""

    def reading(self) -> ClusterReading:
        """The state now, also in the middle of a round."""

    async def close(self) -> None: ...


@runtime_checkable
class AsksExporters(Protocol):
    """A backend that reaches the exporters themselves."""

    async def ask(self, target: str, path: Sequence[str]) -> bytes:
        """What the exporter of this target answers at another of its paths. Raises SourceError."""


MakeBackend = Callable[[], Backend]
"""Called on the loop that will run it: sessions belong to a loop."""


def moment(value: float | None) -> float | None:
    """Unix time as somebody tells it, where it can be meant."""
    return value if value is not None and 0 < value < _LAST_MOMENT else None


def is_about_now(told_at: float | None, wall: float) -> bool:
    """Whether figures that are said to be of then may be of now. Nothing said: they may."""
    return told_at is None or abs(told_at - wall) <= MOST_CLOCK_ERROR


def round_number(wall: float, interval: float) -> int:
    """Of the round taken at that Unix time: rounds begin at multiples of the interval."""
    return math.floor(wall / interval + _EARLY)
