"""Client for the HTTP API of Prometheus and compatible servers, and helpers that build PromQL."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
import msgspec

from podgpu.errors import SourceError, UsageError
from podgpu.http_client import Access, HttpClient, open_session
from podgpu.metrics.adapter import NODE_LABELS
from podgpu.metrics.parse import ParsedSample

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # twice the response for 8,000 GPUs
MAX_NOTES = 5
_CONCURRENCY = 5  # a quarter of the 20 queries that Prometheus runs at a time by default
_MAX_TEXT = 300
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")  # special characters in RE2


# Writing PromQL


def quote(value: str) -> str:
    """Quotes a label value."""
    return json.dumps(value, ensure_ascii=False)


def one_of(label: str, values: Iterable[str]) -> str:
    """Returns a matcher for any of the values."""
    pattern = "|".join(_SPECIAL.sub(r"\\\1", value) for value in values)
    return f"{label}=~{quote(pattern)}"


def select(names: Sequence[str], *matchers: str) -> str:
    """Returns a selector for series with one of the names. Skips empty matchers."""
    name = (one_of("__name__", names),) if len(names) != 1 else ()
    return f"{names[0] if len(names) == 1 else ''}{{{','.join(filter(None, (*name, *matchers)))}}}"


def by(*labels: str) -> str:
    return f"by ({', '.join(dict.fromkeys(labels))})"


# Requests


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """Options of --prometheus."""

    url: str
    access: Access = field(default_factory=Access)
    match: str = ""  # label matchers for every selector
    node_labels: tuple[str, ...] = NODE_LABELS
    cluster_label: str = "cluster"
    timeout: float = 10.0  # seconds for one query

    def __post_init__(self) -> None:
        for option, names in (("--node-label", self.node_labels or ("",)), ("--cluster-label", (self.cluster_label,))):
            if bad := [name for name in names if not _LABEL.fullmatch(name)]:
                raise UsageError(f"{option}: {bad[0]!r} is not a valid label name")


class RangeSeries(NamedTuple):
    """One series of a range query."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]  # Unix time, value


class _Element(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Element]


class _Answer(msgspec.Struct, rename="camel"):
    data: _Data | None = None
    error: str = ""
    warnings: list[str] = []
    is_partial: bool = False  # set by VictoriaMetrics


_decode_answer = msgspec.json.Decoder(_Answer).decode


class PrometheusClient:
    def __init__(self, server: PrometheusServer) -> None:
        """The URL may contain a path, such as /prometheus for Mimir."""
        self._http = HttpClient(server.url, server.access, timeout=server.timeout, max_bytes=MAX_ANSWER_BYTES)
        self.name = self._http.shown
        self.notes: list[str] = []  # warnings from the server, until the caller clears them
        self._options = {
            "timeout": f"{max(1, round(server.timeout * 1000))}ms",
            "nocache": "1",  # otherwise VictoriaMetrics omits the last 30 seconds
        }
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_CONCURRENCY)

    async def query_time(self) -> float:
        """Returns the Unix time of the server's clock. Raises SourceError."""
        samples = await self.query("vector(time())")
        if not samples or not 0 < samples[0].value < 1e11:
            raise SourceError("malformed", f"{self.name}: no valid result for the query vector(time())")
        return samples[0].value

    async def query(self, query: str, at: float | None = None) -> list[ParsedSample]:
        samples = []
        for element in await self._read("api/v1/query", query, {} if at is None else {"time": f"{at:.3f}"}):
            value = float(element.value[1]) if element.value else math.nan  # a histogram has no value
            if math.isfinite(value):
                samples.append(ParsedSample(element.metric.pop("__name__", ""), element.metric, value))
        return samples

    async def query_range(self, query: str, start: float, end: float, step: float) -> list[RangeSeries]:
        form = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        lines = []
        for element in await self._read("api/v1/query_range", query, form):
            points = [(at, float(text)) for at, text in element.values]
            lines.append(RangeSeries(element.metric, [point for point in points if math.isfinite(point[1])]))
        return lines

    async def _read(self, path: str, query: str, form: Mapping[str, str]) -> list[_Element]:
        """Sends the query by POST, because it may be too long for a URL. Raises SourceError."""
        form = {"query": query, **self._options, **form}
        async with self._slots:
            if self._session is None:
                self._session = open_session()
            response = await self._http.send(self._session, "POST", path, form, "application/json")
        status = response.status
        try:
            answer = _decode_answer(response.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if status != 200:
                raise self._http.status_error(response) from error
            text = f"{self.name} is not the base URL of a Prometheus HTTP API: it returned unexpected JSON ({error})"
            raise SourceError("malformed", text) from error
        if status in (401, 403) or (status != 200 and not answer.error):
            raise self._http.status_error(response)
        if status != 200 or answer.data is None:
            advice = "; check --match" if status in (400, 422) else ""
            reason = "query_failed" if status == 200 else f"http_{status}"
            raise SourceError(reason, f"{self.name} returned an error: {_shorten(answer.error)}{advice}")
        if answer.is_partial:
            answer.warnings.append("the response is incomplete: a part of the storage did not respond")
        notes = map(_shorten, answer.warnings)
        self.notes = list(dict.fromkeys((*self.notes, *notes)))[:MAX_NOTES]
        return answer.data.result

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _shorten(text: str) -> str:
    """Returns one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"
