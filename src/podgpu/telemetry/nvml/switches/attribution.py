"""This module tells how long each process kept the GPU busy, from who was resident when. Pure; GPU nanoseconds.

A context stays resident after its work ends until another one has work, so residency is work and an idle tail. How much
of each is told by what is known beside it: the device's own busy time, and, where they may be taken, samples of whether
the engine is busy. Every residency is cut by its age: young ones are busy (a context is switched in because it has
work), old ones mostly are not, and where the line runs is learnt from the samples, for each process on its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

AGE_EDGES = (0, *(250_000 << step for step in range(11)))
"""Nanoseconds since the switch-in at which the age classes begin: 0, 0.25 ms, 0.5 ms … 256 ms."""
_CLASSES = len(AGE_EDGES)
_YOUNG = 0.95
"""What the youngest class is taken for before any sample: nobody is switched in to do nothing."""
_HALF_LIFE_NS = 60 * 10**9
"""How fast a process's habits are forgotten."""


class Stay(NamedTuple):
    """One process on the engine, from `since` to `until`, within one window; at work since `began`, or resting."""

    pid: int
    began: int
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Who was resident in one window. Stays, switching and `unknown` together are the window."""

    since: int
    until: int
    stays: Sequence[Stay] = ()
    switching: int = 0
    unknown: int = 0
    """Time of which it is not known who was resident: before the first switch, after a context was torn down."""

    @property
    def window(self) -> int:
        return self.until - self.since

    def of_processes(self) -> dict[int, int]:
        resident: dict[int, int] = {}
        for pid, _, since, until in self.stays:
            resident[pid] = resident.get(pid, 0) + until - since
        return resident


@dataclass(slots=True)
class _Habit:
    """How often one process was found busy, by the age of its residency."""

    seen: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    busy: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)

    def fade(self, keep: float) -> None:
        self.seen = [count * keep for count in self.seen]
        self.busy = [count * keep for count in self.busy]

    def share(self, age_class: int, overall: float) -> float:
        own = (sum(self.busy) + overall) / (sum(self.seen) + 1.0)
        prior = max(own, _YOUNG) if age_class == 0 else own
        return (self.busy[age_class] + prior) / (self.seen[age_class] + 1.0)


class Habits:
    """Learns from samples, window after window, and estimates each process's busy time by them."""

    def __init__(self) -> None:
        self._habits: dict[int, _Habit] = {}

    def learn(self, residency: Residency, samples: Iterable[tuple[int, bool]]) -> None:
        """`samples`: moments and whether the engine was busy then; those that fell into a switch say nothing."""
        keep = 0.5 ** (residency.window / _HALF_LIFE_NS)
        present = {stay.pid for stay in residency.stays}
        self._habits = {pid: habit for pid, habit in self._habits.items() if pid in present or sum(habit.seen) > 0.5}
        for habit in self._habits.values():
            habit.fade(keep)
        begins = [stay.since for stay in residency.stays]
        for moment, busy in samples:
            place = bisect_right(begins, moment) - 1
            if place >= 0 and moment < (stay := residency.stays[place]).until:
                habit = self._habits.setdefault(stay.pid, _Habit())
                age_class = _age_class(moment - stay.began)
                habit.seen[age_class] += 1
                habit.busy[age_class] += busy

    def estimate(self, residency: Residency, busy: int) -> dict[int, int]:
        """Of `busy`, what each process ran; no more than it was resident. What is left over was nobody's."""
        seen = sum(sum(habit.seen) for habit in self._habits.values())
        overall = sum(sum(habit.busy) for habit in self._habits.values()) / seen if seen else 1.0
        resident: dict[int, list[int]] = {}
        for stay in residency.stays:
            _add_by_age(resident.setdefault(stay.pid, [0] * _CLASSES), stay)
        likely: dict[int, float] = {}
        doubt: dict[int, float] = {}
        for pid, by_age in resident.items():
            habit = self._habits.get(pid, _Habit())
            shares = [habit.share(age_class, overall) for age_class in range(_CLASSES)]
            likely[pid] = sum(ns * share for ns, share in zip(by_age, shares, strict=True))
            doubt[pid] = sum(ns * share * (1 - share) for ns, share in zip(by_age, shares, strict=True))
        return _fit(busy, likely, doubt, {pid: sum(by_age) for pid, by_age in resident.items()})


def young_first(residency: Residency, busy: int) -> dict[int, int]:
    """Where nothing but residency is known: every stay was busy from its beginning, for the same time or to its end.

    On the traces of an H200 this is nearer to the truth than residency in proportion (2.7 points against 3.7).
    """
    lengths = sorted(until - since for _, _, since, until in residency.stays)
    left, level = max(0, busy), 0
    for place, length in enumerate(lengths):
        step = min(length - level, left // (len(lengths) - place))
        level, left = level + step, left - step * (len(lengths) - place)
        if level < length:
            break
    figures: dict[int, int] = {}
    for pid, _, since, until in residency.stays:
        length = until - since
        figures[pid] = figures.get(pid, 0) + (length if length < level else level)
    return figures


def _age_class(age: int) -> int:
    return max(0, bisect_right(AGE_EDGES, age) - 1)


def _add_by_age(by_age: list[int], stay: Stay) -> None:
    _, began, at, until = stay
    age_class = bisect_right(AGE_EDGES, at - began) - 1 if at > began else 0
    while age_class + 1 < _CLASSES and (edge := began + AGE_EDGES[age_class + 1]) < until:
        by_age[age_class] += edge - at
        at, age_class = edge, age_class + 1
    by_age[age_class] += until - at


def _fit(
    busy: int, likely: Mapping[int, float], doubt: Mapping[int, float], resident: Mapping[int, int]
) -> dict[int, int]:
    """Moves the likely figures to the known sum, the doubtful ones furthest, none beyond its residency."""
    figures = dict(likely)
    free = {pid for pid in figures if doubt[pid] > 0}
    while free:
        gap = busy - sum(figures.values())
        weight = sum(doubt[pid] for pid in free)
        moved = {pid: figures[pid] + gap * doubt[pid] / weight for pid in free}
        stopped = {pid for pid in free if not 0 <= moved[pid] <= resident[pid]}
        for pid in stopped or free:
            figures[pid] = min(max(moved[pid], 0.0), float(resident[pid]))
        if not stopped:
            break
        free -= stopped
    total = sum(figures.values())
    scale = min(1.0, busy / total) if total else 0.0
    return {pid: int(figure * scale) for pid, figure in figures.items()}
