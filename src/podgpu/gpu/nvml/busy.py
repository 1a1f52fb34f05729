"""BusyWindows integrates busy time of a whole GPU and its processes, InstanceBusy that of one MIG instance.

Measured on an H200 (driver 580): the driver looks at the GPU about five times a second and stamps each sample with
Unix microseconds. Per-process utilisation since a moment is one entry a process, its mean over all samples since then,
rest included. So the driver's own timestamps say where each window ends and the next begins, and nothing is counted
twice or left out however irregularly it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml

from podgpu.errors import SourceError
from podgpu.gpu.nvml.attempts import Attempts, again_while_it_grows
from podgpu.gpu.nvml.driver import NvmlDriver, translate
from podgpu.gpu.nvml.gpm import MIN_SECONDS, GpmSampler
from podgpu.gpu.nvml.process_list import MOST_PID

SAMPLES = "nvmlDeviceGetSamples"
RATES = "nvmlDeviceGetUtilizationRates"
PROCESSES = "nvmlDeviceGetProcessUtilization"
NEWER_PROCESSES = "nvmlDeviceGetProcessesUtilizationInfo"
"""The same figures. Some Blackwell parts refuse the old call and answer this one; the answer tells, not the name."""
GPM = "nvmlGpmMetricsGet"

_SECOND_US = 1_000_000
_FIRST_WINDOW_US = _SECOND_US
_LONGEST_WINDOW_US = 60 * _SECOND_US
_SILENCE_US = 10 * _SECOND_US
"""A driver that samples does so while idle, too: past this, no sample is no sign of rest."""
_SLACK_US = 2 * _SECOND_US
"""How far the driver's newest sample may lie from the moment it is asked, and more."""
_NOBODY_RAN = frozenset({"not_found", "nvml_0"})
"""NOT_FOUND, and how pynvml reports a driver that says "no entries" without an error."""
_GRAPHICS_UTIL = 1
_GPM_MOST = 101.0  # GPM overshoots 100 % by a hair at full load


class Busy(NamedTuple):
    window_ns: int = 0
    busy_ns: int | None = None
    process_ns: dict[int, int | None] | None = None
    until: float | None = None
    """Unix time of the window's end."""


UNKNOWN = Busy()


class _Start(NamedTuple):
    """Where a window begins."""

    us: int
    """By the driver's timestamps."""
    clock: float
    """By the clock that never jumps; not later than the same moment."""


