"""Decodes the driver's context-switch log and computes how long each process kept the GPU busy.

A context is resident from its switch-in until it is saved. This time is a `Period`. It begins with
work. When the work ends, the context stays resident, but idle, until another context has work.
`BusyShareModel` estimates how long a context worked. All times are in nanoseconds of the GPU's
clock. This module does no I/O.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress, pairwise
from typing import NamedTuple

from podgpu.errors import SourceError

RECORD = struct.Struct("<HHIBBHIIHBBQ")
"""Type, subtype, vardata, tag, vmid, sequence number, context, pid, reserved, GPU instance, compute
instance, time.
"""
FECS_RECORD = 2
SWITCHED_IN = 6
SAVED = 7
HIDDEN_PID = 0  # pid in the log for processes of other users if podgpu has no CAP_SYS_ADMIN
KERNEL_PID = 0xFFFFFFFF
WHOLE_GPU = 255
_NUMBERS = 1 << 16
MAX_SWITCH_NS = 1_000_000
"""If a context is switched in later than this after the last save, it is unknown what ran in
between. A switch takes 80 to 90 µs on an H200.
"""


class SwitchLogError(SourceError):
    """The log is missing, broken or inconsistent."""


# Records

Switches = tuple[int, int, list[int], list[int]]
"""GPU instance (`WHOLE_GPU` without MIG), compute instance, times, and pids. For a process that was
saved, `~pid`.
"""


class RecordDecoder:
    """Decodes the log of one GPU in chunks. Checks that no record is missing between chunks."""

    def __init__(self) -> None:
        self._next: int | None = None

    def decode(self, chunk: bytes) -> Iterator[Switches]:
        """Yields the switches of each engine. Raises SwitchLogError if a record is missing or
        unknown.
        """
        if len(chunk) % RECORD.size:
            raise SwitchLogError(
                "bad_record", f"the context-switch log ends within a record ({len(chunk)} bytes)"
            )
        # Slices of the chunk contain one field of all records. Unpacking each record would take
        # twice as long.
        kinds, numbers, engines = (
            memoryview(chunk).cast("H")[place::16].tolist() for place in (0, 5, 11)
        )
        tags, times = chunk[8::32], memoryview(chunk).cast("Q")[3::4].tolist()
        if not ({*kinds} <= {FECS_RECORD} and {*tags} <= {SWITCHED_IN, SAVED}):
            raise SwitchLogError(
                "bad_record", f"the context-switch log has types {set(kinds)} with tags {set(tags)}"
            )
        first = self._next if self._next is not None else numbers[0] if numbers else 0
        expected = [number % _NUMBERS for number in range(first, first + len(numbers))]
        if numbers != expected:
            lost = next(
                (n - wanted) % _NUMBERS
                for n, wanted in zip(numbers, expected, strict=True)
                if n != wanted
            )
            raise SwitchLogError(
                "sequence_gap", f"{lost} records are missing in the context-switch log"
            )
        self._next = (first + len(numbers)) % _NUMBERS if numbers else self._next
        recorded = memoryview(chunk).cast("I")[4::8].tolist()
        pids = [
            pid if tag == SWITCHED_IN else ~pid for pid, tag in zip(recorded, tags, strict=True)
        ]
        for engine in {*engines}:
            own = [engine == each for each in engines]
            yield engine & 255, engine >> 8, [*compress(times, own)], [*compress(pids, own)]


class Period(NamedTuple):
    """A period in which a process was resident, clipped to one window (`since` to `until`). It can
    begin earlier.
    """

    pid: int
    began: int
    since: int
    until: int


_make_period: Callable[[tuple[int, int, int, int]], Period] = partial(tuple.__new__, Period)
"""Makes a `Period` of its fields. Faster than `Period(...)`, and there may be 10,000 per second."""


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Durations in nanoseconds, measured for one GPU architecture. 0 if not measured."""

    lead: int = 0  # time without work in each period, because the context is restored or saved
    slice_work: int = 0  # time of work in a period that lasted a whole time slice


