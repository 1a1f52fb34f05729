"""This module reads the samples of an answer, and knows series it has met by their text: their labels are read once.
Pure.

A round over 8,000 GPUs brings more than a hundred thousand samples, nearly all of series that the round before had too.
An answer is cut where its elements end. Where one has another shape than servers are known to give it, nothing is cut:
the answer is read as JSON then, and the same comes out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from sys import intern
from typing import Any, NamedTuple

from podgpu.exposition.parse import ParsedSample

_BEGIN, _END = b'"data":{"resultType":"vector","result":[', b'"]}]'
_TEXT = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_ELEMENT = re.compile(
    r'\{"metric":(\{[^{}\\]*+\}|\{(?:' + _TEXT + r"[:,]?)*+\})"  # quick where no brace and no backslash is in it
    r',"value":\[((?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?),"([-+.0-9A-Za-z]{1,32})"\]\}(?:,|\Z)'
    r"|.+",
    re.DOTALL,
)
_MOST_KNOWN = 200_000
"""Series of one question: of 50,000 GPUs and more. What is beyond is read anew every time."""
Series = tuple[str, dict[str, str]]


class Cut(NamedTuple):
    rest: bytes
    """The answer without its samples."""
    samples: tuple[ParsedSample, ...]
    at: float


class SeriesMemory:
    """Of all questions of a round: series with the same labels share them, whatever their names are."""

    def __init__(self) -> None:
        self._known: dict[str, KnownSeries] = {}
        self._sets: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}

    def of(self, question: str) -> KnownSeries:
        known = self._known.get(question)
        if known is None:
            known = self._known[question] = KnownSeries(self)
        return known

    def shared(self, labels: dict[str, str]) -> dict[str, str]:
        return self._sets.setdefault(tuple(labels.items()), labels)

    def forget_unused(self) -> None:
        in_use = (labels for known in self._known.values() for _, labels in known.series())
        self._sets = {tuple(labels.items()): labels for labels in in_use}


class KnownSeries:
    """Of one question: those of its last answer, and for a while those of answers before."""

    def __init__(self, memory: SeriesMemory) -> None:
        self._memory = memory
        self._by_text: dict[str, Series] = {}

    def series(self) -> Iterable[Series]:
        return self._by_text.values()

    def cut(self, body: bytes) -> Cut | None:
        """None: it has no samples, or cannot be cut."""
        begin, end = body.find(_BEGIN) + len(_BEGIN), body.rfind(_END) + len(_END) - 1
        if not len(_BEGIN) <= begin < end:
            return None
        try:
            text = body[begin:end].decode()
            elements: list[tuple[str, str, str]] = [] if text[-1] == "," else _ELEMENT.findall(text)
            samples = tuple(self._samples(elements))
            return Cut(body[:begin] + body[end:], samples, float(elements[-1][1]))
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
            return None

    def _samples(self, elements: list[tuple[str, str, str]]) -> Iterable[ParsedSample]:
        known = self._by_text
        for text, _, value in elements:
            number = float(value)
            name, labels = known.get(text) or self._learned(text)
            if number - number == 0:  # neither NaN nor endless
                yield ParsedSample(name, labels, number)
        if len(known) > 2 * len(elements) + 1000:
            self._by_text = {text: known[text] for text, _, _ in elements}
            self._memory.forget_unused()

    def _learned(self, text: str) -> Series:
        """Raises ValueError for what is between two elements: that is no text of a series."""
        labels = labels_of(json.loads(text))
        name = intern(labels.pop("__name__", ""))
        labels = self._memory.shared({intern(label): intern(value) for label, value in labels.items()})
        if len(self._by_text) < _MOST_KNOWN:
            self._by_text[text] = name, labels
        return name, labels


def labels_of(metric: Any) -> dict[str, str]:
    """An empty label is one that is not there. Half a character, which JSON can write, becomes a question mark.

    There may be more than a hundred thousand of these in an answer: nothing is looked at one by one. Raises TypeError
    or AttributeError for what are no labels.
    """
    labels: dict[str, str] = metric
    if "" in labels.values():
        labels = {name: value for name, value in labels.items() if value}
    text = "".join(labels.values())  # raises TypeError for what is no text
    if text.isascii():
        return labels
    return {name: value.encode("utf-8", "replace").decode() for name, value in labels.items()}
