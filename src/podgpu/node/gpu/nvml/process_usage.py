"""Reads the usage of one GPU since the last reading: busy time, energy, memory and processes.

The driver samples the GPU about five times per second (H200, driver 580). For each process, it
returns the mean utilization since a given time. Each time window begins where the last one ended,
at a timestamp of the driver. So no time is lost or counted twice, even if readings are irregular.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from podgpu.errors import SourceError
from podgpu.model import (
    HIDDEN_PID,
    Device,
    DeviceUsage,
    Lack,
    ProcessUsage,
    UsageProblems,
)
from podgpu.node.gpu.nvml.driver import (
    ENERGY_COUNTER,
    MAX_PID,
    CallGuard,
    DeviceHandle,
    FirmwarePhase,
    GpmSampler,
    GpuLayout,
    NvmlDriver,
    list_processes,
    translate,
)
from podgpu.node.gpu.nvml.switch_splitter import BusyTimeSplitter, SwitchLogFactory
from podgpu.node.gpu.source import FindProcesses

_MEMORY = "nvmlDeviceGetMemoryInfo"
_PROCESS_LIST = "process list"
_SAMPLES = "nvmlDeviceGetSamples"
_RATES = "nvmlDeviceGetUtilizationRates"
_PROCESSES = "nvmlDeviceGetProcessUtilization"
_NEWER_PROCESSES = "nvmlDeviceGetProcessesUtilizationInfo"
"""Returns the same values as `_PROCESSES`. Some Blackwell GPUs support only this function."""
_GPM = "nvmlGpmMetricsGet"
_POWER = "nvmlDeviceGetPowerUsage"
_LACKS: Mapping[str, Lack] = {
    _NEWER_PROCESSES: "no_process_utilization",
    ENERGY_COUNTER: "no_energy",
    _MEMORY: "no_memory",
    _GPM: "no_instance_utilization",
    _PROCESS_LIST: "no_process_list",
}
"""Values that are missing if a function is not supported.

Functions that can be replaced are not listed.
"""

_SECOND_US = 1_000_000
_MAX_WINDOW_US = 60 * _SECOND_US
"""In a longer window, the busy time is unknown, because the driver keeps only recent samples."""
_MAX_SILENCE_US = 10 * _SECOND_US
"""If there is no sample for this long, the busy time is unknown.

The driver also samples an idle GPU.
"""
_SLACK_US = 2 * _SECOND_US  # maximum age of the driver's newest sample
_NO_ENTRIES = frozenset({"not_found", "nvml_0"})
"""Error reasons that mean an empty list.

pynvml raises `nvml_0` if the driver succeeds without entries.
"""
_GRAPHICS_UTIL = 1
_MAX_GPM_PERCENT = 101.0  # larger values are rejected; GPM slightly exceeds 100 % at full load
_ENERGY_SECONDS = 5.0
"""Interval of energy readings if no process starts or ends.

