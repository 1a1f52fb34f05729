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
from operator import itemgetter
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.model import HIDDEN_PID

RECORD = struct.Struct("<HHIBBHIIHBBQ")
"""One record of the log.

Type, subtype, vardata, tag, vmid, sequence number, context, pid, reserved, GPU instance, compute
instance, time.
"""
FECS_RECORD = 2
SWITCHED_IN = 6
SAVED = 7
KERNEL_PID = 0xFFFFFFFF
UNKNOWN_PIDS = frozenset({HIDDEN_PID, KERNEL_PID})  # they do not identify a process
WHOLE_GPU = 255
_NUMBERS = 1 << 16  # sequence numbers are counted modulo this
MAX_SWITCH_NS = 1_000_000
"""If the time between two contexts is longer than this, no context was loaded.

A switch takes 80 to 90 µs on an H200. When a process creates or destroys a context, the engine is
empty for 1 to 420 ms. Its busy bit was set in 2 of 63 samples at such times. When a program causes
XID 13 or 31, the driver resets the engine: 217 to 295 ms later another context is switched in, and
the failed one is not saved.
"""


class SwitchLogError(SourceError):
    """The log is missing, broken or inconsistent."""


# Records


class Switches(NamedTuple):
    """Context switches on one engine."""

    instance: int  # GPU instance; `WHOLE_GPU` without MIG
    compute_instance: int
    times: list[int]
    pids: list[int]  # pid of the process that was switched in, or `~pid` if it was saved


class RecordDecoder:
    """Decodes the log of one GPU in chunks. Checks that no record is missing between chunks."""

    def __init__(self) -> None:
        self._next_number: int | None = None

    def decode(self, chunk: bytes) -> Iterator[Switches]:
        """Yields the switches of each engine.

        Raises SwitchLogError if a record is missing or unknown.
        """
        if len(chunk) % RECORD.size:
            raise SwitchLogError(
                "bad_record", f"the context-switch log ends within a record ({len(chunk)} bytes)"
            )

        # A slice of the chunk contains one field of all records. Unpacking each record would take
        # twice as long. A slice begins at the offset of the field, and its step is 32 bytes, both
        # in units of the field's size.
        halfwords = memoryview(chunk).cast("H")
        types = set(halfwords[0::16].tolist())
        numbers = halfwords[5::16].tolist()
        # GPU instance in the low byte, compute instance in the high byte
        engines = halfwords[11::16].tolist()
        tags = chunk[8::32]
        recorded_pids = memoryview(chunk).cast("I")[4::8].tolist()
        times = memoryview(chunk).cast("Q")[3::4].tolist()

        has_unknown = types - {FECS_RECORD} or set(tags) - {SWITCHED_IN, SAVED}
        if has_unknown:
            raise SwitchLogError(
                "bad_record", f"the context-switch log has types {types} with tags {set(tags)}"
            )
        self._check_numbers(numbers)

        switches = zip(recorded_pids, tags, strict=True)
        pids = [pid if tag == SWITCHED_IN else ~pid for pid, tag in switches]

        for engine in set(engines):
            is_own = [engine == each for each in engines]
            own_times = list(compress(times, is_own))
            own_pids = list(compress(pids, is_own))
            instance = engine & 255
            compute_instance = engine >> 8
            yield Switches(instance, compute_instance, own_times, own_pids)

    def _check_numbers(self, numbers: Sequence[int]) -> None:
        """Checks that the sequence numbers continue those of the last chunk."""
        if not numbers:
            return

        first = numbers[0] if self._next_number is None else self._next_number
        end = first + len(numbers)
        expected = [number % _NUMBERS for number in range(first, end)]
        # True for almost all chunks. Faster than the loop below.
        if numbers == expected:
            self._next_number = end % _NUMBERS
            return

        for number, wanted in zip(numbers, expected, strict=True):
            if number != wanted:
                lost = (number - wanted) % _NUMBERS
                raise SwitchLogError(
                    "sequence_gap", f"{lost} records are missing in the context-switch log"
                )


