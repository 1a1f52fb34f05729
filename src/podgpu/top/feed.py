"""This module reads in the background, so that the screen never waits: `Feed` a source, again and again, keeping the
last good table beside the last error; `DetailsFeed` all a server knows of the GPU somebody looks at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from podgpu.clock import Clock
from podgpu.errors import SourceError, StartError
from podgpu.top.api import PodgpuApi
from podgpu.top.api_answers import GpuFacts, ServerHistory
from podgpu.top.details import More
from podgpu.top.figures import FlatView
from podgpu.top.history import History
from podgpu.top.lines import Line, flatten, lines_of
from podgpu.top.table import Watched
from podgpu.top.trails import POINTS, Trails
from podgpu.workers import Workers

WARM_UP_SECONDS = 1.0
"""Rates need two readings: the second comes this soon, whatever the interval."""
REFRESH_SECONDS = 5.0
"""Of the GPU somebody looks at."""
_REMEMBER_AGAIN_SECONDS = 300.0
"""Devices come, and top may have been stopped for a while."""
_REMEMBER_SOON_SECONDS = 30.0
"""While the server remembers too little, or nothing."""


class Source(Protocol):
    name: str
    deadline: float
    has_rates: bool
    """A second reading a second later tells what changed meanwhile."""

    @property
    def api(self) -> PodgpuApi | None:
        """Where more can be asked: None where the source is no server of podgpu's."""

    def read(self) -> FlatView:
        """Raises SourceError or StartError."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to show. Replaced as a whole."""

    lines: tuple[Line, ...] = ()
    view: FlatView = field(default_factory=FlatView)
    read_at: float = 0.0
    """Monotonic time of the reading the lines are from."""
    error: SourceError | StartError | None = None
    """Why there is nothing newer."""
    watched: Watched | None = None
    wall: float | None = None
    """Unix time of the reading, by the source's clock where it has one."""

    @property
    def notes(self) -> tuple[str, ...]:
        return self.view.notes


class Feed:
    def __init__(
        self,
        source: Source,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._interval = interval
        self._clock = Clock(clock, wall)
        self._history = History()
        self._trails = Trails(max(1.0, interval))
        self._remembered: ServerHistory | None = None
        """What the server remembers, until the next reading takes it up."""
        self._isolation = Workers(clock)
        self._stopped = threading.Event()
        self.seen = Seen()

    @property
    def name(self) -> str:
        """Whose figures they are."""
        return self._source.name

    @property
    def has_rates(self) -> bool:
        return self._source.has_rates

    @property
    def api(self) -> PodgpuApi | None:
        return self._source.api

    def read(self) -> Seen:
        """One reading; a source that hangs is left behind at its deadline, and not asked again until it returns."""
        name = self._source.name
        result = self._isolation.run({name: self._source.read}, self._source.deadline)[name]
        if result.value is None:
            self.seen = replace(self.seen, error=result.error)
            return self.seen
        now, view = self._clock.monotonic(), result.value
        wall = self._clock.wall() if view.taken_at is None else view.taken_at
        before = self.seen
        is_same = view.taken_at is not None and view.taken_at == before.view.taken_at and bool(before.lines)
        self._history.note(view, now)
        # A cluster is looked at more often than it looks itself: thousands of lines are not made anew for that.
        lines = before.lines if is_same else tuple(lines_of(view, self._history, wall))
        self.seen = Seen(lines, view, now, watched=self._watch(lines, now), wall=wall)
        return self.seen

    def _watch(self, lines: tuple[Line, ...], now: float) -> Watched:
        shown = [line for _, line in flatten(lines) if line.kind != "condition"]
        self._trails.note({line.row: line.utilization for line in shown}, now)
        remembered, self._remembered = self._remembered, None
        if remembered is not None:
            devices = {line.row: line.device.key for line in shown if line.device and line.kind in ("gpu", "instance")}
            self._trails.remember(remembered, devices, now)
        return Watched(self._trails.all(), self._trails.span)

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
        threading.Thread(target=self._remember, name="top-history", daemon=True).start()

    def _turn(self, notify: Callable[[], object]) -> None:
        wait = min(WARM_UP_SECONDS, self._interval)
        while not self._stopped.wait(wait):
            began = self._clock.monotonic()
            self.read()
            if not self._stopped.is_set():
                notify()
            wait = max(0.0, began + self._interval - self._clock.monotonic())

    def _remember(self) -> None:
        """Beside the readings: a history that takes its time holds up none of them."""
        while True:
            self.ask_history()
            wait = _REMEMBER_AGAIN_SECONDS if self._trails.remembers else _REMEMBER_SOON_SECONDS
            if self._stopped.wait(wait):
                return

    def ask_history(self) -> None:
        """For the next reading to take up; a server without one is none to complain about."""
        api = self._source.api
        if api is not None:
            try:
                self._remembered = api.history(POINTS)
            except SourceError:
                self._remembered = None

    def close(self) -> None:
        self._stopped.set()
        self._source.close()
        self._isolation.close()


class AsksGpu(Protocol):
    def gpu(self, uuid: str) -> GpuFacts:
        """Raises SourceError; bounded in time."""


class DetailsFeed:
    """One question at a time, about the GPU that was looked at last. What an earlier one had is forgotten."""

    def __init__(self, notify: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`notify` is called from a thread when there is an answer."""
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._uuid = ""
        self._more = More()
        self._asked_at = float("-inf")
        self._asking = False

    def look_at(self, uuid: str, api: AsksGpu | None) -> More | None:
        """What is known by now; asks anew where that is nothing, or old. None: nobody can be asked."""
        if api is None:
            return None
        with self._lock:
            if uuid != self._uuid:
                self._uuid, self._more, self._asked_at = uuid, More(), float("-inf")
            if not self._asking and self._clock() >= self._asked_at + REFRESH_SECONDS:
                self._asking, self._asked_at = True, self._clock()
                threading.Thread(target=self._ask, args=(uuid, api), name="top-details", daemon=True).start()
            return self._more

    def _ask(self, uuid: str, api: AsksGpu) -> None:
        more = More(error="the question could not be asked")
        try:
            more = More(api.gpu(uuid))
        except SourceError as error:
            knows_no_more = error.reason == "http_404"
            more = More(GpuFacts()) if knows_no_more else More(error=str(error))
        finally:
            with self._lock:
                self._asking = False
                if uuid == self._uuid:  # what was known stays, with the reason why there is nothing newer
                    self._more = more if more.facts else replace(more, facts=self._more.facts)
            self._notify()
