"""One simulated GPU, independent of NVML: identity, MIG layout, loads, and the resulting power, heat and counters.

The activity is a function of loads, time and seed, and is constant within a second. So counters are exact sums, do not
depend on when they are read, and can be computed again for times in the past.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from podgpu.simulate.models import MIB, GpuModel, MigProfile

LONG_GAP = 600.0  # seconds that are computed second by second; earlier time is computed in one step
THERMAL_LAG = 15.0  # time constant in seconds
IDLE_CELSIUS, FULL_CELSIUS = 32.0, 72.0
PCIE_TX_BYTES, PCIE_RX_BYTES, NVLINK_BYTES = 6_000_000, 20_000_000, 400_000_000
"""Bytes per busy second. NVLINK_BYTES is per link and direction."""
SAMPLES_PER_SECOND = 5
SAMPLE_BUFFER = 20.0  # seconds for which the driver keeps utilisation samples
STEADY_PERIOD = 0.1  # seconds; a load with a shorter period is simulated by its mean
_MASK = (1 << 64) - 1


# Loads


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """One process on one GPU: busy for `duty` of every `period`, idle for the rest."""

    gpu: int  # number of the GPU (`SimulatedGpu.number`)
    pid: int
    duty: float = 0.5
    gi_id: int | None = None  # MIG GPU instance; `duty` is relative to the instance
    period: float = 0.05  # seconds; up to `STEADY_PERIOD` the load is steady
    memory: int = 1024**3
    tensor: float = 0.5  # share of the busy time in which the tensor cores are busy
    dram: float = 0.3  # share of the memory bandwidth while busy
    phase: float = 0.0  # seconds by which the period is shifted
    kind: Literal["compute", "graphics", "mps"] = "compute"
    sway: float = 0.0  # relative variation of a steady load
    sway_period: float = 60.0  # seconds

    def __post_init__(self) -> None:
        for name in ("duty", "tensor", "dram", "sway"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} of a simulated load must be between 0 and 1, not {getattr(self, name)}")
        if not self.period > 0 or not self.sway_period > 0 or self.memory < 0:
            raise ValueError("periods of a simulated load must be positive, and its memory must not be negative")

    def demand(self, start: float, end: float) -> float:
        """Returns the mean of the on-off wave between two moments."""
        duty, period = self.duty, self.period
        if period <= STEADY_PERIOD:
            return min(1.0, max(0.0, duty * (1 + self.sway * self._swing(start, end)))) if self.sway else duty
        first, into_first = divmod((start + self.phase) / period, 1.0)
        last, into_last = divmod((end + self.phase) / period, 1.0)
        gone = (last - first) * duty + min(into_last, duty) - min(into_first, duty)
        # Rounding must not produce a negative number.
        return max(0.0, gone * period / (end - start))

    def _swing(self, start: float, end: float) -> float:
        """Returns the mean of a sine between two moments."""
        turn = math.tau / self.sway_period
        first, last = turn * (start + self.phase), turn * (end + self.phase)
        return (math.cos(first) - math.cos(last)) / (last - first)


class Share(NamedTuple):
    """Activity of a GPU or instance, relative to its own capacity, or seconds of work since the last reset.

    A tuple, because it is created very often.
    """

    busy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0

    def plus(self, other: Share, compute: float, memory: float) -> Share:
        """Adds another share. `compute` and `memory`: its weights, such as an instance's fraction of the GPU."""
        return Share(
            self.busy + compute * other.busy,
            self.tensor + compute * other.tensor,
            self.dram + memory * other.dram,
        )


def split_busy(loads: Sequence[SimulatedLoad], start: float, end: float, factor: float) -> list[float]:
    """Returns the busy share of each load on one GPU or instance, scaled down if the sum exceeds 1."""
    wanted = [min(1.0, load.demand(start, end) * factor) for load in loads]
    total = sum(wanted)
    return [part / total for part in wanted] if total > 1 else wanted