class Period(NamedTuple):
    """A period in which a process was resident, clipped to one window (`since` to `until`).

    It can begin earlier.
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
    """The periods in one time window.

    Their lengths plus `switching`, `unloaded` and `unknown` add up to the window's length.
    """

    since: int
    until: int
    periods: Sequence[Period] = ()
    switching: int = 0
    # Time before the first switch, in which it is unknown which process was resident.
    unknown: int = 0
    # Time in which no context was loaded, because one was created or destroyed.
    unloaded: int = 0
    costs: SwitchCosts = SwitchCosts()
    # Time at which each process was last resident, by pid, also if its context was reset at once.
    last_resident: Mapping[int, int] = field(default_factory=dict)

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

    def find_period(self, moment: int) -> Period | None:
        """Returns the period that contains this moment, or None if it was during a switch."""
        get_since = itemgetter(2)
        place = bisect_right(self.periods, moment, key=get_since) - 1
        if place >= 0 and moment < self.periods[place].until:
            return self.periods[place]
        return None


@dataclass(slots=True)
class Timeline:
    """Collects the switches on one engine, and returns the residency of each time window."""

    now: int
    costs: SwitchCosts = SwitchCosts()
    # Switches since the last window, see `Switches`. Arrays save memory, as there may be 10,000
    # switches per second.
    _times: array[int] = field(default_factory=partial(array, "Q"))
    _pids: array[int] = field(default_factory=partial(array, "q"))
    # Time and pid of the last switch. Empty before the first switch.
    _last_time: list[int] = field(default_factory=list)
    _last_pid: list[int] = field(default_factory=list)
    _resident: tuple[int, int] | None = None  # pid and switch-in time of the resident process
    _saved_at: int = -1  # negative before the first switch

    def add(self, times: list[int], pids: list[int]) -> None:
        """Adds switches, see `Switches`.

        Raises SwitchLogError if they contradict each other or the last switch.
        """
        all_times = self._last_time + times
        all_pids = self._last_pid + pids

        if not _is_alternating(all_pids):
            all_times, all_pids = _end_reset_contexts(all_times, all_pids)
        if not _is_alternating(all_pids) or all_times != sorted(all_times):
            raise SwitchLogError(
                "disorder", "the records of the context-switch log contradict each other"
            )

        already_added = len(self._last_time)
        self._times.extend(all_times[already_added:])
        self._pids.extend(all_pids[already_added:])
        self._last_time = all_times[-1:]
        self._last_pid = all_pids[-1:]

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
        periods = []
        resident_ns = 0
        unknown = 0
        unloaded = 0

        for pid, began, ended in zip(pids[::2], begins, ends, strict=True):
            # The time since the last save, which is part of `switching` if it was short.
            if saved_at < 0:
                unknown += max(began, since) - since
            elif began - saved_at >= MAX_SWITCH_NS:
                unloaded += max(began, since) - max(saved_at, since)
            saved_at = ended

            worked_from = began + lead
            # Faster than `max`.
            start = worked_from if worked_from > since else since
            if start < ended:
                periods.append(_make_period((pid, worked_from, start, ended)))
                resident_ns += ended - start

        # The same for the end of the window. It is the last save if a process is resident.
        if saved_at < 0:
            unknown += until - since
        elif until - saved_at >= MAX_SWITCH_NS:
            unloaded += until - max(saved_at, since)

        self._saved_at = saved_at
        switching = until - since - resident_ns - unknown - unloaded
        last_resident = dict(zip(pids[::2], ends, strict=True))
        return Residency(
            since, until, periods, switching, unknown, unloaded, self.costs, last_resident
        )

    def _take_switches(self, since: int, until: int) -> tuple[list[int], list[int]]:
        """Removes the switches before `until`. Returns pids and times, from a switch-in on."""
        count = bisect_left(self._times, until)
        times = self._times[:count].tolist()
        pids = self._pids[:count].tolist()
        del self._times[:count], self._pids[:count]

        if self._resident is not None:
            pid, began = self._resident
            return [pid, *pids], [began, *times]

        # Negative if the log was opened while the process was resident.
        if pids and pids[0] < 0:
            return [~pids[0], *pids], [since, *times]
        return pids, times


def _is_alternating(pids: Sequence[int]) -> bool:
    """Returns True if each process is saved before the next one is switched in."""
    if pids and pids[0] < 0:
        # The log begins with a save.
        pids = pids[1:]

    switched_in = pids[::2]
    saved = pids[1::2]
    if min(switched_in, default=0) < 0:
        return False
    expected = [~pid for pid in switched_in[: len(saved)]]
    return saved == expected


def _end_reset_contexts(times: Sequence[int], pids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Adds a save for each context that failed and was reset by the driver, see `MAX_SWITCH_NS`.

    Such a context is resident for no time: it is unknown when it failed.
    """
    all_times: list[int] = []
    all_pids: list[int] = []
    resident = -1  # pid; negative if none is resident
    since = 0
    for moment, pid in zip(times, pids, strict=True):
        if resident >= 0 and pid >= 0 and moment - since >= MAX_SWITCH_NS:
            all_times.append(since)
            all_pids.append(~resident)
        all_times.append(moment)
        all_pids.append(pid)
        resident = pid
        since = moment
    return all_times, all_pids


