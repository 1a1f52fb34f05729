"""The interface between the agent and a source of GPU figures, independent of library and vendor.

It consists of devices, fields, error numbers and processes. Features of a single vendor belong to the vendor's package.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceUsage, OtherReading, ProcessUsage, Reading, Value

Lack = Literal["no_process_utilization", "no_energy", "no_memory", "no_instance_utilization", "no_process_list"]
"""Reason word for a usage figure that a GPU does not provide."""


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, because sources cache data per lane
class Lane:
    """Fields that are read together, at their own interval."""

    fields: tuple[Field, ...]
    interval: float


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """Readings of one physical GPU and of each of its instances."""

    readings: tuple[Reading, ...]
    unsupported: tuple[tuple[str, int], ...] = ()
    """(device key, field id) of fields that are not supported."""
    dropped: tuple[int, ...] = ()
    """Ids of fields whose value was a sentinel, NaN or impossible, once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of calls that failed. The rest of the reading is valid."""
    others: tuple[OtherReading, ...] = ()
    """Readings of the GPU's links, or of switches and CPUs."""
    details: Mapping[int, Value] = field(default_factory=dict)
    """Field id -> value, for the page of the GPU. Updated rarely."""
    reports_errors: bool = True
    """False if the source cannot report errors (XIDs) of this GPU."""
    links_up: int | None = None
    """Number of NVLinks that are up; None if the GPU has none or does not report them."""


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """State of the context-switch log, which is used while a GPU is shared."""

    errors: tuple[str, ...] = ()
    """Reason words of errors in this turn."""
    fallback_reason: str = ""
    """Reason word if a shared GPU currently uses the driver's samples; empty if it does not."""
    fallback: str = ""
    """Message for `fallback_reason`."""


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """Usage of one GPU since the last call. Names of parts are defined by the source."""

    usages: tuple[DeviceUsage, ...]
    """The GPU, then each of its instances."""
    dropped: tuple[str, ...] = ()
    """Parts whose value was a sentinel, NaN or impossible, once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of calls that failed."""
    lacks: tuple[tuple[str, Lack], ...] = ()
    """(part, missing figure) that the GPU does not support. Not read again until its MIG layout changes."""
    switches: SwitchStatus | None = None
    """None if context switches are not used."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error that a device reported."""

    device: str
    """`Device.key`."""
    code: int
    """The vendor's error number. NVIDIA's is the XID."""
    at: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Device, ...]
    unreachable: dict[int, str] = field(default_factory=dict)
    """Index of a GPU that the driver lists but cannot read -> reason."""
    hung: frozenset[int] = frozenset()
    """Indices of unreachable GPUs whose first call has not returned yet."""


class Telemetry(Protocol):
    name: str
    expected: int | None
    """Number of GPUs on the PCI bus, with or without a driver; None if unknown."""

    def inventory(self) -> Inventory:
        """Returns the physical GPUs. Opens the driver if necessary. Raises SourceError."""

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        """Reads one GPU and its instances. Called from that GPU's worker. Raises SourceError."""

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        """Lists the processes on one GPU and its instances. May be called from another worker than `read`.

        Raises SourceError.
        """

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> UsageAnswer:
        """Returns the usage of one GPU and its instances.

        `shared`: keys of devices on which processes of several containers run.
        Always called from the same worker of that GPU. `read` may be called from another worker. Raises SourceError.
        """

    def error_events(self) -> Sequence[ErrorEvent]:
        """Returns the events since the last call."""

    def release(self, wait: float) -> bool:
        """Closes the driver. Returns False if a call does not return within `wait` seconds.

        `inventory` opens the driver again.
        """


@runtime_checkable
class FollowsSchedule(Protocol):
    """A source that must know in advance which fields are read."""

    def schedule(self, lanes: Sequence[Lane]) -> None:
        """Sets the lanes. From now on, `read` is called only with the fields of these lanes."""


@runtime_checkable
class ReadsOthers(Protocol):
    """A source that also reads switches and their links, CPUs and their cores."""

    def read_others(self, fields: Sequence[Field]) -> GpuAnswer:
        """Returns an answer with `others` and without readings. Called from its own worker. Raises SourceError."""
