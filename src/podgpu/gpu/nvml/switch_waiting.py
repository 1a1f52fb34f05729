"""Estimates from the context-switch log how long each process waited for the GPU, and for which process.

The scheduler is round-robin. A process that loses the GPU at the end of its time slice still has work, so it waits
until its next stay begins. A process that leaves earlier has no work at that moment, but new work may arrive
microseconds later. When it returns, it has waited for at most one stay of each other process. A stay that is longer
than a slice shows that no other process waited before its last slice.

On an H200 the estimate was 0.8 points off on average, in nine loads that recorded how long they waited. All times are
nanoseconds of the GPU's clock. This module does no input or output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import log2
from statistics import median

from podgpu.gpu.nvml.switch_attribution import HIDDEN_PID, KERNEL_PID, MAX_SAVE_NS, Residency
from podgpu.model import ProcessWaits

DEFAULT_SLICE_NS = 2_140_000
"""Length of a stay that ends with its slice (H200, default slice), used unless the log shows another length."""
_CUT_TOLERANCE = 0.04
_LONG = 1.1
"""A stay is longer than a slice if it exceeds the slice by this factor."""
_BINS_PER_DOUBLING = 24
_MIN_SLICE_NS = 500_000
_MIN_CUT_STAYS = 20
_MIN_CUT_PART = 4
"""The mode contains at least 1/4 of the time of consecutive stays of equal length."""
_A_LITTLE_LONGER = 1.6
_MAX_LONGER_PART = 10
"""At most 1/10 as many stays as in the mode are a little longer."""
_RECENT_STAYS = 64


def detect_slice(residency: Residency, worked: int) -> int | None:
    """Returns the length of a time slice, or None if the window does not show it.

    Contexts with more work than fits into a slice are preempted at its end, so consecutive stays of different processes
    have the same length. The longest mode of these lengths is the slice, with two exceptions. If many stays are a
    little longer, the processes only finish their work after the same time. If the mode takes longer than the work of
    the whole device (`worked`), the stays have idle ends and are equal because the loads are periodic.
    """
    lengths = [stay.until - stay.began for stay in residency.stays[1:-1]]
    equal: dict[int, list[int]] = {}
    for before, length in pairwise(lengths):
        if length >= _MIN_SLICE_NS and abs(length - before) < length * _CUT_TOLERANCE:
            equal.setdefault(round(log2(length) * _BINS_PER_DOUBLING), []).append(length)
    total = sum(map(sum, equal.values()))
    for place in sorted(equal, reverse=True):
        mode = [length for near in (place, place - 1, place - 2) for length in equal.get(near, ())]
        if len(mode) >= _MIN_CUT_STAYS and total <= sum(mode) * _MIN_CUT_PART and sum(mode) <= worked:
            slice_ns = round(median(mode))
            longer = sum(_LONG * slice_ns < length < _A_LITTLE_LONGER * slice_ns for length in lengths)
            return slice_ns if longer * _MAX_LONGER_PART < len(mode) else None
    return None


class WaitEstimator:
    """Estimates waiting times on one engine, window by window."""

    def __init__(self) -> None:
        self.slice = DEFAULT_SLICE_NS
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT_STAYS)
        """Pid, begin and end of the last stays."""
        self._last: dict[int, tuple[int, int]] = {}
        """Begin and end of the last stay of each process."""
        self._until = -1
        self.intervals: list[tuple[int, int, int]] = []
        """Estimated waits of the last window: begin, end and pid. A wait may begin before the window."""

    def is_cut(self, duration: int) -> bool:
        """Returns True if a stay of this length ended with its time slice, so that the process still had work."""
        return abs(duration - self.slice) < self.slice * _CUT_TOLERANCE

    def add(self, residency: Residency, busy: Mapping[int, int]) -> ProcessWaits:
        """Returns the waiting times in the next window. `busy`: busy time of each process in it."""
        if residency.since != self._until:  # a window is missing
            self._recent.clear()
            self._last.clear()
        self._until = residency.until
        self.slice = detect_slice(residency, sum(busy.values())) or self.slice
        resident = residency.sum_by_process()
        shares = {pid: busy.get(pid, 0) / ns for pid, ns in resident.items()}
        totals: dict[int, tuple[int, int, int]] = {}
        pairs: dict[tuple[int, int], int] = {}
        self.intervals = []
        for pid, began, _, until in residency.stays:
            begin = began - residency.lead
            if self._recent and self._recent[-1][:2] == (pid, began):  # continues from the last window
                self._recent.pop()
            elif pid in self._last and pid not in (HIDDEN_PID, KERNEL_PID):
                (estimate, least, most), runners = self._find_wait(pid, begin, shares)
                old = totals.get(pid, (0, 0, 0))
                totals[pid] = old[0] + estimate, old[1] + least, old[2] + most + residency.lead
                self.intervals.append((begin - estimate, begin, pid))
                for runner, part in _divide_wait(begin, estimate, runners):
                    pairs[pid, runner] = pairs.get((pid, runner), 0) + part
            self._recent.append((pid, began, until))
            self._last[pid] = began, until
        self._last = {pid: last for pid, last in self._last.items() if pid in resident}
        for pid, (estimate, least, most) in totals.items():
            limit = residency.window - resident[pid]  # waiting may have begun before the window
            totals[pid] = min(estimate, limit), min(least, limit), min(most, limit)
        return ProcessWaits(totals, pairs, _measure_union(self.intervals, residency.since))

    def _find_wait(
        self, pid: int, begin: int, shares: Mapping[int, float]
    ) -> tuple[tuple[int, int, int], dict[int, tuple[int, int]]]:
        """Returns the waiting time before a stay (estimate, minimum, maximum), and the stays for which the process may
        have waited, last one first."""
        previous_begin, previous_end = self._last[pid]
        runners: dict[int, tuple[int, int]] = {}
        within_one_round, is_long = True, False
        for runner, runner_begin, runner_end in reversed(self._recent):
            if runner_begin < previous_end:
                break
            if runner in runners:
                within_one_round = False
                break
            runners[runner] = runner_begin, runner_end
            if runner_end - runner_begin > self.slice * _LONG:
                within_one_round, is_long = False, True
                break
        if not runners:
            return (0, 0, 0), runners
        duration, gap = previous_end - previous_begin, begin - previous_end
        if within_one_round:
            return (gap, gap, gap + MAX_SAVE_NS) if self.is_cut(duration) else (gap, 0, gap), runners
        # The work arrived at some moment of the first of these stays. If its process was idle, it yielded immediately.
        first, (first_begin, first_end) = next(reversed(runners.items()))
        after = min(gap, begin - first_end)
        most = min(gap, after + min(first_end - first_begin, self.slice))
        busy_share = shares.get(first, 1.0) if is_long else 1.0
        return (after + int((most - after) * busy_share / 2), 0, most), runners


def _divide_wait(begin: int, estimate: int, runners: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields each process that had the GPU before `begin`, and its part of the waiting time."""
    for place, (runner, (runner_begin, _)) in enumerate(runners.items(), 1):
        part = estimate if place == len(runners) else min(estimate, begin - runner_begin)
        yield runner, part
        begin, estimate = runner_begin, estimate - part


def _measure_union(intervals: list[tuple[int, int, int]], since: int) -> int:
    """Returns the time after `since` that is covered by intervals, which are sorted by their ends."""
    covered, position = 0, intervals[-1][1] if intervals else since
    for begin, end, _ in reversed(intervals):
        covered += max(0, min(end, position) - max(begin, since))
        position = min(position, begin)
    return covered
