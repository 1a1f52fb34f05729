"""Simulates jobs on GPUs, to measure the detector of slow GPUs: false alarms, and time to detect.

.venv/bin/python -m tests.fleet.straggler_simulation --gpu-days 1000 --seed 1
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.fleet.stragglers import GpuSample, SlowGpu, StragglerDetector

ROUND = 60.0  # fewer rounds in a minute mean more noise
_DAY = 86_400.0
_CAP = 700.0
_MAX_CLOCK = 1980.0

Samples = dict[str, GpuSample]
Fault = Callable[[GpuSample], GpuSample]


class Chip(NamedTuple):
    """What differs between GPUs of one model."""

    clock: float  # relative clock at the power limit
    power: float  # relative power below the limit
    phase: float  # of the temperature

    @classmethod
    def make(cls, rng: random.Random) -> Chip:
        # A chip that is 3 % slower than the mean would be a true finding.
        clock = max(0.98, min(1.02, rng.gauss(1.0, 0.008)))
        return cls(clock, rng.gauss(1.0, 0.03), rng.uniform(0, math.tau))


@dataclass
class Job:
    """One job. `fault` changes the sample of the first GPU."""

    kind: str  # training, pipeline, serving, single
    gpus: int
    rng: random.Random
    fault: Callable[[GpuSample], GpuSample] | None = None
    chips: list[Chip] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chips = [Chip.make(self.rng) for _ in range(self.gpus)]
        self.load = [self.rng.uniform(0.3, 1.0) for _ in range(self.gpus)]
        self.capped = self.rng.random() < 0.5
        self.knows_work = self.rng.random() < 0.8
        self.knows_limit = self.rng.random() < 0.7
        self.stages = [1.0] * self.gpus
        if self.kind == "pipeline":
            stages = self.rng.choice((2, 4))
            weights = [self.rng.uniform(0.75, 1.25) for _ in range(stages)]
            self.stages = [weights[index * stages // self.gpus] for index in range(self.gpus)]
        self.epoch = self.rng.uniform(1200, 5400)
        self.pause = self.rng.uniform(60, 400)
        self.tensor = self.rng.uniform(0.1, 0.7)
        self.brake: dict[int, float] = {}  # GPU -> until when it is throttled for a moment

    def round(self, at: float) -> Samples:
        in_pause = at % self.epoch < self.pause  # evaluation or checkpoint, on all GPUs
        samples = {}
        for index in range(self.gpus):
            sample = self._sample(index, at, in_pause)
            if self.fault is not None and index == 0:
                sample = self.fault(sample)
            samples[f"GPU-{index}"] = sample
        return samples

    def _sample(self, index: int, at: float, in_pause: bool) -> GpuSample:
        rng = self.rng
        chip = self.chips[index]
        busy = rng.uniform(0.97, 1.0)
        work = self.stages[index]
        if self.kind == "serving":
            step = rng.gauss(0, 0.02) + 0.002 * math.sin(at / 7000)
            self.load[index] = max(0.05, min(1.0, self.load[index] + step))
            busy = work = self.load[index]
        if in_pause and self.kind != "serving":
            busy *= rng.uniform(0.3, 0.9)
            work *= 0.4
        if rng.random() < 0.002:  # a data loader that stalls
            busy *= rng.uniform(0.1, 0.8)
            work *= 0.5
        throttled = 0.0
        if rng.random() < 0.00005:  # the room is too warm for a moment
            self.brake[index] = at + rng.uniform(15, 120)
        if at < self.brake.get(index, 0.0):
            throttled = rng.uniform(0.2, 1.0)

        warmth = 0.006 * math.sin(at / 5000 + chip.phase)
        if self.capped and work > 0.5:
            capped = rng.uniform(0.9, 1.0)
            clock = 0.85 * chip.clock * (1 + warmth + rng.gauss(0, 0.006)) * (1 - 0.1 * (work - 1))
            power = _CAP * rng.gauss(0.998, 0.004)
        else:
            capped = 0.0
            clock = 1.0 - abs(rng.gauss(0, 0.002))
            power = (120 + 480 * work * self.tensor) * chip.power * rng.gauss(1, 0.02)
        clock *= 1 - 0.15 * throttled
        return GpuSample(
            busy=busy,
            clock=round(_MAX_CLOCK * clock / 15) * 15.0,  # GPUs have steps of 15 MHz
            power=power,
            power_limit=_CAP if self.knows_limit else None,
            capped=capped,
            throttled=throttled,
            tensor=self.tensor * work * rng.gauss(1, 0.02) if self.knows_work else None,
            dram=0.4 * work * rng.gauss(1, 0.02) if self.knows_work else None,
            bytes=2e9 * work * abs(rng.gauss(1, 0.05)),
            waiting=abs(rng.gauss(0, 0.002)),
        )


def lower_clock(sample: GpuSample) -> GpuSample:
    """A clock that is 5 % lower."""
    assert sample.clock is not None
    return sample._replace(clock=sample.clock * 0.95)


def lower_cap(sample: GpuSample) -> GpuSample:
    """A power limit that is 5 % lower, and so is the power of a GPU that reached it."""
    assert sample.power is not None
    assert sample.clock is not None
    limit = None if sample.power_limit is None else sample.power_limit * 0.95
    if sample.power < _CAP * 0.95:
        return sample._replace(power_limit=limit)
    power = sample.power * 0.95
    return sample._replace(power_limit=limit, power=power, capped=1.0, clock=sample.clock * 0.98)


def _make_jobs(rng: random.Random) -> Iterator[tuple[Job, float]]:
    """Yields jobs with their length in seconds."""
    while True:
        # Training counts twice, because it is the most usual.
        kind = rng.choice(("training", "training", "pipeline", "serving", "single"))
        gpus = 1 if kind == "single" else rng.choice((2, 4, 8, 8, 16))
        yield Job(kind, gpus, rng), rng.uniform(0.1, 1.5) * _DAY


def count_false_alarms(seed: int, gpu_days: float) -> tuple[list[tuple[str, SlowGpu]], float]:
    """Returns the findings in jobs without a fault, and the GPU-days that were simulated."""
    rng = random.Random(seed)
    total = 0.0
    alarms = []
    for job, seconds in _make_jobs(rng):
        if total >= gpu_days:
            break
        total += job.gpus * seconds / _DAY
        for finding in run(job, seconds):
            alarms.append((f"{job.kind} of {job.gpus}", finding))
    return alarms, total


def run(job: Job, seconds: float) -> Iterator[SlowGpu]:
    """Yields each finding when it begins."""
    detector: StragglerDetector[str] = StragglerDetector()
    before: Mapping[str, SlowGpu] = {}
    at = 0.0
    while at < seconds:
        at += ROUND
        found = detector.update(at, {"job": job.round(at)})
        slow = found.get("job")
        if slow is not None and before.get("job", slow._replace(device="")).device != slow.device:
            yield slow
        before = found


def detect(job: Job, fault: Callable[[GpuSample], GpuSample], healthy: float) -> float | None:
    """Returns the seconds after which a fault is found. None if it is not found in an hour.

    The fault starts after `healthy` seconds.
    """
    detector: StragglerDetector[str] = StragglerDetector()
    at = 0.0
    while at < healthy + 3600.0:
        at += ROUND
        if at > healthy:
            job.fault = fault
        slow = detector.update(at, {"job": job.round(at)}).get("job")
        if slow is not None and slow.device == "GPU-0" and at > healthy:
            return at - healthy
    return None


def _print_detection(seed: int, fault: Callable[[GpuSample], GpuSample], healthy: float) -> None:
    rng = random.Random(seed)
    times = []
    for _ in range(60):
        job = Job("training", rng.choice((4, 8, 16)), rng)
        job.capped = True
        job.epoch = math.inf  # no pause: the work is equal
        job.pause = 0.0
        times.append(detect(job, fault, healthy))
    known = sorted(seconds for seconds in times if seconds is not None)
    within = sum(seconds <= 600 for seconds in known)
    print(
        f"{fault.__name__}, after {healthy:.0f} s: found {len(known)} of {len(times)}, "
        f"{within} within 10 minutes, median {known[len(known) // 2] if known else '-'} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-days", type=float, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alarms-only", action="store_true")
    options = parser.parse_args()
    for fault in (lower_clock, lower_cap):
        for healthy in (0.0, 7200.0):
            if options.alarms_only:
                break
            _print_detection(options.seed, fault, healthy)
    alarms, total = count_false_alarms(options.seed, options.gpu_days)
    print(f"false alarms: {len(alarms)} in {total:.0f} GPU-days")
    for (kind, reason, against), count in Counter(
        (kind, slow.reason, slow.against) for kind, slow in alarms
    ).most_common():
        print(f"  {count} {kind}: {reason} against {against}")


if __name__ == "__main__":
    main()
