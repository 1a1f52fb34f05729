"""Loads on simulated GPUs. Pure functions of load, time and seed, so that the past can be computed again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

STEADY_PERIOD = 0.1
"""Seconds. Of a shorter period only the mean is visible."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """One process on one GPU: busy for `duty` of every `period`, idle for the rest."""

    gpu: int
    """Number of the GPU (`SimulatedGpu.number`)."""
    pid: int
    duty: float = 0.5
    gi_id: int | None = None
    """MIG GPU instance; the duty is then of that instance."""
    period: float = 0.05
    """Seconds. Up to `STEADY_PERIOD` the load is steady."""
    memory: int = 1024**3
    tensor: float = 0.5
    """Share of the busy time in which the tensor cores work."""
    dram: float = 0.3
    """Share of the memory bandwidth while busy."""
    phase: float = 0.0
    """Seconds by which the period is shifted."""
    encoder: float = 0.0
    decoder: float = 0.0
    kind: Literal["compute", "graphics", "mps"] = "compute"
    sway: float = 0.0
    """Relative variation of a steady load."""
    sway_period: float = 60.0
    """Period of the variation in seconds."""
    bursts: bool = False
    """Competes for the engine burst by burst (`engine.py`), and is sampled at single moments as by a driver."""

    def __post_init__(self) -> None:
        for name in ("duty", "tensor", "dram", "encoder", "decoder", "sway"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} of a simulated load must be between 0 and 1, not {getattr(self, name)}")
        if not self.period > 0 or not self.sway_period > 0 or self.memory < 0:
            raise ValueError("a simulated load needs positive periods and memory of at least 0")

    def demand(self, start: float, end: float) -> float:
        """Returns the mean of the on-off wave between two moments."""
        duty, period = self.duty, self.period
        if period <= STEADY_PERIOD:
            return min(1.0, max(0.0, duty * (1 + self.sway * self._swing(start, end)))) if self.sway else duty
        first, into_first = divmod((start + self.phase) / period, 1.0)
        last, into_last = divmod((end + self.phase) / period, 1.0)
        gone = (last - first) * duty + min(into_last, duty) - min(into_first, duty)
        # Rounding must not produce a negative number.
        return max(0.0, gone * period / (end - start))

    def _swing(self, start: float, end: float) -> float:
        """Returns the mean of a sine between two moments."""
        turn = math.tau / self.sway_period
        first, last = turn * (start + self.phase), turn * (end + self.phase)
        return (math.cos(first) - math.cos(last)) / (last - first)


class Share(NamedTuple):
    """Activity of a GPU or instance, relative to its own capacity. A tuple, because it is created very often."""

    busy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0

    def plus(self, other: Share, compute: float, memory: float) -> Share:
        """Adds the share of an instance, which has a part of the compute and of the memory."""
        return Share(
            self.busy + compute * other.busy,
            self.tensor + compute * other.tensor,
            self.dram + memory * other.dram,
        )


def split_busy(loads: Sequence[SimulatedLoad], start: float, end: float, factor: float) -> list[float]:
    """Returns the busy share of each load on one GPU or instance, scaled down if the sum exceeds 1."""
    wanted = [min(1.0, load.demand(start, end) * factor) for load in loads]
    total = sum(wanted)
    return [part / total for part in wanted] if total > 1 else wanted


def share_of(loads: Sequence[SimulatedLoad], busy: Iterable[float]) -> Share:
    """Adds up the loads with these busy shares."""
    total = tensor = dram = 0.0
    for load, part in zip(loads, busy, strict=True):
        total += part
        tensor += part * load.tensor
        dram += part * load.dram
    if total > 1:  # Scaled parts may add up to 1.0000000000000002.
        return Share(1.0, min(1.0, tensor), min(1.0, dram))
    return Share(total, tensor, dram)


def wobble(seed: int, gpu: int, bucket: int) -> float:
    """Returns deterministic pseudo-random noise between -1 and 1."""
    mixed = (seed * 0x9E3779B97F4A7C15 + gpu * 0xD1B54A32D192ED03 + bucket * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return math.ldexp(float(mixed >> 11), -52) - 1.0