# Attribution

AGE_EDGES = [0] + [round(250_000 * 2 ** (step / 4)) for step in range(41)]
"""Lower bounds of the age classes. Age is the time since the switch-in.

The classes extend from 0.25 ms to 256 ms, with four classes per doubling.
"""
_WIDTHS = [following - edge for edge, following in pairwise(AGE_EDGES)] + [0]
"""Widths of the age classes. The last class has no end, and no period is older than this class."""
_LONG_NS = 2_400_000
"""Periods are longer than this only if no other context had work.

It is a time slice (2.1 ms on an H200) plus the time for saving.
"""
MAX_SAVE_NS = 110_000
"""Maximum extra time for saving a preempted context instead of an idle one.

49 to 102 µs were measured on an H200.
"""
_MEAN_SAVE_NS = 37_000
"""Half of the mean extra time.

Used for periods longer than a slice, because it is unknown whether the context was preempted.
"""
_YOUNG_SHARE = 0.95
"""Busy share that is assumed for the youngest age class without samples.

It is high, because a context is switched in when it has work.
"""
_PRIOR_WEIGHT = 0.125  # weight of the assumed busy share; a sample has the weight 1
_SAMPLED_PERIOD_NS = 250_000_000
"""In longer periods, samples are used instead of learnt shares.

Such a period has at least four samples.
"""
_SAMPLE_REACH_NS = 60_000_000
"""A sample is valid for at most this long before and after it.

It is valid only where no other sample is nearer.
"""
_SAMPLE_UNCERTAINTY = 0.1
"""Uncertainty of a busy time that comes from a sample.

The uncertainty of a learnt share is `share * (1 - share)`.
"""
_HALF_LIFE_NS = 60 * 10**9  # the weight of a sample halves in this time

BusySample = tuple[int, bool]  # time, and True if the engine was busy
_Kind = tuple[int, bool]
"""Pid, and True for a period longer than a time slice.

Most of these long periods end with idle time.
"""


def _find_kind(period: Period) -> _Kind:
    return period.pid, period.until - period.began > _LONG_NS


def _find_age_class(age: int) -> int:
    return bisect_right(AGE_EDGES, age) - 1


