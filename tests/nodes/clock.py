"""Time in tests: a clock that moves when told, and one bounded wait for what other threads do in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds. Reached only when something is broken."""
_UNIX_AT_ZERO = 1_700_000_000.0
_NAP_SECONDS = 0.005


class FakeClock:
    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return _UNIX_AT_ZERO + self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def seconds_waited(work: Callable[[], object]) -> float:
    """How long it took, as a thread beside it counts that does nothing but nap: by naps, each as long as it was meant
    to be. While the machine stands still, or has no time for this process, one nap passes, however long that is.

    Of work that waits, this is what it waited. Work that keeps the interpreter busy keeps the naps away too.
    """
    ended, naps = threading.Event(), 0

    def nap() -> None:
        nonlocal naps
        while not ended.wait(_NAP_SECONDS):
            naps += 1

    bystander = threading.Thread(target=nap, name="bystander", daemon=True)
    bystander.start()
    try:
        work()
    finally:
        ended.set()
        bystander.join()
    return naps * _NAP_SECONDS


def one_of_three(work: Callable[[], T]) -> T:
    """For what has deadlines of its own in real time, which no clock of a test moves: a fault of podgpu's is there each
    time, a machine that stood still for as long as the deadline is not."""
    for _ in range(2):
        try:
            return work()
        except AssertionError:
            continue
    return work()


def wait_until(condition: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"still not after {PATIENCE:.0f} s: {what}")
        time.sleep(0.002)
