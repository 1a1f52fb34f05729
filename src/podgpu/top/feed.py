"""Reads a source again and again in the background, and keeps the last good table beside the last error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from podgpu.errors import SourceError, StartError
from podgpu.figures.device import View
from podgpu.isolate import Isolation
from podgpu.top.history import History
from podgpu.top.lines import Line, lines_of

WARM_UP_SECONDS = 1.0
"""Rates need two readings: the second comes this soon, whatever the interval."""


class Source(Protocol):
    name: str
    deadline: float
    has_rates: bool
    """A second reading a second later tells what changed meanwhile."""

    def read(self) -> View:
        """Raises SourceError or StartError."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to show. Replaced as a whole."""

    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    read_at: float = 0.0
    """Monotonic time of the reading the lines are from."""
    error: SourceError | StartError | None = None
    """Why there is nothing newer."""


class Feed:
    def __init__(self, source: Source, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._interval = interval
        self._clock = clock
        self._history = History()
        self._isolation = Isolation(clock)
        self._stopped = threading.Event()
        self.seen = Seen()

    @property
    def has_rates(self) -> bool:
        return self._source.has_rates

    def read(self) -> Seen:
        """One reading; a source that hangs is left behind at its deadline, and not asked again until it returns."""
        name = self._source.name
        result = self._isolation.run({name: self._source.read}, self._source.deadline)[name]
        if result.value is None:
            self.seen = replace(self.seen, error=result.error)
            return self.seen
        now = self._clock()
        self._history.note(result.value, now)
        self.seen = Seen(tuple(lines_of(result.value, self._history)), result.value.notes, now)
        return self.seen

    def read_or_raise(self) -> Seen:
        seen = self.read()
        if seen.error is not None:
            raise seen.error
        return seen

    def read_twice(self) -> Seen:
        """What rates need."""
        self.read_or_raise()
        self._stopped.wait(min(WARM_UP_SECONDS, self._interval))
        return self.read_or_raise()

    def start(self, notify: Callable[[], object]) -> None:
        """`notify` is called from a thread after each reading."""
        threading.Thread(target=self._turn, args=(notify,), name="top-feed", daemon=True).start()

    def _turn(self, notify: Callable[[], object]) -> None:
        wait = min(WARM_UP_SECONDS, self._interval)
        while not self._stopped.wait(wait):
            began = self._clock()
            self.read()
            if not self._stopped.is_set():
                notify()
            wait = max(0.0, began + self._interval - self._clock())

    def close(self) -> None:
        self._stopped.set()
        self._source.close()
        self._isolation.close()