@dataclass(slots=True)
class _AgeSamples:
    """Weighted numbers of samples for one `_Kind`, by age class."""

    seen: list[float] = field(default_factory=lambda: [0.0] * len(AGE_EDGES))  # all samples
    busy: list[float] = field(default_factory=lambda: [0.0] * len(AGE_EDGES))  # busy samples

    def fade(self, keep: float) -> None:
        self.seen = [count * keep for count in self.seen]
        self.busy = [count * keep for count in self.busy]

    def compute_shares(self, overall: float) -> list[float]:
        """Returns the estimated fraction of busy time in each age class.

        `overall`: busy share of all processes.
        """
        # The share of all processes counts as one sample of this one.
        mean = (sum(self.busy) + overall) / (sum(self.seen) + 1.0)
        # Without samples, each class has the mean, except for the youngest one.
        prior = max(mean, _YOUNG_SHARE)

        shares = []
        weights = [seen + _PRIOR_WEIGHT for seen in self.seen]
        for busy, weight in zip(self.busy, weights, strict=True):
            shares.append((busy + _PRIOR_WEIGHT * prior) / weight)
            prior = mean
        return _make_non_increasing(shares, weights)


@dataclass(slots=True)
class _Ages:
    """Computes the resident time per age class, for one `_Kind` in one window."""

    # By age class: number of periods that ended in the class, minus those that were in it when the
    # window began.
    ended: list[int] = field(default_factory=lambda: [0] * len(AGE_EDGES))
    # By age class: total time that the periods in `ended` spent in the class. Negative for
    # subtracted periods.
    past_edge: list[int] = field(default_factory=lambda: [0] * len(AGE_EDGES))

    def add(self, age: int, periods: int = 1) -> None:
        age_class = _find_age_class(age)
        self.ended[age_class] += periods
        self.past_edge[age_class] += periods * (age - AGE_EDGES[age_class])

    def compute_resident(self) -> list[int]:
        """Returns the total time in nanoseconds that the periods spent in each age class.

        A period that ended in an older class spent the whole width of the class in it.
        """
        older = sum(self.ended)
        resident = []
        for width, ended, past_edge in zip(_WIDTHS, self.ended, self.past_edge, strict=True):
            older -= ended
            resident.append(older * width + past_edge)
        return resident


