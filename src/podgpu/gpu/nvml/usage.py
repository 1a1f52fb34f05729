"""Reads how one GPU was used since the last reading: busy time, energy, memory and processes, with or without MIG.

The driver samples the GPU about five times per second, with timestamps in Unix microseconds (H200, driver 580). For
each process it returns the mean utilization over all samples since a given time. Windows begin and end at the driver's
timestamps, so that irregular readings neither count time twice nor lose it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, translate
from podgpu.gpu.nvml.mig import Instance
from podgpu.gpu.nvml.plan import ENERGY, MIN_GPM_SECONDS, EnergyCounter, GpmSampler
from podgpu.gpu.nvml.processes import MAX_PID
from podgpu.gpu.nvml.switch_splitter import BusyTimeSplitter, SwitchLogFactory
from podgpu.gpu.source import Lack, UsageFlaws
from podgpu.model import Device, DeviceUsage, ProcessUsage

T = TypeVar("T")
Number = TypeVar("Number", int, float)
_MEMORY = "nvmlDeviceGetMemoryInfo"
_PROCESS_LIST = "process list"
_SAMPLES = "nvmlDeviceGetSamples"
_RATES = "nvmlDeviceGetUtilizationRates"
_PROCESSES = "nvmlDeviceGetProcessUtilization"
_NEWER_PROCESSES = "nvmlDeviceGetProcessesUtilizationInfo"
"""Returns the same figures as `_PROCESSES`. Some Blackwell GPUs support only this function."""
_GPM = "nvmlGpmMetricsGet"
_POWER = "nvmlDeviceGetPowerUsage"
_LACKS: Mapping[str, Lack] = {
    _NEWER_PROCESSES: "no_process_utilization",
    ENERGY: "no_energy",
    _MEMORY: "no_memory",
    _GPM: "no_instance_utilization",
    _PROCESS_LIST: "no_process_list",
}
"""Prefix of an unsupported part -> the figure that is then missing. Other parts have a substitute."""


class PartReader:
    """Makes the driver calls ("parts") of a reading. Unsupported parts are not read again. Errors affect only their
    part."""

    def __init__(self) -> None:
        self.unsupported: set[str] = set()
        self.errors: list[str] = []
        """Reason words of the current reading."""
        self.dropped: list[str] = []
        """Parts without a plausible value in the current reading."""

    def begin(self) -> None:
        self.errors.clear()
        self.dropped.clear()

    @property
    def lacks(self) -> tuple[tuple[str, Lack], ...]:
        parts = (
            (part, lack)
            for part in sorted(self.unsupported)
            for start, lack in _LACKS.items()
            if part.startswith(start)
        )
        return tuple(parts)

    def read(self, part: str, call: Callable[[], T]) -> T | None:
        """Returns None if the part is unsupported or failed. Raises DeviceLost and DriverGone."""
        if part in self.unsupported:
            return None
        try:
            return call()
        except Unsupported:
            self.unsupported.add(part)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            self.errors.append(e.reason)
        return None

    def check(self, part: str, value: Number, most: Number) -> Number | None:
        """Returns the value if it is between 0 and `most`. Otherwise records it as dropped and returns None."""
        if 0 <= value <= most:
            return value
        self.dropped.append(part)
        return None


_SECOND_US = 1_000_000
_MAX_WINDOW_US = 60 * _SECOND_US
_MAX_SILENCE_US = 10 * _SECOND_US
"""The driver also samples an idle GPU. If there is no sample for this long, the busy time is unknown."""
_SLACK_US = 2 * _SECOND_US
"""Maximum age of the driver's newest sample."""
_NO_ENTRIES = frozenset({"not_found", "nvml_0"})
"""Error words that mean an empty list: NOT_FOUND, and pynvml's error if the driver succeeds without entries."""
_GRAPHICS_UTIL = 1
_MAX_GPM_PERCENT = 101.0  # GPM slightly exceeds 100 % at full load


class BusyTime(NamedTuple):
    window_ns: int = 0
    busy_ns: int | None = None
    process_ns: dict[int, int | None] | None = None
    until: float | None = None
    """Unix time of the window's end."""


