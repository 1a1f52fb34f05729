"""Time in tests: a clock that moves when told, and one bounded wait for what other threads do in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 90.0
"""Seconds. Reached only when something is broken."""
_UNIX_AT_ZERO = 1_700_000_000.0
_NAP_SECONDS = 0.005
_HELD_UP_SECONDS = 0.3


class FakeClock:
    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return _UNIX_AT_ZERO + self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Bystander:
    """A thread that does nothing but nap. While the machine stands still, or has no time for this process, one nap
    passes, however long that is."""

    def __init__(self) -> None:
        self.naps = 0
        self.longest = 0.0
        """Seconds of one nap."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._nap, name="bystander", daemon=True)

    def __enter__(self) -> _Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _nap(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(_NAP_SECONDS):
            woke = time.monotonic()
            self.naps += 1
            self.longest = max(self.longest, woke - began)
            began = woke


def seconds_waited(work: Callable[[], object]) -> float:
    """How long it took, in naps of a bystander, each as long as it was meant to be.

    Of work that waits, this is what it waited. Work that keeps the interpreter busy keeps the naps away too.
    """
    with _Bystander() as bystander:
        work()
    return bystander.naps * _NAP_SECONDS


def again_if_held_up(work: Callable[[], T]) -> T:
    """For what has deadlines of its own in real time, which no clock of a test moves: it is done again, twice at most,
    where it failed while the machine stood still for so long that a deadline may have passed. What fails while the
    machine runs has failed.
    """
    for _ in range(2):
        bystander = _Bystander()
        try:
            with bystander:
                return work()
        except AssertionError:
            if bystander.longest < _HELD_UP_SECONDS:
                raise
    return work()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Looks at once and often, and the longer it takes the less often: a look may be a request to a server."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > PATIENCE:
            raise AssertionError(f"still not after {PATIENCE:.0f} s: {what}")
        time.sleep(min(0.002 + waited / 50, 0.1))
