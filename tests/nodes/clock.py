"""Time in tests: a clock that moves when told, and one bounded wait for what other threads do in real time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 30.0
"""Seconds. Reached only when something is broken."""
_UNIX_AT_ZERO = 1_700_000_000.0


class FakeClock:
    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return _UNIX_AT_ZERO + self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def wait_until(condition: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"still not after {PATIENCE:.0f} s: {what}")
        time.sleep(0.002)
