"""Finds the slowest GPU of each job: an outlier among its siblings, or against its own past.

The values of each minute are averaged, and compared with the median of the siblings. A GPU is
slower if its values were worse for most of the last WINDOW minutes at equal work, by more than a
limit and by more than the spread of its siblings (median absolute deviation). A value that is
unknown is not judged. Tensor activity and bytes differ between the ranks of many programs. So a GPU
is slower by these only if its siblings are all alike, and if it was like them before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Generic, Literal, NamedTuple, TypeVar

from podgpu.known import select_known
from podgpu.model import select_keys

K = TypeVar("K")
SlowReason = Literal["power_limit", "throttled", "waiting", "clock", "bytes", "tensor"]
Against = Literal["siblings", "past"]
MINUTE = 60.0
WINDOW = 6  # minutes that are judged
_NEEDED = 5  # minutes of WINDOW in which the GPU must work
_PAST_WINDOWS = 20  # two hours
_NEEDED_WINDOWS = 5  # windows of the past without which a GPU has no past
_BUSY = 0.5  # below, a GPU has too little work
_SAME_BUSY = 0.1
_EVEN_WORK = 0.2  # between the minutes of a window
_SAME_WORK = 0.2  # relative difference of tensor activity, memory activity and bytes
_CAPPED = 0.1  # ratio of time from which the power limit decides the clock
_NEAR_LIMIT = 0.93  # power divided by its limit, the same if the ratio of time is unknown
# At the power limit, this relative change of the clock follows from a relative change of the work.
_CLOCK_BY_WORK = 0.7
# The clocks of good chips differ by almost this much at the power limit: some chips need more
# power, some are warmer, and some programs need less power in some phases.
_CAPPED_CLOCKS = 0.08
_SPREADS = 3.0  # a slower GPU differs by this many standard deviations of its siblings
_MAD_SCALE = 1.4826  # standard deviation of a normal distribution, divided by its MAD
_STAYS = 0.7  # fraction of the limit down to which a GPU stays slow, so that alerts do not flap


class JobGpuSample(NamedTuple):
    """The values of one GPU of a job. None if unknown. Ratios are from 0 to 1."""

    busy: float | None = None
    clock: float | None = None  # MHz of the SMs
    power: float | None = None  # W
    power_limit: float | None = None  # W
    capped: float | None = None  # ratio of time in which the power limit lowered the clock
    throttled: float | None = None  # the same for heat, power brake and reliability
    tensor: float | None = None
    dram: float | None = None
    bytes: float | None = None  # per second over PCIe and NVLink
    waiting: float | None = None  # ratio of time in which the job waited for other containers


Samples = Mapping[str, JobGpuSample]  # by device
_Differences = JobGpuSample
"""Differences of ratios, and relative differences of the other values. 0 if they are equal."""


class _Rule(NamedTuple):
    reason: SlowReason
    limit: float  # smallest difference
    is_lower: bool = True  # a slower GPU has a lower value
    same_work: bool = True
    others: int = 1  # number of siblings without which the value is not compared
    is_usual: bool = False  # good GPUs of a job often differ in this

    def measure(self, differences: _Differences) -> float | None:
        """Returns by how much the value is worse. None if it is unknown."""
        difference: float | None = getattr(differences, self.reason)
        if difference is None or not self.is_lower:
            return difference
        return -difference


# Causes before effects: a lower power limit also lowers the clock.
_RULES = (
    _Rule("power_limit", 0.03, same_work=False),
    _Rule("throttled", 0.1, is_lower=False),
    _Rule("waiting", 0.05, is_lower=False, same_work=False),
    _Rule("clock", 0.035),
    _Rule("bytes", 0.15, others=3, is_usual=True),
    _Rule("tensor", 0.15, others=3, is_usual=True),
)
_RATIOS = ("busy", "capped", "throttled", "waiting")
# Values that show how much a GPU works, and below which they are noise
_WORK = {"tensor": 0.02, "dram": 0.02, "bytes": 50e6}


class SlowGpu(NamedTuple):
    device: str
    reason: SlowReason
    difference: float  # of the values as a fraction; of ratios the difference
    against: Against
    since: float  # monotonic time


class _Finding(NamedTuple):
    device: str
    rule: _Rule
    size: float
    against: Against


class _Minute(NamedTuple):
    samples: Samples
    differences: Mapping[str, _Differences]  # of each GPU that works, from its siblings


@dataclass
class _JobHistory:
    minute: int
    rounds: dict[str, list[JobGpuSample]] = field(default_factory=dict)  # of this minute
    # oldest first
    minutes: deque[_Minute] = field(default_factory=lambda: deque(maxlen=WINDOW))
    past: dict[str, deque[JobGpuSample]] = field(default_factory=dict)  # medians of windows
    since_past: int = 0  # minutes since the last window of the past
    slow: SlowGpu | None = None
    unjudged: int = 0  # minutes in which the slow GPU could not be judged


class StragglerDetector(Generic[K]):
    """Keeps the last minutes of each job. `K` identifies a job."""

    def __init__(self, minute: float = MINUTE) -> None:
        """`minute`: seconds. The demo uses shorter ones."""
        self._minute = minute
        self._jobs: dict[K, _JobHistory] = {}

    def update(self, now: float, jobs: Mapping[K, Samples]) -> dict[K, SlowGpu]:
        """Adds the values of a round, by job and device. Returns the slowest GPU of each job.

        `now` is monotonic. Jobs whose GPUs are all alike are not in the result.
        """
        for key in self._jobs.keys() - jobs.keys():
            del self._jobs[key]

        slowest = {}
        minute = int(now // self._minute)
        for key, samples in jobs.items():
            job = self._jobs.setdefault(key, _JobHistory(minute))
            if minute != job.minute:
                _close_minute(job, since=now - WINDOW * self._minute)
                job.minute = minute

            for device, sample in samples.items():
                job.rounds.setdefault(device, []).append(sample)

            if job.slow is not None and job.slow.device in samples:
                slowest[key] = job.slow

        return slowest


def _close_minute(job: _JobHistory, since: float) -> None:
    means = {device: _combine(samples, fmean) for device, samples in job.rounds.items()}
    job.rounds = {}
    job.minutes.append(_Minute(means, _compare_with_siblings(means)))
    # GPUs that left the job have no past.
    job.past = select_keys(job.past, means)
    if len(job.minutes) < WINDOW:
        return

    windows = _make_windows(minute.samples for minute in job.minutes)
    recent = _WorkingGpu.of(job.minutes)
    evidence = _Evidence(recent, _compare_windows(job, windows))
    slowest = _find_slowest(job, evidence, since)
    job.slow = _keep_slow(job, slowest, evidence)

    # Windows of the past do not overlap.
    job.since_past += 1
    if job.since_past == WINDOW:
        job.since_past = 0
        _add_to_past(job, windows)


def _add_to_past(job: _JobHistory, windows: Samples) -> None:
    for device, sample in windows.items():
        # The past of a slower GPU stays as it was before.
        if job.slow is None or job.slow.device != device:
            past = job.past.setdefault(device, deque(maxlen=_PAST_WINDOWS))
            past.append(sample)


def _combine(
    samples: Sequence[JobGpuSample], average: Callable[[Iterable[float]], float]
) -> JobGpuSample:
    """Returns the averages of the known values. `average`: `fmean` or `median`."""
    averages = []
    for values in zip(*samples, strict=True):
        known = select_known(values)
        averages.append(average(known) if known else None)
    return JobGpuSample(*averages)


def _make_windows(minutes: Iterable[Samples]) -> dict[str, JobGpuSample]:
    """Returns the medians over the minutes of each GPU that worked evenly in enough of them."""
    working: dict[str, list[JobGpuSample]] = {}
    for minute in minutes:
        for device, sample in minute.items():
            if _is_busy(sample):
                working.setdefault(device, []).append(sample)

    windows = {}
    for device, samples in working.items():
        usual = _combine(samples, median)
        even = [sample for sample in samples if _is_even(sample, usual)]
        if len(even) >= _NEEDED:
            windows[device] = _combine(even, median)

    return windows


def _is_even(sample: JobGpuSample, usual: JobGpuSample) -> bool:
    """Returns False for a minute in which the program did other work, such as an evaluation."""
    for name, floor in _WORK.items():
        amount = getattr(sample, name)
        expected = getattr(usual, name)
        if amount is None or expected <= floor:
            continue
        difference = abs(amount / expected - 1.0)
        if difference > _EVEN_WORK:
            return False
    return True


def _is_busy(sample: JobGpuSample) -> bool:
    return sample.busy is not None and sample.busy >= _BUSY


def _keep_slow(job: _JobHistory, slowest: SlowGpu | None, evidence: _Evidence) -> SlowGpu | None:
    """Returns the GPU that is shown as slow.

    A GPU that cannot be judged, such as during an evaluation, stays slow for some minutes.
    """
    before = job.slow
    if before is None:
        return slowest

    if slowest is not None:
        job.unjudged = 0
        if slowest.device == before.device:
            return slowest._replace(since=before.since)
        return slowest

    # It was compared and is not slow anymore, or too much time has passed without a comparison.
    if evidence.can_judge(before) or job.unjudged >= WINDOW:
        job.unjudged = 0
        return None

    job.unjudged += 1
    return before


def _find_slowest(job: _JobHistory, evidence: _Evidence, since: float) -> SlowGpu | None:
    findings: list[_Finding] = []
    for rule in _RULES:
        siblings = _find_among_siblings(job, rule, evidence.recent)
        past = _find_against_past(job, rule, evidence.windows)
        if not rule.is_usual:
            findings += select_known([siblings, past])
        elif siblings is not None and past is not None and siblings.device == past.device:
            findings.append(siblings)

    if not findings:
        return None

    worst = max(findings, key=lambda finding: finding.size / finding.rule.limit)
    # The first rule that applies to this GPU is the cause.
    cause = next(finding for finding in findings if finding.device == worst.device)
    return SlowGpu(cause.device, cause.rule.reason, cause.size, cause.against, since)


def _least_difference(rule: _Rule, sample: JobGpuSample) -> float:
    if rule.reason == "clock" and _is_capped(sample):
        return _CAPPED_CLOCKS
    return rule.limit


def _spread(values: Sequence[float]) -> float:
    """Returns a robust standard deviation. 0 if there are too few values."""
    if len(values) < 3:
        return 0.0
    middle = median(values)
    return _MAD_SCALE * median(abs(value - middle) for value in values)


# Judging one GPU


def _measure(rule: _Rule, sample: JobGpuSample, differences: _Differences) -> float | None:
    """Returns by how much a GPU is slower. None if that cannot be said, such as at other work."""
    size = rule.measure(differences)
    if size is None or not rule.same_work:
        return size
    if differences.busy is None or abs(differences.busy) > _SAME_BUSY:
        return None

    amounts = _compare_work(rule, differences)
    # A slower GPU may do less work in the same time, or the same work in more time.
    tolerance = _SAME_WORK
    if rule.reason == "clock":
        tolerance += max(0.0, size)
    if any(abs(amount) > tolerance for amount in amounts):
        return None

    if rule.reason == "clock":
        return _measure_clock(size, sample, differences)

    if rule.reason in _WORK:
        if not amounts:
            return None
        # With less of the other work, less of this is expected as well.
        less_work = min(0.0, *amounts)
        expected = 1.0 + less_work
        measured = 1.0 - size
        return 1.0 - measured / expected

    return size


def _compare_work(rule: _Rule, differences: _Differences) -> list[float]:
    """Returns the differences of the known amounts of work, except the one that is judged."""
    amounts = []
    for name in _WORK:
        amount = getattr(differences, name)
        if amount is None or name == rule.reason:
            continue
        amounts.append(amount)
    return amounts


def _compare_operations(differences: _Differences) -> float | None:
    """At a lower clock, the same operations keep the tensor cores active for longer."""
    if differences.tensor is None or differences.clock is None:
        return differences.tensor
    return (1.0 + differences.tensor) * (1.0 + differences.clock) - 1.0


def _measure_clock(size: float, sample: JobGpuSample, differences: _Differences) -> float | None:
    """At the power limit, more work lowers the clock of a good GPU."""
    if not _is_capped(sample):
        return size

    amounts = select_known([_compare_operations(differences), differences.dram])
    if not amounts:
        return None
    if size < 0:
        return size

    explained = _CLOCK_BY_WORK * max(0.0, *amounts)
    return max(0.0, size - explained)


def _is_capped(sample: JobGpuSample) -> bool:
    """Returns whether the power limit decides the clock.

    True if this is unknown, because then a lower clock proves less.
    """
    if sample.capped is not None:
        return sample.capped >= _CAPPED
    if sample.power is None or sample.power_limit is None:
        return True
    return sample.power >= _NEAR_LIMIT * sample.power_limit


def _difference(name: str, value: float | None, expected: float | None) -> float | None:
    if value is None or expected is None:
        return None
    if name in _RATIOS:
        return value - expected
    if expected > _WORK.get(name, 0.0):
        return value / expected - 1.0
    return None


# Against siblings


def _compare_with_siblings(minute: Samples) -> dict[str, _Differences]:
    """Returns the differences of each GPU that works from the median of the others."""
    columns = zip(*minute.values(), strict=True)
    siblings = [sorted(select_known(values)) for values in columns]
    differences = {}
    for device, sample in minute.items():
        if not _is_busy(sample):
            continue

        expected = []
        for value, others in zip(sample, siblings, strict=True):
            expected.append(None if value is None else _median_without(others, value))
        differences[device] = _compare(sample, JobGpuSample(*expected))

    return differences


def _median_without(values: Sequence[float], value: float) -> float | None:
    """Returns the median of the other values. None if there are none. `values`: sorted."""
    count = len(values) - 1
    if count < 1:
        return None

    place = bisect_left(values, value)
    lower = (count - 1) // 2
    upper = count // 2
    # Values from `place` on move up by one, because the one at `place` is left out.
    if lower >= place:
        lower += 1
    if upper >= place:
        upper += 1
    return (values[lower] + values[upper]) / 2


class _WorkingGpu(NamedTuple):
    """A GPU that worked in enough of the last minutes."""

    sample: JobGpuSample  # median
    differences: _Differences  # median
    minutes: Sequence[_Differences]

    @classmethod
    def of(cls, minutes: Iterable[_Minute]) -> dict[str, _WorkingGpu]:
        samples: dict[str, list[JobGpuSample]] = {}
        differences: dict[str, list[_Differences]] = {}
        for minute in minutes:
            for device, compared in minute.differences.items():
                samples.setdefault(device, []).append(minute.samples[device])
                differences.setdefault(device, []).append(compared)

        recent = {}
        for device, compared_minutes in differences.items():
            if len(compared_minutes) >= _NEEDED:
                sample = _combine(samples[device], median)
                middle = _combine(compared_minutes, median)
                recent[device] = cls(sample, middle, compared_minutes)

        return recent


def _find_among_siblings(
    job: _JobHistory, rule: _Rule, recent: Mapping[str, _WorkingGpu]
) -> _Finding | None:
    """Returns the GPU that differs most from its siblings, if it differs enough."""
    sizes = {}
    limits = {}
    for device, gpu in recent.items():
        size = _measure(rule, gpu.sample, gpu.differences)
        if size is not None:
            sizes[device] = size
            limits[device] = _least_difference(rule, gpu.sample)

    if len(sizes) <= rule.others:
        return None

    worst = max(sizes, key=lambda device: sizes[device] / limits[device])
    size = sizes[worst]
    siblings = [sibling for device, sibling in sizes.items() if device != worst]
    # If good GPUs often differ, all siblings must be alike.
    spread = max(map(abs, siblings)) if rule.is_usual else _spread(siblings)
    finding = _Finding(worst, rule, size, "siblings")
    if not _is_clear(job, finding, limits[worst], spread, recent[worst].minutes):
        return None
    return finding


def _is_clear(
    job: _JobHistory,
    finding: _Finding,
    least: float,
    spread: float,
    minutes: Iterable[_Differences],
) -> bool:
    """Returns False if the difference is small, or if only few minutes have extreme values."""
    limit = max(least, _SPREADS * spread)
    # A slow GPU stays slow down to a lower limit.
    if job.slow is not None and job.slow.device == finding.device:
        limit *= _STAYS
    if finding.size < limit:
        return False

    extreme = 0
    for minute in minutes:
        size = finding.rule.measure(minute)
        if size is not None and size >= limit / 2:
            extreme += 1
    return extreme >= _NEEDED


# Against the past


def _find_against_past(
    job: _JobHistory, rule: _Rule, windows: Mapping[str, _ComparedWindow]
) -> _Finding | None:
    """Returns the GPU that became slower than before, compared with how its siblings changed."""
    changes = {}
    for device, window in windows.items():
        change = _find_change(rule, window)
        if change is not None:
            changes[device] = change

    if not changes:
        return None

    limits = {}
    for device in changes:
        limits[device] = _least_difference(rule, windows[device].sample)
    worst = max(changes, key=lambda device: changes[device].size / limits[device])
    size, spread = changes[worst]
    siblings = [change.size for device, change in changes.items() if device != worst]
    # A single GPU can be compared with its past, unless the rule needs several siblings.
    if rule.others > 1 and len(siblings) < rule.others:
        return None

    if siblings:
        # A sibling that is faster than before proves nothing about this GPU.
        size -= max(0.0, median(siblings))
        spread = max(spread, _spread(siblings))

    usual = _combine(job.past[worst], median)
    minutes = []
    for minute in job.minutes:
        if worst in minute.samples:
            minutes.append(_compare(minute.samples[worst], usual))

    finding = _Finding(worst, rule, size, "past")
    if not _is_clear(job, finding, limits[worst], spread, minutes):
        return None
    return finding


class _Change(NamedTuple):
    size: float
    spread: float  # in the past


def _find_change(rule: _Rule, window: _ComparedWindow) -> _Change | None:
    """Returns by how much a GPU is slower than before, and the spread of this in the past."""
    sizes = []
    for differences in window.differences:
        # Without a known amount of work, other work of the program looks like a slower GPU.
        if rule.same_work and not _compare_work(rule, differences):
            continue
        size = _measure(rule, window.sample, differences)
        if size is not None:
            sizes.append(size)

    if len(sizes) < _NEEDED_WINDOWS:
        return None

    return _Change(median(sizes), _spread(sizes))


class _ComparedWindow(NamedTuple):
    sample: JobGpuSample
    differences: Sequence[_Differences]  # from each window of the past


def _compare_windows(job: _JobHistory, windows: Samples) -> dict[str, _ComparedWindow]:
    compared = {}
    for device, sample in windows.items():
        past = job.past.get(device, ())
        differences = [_compare(sample, earlier) for earlier in past]
        compared[device] = _ComparedWindow(sample, differences)
    return compared


class _Evidence(NamedTuple):
    """The GPUs whose values of this round can be compared, each by its device."""

    recent: Mapping[str, _WorkingGpu]
    windows: Mapping[str, _ComparedWindow]

    def can_judge(self, slow: SlowGpu) -> bool:
        """Returns True if the rule by which this GPU was slow can be applied again."""
        rule = next(rule for rule in _RULES if rule.reason == slow.reason)
        if slow.against == "past":
            window = self.windows.get(slow.device)
            if window is None:
                return False
            return _find_change(rule, window) is not None

        gpu = self.recent.get(slow.device)
        if gpu is None:
            return False

        return _measure(rule, gpu.sample, gpu.differences) is not None


def _compare(sample: JobGpuSample, expected: JobGpuSample) -> _Differences:
    compared = []
    for name, value, usual in zip(JobGpuSample._fields, sample, expected, strict=True):
        compared.append(_difference(name, value, usual))
    return _Differences(*compared)
