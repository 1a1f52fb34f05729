"""Ranks what slowed a pod down, and judges how well it used its GPUs.

Causes of the history have a share of the time in which the pod held its GPUs. The history has no
tensor activity and no traffic, so causes of these are only known now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

CauseName = Literal["waiting", "throttling", "failing", "low_activity", "pcie", "nvlink"]
UseVerdict = Literal["slowed_down", "little_computed", "well_used", "partly_used", "hardly_used"]
LEAST_RATIO = 0.03
_LEAST_SECONDS = 1200.0  # per GPU; a longer cause is named even in a long run
# A GPU computes little if these are smaller fractions of its busy time. A job that is limited by
# memory needs few tensor cores.
_LOW_TENSOR = 0.1
_LOW_DRAM = 0.4
LEAST_USE = 0.2  # of a GPU whose activity is judged, and that is partly used
GOOD_USE = 0.6
_LOW_POWER = 0.35  # of the limit: a busy GPU computes little
# Bytes per second of one GPU, in both directions: about half of PCIe 4.0 x16, and of NVLink 3.
_HIGH_PCIE = 30e9
_HIGH_NVLINK = 300e9


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Waiting for other containers, throttling by heat or power, a lost or failing GPU, low
    activity of tensor cores and memory, or traffic of PCIe or NVLink.
    """

    cause: CauseName
    seconds: float | None = None  # sum over the pod's GPUs
    ratio: float | None = None  # of the time in which the pod held its GPUs
    now: bool = False  # true if only the current value is known
    value: float | None = None  # now: a fraction of the time, or bytes per second
    brief: bool = False  # long, but only a small share of the time


class Activity(NamedTuple):
    """Current means of a pod's GPUs. Unknown values are None."""

    use: float | None = None
    tensor: float | None = None
    dram: float | None = None
    pcie: float | None = None  # bytes per second
    nvlink: float | None = None


def measure_cause(name: CauseName, seconds: float, held_seconds: float) -> Cause:
    """`seconds` and `held_seconds` are sums over the pod's GPUs, in the same period."""
    ratio = 0.0
    if held_seconds > 0:
        ratio = min(1.0, seconds / held_seconds)
    return Cause(name, round(seconds, 1), round(ratio, 4))


def rank_causes(causes: Iterable[Cause], gpus: int) -> list[Cause]:
    """Returns the causes that lasted long enough to matter, the longest share first."""
    lasting = []
    # `seconds` of a cause is a sum over the GPUs.
    least_seconds = _LEAST_SECONDS * max(1, gpus)
    for cause in causes:
        ratio = cause.ratio or 0.0
        seconds = cause.seconds or 0.0
        if ratio >= LEAST_RATIO:
            lasting.append(cause)
        elif seconds >= least_seconds:
            lasting.append(structs.replace(cause, brief=True))

    return sorted(lasting, key=lambda cause: cause.ratio or 0.0, reverse=True)


def judge_use(
    use: float | None, device_use: float | None, power_ratio: float | None, causes: Sequence[Cause]
) -> UseVerdict | None:
    """Returns None if the use is not known.

    `use`: of what the pod holds; `device_use`: of its GPUs. `power_ratio`: of the limit; None if
    the activity of tensor cores is known, which says more.
    """
    if use is None:
        return None
    # Only a cause of the history lasted for a known, large share of the time.
    if any(not cause.now and not cause.brief for cause in causes):
        return "slowed_down"

    has_low_power = power_ratio is not None and power_ratio < _LOW_POWER
    computes_little = has_low_power or any(cause.now for cause in causes)
    if computes_little and device_use is not None and device_use >= LEAST_USE:
        return "little_computed"

    if use >= GOOD_USE:
        return "well_used"
    if use >= LEAST_USE:
        return "partly_used"
    return "hardly_used"


def judge_activity(now: Activity) -> Sequence[Cause]:
    """Returns low activity of a busy GPU, and the traffic that may explain it."""
    if now.use is None or now.tensor is None or now.use < LEAST_USE:
        return []
    if now.tensor >= _LOW_TENSOR * now.use:
        return []

    # Limited by memory.
    if now.dram is not None and now.dram >= _LOW_DRAM * now.use:
        return []

    causes = [Cause("low_activity", now=True, value=now.tensor)]
    if now.pcie is not None and now.pcie >= _HIGH_PCIE:
        causes.append(Cause("pcie", now=True, value=now.pcie))
    if now.nvlink is not None and now.nvlink >= _HIGH_NVLINK:
        causes.append(Cause("nvlink", now=True, value=now.nvlink))

    return causes
