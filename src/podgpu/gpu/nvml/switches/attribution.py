"""This module tells how long each process kept the GPU busy, from who was resident when. Pure; GPU nanoseconds.

A context stays resident after its work ends until another one has work, so residency is work and an idle tail. How much
of each is told by what is known beside it: the device's own busy time, and, where they may be taken, samples of whether
the engine is busy. Every residency is cut by its age: young ones are busy (a context is switched in because it has
work), old ones mostly are not, and where the line runs is learnt from the samples, for each process on its own, and
apart for stays that ended while others had work and for those that went on because nobody had. Stays that are long
enough for several samples are told by their own, each for the time around it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

AGE_EDGES = (0, *(round(250_000 * 2 ** (step / 4)) for step in range(41)))
"""Nanoseconds since the switch-in at which the age classes begin: 0, 0.25 ms, then four to a doubling up to 256 ms."""
_WIDTHS = tuple(following - edge for edge, following in pairwise(AGE_EDGES))
_CLASSES = len(AGE_EDGES)
_LONG_NS = 2_400_000
"""A stay longer than this outlived its time slice (2.1 ms on an H200, and the save): then nobody else had work."""
_LONGEST_SAVE_NS = 110_000
"""It takes 49 to 102 µs longer to save a context in the middle of its work than one that is done (H200)."""
_LIKELY_SAVE_NS = 37_000
"""The middle between that and nothing: for a stay that went on past its slice, and was then stopped or gave way."""
_YOUNG = 0.95
"""What the youngest class is taken for before any sample: nobody is switched in to do nothing."""
_PRIOR = 0.125
"""What is thought of a class before any sample counts as much as so many of them."""
_SEEN_THROUGH_NS = 250_000_000
"""A stay longer than this has four samples in it: from there on they are nearer to the truth than habits are."""
_REACH_NS = 60_000_000
"""For how long before and after it a sample speaks, at most; as far as no other one is nearer."""
_SURPRISE = 0.1
"""How doubtful it is what a sample says of the time around it, as `share * (1 - share)` is of habits."""
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
    slice_work: int = 0
    """What is worked in a stay that ended because its time slice was over; 0 where nobody has measured it."""

    @property
    def window(self) -> int:
        return self.until - self.since

    def of_processes(self) -> dict[int, int]:
        resident: dict[int, int] = {}
        for pid, _, since, until in self.stays:
            resident[pid] = resident.get(pid, 0) + until - since
        return resident


Sample = tuple[int, bool]
"""A moment, and whether the engine was busy then."""
_Kind = tuple[int, bool]
"""Stays of one process, those that outlived their time slice apart: most of them have an idle tail."""


def _kind(pid: int, age: int) -> _Kind:
    """Of a stay that became so old."""
    return pid, age > _LONG_NS


def _age_class(age: int) -> int:
    return bisect_right(AGE_EDGES, age) - 1


@dataclass(slots=True)
class _Habit:
    """How often one process was found busy in stays of one kind, by their age."""

    seen: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    busy: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)

    def fade(self, keep: float) -> None:
        self.seen = [count * keep for count in self.seen]
        self.busy = [count * keep for count in self.busy]

    def shares(self, overall: float) -> list[float]:
        """Of every age class, how much of it is work."""
        own = (sum(self.busy) + overall) / (sum(self.seen) + 1.0)
        priors = [max(own, _YOUNG)] + [own] * (_CLASSES - 1)
        weights = [count + _PRIOR for count in self.seen]
        found = zip(self.busy, priors, weights, strict=True)
        return _never_rising([(busy + _PRIOR * prior) / weight for busy, prior, weight in found], weights)


@dataclass(slots=True)
class _Ages:
    """How old the stays of one kind became in one window."""

    ended: list[int] = field(default_factory=lambda: [0] * _CLASSES)
    """Stays whose age at the end falls into the class, less those whose age at the window's begin does."""
    past_edge: list[int] = field(default_factory=lambda: [0] * _CLASSES)
    """Nanoseconds by which they are past the class's edge, counted likewise."""

    def add(self, age: int, stays: int = 1) -> None:
        age_class = _age_class(age)
        self.ended[age_class] += stays
        self.past_edge[age_class] += stays * (age - AGE_EDGES[age_class])

    def resident(self) -> list[int]:
        """Nanoseconds in every age class: all of it of the stays that grew older, and what the others had of it."""
        older = sum(self.ended)
        figures = []
        for width, ended, past_edge in zip((*_WIDTHS, 0), self.ended, self.past_edge, strict=True):
            older -= ended
            figures.append(older * width + past_edge)
        return figures


