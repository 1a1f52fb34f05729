"""What the tick asks of a telemetry source, whatever library or feed is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from podgpu.catalog.fields import Field
from podgpu.model import Device, Reading


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """All one physical GPU said: its own reading and one for each MIG instance on it."""

    readings: tuple[Reading, ...]
    unsupported: tuple[tuple[str, int], ...] = ()
    """(device key, field id) it cannot give."""
    dropped: tuple[int, ...] = ()
    """Field ids whose answer was no value (sentinel, NaN, impossible), once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of single calls that failed this time; the rest of the reading stands."""


@dataclass(frozen=True, slots=True)
class XidEvent:
    device: str
    """`Device.key`."""
    xid: int
    at: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Device, ...]
    unreachable: dict[int, str] = field(default_factory=dict)
    """NVML index -> why the driver lists the GPU but does not answer for it."""


class Telemetry(Protocol):
    name: str
    expected: int | None
    """GPUs the PCI bus shows, whether or not there is a driver for them; None: not known."""

    def inventory(self) -> Inventory:
        """The physical GPUs; brings the driver up if need be. Raises SourceError."""

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        """One GPU and its instances. Called from that GPU's own worker. Raises SourceError."""

    def xid_events(self) -> Sequence[XidEvent]:
        """Events since the last time this was asked."""

    def release(self, wait: float) -> bool:
        """Let go of the driver; False when a call in flight kept it. `inventory` takes it up again."""
