"""A clock that tests advance, and a wait for other threads with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 180.0
"""Timeout in seconds. It is long, because only failing tests reach it."""
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


def wait_until(condition: Callable[[], object], what: str = "the condition is true") -> None:
    """Polls the condition with increasing delays, because it may be a request to a server."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > PATIENCE:
            raise AssertionError(f"still not after {PATIENCE:.0f} s: {what}")
        time.sleep(min(0.002 + waited / 50, 0.1))
