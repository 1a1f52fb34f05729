"""This module says what runs on simulated GPUs, and how much of a GPU it takes in any stretch of time.

Pure functions of the load, the time and a seed: nothing here keeps state, so the past can be asked for again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

STEADY_PERIOD = 0.1
"""Seconds. A rhythm this short is never seen, only its mean."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """One process on one GPU: flat out for `duty` of every `period`, resting for the remainder."""

    gpu: int
    """Number of the GPU (`SimulatedGpu.number`)."""
    pid: int
    duty: float = 0.5
    gi_id: int | None = None
    """The MIG GPU instance it runs in; duty is then of that instance."""
    period: float = 0.05
    """Seconds. Up to `STEADY_PERIOD` it reads as a steady level, from some seconds on as waves."""
    memory: int = 1024**3
    tensor: float = 0.5
    """Part of its busy time in which the tensor cores work."""
    dram: float = 0.3
    """Part of the memory bandwidth it takes while busy."""
    phase: float = 0.0
    """Seconds by which its period is shifted, so that equal loads need not move together."""
    encoder: float = 0.0
    decoder: float = 0.0
    kind: Literal["compute", "graphics", "mps"] = "compute"
    sway: float = 0.0
    """How far a steady level swings up and down, as a part of it: users come and go."""
    sway_period: float = 60.0
    """Seconds of one swing."""
    bursts: bool = False
    """Takes turns on the engine burst by burst (`engine.py`), and is sampled as a driver samples: at one moment."""

    def __post_init__(self) -> None:
        for name in ("duty", "tensor", "dram", "encoder", "decoder", "sway"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} of a simulated load is a part of 1, not {getattr(self, name)}")
        if not self.period > 0 or not self.sway_period > 0 or self.memory < 0:
            raise ValueError("a simulated load has periods above 0 and no negative memory")

    def demand(self, start: float, end: float) -> float:
        """Mean of its on-off wave between two moments."""
        duty, period = self.duty, self.period
        if period <= STEADY_PERIOD:
            return min(1.0, max(0.0, duty * (1 + self.sway * self._swing(start, end)))) if self.sway else duty
        first, into_first = divmod((start + self.phase) / period, 1.0)
        last, into_last = divmod((end + self.phase) / period, 1.0)
        # Busy periods gone by, and the busy part of the one each moment lies in.
        gone = (last - first) * duty + min(into_last, duty) - min(into_first, duty)
        # Rounding must not make rest a little less than none.
        return max(0.0, gone * period / (end - start))

    def _swing(self, start: float, end: float) -> float:
        """Mean of a sine between two moments."""
        turn = math.tau / self.sway_period
        first, last = turn * (start + self.phase), turn * (end + self.phase)
        return (math.cos(first) - math.cos(last)) / (last - first)


class Share(NamedTuple):
    """How hard one GPU or one GPU instance works, as parts of its own capacity.

    A tuple, as one is made for every simulated second of every GPU: a frozen dataclass takes twice as long to make.
    """

    busy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0

    def plus(self, other: Share, compute: float, memory: float) -> Share:
        """With another share added that owns only a part of the compute and of the memory."""
        return Share(
            self.busy + compute * other.busy,
            self.tensor + compute * other.tensor,
            self.dram + memory * other.dram,
        )


def split_busy(loads: Sequence[SimulatedLoad], start: float, end: float, factor: float) -> list[float]:
    """Busy part of each load that shares one GPU or instance; what they want beyond all of it is scaled away."""
    wanted = [min(1.0, load.demand(start, end) * factor) for load in loads]
    total = sum(wanted)
    return [part / total for part in wanted] if total > 1 else wanted


def share_of(loads: Sequence[SimulatedLoad], busy: Iterable[float]) -> Share:
    """What the loads do together, from the busy part of each."""
    total = tensor = dram = 0.0
    for load, part in zip(loads, busy, strict=True):
        total += part
        tensor += part * load.tensor
        dram += part * load.dram
    if total > 1:  # Scaled parts may add up to 1.0000000000000002.
        return Share(1.0, min(1.0, tensor), min(1.0, dram))
    return Share(total, tensor, dram)


def wobble(seed: int, gpu: int, bucket: int) -> float:
    """A number between -1 and 1 that looks random and always is the same: nothing real is perfectly steady."""
    mixed = (seed * 0x9E3779B97F4A7C15 + gpu * 0xD1B54A32D192ED03 + bucket * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return math.ldexp(float(mixed >> 11), -52) - 1.0
