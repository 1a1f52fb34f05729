"""Estimates from the context-switch log how long each process waited for the GPU.

Also estimates for which other process it waited. In a test with 25 loads on an H200, the mean error
was 1.4 percentage points. All times are in nanoseconds of the GPU's clock. This module does no I/O.

The driver runs processes in turn (round-robin). How long did A wait before its second period?
A time slice has six characters here. `=`: works, `.`: resident, but idle, `~`: the estimate.

    A=====B==C=====A==     A was preempted at the end of its slice, so it had more work.
          ~~~~~~~~~        It waited from then on.

    A==B===C===B===A==     A yielded early, so it had no work. It did not run before the second
             ~~~~~~        period of B, so its work arrived after the first one: during that of C.

    A==B=========C==A==    B kept the GPU for longer than a slice, so no other process waited
              ~~~~~~       then. The work of A arrived during the last slice of that period.

    A==B==...C===A==       A process without work yields at once if another one waits. B did not
               ~~          yield while it was idle, so the work of A arrived later.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import log2
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from podgpu.model import ProcessWaits, select_keys
from podgpu.node.gpu.nvml.switch_attribution import (
    KERNEL_PID,
    MAX_SAVE_NS,
    Period,
    Residency,
)

# Length of a time slice on an H200. Used until `detect_slice` finds another length.
DEFAULT_SLICE_NS = 2_140_000
_CUT_TOLERANCE = 0.04  # lengths count as equal if they differ by less than this fraction
# Processes that were busy for at least this fraction of their residency are assumed to be always
# busy.
_SATURATED_SHARE = 0.95
_SHORT_NS = 30_000  # uncertainty of the measured length of a period
_LONG = 1.1  # a period counts as longer than a time slice if it exceeds the slice by this factor
_BINS_PER_DOUBLING = 24  # bins of the histogram of lengths; each is 3 % wide
# Shorter periods are ignored when the slice is detected. Their length is often the duration of a
# kernel.
_MIN_SLICE_NS = 500_000
_MIN_CUT_PERIODS = 20  # in the mode
# The mode (most frequent length) must account for 1/4 of the total length of consecutive periods of
# equal length.
_MIN_CUT_PART = 4
_A_LITTLE_LONGER = 1.6  # a period up to this factor of the slice counts as slightly longer
_MAX_LONGER_PART = 10  # for each ten periods in the mode, at most one period may be slightly longer
_RECENT_PERIODS = 32  # kept from before the examined periods, see `_select_recent`
# The slice is detected once in this many windows, because its length rarely changes.
_DETECTION_WINDOWS = 16
# If a window has more periods, a random part of the window with about this many is examined.
# Examining 600 periods per second would take 0.2 % of a CPU core.
_EXAMINED_PERIODS = 128


def detect_slice(residency: Residency, worked: int) -> int | None:
    """Returns the length of a time slice, or None if the window does not show it.

    A context with more work than fits into a slice is preempted at the end of the slice.
    Consecutive periods then have the same length, and the longest frequent length is the slice.
    Equal lengths can have two other causes. If many periods are slightly longer, processes finish
    their work after similar times. If the total length of the periods exceeds `worked` (busy time
    of the device), the load is periodic.
    """
    # The window may cut off the first and the last period.
    complete = residency.periods[1:-1]
    lengths = [period.until - period.began for period in complete]
    mode = _find_longest_mode(lengths, worked)
    if not mode:
        return None

    slice_ns = round(median(mode))
    longer = sum(_LONG * slice_ns < length < _A_LITTLE_LONGER * slice_ns for length in lengths)
    is_busy = residency.measure_up_to(slice_ns / _LONG) <= worked
    if is_busy and longer * _MAX_LONGER_PART < len(mode):
        return slice_ns
    return None


def _find_longest_mode(lengths: Sequence[int], worked: int) -> list[int]:
    """Returns the periods of the longest frequent length, or an empty list.

    Skips a length if its periods contain idle time, because together they exceed `worked`.
    """
    bins: defaultdict[int, list[int]] = defaultdict(list)
    for before, length in pairwise(lengths):
        if length >= _MIN_SLICE_NS and abs(length - before) < length * _CUT_TOLERANCE:
            place = round(log2(length) * _BINS_PER_DOUBLING)
            bins[place].append(length)

    total = sum(map(sum, bins.values()))
    for place in sorted(bins, reverse=True):
        # Three bins, because equal lengths may be on both sides of a bin's edge.
        mode = bins[place] + bins[place - 1] + bins[place - 2]
        mode_ns = sum(mode)
        is_frequent = len(mode) >= _MIN_CUT_PERIODS and total <= mode_ns * _MIN_CUT_PART
        if is_frequent and mode_ns <= worked:
            return mode
    return []


class _Wait(NamedTuple):
    """How long a process waited before one of its periods, in nanoseconds."""

    first: int  # position of the period in which the wait began
    estimate: int
    least: int
    most: int


@dataclass(slots=True)
class _Waits:
    """Waits of one process before the examined periods. Times are sums in nanoseconds."""

    periods: int = 0
    estimate: int = 0
    least: int = 0
    most: int = 0
    # How much of `estimate` other processes ran, by pid.
    runners: dict[int, int] = field(default_factory=partial(defaultdict, int))

    def add(self, wait: _Wait, end: int, ran: Sequence[Period]) -> None:
        """Adds a wait, and attributes it to the periods that ran until its `end`."""
        self.estimate += wait.estimate
        self.least += wait.least
        self.most += wait.most

        # Each period counts until the next one began, so that switches count, too.
        remaining = wait.estimate
        for runner, began, _, _ in reversed(ran[1:]):
            self.runners[runner] += end - began
            remaining -= end - began
            end = began

        # The wait began within the first period.
        self.runners[ran[0].pid] += remaining

    def extrapolate(self, periods: int, limit: int) -> tuple[int, int, int]:
        """Returns estimate, minimum and maximum for this number of periods."""
        estimate = self.estimate * periods // self.periods
        least = self.least * periods // self.periods
        most = self.most * periods // self.periods
        return min(estimate, limit), min(least, limit), min(most, limit)


class _Part(NamedTuple):
    """The part of a window that is examined."""

    since: int
    until: int
    recent: list[Period]  # periods before the part, see `_select_recent`
    new: Sequence[Period]  # periods in the part


@dataclass(slots=True)
class _Queue:
    """What the periods up to now show about the processes that may wait. No position is -1."""

    longest: float  # a period that is longer was extended beyond a slice
    # Minimum length, by pid, of periods that end with idle time. Empty if no period does.
    idle_from: Mapping[int, float]
    # Position of each process's last period.
    last: dict[int, int] = field(default_factory=dict)
    # Position of the earliest period in which a process that has not run since can have begun to
    # wait.
    earliest: int = -1
    # Position of the last period that ended with idle time.
    last_idle: int = -1

    def add(self, position: int, period: Period) -> None:
        pid, began, _, until = period
        length = until - began

        # By round-robin, every process that waited at the previous period has run since.
        previous = self.last.get(pid, -1)
        if self.earliest <= previous:
            self.earliest = previous + 1
        self.last[pid] = position

        # Others can have begun to wait only during the last slice of this period.
        if length > self.longest:
            self.earliest = position
        if self.idle_from and length > self.idle_from.get(pid, self.longest):
            self.last_idle = position


class WaitEstimator:
    """Estimates waiting times on one engine, by the rules that are drawn above."""

    def __init__(self, *, is_complete: bool = False) -> None:
        """`is_complete`: examine all periods, and detect the slice in each window."""
        self.slice = DEFAULT_SLICE_NS
        self.is_slice_detected = False
        self.intervals: list[tuple[int, int, int]] = []
        """Begin, end and pid of the examined waits in the last window.

        A wait may begin before the window.
        """

        self._windows = 0
        self._is_complete = is_complete
        self._until = -1
        self._recent: list[Period] = []  # see `_select_recent`
        self._examined: dict[int, _Waits] = {}  # by pid

    def is_cut(self, duration: int) -> bool:
        """Returns True if a period of this length lasted a whole time slice.

        The process then still had work.
        """
        return abs(duration - self.slice) < self.slice * _CUT_TOLERANCE

    def add(self, residency: Residency, busy: Mapping[int, int]) -> ProcessWaits:
        """Returns the waiting times in the next window.

        `busy`: busy time of each process in this window, by pid.
        """
        self._update_slice(residency, busy)
        part = self._take_window(residency)
        counts = _count_periods(part.new)
        if len(part.new) > _EXAMINED_PERIODS and not self._is_complete:
            part = _choose_part(part, residency)

        # A process without a period in the examined part is assumed to wait as long per period as
        # before.
        examined = self._examined | self._find_waits(part, residency, busy)
        self._examined = select_keys(examined, counts)

        processes: dict[int, tuple[int, int, int]] = {}
        pairs: dict[tuple[int, int], int] = {}
        for pid, waits in self._examined.items():
            # It never waited.
            if not waits.runners:
                continue

            # A wait may have begun before the window.
            limit = residency.window - residency.resident[pid]
            processes[pid] = waits.extrapolate(counts[pid], limit)
            estimate, _, _ = processes[pid]
            for runner, ns in waits.runners.items():
                pairs[pid, runner] = ns * estimate // max(1, waits.estimate)

        # The rest of the window is assumed to be like the examined part.
        pressure = _measure_union(self.intervals, part.since, part.until)
        pressure_ns = pressure * residency.window // max(1, part.until - part.since)
        return ProcessWaits(processes, pairs, pressure_ns)

    def _update_slice(self, residency: Residency, busy: Mapping[int, int]) -> None:
        if self._is_complete or self._windows % _DETECTION_WINDOWS == 0:
            slice_ns = detect_slice(residency, sum(busy.values()))
            if slice_ns is not None:
                self.slice = slice_ns
                self.is_slice_detected = True
        self._windows += 1

    def _take_window(self, residency: Residency) -> _Part:
        """Returns the periods of the window, and remembers the last ones for the next window."""
        # After a missing window, it is unknown what ran before.
        recent: list[Period] = []
        if residency.since == self._until:
            recent = self._recent

        new = residency.periods
        if recent and new and _is_same_period(recent[-1], new[0]):
            # The last period continues.
            recent = [*recent[:-1], new[0]]
            new = new[1:]

        self._until = residency.until
        self._recent = _select_recent([*recent, *new], residency.resident)
        return _Part(residency.since, residency.until, recent, new)

    def _find_waits(
        self, part: _Part, residency: Residency, busy: Mapping[int, int]
    ) -> dict[int, _Waits]:
        """Finds how long each process waited before each of its new periods, by pid."""
        lead = residency.costs.lead
        queue = _Queue(self.slice * _LONG, self._find_idle_ends(residency, busy))
        busy_shares = {pid: busy.get(pid, 0) / ns for pid, ns in residency.resident.items()}
        waits_by_pid: defaultdict[int, _Waits] = defaultdict(_Waits)
        periods = [*part.recent, *part.new]
        first_new = len(part.recent)
        self.intervals = []

        for position, period in enumerate(periods):
            pid = period.pid
            if position >= first_new and pid != KERNEL_PID:
                waits = waits_by_pid[pid]
                waits.periods += 1
                # It waits only if others ran since its last period.
                if -1 < queue.last.get(pid, -1) < position - 1:
                    end = period.began - lead
                    wait = self._estimate_wait(periods, position, end, queue, busy_shares)
                    waits.add(wait, end, periods[wait.first : position])
                    # The process may also have waited while its context was restored.
                    waits.most += lead
                    self.intervals.append((end - wait.estimate, end, pid))

            queue.add(position, period)
        return waits_by_pid

    def _estimate_wait(
        self,
        periods: Sequence[Period],
        position: int,
        end: int,
        queue: _Queue,
        busy_shares: Mapping[int, float],
    ) -> _Wait:
        """Estimates how long a process waited before its period at `position`.

        `end`: end of the wait. `queue`: without this period.
        """
        previous = queue.last[periods[position].pid]
        _, began, _, until = periods[previous]
        since_last = end - until

        if queue.earliest > previous:
            first = queue.earliest
            estimate, most = self._estimate_since_arrival(periods[first], end, busy_shares)
        elif self.is_cut(until - began):
            # It may also have waited while its own context was saved.
            return _Wait(previous + 1, since_last, since_last, since_last + MAX_SAVE_NS)
        else:
            first = previous + 1
            estimate = since_last
            most = since_last

        if queue.last_idle >= first:
            # The work arrived in the middle of the period after the idle one. If there is none, it
            # arrived at the end of the idle period.
            first = min(queue.last_idle + 1, position - 1)
            _, began, _, until = periods[first]
            within = 0 if first == queue.last_idle else (until - began) // 2
            estimate = min(estimate, end - until + within)
        return _Wait(first, estimate, 0, most)

    def _estimate_since_arrival(
        self, period: Period, end: int, busy_shares: Mapping[int, float]
    ) -> tuple[int, int]:
        """Returns estimate and maximum of a wait that began during this period."""
        runner, began, _, until = period
        length = until - began
        after = end - until
        within = min(length, self.slice)

        # A short period is assumed to be busy all the time.
        busy_share = 1.0
        if length > self.slice * _LONG:
            busy_share = busy_shares.get(runner, 1.0)
        # On average, the work arrived in the middle of the busy time.
        return after + int(within * busy_share / 2), after + within

    def _find_idle_ends(self, residency: Residency, busy: Mapping[int, int]) -> dict[int, float]:
        """Returns the minimum length, by pid, of periods that are assumed to end with idle time.

        Empty if the busy time shows that periods up to the length of a slice contain no idle time.
        """
        worked = sum(busy.values())
        saturated = sum(residency.resident.values()) * _SATURATED_SHARE
        if worked >= saturated or worked >= residency.measure_up_to(self.slice * _LONG):
            return {}

        idle_from = {}
        for pid, count in _count_periods(residency.periods).items():
            mean = busy.get(pid, 0) / count
            idle_from[pid] = mean * _LONG + _SHORT_NS
        return idle_from


def _is_same_period(one: Period, other: Period) -> bool:
    return one.pid == other.pid and one.began == other.began


def _choose_part(part: _Part, residency: Residency) -> _Part:
    """Returns a random part of the window with about `_EXAMINED_PERIODS` periods."""
    length = residency.window * _EXAMINED_PERIODS // len(part.new)
    since = residency.since + random.randrange(residency.window - length)
    until = since + length

    get_began = itemgetter(1)
    first = bisect_left(part.new, since, key=get_began)
    stop = bisect_left(part.new, until, key=get_began)

    earlier = [*part.recent, *part.new[:first]]
    recent = _select_recent(earlier, residency.resident)
    return _Part(since, until, recent, part.new[first:stop])


def _count_periods(periods: Iterable[Period]) -> Counter[int]:
    """Returns the number of periods by pid."""
    return Counter(map(itemgetter(0), periods))


def _select_recent(periods: list[Period], pids: Collection[int]) -> list[Period]:
    """Returns the most recent periods, preceded by the last period of each other process."""
    recent = periods[-_RECENT_PERIODS:]
    missing = set(pids) - {period.pid for period in recent}

    older = []
    for period in reversed(periods[:-_RECENT_PERIODS]):
        if not missing:
            break
        if period.pid in missing:
            missing.remove(period.pid)
            older.append(period)

    older.reverse()
    return older + recent


def _measure_union(intervals: Sequence[tuple[int, int, int]], since: int, until: int) -> int:
    """Returns the length of the union of the intervals between `since` and `until`.

    `intervals`: sorted by their ends.
    """
    covered = 0
    # From the last one on, so that `until` is the begin of what is already covered.
    for begin, end, _ in reversed(intervals):
        if begin < since:
            begin = since
        if end > until:
            end = until
        if begin < end:
            covered += end - begin
            until = begin
    return covered
