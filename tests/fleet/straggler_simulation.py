"""Simulates jobs on GPUs, to measure the detector of slow GPUs: false alarms, and time to detect.

`python -m bench stragglers` runs 1,000 GPU-days. The values follow a simple model of a GPU: power
grows with the work and with the clock, and a GPU at its power limit lowers its clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.fleet.stragglers import JobGpuSample, SlowGpu, StragglerDetector

ROUND = 60.0
"""Seconds. A round has the noise of READINGS readings."""
READINGS = 3
DAY = 86_400.0
KINDS = (
    # Training counts twice, because it is the most usual.
    "training",
    "training",
    "pipeline",
    "experts",
    "actors",
    "array",
    "serving",
    "single",
)
SYNCHRONOUS = ("training", "pipeline", "experts")
_CAP = 700.0
_IDLE_POWER = 90.0
_MAX_CLOCK = 1980.0
_CLOCK_STEP = 15.0
_POWER_EXPONENT = 2.5  # power is proportional to the clock to the power of this
_GPUS_PER_NODE = 8

Samples = dict[str, JobGpuSample]


class Fault(NamedTuple):
    """What is wrong with a GPU. Relative values: 0.95 is 5 % lower."""

    clock: float = 1.0  # at the same work, such as by locked clocks
    limit: float = 1.0  # a lower power limit
    leak: float = 1.0  # a chip that needs more power for the same work


LOWER_CLOCK = Fault(clock=0.95)
LOWER_CAP = Fault(limit=0.95)
LEAKING = Fault(leak=1.0 / 0.95**_POWER_EXPONENT)  # its clock at the power limit is 5 % lower
HEALTHY = Fault()


class Work(NamedTuple):
    """What a program does on one GPU in a round. Activities are relative to the job's usual."""

    busy: float
    tensor: float = 1.0
    dram: float = 1.0
    bytes: float = 1.0


IDLE = Work(0.0, 0.0, 0.0, 0.0)


@dataclass
class Chip:
    """What differs between GPUs of one model."""

    power: float  # relative power at the same work. It decides the clock at the power limit.
    phase: float  # of the temperature
    braked_until: float = -math.inf  # the room is too warm for a moment

    @classmethod
    def make(cls, rng: random.Random) -> Chip:
        # A chip whose clock is 3 % lower than the mean would be a true finding.
        power = max(0.95, min(1.05, rng.gauss(1.0, 0.02)))
        return cls(power, rng.uniform(0, math.tau))


class Known(NamedTuple):
    """Which values the exporters of a job report."""

    tensor: bool
    dram: bool
    bytes: bool
    limit: bool
    reasons: bool

    @classmethod
    def choose(cls, rng: random.Random) -> Known:
        activity = rng.random() < 0.8
        return cls(
            tensor=activity,
            dram=activity and rng.random() < 0.9,
            bytes=activity or rng.random() < 0.5,
            limit=rng.random() < 0.8,
            reasons=rng.random() < 0.8,
        )


ALL_KNOWN = Known(tensor=True, dram=True, bytes=True, limit=True, reasons=True)


