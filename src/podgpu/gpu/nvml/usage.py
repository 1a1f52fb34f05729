"""UsageReader tells how one GPU was used since it was last asked: busy time, energy, memory, processes; MIG or not.

Knows pids, nanoseconds, millijoules and bytes. Whose they are is accounting's to find out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from podgpu.gpu.nvml.attempts import Attempts
from podgpu.gpu.nvml.busy import Busy, BusyWindows, InstanceBusy
from podgpu.gpu.nvml.driver import NvmlDriver
from podgpu.gpu.nvml.energy import Energy, EnergyCounter, EnergyMeter
from podgpu.gpu.nvml.mig import Instance
from podgpu.gpu.source import UsageFlaws
from podgpu.model import Device, DeviceUsage, ProcessUsage

if TYPE_CHECKING:
    from podgpu.gpu.nvml.switches.division import BusyDivision
    from podgpu.gpu.nvml.switches.opening import Opening, Outlook

_MEMORY = "nvmlDeviceGetMemoryInfo"
_PROCESS_LIST = "process list"

ReadProcesses = Callable[[], Sequence[ProcessUsage]]


class UsageReader:
    """Reading after reading of one GPU. Its other readers share the energy counter with it: it may have its own worker.

    Without `sees_processes` (podgpu is not in the host's PID namespace) no call about processes is made at all.
    """

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        *,
        sees_processes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        opening: Opening | None = None,
        energy: EnergyCounter | None = None,
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._sees_processes = sees_processes
        self._clock = clock
        self._wall = wall
        self._attempts = Attempts()
        self._counter = energy or EnergyCounter(driver, handle, clock)
        self._energy = self._new_meter()
        self._topology: tuple[bool, tuple[Instance, ...]] | None = None
        self._was_cut: bool | None = None
        """Whether MIG was on when it was last read."""
        self._anybody = True
        """Whether a process was listed when they were last read, as far as is known."""
        self._memory: int | None = None
        """In use when it was last read, just before processes were listed; None: not known, or not all that tells."""
        self._windows = self._new_windows()
        self._instances: dict[int, InstanceBusy] = {}
        self._division = self._new_division(opening)

    @property
    def flaws(self) -> UsageFlaws:
        """What the last reading had to leave out."""
        attempts = self._attempts
        division = self._division
        return UsageFlaws(
            tuple(attempts.dropped),
            tuple(attempts.errors),
            attempts.lacks,
            tuple(division.doubts) if division is not None else (),
            division is not None,
            division.fallback if division is not None else "",
        )

    def read(
        self,
        device: Device,
        instances: tuple[Instance, ...],
        processes: ReadProcesses,
        shared: Collection[str] = (),
    ) -> tuple[DeviceUsage, ...]:
        """The GPU, then its instances. Raises DeviceLost or DriverGone; anything smaller costs only its own figure."""
        self._attempts.begin()
        self._follow(device.mig_enabled, instances)
        memory = self._read_memory(_MEMORY, self._handle)
        self._memory = None if device.mig_enabled else memory
        running = self._read_processes(processes)
        anybody, self._anybody = self._anybody, running is None or bool(running)
        if self._division is not None:
            self._division.begin(device, running, shared)
        parts = [self._read_instance(device, instance, running) for instance in instances]
        busy = Busy() if device.mig_enabled else self._windows.read(anybody or self._anybody)
        # Last: it takes 5 to 20 ms, and should tell of the same time as the busy windows that end now.
        energy = self._energy.read(None if running is None else frozenset(process.pid for process in running))
        return (self._divided(_usage(device, busy, memory, running, energy), busy.until), *parts)

    def _divided(self, usage: DeviceUsage, until: float | None) -> DeviceUsage:
        """With the busy time as context switches tell it, where they do."""
        return usage if self._division is None else self._division.divide(usage, until)

    def is_quiet(self) -> bool:
        """Whether as much memory is in use as when it was last read, to the byte: nobody comes or goes without any.
        It takes the driver 0.01 ms, a reading 5. Raises SourceError."""
        if self._memory is None:
            return False
        version = self._driver.constant("nvmlMemory_v2")
        return bool(self._driver.call(_MEMORY, self._handle, version).used == self._memory)

    def outlook(self, device: Device, opening: Opening) -> Outlook:
        """How it would be told apart if containers shared it."""
        from podgpu.gpu.nvml.switches.division import identify

        return opening.outlook(device, *identify(self._driver, self._handle, device))

    def close(self) -> None:
        """Lets go of what the driver holds for it; the next reading goes on from the last all the same."""
        for instance in self._instances.values():
            instance.close()
        self._instances = {}
        if self._division is not None:
            self._division.close()
        self._memory = None
        self._was_cut = None if self._topology is None else self._topology[0]
        self._topology = None

    def begin_anew(self) -> None:
        """The GPU was away: what it tells next has nothing to do with what it told last."""
        self.close()
        self._windows = self._new_windows()
        self._counter.forget()
        self._energy = self._new_meter()

    def _new_division(self, opening: Opening | None) -> BusyDivision | None:
        """None, and nothing loaded for it, where the driver's samples are all that is wanted."""
        if opening is None or opening.wanted == "samples":
            return None
        from podgpu.gpu.nvml.switches.division import BusyDivision

        return BusyDivision(self._driver, self._handle, opening, self._clock, self._wall)

    def _new_meter(self) -> EnergyMeter:
        return EnergyMeter(self._driver, self._handle, self._attempts, self._clock, self._counter)

    def _new_windows(self) -> BusyWindows:
        return BusyWindows(self._driver, self._handle, self._attempts, self._sees_processes, self._clock, self._wall)

    def _follow(self, mig_enabled: bool, instances: tuple[Instance, ...]) -> None:
        if self._topology == (mig_enabled, instances):
            return
        self.close()
        self._attempts.forget()
        if self._was_cut is not None and self._was_cut != mig_enabled:
            self._windows = self._new_windows()
        self._instances = {
            i.gi_id: InstanceBusy(self._driver, self._handle, i.gi_id, self._attempts, self._clock) for i in instances
        }
        self._topology = (mig_enabled, instances)

    def _read_processes(self, processes: ReadProcesses) -> Sequence[ProcessUsage] | None:
        return self._attempts.of(_PROCESS_LIST, processes) if self._sees_processes else None

    def _read_instance(self, gpu: Device, instance: Instance, running: Sequence[ProcessUsage] | None) -> DeviceUsage:
        memory = self._read_memory(f"{_MEMORY} gi{instance.gi_id}", instance.handle)
        busy = self._instances[instance.gi_id].read()
        return self._divided(_usage(instance.device(gpu), busy, memory, running), self._wall())

    def _read_memory(self, part: str, handle: Any) -> int | None:
        version = self._driver.constant("nvmlMemory_v2")
        answer = self._attempts.of(part, lambda: self._driver.call(_MEMORY, handle, version))
        return None if answer is None else self._attempts.within(part, answer.used, answer.total)


def _usage(
    device: Device,
    busy: Busy,
    memory: int | None,
    running: Sequence[ProcessUsage] | None,
    energy: Energy = Energy(),  # noqa: B008 - a tuple
) -> DeviceUsage:
    return DeviceUsage(
        device,
        busy.window_ns,
        busy_ns=busy.busy_ns,
        energy_mj=energy.used,
        energy_estimate_nj=energy.estimate,
        energy_since_nj=energy.since,
        power_mw=energy.power_mw,
        memory_used=memory,
        processes=None if running is None else tuple(p for p in running if p.device == device.key),
        process_busy_ns=busy.process_ns,
    )
