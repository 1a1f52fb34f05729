"""Time ranges and JSON of `/api/v1/history`, shared by the SQLite store and Prometheus."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from podgpu.errors import UsageError

MAX_POINTS = 500
DEFAULT_SPARKLINE_POINTS = 60
SPARKLINE_STEP, SPARKLINE_STEPS = 15, 240
NO_DATA = 255
"""Byte of a sparkline point without data."""
RANGES = {"1h": 3600, "6h": 6 * 3600, "24h": 86_400, "7d": 7 * 86_400}
JSON = dict[str, Any]
Values = Sequence[float | None]  # one per step; None if there is no data
_DIGITS = {"utilization_ratio": 4, "memory_used_bytes": None, "power_watts": 1, "temperature_celsius": None}


class HolderSpan(msgspec.Struct, omit_defaults=True):
    """The time when a container held a GPU. `to` is None if the container still holds it."""

    from_: float = msgspec.field(name="from")
    to: float | None = None
    container: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""


class Mark(msgspec.Struct, omit_defaults=True):
    """The time when a GPU had a condition. `until` is None if the GPU still has it."""

    at: float
    until: float | None = None
    condition: str = ""
    says: str = ""
    uuid: str = ""  # set only in the history of a pod
    instance: str = ""


class DeviceHistory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One GPU or MIG instance. `series` has mean values over equal time steps, by name."""

    uuid: str
    instance: str = ""
    node: str = ""
    index: int | None = None
    series: Mapping[str, Values]
    holders: list[HolderSpan]


class GpuHistory(DeviceHistory, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    marks: list[Mark]


class PodHistory(msgspec.Struct, kw_only=True):
    api: str = "podgpu/v1"
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    namespace: str
    pod: str
    devices: list[DeviceHistory]
    marks: list[Mark]


class HistorySource(Protocol):
    """Provides the JSON of `/api/v1/history`. The methods raise SourceError if history cannot be read."""

    async def sparklines(self, points: int) -> JSON: ...

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        """Returns None if the GPU is unknown."""

    async def pod(self, namespace: str, pod: str, seconds: int) -> PodHistory | None:
        """Returns None if the pod held no GPU in that time."""


def parse_range(text: str) -> int:
    """Returns the length of the range in seconds."""
    if text not in RANGES:
        raise UsageError(f"range={_shorten(text)}: write one of {', '.join(RANGES)}")
    return RANGES[text]


def parse_points(text: str) -> int:
    """Returns the number of points of a sparkline."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= SPARKLINE_STEPS):
        raise UsageError(f"points={_shorten(text)}: write a number from 1 to {SPARKLINE_STEPS}")
    return int(text)


def _shorten(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]}…")


def sparkline_window(points: int, now: float) -> tuple[int, int, int]:
    """Returns start, step and number of points that cover the last hour. The step is a multiple of 15 s."""
    step = SPARKLINE_STEP * -(-SPARKLINE_STEPS // points)
    count = -(-SPARKLINE_STEP * SPARKLINE_STEPS // step)
    return (int(now) // step + 1 - count) * step, step, count


def utilization_byte(ratio: float | None) -> int:
    """Maps a ratio from 0 to 1 to a byte from 0 to 200. A ratio above 0 becomes at least 1."""
    if ratio is None:
        return NO_DATA
    return min(200, max(1, round(ratio * 200))) if ratio > 0 else 0


def sparklines_json(start: float, step: int, lines: Mapping[str, bytes], points: int) -> JSON:
    """Builds the JSON. `lines`: `UUID` or `UUID/INSTANCE` -> one byte per point. Skips devices without data."""
    devices = {name: b64encode(line).decode() for name, line in lines.items() if line.count(NO_DATA) < len(line)}
    return {"api": "podgpu/v1", "from": start, "step_seconds": step, "points": points, "devices": devices}


def round_series(series: Mapping[str, Values]) -> dict[str, Values]:
    return {
        name: [None if value is None else round(value, _DIGITS[name]) for value in values]
        for name, values in series.items()
    }


def make_pod_history(namespace: str, pod: str, gpus: Iterable[GpuHistory]) -> PodHistory | None:
    """Combines the histories of the pod's GPUs. Includes only conditions from the time when the pod held the GPU."""
    devices: list[DeviceHistory] = []
    marks: list[Mark] = []
    for gpu in gpus:
        own = [span for span in gpu.holders if (span.namespace, span.pod) == (namespace, pod)]
        devices.append(
            DeviceHistory(
                uuid=gpu.uuid, instance=gpu.instance, node=gpu.node, index=gpu.index, series=gpu.series, holders=own
            )
        )
        for mark in gpu.marks:
            if any(_overlaps(mark, span) for span in own):
                marks.append(msgspec.structs.replace(mark, uuid=gpu.uuid, instance=gpu.instance))
    if not devices:
        return None
    marks.sort(key=lambda mark: mark.at)
    return PodHistory(
        from_=gpu.from_,
        to=gpu.to,
        step_seconds=gpu.step_seconds,
        namespace=namespace,
        pod=pod,
        devices=devices,
        marks=marks,
    )


def _overlaps(mark: Mark, span: HolderSpan) -> bool:
    return (span.to is None or mark.at < span.to) and (mark.until is None or mark.until > span.from_)
