"""This module says what the agent asks of a source of figures, whatever library, feed or maker is behind it.

It knows devices, fields, errors by number and processes. What only one maker has (its library, its words for errors,
how it names parts of a GPU) stays in that maker's folder beside this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceUsage, OtherReading, ProcessUsage, Reading, Value

Lack = Literal["no_process_utilization", "no_energy", "no_memory", "no_instance_utilization", "no_process_list"]
"""Of a GPU's usage, what there may be no figure for: the reason word under which that is counted."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: sources keep what they prepared for it
class Lane:
    """Fields that are read together, at an interval of their own."""

    fields: tuple[Field, ...]
    interval: float
    keep_age: float = 0.0
    """Seconds for which a source that keeps samples keeps these; 0: no limit by age."""
    keep_samples: int = 0
    """The same by number."""


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """All one physical GPU said: its own reading and one for each instance it is cut into."""

    readings: tuple[Reading, ...]
    unsupported: tuple[tuple[str, int], ...] = ()
    """(device key, field id) it cannot give."""
    dropped: tuple[int, ...] = ()
    """Field ids whose answer was no value (sentinel, NaN, impossible), once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of single calls that failed this time; the rest of the reading stands."""
    others: tuple[OtherReading, ...] = ()
    """Of what belongs to the GPU and is none: its links."""
    details: Mapping[int, Value] = field(default_factory=dict)
    """Field id -> what it said lately of what only the GPU's own view shows; it is asked seldom."""
    tells_errors: bool = True
    """Whether its errors (XIDs) would be heard of."""
    links_up: int | None = None
    """How many of its NVLinks are up; None: it has none, or cannot tell."""


@dataclass(frozen=True, slots=True)
class UsageFlaws:
    """What a reading of one GPU's usage had to leave out. A part is named as the source likes, for itself only."""

    dropped: tuple[str, ...] = ()
    """Parts whose answer was no value (4294967295, impossible), once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of single calls that failed this time."""
    lacks: tuple[tuple[str, Lack], ...] = ()
    """(part, what it would tell) that the GPU cannot give, or not to us; not asked again until its topology changes."""
    doubts: tuple[str, ...] = ()
    """Reason words for which the context switches of a shared GPU were not used this time."""
    follows_switches: bool = False
    """Whether they are used at all where a GPU is shared."""
    fallback: str = ""
    """Why a shared GPU is told by the driver's samples at present, in words."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """A device told of an error, without being asked."""

    device: str
    """`Device.key`."""
    code: int
    """The maker's number for it; NVIDIA's is the XID."""
    at: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Device, ...]
    unreachable: dict[int, str] = field(default_factory=dict)
    """The driver's index -> why it lists the GPU but does not answer for it."""
    hung: frozenset[int] = frozenset()
    """Those of them that have not answered yet, and may still do so."""


class Telemetry(Protocol):
    name: str
    expected: int | None
    """GPUs the PCI bus shows, whether or not there is a driver for them; None: not known."""

    def inventory(self) -> Inventory:
        """The physical GPUs; brings the driver up if need be. Raises SourceError."""

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        """One GPU and its instances. Called from that GPU's own worker. Raises SourceError."""

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        """What runs on one GPU and its instances. May have another worker than `read`. Raises SourceError."""

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        """How one GPU, then each of its instances, was used since the last time this was asked.

        `shared`: keys of devices on which processes of several containers run, as far as is known.
        Always called from one worker of that GPU, which may be another than `read` has. Raises SourceError.
        """

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        """Of the last `usage` of that GPU; to be asked from the same worker."""

    def error_events(self) -> Sequence[ErrorEvent]:
        """Events since the last time this was asked."""

    def release(self, wait: float) -> bool:
        """Let go of the driver; False when a call in flight kept it. `inventory` takes it up again."""


@runtime_checkable
class FollowsSchedule(Protocol):
    """A source that prepares something for the fields it is asked for, and keeps it for those that come again."""

    def schedule(self, lanes: Sequence[Lane]) -> None:
        """From now on `read` is asked for the fields of these, each at its interval, and for no others."""


@runtime_checkable
class ReadsOthers(Protocol):
    """A source that also knows what is no GPU: switches and their links, CPUs and their cores."""

    def read_others(self, fields: Sequence[Field]) -> GpuAnswer:
        """With `others` and without readings. Called from a worker of its own. Raises SourceError."""
