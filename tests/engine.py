"""Simulates the compute engine of a shared GPU, which runs bursts of work of one context at a time.

Behaves as measured on an H200. A context stays resident after its work until another one has work.
Competing contexts get time slices of 2.1 ms. A switch takes 84 µs, and the new context starts to
work 45 µs later. Saving the old context takes longer if it was preempted. Bursts start at fixed
times, so that they can synchronize with the driver's sampling. `SimulatedSwitchLog` writes the
driver's records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from podgpu.labs.simulate.gpu import (
    SAMPLES_PER_SECOND,
    SimulatedGpu,
    SimulatedInstance,
    SimulatedLoad,
    UtilisationSample,
)
from podgpu.node.gpu.nvml.switch_attribution import (
    FECS_RECORD,
    RECORD,
    SAVED,
    SWITCHED_IN,
    WHOLE_GPU,
)

SWITCH_NS = 84_000
RESTORE_NS = 45_000
IDLE_SAVE_NS = 19_000
WORKING_SAVE_NS = 94_000
SLICE_NS = 2_100_000
LAUNCH_NS = 10_000  # time until a process submits new work after it has finished
SAMPLE_NS = 10**9 // SAMPLES_PER_SECOND
_KEPT_NS = 30 * 10**9
_GPU_CLOCK_LAG_NS = (
    1_000_000  # how far the GPU's clock is behind the system clock; on an H200 it drifts by 7 µs/s
)


@dataclass(frozen=True, slots=True)
class Bursts:
    """A process that works for `work` nanoseconds every `period`, starting at `first`. A burst is
    delayed until the previous one has finished.
    """

    pid: int
    work: int
    period: int
    first: int = 0


class EngineSwitch(NamedTuple):
    at: int
    tag: int
    pid: int


class EngineFault(NamedTuple):
    """What happens on the engine when a process causes an XID.

    Measured on an H200: XID 43 ends the context some milliseconds after the launch. After XID 13
    and 31, the driver resets the engine: another context is switched in 217 to 295 ms later, and
    the log of two thirds of the faults does not show that the failed context was saved.
    """

    work: int  # nanoseconds from the launch to the error
    empty: int  # nanoseconds without any context afterwards
    is_saved: bool


class EngineSample(NamedTuple):
    """The driver's sample at the end of one period."""

    busy_ns: int  # busy time within the period
    pid: (
        int | None
    )  # process that was busy at the end of the period, or the last one that was busy before