def sum_shares(loads: Sequence[SimulatedLoad], busy: Iterable[float]) -> Share:
    """Adds up the loads with these busy shares."""
    total = tensor = dram = 0.0
    for load, part in zip(loads, busy, strict=True):
        total += part
        tensor += part * load.tensor
        dram += part * load.dram
    if total > 1:  # Scaled parts may add up to 1.0000000000000002.
        return Share(1.0, min(1.0, tensor), min(1.0, dram))
    return Share(total, tensor, dram)


def make_noise(seed: int, gpu: int, bucket: int) -> float:
    """Returns deterministic pseudo-random noise between -1 and 1."""
    mixed = (seed * 0x9E3779B97F4A7C15 + gpu * 0xD1B54A32D192ED03 + bucket * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return math.ldexp(float(mixed >> 11), -52) - 1.0


# The GPU


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    """A GPU instance with its one compute instance."""

    slot: int
    gi_id: int
    profile: MigProfile
    uuid: str
    ci_id: int = 0

    @property
    def reserved(self) -> int:
        return 16 * MIB * self.profile.memory_slices


@dataclass(frozen=True, slots=True)
class Residence:
    load: SimulatedLoad
    since: float
    until: float = math.inf


class Activity(NamedTuple):
    """Activity in one second."""

    device: Share
    instances: list[tuple[int, Share]]
    watts: float
    throttle: float  # requested power divided by the limit; above 1 the clocks are reduced

    @property
    def capped(self) -> bool:
        return self.throttle > 1


@dataclass(frozen=True, slots=True)
class UtilisationSample:
    """One utilisation sample of the driver."""

    wall_us: int
    parts: tuple[tuple[Residence, float], ...]  # loads and their busy shares

    @property
    def busy(self) -> float:
        return sum(part for _, part in self.parts)


@dataclass(slots=True)
class ProcessMean:
    """Mean activity of a process over all samples, including samples in which it was idle."""

    pid: int
    last_ran_us: int = 0
    sm: float = 0.0


@dataclass(eq=False)
class SimulatedGpu:
    number: int  # never changes, while NVML's index (the position in its list) may change
    model: GpuModel
    uuid: str
    minor: int
    seed: int
    jitter: float  # relative variation of the activity
    at: float  # monotonic time up to which the state is computed
    epoch: float  # Unix time at monotonic zero
    mig_enabled: bool = False
    instances: tuple[SimulatedInstance, ...] = ()
    nvlinks: int = 0  # number of links; 0 on a node with a single GPU
    lost: bool = False
    loads: list[Residence] = field(default_factory=list)
    departed: list[Residence] = field(default_factory=list)
    energy: float = 0.0  # joules
    celsius: float = IDLE_CELSIUS
    capped_seconds: float = 0.0
    idle_seconds: float = 0.0
    meter: Share = field(default_factory=Share)
    instance_meters: dict[int, Share] = field(default_factory=dict)
    _now: tuple[int, Activity] | None = None
    _groups: dict[int | None, list[SimulatedLoad]] = field(default_factory=dict)
    """GPU instance (None without MIG) -> loads."""

    @property
    def wall_us(self) -> int:
        return int((self.at + self.epoch) * 1e6)

    @property
    def activity(self) -> Activity:
        bucket = math.floor(self.at)
        if self._now is None or self._now[0] != bucket:
            self._now = (bucket, self._activity_in(bucket))
        return self._now[1]

    @property
    def milliwatts(self) -> int:
        return int(self.activity.watts * 1000)

    @property
    def energy_mj(self) -> int:
        return int(self.energy * 1000)

    @property
    def memory_celsius(self) -> int | None:
        return round(self.celsius - 2 + 8 * self.activity.device.dram) if self.model.hbm else None

    @property
    def clocks(self) -> tuple[int, int, int]:
        """SM, memory and video clock in MHz. At the power limit, the SM clock is reduced in steps of 15 MHz."""
        model, busy = self.model, self.activity.device.busy > 0
        sm = model.sm_clock[busy]
        if self.activity.capped:
            sm = int(sm / self.activity.throttle) // 15 * 15
        return sm, model.memory_clock[busy], model.video_clock[busy]

    def advance(self, now: float) -> None:
        """Computes the state at `now`. Does nothing if `now` is in the past."""
        if now - self.at > LONG_GAP or not self.loads:
            resume = now if not self.loads else now - LONG_GAP
            if resume > self.at:
                self._step(resume - self.at, self._activity_between(self.at, resume, 1.0))
                self.at = resume
        while self.at < now:
            end = min(now, math.floor(self.at) + 1.0)
            self._step(end - self.at, self.activity)
            self.at = end

    def _step(self, seconds: float, activity: Activity) -> None:
        self.energy += activity.watts * seconds
        idle, _, limit = self.model.power
        target = IDLE_CELSIUS + (FULL_CELSIUS - IDLE_CELSIUS) * (activity.watts - idle) / (limit - idle)
        self.celsius += (target - self.celsius) * -math.expm1(-seconds / THERMAL_LAG)
        if activity.capped:
            self.capped_seconds += seconds
        if activity.device.busy == 0:
            self.idle_seconds += seconds
        self.meter = self.meter.plus(activity.device, seconds, seconds)
        for gi_id, share in activity.instances:
            self.instance_meters[gi_id] = self.instance_meters[gi_id].plus(share, seconds, seconds)

    def _activity_in(self, bucket: int) -> Activity:
        return self._activity_between(bucket, bucket + 1.0, self._factor(bucket))

    def _factor(self, bucket: int) -> float:
        return 1.0 + self.jitter * make_noise(self.seed, self.number, bucket)

    def _activity_between(self, start: float, end: float, factor: float) -> Activity:
        device, instances = Share(), []
        for gi_id, loads in self._groups.items():
            share = sum_shares(loads, split_busy(loads, start, end, factor))
            if gi_id is None:
                device = share
            else:
                instances.append((gi_id, share))
                device = device.plus(share, *self._weight(gi_id))
        idle, _, limit = self.model.power
        # Tensor work at full memory bandwidth exceeds the limit by 10 %.
        wanted = idle + (limit - idle) * (0.45 * device.busy + 0.45 * device.tensor + 0.2 * device.dram)
        return Activity(device, instances, min(wanted, float(limit)), wanted / limit)

    def _regroup(self) -> None:
        self._now = None
        self._groups = {}
        for resident in self.loads:
            self._groups.setdefault(resident.load.gi_id, []).append(resident.load)

    def _weight(self, gi_id: int) -> tuple[float, float]:
        profile = next(instance.profile for instance in self.instances if instance.gi_id == gi_id)
        model = self.model
        return profile.compute_slices / model.compute_slices, profile.memory_slices / model.memory_slices

    def find_room(self, gi_id: int | None) -> int:
        """Returns the memory for loads on the GPU or on one of its instances."""
        if gi_id is None and not self.mig_enabled:
            return self.model.memory - self.model.reserved
        for instance in self.instances:
            if instance.gi_id == gi_id:
                return instance.profile.memory_mib * MIB - instance.reserved
        known = ", ".join(str(instance.gi_id) for instance in self.instances) or "none"
        raise ValueError(f"GPU {self.number} has no GPU instance {gi_id}; it has: {known}")

    def running(self, gi_id: int | None = None) -> list[SimulatedLoad]:
        return [r.load for r in self.loads if gi_id is None or r.load.gi_id == gi_id]

    def memory_used(self, gi_id: int | None = None) -> int:
        return sum(load.memory for load in self.running(gi_id))

    def place(self, load: SimulatedLoad) -> None:
        if self.memory_used(load.gi_id) + load.memory > self.find_room(load.gi_id):
            raise ValueError(f"GPU {self.number} has no room for {load.memory} bytes of pid {load.pid}")
        self.loads.append(Residence(load, self.at))
        self._regroup()

    def evict(self, pid: int | None = None) -> int:
        """Ends the loads of one process, or all loads without `pid`. Returns the number of ended loads."""
        leaving = [r for r in self.loads if pid is None or r.load.pid == pid]
        self.loads = [r for r in self.loads if r not in leaving]
        self.departed = [r for r in self.departed if r.until > self.at - SAMPLE_BUFFER]
        self.departed += [Residence(r.load, r.since, self.at) for r in leaving]
        self._regroup()
        return len(leaving)

    def cut(self, instances: tuple[SimulatedInstance, ...] | None) -> None:
        """Changes the MIG layout and ends all loads. `instances`: None disables MIG."""
        self.evict()
        self.departed = []
        self.mig_enabled = instances is not None
        self.instances = instances or ()
        self.instance_meters = {instance.gi_id: Share() for instance in self.instances}

    def reset(self) -> None:
        """Ends all loads and resets the counters. Keeps MIG layout and identity, as `nvidia-smi --gpu-reset` does."""
        self.evict()
        self.departed = []
        self.energy = self.capped_seconds = self.idle_seconds = 0.0
        self.meter = Share()
        self.instance_meters = {instance.gi_id: Share() for instance in self.instances}

    def samples(self, since_us: int) -> list[UtilisationSample]:
        """Returns the buffered samples after `since_us` (Unix time), oldest first."""
        first = math.floor((self.at - SAMPLE_BUFFER) * SAMPLES_PER_SECOND) + 1
        # Starts one sample too early, because rounding of the timestamp could skip a sample. The last line filters.
        first = max(first, math.floor((since_us / 1e6 - self.epoch) * SAMPLES_PER_SECOND))
        last = math.floor(self.at * SAMPLES_PER_SECOND)
        samples = (self._sample(index) for index in range(first, last + 1))
        return [sample for sample in samples if sample.wall_us > since_us]

    def process_means(self, since_us: int) -> list[ProcessMean]:
        """Returns means over the samples after `since_us`. Leaves out idle and ended processes, as the driver does."""
        samples = self.samples(since_us)
        means: dict[int, ProcessMean] = {}
        for sample in samples:
            for resident, part in sample.parts:
                if part > 0 and resident.until == math.inf:
                    mean = means.setdefault(resident.load.pid, ProcessMean(resident.load.pid))
                    mean.sm += part / len(samples)
                    mean.last_ran_us = sample.wall_us
        return list(means.values())

    def _sample(self, index: int) -> UtilisationSample:
        moment = index / SAMPLES_PER_SECOND
        bucket = math.floor((index - 0.5) / SAMPLES_PER_SECOND)
        residents = [r for r in (*self.departed, *self.loads) if r.since < moment <= r.until]
        parts = split_busy([r.load for r in residents], bucket, bucket + 1.0, self._factor(bucket))
        return UtilisationSample(int((moment + self.epoch) * 1e6), tuple(zip(residents, parts, strict=True)))


def lay_out(model: GpuModel, profiles: Sequence[MigProfile], uuids: Sequence[str]) -> tuple[SimulatedInstance, ...]:
    """Makes instances with the driver's ids: the whole GPU is 0, halves start at 1, quarters at 3, eighths at 7."""
    taken: set[int] = set()
    instances: list[SimulatedInstance] = []
    for slot, (profile, uuid) in enumerate(zip(profiles, uuids, strict=True)):
        gi_id = model.memory_slices // profile.memory_slices - 1
        while gi_id in taken:
            gi_id += 1
        taken.add(gi_id)
        instances.append(SimulatedInstance(slot, gi_id, profile, uuid))
    return tuple(instances)
