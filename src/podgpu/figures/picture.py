"""This module has the shape of a picture of one node or of many: what the web page draws and what `/api/v1` answers.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

from podgpu.figures.device import Alert, DeviceFigures


@dataclass(frozen=True, slots=True)
class NodePicture:
    name: str
    devices: tuple[DeviceFigures, ...] = ()
    """GPUs and, with `instance`, their MIG instances."""
    old: bool = False
    """Nothing newer could be had: what is here was true `age_seconds` ago."""
    age_seconds: float | None = None
    notes: tuple[str, ...] = ()
    """What is not as it should be on this node, for the person who looks."""
    simulated: bool = False
    """Its figures are made up."""
    gone: bool = False
    """Its exporter has not answered for so long that nobody knows what became of it."""


@dataclass(frozen=True, slots=True)
class NamespacePicture:
    """What a namespace has and what it cost since `Picture.counting_since`. None: nobody counts it."""

    namespace: str
    allocated_gpus: float = 0.0
    used_gpus: float | None = 0.0
    idle_gpus: float = 0.0
    allocated_hours: float | None = None
    busy_hours: float | None = None
    energy_kwh: float | None = None
    cost: tuple[tuple[str, float], ...] = ()
    """Kind (allocated, used, energy) -> amount in `Picture.currency`."""
    unknown_gpus: float = 0.0
    """Of what it holds, what nobody can tell of whether it works."""
    cost_per_hour: float | None = None
    """Of what it holds now."""
    wasted_per_hour: float | None = None
    """Of that, what is idle."""


@dataclass(frozen=True, slots=True)
class Picture:
    scope: str
    """`node` or `cluster`."""
    taken_at: float | None
    """Unix time; None while nothing was ever read."""
    interval_seconds: float
    """How often a new one may be expected."""
    nodes: tuple[NodePicture, ...] = ()
    notes: tuple[str, ...] = ()
    """All that is not as it should be, the alerts' texts first."""
    alerts: tuple[Alert, ...] = ()
    """What of it is serious."""
    namespaces: tuple[NamespacePicture, ...] = ()
    used_utilization: float | None = None
    """Mean of `used_field` over the devices in use, as a ratio; None without data, and where nobody asked for it."""
    used_field: str = ""
    idle_after_seconds: float | None = None
    """From when on an idle holder is called a waste."""
    currency: str = ""
    """Of every amount of money; empty: there are no prices."""
    prices: str = ""
    """`example`: those that podgpu ships; `file`: the user's own."""
    counting_since: float | None = None
    version: str = ""
    """Of podgpu."""
    simulated: bool = False
    """Figures are made up: all of them, or those of the nodes that say so."""