@dataclass(slots=True)
class _Estimate:
    """Estimated busy time of a process in nanoseconds."""

    busy: float = 0.0
    uncertainty: float = 0.0

    def add_sampled(self, ns: int, was_busy: bool) -> None:
        if was_busy:
            self.busy += ns
        self.uncertainty += ns * _SAMPLE_UNCERTAINTY

    def add_learnt(self, times: Iterable[float], shares: Sequence[float]) -> None:
        """Adds resident times by age class, and the busy share of each."""
        busy = 0.0
        uncertainty = 0.0
        for ns, share in zip(times, shares, strict=True):
            busy += ns * share
            uncertainty += ns * share * (1 - share)
        self.busy += busy
        self.uncertainty += uncertainty


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
        self._fade(residency)
        for moment, busy in samples:
            period = residency.find_period(moment)
            if period is not None:
                history = self._samples.setdefault(_find_kind(period), _AgeSamples())
                age_class = _find_age_class(moment - period.began)
                history.seen[age_class] += 1
                if busy:
                    history.busy[age_class] += 1

    def _fade(self, residency: Residency) -> None:
        """Reduces the weight of old samples. Removes them if the process is gone for long."""
        keep = 0.5 ** (residency.window / _HALF_LIFE_NS)
        for kind, history in list(self._samples.items()):
            pid, _ = kind
            # The samples of a process that has ended fade to less than half a sample.
            if pid in residency.resident or sum(history.seen) > 0.5:
                history.fade(keep)
            else:
                del self._samples[kind]

    def estimate(
        self, residency: Residency, busy: int, samples: Sequence[BusySample] = ()
    ) -> dict[int, int]:
        """Divides the device's `busy` time among the processes. `samples`: samples in this window.

        No process gets more than its resident time. The rest of `busy` is not attributed.
        """
        ages_by_kind = _measure_ages(residency)
        shares = self._compute_shares(ages_by_kind)

        def share_at(pid: int, age: int) -> float:
            of_kind = shares[pid, age > _LONG_NS]
            return of_kind[_find_age_class(age)]

        # Saving contexts is busy time of the device, but of no process.
        saving = _compute_saving(residency, share_at)
        worked = max(0, busy - sum(saving.values()))
        estimates: defaultdict[int, _Estimate] = defaultdict(_Estimate)
        for pid, ns in saving.items():
            estimates[pid].busy -= ns

        for period, since, until, was_busy in _list_sampled_parts(residency, samples):
            # This time is removed from the time for which learnt shares are used, as if the period
            # ended at `since` and continued at `until`.
            ages = ages_by_kind[_find_kind(period)]
            ages.add(since - period.began)
            ages.add(until - period.began, periods=-1)

            estimates[period.pid].add_sampled(until - since, was_busy)

        # The rest of the time is divided by learnt shares.
        for kind, ages in ages_by_kind.items():
            pid, _ = kind
            estimates[pid].add_learnt(ages.compute_resident(), shares[kind])

        limits = {}
        for pid, ns in residency.resident.items():
            limits[pid] = ns - saving.get(pid, 0)

        return _fit(worked, estimates, limits)

    def _compute_shares(self, kinds: Iterable[_Kind]) -> dict[_Kind, list[float]]:
        """Returns the estimated fraction of busy time by age class, for each of these kinds."""
        seen = sum(sum(history.seen) for history in self._samples.values())
        busy = sum(sum(history.busy) for history in self._samples.values())
        # Begins with one busy sample.
        overall = (busy + 1.0) / (seen + 1.0)

        shares = {}
        for kind in kinds:
            history = self._samples.get(kind, _AgeSamples())
            shares[kind] = history.compute_shares(overall)
        return shares


def _measure_ages(residency: Residency) -> dict[_Kind, _Ages]:
    """Returns the ages of all periods. Does not call a function for each period, to be fast."""
    ages_by_kind: defaultdict[_Kind, _Ages] = defaultdict(_Ages)
    for pid, began, since, until in residency.periods:
        age = until - began
        ages = ages_by_kind[pid, age > _LONG_NS]
        # As in `_Ages.add`.
        age_class = bisect_right(AGE_EDGES, age) - 1
        ages.ended[age_class] += 1
        ages.past_edge[age_class] += age - AGE_EDGES[age_class]

        # The time before the window does not count.
        if since > began:
            ages.add(since - began, periods=-1)
    return ages_by_kind


