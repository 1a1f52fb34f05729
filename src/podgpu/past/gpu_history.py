"""The history of GPUs, pods and jobs, and sparklines: the JSON of `/api/v1/history`.

All times are Unix times.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from podgpu.charge import Figures
from podgpu.known import select_known
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import PodName, Workload

MAX_POINTS = 500
MAX_DEVICES = 64  # of a job; 64 devices with 500 points are about 1 MB of JSON
_SPARKLINE_STEP = 60  # seconds
_SPARKLINE_POINTS = 60
# A point of a sparkline is one byte: FULL means 100 %, and NO_DATA means that there is no data.
FULL = 200
NO_DATA = 255
JSON = dict[str, Any]
Values = Sequence[float | None]  # one per step; None if there is no data
Series = Mapping[str, Values]
_DIGITS = {
    "utilization_ratio": 4,
    "memory_used_bytes": None,
    "power_watts": 1,
    "temperature_celsius": None,
}


class HolderSpan(Workload, frozen=True, kw_only=True):
    """A period in which a container held a GPU. `to` is None while the container holds the GPU."""

    from_: float = msgspec.field(name="from")
    to: float | None = None
    hidden: bool = False  # True if the user may not see whose it is


class Mark(msgspec.Struct, omit_defaults=True):
    """A period in which a GPU had a condition, such as an XID.

    `until` is None while the condition lasts.
    """

    at: float
    until: float | None = None
    condition: str = ""
    says: str = ""
    uuid: str = ""  # set only in the history of a pod
    instance: str = ""


class DeviceHistory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """History of a GPU or MIG instance.

    `series` maps a quantity, such as power_watts, to one mean per time step.
    """

    uuid: str
    instance: str = ""
    node: str = ""
    index: int | None = None
    series: Series
    holders: list[HolderSpan]


class GpuHistory(DeviceHistory, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    marks: list[Mark]


class _DevicesHistory(msgspec.Struct, kw_only=True):
    """History of the devices that pods held, while they held them."""

    api: str = "podgpu/v1"
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    devices: list[DeviceHistory]
    marks: list[Mark]  # sorted by time


class PodHistory(_DevicesHistory, kw_only=True):
    namespace: str
    pod: str


class JobHistory(_DevicesHistory, kw_only=True):
    kind: str
    namespace: str
    name: str
    left_out: int = 0  # devices above MAX_DEVICES


def sparkline_times(now: float) -> range:
    """Returns the Unix time of each point.

    A sparkline has 60 points and ends with the current minute.
    """
    end = (int(now) // _SPARKLINE_STEP + 1) * _SPARKLINE_STEP
    return range(end - _SPARKLINE_POINTS * _SPARKLINE_STEP, end, _SPARKLINE_STEP)


def utilization_byte(ratio: float | None) -> int:
    """Encodes a ratio from 0 to 1 as a byte from 0 to FULL. A ratio above 0 never becomes 0."""
    if ratio is None:
        return NO_DATA
    if ratio > 0:
        return min(FULL, max(1, round(ratio * FULL)))
    return 0


def sparklines_json(times: range, lines: Series) -> JSON:
    """Builds the JSON of sparklines. Omits devices without data.

    `lines` maps `UUID` or `UUID/INSTANCE` to ratios.
    """
    devices = {}
    for name, line in lines.items():
        if any(ratio is not None for ratio in line):
            content = bytes(map(utilization_byte, line))
            devices[name] = b64encode(content).decode()

    return {
        "api": "podgpu/v1",
        "from": times.start,
        "step_seconds": times.step,
        "points": len(times),
        "devices": devices,
    }


def round_series(series: Series) -> dict[str, Values]:
    rounded: dict[str, Values] = {}
    for name, values in series.items():
        digits = _DIGITS[name]
        rounded[name] = [None if value is None else round(value, digits) for value in values]
    return rounded


def make_pod_history(namespace: str, pod: str, gpus: Sequence[GpuHistory]) -> PodHistory | None:
    """Combines the histories of a pod's GPUs. None if there are none."""
    if not gpus:
        return None
    pods = {(namespace, pod)}
    fields = _combine([PodsDevice(gpu, pods) for gpu in gpus])
    return PodHistory(namespace=namespace, pod=pod, **fields)


def make_job_history(
    kind: str, namespace: str, name: str, held: Sequence[PodsDevice], left_out: int
) -> JobHistory:
    fields = _combine(held)
    return JobHistory(kind=kind, namespace=namespace, name=name, left_out=left_out, **fields)


class PodsDevice(NamedTuple):
    history: GpuHistory
    pods: Set[PodName]  # whose history it is. Other pods may have held it, too


def _combine(held: Sequence[PodsDevice]) -> JSON:
    """Returns the fields of `_DevicesHistory`.

    Omits conditions from times when none of the pods held the device.
    """
    devices = []
    marks: list[Mark] = []
    for gpu, pods in held:
        own = [span for span in gpu.holders if span.pod_name in pods]
        marks += _select_marks(gpu, own)
        device = DeviceHistory(
            uuid=gpu.uuid,
            instance=gpu.instance,
            node=gpu.node,
            index=gpu.index,
            series=gpu.series,
            holders=own,
        )
        devices.append(device)

    marks.sort(key=lambda mark: mark.at)
    first = held[0].history
    return {
        "from_": first.from_,
        "to": first.to,
        "step_seconds": first.step_seconds,
        "devices": devices,
        "marks": marks,
    }


def _select_marks(gpu: GpuHistory, own: Sequence[HolderSpan]) -> Iterator[Mark]:
    """Yields the conditions at the time of the spans."""
    for mark in gpu.marks:
        if any(_overlap(mark, span) for span in own):
            yield msgspec.structs.replace(mark, uuid=gpu.uuid, instance=gpu.instance)


def _overlap(mark: Mark, span: HolderSpan) -> bool:
    mark_start = mark.at
    if mark.condition == NODE_GONE:
        # A holder's span ends when its node is gone. The second before overlaps with the span.
        mark_start -= 1
    mark_end = math.inf if mark.until is None else mark.until
    span_end = span.to or math.inf
    return span.from_ < mark_end and mark_start < span_end


def add_series(histories: Sequence[Series]) -> dict[str, Values]:
    """Adds up what several pods of a job did on one device, such as before and after a restart."""
    added: dict[str, Values] = {}
    for name in Figures._fields:
        lines = [history[name] for history in histories]
        values: list[float | None] = []
        for values_of_step in zip(*lines, strict=True):
            known = select_known(values_of_step)
            values.append(_unite_values(name, known) if known else None)
        added[name] = values

    return added


def _unite_values(name: str, values: Sequence[float]) -> float:
    """Returns the sum. Temperatures have no sum; the highest counts."""
    if name == "temperature_celsius":
        return max(values)
    total = sum(values)
    if name == "utilization_ratio":
        return min(total, 1.0)
    return total