@dataclass(frozen=True)
class Residency:
    """The periods in one time window. Their lengths plus `switching` and `unknown` add up to the
    window's length.
    """

    since: int
    until: int
    periods: Sequence[Period] = ()
    switching: int = 0
    # time in which it is unknown which process was resident, for example before the first switch
    unknown: int = 0
    costs: SwitchCosts = SwitchCosts()

    @property
    def window(self) -> int:
        return self.until - self.since

    @cached_property
    def resident(self) -> dict[int, int]:
        """Nanoseconds in which each process was resident, by pid."""
        resident: dict[int, int] = {}
        for pid, _, since, until in self.periods:
            resident[pid] = resident.get(pid, 0) + until - since
        return resident

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of all periods within the window, sorted."""
        return sorted(until - since for _, _, since, until in self.periods)

    def measure_up_to(self, duration: float) -> float:
        """Returns the total length of the periods. Counts at most `duration` of each period."""
        place = bisect_right(self.lengths, duration)
        return sum(self.lengths[:place]) + duration * (len(self.lengths) - place)


@dataclass(slots=True)
class Timeline:
    """Collects the switches on one engine, and returns the residency of each time window."""

    now: int
    costs: SwitchCosts = SwitchCosts()
    _times: array[int] = field(default_factory=partial(array, "Q"))
    """Times of the switches since the last window. Arrays save memory, as there may be 10,000
    switches per second.
    """
    _pids: array[int] = field(default_factory=partial(array, "q"))
    """For each switch, the pid of the process that was switched in, or `~pid` if the process was
    saved.
    """
    _last: tuple[list[int], list[int]] = (
        [],
        [],
    )  # time and pid of the last switch; empty before the first switch
    _resident: tuple[int, int] | None = None  # pid and switch-in time of the resident process
    _saved_at: int = -MAX_SWITCH_NS

    def add(self, times: list[int], pids: list[int]) -> None:
        """Adds switches, see `Switches`. Raises SwitchLogError if they contradict each other or the
        last switch.
        """
        all_times, all_pids = self._last[0] + times, self._last[1] + pids
        start = 1 if all_pids and all_pids[0] < 0 else 0  # the log may begin with a save
        switched_in, saved = all_pids[start::2], all_pids[start + 1 :: 2]
        is_alternating = min(switched_in, default=0) >= 0 and saved == [
            ~pid for pid in switched_in[: len(saved)]
        ]
        if not is_alternating or all_times != sorted(all_times):
            raise SwitchLogError(
                "disorder", "the records of the context-switch log contradict each other"
            )
        self._last = all_times[-1:], all_pids[-1:]
        self._times.extend(times)
        self._pids.extend(pids)

    def take_window(self, until: int) -> Residency:
        """Returns the residency from the end of the last window to `until`."""
        since = self.now
        self.now = until
        pids, times = self._take_switches(since, until)
        begins = times[::2]
        ends = times[1::2]
        self._resident = None
        if len(begins) > len(ends):
            self._resident = pids[-1], begins[-1]
            ends.append(until)

        lead = self.costs.lead
        saved_at = self._saved_at
        periods: list[Period] = []
        resident = 0
        unknown = 0
        for pid, began, ended in zip(pids[::2], begins, ends, strict=True):
            if began - saved_at >= MAX_SWITCH_NS:
                unknown += max(began, since) - max(saved_at, since)
            saved_at = ended
            worked_from = began + lead
            start = worked_from if worked_from > since else since
            if start < ended:
                periods.append(_make_period((pid, worked_from, start, ended)))
                resident += ended - start

        if until - saved_at >= MAX_SWITCH_NS:
            unknown += until - max(saved_at, since)
        self._saved_at = saved_at
        switching = until - since - resident - unknown
        return Residency(since, until, periods, switching, unknown, self.costs)

    def _take_switches(self, since: int, until: int) -> tuple[list[int], list[int]]:
        """Removes the switches before `until`. Returns pids and times, from a switch-in on."""
        count = bisect_left(self._times, until)
        times = self._times[:count].tolist()
        pids = self._pids[:count].tolist()
        del self._times[:count], self._pids[:count]
        if self._resident is not None:
            pid, began = self._resident
            return [pid, *pids], [began, *times]
        if pids and pids[0] < 0:  # the log was opened while the process was resident
            return [~pids[0], *pids], [since, *times]
        return pids, times


# Attribution

AGE_EDGES = (0, *(round(250_000 * 2 ** (step / 4)) for step in range(41)))
"""Lower bounds of the age classes, from 0.25 ms to 256 ms with four classes per doubling. Age is
the time since the switch-in.
"""
_WIDTHS = tuple(following - edge for edge, following in pairwise(AGE_EDGES))
_CLASSES = len(AGE_EDGES)
_LONG_NS = 2_400_000
"""A time slice (2.1 ms on an H200) plus the time for saving. Periods are longer only if no other
context had work.
"""
MAX_SAVE_NS = 110_000
"""Maximum extra time for saving a preempted context instead of an idle one. 49 to 102 µs were
measured on an H200.
"""
_MEAN_SAVE_NS = 37_000
"""Half of the mean extra time. Used for periods longer than a slice, because it is unknown whether
the context was preempted.
"""
_YOUNG_SHARE = 0.95
"""Busy share that is assumed for the youngest age class without samples. It is high, because a
context is switched in when it has work.
"""
_PRIOR_WEIGHT = 0.125  # weight of the assumed busy share; a sample has the weight 1
_SAMPLED_PERIOD_NS = 250_000_000
"""In longer periods, samples are used instead of learnt shares, because such a period has at least
four samples.
"""
_SAMPLE_REACH_NS = 60_000_000
"""A sample is valid for at most this long before and after it, and only where no other sample is
nearer.
"""
_SAMPLE_UNCERTAINTY = 0.1
"""Uncertainty of a busy time that comes from a sample. The uncertainty of a learnt share is `share
* (1 - share)`.
"""
_HALF_LIFE_NS = 60 * 10**9  # the weight of a sample halves in this time

BusySample = tuple[int, bool]  # time, and True if the engine was busy
_Kind = tuple[int, bool]
"""Pid, and True for a period longer than a time slice. Most of these long periods end with idle
time.
"""


def _age_class(age: int) -> int:
    return bisect_right(AGE_EDGES, age) - 1


@dataclass(slots=True)
class _AgeSamples:
    """Weighted numbers of all samples (`seen`) and of `busy` samples, for one `_Kind`, by age
    class.
    """

    seen: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    busy: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)

    def fade(self, keep: float) -> None:
        self.seen = [count * keep for count in self.seen]
        self.busy = [count * keep for count in self.busy]

    def compute_shares(self, overall: float) -> list[float]:
        """Returns the estimated fraction of busy time in each age class."""
        own = (sum(self.busy) + overall) / (sum(self.seen) + 1.0)
        priors = [max(own, _YOUNG_SHARE)] + [own] * (_CLASSES - 1)
        weights = [count + _PRIOR_WEIGHT for count in self.seen]
        classes = zip(self.busy, priors, weights, strict=True)
        return _make_non_increasing(
            [(busy + _PRIOR_WEIGHT * prior) / weight for busy, prior, weight in classes], weights
        )


@dataclass(slots=True)
class _Ages:
    """Computes the resident time per age class, for one `_Kind` in one window."""

    ended: list[int] = field(default_factory=lambda: [0] * _CLASSES)
    """By age class: number of periods that ended in the class, minus those that were in it when the
    window began.
    """
    past_edge: list[int] = field(default_factory=lambda: [0] * _CLASSES)
    """By age class: total time that the periods in `ended` spent in the class. Negative for
    subtracted periods.
    """

    def add(self, age: int, periods: int = 1) -> None:
        age_class = _age_class(age)
        self.ended[age_class] += periods
        self.past_edge[age_class] += periods * (age - AGE_EDGES[age_class])

    def compute_resident(self) -> list[int]:
        """Returns the total time in nanoseconds that the periods spent in each age class."""
        older = sum(self.ended)
        figures = []
        for width, ended, past_edge in zip((*_WIDTHS, 0), self.ended, self.past_edge, strict=True):
            older -= ended
            figures.append(older * width + past_edge)
        return figures


class BusyShareModel:
    """Estimates the busy time of each process from samples that show whether the engine is busy.

    A process is usually busy just after its context is switched in, and often idle later. So the
    model learns how the busy share of each process depends on the time since the switch-in (the
    age), separately for periods longer than a time slice. In long periods, samples replace the
    learnt shares. Finally, the estimates are fitted to the device's busy time.
    """

    def __init__(self) -> None:
        self._samples: dict[_Kind, _AgeSamples] = {}

    def learn(self, residency: Residency, samples: Sequence[BusySample]) -> None:
        keep = 0.5 ** (residency.window / _HALF_LIFE_NS)
        present = {period.pid for period in residency.periods}
        self._samples = {
            kind: history
            for kind, history in self._samples.items()
            if kind[0] in present or sum(history.seen) > 0.5
        }
        for history in self._samples.values():
            history.fade(keep)
        for (moment, busy), period in zip(samples, _find_periods(residency, samples), strict=True):
            if period is not None:
                history = self._samples.setdefault(
                    (period.pid, period.until - period.began > _LONG_NS), _AgeSamples()
                )
                age_class = _age_class(moment - period.began)
                history.seen[age_class] += 1
                history.busy[age_class] += busy

    def estimate(
        self, residency: Residency, busy: int, samples: Sequence[BusySample] = ()
    ) -> dict[int, int]:
        """Divides the device's `busy` time among the processes. `samples`: samples in this window.

        No process gets more than its resident time. The rest of `busy` is not attributed.
        """
        seen = sum(sum(history.seen) for history in self._samples.values())
        overall = (sum(sum(history.busy) for history in self._samples.values()) + 1.0) / (
            seen + 1.0
        )
        kinds: defaultdict[_Kind, _Ages] = defaultdict(_Ages)
        for pid, began, since, until in residency.periods:
            age = until - began
            ages = kinds[pid, age > _LONG_NS]
            age_class = (
                bisect_right(AGE_EDGES, age) - 1
            )  # as in `_Ages.add`, but without a call for each period
            ages.ended[age_class] += 1
            ages.past_edge[age_class] += age - AGE_EDGES[age_class]
            if since > began:
                ages.add(since - began, -1)
        shares = {
            kind: self._samples.get(kind, _AgeSamples()).compute_shares(overall) for kind in kinds
        }
        saving = _compute_saving(
            residency, lambda pid, age: shares[pid, age > _LONG_NS][_age_class(age)]
        )
        estimates = {pid: -float(ns) for pid, ns in saving.items()}
        uncertainty: dict[int, float] = {}
        for period, since, until, was_busy in _sampled_parts(residency, samples):
            ages = kinds[period.pid, period.until - period.began > _LONG_NS]
            ages.add(since - period.began)
            ages.add(until - period.began, -1)
            estimates[period.pid] = estimates.get(period.pid, 0.0) + (until - since) * was_busy
            uncertainty[period.pid] = (
                uncertainty.get(period.pid, 0.0) + (until - since) * _SAMPLE_UNCERTAINTY
            )
        for kind, ages in kinds.items():
            by_age = list(zip(ages.compute_resident(), shares[kind], strict=True))
            pid, _ = kind
            estimates[pid] = estimates.get(pid, 0.0) + sum(ns * share for ns, share in by_age)
            uncertainty[pid] = uncertainty.get(pid, 0.0) + sum(
                ns * share * (1 - share) for ns, share in by_age
            )
        at_most = {pid: ns - saving.get(pid, 0) for pid, ns in residency.resident.items()}
        return _fit(max(0, busy - sum(saving.values())), estimates, uncertainty, at_most)


def _find_periods(residency: Residency, samples: Iterable[BusySample]) -> Iterator[Period | None]:
    """Yields the period that contains each sample, or None if the sample was taken during a
    switch.
    """
    begins = [period.since for period in residency.periods]
    for moment, _ in samples:
        place = bisect_right(begins, moment) - 1
        yield (
            residency.periods[place]
            if place >= 0 and moment < residency.periods[place].until
            else None
        )


def _sampled_parts(
    residency: Residency, samples: Iterable[BusySample]
) -> Iterator[tuple[Period, int, int, bool]]:
    """Splits long periods into intervals around their samples. Yields period, begin, end and the
    sample's value.

    An interval extends equally far before and after its sample, so that the mean is unbiased.
    """
    ordered = sorted(samples)
    middles = [(before + after) // 2 for (before, _), (after, _) in pairwise(ordered)]
    nearest = zip(
        ordered,
        _find_periods(residency, ordered),
        [0, *middles],
        [*middles, residency.until],
        strict=False,
    )
    for (moment, busy), period, since, until in nearest:
        if period is not None and period.until - period.began > _SAMPLED_PERIOD_NS:
            begin = max(period.since, since, moment - _SAMPLE_REACH_NS)
            yield period, begin, min(period.until, until, moment + _SAMPLE_REACH_NS), busy


def estimate_without_samples(residency: Residency, busy: int) -> dict[int, int]:
    """Divides the device's `busy` time among the processes if there are no samples.

    Assumes that each period begins with the same time of work. Shorter periods are completely busy.
    This is more accurate than a division in proportion to resident time (H200 traces: error of 2.7
    instead of 3.7 points).
    """
    lengths = residency.lengths
    share = min(1.0, max(0, busy) / max(1, sum(lengths)))
    left, level = (
        max(0, busy - sum(_compute_saving(residency, lambda _pid, _age: share).values())),
        0,
    )
    for place, length in enumerate(lengths):
        step = min(length - level, left // (len(lengths) - place))
        level, left = level + step, left - step * (len(lengths) - place)
        if level < length:
            break
    figures: dict[int, int] = {}
    for pid, _, since, until in residency.periods:
        length = until - since
        figures[pid] = figures.get(pid, 0) + (length if length < level else level)
    return figures


def compute_max_saving(residency: Residency) -> dict[int, int]:
    """Returns the maximum extra time for saving contexts, by pid. Assumes that every process was
    preempted.
    """
    return _compute_saving(residency, lambda _pid, _age: 1.0, MAX_SAVE_NS)


def _compute_saving(
    residency: Residency, share_at: Callable[[int, int], float], past_slice: int = _MEAN_SAVE_NS
) -> dict[int, int]:
    """Returns the extra time for saving preempted contexts, by pid.

    A context is preempted at the end of its time slice if it still has work. The time beyond the
    slice is then saving time. `share_at(pid, age)`: probability that the process is busy at that
    age. `past_slice`: assumed saving time for periods longer than a slice.
    """
    result: dict[int, int] = {}
    if slice_work := residency.costs.slice_work:
        for pid, began, since, until in residency.periods:
            past = until - began - slice_work
            if past > 0:
                saving = min(past if past <= MAX_SAVE_NS else past_slice, until - since)
                result[pid] = result.get(pid, 0) + int(saving * share_at(pid, until - began))
    return result


def _make_non_increasing(figures: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Returns the nearest non-increasing sequence. Contexts work first and are idle later, so an
    increase is noise.
    """
    levels: list[tuple[float, float, int]] = []  # mean, weight and number of figures
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
    busy: int,
    estimates: Mapping[int, float],
    uncertainty: Mapping[int, float],
    resident: Mapping[int, int],
) -> dict[int, int]:
    """Adjusts the estimates so that their sum is `busy`. Uncertain estimates change more than
    certain ones.

    No process gets more than its resident time.
    """
    figures = dict(estimates)
    free = {pid for pid in figures if uncertainty[pid] > 0}
    while free:
        gap = busy - sum(figures.values())
        weight = sum(uncertainty[pid] for pid in free)
        moved = {pid: figures[pid] + gap * uncertainty[pid] / weight for pid in free}
        stopped = {pid for pid in free if not 0 <= moved[pid] <= resident[pid]}
        for pid in stopped or free:
            figures[pid] = min(max(moved[pid], 0.0), float(resident[pid]))
        if not stopped:
            break
        free -= stopped
    total = sum(figures.values())
    scale = min(1.0, busy / total) if total else 0.0
    return {pid: int(figure * scale) for pid, figure in figures.items()}
