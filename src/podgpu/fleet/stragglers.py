"""Finds the slowest GPU of each job: an outlier among its siblings, or against its own past.

The values of each minute are averaged. A GPU is slower if its values were worse for most of the
last WINDOW minutes at equal work, by more than a limit and by more than the spread of its siblings
(median absolute deviation). A value that is unknown is not judged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Generic, Literal, NamedTuple, TypeVar

K = TypeVar("K")
Reason = Literal["power_limit", "throttled", "waiting", "clock", "power", "bytes", "tensor"]
Against = Literal["siblings", "past"]
MINUTE = 60.0
WINDOW = 6  # minutes that are judged
_NEEDED = 5  # minutes of WINDOW in which the work must be equal
_PAST_WINDOWS = 20  # two hours
_NEEDED_WINDOWS = 5  # windows of the past without which a GPU has no past
_BUSY = 0.5  # below, a GPU has too little work
_SAME_BUSY = 0.1
_EVEN_WORK = 0.1  # the same between the minutes of a window
_SAME_WORK = 0.2  # relative difference of tensor activity, memory activity and bytes
_SPREADS = 3.0  # a slower GPU differs by this many standard deviations of its siblings
_MAD_SCALE = 1.4826  # standard deviation of a normal distribution, divided by its MAD
_STAYS = 0.7  # fraction of the limit down to which a GPU stays slow, so that alerts do not flap


class GpuSample(NamedTuple):
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


class _Rule(NamedTuple):
    reason: Reason
    limit: float  # smallest difference
    relative: bool = True  # lower by a fraction; otherwise a ratio that is higher by a difference
    same_work: bool = True
    others: int = 1  # number of siblings without which the value is not compared
    has_past: bool = True
    floor: float = 0.0  # smaller values of the siblings are noise


# Causes before effects: a lower power limit also lowers the clock.
_RULES = (
    _Rule("power_limit", 0.03, same_work=False),
    _Rule("throttled", 0.1, relative=False),
    _Rule("waiting", 0.05, relative=False, same_work=False),
    _Rule("clock", 0.035),
    _Rule("power", 0.035, others=3),
    _Rule("bytes", 0.15, others=3, has_past=False, floor=50e6),
    _Rule("tensor", 0.15, others=3, has_past=False, floor=0.02),
)
# Values that show how much a GPU works, and below which they are noise
_WORK = (("tensor", 0.02), ("dram", 0.02), ("bytes", 50e6))


class SlowGpu(NamedTuple):
    device: str
    reason: Reason
    difference: float  # of the values as a fraction; of ratios the difference
    against: Against
    since: float  # monotonic time


class _Difference(NamedTuple):
    device: str
    rule: _Rule
    size: float
    against: Against


@dataclass
class _JobHistory:
    minute: int
    rounds: dict[str, list[GpuSample]] = field(default_factory=dict)  # of this minute
    # oldest first
    minutes: deque[Mapping[str, GpuSample]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    past: dict[str, deque[GpuSample]] = field(default_factory=dict)  # medians of windows
    since_past: int = 0  # minutes since the last window of the past
    slow: SlowGpu | None = None


class StragglerDetector(Generic[K]):
    """Keeps the last minutes of each job. `K` identifies a job."""

    def __init__(self) -> None:
        self._jobs: dict[K, _JobHistory] = {}

    def update(self, now: float, jobs: Mapping[K, Mapping[str, GpuSample]]) -> dict[K, SlowGpu]:
        """Adds the values of a round, by job and device. Returns the slowest GPU of each job.

        `now` is monotonic. Jobs whose GPUs are all alike are not in the result.
        """
        for key in self._jobs.keys() - jobs.keys():
            del self._jobs[key]

        found = {}
        minute = int(now // MINUTE)
        for key, samples in jobs.items():
            job = self._jobs.setdefault(key, _JobHistory(minute))
            if minute != job.minute:
                _close_minute(job, now)
                job.minute = minute
            for device, sample in samples.items():
                job.rounds.setdefault(device, []).append(sample)
            if job.slow is not None and job.slow.device in samples:
                found[key] = job.slow
        return found


def _close_minute(job: _JobHistory, now: float) -> None:
    means = {device: _combine(samples, fmean) for device, samples in job.rounds.items()}
    job.rounds = {}
    job.minutes.append(means)
    job.past = {device: past for device, past in job.past.items() if device in means}
    if len(job.minutes) < WINDOW:
        return

    before = job.slow
    job.slow = _find_slowest(job, now)
    if before is not None and job.slow is not None and before.device == job.slow.device:
        job.slow = job.slow._replace(since=before.since)

    job.since_past += 1
    if job.since_past < WINDOW:
        return
    job.since_past = 0
    for device, sample in _windows(job.minutes).items():
        # The past of a slower GPU stays as it was before.
        if job.slow is None or job.slow.device != device:
            past = job.past.setdefault(device, deque(maxlen=_PAST_WINDOWS))
            past.append(sample)


def _combine(samples: Sequence[GpuSample], mean: Callable[[Iterable[float]], float]) -> GpuSample:
    combined = []
    for values in zip(*samples, strict=True):
        known = [value for value in values if value is not None]
        combined.append(mean(known) if known else None)
    return GpuSample(*combined)


def _windows(minutes: Iterable[Mapping[str, GpuSample]]) -> dict[str, GpuSample]:
    """Returns the medians over the minutes of each GPU that worked evenly in enough of them."""
    working: dict[str, list[GpuSample]] = {}
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


def _is_even(sample: GpuSample, usual: GpuSample) -> bool:
    """Returns False for a minute in which the program did other work, such as an evaluation."""
    for name, floor in _WORK:
        amount = getattr(sample, name)
        expected = getattr(usual, name)
        if amount is not None and expected > floor and abs(amount / expected - 1.0) > _EVEN_WORK:
            return False
    return True


def _is_busy(sample: GpuSample) -> bool:
    return sample.busy is not None and sample.busy >= _BUSY


def _find_slowest(job: _JobHistory, now: float) -> SlowGpu | None:
    found = []
    windows = _windows(job.minutes)
    for rule in _RULES:
        siblings = _compare_siblings(job, rule)
        if siblings is not None:
            found.append(siblings)
        if rule.has_past:
            past = _compare_past(job, rule, windows)
            if past is not None:
                found.append(past)
    if not found:
        return None

    worst = max(found, key=lambda difference: difference.size / difference.rule.limit)
    # The first rule that applies to this GPU is the cause.
    cause = next(difference for difference in found if difference.device == worst.device)
    since = now - WINDOW * MINUTE
    return SlowGpu(cause.device, cause.rule.reason, cause.size, cause.against, since)


def _limit(job: _JobHistory, device: str, limit: float) -> float:
    stays = job.slow is not None and job.slow.device == device
    return limit * _STAYS if stays else limit


# Against siblings


def _compare_siblings(job: _JobHistory, rule: _Rule) -> _Difference | None:
    """Returns the GPU that differs most from its siblings, if it differs enough."""
    by_device: dict[str, list[float]] = {}
    for minute in job.minutes:
        for device, difference in _differences(minute, rule).items():
            by_device.setdefault(device, []).append(difference)

    sizes = {}
    for device, differences in by_device.items():
        if len(differences) >= _NEEDED:
            sizes[device] = median(differences)
    if len(sizes) <= rule.others:
        return None

    worst = max(sizes, key=lambda device: sizes[device])
    others = [size for device, size in sizes.items() if device != worst]
    limit = _limit(job, worst, max(rule.limit, _SPREADS * _spread(others)))
    # A single minute with an extreme value proves nothing.
    lasting = sorted(by_device[worst])[-_NEEDED]
    if sizes[worst] < limit or lasting < limit / 2:
        return None
    return _Difference(worst, rule, sizes[worst], "siblings")


def _spread(values: Sequence[float]) -> float:
    """Returns a robust standard deviation. 0 if there are too few values."""
    if len(values) < 3:
        return 0.0
    middle = median(values)
    return _MAD_SCALE * median(abs(value - middle) for value in values)


def _differences(minute: Mapping[str, GpuSample], rule: _Rule) -> dict[str, float]:
    """Returns by how much each GPU is slower than its siblings in one minute at equal work."""
    busy = _Siblings.of(minute, "busy")
    judged = _Siblings.of(minute, rule.reason, rule.floor if rule.relative else None)
    work = []
    for name, floor in _WORK:
        if name != rule.reason:
            work.append((name, _Siblings.of(minute, name, floor)))

    differences = {}
    for device, sample in minute.items():
        value = getattr(sample, rule.reason)
        expected = judged.median_without(value)
        if (
            value is None
            or expected is None
            or not _is_busy(sample)
            or not _is_judged(rule, sample)
        ):
            continue
        difference = _difference(rule, value, expected)
        if rule.same_work:
            usual = busy.median_without(sample.busy)
            if usual is None or sample.busy is None or abs(sample.busy - usual) > _SAME_BUSY:
                continue
            pairs = []
            for name, siblings in work:
                amount = getattr(sample, name)
                pairs.append((amount, siblings.median_without(amount)))
            if not _is_same_work(rule, pairs, difference):
                continue
        differences[device] = difference
    return differences


def _is_judged(rule: _Rule, sample: GpuSample) -> bool:
    """A GPU that uses less power is slower only if its power limit slows it down."""
    if rule.reason != "power":
        return True
    return sample.capped is not None and sample.capped >= _BUSY


def _is_same_work(
    rule: _Rule, pairs: Iterable[tuple[float | None, float | None]], difference: float
) -> bool:
    """`pairs`: an amount of work and the expected amount.

    A slower GPU may do less work in the same time, or the same work in more time. Tensor activity
    and bytes are amounts of work themselves, so they need another one that is equal.
    """
    tolerance = _SAME_WORK
    if rule.reason == "clock":
        tolerance += max(0.0, difference)
    known = 0
    for amount, expected in pairs:
        if amount is None or expected is None:
            continue
        known += 1
        if abs(amount / expected - 1.0) > tolerance:
            return False
    return known > 0 or rule.reason not in ("tensor", "bytes")


def _difference(rule: _Rule, value: float, expected: float) -> float:
    return 1.0 - value / expected if rule.relative else value - expected


class _Siblings(NamedTuple):
    """The sorted values of all GPUs of a job."""

    values: list[float]
    floor: float | None

    @classmethod
    def of(
        cls, minute: Mapping[str, GpuSample], name: str, floor: float | None = None
    ) -> _Siblings:
        values = []
        for sample in minute.values():
            value = getattr(sample, name)
            if value is not None:
                values.append(value)
        values.sort()
        return cls(values, floor)

    def median_without(self, value: float | None) -> float | None:
        """Returns the median of the other GPUs. None if it is unknown or too small."""
        count = len(self.values) - 1
        if value is None or count < 1:
            return None
        place = bisect_left(self.values, value)

        def other(index: int) -> float:
            return self.values[index + (index >= place)]

        middle = (other((count - 1) // 2) + other(count // 2)) / 2
        return None if self.floor is not None and middle <= self.floor else middle


# Against the past


def _compare_past(
    job: _JobHistory, rule: _Rule, windows: Mapping[str, GpuSample]
) -> _Difference | None:
    """Returns the GPU that became slower than before, compared with how its siblings changed."""
    changes = {}
    for device, sample in windows.items():
        found = _find_change(rule, sample, job.past.get(device, ()))
        if found is not None:
            changes[device] = found
    if not changes:
        return None

    worst = max(changes, key=lambda device: changes[device][0])
    change, spread = changes[worst]
    others = [size for device, (size, _) in changes.items() if device != worst]
    if others:
        change -= median(others)
        spread = max(spread, _spread(others))
    limit = _limit(job, worst, max(rule.limit, _SPREADS * spread))
    return _Difference(worst, rule, change, "past") if change >= limit else None


def _find_change(
    rule: _Rule, sample: GpuSample, past: Iterable[GpuSample]
) -> tuple[float, float] | None:
    """Returns by how much the GPU is slower than before, and the spread of this in the past."""
    value = getattr(sample, rule.reason)
    if value is None or not _is_judged(rule, sample):
        return None
    earlier = []
    for window in past:
        before = getattr(window, rule.reason)
        if before is None or (rule.relative and before <= 0) or not _is_judged(rule, window):
            continue
        if not rule.same_work or _did_same_work(rule, sample, window, value, before):
            earlier.append(before)
    if len(earlier) < _NEEDED_WINDOWS:
        return None

    expected = median(earlier)
    spread = _spread([_difference(rule, before, expected) for before in earlier])
    return _difference(rule, value, expected), spread


def _did_same_work(
    rule: _Rule, sample: GpuSample, window: GpuSample, value: float, before: float
) -> bool:
    """Compares with one window of the past.

    Without a known amount of work, other work of the same program looks like a slower GPU.
    """
    if sample.busy is None or window.busy is None or abs(sample.busy - window.busy) > _SAME_BUSY:
        return False
    pairs = []
    for name, floor in _WORK:
        usual = getattr(window, name)
        is_known = usual is not None and usual > floor
        pairs.append((getattr(sample, name), usual if is_known else None))
    is_known = any(None not in pair for pair in pairs)
    return is_known and _is_same_work(rule, pairs, _difference(rule, value, before))
