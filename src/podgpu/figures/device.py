"""Flat devices and holders for `top`, `history` and `autoscale`; key figures from DCGM fields for the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podgpu.metrics.conditions import conditions, words_for
from podgpu.model import Workload, WorkloadKey, WorkloadOwner

UTIL, GR_ENGINE = 203, 1001
FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED = 250, 251, 252, 253
POWER, TEMPERATURE = 155, 150
FIELDS = (UTIL, GR_ENGINE, FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED, POWER, TEMPERATURE)
SIMULATED = "simulated"  # name of the simulated driver among the sources
_MIB = 1024 * 1024
_MAX_RATIO = 1.01


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    pid: int
    memory: int | None = None
    utilization: float | None = None
    owner: Workload | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    name: str
    since: float | None
    says: str
    do: str

    @classmethod
    def of(cls, name: str, since: float | None, detail: str = "") -> Condition:
        return cls(name, since, *words_for(name, detail))

    @property
    def severity(self) -> str:
        """`broken` or `warning`."""
        spec = conditions().get(self.name)
        return "broken" if spec is None else spec.severity


@dataclass(frozen=True, slots=True)
class HolderFigures:
    holder: Workload
    utilization: float | None = None
    memory: int | None = None
    processes: int | None = None
    busy_seconds: float | None = None
    idle_seconds: float | None = None
    energy_joules: float | None = None
    share: float | None = None
    idle_since: float | None = None
    owner: WorkloadOwner | None = None
    cost_per_hour: float | None = None

    @property
    def who(self) -> WorkloadKey:
        return self.holder.key


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
    measured: float | None = None  # --used-field
    beside: tuple[tuple[int, float], ...] = ()  # fields for autoscale, by number
    holders: tuple[HolderFigures, ...] = ()
    conditions: tuple[Condition, ...] = ()
    present: bool = True
    last_holders: tuple[Workload, ...] = ()
    price_per_hour: float | None = None
    processes: tuple[ProcessFigures, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.uuid, self.instance

    @property
    def place(self) -> tuple[str, int, str, int, str]:
        number = int(self.instance) if self.instance.isdecimal() and len(self.instance) < 10 else -1
        return self.node, self.index, self.uuid, number, self.instance


def has_identity(uuid: str) -> bool:
    """Whether the same UUID elsewhere means the same GPU."""
    return bool(uuid) and not uuid.startswith("gpu ")


def holder_text(workload: Workload) -> str:
    return workload.text or "-"


def utilization_of(values: Mapping[int, float]) -> float | None:
    """As a ratio. MIG instances have no GPU_UTIL, so the activity of their engine is used."""
    ratio = values[UTIL] / 100 if UTIL in values else values.get(GR_ENGINE)
    return ratio if ratio is not None and 0 <= ratio <= _MAX_RATIO else None


def memory_of(values: Mapping[int, float], used_bytes: float | None = None) -> tuple[int | None, int | None]:
    """Used and total bytes. Most counter files leave the total out, so it is computed from its parts."""
    used, total = values.get(FB_USED), values.get(FB_TOTAL)
    if total is None and used is not None and FB_FREE in values:
        total = used + values[FB_FREE] + values.get(FB_RESERVED, 0)
    if used is not None:
        used_bytes = used * _MIB
    return None if used_bytes is None else round(used_bytes), None if total is None else round(total * _MIB)
