"""Time ranges, data types and JSON of `/api/v1/history`, shared by the SQLite store and Prometheus."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from podgpu.errors import UsageError

MAX_POINTS = 500
DEFAULT_SPARKLINE_POINTS = 60
SPARKLINE_STEP, SPARKLINE_STEPS = 15, 240
NO_DATA = 255
"""The byte for a sparkline point without data."""
RANGES = {"1h": 3600, "6h": 6 * 3600, "24h": 86_400, "7d": 7 * 86_400}
JSON = dict[str, Any]
_SERIES = {  # name in the store -> (name in the JSON, decimal places)
    "utilization": ("utilization_ratio", 4),
    "memory": ("memory_used_bytes", 0),
    "power": ("power_watts", 1),
    "temperature": ("temperature_celsius", 0),
}


class Series(NamedTuple):
    """Mean values over equal time steps, by name. None if a step has no data."""

    start: float
    step: int
    values: Mapping[str, list[float | None]]

    @property
    def end(self) -> float:
        return self.start + self.step * max(map(len, self.values.values()), default=0)


class Span(NamedTuple):
    """The time in which a GPU had a holder or a condition. `ended` is None if it has not ended."""

    kind: str  # "holder" or "condition"
    started: float
    ended: float | None
    name: str  # name of the container or the condition
    message: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""


class GpuHistory(NamedTuple):
    """History of a GPU, or of a pod's time on a GPU."""

    uuid: str
    instance: str
    node: str
    gpu_index: int | None
    figures: Series
    spans: list[Span]  # all holders and conditions of the GPU


class HistorySource(Protocol):
    """Provides the JSON of `/api/v1/history`. The methods raise SourceError if history cannot be read."""

    async def sparklines(self, points: int) -> JSON: ...

    async def gpu(self, uuid: str, instance: str, seconds: int) -> JSON | None:
        """Returns None if the GPU is unknown."""

    async def pod(self, namespace: str, pod: str, seconds: int) -> JSON | None: ...


def parse_range(text: str) -> int:
    """Returns the length of the range in seconds. Raises UsageError."""
    if text not in RANGES:
        raise UsageError(f"range={_shorten(text)}: write one of {', '.join(RANGES)}")
    return RANGES[text]


def parse_points(text: str) -> int:
    """Returns the number of points of a sparkline. Raises UsageError."""
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
    """Builds the JSON. `lines` maps `UUID` or `UUID/INSTANCE` to one byte per point. Skips devices without data."""
    devices = {name: b64encode(line).decode() for name, line in lines.items() if line.count(NO_DATA) < len(line)}
    return {"api": "podgpu/v1", "from": start, "step_seconds": step, "points": points, "devices": devices}


def gpu_json(history: GpuHistory) -> JSON:
    return {
        "api": "podgpu/v1",
        **_device_json(history),
        **_range_json(history.figures),
        "series": _series_json(history.figures),
        "holders": [_holder_json(span) for span in history.spans if span.kind == "holder"],
        "marks": list(_marks_json(history.spans)),
    }


def pod_json(namespace: str, pod: str, devices: Iterable[GpuHistory]) -> JSON | None:
    """Builds the JSON of a pod. Returns None if the pod held no GPU in that time."""
    rows: list[JSON] = []
    marks: list[JSON] = []
    head: JSON = {}
    for history in devices:
        own = [span for span in history.spans if (span.kind, span.namespace, span.pod) == ("holder", namespace, pod)]
        device = _device_json(history)
        head = _range_json(history.figures)
        rows.append({**device, "series": _series_json(history.figures), "holders": [_holder_json(s) for s in own]})
        name = {key: device[key] for key in ("uuid", "instance") if key in device}
        marks += [mark | name for mark in _marks_json(_during(history.spans, own))]
    if not rows:
        return None
    marks.sort(key=lambda mark: mark["at"])
    return {"api": "podgpu/v1", "namespace": namespace, "pod": pod, **head, "devices": rows, "marks": marks}


def _during(spans: Iterable[Span], own: Iterable[Span]) -> Iterator[Span]:
    """Yields the spans that overlap one of the pod's own spans. Later conditions of the GPU do not concern the pod."""
    times = [(span.started, span.ended) for span in own]
    for span in spans:
        if any(
            (ended is None or span.started < ended) and (span.ended is None or span.ended > started)
            for started, ended in times
        ):
            yield span


def _device_json(history: GpuHistory) -> JSON:
    members = {"uuid": history.uuid, "instance": history.instance, "node": history.node}
    index = {} if history.gpu_index is None else {"index": history.gpu_index}
    return {name: value for name, value in members.items() if value} | index


def _range_json(series: Series) -> JSON:
    return {"from": round(series.start, 1), "to": round(series.end, 1), "step_seconds": series.step}


def _series_json(series: Series) -> JSON:
    return {
        name: [None if value is None else round(value, digits or None) for value in series.values[stored]]
        for stored, (name, digits) in _SERIES.items()
    }


def _holder_json(span: Span) -> JSON:
    names = {
        "namespace": span.namespace,
        "pod": span.pod,
        "container": span.name,
        "uid": span.uid,
        "container_id": span.container_id,
        "job": span.job,
    }
    times = {"from": span.started} | ({} if span.ended is None else {"to": span.ended})
    return times | {name: value for name, value in names.items() if value}


def _marks_json(spans: Iterable[Span]) -> Iterator[JSON]:
    for span in spans:
        if span.kind == "condition":
            until = {} if span.ended is None else {"until": span.ended}
            yield {"at": span.started, **until, "condition": span.name, "says": span.message}
