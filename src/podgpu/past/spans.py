"""Periods: in which a GPU had a holder or a condition, and their common time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

HOLDER = "holder"  # kinds of spans
CONDITION = "condition"
IDLE = "idle"  # a condition of a holder


class Span(NamedTuple):
    """A period in which a GPU had a holder or a condition."""

    started: float  # -inf if it began before everything that is known
    ended: float | None
    kind: str
    name: str = ""
    message: str = ""
    uuid: str = ""
    instance: str = ""
    node: str = ""
    gpu_index: int | None = None
    account: int = -1  # identifies the pod or job
    namespace: str = ""
    pod: str = ""
    workload: str = ""  # its name, for people

    @property
    def gpu(self) -> str:
        index = "?" if self.gpu_index is None else str(self.gpu_index)
        if self.instance:
            return f"{index}/{self.instance}"
        return index


class Interval(NamedTuple):
    start: float
    end: float


def unite(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union, sorted and without overlaps."""
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1].end:
            last = united.pop()
            united.append(Interval(last.start, max(last.end, end)))
        else:
            united.append(Interval(start, end))
    return united


def measure_common(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Returns the seconds in both unions."""
    seconds = 0.0
    others = unite(second)
    for interval in unite(first):
        for other in others:
            start = max(interval.start, other.start)
            end = min(interval.end, other.end)
            seconds += max(0.0, end - start)
    return seconds