A reading costs 4.5 ms of CPU (H200).
"""
_SHARED_SECONDS = 1.5
"""A reading of the telemetry loop is used up to this age. Its fastest interval is shorter."""
_EARLY_SECONDS = 0.5  # the counter may be read this much before its interval ends
_MAX_WATTS = 5000
_MAX_COUNTER_MJ = 1 << 62  # larger values are NVML's code for "no value"
_COUNTER_STEP_SECONDS = 1.0  # the counter may lag by this much and then catch up in one step


@dataclass(frozen=True, slots=True)
class UsageSettings:
    # False if podgpu is not in the host's PID namespace. It then cannot read processes.
    sees_processes: bool = True
    switch_logs: SwitchLogFactory = field(default_factory=SwitchLogFactory)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class BusyTime(NamedTuple):
    """The busy time of a device in one time window. The defaults are for an unknown busy time."""

    window_ns: int = 0  # 0 if there is no new time, or if its length is unknown
    busy_ns: int | None = None
    # Start of the window, as the driver's timestamp. None if the driver has no values per process.
    since: int | None = None
    until: float | None = None  # end of the window, as Unix time


class _WindowStart(NamedTuple):
    since: int  # the driver's timestamp in microseconds
    clock: float  # a monotonic time at or before it


class CounterReading(NamedTuple):
    """A reading of the energy counter."""

    time: float
    energy_mj: int


@dataclass(slots=True)
class EnergyReader:
    """Reads the power and the energy of one GPU, see `UsageReader`."""

    _driver: NvmlDriver
    _handle: Any
    _guard: CallGuard[str]
    _clock: Callable[[], float]
    _phase: FirmwarePhase = field(default_factory=FirmwarePhase)
    shared: CounterReading | None = None  # last reading of the telemetry loop
    _last: CounterReading | None = None
    # True if the energy between the last two readings of the counter is known.
    _is_known: bool = False
    _pids: Collection[int] | None = None  # of the last call of `read`; None if unknown

    def continue_after(self, previous: EnergyReader) -> None:
        self._last = previous._last

    def read_power(self) -> int | None:
        """Returns the power in milliwatts, or None if it is unknown.

        Ignores errors, because power only helps to split energy among windows.
        """
        power = 0
        with CallGuard[str]().catch():
            power = int(self._driver.call(_POWER, self._handle))
        if 0 < power <= _MAX_WATTS * 1000:
            return power
        return None

    def read(self, running: Sequence[ProcessUsage] | None, power: int | None) -> int | None:
        """Returns the energy since the last reading of the counter, or None if it was not read.

        The counter is read every 5 s, and when a process starts or ends. Without power readings, it
        is read every time, because energy is split among windows by power. The first reading, and
        the first after a reset, returns 0.
        """
        now = self._clock()
        processes_changed = self._update_pids(running)
        if not processes_changed and power is not None and not self._is_due(now):
            return None

        reading: CounterReading | None = None
        # A shared reading may be older than the change.
        if not processes_changed:
            reading = self._find_shared(now)
        if reading is None:
            reading = self._guard.attempt(ENERGY_COUNTER, partial(self._read_counter, now))
        if reading is None:
            return None
        if not self._guard.is_valid(ENERGY_COUNTER, reading.energy_mj, _MAX_COUNTER_MJ):
            return None

        before = self._last
        self._last = reading
        if before is None or reading.energy_mj < before.energy_mj:
            self._is_known = False
            return 0

        used = self._subtract(reading, before)
        self._is_known = used is not None
        return used

    def _update_pids(self, running: Sequence[ProcessUsage] | None) -> bool:
        """Returns True if a process has started or ended since the last call."""
        before = self._pids
        self._pids = None if running is None else frozenset(process.pid for process in running)
        return self._pids != before

    def _is_due(self, now: float) -> bool:
        if self._last is None or not self._is_known:
            return True
        return now - self._last.time >= _ENERGY_SECONDS - _EARLY_SECONDS

    def _subtract(self, reading: CounterReading, before: CounterReading) -> int | None:
        """Returns the increase of the counter. None if it is more than possible."""
        used = reading.energy_mj - before.energy_mj
        seconds = reading.time - before.time + _COUNTER_STEP_SECONDS
        if self._guard.is_valid(ENERGY_COUNTER, used, _MAX_WATTS * 1000 * seconds):
            return used
        return None

    def _find_shared(self, now: float) -> CounterReading | None:
        """Returns the telemetry loop's last reading, if it is recent and newer than our own."""
        shared = self.shared
        if shared is None or shared.time <= now - _SHARED_SECONDS:
            return None
        if self._last is not None and shared.time <= self._last.time:
            return None
        return shared

    def _read_counter(self, now: float) -> CounterReading:
        with self._phase.avoid_busy_firmware():
            return CounterReading(now, int(self._driver.call(ENERGY_COUNTER, self._handle)))


