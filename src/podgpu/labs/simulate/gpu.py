"""Simulates one GPU: identity, MIG layout, loads, and the resulting power and counters.

The activity depends only on loads and time, and is constant within each second. So counters do not
depend on how often they are read, and past samples can be computed later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from podgpu.labs.simulate.models import GpuModel, MigProfile

LONG_GAP = 600.0
"""Seconds. A longer time without reads is simulated in one step, instead of one per second."""
THERMAL_LAG = 15.0  # seconds; time constant of temperature changes
IDLE_CELSIUS = 32.0
FULL_CELSIUS = 72.0
DRAM = 0.3  # fraction of the memory bandwidth in use while busy
SAMPLES_PER_SECOND = 5
SAMPLE_BUFFER = 20.0  # seconds for which the driver keeps utilisation samples


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """One process on one GPU.

    In every `period`, it is busy for the fraction `duty` and then idle.
    """

    gpu: int  # number of the GPU (`SimulatedGpu.number`)
    pid: int
    duty: float = 0.5
    gi_id: int | None = None  # MIG GPU instance; `duty` is relative to the instance
    period: float = 0.05  # seconds
    memory: int = 1024**3
    tensor: float = 0.5  # fraction of the busy time in which the tensor cores are busy
    phase: float = 0.0  # shifts the start of the periods, in seconds
    kind: Literal["compute", "graphics", "mps"] = "compute"
    sway: float = 0.0  # `duty` follows a sine wave with this relative amplitude
    sway_period: float = 60.0  # period of the sine wave in seconds

    def demand(self, start: float) -> float:
        """Returns the utilisation for one second that begins at `start`."""
        turns = (start + self.phase) / self.sway_period
        swing = math.sin(math.tau * turns)
        wanted = self.duty * (1 + self.sway * swing)
        return min(1.0, max(0.0, wanted))


class LoadActivity(NamedTuple):
    """Work of a GPU or MIG instance.

    Either fractions of its capacity, or seconds of work since the last reset.
    """

    busy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0

    def plus(self, other: LoadActivity, compute: float, memory: float) -> LoadActivity:
        """Adds the weighted work of `other`.

        The weight is `compute` for busy and tensor time, and `memory` for DRAM time.
        """
        return LoadActivity(
            self.busy + compute * other.busy,
            self.tensor + compute * other.tensor,
            self.dram + memory * other.dram,
        )


def compute_watts(model: GpuModel, activity: LoadActivity) -> float:
    idle, _, limit = model.power
    # Estimated weights.
    load = 0.45 * activity.busy + 0.45 * activity.tensor + 0.2 * activity.dram
    return idle + (limit - idle) * load


def final_celsius(model: GpuModel, watts: float) -> float:
    """Returns the temperature that the GPU reaches at a constant power."""
    idle, _, limit = model.power
    load = (watts - idle) / (limit - idle)
    return IDLE_CELSIUS + (FULL_CELSIUS - IDLE_CELSIUS) * load


def split_busy(loads: Sequence[SimulatedLoad], start: float) -> list[float]:
    """Returns the fraction of one second in which each load is busy.

    Scales the fractions if their sum exceeds 1.
    """
    wanted = [load.demand(start) for load in loads]
    total = sum(wanted)
    if total > 1:
        return [part / total for part in wanted]
    return wanted


@dataclass(frozen=True, slots=True)
class SimulatedInstance:
    index: int  # NVML's index of the MIG device
    gi_id: int
    profile: MigProfile
    uuid: str

    @property
    def resource(self) -> str:
        """The name of the device plugin's resource."""
        return f"nvidia.com/mig-{self.profile.name.replace('+', '.')}"


@dataclass(slots=True)
class PlacedLoad:
    load: SimulatedLoad
    since: float
    until: float = math.inf

    @property
    def is_running(self) -> bool:
        return self.until == math.inf


class GpuActivity(NamedTuple):
    device: LoadActivity
    instances: dict[int, LoadActivity]  # by GPU instance id
    watts: float


class UtilisationSample(NamedTuple):
    wall_us: int
    shares: dict[int, float]  # pid -> fraction of the time in which the process was busy


