"""This module names every metric that a workload can be scaled by, once: what it is, its unit and where it is kept.
Pure.

A pod's figure is made over the devices it holds: utilisation and activity are their mean, memory is what is used of all
they have together, power their sum. What one of them does not tell, the pod does not have: half of a pod is a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from podgpu.autoscale.refusal import Refusal, bad_request, did_you_mean, not_found, quoted

SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE = 1002, 1004, 1005
FIELDS_BESIDE = (SM_ACTIVE, TENSOR_ACTIVE, DRAM_ACTIVE)
"""DCGM fields that are read for this, beside those that every figure is made of."""


class Metric(NamedTuple):
    name: str
    unit: str
    column: int
    """Its place in a sample."""
    text: str
    needs: str
    """What to see to where a pod on a node that answers does not have it."""


_USAGE = "the exporter must see processes (docs/usage.md), or the pod must have its GPUs to itself"
_PROFILING = "the exporter's counters must have {field}, and the pod must have its GPUs, or MIG instances, to itself"
UTILIZATION = Metric(
    "gpu_utilization", "%", 0, "time in which the pod ran something on its GPUs, as the driver samples it", _USAGE
)
MEMORY = Metric("gpu_memory_utilization", "%", 1, "GPU memory that the pod uses, of all that its GPUs have", _USAGE)
BUSY = Metric(
    "gpu_busy",
    "%",
    2,
    "time in which the pod ran something on its GPUs, counted",
    "the exporter must count busy seconds (docs/usage.md), and two rounds are needed to tell how they grow",
)
POWER = Metric(
    "gpu_power",
    "W",
    3,
    "power that the pod's GPUs draw, and of shared ones its part",
    "the exporter must provide power or energy (docs/usage.md)",
)
SM = Metric(
    "gpu_sm_activity",
    "%",
    4,
    "part of the multiprocessors that have work",
    _PROFILING.format(field="DCGM_FI_PROF_SM_ACTIVE"),
)
TENSOR = Metric(
    "gpu_tensor_activity",
    "%",
    5,
    "part of the time in which the tensor cores work",
    _PROFILING.format(field="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
)
DRAM = Metric(
    "gpu_dram_activity",
    "%",
    6,
    "part of the time in which the GPU's memory moves data",
    _PROFILING.format(field="DCGM_FI_PROF_DRAM_ACTIVE"),
)
USED = Metric(
    "avg_GPU_utilization",
    "%",
    7,
    "mean of --used-field over those of the GPUs that are in use (it is above 0)",
    "the exporter must export --used-field, which GPUs in MIG mode may not have",
)
METRICS = (UTILIZATION, MEMORY, BUSY, POWER, SM, TENSOR, DRAM, USED)
USED_COUNT = 8
"""Column: how many devices in use the sum in `USED.column` is over."""
COLUMNS = 9
_BY_NAME = {metric.name: metric for metric in METRICS}


def metric_named(name: str) -> Metric:
    """Raises Refusal."""
    found = _BY_NAME.get(name)
    if found is None:
        raise not_found(f"there is no metric {quoted(name)}{did_you_mean(name, _BY_NAME)}")
    return found


# Over pods

_QUANTILE = re.compile(r"p(\d{1,2}|100)", re.ASCII)


class Aggregate(NamedTuple):
    """How the figures of several pods become one."""

    name: str
    rank: float = 0.0
    """Of a quantile, from 0 to 1."""

    def of(self, values: Sequence[float]) -> float:
        """At least one value."""
        if self.name == "mean":
            return math.fsum(values) / len(values)
        if self.name == "max":
            return max(values)
        if self.name == "sum":
            return math.fsum(values)
        ordered = sorted(values)
        place = self.rank * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


MEAN = Aggregate("mean")


def parse_aggregate(text: str) -> Aggregate:
    """`mean`, `max`, `sum`, or a quantile such as `p90`. Raises Refusal."""
    if text in ("mean", "max", "sum"):
        return Aggregate(text)
    match = _QUANTILE.fullmatch(text)
    if match is None:
        raise bad_request(f"aggregate {quoted(text)}: write mean, max, sum, or a quantile such as p90")
    return Aggregate(text, int(match[1]) / 100)


# Durations and numbers as people write them

_DURATION = re.compile(r"(\d{1,6})(s|m|h)?", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,6})?", re.ASCII)


def parse_window(text: str, key: str, longest: float) -> float:
    """Seconds: `90s`, `5m`, and without a unit seconds too. Raises Refusal."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if match is None or seconds <= 0:
        raise bad_request(f"{key} {quoted(text)}: write a duration such as 90s or 5m")
    if seconds > longest:
        raise bad_request(
            f"{key} {text} is longer than the {longest:g}s that podgpu autoscale keeps (--longest-window)"
        )
    return seconds


def parse_target(text: str) -> float:
    """Raises Refusal."""
    if _NUMBER.fullmatch(text) is None or float(text) <= 0:
        raise _no_target(text)
    return float(text)


def _no_target(text: str) -> Refusal:
    return bad_request(f"target {quoted(text)}: write a number above 0 in the metric's unit, such as 60 for 60 %")