class UsageReader:
    """Reads the usage of one GPU and its MIG instances. Not thread-safe."""

    def __init__(self, driver: NvmlDriver, handle: Any, settings: UsageSettings) -> None:
        self._driver = driver
        self._handle = handle
        self._settings = settings
        self._clock = settings.clock

        self._guard: CallGuard[str] = CallGuard()
        self._layout: GpuLayout | None = None  # None before the first reading
        self._gpm: dict[str, GpmSampler] = {}  # samplers of the MIG instances, by device key

        self._window_start: _WindowStart | None = None  # None before the first window
        self.energy = EnergyReader(driver, handle, self._guard, settings.clock)
        self._sampled: dict[int, int] = {}  # see `_update_sampled`

        self._splitter: BusyTimeSplitter | None = None
        if settings.switch_logs.wanted != "samples":
            logs = settings.switch_logs
            open_listener = partial(logs.open_listener, driver, wall=settings.wall)
            self._splitter = BusyTimeSplitter(open_listener, settings.clock, logs.is_auto)

    def continue_after(self, previous: UsageReader) -> None:
        """Continues where another reader of the same GPU stopped, so that no time is lost."""
        self._window_start = previous._window_start
        self.energy.continue_after(previous.energy)

    def read(
        self,
        layout: GpuLayout,
        shared: Collection[str],
        find: FindProcesses,
    ) -> DeviceUsage:
        """Reads the GPU and its instances. `shared`, `find`: see `Telemetry.usage`.

        Raises DeviceLost or DriverGone. Other errors are in `problems`.
        """
        self._guard.begin()
        self._follow_layout(layout)
        device = layout.gpu.device

        memory = self._read_memory(_MEMORY, self._handle)
        running: Sequence[ProcessUsage] | None = None
        if self._settings.sees_processes:
            list_running = partial(list_processes, self._driver, layout)
            running = self._guard.attempt(_PROCESS_LIST, list_running)
        if self._splitter is not None:
            self._splitter.begin_reading(layout.gpu, running, shared, find)

        instances = tuple(self._read_instance(instance, running) for instance in layout.instances)
        busy = BusyTime() if device.mig_enabled else self._read_busy()

        # Energy is read last, so that its slow call (5 to 20 ms) does not separate the other calls.
        power = self.energy.read_power()
        energy = self.energy.read(running, power)

        usage = self._make_usage(device, busy, running, memory)
        return replace(
            usage,
            energy_mj=energy,
            power_mw=power,
            instances=instances,
            problems=self._list_problems(),
        )

    def _list_problems(self) -> UsageProblems:
        lacks = []
        for part in sorted(self._guard.unsupported):
            # Names of MIG instances have the suffix ` gi<id>`.
            function = part.partition(" gi")[0]
            if function in _LACKS:
                lacks.append((part, _LACKS[function]))

        return UsageProblems(
            dropped=tuple(self._guard.dropped),
            errors=tuple(self._guard.errors),
            lacks=tuple(lacks),
            switches=None if self._splitter is None else self._splitter.status,
        )

    def close(self) -> None:
        """Frees the resources that this reader uses in the driver."""
        for sampler in self._gpm.values():
            sampler.close()
        self._gpm = {}

        if self._splitter is not None:
            self._splitter.close()

    def _follow_layout(self, layout: GpuLayout) -> None:
        if self._layout != layout:
            self.close()
            # MIG mode supports other functions.
            self._guard.unsupported.clear()

            for instance in layout.instances:
                sampler = GpmSampler(self._driver, self._handle, instance.device.gi_id)
                self._gpm[instance.device.key] = sampler
            self._layout = layout

        # In MIG mode, the whole GPU has no windows.
        if layout.gpu.device.mig_enabled:
            self._window_start = None

    def _make_usage(
        self,
        device: Device,
        busy: BusyTime,
        running: Sequence[ProcessUsage] | None,
        memory: int | None,
    ) -> DeviceUsage:
        processes: tuple[ProcessUsage, ...] | None = None
        if running is not None:
            processes = tuple(process for process in running if process.device == device.key)

        usage = DeviceUsage(
            device,
            busy.window_ns,
            busy_ns=busy.busy_ns,
            memory_used=memory,
            processes=processes,
        )

        if self._splitter is not None:
            usage = self._splitter.split(usage, busy.until)
        # The splitter sets another method if it has divided the busy time.
        if usage.method == "samples":
            return replace(usage, process_busy_ns=self._read_process_busy(busy))
        if _may_hide_several(usage):
            return replace(usage, sampled_busy_ns=self._update_sampled(busy, usage))
        return usage

    def _update_sampled(self, busy: BusyTime, usage: DeviceUsage) -> dict[int, int]:
        """Returns the busy time of each listed process in about the last eight readings.

        One reading has about five samples, which may all be of other processes.
        """
        sampled = self._read_process_busy(busy) or {}
        recent = {}
        for process in usage.processes or ():
            before = self._sampled.get(process.pid, 0)
            new = sampled.get(process.pid) or 0
            # Earlier readings fade, so that the sum is that of about eight.
            recent[process.pid] = before * 7 // 8 + new

        self._sampled = recent
        return recent

    def _read_memory(self, part: str, handle: Any) -> int | None:
        version = self._driver.constant("nvmlMemory_v2")
        read = partial(self._driver.call, _MEMORY, handle, version)
        info = self._guard.attempt(part, read)
        if info is None or not self._guard.is_valid(part, info.used, info.total):
            return None
        return int(info.used)

    # Instances

    def _read_instance(
        self, instance: DeviceHandle, running: Sequence[ProcessUsage] | None
    ) -> DeviceUsage:
        device = instance.device
        suffix = f" gi{device.gi_id}"
        memory = self._read_memory(_MEMORY + suffix, instance.handle)

        part = _GPM + suffix
        read_busy = partial(self._read_instance_busy, self._gpm[device.key], part)
        busy = self._guard.attempt(part, read_busy) or BusyTime()
        return self._make_usage(device, busy, running, memory)

    def _read_instance_busy(self, gpm: GpmSampler, part: str) -> BusyTime:
        """Reads the busy time of a MIG instance from GPM.

        NVML has no values per process in MIG mode.
        """
        now = self._clock()
        before = gpm.last_at
        means = gpm.read([_GRAPHICS_UTIL], now)

        if before is None:
            return BusyTime()
        # Empty if it is too early for the next sample.
        if not means:
            return BusyTime(0, 0)

        code, percent = means[_GRAPHICS_UTIL]
        if code:
            raise translate(code, _GPM)

        # Rounds both times instead of their difference, so that rounding errors do not add up.
        window_ns = int(now * 1e9) - int(before * 1e9)
        busy_ns: int | None = None
        if self._guard.is_valid(part, percent, _MAX_GPM_PERCENT):
            busy_ns = round(min(percent, 100.0) * window_ns / 100)

        return BusyTime(window_ns, busy_ns, until=self._settings.wall())

    # Whole GPUs

    def _read_busy(self) -> BusyTime:
        now = self._clock()
        start = self._window_start
        if start is None:
            start = _WindowStart(self._now_us() - _SECOND_US, now - 1.0)
        since = start.since
        samples = self._guard.attempt(_SAMPLES, partial(self._read_samples, since))

        end = since
        if samples:
            end = max(int(sample.timeStamp) for sample in samples)
        elif samples is None or since - self._now_us() > _SLACK_US:
            # Samples are not supported, or the clock was set back.
            end = self._now_us()

        # Without a new sample, the window continues.
        if end == since:
            self._window_start = start
            silence_us = self._now_us() - since
            if silence_us > _MAX_SILENCE_US:
                return BusyTime()
            return BusyTime(0, 0, since)

        self._window_start = _WindowStart(end, now)
        window_us = end - since
        elapsed_us = int((self._clock() - start.clock) * 1e6)
        longest_us = min(_MAX_WINDOW_US, elapsed_us + _SLACK_US)
        if not 0 < window_us <= longest_us:
            # The clock was set, the machine slept, or a call hung.
            return BusyTime()

        window_ns = window_us * 1000
        busy = self._compute_busy(samples, window_ns)
        return BusyTime(window_ns, busy, since, end / 1e6)

    def _now_us(self) -> int:
        return int(self._settings.wall() * 1e6)

    def _read_samples(self, since: int) -> list[Any]:
        kind = self._driver.constant("NVML_GPU_UTILIZATION_SAMPLES")
        answer = self._read_entries(_SAMPLES, kind, since)
        if not answer:
            return []
        _, samples = answer
        return [sample for sample in samples if sample.timeStamp > since]

    def _read_entries(self, function: str, *arguments: int) -> Sequence[Any]:
        try:
            return self._driver.call(function, self._handle, *arguments)  # type: ignore[no-any-return]
        except SourceError as e:
            if e.reason in _NO_ENTRIES:
                return ()
            raise

    def _compute_busy(self, samples: list[Any] | None, window_ns: int) -> int | None:
        """Returns the busy time in the window. `samples`: not empty; None if not read."""
        if samples is not None:
            percents = [int(sample.sampleValue.uiVal) for sample in samples]
            are_valid = [self._guard.is_valid(_SAMPLES, percent, 100) for percent in percents]
            if not all(are_valid):
                return None
            return sum(percents) * window_ns // (100 * len(percents))

        # The call failed, but may work the next time.
        if _SAMPLES not in self._guard.unsupported:
            return None

        # Without samples, the current utilization is assumed for the whole window.
        rates = self._guard.attempt(_RATES, partial(self._driver.call, _RATES, self._handle))
        if rates is None or not self._guard.is_valid(_RATES, rates.gpu, 100):
            return None
        return int(rates.gpu) * window_ns // 100

    def _read_process_busy(self, window: BusyTime) -> dict[int, int | None] | None:
        """Returns the busy time of each process according to the driver's samples.

        Returns None if no busy times are known, and None for a process with an invalid one.
        """
        since = window.since
        if since is None or not self._settings.sees_processes:
            return None
        if {_PROCESSES, _NEWER_PROCESSES} <= self._guard.unsupported:
            return None
        # Saves a call that costs 1.9 ms of CPU.
        if window.busy_ns == 0:
            return {}

        entries = self._read_process_entries(_PROCESSES, since)
        if _PROCESSES in self._guard.unsupported:
            entries = self._read_process_entries(_NEWER_PROCESSES, since)
        if entries is None:
            return None

        busy: dict[int, int | None] = {}
        for entry in entries:
            if 0 < entry.pid <= MAX_PID and entry.timeStamp > since:
                busy[entry.pid] = None
                if self._guard.is_valid(_PROCESSES, entry.smUtil, 100):
                    busy[entry.pid] = entry.smUtil * window.window_ns // 100
        return busy

    def _read_process_entries(self, function: str, since: int) -> Sequence[Any] | None:
        return self._guard.attempt(function, partial(self._read_entries, function, since))


def _may_hide_several(usage: DeviceUsage) -> bool:
    """Returns True if the log has times of hidden processes, and these may be several."""
    named = usage.resident_ns or {}
    if HIDDEN_PID not in named:
        return False
    unnamed = [process for process in usage.processes or () if process.pid not in named]
    return len(unnamed) > 1
