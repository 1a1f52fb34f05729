"""This module reads the samples of an answer, and knows series it has met by their text: their labels are read once.
Pure.

A round over 8,000 GPUs brings more than a hundred thousand samples, nearly all of series that the round before had too.
An answer is cut where its elements end. Where one has another shape than servers are known to give it, nothing is cut:
the answer is read as JSON then, and the same comes out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from math import isfinite
from sys import intern
from typing import Any, NamedTuple

from podgpu.metrics.parse import ParsedSample

_BEGIN, _END = b'"data":{"resultType":"vector","result":[', b'"]}]'
_FIRST = '{"metric":'
_BETWEEN = re.compile(
    r'\},"value":\[(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?,"([-+.0-9A-Za-z]{1,32})"\]\}(?:,\{"metric":|,?\Z)'
)
"""From the end of one series' labels, its value in between, to the beginning of the next. Where all that is left by it
are labels, the answer is JSON of the shape it is taken for, whatever stands in them."""
_TIME = re.compile(r',"value":\[([0-9.]++)')
_SEAM, _END_OF_ONE = '"]},{"metric":{', 4
"""Where an element ends and the next begins, and how much of it is the first one's."""
_PIECE = 128 * 1024
"""Letters that are looked at in one go: nobody else's thread runs meanwhile."""
_MOST_KNOWN, _MOST_SETS = 400_000, 60_000
"""Series of all questions, and different sets of labels that they have. What is beyond is read, and not remembered."""
Series = tuple[str, dict[str, str]]
_sample = tuple.__new__
"""Of a named tuple: half of the time its own constructor takes, which is that of ten thousands of them."""


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

    def begin_round(self) -> None:
        """Answers that had other series each time, or that could not be read to their end, leave them behind."""
        if self.is_full or sum(len(known) for known in self._known.values()) > _MOST_KNOWN:
            self._known, self._sets = {}, {}

    @property
    def is_full(self) -> bool:
        return len(self._sets) >= _MOST_SETS

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

    def __len__(self) -> int:
        return len(self._by_text)

    def series(self) -> Iterable[Series]:
        return self._by_text.values()

    def cut(self, body: bytes) -> Cut | None:
        """None: it has no samples, or cannot be cut."""
        begin, end = body.find(_BEGIN) + len(_BEGIN), body.rfind(_END) + len(_END) - 1
        if not len(_BEGIN) <= begin < end:
            return None
        try:
            text = body[begin:end].decode()
            samples, at = self._samples(text)
            return Cut(body[:begin] + body[end:], samples, at)
        except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
            return None

    def _samples(self, answer: str) -> tuple[tuple[ParsedSample, ...], float]:
        """And the time they are of. Raises ValueError for what is of another shape."""
        known, count = self._by_text, 0
        samples: list[ParsedSample] = []
        for texts, values in _pieces(answer):
            count += len(texts)
            numbers = list(map(float, values))
            series = [known.get(text) or self._learned(text) for text in texts]
            if not isfinite(sum(numbers)):  # seldom, and it may be the sum alone
                told = [(of, number) for of, number in zip(series, numbers, strict=True) if isfinite(number)]
                series, numbers = [of for of, _ in told], [number for _, number in told]
            samples += [
                _sample(ParsedSample, (name, labels, number, None))
                for (name, labels), number in zip(series, numbers, strict=True)
            ]
        if len(known) > 2 * count + 1000:
            there = (text for texts, _ in _pieces(answer) for text in texts)
            self._by_text = {text: known[text] for text in there if text in known}
            self._memory.forget_unused()
        return tuple(samples), _time(answer)

    def _learned(self, text: str) -> Series:
        """`text`: labels without their closing brace. Raises ValueError for what are none."""
        labels = labels_of(json.loads(text + "}"))
        name = intern(labels.pop("__name__", ""))
        if self._memory.is_full:
            return name, labels
        labels = self._memory.shared({intern(label): intern(value) for label, value in labels.items()})
        self._by_text[text] = name, labels
        return name, labels


def _pieces(answer: str) -> Iterator[tuple[list[str], list[str]]]:
    """Texts of series and their values. Raises ValueError for what is of another shape."""
    if answer[-1] == ",":
        raise ValueError("nothing follows the last comma")
    at = 0
    while at < len(answer):
        end = answer.find(_SEAM, at + _PIECE)
        end = len(answer) if end < 0 else end + _END_OF_ONE
        if not answer.startswith(_FIRST, at):
            raise ValueError("no element")
        parts = _BETWEEN.split(answer[at + len(_FIRST) : end])
        if parts.pop():
            raise ValueError("no end")
        yield parts[::2], parts[1::2]
        at = end


def _time(answer: str) -> float:
    """Of the last element: all are of the same."""
    found = _TIME.match(answer, answer.rindex(',"value":['))
    return float(found[1]) if found else 0.0


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