@dataclass
class Job:
    """One job. `fault` is that of the first GPU."""

    kind: str
    gpus: int
    rng: random.Random
    fault: Fault = HEALTHY
    known: Known = ALL_KNOWN
    is_steady: bool = False  # without restarts, pauses and lost readings
    chips: list[Chip] = field(init=False)
    activity: float = field(init=False)  # work at which power is relative to the cap
    tensor: float = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.chips = [Chip.make(rng) for _ in range(self.gpus)]
        self.names = [f"GPU-{index}" for index in range(self.gpus)]
        # Half of the jobs need more power than the limit.
        self.activity = rng.uniform(1.1, 1.6) if rng.random() < 0.5 else rng.uniform(0.4, 0.9)
        self.tensor = rng.uniform(0.05, 0.7)
        self.dram = rng.uniform(0.1, 0.6)
        self.bytes = 10 ** rng.uniform(7.5, 11)
        self.loads = [rng.uniform(0.2, 1.0) for _ in range(self.gpus)]
        self.stages = self._choose_stages()
        self.phase_ratio = rng.uniform(0.0, 0.15)  # of readings that see communication
        self.epoch = rng.uniform(1200, 14_400)
        self.pause = rng.uniform(60, 600)
        self.offsets = [rng.uniform(0, self.epoch) for _ in range(self.gpus)]
        self.evaluates_alone = rng.random() < 0.3  # only the first rank, while the others wait
        self.restart_at = self._next_restart(0.0)
        self.down_until = 0.0
        self.warm_until = rng.uniform(60, 900)
        self.unread_until: dict[int, float] = {}
        self.trend = 1.0

    def _choose_stages(self) -> list[Work]:
        """Returns the usual work of each GPU."""
        rng = self.rng
        if self.kind == "pipeline":
            count = rng.choice([stages for stages in (2, 4, 8, 16) if stages <= self.gpus])
            stages = []
            for stage in range(count):
                share = rng.uniform(0.75, 1.25)
                is_end = stage in (0, count - 1)
                moved = 0.5 if is_end else 1.0  # an end of the pipeline has one neighbour
                stages.append(Work(1.0, share, share * rng.uniform(0.9, 1.1), moved))
            return [stages[index * count // self.gpus] for index in range(self.gpus)]
        if self.kind == "array":
            return [self._choose_own_work() for _ in range(self.gpus)]
        if self.kind == "actors":
            learners = max(1, self.gpus // 4)
            learner = Work(1.0, 1.3, 1.0, 2.0)
            actor = Work(1.0, 0.5, 0.9, 0.6)
            return [learner if index < learners else actor for index in range(self.gpus)]
        return [Work(1.0) for _ in range(self.gpus)]

    def _choose_own_work(self) -> Work:
        rng = self.rng
        return Work(1.0, rng.uniform(0.85, 1.15), rng.uniform(0.85, 1.15), rng.uniform(0.7, 1.3))

    def _next_restart(self, at: float) -> float:
        return math.inf if self.is_steady else at + self.rng.expovariate(1 / (18 * 3600))

    # A round

    def round(self, at: float) -> Samples:
        """Returns the values of all GPUs. Empty if the job has no pods at the moment."""
        if at >= self.restart_at:
            self._restart(at)
        if at < self.down_until:
            return {}

        self._change(at)
        samples = {}
        for index, name in enumerate(self.names):
            work = self._work(index, at)
            if at < self.unread_until.get(index // _GPUS_PER_NODE, 0.0):
                samples[name] = JobGpuSample()
            else:
                samples[name] = self._measure(index, work, at)
        return samples

    def _restart(self, at: float) -> None:
        rng = self.rng
        self.restart_at = self._next_restart(at)
        self.down_until = at + rng.choice((0.0, rng.uniform(60, 1200)))
        self.warm_until = self.down_until + rng.uniform(60, 900)
        if rng.random() < 0.5:
            # Ranks, and so stages, move to other GPUs.
            order = list(range(self.gpus))
            rng.shuffle(order)
            self.stages = [self.stages[index] for index in order]
            self.loads = [self.loads[index] for index in order]
        if rng.random() < 0.3 and self.fault is HEALTHY:
            index = rng.randrange(self.gpus)
            self.chips[index] = Chip.make(rng)
            self.names[index] = f"GPU-{index}-{at:.0f}"

    def _change(self, at: float) -> None:
        """Changes what is common to the GPUs: other sequence lengths, lost readings."""
        if self.is_steady:
            return
        rng = self.rng
        if rng.random() < 0.0005:
            self.trend = rng.uniform(0.7, 1.2)
        if self.kind == "array" and rng.random() < 0.01:
            self.stages[rng.randrange(self.gpus)] = self._choose_own_work()
        if self.kind == "experts" and rng.random() < 0.02:
            index = rng.randrange(self.gpus)
            amount = max(0.8, min(1.2, self.stages[index].tensor + rng.gauss(0, 0.05)))
            self.stages[index] = Work(1.0, amount, amount, amount)
        if rng.random() < 0.0005:
            node = rng.randrange(-(-self.gpus // _GPUS_PER_NODE))
            self.unread_until[node] = at + rng.uniform(60, 400)

    def _work(self, index: int, at: float) -> Work:
        rng = self.rng
        usual = self.stages[index]
        if self.kind in ("serving", "actors") and index < len(self.loads):
            drift = rng.gauss(0, 0.02)
            self.loads[index] = max(0.02, min(1.0, self.loads[index] + drift))
        if self.kind == "serving":
            load = self.loads[index]
            day = 0.75 + 0.25 * math.sin(at / DAY * math.tau)
            return Work(min(1.0, 0.1 + load * day), load * day, load * day, load * day)

        busy = rng.uniform(0.96, 1.0)
        if self.kind == "actors":
            busy = min(busy, 0.5 + 0.5 * self.loads[index])
        if self.is_steady:
            return usual._replace(busy=busy)
        if at < self.warm_until:
            part = rng.uniform(0.0, 0.6)
            return Work(rng.uniform(0.0, 1.0), part, part, part)

        offset = self.offsets[index] if self.kind in ("array", "single") else self.offsets[0]
        if (at + offset) % self.epoch < self.pause:
            return self._pause(index, busy)
        if rng.random() < 0.002:  # a data loader that stalls
            part = rng.uniform(0.1, 0.8)
            return Work(busy * part, usual.tensor * part, usual.dram * part, usual.bytes * part)
        common = self.trend
        return Work(busy, usual.tensor * common, usual.dram * common, usual.bytes)

    def _pause(self, index: int, busy: float) -> Work:
        """Returns the work of an evaluation or checkpoint."""
        if not self.evaluates_alone:
            part = self.rng.uniform(0.3, 0.9)
            return Work(busy * part, 0.4 * part, 0.6 * part, 0.1)
        if index == 0:
            return Work(busy * 0.8, 0.5, 0.6, 0.05)
        # A collective operation that waits is busy, and computes nothing.
        return Work(1.0, 0.0, 0.05, 0.0)

    # Values of a GPU

    def _measure(self, index: int, work: Work, at: float) -> JobGpuSample:
        rng = self.rng
        chip = self.chips[index]
        fault = self.fault if index == 0 else HEALTHY
        if rng.random() < 0.00003:
            chip.braked_until = at + rng.uniform(15, 150)
        throttled = rng.uniform(0.2, 1.0) if at < chip.braked_until else 0.0

        warmth = 0.015 * math.sin(at / 5000 + chip.phase)
        need = self.activity * (0.15 * work.busy + 0.65 * work.tensor + 0.2 * work.dram)
        need *= chip.power * fault.leak * (1 + warmth) * rng.gauss(1, 0.01)

        limit = _CAP * fault.limit
        dynamic = need * (_CAP - _IDLE_POWER)
        clock = 1.0
        if dynamic > limit - _IDLE_POWER:
            clock = ((limit - _IDLE_POWER) / dynamic) ** (1 / _POWER_EXPONENT)
        lowered = fault.clock * (1 - 0.3 * throttled)
        is_capped = clock < 1.0 and lowered == 1.0
        # Some readings see communication, without a need for power.
        in_phase = sum(rng.random() < self.phase_ratio for _ in range(READINGS)) / READINGS
        clock = (clock + in_phase * (1.0 - clock)) * lowered * (1 - abs(rng.gauss(0, 0.001)))
        power = _IDLE_POWER + dynamic * clock**_POWER_EXPONENT * (1 - 0.5 * in_phase)

        tensor = work.tensor
        if self.kind in SYNCHRONOUS:
            # The same operations in each step keep the cores of a slower GPU active for longer.
            tensor *= 0.9 / clock
        known = self.known
        noise = rng.gauss
        return JobGpuSample(
            busy=work.busy,
            clock=round(_MAX_CLOCK * clock / _CLOCK_STEP) * _CLOCK_STEP,
            power=power * noise(1, 0.005),
            power_limit=limit if known.limit else None,
            capped=self._measure_capped(is_capped) if known.reasons else None,
            throttled=throttled if known.reasons else None,
            tensor=self.tensor * tensor * noise(1, 0.02) if known.tensor else None,
            dram=self.dram * work.dram * noise(1, 0.02) if known.dram else None,
            bytes=self.bytes * work.bytes * abs(noise(1, 0.05)) if known.bytes else None,
            waiting=abs(noise(0, 0.002)),
        )

    def _measure_capped(self, is_capped: bool) -> float:
        return self.rng.uniform(0.9, 1.0) * (1 - self.phase_ratio) if is_capped else 0.0


# False alarms


class FalseAlarm(NamedTuple):
    seed: int  # of the job
    kind: str
    gpus: int
    known: Known
    slow: SlowGpu


def find_false_alarms(seed: int, gpu_days: float) -> Iterator[tuple[float, list[FalseAlarm]]]:
    """Yields the GPU-days of each job, and its findings. No job has a fault."""
    rng = random.Random(seed)
    total = 0.0
    while total < gpu_days:
        days, alarms = simulate_job(rng.getrandbits(32))
        total += days
        yield days, alarms


def simulate_job(seed: int) -> tuple[float, list[FalseAlarm]]:
    """Returns the GPU-days of one job without a fault, and its findings."""
    job, seconds = choose_job(seed)
    alarms = []
    for slow in _run(job, seconds):
        alarms.append(FalseAlarm(seed, job.kind, job.gpus, job.known, slow))
    return job.gpus * seconds / DAY, alarms


def choose_job(seed: int) -> tuple[Job, float]:
    """Returns a job and the seconds for which it runs."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    gpus = 1 if kind == "single" else rng.choice((2, 4, 8, 8, 16, 32))
    job = Job(kind, gpus, rng, known=Known.choose(rng))
    return job, rng.uniform(0.05, 2.0) * DAY


def _run(job: Job, seconds: float) -> Iterator[SlowGpu]:
    """Yields each finding when it begins."""
    detector: StragglerDetector[str] = StragglerDetector()
    before: SlowGpu | None = None
    at = 0.0
    while at < seconds:
        at += ROUND
        slow = _update(detector, job, at)
        if slow is not None and (before is None or before.device != slow.device):
            yield slow
        before = slow


def _update(detector: StragglerDetector[str], job: Job, at: float) -> SlowGpu | None:
    samples = job.round(at)
    jobs: Mapping[str, Samples] = {"job": samples} if samples else {}
    return detector.update(at, jobs).get("job")


# Time to detect


def detect(job: Job, fault: Fault, healthy: float) -> float | None:
    """Returns the seconds after which a fault is found. None if it is not found in an hour.

    The fault starts after `healthy` seconds.
    """
    detector: StragglerDetector[str] = StragglerDetector()
    at = 0.0
    while at < healthy + 3600.0:
        at += ROUND
        if at > healthy:
            job.fault = fault
        slow = _update(detector, job, at)
        if slow is not None and slow.device == "GPU-0" and at > healthy:
            return at - healthy
    return None


def make_equal_job(
    rng: random.Random, is_capped: bool, known: Known | None = None, gpus: int | None = None
) -> Job:
    """Returns a training job at equal work. `is_capped`: it needs more power than the limit."""
    count = gpus or rng.choice((4, 8, 16, 32))
    job = Job("training", count, rng, known=known or Known.choose(rng), is_steady=True)
    job.activity = rng.uniform(1.15, 1.6) if is_capped else rng.uniform(0.4, 0.85)
    return job