class BusyWindows:
    """Of a GPU that is not cut by MIG."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        attempts: Attempts,
        sees_processes: bool,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._attempts = attempts
        self._sees_processes = sees_processes
        self._clock = clock
        self._wall = wall
        self._start: _Start | None = None

    def read(self, anybody: bool = True) -> Busy:
        """Without `anybody` there, then and now, and no busy time it is not asked who ran: that takes 1.8 ms of CPU."""
        asked_at = self._clock()
        start = self._start or _Start(self._now_us() - _FIRST_WINDOW_US, asked_at - _FIRST_WINDOW_US / 1e6)
        samples = self._attempts.of(SAMPLES, lambda: self._read_samples(start.us))
        end = self._end(start, samples)
        if end == start.us:
            self._start = start
            return self._nothing_new(start)
        self._start = _Start(end, asked_at)
        if not 0 < end - start.us <= self._longest(start):
            return UNKNOWN  # the clock was set, the machine slept, or a call hung: begin anew
        window_ns = (end - start.us) * 1000
        busy = self._busy(samples, window_ns)
        processes = self._process_busy(start.us, window_ns, anybody or busy != 0)
        return Busy(window_ns, busy, processes, end / 1e6)

    def _end(self, start: _Start, samples: list[Any] | None) -> int:
        """The newest sample. By the wall clock where there are no samples, or it is set back behind the start."""
        if samples:
            return max(int(sample.timeStamp) for sample in samples)
        now = self._now_us()
        return now if samples is None or start.us - now > _SLACK_US else start.us

    def _nothing_new(self, start: _Start) -> Busy:
        if self._now_us() - start.us > _SILENCE_US:
            return UNKNOWN
        return Busy(0, 0, {} if self._asks_processes() else None)

    def _longest(self, start: _Start) -> int:
        elapsed = int((self._clock() - start.clock) * 1e6)
        return min(_LONGEST_WINDOW_US, elapsed + _SLACK_US)

    def _now_us(self) -> int:
        return int(self._wall() * 1e6)

    def _read_samples(self, since: int) -> list[Any]:
        kind = self._driver.constant("NVML_GPU_UTILIZATION_SAMPLES")
        try:
            _, samples = again_while_it_grows(lambda: self._driver.call(SAMPLES, self._handle, kind, since))
        except SourceError as e:
            if e.reason == "not_found":
                return []
            raise
        return [sample for sample in samples if sample.timeStamp > since]

    def _busy(self, samples: list[Any] | None, window_ns: int) -> int | None:
        if samples is None:
            return self._busy_by_rate(window_ns) if SAMPLES in self._attempts.unsupported else None
        values = [self._attempts.within(SAMPLES, sample.sampleValue.uiVal, 100) for sample in samples]
        good = [value for value in values if value is not None]
        return sum(good) * window_ns // (100 * len(good)) if len(good) == len(values) else None

    def _busy_by_rate(self, window_ns: int) -> int | None:
        """The last sampling period's utilisation, taken for the whole window's: all that such a driver tells."""
        rate = self._attempts.of(RATES, lambda: self._driver.call(RATES, self._handle).gpu)
        good = None if rate is None else self._attempts.within(RATES, rate, 100)
        return None if good is None else good * window_ns // 100

    def _asks_processes(self) -> bool:
        return self._sees_processes and not {PROCESSES, NEWER_PROCESSES} <= self._attempts.unsupported.keys()

    def _process_busy(self, since: int, window_ns: int, anybody: bool) -> dict[int, int | None] | None:
        """A sample may come between the device's answer and this one: then it counts into this mean and the next."""
        if not self._asks_processes():
            return None
        if not anybody:
            return {}
        entries = self._attempts.of(PROCESSES, lambda: self._read_processes(PROCESSES, since))
        if PROCESSES in self._attempts.unsupported:
            entries = self._attempts.of(NEWER_PROCESSES, lambda: self._read_processes(NEWER_PROCESSES, since))
        if entries is None:
            return None
        busy: dict[int, int | None] = {}
        for entry in entries:
            if not 0 < entry.pid <= MOST_PID or entry.timeStamp <= since:
                continue  # left over from before
            percent = self._attempts.within(PROCESSES, entry.smUtil, 100)
            busy[entry.pid] = None if percent is None else percent * window_ns // 100
        return busy

    def _read_processes(self, function: str, since: int) -> list[Any]:
        try:
            return list(again_while_it_grows(lambda: self._driver.call(function, self._handle, since)))
        except SourceError as e:
            if e.reason in _NOBODY_RAN:
                return []
            raise


class InstanceBusy:
    """Of one MIG instance: GPM's graphics activity between two samples. NVML has no per-process figure there."""

    def __init__(
        self, driver: NvmlDriver, handle: Any, gi_id: int, attempts: Attempts, clock: Callable[[], float]
    ) -> None:
        self._gpm = GpmSampler(driver, lambda sample: driver.call("nvmlGpmMigSampleGet", handle, gi_id, sample))
        self._part = f"{GPM} gi{gi_id}"
        self._attempts = attempts
        self._clock = clock
        self._last_at: float | None = None

    def read(self) -> Busy:
        return self._attempts.of(self._part, self._read) or UNKNOWN

    def _read(self) -> Busy:
        now, before = self._clock(), self._last_at
        if before is not None and now - before < MIN_SECONDS:
            return Busy(0, 0)
        code, percent = self._gpm.read([_GRAPHICS_UTIL], now).get(_GRAPHICS_UTIL, (pynvml.NVML_SUCCESS, 0.0))
        self._last_at = now
        if code:
            raise translate(code, GPM)
        if before is None:
            return UNKNOWN
        window_ns = _ns(now) - _ns(before)
        good = self._attempts.within(self._part, percent, _GPM_MOST)
        return Busy(window_ns, None if good is None else round(min(good, 100.0) * window_ns / 100))

    def close(self) -> None:
        self._gpm.close()
        self._last_at = None


def _ns(seconds: float) -> int:
    """Of a moment rather than of a difference, so that windows add up to the time between their ends."""
    return int(seconds * 1e9)
