"""Clocks that tests can replace, parsing of durations, and limits for repeated log lines."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_MIN_STEP = 2.0  # smaller steps of the wall clock are ignored, so that timestamps in series do not change
_REPEAT_SECONDS = 60.0
_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(ns|us|µs|μs|ms|s|m|h)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


def parse_duration(text: str) -> float | None:
    """Converts `1h30m`, `1.5s`, `500ms` or `0` to seconds. Returns None for negative and invalid durations."""
    if text == "0":
        return 0.0
    if not text or _DURATION_PART.sub("", text):
        return None
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


class UnixTime:
    """Converts monotonic times to Unix times. Small corrections of the wall clock do not change the results."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.wall() - clock.monotonic()

    def convert(self, moment: float) -> float:
        offset = self._clock.wall() - self._clock.monotonic()
        if abs(offset - self._offset) >= _MIN_STEP:
            self._offset = offset
        return moment + self._offset


@dataclass(slots=True)
class _Fault:
    is_logged: bool = False  # True from the log line of the failure until recovery
    logged_at: dict[str, float] = field(default_factory=dict)  # reason -> time


class FaultLog(Generic[K]):
    """Decides which faults are logged: each reason once while a fault persists. An intermittent fault is logged at most
    once in `seconds`."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._faults: dict[K, _Fault] = {}

    def fail(self, key: K, reason: str) -> bool:
        """Records a failure. Returns True if it should be logged."""
        fault, now = self._faults.setdefault(key, _Fault()), self._clock()
        if reason in fault.logged_at and (fault.is_logged or now - fault.logged_at[reason] < self._seconds):
            return False
        fault.is_logged, fault.logged_at[reason] = True, now
        return True

    def recover(self, key: K) -> bool:
        """Records a success. Returns True if it should be logged, because the failure was logged too."""
        fault = self._faults.get(key)
        if fault is None:
            return False
        was_logged, fault.is_logged = fault.is_logged, False
        if self._clock() - max(fault.logged_at.values()) >= self._seconds:
            del self._faults[key]
        return was_logged

    def remove(self, is_gone: Callable[[K], bool]) -> None:
        for key in [key for key in self._faults if is_gone(key)]:
            del self._faults[key]


class RepeatFilter(logging.Filter):
    """Passes each kind of log line at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), self._clock()
        if now - self._logged_at.get(kind, float("-inf")) < _REPEAT_SECONDS:
            return False
        self._logged_at[kind] = now
        return True
