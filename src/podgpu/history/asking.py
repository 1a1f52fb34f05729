"""This module says what is asked about the past, and the shape it is answered from, whoever kept it: the ring, or
Prometheus. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from podgpu.errors import UsageError
from podgpu.history.columns import Sample
from podgpu.history.rows import Key
from podgpu.history.spans import Span
from podgpu.model import Who

STEP = 15
PER_HOUR = 240
COARSE = 300
PER_DAY = 288
"""The last hour at 15 s, the last day at 5 min."""
DEFAULT_POINTS = 60
_LONGEST_NUMBER = 9
JSON = dict[str, Any]


class Range(NamedTuple):
    """So many steps of so many seconds, up to now."""

    step: int
    steps: int


RANGES = {"1h": Range(STEP, PER_HOUR), "6h": Range(COARSE, PER_DAY // 4), "24h": Range(COARSE, PER_DAY)}


def range_asked(text: str) -> Range:
    """Raises UsageError."""
    if text not in RANGES:
        raise UsageError(f"range={shown(text)}: write one of {', '.join(RANGES)}")
    return RANGES[text]


def points_asked(text: str) -> Range:
    """The last hour in so many points or fewer, each of whole steps of the ring. Raises UsageError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER and 1 <= int(text) <= PER_HOUR):
        raise UsageError(f"points={shown(text)}: write a number from 1 to {PER_HOUR}")
    together = -(-PER_HOUR // int(text))
    return Range(STEP * together, -(-PER_HOUR // together))


def shown(text: str) -> str:
    """What somebody sent, short and in one line."""
    return ascii(text if len(text) <= 40 else f"{text[:40]}…")


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that an answer is of, as Unix time. What is at a step's number is of it and the seconds after it."""

    start: float
    step: int
    count: int

    @property
    def end(self) -> float:
        return self.start + self.step * self.count

    def steps(self, start: float, end: float | None) -> range:
        """Numbers of the steps that something lasted in."""
        first = int((start - self.start) // self.step)
        beyond = self.count if end is None else max(first + 1, math.ceil((end - self.start) / self.step))
        return range(max(first, 0), min(beyond, self.count))


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one device."""

    key: Key
    node: str
    index: int
    """-1: not known."""
    samples: list[Sample]
    """One for each step, oldest first."""
    spans: list[Span]
    """By their beginning; times are those of whoever keeps it."""
    own: Mapping[Who, list[Sample]]
    """What holders use of it themselves, of those of whom that is kept."""


class History(Protocol):
    """Whoever is asked about the past, and answers as `/api/v1/history` does. SourceError: why there is no answer."""

    async def sparklines(self, asked: Range) -> bytes:
        """JSON with the utilisation of every device."""

    async def gpu(self, device: Key, asked: Range) -> JSON | None:
        """None: nothing is known of it."""

    async def pod(self, namespace: str, pod: str, asked: Range) -> JSON | None: ...
