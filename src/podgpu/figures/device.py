"""This module has the shape of devices and their holders with every figure that people look at, wherever it came from.
None: nobody knows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.metrics.conditions import LOST, conditions, order_of, words_for
from podgpu.metrics.mig import billed_name
from podgpu.model import PodOwner, Who, Workload

UTIL, GR_ENGINE = 203, 1001
FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED = 250, 251, 252, 253
POWER, TEMPERATURE = 155, 150
FIELDS = (UTIL, GR_ENGINE, FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED, POWER, TEMPERATURE)
"""DCGM fields the figures are made of."""

SIMULATED = "simulated"
"""How the simulated driver names itself among an exporter's sources, in a snapshot and in `podgpu_source_up`."""
_MIB = 1024 * 1024
_NAMELESS = "gpu "
_OVER_FULL = 1.01
"""A counter read a moment too late tells a little more than everything. What is beyond that is no value."""


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    pid: int
    memory: int | None = None
    utilization: float | None = None
    owner: Workload | None = None
    """The container it runs in; None: in none, or nobody can tell."""


Owner = PodOwner


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that is wrong with a device."""

    name: str
    """One of the closed list that `podgpu_device_health` has."""
    since: float | None
    """Unix time from which on it was seen."""
    says: str
    """What is wrong, in words."""
    do: str
    """What to do about it."""

    @classmethod
    def of(cls, name: str, since: float | None, detail: str = "") -> Condition:
        return cls(name, since, *words_for(name, detail))

    @property
    def severity(self) -> str:
        """`broken` or `warning`."""
        spec = conditions().get(self.name)
        return "broken" if spec is None else spec.severity


def in_order(found: Iterable[Condition]) -> tuple[Condition, ...]:
    """As they are told: the worst first."""
    return tuple(sorted(found, key=lambda condition: order_of(condition.name)))


def is_there(found: Iterable[Condition]) -> bool:
    """Whether a device with these is."""
    return all(condition.name != LOST for condition in found)


@dataclass(frozen=True, slots=True)
class HolderFigures:
    """What one holder uses of one device. Seconds and joules are counters."""

    holder: Workload
    utilization: float | None = None
    memory: int | None = None
    processes: int | None = None
    busy_seconds: float | None = None
    idle_seconds: float | None = None
    energy_joules: float | None = None
    share: float | None = None
    """Part of the device it was given."""
    idle_since: float | None = None
    """Unix time since which it has run nothing, as far as anybody watched. None: it runs something, or not known."""
    owner: Owner | None = None
    cost_per_hour: float | None = None
    """Its part of what an hour of the device costs. None: no price is known."""

    @property
    def who(self) -> Who:
        return self.holder.who


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A GPU, or with `instance` one MIG instance of it."""

    uuid: str
    index: int
    model: str = ""
    node: str = ""
    instance: str = ""
    profile: str = ""
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_watts: float | None = None
    temperature: float | None = None
    energy_joules: float | None = None
    measured: float | None = None
    """The field that used-GPU utilisation is about, where one was asked for: in %, or a ratio where DCGM knows no %."""
    beside: tuple[tuple[int, float], ...] = ()
    """Other fields that were asked for and have a value, by number, in the same way."""
    holders: tuple[HolderFigures, ...] = ()
    conditions: tuple[Condition, ...] = ()
    """What is wrong with it; a device with any is broken."""
    present: bool = True
    """False: it was here and is not; what is here of it is its name, and who held it."""
    last_holders: tuple[Workload, ...] = ()
    """Of a device that is not present and that nobody holds any more: who held it last."""
    price_per_hour: float | None = None
    processes: tuple[ProcessFigures, ...] = ()
    """Only where they were asked for."""

    @property
    def key(self) -> tuple[str, str]:
        return self.uuid, self.instance

    @property
    def place(self) -> tuple[str, int, str, int, str]:
        number = int(self.instance) if self.instance.isdecimal() and len(self.instance) < 10 else -1
        return self.node, self.index, self.uuid, number, self.instance


class Alert(NamedTuple):
    """Something serious, in words; of which node and which GPU, where it is of one."""

    severity: str
    """`broken` or `warning`."""
    text: str
    node: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an exporter says of itself."""

    down: tuple[str, ...] = ()
    """Sources that it cannot read."""
    lost: int = 0
    """GPUs that do not answer, as far as they are counted; some of them may be among the devices."""


@dataclass(frozen=True, slots=True)
class View:
    """One reading of one source."""

    devices: tuple[DeviceFigures, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not as it should be, for the person who looks."""
    taken_at: float | None = None
    """Unix time by the clock that `idle_since` goes by, where holders have one."""
    simulated: bool = False
    """Figures are made up."""
    currency: str = ""
    """Of prices and costs; "": there are none."""
    alerts: tuple[Alert, ...] = ()
    """What of the notes is serious."""
    trouble: Trouble = Trouble()
    watched: bool = False
    """The source follows every holder: one without `idle_since` has run something lately."""
    old_nodes: frozenset[str] = frozenset()
    """Nodes of which nothing that is known is of now."""


def device_model(device: DeviceFigures) -> str:
    """A MIG instance is no GPU: it goes by the name its use is billed under, `<model> MIG <profile>`."""
    return billed_name(device.model, device.profile) if device.instance else device.model


def nameless_uuid(index: str) -> str:
    """What stands for the UUID on expositions without: every node has a `gpu 0`."""
    return f"{_NAMELESS}{index}"


def has_identity(uuid: str) -> bool:
    """Whether the same UUID elsewhere means the same GPU."""
    return bool(uuid) and not uuid.startswith(_NAMELESS)


def holder_text(workload: Workload) -> str:
    return workload.text or "-"


def utilization_of(values: Mapping[int, float]) -> float | None:
    """As a ratio. MIG instances have no GPU_UTIL: their engine's activity stands for it."""
    ratio = values[UTIL] / 100 if UTIL in values else values.get(GR_ENGINE)
    return ratio if ratio is not None and 0 <= ratio <= _OVER_FULL else None


def memory_of(values: Mapping[int, float], used_bytes: float | None = None) -> tuple[int | None, int | None]:
    """Bytes used and in all. Most counter files leave the total out: it is then the sum of its parts."""
    used, total = values.get(FB_USED), values.get(FB_TOTAL)
    if total is None and used is not None and FB_FREE in values:
        total = used + values[FB_FREE] + values.get(FB_RESERVED, 0)
    if used is not None:
        used_bytes = used * _MIB
    return _whole(used_bytes), _whole(None if total is None else total * _MIB)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