class BusyWindows:
    """Busy time of a whole GPU and its processes, window by window."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        parts: PartReader,
        sees_processes: bool,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._parts = parts
        self._sees_processes = sees_processes
        self._clock = clock
        self._wall = wall
        self._start: tuple[int, float] | None = None
        """Start of the next window: the driver's timestamp, and a monotonic time that is not later."""

    def read(self) -> BusyTime:
        now = self._clock()
        since, clock = self._start or (self._now_us() - _SECOND_US, now - 1.0)
        samples = self._parts.read(_SAMPLES, lambda: self._read_samples(since))
        end = self._find_end(since, samples)
        if end == since:
            self._start = since, clock
            is_silent = self._now_us() - since > _MAX_SILENCE_US
            return BusyTime() if is_silent else BusyTime(0, 0, {} if self._reads_processes() else None)
        self._start = end, now
        elapsed_us = int((self._clock() - clock) * 1e6)
        if not 0 < end - since <= min(_MAX_WINDOW_US, elapsed_us + _SLACK_US):
            return BusyTime()  # unknown: the clock was set, the machine slept, or a call hung
        window_ns = (end - since) * 1000
        busy = self._compute_busy(samples, window_ns)
        processes = self._read_process_busy(since, window_ns, is_idle=busy == 0)
        return BusyTime(window_ns, busy, processes, end / 1e6)

    def _find_end(self, since: int, samples: list[Any] | None) -> int:
        if samples:
            return max(int(sample.timeStamp) for sample in samples)
        now = self._now_us()
        was_set_back = since - now > _SLACK_US
        return now if samples is None or was_set_back else since

    def _now_us(self) -> int:
        return int(self._wall() * 1e6)

    def _read_samples(self, since: int) -> list[Any]:
        kind = self._driver.constant("NVML_GPU_UTILIZATION_SAMPLES")
        try:
            _, samples = self._driver.call_list(_SAMPLES, self._handle, kind, since)
        except SourceError as e:
            if e.reason == "not_found":
                return []
            raise
        return [sample for sample in samples if sample.timeStamp > since]

    def _compute_busy(self, samples: list[Any] | None, window_ns: int) -> int | None:
        if samples is None:
            return self._compute_busy_from_rate(window_ns) if _SAMPLES in self._parts.unsupported else None
        values = [self._parts.check(_SAMPLES, sample.sampleValue.uiVal, 100) for sample in samples]
        valid = [value for value in values if value is not None]
        return sum(valid) * window_ns // (100 * len(valid)) if len(valid) == len(values) else None

    def _compute_busy_from_rate(self, window_ns: int) -> int | None:
        """Uses the utilization of the last sampling period for the whole window, for drivers without samples."""
        rate = self._parts.read(_RATES, lambda: self._driver.call(_RATES, self._handle).gpu)
        valid = None if rate is None else self._parts.check(_RATES, rate, 100)
        return None if valid is None else valid * window_ns // 100

    def _reads_processes(self) -> bool:
        return self._sees_processes and not {_PROCESSES, _NEWER_PROCESSES} <= self._parts.unsupported

    def _read_process_busy(self, since: int, window_ns: int, is_idle: bool) -> dict[int, int | None] | None:
        if not self._reads_processes():
            return None
        if is_idle:
            return {}  # saves a call that costs 1.9 ms of CPU
        entries = self._parts.read(_PROCESSES, lambda: self._read_entries(_PROCESSES, since))
        if _PROCESSES in self._parts.unsupported:
            entries = self._parts.read(_NEWER_PROCESSES, lambda: self._read_entries(_NEWER_PROCESSES, since))
        if entries is None:
            return None
        busy: dict[int, int | None] = {}
        for entry in entries:
            if 0 < entry.pid <= MAX_PID and entry.timeStamp > since:
                percent = self._parts.check(_PROCESSES, entry.smUtil, 100)
                busy[entry.pid] = None if percent is None else percent * window_ns // 100
        return busy

    def _read_entries(self, function: str, since: int) -> list[Any]:
        try:
            return list(self._driver.call_list(function, self._handle, since))
        except SourceError as e:
            if e.reason in _NO_ENTRIES:
                return []
            raise


