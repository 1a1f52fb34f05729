"""Client for the HTTP API of Prometheus and compatible servers, and helpers that build PromQL."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
import msgspec

from podgpu.errors import SourceError, UsageError
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session
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
    """Quotes a label value. Control characters are escaped for Prometheus and VictoriaMetrics."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'


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
            for name in names:
                if not _LABEL.fullmatch(name):
                    default = ",".join(NODE_LABELS) if option == "--node-label" else "cluster"
                    raise UsageError(f"{option}: {name!r} is not a valid label name; the default is {default}")


class RangeSeries(NamedTuple):
    """One series of a range query."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]  # Unix time, value


class _Element(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct, rename="camel"):
    result_type: str
    result: list[_Element]


class _Answer(msgspec.Struct, rename="camel"):
    status: str
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
        self._method = "POST"
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_CONCURRENCY)

    async def query_time(self) -> float:
        """Returns the Unix time of the server's clock. Raises SourceError."""
        samples = await self.query("vector(time())")
        if not samples or not 0 < samples[0].value < 1e11:
            raise SourceError("malformed", f"{self.name}: no valid result for the query vector(time())")
        return samples[0].value

    async def query(self, query: str, at: float | None = None) -> list[ParsedSample]:
        elements = await self._read("api/v1/query", query, {} if at is None else {"time": f"{at:.3f}"}, "vector")
        samples = []
        for element in elements:
            value = _parse_number(element.value[1]) if element.value else math.nan  # a histogram has no value
            if math.isfinite(value):
                samples.append(ParsedSample(element.metric.pop("__name__", ""), element.metric, value))
        return samples

    async def query_range(self, query: str, start: float, end: float, step: float) -> list[RangeSeries]:
        form = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        elements = await self._read("api/v1/query_range", query, form, "matrix")
        lines = []
        for element in elements:
            points = [(at, _parse_number(text)) for at, text in element.values]
            lines.append(RangeSeries(element.metric, [point for point in points if math.isfinite(point[1])]))
        return lines

    async def _read(self, path: str, query: str, form: Mapping[str, str], result_type: str) -> list[_Element]:
        async with self._slots:
            response = await self._send(path, {"query": query, **self._options, **form})
        try:
            answer = _decode_answer(response.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if response.status != 200:
                raise self._http.status_error(response) from error
            is_page = response.body[:512].lstrip()[:1] == b"<"
            raise SourceError(
                "not_prometheus" if is_page else "malformed",
                f"{self.name} returned {'a web page' if is_page else f'unexpected JSON ({error})'}: check that it is"
                " the base URL of a Prometheus HTTP API",
            ) from error
        if response.status != 200 or answer.status != "success" or answer.data is None:
            raise self._explain(response, answer)
        self._add_notes(answer)
        if answer.data.result_type != result_type:
            kind = _shorten(answer.data.result_type)
            raise SourceError("malformed", f"{self.name} returned a {kind} instead of a {result_type}")
        return answer.data.result

    async def _send(self, path: str, form: Mapping[str, str]) -> HttpResponse:
        """Sends the query by POST, because it may be too long for a URL. If a proxy rejects POST, uses GET."""
        if self._session is None:
            self._session = open_session()
        response = await self._http.send(self._session, self._method, path, form, "application/json")
        if response.status == 405 and self._method == "POST":
            response = await self._http.send(self._session, "GET", path, form, "application/json")
            if response.status == 200:
                self._method = "GET"
        return response

    def _explain(self, response: HttpResponse, answer: _Answer) -> SourceError:
        if response.status in (301, 302, 307, 308, 401, 403) or (response.status != 200 and not answer.error):
            return self._http.status_error(response)
        advice = "; check --match" if response.status in (400, 422) else ""
        reason = "query_failed" if response.status == 200 else f"http_{response.status}"
        text = _shorten(answer.error) or "no reason given"
        return SourceError(reason, f"{self.name} returned an error: {text}{advice}")

    def _add_notes(self, answer: _Answer) -> None:
        notes = [_shorten(text) for text in answer.warnings if text.strip()]
        if answer.is_partial:
            notes.append("the response is incomplete: a part of the storage did not respond")
        self.notes += [note for note in notes if note not in self.notes][: MAX_NOTES - len(self.notes)]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _shorten(text: str) -> str:
    """Returns one printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _MAX_TEXT]).split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"