class Engine:
    """The engine's state at the time `now` (nanoseconds). `advance` moves it forward."""

    def __init__(self, now: int = 0, slice_ns: int = SLICE_NS) -> None:
        self.now = now
        self.slice_ns = slice_ns
        self.worked: dict[int, int] = {}  # pid -> nanoseconds of work, to compare estimates with
        self.waited: dict[
            int, int
        ] = {}  # pid -> nanoseconds with work while another process or a switch had the engine
        self.busy_ns = 0
        self._loads: dict[int, Bursts] = {}
        self._next: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._resident: int | None = None
        self._works_from = 0
        self._slice_ends = 0
        self.switched = 0  # number of saves and switch-ins
        self._is_busy = False
        self._ran: int | None = None
        self._period_busy = 0
        self._samples: dict[int, EngineSample] = {}
        self._switches: deque[EngineSwitch] = deque()
        self._faults: dict[int, EngineFault] = {}
        self.failed: dict[int, int] = {}  # when each process that failed caused its error
        self._empty_until = 0

    def start(self, load: Bursts) -> None:
        self._loads[load.pid] = load
        self._next[load.pid] = max(self.now, load.first)
        self._left.setdefault(load.pid, 0)

    def stop(self, pid: int) -> None:
        """Kills the process."""
        self._loads.pop(pid, None)
        self._next.pop(pid, None)
        self._left.pop(pid, None)

    def fail(self, pid: int, fault: EngineFault) -> None:
        """Launches a kernel that fails, after the current work of the process."""
        self._loads.pop(pid, None)
        self._next.pop(pid, None)
        self._left[pid] += fault.work
        self._faults[pid] = fault

    def unload(self, nanoseconds: int) -> None:
        """Runs no context for a while, because a process creates or destroys one."""
        if self._resident is not None:
            self._record(SAVED, self._resident)
            self._resident = None
        self._empty_until = max(self._empty_until, self.now + nanoseconds)

    def switches(self, first: int) -> list[EngineSwitch]:
        """Returns the switches from number `first` on, without those that were already removed."""
        return list(self._switches)[max(0, first - (self.switched - len(self._switches))) :]

    def is_busy(self) -> bool:
        return self._is_busy

    def sample(self, number: int) -> EngineSample:
        return self._samples.get(number, EngineSample(0, None))

    def advance(self, until: int) -> None:
        while self.now < until:
            self._arrive()
            self._step(until)
        oldest = (until - _KEPT_NS) // SAMPLE_NS
        for number in [number for number in self._samples if number < oldest]:
            del self._samples[number]
        while self._switches and self._switches[0].at < until - _KEPT_NS:
            self._switches.popleft()

    def _arrive(self) -> None:
        for pid, load in self._loads.items():
            if self._next[pid] <= self.now and not self._left[pid]:
                self._left[pid] = load.work
                self._next[pid] += load.period

    def _step(self, until: int) -> None:
        if self.now < self._empty_until:
            self._pass(min(until, self._empty_until), False)
            return
        if self._resident in self._faults and not self._left[self._resident]:
            self._break_down(self._resident)
            return
        waiting = [pid for pid, left in self._left.items() if left > 0 and pid != self._resident]
        mine = self._left.get(self._resident, 0) if self._resident is not None else 0
        arrival = min((at for pid, at in self._next.items() if not self._left[pid]), default=until)
        if waiting and (mine == 0 or self.now >= self._slice_ends):
            self._switch(self._after(waiting))
        elif mine:
            done_at = max(self.now, self._works_from) + mine
            slice_end = self._slice_ends if waiting or arrival < self._slice_ends else done_at
            self._pass(
                min(
                    until,
                    done_at,
                    max(slice_end, self.now + 1) if waiting else max(arrival, self.now + 1),
                ),
                True,
            )
        else:
            self._pass(min(until, max(arrival, self.now + 1)), False)

    def _break_down(self, pid: int) -> None:
        fault = self._faults.pop(pid)
        self.failed[pid] = self.now
        if fault.is_saved:
            self._enter(self.now + IDLE_SAVE_NS, None, True)
            self._record(SAVED, pid)
        self._resident = None
        self._empty_until = self.now + fault.empty

    def _after(self, waiting: list[int]) -> int:
        """Selects the next process round-robin."""
        order = sorted(waiting)
        return next(
            (pid for pid in order if self._resident is not None and pid > self._resident), order[0]
        )

    def _switch(self, pid: int) -> None:
        if self._resident is not None:
            self._enter(
                self.now + (WORKING_SAVE_NS if self._left.get(self._resident) else IDLE_SAVE_NS),
                None,
                True,
            )
            self._record(SAVED, self._resident)
            self._enter(self.now + SWITCH_NS, None, True)
        self._resident = pid
        self._record(SWITCHED_IN, pid)
        self._works_from = self.now + RESTORE_NS
        self._slice_ends = self.now + self.slice_ns

    def _pass(self, end: int, busy: bool) -> None:
        if busy and self._resident is not None:
            work = min(self._left[self._resident], max(0, end - max(self.now, self._works_from)))
            self._left[self._resident] -= work
            if not self._left[self._resident] and self._resident in self._next:
                self._next[self._resident] = max(self._next[self._resident], end + LAUNCH_NS)
            self.worked[self._resident] = self.worked.get(self._resident, 0) + work
        self._enter(end, self._resident, busy)

    def _enter(self, end: int, pid: int | None, busy: bool) -> None:
        """Advances to `end` in this state, and takes a sample at the end of every period."""
        self._is_busy = busy
        self._ran = pid if busy and pid is not None else self._ran
        self.busy_ns += (end - self.now) * busy
        for other, left in self._left.items():
            if left and other != pid:
                self.waited[other] = self.waited.get(other, 0) + end - self.now
        while (sampled_at := (self.now // SAMPLE_NS + 1) * SAMPLE_NS) <= end:
            self._period_busy += (sampled_at - self.now) * busy
            self._samples[sampled_at // SAMPLE_NS] = EngineSample(self._period_busy, self._ran)
            self._period_busy, self.now = 0, sampled_at
        self._period_busy += (end - self.now) * busy
        self.now = end

    def _record(self, tag: int, pid: int) -> None:
        self._switches.append(EngineSwitch(self.now, tag, pid))
        self.switched += 1


class SimulatedSwitchLog:
    """The context-switch log of one simulated GPU. Each GPU instance has its own engine."""

    def __init__(
        self,
        engines: Callable[[], Mapping[int | None, Engine]],
        gpu_time: Callable[[int], int],
        lock: AbstractContextManager[Any],
    ) -> None:
        """`engines`: returns the current engines by GPU instance, with the key None without MIG.

        `gpu_time`: converts the time of engines to the GPU's clock.
        """
        self._engines = engines
        self._gpu_time = gpu_time
        self._lock = lock
        self._read = {instance: engine.switched for instance, engine in engines().items()}
        self._number = 0
        self.closed = False

    def drain(self) -> bytes:
        with self._lock:
            engines = self._engines()
            switches = [
                (
                    switch,
                    WHOLE_GPU if instance is None else instance,
                    WHOLE_GPU if instance is None else 0,
                )
                for instance, engine in engines.items()
                for switch in engine.switches(self._read.get(instance, 0))
            ]
            self._read = {instance: engine.switched for instance, engine in engines.items()}
        return b"".join(self._pack(switch, *where) for switch, *where in sorted(switches))

    def now(self) -> int:
        return self._gpu_time(max(engine.now for engine in self._engines().values()))

    def is_busy(self) -> bool:
        return any(engine.is_busy() for engine in self._engines().values())

    def close(self) -> None:
        self.closed = True

    def _pack(self, switch: EngineSwitch, instance: int, compute_instance: int) -> bytes:
        number, self._number = self._number, (self._number + 1) % (1 << 16)
        at = self._gpu_time(switch.at)
        where = (instance, compute_instance)
        return RECORD.pack(
            FECS_RECORD, 0, 0, switch.tag, 0, number, switch.pid, switch.pid, 0, *where, at
        )


class BurstLoad(SimulatedLoad):
    """A load that competes for the engine and is sampled."""

    __slots__ = ()

    def make_bursts(self, now: float) -> Bursts:
        period = int(self.period * 1e9)
        first = -int(self.phase * 1e9) % period
        late = max(0, int(now * 1e9) - first)
        return Bursts(
            self.pid, int(self.duty * period), period, first + -(-late // period) * period
        )


@dataclass(eq=False)
class BurstGpu(SimulatedGpu):
    """A GPU that runs `BurstLoad`s on its engines."""

    engines: dict[int | None, Engine] = field(default_factory=dict)
    """GPU instance (None without MIG) -> engine."""

    def advance(self, now: float) -> None:
        super().advance(now)
        for engine in self.engines.values():
            engine.advance(int(self.at * 1e9))

    def place(self, load: SimulatedLoad) -> None:
        super().place(load)
        if isinstance(load, BurstLoad):
            engine = self.engines.setdefault(load.gi_id, Engine(int(self.at * 1e9)))
            engine.start(load.make_bursts(self.at))

    def evict(self, pid: int) -> int:
        for engine in self.engines.values():
            engine.stop(pid)
        return super().evict(pid)

    def set_instances(self, instances: tuple[SimulatedInstance, ...] | None) -> None:
        super().set_instances(instances)
        self.engines = {}

    def reset(self) -> None:
        for load in self.running():
            self.evict(load.pid)
        super().reset()

    def _sample(self, index: int) -> UtilisationSample:
        """Attributes the busy time of the period to the process that ran at its end, as the driver
        does.
        """
        if None not in self.engines:
            return super()._sample(index)
        moment, sample = index / SAMPLES_PER_SECOND, self.engines[None].sample(index)
        pids = [
            r.load.pid
            for r in self.loads
            if r.since < moment <= r.until and r.load.pid == sample.pid
        ]
        return UtilisationSample(
            int((moment + self.epoch) * 1e6), dict.fromkeys(pids, sample.busy_ns / SAMPLE_NS)
        )


def open_log(driver: Any, uuid: str) -> SimulatedSwitchLog:
    """Opens the context-switch log of a simulated GPU."""
    gpu = next(gpu for gpu in driver.gpus if gpu.uuid == uuid)

    def engines() -> Mapping[int | None, Engine]:
        with driver.lock:
            return dict(driver.advance(gpu).engines) or {None: Engine(int(gpu.at * 1e9))}

    return SimulatedSwitchLog(
        engines, lambda moment: moment + int(gpu.epoch * 1e9) - _GPU_CLOCK_LAG_NS, driver.lock
    )
