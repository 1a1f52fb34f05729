"""Time ranges and JSON of `/api/v1/history`, shared by the SQLite store and Prometheus."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from podgpu.errors import UsageError

MAX_POINTS = 500
SPARKLINE_STEP, SPARKLINE_POINTS = 60, 60
NO_DATA = 255
"""Byte of a sparkline point without data."""
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
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

    async def sparklines(self) -> JSON: ...

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        """Returns None if the GPU is unknown."""

    async def pod(self, namespace: str, pod: str, seconds: int) -> PodHistory | None:
        """Returns None if the pod held no GPU in that time."""


def parse_range(text: str) -> int:
    """Returns the length of the range in seconds."""
    found = re.fullmatch(r"([1-9]\d{0,3})([mhdw])", text, re.ASCII)
    if found is None:
        raise UsageError(f"range={text[:40]!a}: write a length of time, such as 30m, 1h, 24h, 7d or 12w")
    return int(found[1]) * _UNITS[found[2]]


def sparkline_start(now: float) -> int:
    """Returns the start of the last hour, in whole minutes."""
    return (int(now) // SPARKLINE_STEP + 1 - SPARKLINE_POINTS) * SPARKLINE_STEP


def utilization_byte(ratio: float | None) -> int:
    """Maps a ratio from 0 to 1 to a byte from 0 to 200. A ratio above 0 becomes at least 1."""
    if ratio is None:
        return NO_DATA
    return min(200, max(1, round(ratio * 200))) if ratio > 0 else 0


def sparklines_json(start: float, lines: Mapping[str, bytes]) -> JSON:
    """Builds the JSON. `lines` maps `UUID` or `UUID/INSTANCE` to one byte per point. Skips devices without data."""
    devices = {name: b64encode(line).decode() for name, line in lines.items() if line.count(NO_DATA) < len(line)}
    return {
        **{"api": "podgpu/v1", "from": start, "step_seconds": SPARKLINE_STEP, "points": SPARKLINE_POINTS},
        "devices": devices,
    }


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
