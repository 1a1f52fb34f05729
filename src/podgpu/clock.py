"""Time, injected, so that tests move it by hand: the clock itself, and how often a fault is worth a line of the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


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
