"""This module makes samples of what a server answers to an instant or a range query: anything may be in it. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from podgpu.cluster.prom.series import KnownSeries, labels_of
from podgpu.errors import SourceError
from podgpu.metrics.parse import ParsedSample

_LONGEST_TEXT = 200
_LARGEST_REFUSAL = 64 * 1024
MOST_VALUES, MOST_BESIDE = 4_000_000, 750_000
"""Texts and numbers in all of a round's answers that are kept, which is some 12,500 GPUs with a holder each; and in an
answer on targets, averages or idleness, which has fewer of each. Each takes a hundred bytes or more once it is read,
and the chart gives the cluster view 512 MiB."""
_OBJECT_WEIGHT = 4
"""As many texts and numbers take no more than a JSON object without any."""
MOST_NOTES = 5
_NOTES_READ = 100
"""Of each kind: most are the same again."""
_CUT = {"resultType": "vector", "result": []}
"""What is left of an answer's data without its samples."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Samples with the name they had, empty where the query left none. NaN, infinities and histograms are not here."""

    samples: tuple[ParsedSample, ...] = ()
    at: float | None = None
    """Unix time the query was evaluated at, by the server's clock; None for an answer without samples."""
    notes: tuple[str, ...] = ()
    """The server's warnings, and that an answer is not whole."""
    values: int = 0
    """How many texts and numbers it was, at most."""


class Line(NamedTuple):
    """One series over time."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]
    """Unix time and value; NaN, infinities and histograms are not here."""


@dataclass(frozen=True, slots=True)
class Matrix:
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def parse_answer(body: bytes, shown: str, known: KnownSeries | None = None, most_values: int = MOST_BESIDE) -> Vector:
    """`shown` is what to call the server; `known`: what was learned from answers to the same question. Raises
    SourceError, also for `status: error`."""
    values = _check_size(body, shown, most_values)
    cut = None if known is None else known.cut(body)
    if cut is not None:
        document = _document(cut.rest, shown)
        if document.get("status") == "success" and document.get("data") == _CUT:
            return Vector(cut.samples, cut.at, _notes(document), values)
    document = _document(body, shown)
    kind, result = _result(document, shown, ("vector", "scalar"))
    try:
        samples, at = _vector(result) if kind == "vector" else _scalar(result)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        raise _malformed(shown, "a sample of an unknown shape") from None
    return Vector(samples, at, _notes(document), values)


def parse_matrix(body: bytes, shown: str) -> Matrix:
    """The answer to a range query. Raises SourceError as `parse_answer` does."""
    _check_size(body, shown, MOST_VALUES)
    document = _document(body, shown)
    _, result = _result(document, shown, ("matrix",))
    try:
        lines = tuple(Line(labels_of(element["metric"]), _points(element.get("values", ()))) for element in result)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError):
        raise _malformed(shown, "a line of no known shape") from None
    return Matrix(lines, _notes(document))


def _points(values: Any) -> tuple[tuple[float, float], ...]:
    points = ((_finite(at), _number(value)) for at, value in values)
    return tuple((at, value) for at, value in points if math.isfinite(value))


def _result(document: dict[str, Any], shown: str, kinds: tuple[str, ...]) -> tuple[str, list[Any]]:
    if document.get("status") != "success":
        said = error_text(document) or "it does not say why"
        raise SourceError("query_failed", f"{shown} answers with an error: {said}")
    data = document.get("data")
    if not isinstance(data, dict):
        raise _malformed(shown, "no data")
    kind, result = data.get("resultType"), data.get("result")
    if kind not in kinds or not isinstance(result, list):
        raise _malformed(shown, f"a {plain_text(str(kind))} where a {kinds[0]} was asked for")
    return kind, result


def parse_error(body: bytes) -> str:
    """What a server says in an answer that is no success; empty: nothing that could be read."""
    if len(body) > _LARGEST_REFUSAL:
        return ""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return error_text(document) if isinstance(document, dict) else ""


def error_text(document: dict[str, Any]) -> str:
    text = document.get("error")
    return plain_text(text) if isinstance(text, str) else ""


def plain_text(text: str) -> str:
    """One short line without anything that could move a cursor."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _LONGEST_TEXT]).split())
    return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 1] + "…"


def _check_size(body: bytes, shown: str, most: int) -> int:
    """Before any of it is read: no text or number is in JSON without one of these before it. Raises SourceError."""
    values = body.count(b",") + body.count(b"[") + body.count(b"{") * _OBJECT_WEIGHT
    if values > most:
        raise SourceError(
            "too_much",
            f"{shown} has more series of GPUs than podgpu takes in one round: ask for part of the GPUs with --match,"
            " and see that no scrape target makes them up",
        )
    return values


def _document(body: bytes, shown: str) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        what = "a web page" if body[:512].lstrip()[:1] == b"<" else "no whole JSON"
        reason = "not_prometheus" if what == "a web page" else "malformed"
        raise SourceError(
            reason, f"{shown} answers with {what}, which is not Prometheus: name the base URL of its HTTP API"
        ) from None
    if not isinstance(document, dict) or "status" not in document:
        raise SourceError(
            "not_prometheus", f"{shown} does not answer as Prometheus does: name the base URL of its HTTP API"
        )
    return document


def _malformed(shown: str, what: str) -> SourceError:
    return SourceError("malformed", f"{shown} answers with {what}")


def _vector(result: list[Any]) -> tuple[tuple[ParsedSample, ...], float | None]:
    samples: list[ParsedSample] = []
    at: float | None = None
    for element in result:
        point = element.get("value")
        if point is None:  # a histogram has no single value
            continue
        at = _finite(point[0])
        value = _number(point[1])
        if math.isfinite(value):
            labels = labels_of(element["metric"])
            samples.append(ParsedSample(labels.pop("__name__", ""), labels, value))
    return tuple(samples), at


def _scalar(result: list[Any]) -> tuple[tuple[ParsedSample, ...], float | None]:
    value = _number(result[1])
    return ((ParsedSample("", {}, value),) if math.isfinite(value) else ()), _finite(result[0])


def _number(text: Any) -> float:
    """JSON has no NaN and no infinity, so Prometheus writes numbers as text."""
    if type(text) is not str or "_" in text:
        raise TypeError("value")
    return float(text)


def _finite(number: Any) -> float:
    value = float(number)
    if type(number) not in (int, float) or not math.isfinite(value):
        raise ValueError("time")
    return value


def _notes(document: dict[str, Any]) -> tuple[str, ...]:
    notes: list[str] = []
    if document.get("isPartial") is True:
        notes.append("the answer is not whole: a part of the storage did not answer")
    for kind in ("warnings", "infos"):
        texts = document.get(kind)
        if isinstance(texts, list):
            notes += [plain_text(text) for text in texts[:_NOTES_READ] if isinstance(text, str) and text.strip()]
    return tuple(dict.fromkeys(notes))[:MOST_NOTES]