class Habits:
    """Learns from samples, window after window, and estimates each process's busy time by them."""

    def __init__(self) -> None:
        self._habits: dict[_Kind, _Habit] = {}

    def learn(self, residency: Residency, samples: Sequence[Sample]) -> None:
        keep = 0.5 ** (residency.window / _HALF_LIFE_NS)
        present = {stay.pid for stay in residency.stays}
        self._habits = {
            kind: habit for kind, habit in self._habits.items() if kind[0] in present or sum(habit.seen) > 0.5
        }
        for habit in self._habits.values():
            habit.fade(keep)
        for (moment, busy), stay in zip(samples, _stays_at(residency, samples), strict=True):
            if stay is not None:
                habit = self._habits.setdefault(_kind(stay.pid, stay.until - stay.began), _Habit())
                age_class = _age_class(moment - stay.began)
                habit.seen[age_class] += 1
                habit.busy[age_class] += busy

    def estimate(self, residency: Residency, busy: int, samples: Sequence[Sample] = ()) -> dict[int, int]:
        """Of `busy`, what each process ran; no more than it was resident. What is left over was nobody's.

        `samples`: the window's own."""
        seen = sum(sum(habit.seen) for habit in self._habits.values())
        overall = (sum(sum(habit.busy) for habit in self._habits.values()) + 1.0) / (seen + 1.0)
        kinds: defaultdict[_Kind, _Ages] = defaultdict(_Ages)
        for pid, began, since, until in residency.stays:
            age = until - began
            ages = kinds[_kind(pid, age)]
            ages.add(age)
            if since > began:
                ages.add(since - began, -1)
        shares = {kind: self._habits.get(kind, _Habit()).shares(overall) for kind in kinds}
        saving = _saving(residency, lambda pid, age: shares[_kind(pid, age)][_age_class(age)])
        likely = {pid: -float(ns) for pid, ns in saving.items()}
        doubt: dict[int, float] = {}
        for stay, since, until, at_work in _seen_through(residency, samples):
            ages = kinds[_kind(stay.pid, stay.until - stay.began)]
            ages.add(since - stay.began)
            ages.add(until - stay.began, -1)
            likely[stay.pid] = likely.get(stay.pid, 0.0) + (until - since) * at_work
            doubt[stay.pid] = doubt.get(stay.pid, 0.0) + (until - since) * _SURPRISE
        for kind, ages in kinds.items():
            by_age = list(zip(ages.resident(), shares[kind], strict=True))
            pid, _ = kind
            likely[pid] = likely.get(pid, 0.0) + sum(ns * share for ns, share in by_age)
            doubt[pid] = doubt.get(pid, 0.0) + sum(ns * share * (1 - share) for ns, share in by_age)
        at_most = {pid: ns - saving.get(pid, 0) for pid, ns in residency.of_processes().items()}
        return _fit(max(0, busy - sum(saving.values())), likely, doubt, at_most)


def _stays_at(residency: Residency, samples: Iterable[Sample]) -> Iterator[Stay | None]:
    """The stay each sample fell into. Those that fell into a switch say nothing."""
    begins = [stay.since for stay in residency.stays]
    for moment, _ in samples:
        place = bisect_right(begins, moment) - 1
        yield residency.stays[place] if place >= 0 and moment < residency.stays[place].until else None


def _seen_through(residency: Residency, samples: Iterable[Sample]) -> Iterator[tuple[Stay, int, int, bool]]:
    """Of long stays, from when to when each sample tells whether they were at work: where it is the nearest of all.

    That a sample speaks for as long before it as after it is what makes this right on the average, whatever a process
    does: of two moments one is as often told by a sample at the other as the other way round."""
    looks = sorted(samples)
    middles = [(before + after) // 2 for (before, _), (after, _) in pairwise(looks)]
    nearest = zip(looks, _stays_at(residency, looks), [0, *middles], [*middles, residency.until], strict=False)
    for (moment, busy), stay, since, until in nearest:
        if stay is not None and stay.until - stay.began > _SEEN_THROUGH_NS:
            yield stay, max(stay.since, since, moment - _REACH_NS), min(stay.until, until, moment + _REACH_NS), busy


def young_first(residency: Residency, busy: int) -> dict[int, int]:
    """Where nothing but residency is known: every stay was busy from its beginning, for the same time or to its end.

    On the traces of an H200 this is nearer to the truth than residency in proportion (2.7 points against 3.7).
    """
    lengths = sorted(until - since for _, _, since, until in residency.stays)
    share = min(1.0, max(0, busy) / max(1, sum(lengths)))
    left, level = max(0, busy - sum(_saving(residency, lambda _pid, _age: share).values())), 0
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


def longest_saving(residency: Residency) -> dict[int, int]:
    """As `_saving`, if every process was at work whenever its slice was over."""
    return _saving(residency, lambda _pid, _age: 1.0, _LONGEST_SAVE_NS)


def _saving(
    residency: Residency, share_at: Callable[[int, int], float], past_slice: int = _LIKELY_SAVE_NS
) -> dict[int, int]:
    """How long each process was being saved beyond what any stay takes, since it was stopped in the middle of its work.

    That can only be where the time slice was over: before, it gave way by itself. Where the stay ended with its slice,
    saving is what it lasted longer. `share_at`: how likely a process is at work at that age of a stay."""
    found: dict[int, int] = {}
    if residency.slice_work:
        for pid, began, since, until in residency.stays:
            past = until - began - residency.slice_work
            if past > 0:
                saving = min(past if past <= _LONGEST_SAVE_NS else past_slice, until - since)
                found[pid] = found.get(pid, 0) + int(saving * share_at(pid, until - began))
    return found


def _never_rising(figures: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest row that never rises: work comes first in a stay, so what says otherwise is chance and averaged."""
    levels: list[tuple[float, float, int]] = []  # figure, weight, how many places it stands for
    for figure, weight in zip(figures, weights, strict=True):
        level = figure, weight, 1
        while levels and levels[-1][0] < level[0]:
            before = levels.pop()
            together = before[1] + level[1]
            mean = (before[0] * before[1] + level[0] * level[1]) / together
            level = mean, together, before[2] + level[2]
        levels.append(level)
    return [figure for figure, _, places in levels for _ in range(places)]


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
