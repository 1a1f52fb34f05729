"""Clock is time, injected, so that tests move it by hand; beside it: when it was set, and how often a fault is worth a
line of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_LEAST_STEP = 2.0
"""A smaller step of the wall clock moves nothing: moments that are told as series should stay where they are."""
_REPEATED_SECONDS = 60.0


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class UnixTime:
    """Converts monotonic moments to Unix time. Small corrections of the wall clock do not move earlier moments."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.wall() - clock.monotonic()

    def convert(self, moment: float) -> float:
        offset = self._clock.wall() - self._clock.monotonic()
        if abs(offset - self._offset) >= _LEAST_STEP:
            self._offset = offset
        return moment + self._offset


class WallClock:
    """Tells when the wall clock was set, so that moments kept by it move along. It is compared with a clock that only
    goes on; one that stands still while the machine sleeps makes that a step too."""

    def __init__(self) -> None:
        self._ahead: float | None = None

    def step(self, now: float, wall: float) -> float:
        """Seconds by which it was set since it was last compared; 0 when it was not. `now` is monotonic."""
        ahead = wall - now
        step = 0.0 if self._ahead is None else ahead - self._ahead
        if self._ahead is None or abs(step) >= _LEAST_STEP:
            self._ahead = ahead
            return step
        return 0.0


@dataclass(slots=True)
class _Fault:
    told: bool = False
    """It is in the log that this lasts."""
    said: dict[str, float] = field(default_factory=dict)
    """Kind -> when it was last in the log."""


class Faults(Generic[K]):
    """What fails, and what of it was said. A fault that changes from one kind to another and back has each of them said
    once; one that comes and goes is said again after `seconds`, and so is one that has come to stay by then."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._faults: dict[K, _Fault] = {}

    def fails(self, key: K, kind: str) -> bool:
        """Whether that is to be said."""
        fault, now = self._faults.setdefault(key, _Fault()), self._clock()
        if kind in fault.said and (fault.told or now - fault.said[kind] < self._seconds):
            return False
        fault.told, fault.said[kind] = True, now
        return True

    def answers(self, key: K) -> bool:
        """Whether that is to be said: only what was said to fail is said to be well again."""
        fault = self._faults.get(key)
        if fault is None:
            return False
        told, fault.told = fault.told, False
        if self._clock() - max(fault.said.values()) >= self._seconds:
            del self._faults[key]
        return told

    def forget(self, gone: Callable[[K], bool]) -> None:
        for key in [key for key in self._faults if gone(key)]:
            del self._faults[key]


class OnceAMinute(logging.Filter):
    """Lets the same kind of line through once a minute, with the number of those that were held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), self._clock()
        at, held_back = self._said.get(kind, (float("-inf"), 0))
        if now - at < _REPEATED_SECONDS:
            self._said[kind] = at, held_back + 1
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[kind] = now, 0
        if held_back:
            record.msg = f"{kind} (and {held_back} more like it since the last such line)"
        return True