class InstanceBusy:
    """Busy time of one MIG instance: GPM's graphics activity. NVML has no figures per process in MIG mode."""

    def __init__(
        self, driver: NvmlDriver, handle: Any, gi_id: int, parts: PartReader, clock: Callable[[], float]
    ) -> None:
        self._gpm = GpmSampler(driver, lambda sample: driver.call("nvmlGpmMigSampleGet", handle, gi_id, sample))
        self._part = f"{_GPM} gi{gi_id}"
        self._parts = parts
        self._clock = clock
        self._last_at: float | None = None

    def read(self) -> BusyTime:
        return self._parts.read(self._part, self._read) or BusyTime()

    def _read(self) -> BusyTime:
        now, before = self._clock(), self._last_at
        if before is not None and now - before < MIN_GPM_SECONDS:
            return BusyTime(0, 0)
        code, percent = self._gpm.read([_GRAPHICS_UTIL], now).get(_GRAPHICS_UTIL, (pynvml.NVML_SUCCESS, 0.0))
        self._last_at = now
        if code:
            raise translate(code, _GPM)
        if before is None:
            return BusyTime()
        # The times are rounded, not their difference, so that rounding errors of windows do not add up.
        window_ns = int(now * 1e9) - int(before * 1e9)
        valid = self._parts.check(self._part, percent, _MAX_GPM_PERCENT)
        return BusyTime(window_ns, None if valid is None else round(min(valid, 100.0) * window_ns / 100))

    def close(self) -> None:
        self._gpm.close()
        self._last_at = None


ENERGY_SECONDS = 5.0
"""Interval of energy readings while processes stay the same."""
_SHARED_SECONDS = 1.0
"""A telemetry reading of the counter is used instead of a new one if it is younger than this."""
_EARLY_SECONDS = 0.5  # tolerance: a turn may read the counter this much before the interval ends
_MAX_WATTS = 5000
_MAX_COUNTER_MJ = 1 << 62  # a larger value is NVML's sentinel
_COUNTER_STEP_SECONDS = 1.0  # the counter may lag by this much and then catch up in one step


class EnergyReading(NamedTuple):
    used_mj: int | None = None
    """Energy since the previous reading of the counter. None if not read in this turn, or unknown."""
    power_mw: int | None = None