def _list_sampled_parts(
    residency: Residency, samples: Iterable[BusySample]
) -> Iterator[tuple[Period, int, int, bool]]:
    """Splits long periods into intervals around their samples.

    Yields period, begin, end and the sample's value. An interval may extend equally far before and
    after its sample, so that the mean is unbiased.
    """
    ordered = sorted(samples)
    if not ordered:
        return

    # Each sample is the nearest one between the middles to its neighbours.
    times = [moment for moment, _ in ordered]
    middles = [(before + after) // 2 for before, after in pairwise(times)]
    limits = [residency.since, *middles, residency.until]

    for (moment, busy), (first, last) in zip(ordered, pairwise(limits), strict=True):
        period = residency.find_period(moment)
        if period is not None and period.until - period.began > _SAMPLED_PERIOD_NS:
            begin = max(period.since, first, moment - _SAMPLE_REACH_NS)
            end = min(period.until, last, moment + _SAMPLE_REACH_NS)
            yield period, begin, end, busy


def estimate_without_samples(residency: Residency, busy: int) -> dict[int, int]:
    """Divides the device's `busy` time among the processes if there are no samples.

    Assumes that each period begins with the same time of work. Shorter periods are completely busy.
    This is more accurate than a division in proportion to resident time (H200 traces: error of 2.7
    instead of 3.7 points).
    """
    lengths = residency.lengths
    # Without samples, all processes are assumed to be equally busy.
    share = min(1.0, max(0, busy) / max(1, sum(lengths)))
    saving = _compute_saving(residency, lambda _pid, _age: share)
    worked = max(0, busy - sum(saving.values()))
    level = _find_level(lengths, worked)

    estimates: dict[int, int] = {}
    for pid, _, since, until in residency.periods:
        length = until - since
        # Faster than `min`.
        if length > level:
            length = level
        estimates[pid] = estimates.get(pid, 0) + length
    return estimates


def _find_level(lengths: Sequence[int], total: int) -> int:
    """Returns how much of each length to take, at most, so that the sum is `total`.

    `lengths`: sorted, shortest first.
    """
    level = 0
    rest = total
    for place, length in enumerate(lengths):
        # This length and all that follow are at least as long as the level.
        reaching = len(lengths) - place
        step = rest // reaching
        if step < length - level:
            return level + step

        # This length is taken completely.
        rest -= (length - level) * reaching
        level = length
    return level


def compute_max_saving(residency: Residency) -> dict[int, int]:
    """Returns the maximum extra time for saving contexts, by pid.

    Assumes that every process was preempted.
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
    saving: dict[int, int] = {}
    slice_work = residency.costs.slice_work
    if not slice_work:
        return saving
    for pid, began, since, until in residency.periods:
        age = until - began
        saving_ns = age - slice_work
        if saving_ns <= 0:
            continue
        if saving_ns > MAX_SAVE_NS:
            saving_ns = past_slice
        # A part of it may be before the window.
        expected_ns = int(min(saving_ns, until - since) * share_at(pid, age))
        saving[pid] = saving.get(pid, 0) + expected_ns
    return saving


def _make_non_increasing(shares: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Returns the nearest non-increasing sequence.

    Contexts work first and are idle later, so an increase is noise.
    """
    levels: list[tuple[float, float, int]] = []  # mean share, weight, number of shares
    for share, weight in zip(shares, weights, strict=True):
        number = 1
        # Merges a share with the smaller ones before it, into their weighted mean.
        while levels and levels[-1][0] < share:
            share_before, weight_before, number_before = levels.pop()
            total = weight_before + weight
            share = (share_before * weight_before + share * weight) / total
            weight = total
            number += number_before
        levels.append((share, weight, number))

    sequence = []
    for share, _, number in levels:
        sequence += [share] * number
    return sequence


def _fit(
    busy: int, estimates: Mapping[int, _Estimate], limits: Mapping[int, int]
) -> dict[int, int]:
    """Adjusts the estimates so that their sum is `busy`.

    Uncertain estimates change more than certain ones. No process gets more than its limit.
    """
    free = {pid for pid, estimate in estimates.items() if estimate.uncertainty > 0}
    while free:
        gap = busy - sum(estimate.busy for estimate in estimates.values())
        weight = sum(estimates[pid].uncertainty for pid in free)

        stopped = set()
        moved = {}
        for pid in free:
            estimate = estimates[pid]
            moved[pid] = estimate.busy + gap * estimate.uncertainty / weight
            if not 0 <= moved[pid] <= limits[pid]:
                stopped.add(pid)

        if not stopped:
            for pid in free:
                estimates[pid].busy = moved[pid]
            break

        # Estimates that reach a limit stay there, and the others are adjusted again.
        for pid in stopped:
            estimates[pid].busy = min(max(moved[pid], 0.0), float(limits[pid]))
        free -= stopped

    # The certain estimates alone may be too large.
    total = sum(estimate.busy for estimate in estimates.values())
    scale = min(1.0, busy / total) if total else 0.0
    return {pid: int(estimate.busy * scale) for pid, estimate in estimates.items()}
