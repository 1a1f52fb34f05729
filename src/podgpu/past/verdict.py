"""Ranks what slowed a pod down, by its share of the time in which the pod held its GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

CauseName = Literal["waiting", "throttling", "failing"]
_LEAST_RATIO = 0.01  # shorter causes are left out


class Cause(msgspec.Struct, frozen=True):
    """Waiting for other containers, throttling by heat or power, or a lost or failing GPU."""

    cause: CauseName
    seconds: float  # sum over the pod's GPUs
    ratio: float  # of the time in which the pod held its GPUs


def measure_cause(name: CauseName, seconds: float, held_seconds: float) -> Cause:
    """`seconds` and `held_seconds` are sums over the pod's GPUs, in the same period."""
    ratio = min(1.0, seconds / held_seconds) if held_seconds > 0 else 0.0
    return Cause(name, round(seconds, 1), round(ratio, 4))


def rank_causes(causes: Iterable[Cause]) -> list[Cause]:
    """Returns the causes that lasted long enough to matter, the longest share first."""
    lasting = [cause for cause in causes if cause.ratio >= _LEAST_RATIO]
    return sorted(lasting, key=lambda cause: cause.ratio, reverse=True)