class EnergyMeter:
    """Reads power in every turn, and the energy counter every 5 s or when processes change."""

    def __init__(
        self, driver: NvmlDriver, handle: Any, counter: EnergyCounter, parts: PartReader, clock: Callable[[], float]
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._counter = counter
        self._parts = parts
        self._clock = clock
        self._last: tuple[float, int] | None = None
        """Time and value of the last reading."""
        self._has_result = False
        self._pids: Collection[int] | None = None

    def read(self, pids: Collection[int] | None = None) -> EnergyReading:
        """`pids`: processes on the GPU, None if not visible."""
        now = self._clock()
        power = self._read_power()
        changed, self._pids = pids != self._pids, pids
        # The first result must not be delayed. Without power readings, energy cannot be divided among turns.
        if changed or not self._has_result or power is None or self._last is None:
            return EnergyReading(self._read_counter(max_age=0.0), power)
        if now - self._last[0] >= ENERGY_SECONDS - _EARLY_SECONDS:
            return EnergyReading(self._read_counter(_SHARED_SECONDS), power)
        return EnergyReading(None, power)

    def _read_counter(self, max_age: float) -> int | None:
        reading = self._parts.read(ENERGY, lambda: self._counter.read(max_age))
        if reading is None or self._parts.check(ENERGY, reading[1], _MAX_COUNTER_MJ) is None:
            return None
        timestamp, value = reading[0], int(reading[1])
        before, self._last, self._has_result = self._last, (timestamp, value), False
        if before is None or value < before[1]:
            return None
        most = int(_MAX_WATTS * 1000 * (timestamp - before[0] + _COUNTER_STEP_SECONDS))
        used = self._parts.check(ENERGY, value - before[1], most)
        self._has_result = used is not None
        return used

    def _read_power(self) -> int | None:
        """Returns milliwatts. Errors are not reported, because power is only used to divide energy among turns."""
        try:
            power = self._driver.call(_POWER, self._handle)
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            return None
        return int(power) if 0 < power <= _MAX_WATTS * 1000 else None


class UsageReader:
    """Reads the usage of one GPU and its instances. Called from one worker.

    `sees_processes` must be False if podgpu is not in the host's PID namespace. Then no processes are read.
    """

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        energy: EnergyCounter,
        *,
        sees_processes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        switch_logs: SwitchLogFactory | None = None,
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._sees_processes = sees_processes
        self._clock = clock
        self._wall = wall
        self._parts = PartReader()
        self._counter = energy
        self._energy = self._new_energy()
        self._windows = self._new_windows()
        self._layout: tuple[bool, tuple[Instance, ...]] | None = None
        self._was_in_mig: bool | None = None
        self._instances: dict[int, InstanceBusy] = {}
        self._splitter: BusyTimeSplitter | None = None
        if switch_logs is not None and switch_logs.wanted != "samples":
            self._splitter = BusyTimeSplitter(driver, handle, switch_logs, clock, wall)

    @property
    def flaws(self) -> UsageFlaws:
        """Figures that the last reading lacks."""
        parts, splitter = self._parts, self._splitter
        return UsageFlaws(
            tuple(parts.dropped),
            tuple(parts.errors),
            parts.lacks,
            tuple(splitter.errors) if splitter is not None else (),
            splitter is not None,
            splitter.fallback if splitter is not None else "",
        )

    def read(
        self,
        device: Device,
        instances: tuple[Instance, ...],
        read_processes: Callable[[], Sequence[ProcessUsage]],
        shared: Collection[str] = (),
    ) -> tuple[DeviceUsage, ...]:
        """Returns the GPU, then its instances. Raises DeviceLost or DriverGone; other errors affect only their part."""
        self._parts.begin()
        self._follow_layout(device.mig_enabled, instances)
        memory = self._read_memory(_MEMORY, self._handle)
        running = self._parts.read(_PROCESS_LIST, read_processes) if self._sees_processes else None
        if self._splitter is not None:
            self._splitter.begin_turn(device, running, shared)
        usages = [self._read_instance(device, instance, running) for instance in instances]
        busy = BusyTime() if device.mig_enabled else self._windows.read()
        # Energy is read last, because it takes 5 to 20 ms and should cover the same time as the busy windows.
        energy = self._energy.read(None if running is None else frozenset(process.pid for process in running))
        return (self._split(_make_usage(device, busy, memory, running, energy), busy.until), *usages)

    def close(self) -> None:
        """Frees the driver's resources. The next reading continues from the last one."""
        for instance in self._instances.values():
            instance.close()
        self._instances = {}
        if self._splitter is not None:
            self._splitter.close()
        if self._layout is not None:
            self._was_in_mig = self._layout[0]
        self._layout = None

    def reset(self) -> None:
        """Starts new windows after the GPU was unavailable, because its counters may have been reset."""
        self.close()
        self._windows = self._new_windows()
        self._energy = self._new_energy()

    def _new_energy(self) -> EnergyMeter:
        return EnergyMeter(self._driver, self._handle, self._counter, self._parts, self._clock)

    def _new_windows(self) -> BusyWindows:
        return BusyWindows(self._driver, self._handle, self._parts, self._sees_processes, self._clock, self._wall)

    def _follow_layout(self, mig_enabled: bool, instances: tuple[Instance, ...]) -> None:
        if self._layout == (mig_enabled, instances):
            return
        self.close()
        self._parts.unsupported.clear()
        if self._was_in_mig is not None and self._was_in_mig != mig_enabled:
            self._windows = self._new_windows()
        self._instances = {
            i.gi_id: InstanceBusy(self._driver, self._handle, i.gi_id, self._parts, self._clock) for i in instances
        }
        self._layout = (mig_enabled, instances)

    def _read_instance(self, gpu: Device, instance: Instance, running: Sequence[ProcessUsage] | None) -> DeviceUsage:
        memory = self._read_memory(f"{_MEMORY} gi{instance.gi_id}", instance.handle)
        busy = self._instances[instance.gi_id].read()
        return self._split(_make_usage(instance.make_device(gpu), busy, memory, running), self._wall())

    def _split(self, usage: DeviceUsage, until: float | None) -> DeviceUsage:
        return usage if self._splitter is None else self._splitter.split(usage, until)

    def _read_memory(self, part: str, handle: Any) -> int | None:
        version = self._driver.constant("nvmlMemory_v2")
        info = self._parts.read(part, lambda: self._driver.call(_MEMORY, handle, version))
        return None if info is None else self._parts.check(part, info.used, info.total)


def _make_usage(
    device: Device,
    busy: BusyTime,
    memory: int | None,
    running: Sequence[ProcessUsage] | None,
    energy: EnergyReading = EnergyReading(),  # noqa: B008 - immutable
) -> DeviceUsage:
    return DeviceUsage(
        device,
        busy.window_ns,
        busy_ns=busy.busy_ns,
        energy_mj=energy.used_mj,
        power_mw=energy.power_mw,
        memory_used=memory,
        processes=None if running is None else tuple(p for p in running if p.device == device.key),
        process_busy_ns=busy.process_ns,
    )
