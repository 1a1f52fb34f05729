"""This module reads a GPU's energy. EnergyCounter asks the driver and shares the answer; EnergyMeter decides when: a
reading takes the driver 4.5 ms of CPU (an H200).

Telemetry and usage share the readings. While the same processes run, usage does without one for some seconds; what it
then learns is about several turns, and it says about how much of it each turn used, by the power drawn, which costs
nothing to ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from podgpu.errors import DeviceLost, DriverGone, SourceError
from podgpu.gpu.nvml.attempts import Attempts
from podgpu.gpu.nvml.driver import NvmlDriver

ENERGY = "nvmlDeviceGetTotalEnergyConsumption"
POWER = "nvmlDeviceGetPowerUsage"
STRETCH_SECONDS = 5.0
"""How long usage goes without a reading while nobody comes or goes."""
_NEARLY = 0.5  # a turn that comes a little early is not put off to the next
_SAME_SECOND = 1.5
"""How old a reading of somebody else may be: one that asks every second has always made one meanwhile."""
_COMING_SECONDS = 0.1
"""How long a reading that is on its way is waited for: longer than any takes, unless the driver hangs."""
_MOST_WATTS = 5000
_MOST_COUNTED = 1 << 62  # mJ: what says more is NVML's word for "no value"
_COUNTER_STEP = 1.0  # seconds by which the energy counter may lag and then catch up at once


class Told(NamedTuple):
    at: float
    """Monotonic time at which it was asked."""
    counter: Any


class EnergyCounter:
    """What the driver last said; from several workers. One that hangs in the driver keeps no other."""

    def __init__(self, driver: NvmlDriver, handle: Any, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._handle = handle
        self._clock = clock
        self._asking = threading.Lock()
        self._last: Told | None = None

    def ask(self) -> Told:
        """The driver's answer. Raises SourceError."""
        waited = self._asking.acquire(timeout=_COMING_SECONDS)
        try:
            at = self._clock()
            told = self._last = Told(at, self._driver.call(ENERGY, self._handle))
            return told
        finally:
            if waited:
                self._asking.release()

    def told_since(self, moment: float) -> Told | None:
        """What was said to anybody since, if it is of this second; one that is on its way is waited for."""
        if self._asking.acquire(timeout=_COMING_SECONDS):
            self._asking.release()
        last = self._last
        return last if last is not None and moment < last.at and self._clock() - last.at <= _SAME_SECOND else None

    def forget(self) -> None:
        """The GPU was away: its counter may have begun anew."""
        self._last = None


class Energy(NamedTuple):
    """What a turn learnt. Without `used` and `estimate`, what was used until now will not be known."""

    used: int | None = None
    """Millijoules since the counter was last told; None: not known, or not asked in this turn."""
    estimate: int | None = None
    """About how many nanojoules of that are of this turn: by them `used`, or the next one, is divided among turns."""
    since: int = 0
    """About how many were used since the reading, and are in the next one."""
    power_mw: int | None = None


class EnergyMeter:
    """What the GPU used from one reading to the next; they sum to the counter's own difference. From one worker."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        attempts: Attempts,
        clock: Callable[[], float],
        counter: EnergyCounter | None = None,
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._attempts = attempts
        self._clock = clock
        self._counter = counter or EnergyCounter(driver, handle, clock)
        self._last: Told | None = None
        self._has_told = False
        """A figure has come out: until then every turn asks, so that there is one soon."""
        self._turn_at: float | None = None
        self._users: Collection[int] | None = None
        self._milliwatts: int | None = None

    def read(self, users: Collection[int] | None = None) -> Energy:
        return self._read(users)._replace(power_mw=self._milliwatts)

    def _read(self, users: Collection[int] | None = None) -> Energy:
        """`users`: the pids of who is there now; None where they cannot be seen."""
        began, self._turn_at = self._turn_at, self._clock()
        changed, self._users = users != self._users, users
        self._milliwatts = self._read_power()
        told = self._told(self._turn_at, changed)
        estimate = self._estimate(began, self._turn_at)
        if told is None:
            return Energy(estimate=estimate if self._last is not None else None)
        before, self._last, self._has_told = self._last, told, False
        if before is None or told.counter < before.counter:
            return Energy()
        most = int(_MOST_WATTS * 1000 * (told.at - before.at + _COUNTER_STEP))
        used = self._attempts.within(ENERGY, int(told.counter) - int(before.counter), most)
        self._has_told = used is not None
        if used is None or estimate is None:
            return Energy(used)
        since = min(estimate, self._estimate(told.at, self._turn_at) or 0)
        return Energy(used, estimate - since, since)

    def _told(self, now: float, changed: bool) -> Told | None:
        """A reading with a number in it: somebody else's, or one's own where it is time for one."""
        last = self._last
        told = None if last is None or changed else self._counter.told_since(last.at)
        if told is None and self._is_due(now, changed):
            told = self._attempts.of(ENERGY, self._counter.ask)
        good = None if told is None else self._attempts.within(ENERGY, told.counter, _MOST_COUNTED)
        return told if good is not None else None

    def _is_due(self, now: float, changed: bool) -> bool:
        """Without the power drawn there is no telling the turns of a stretch apart: then each has its own reading."""
        if self._last is None or not self._has_told or changed or self._milliwatts is None:
            return True
        return now - self._last.at >= STRETCH_SECONDS - _NEARLY

    def _estimate(self, since: float | None, until: float) -> int | None:
        if since is None or self._milliwatts is None:
            return None
        return max(0, round(self._milliwatts * 1e6 * (until - since)))

    def _read_power(self) -> int | None:
        """It only weighs turns against each other: that it fails is nobody's loss."""
        try:
            told = self._driver.call(POWER, self._handle)
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            return None
        return int(told) if 0 < told <= _MOST_WATTS * 1000 else None