@dataclass(eq=False)
class SimulatedGpu:
    number: int  # identifies the GPU; unlike NVML's index, it never changes
    model: GpuModel
    uuid: str
    minor: int
    at: float  # monotonic time up to which the state is computed
    epoch: float  # Unix time at monotonic zero
    mig_enabled: bool = False
    instances: tuple[SimulatedInstance, ...] = ()
    nvlinks: int = 0  # number of links; 0 on a node with a single GPU
    lost: bool = False
    recovery: int = 0  # NVML_GPU_RECOVERY_ACTION_…
    fabric_state: int = 0  # NVML_GPU_FABRIC_STATE_…
    relative_clock: float = 1.0  # SM clock under load, relative to that of other GPUs
    # Includes loads that ended less than `SAMPLE_BUFFER` ago.
    loads: list[PlacedLoad] = field(default_factory=list)
    energy: float = 0.0  # joules
    celsius: float = IDLE_CELSIUS
    idle_seconds: float = 0.0
    meter: LoadActivity = field(default_factory=LoadActivity)
    instance_meters: dict[int, LoadActivity] = field(default_factory=dict)

    @property
    def wall_us(self) -> int:
        return int((self.at + self.epoch) * 1e6)

    @property
    def milliwatts(self) -> int:
        return int(self.activity.watts * 1000)

    @property
    def energy_mj(self) -> int:
        return int(self.energy * 1000)

    def advance(self, now: float) -> None:
        """Updates the state to the time `now`. Does nothing if the state is newer."""
        while self.at < now:
            end = now
            # The activity of loads changes each second.
            if self.running() and now - self.at <= LONG_GAP:
                next_second = math.floor(self.at) + 1.0
                end = min(now, next_second)

            self._step(end - self.at, self.activity)
            self.at = end

    def _step(self, seconds: float, activity: GpuActivity) -> None:
        watts = activity.watts
        self.energy += watts * seconds

        warming = final_celsius(self.model, watts) - self.celsius
        # 1 - exp(…), but exact for short times
        reached_fraction = -math.expm1(-seconds / THERMAL_LAG)
        self.celsius += warming * reached_fraction

        if activity.device.busy == 0:
            self.idle_seconds += seconds

        self.meter = self.meter.plus(activity.device, seconds, seconds)
        for gi_id, part in activity.instances.items():
            meter = self.instance_meters[gi_id]
            self.instance_meters[gi_id] = meter.plus(part, seconds, seconds)

    @property
    def activity(self) -> GpuActivity:
        model = self.model
        second = math.floor(self.at)
        device = LoadActivity() if self.mig_enabled else self._activity_of(second)

        instances: dict[int, LoadActivity] = {}
        for instance in self.instances:
            activity = self._activity_of(second, instance.gi_id)
            instances[instance.gi_id] = activity
            compute = instance.profile.compute_slices / model.compute_slices
            memory = instance.profile.memory_slices / model.memory_slices
            device = device.plus(activity, compute, memory)
        return GpuActivity(device, instances, compute_watts(model, device))

    def _activity_of(self, second: int, gi_id: int | None = None) -> LoadActivity:
        loads = self.running(gi_id)
        parts = split_busy(loads, second)
        # A sum of fractions may be 1.0000000000000002.
        busy = min(1.0, sum(parts))

        tensor = 0.0
        for load, part in zip(loads, parts, strict=True):
            tensor += load.tensor * part

        return LoadActivity(busy, tensor, DRAM * busy)

    def running(self, gi_id: int | None = None) -> list[SimulatedLoad]:
        running = [placed.load for placed in self.loads if placed.is_running]
        if gi_id is None:
            return running
        return [load for load in running if load.gi_id == gi_id]

    def memory_used(self, gi_id: int | None = None) -> int:
        return sum(load.memory for load in self.running(gi_id))

    def place(self, load: SimulatedLoad) -> None:
        self.loads.append(PlacedLoad(load, self.at))

    def evict(self, pid: int) -> int:
        """Ends the loads of a process and returns their number."""
        ended = 0
        for placed in self.loads:
            if placed.is_running and placed.load.pid == pid:
                placed.until = self.at
                ended += 1

        oldest = self.at - SAMPLE_BUFFER
        self.loads = [placed for placed in self.loads if placed.until > oldest]
        return ended

    def set_instances(self, instances: tuple[SimulatedInstance, ...] | None) -> None:
        """Replaces the MIG instances and ends all loads. None disables MIG."""
        self.mig_enabled = instances is not None
        self.instances = instances or ()
        self._end_loads()

    def reset(self) -> None:
        """Ends all loads, resets the counters and clears the recovery action.

        The MIG layout stays, as with `nvidia-smi --gpu-reset`.
        """
        self.energy = 0.0
        self.idle_seconds = 0.0
        self.meter = LoadActivity()
        self.recovery = 0
        self._end_loads()

    def _end_loads(self) -> None:
        self.loads = []
        self.instance_meters = {instance.gi_id: LoadActivity() for instance in self.instances}

    def samples(self, since_us: int) -> list[UtilisationSample]:
        """Returns the buffered samples after `since_us` (Unix time), oldest first."""
        oldest = math.floor((self.at - SAMPLE_BUFFER) * SAMPLES_PER_SECOND) + 1
        # Begins one sample early, because rounding could skip a sample. The condition removes a
        # superfluous sample.
        since = since_us / 1e6 - self.epoch
        first = math.floor(since * SAMPLES_PER_SECOND)
        last = math.floor(self.at * SAMPLES_PER_SECOND)

        samples = []
        for index in range(max(oldest, first), last + 1):
            sample = self._sample(index)
            if sample.wall_us > since_us:
                samples.append(sample)
        return samples

    def process_means(self, since_us: int) -> Iterator[tuple[int, int, float]]:
        """Yields the pid of each process, the time when it last ran, and its mean utilisation.

        The time is that of a sample. The mean is over all samples after `since_us`. Idle and ended
        processes are omitted, as the driver does.
        """
        samples = self.samples(since_us)
        pids = dict.fromkeys(load.pid for load in self.running())
        for pid in pids:
            ran = [sample for sample in samples if sample.shares.get(pid)]
            if not ran:
                continue

            total = sum(sample.shares[pid] for sample in ran)
            last_ran = ran[-1].wall_us
            yield pid, last_ran, total / len(samples)

    def _sample(self, index: int) -> UtilisationSample:
        moment = index / SAMPLES_PER_SECOND
        loads = [placed.load for placed in self.loads if placed.since < moment <= placed.until]

        second = math.floor((index - 0.5) / SAMPLES_PER_SECOND)
        parts = split_busy(loads, second)
        shares = {load.pid: part for load, part in zip(loads, parts, strict=True)}

        wall_us = int((moment + self.epoch) * 1e6)
        return UtilisationSample(wall_us, shares)
