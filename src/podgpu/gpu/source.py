"""The interface between the agent and a source of GPU figures, independent of library, feed and maker.

It has devices, fields, error numbers and processes. Anything that only one maker has belongs to that maker's package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceUsage, OtherReading, ProcessUsage, Reading, Value

Lack = Literal["no_process_utilization", "no_energy", "no_memory", "no_instance_utilization", "no_process_list"]
"""Reason word for a usage figure that a GPU does not provide."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: sources cache what they prepared for a lane
class Lane:
    """Fields that are read together, at their own interval."""

    fields: tuple[Field, ...]
    interval: float
    keep_age: float = 0.0
    """Seconds for which a source with a cache keeps samples; 0: no limit."""
    keep_samples: int = 0
    """Number of samples that it keeps; 0: no limit."""


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """Readings of one physical GPU and of each of its instances."""

    readings: tuple[Reading, ...]
    unsupported: tuple[tuple[str, int], ...] = ()
    """(device key, field id)"""
    dropped: tuple[int, ...] = ()
    """Field ids without a plausible value (sentinel, NaN, impossible), once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of single calls that failed; the rest of the reading is valid."""
    others: tuple[OtherReading, ...] = ()
    """Readings of the GPU's links, or of switches and CPUs."""
    details: Mapping[int, Value] = field(default_factory=dict)
    """Field id -> value, for the page of the GPU. Read rarely."""
    reports_errors: bool = True
    """False if its errors (XIDs) are not reported."""
    links_up: int | None = None
    """Number of NVLinks that are up; None if it has none or does not report them."""


@dataclass(frozen=True, slots=True)
class UsageFlaws:
    """Figures that a usage reading lacks. Names of parts are the source's own."""

    dropped: tuple[str, ...] = ()
    """Parts without a plausible value, once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of single calls that failed."""
    lacks: tuple[tuple[str, Lack], ...] = ()
    """(part, missing figure) that the GPU does not support; not read again until its topology changes."""
    switch_errors: tuple[str, ...] = ()
    """Reason words why context switches were not used in this turn."""
    uses_switches: bool = False
    """True if context switches are used on shared GPUs."""
    fallback: str = ""
    """Message why a shared GPU uses the driver's samples at present."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error that a device reported."""

    device: str
    """`Device.key`."""
    code: int
    """The maker's number; NVIDIA's is the XID."""
    at: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Device, ...]
    unreachable: dict[int, str] = field(default_factory=dict)
    """Index -> reason, of GPUs that the driver lists and cannot read."""
    hung: frozenset[int] = frozenset()
    """Those of them whose first call has not returned yet."""


class Telemetry(Protocol):
    name: str
    expected: int | None
    """Number of GPUs on the PCI bus, with or without a driver; None if unknown."""

    def inventory(self) -> Inventory:
        """Returns the physical GPUs. Opens the driver if necessary. Raises SourceError."""

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        """Reads one GPU and its instances. Called from that GPU's worker. Raises SourceError."""

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        """Lists the processes on one GPU and its instances. May have another worker than `read`. Raises SourceError."""

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        """Returns the usage of one GPU, then of each of its instances, since the last call.

        `shared`: keys of devices on which processes of several containers run.
        Always called from the same worker of that GPU, which may be another than that of `read`. Raises SourceError.
        """

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        """Returns the flaws of the last `usage` of that GPU. Called from the same worker."""

    def error_events(self) -> Sequence[ErrorEvent]:
        """Returns the events since the last call."""

    def release(self, wait: float) -> bool:
        """Closes the driver. Returns False if a call in flight prevents it. `inventory` opens it again."""


@runtime_checkable
class FollowsSchedule(Protocol):
    """A source that prepares and caches something for the fields it reads."""

    def schedule(self, lanes: Sequence[Lane]) -> None:
        """From now on `read` is called with the fields of these lanes only."""


@runtime_checkable
class ReadsOthers(Protocol):
    """A source that also reads switches and their links, CPUs and their cores."""

    def read_others(self, fields: Sequence[Field]) -> GpuAnswer:
        """Returns `others` without readings. Called from its own worker. Raises SourceError."""
