"""Reads a source in the background, so that the screen never waits, and keeps recent utilisation for sparklines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from podgpu.clock import Clock
from podgpu.cluster.view import GpuDetails, View
from podgpu.errors import SourceError, StartError
from podgpu.top.lines import Line, Row, flatten, make_lines
from podgpu.top.source import PodgpuApi, ServerHistory, Source
from podgpu.top.text import FULL, NO_DATA
from podgpu.workers import Workers

WARM_UP_SECONDS = 1.0  # the second reading follows this soon, because rates need two
REFRESH_SECONDS = 5.0  # of the details of a GPU
POINTS = 60
_HISTORY_SECONDS = 300.0  # a server's history is read again: new GPUs appear, and top may have been stopped
_HISTORY_RETRY_SECONDS = 30.0  # while the server has no history
_MAX_STEP = 60.0
_MIN_REMEMBERED = 6  # points that make a useful sparkline


# Sparklines


@dataclass(frozen=True, slots=True)
class Sparklines:
    points: Mapping[Row, bytes] = field(default_factory=dict)  # see `text.FULL`; the newest is last
    span: float = 60.0  # seconds that all points cover


class _Trail:
    __slots__ = ("count", "points", "total")

    def __init__(self) -> None:
        self.points = bytearray([NO_DATA]) * POINTS  # the last one is the mean of the current step
        self.total = 0.0
        self.count = 0

    def add(self, ratio: float) -> None:
        self.total += min(1.0, max(0.0, ratio))
        self.count += 1
        self.points[-1] = round(self.total / self.count * FULL)

    def move(self, steps: int) -> None:
        kept = min(steps, POINTS)
        self.points = self.points[kept:] + bytearray([NO_DATA]) * kept
        self.total, self.count = 0.0, 0

    def known(self) -> Iterator[tuple[int, int]]:
        """Returns how many steps ago each known point is, and its value."""
        return ((POINTS - 1 - at, point) for at, point in enumerate(self.points) if point != NO_DATA)

    def fill(self, remembered: bytes) -> None:
        for ago in range(1, min(len(remembered), POINTS) + 1):
            if self.points[-ago] == NO_DATA:
                self.points[-ago] = remembered[-ago]


class Trails:
    """Recent utilisation by row: what top saw, and before that what the server remembers.

    Without a server's history the step grows while top runs, so that everything it saw is shown, up to an hour.
    """

    def __init__(self, step: float = 1.0) -> None:
        """`step`: seconds from one point to the next, at first."""
        self.step = step
        self.has_history = False  # of the server
        self._trails: dict[Row, _Trail] = {}
        self._current: int | None = None  # number of the current step
        self._first = 0

    def update(self, ratios: Mapping[Row, float | None], now: float) -> None:
        """`now` is monotonic. Other rows are dropped."""
        self._advance(now)
        for gone in self._trails.keys() - ratios.keys():
            del self._trails[gone]
        for row, ratio in ratios.items():
            trail = self._trails.setdefault(row, _Trail())
            if ratio is not None:
                trail.add(ratio)

    def add_history(self, history: ServerHistory, rows: Mapping[Row, tuple[str, str]], now: float) -> None:
        """`rows`: UUID and MIG instance of each row. A server that has just started knows less than top: ignored."""
        self._advance(now)
        known = (len(points) - points.count(NO_DATA) for points in history.devices.values())
        if max(known, default=0) < _MIN_REMEMBERED:
            return
        self._change_step(history.step)
        self.has_history = True
        for row, device in rows.items():
            if row in self._trails and device in history.devices:
                self._trails[row].fill(history.devices[device])

    def snapshot(self) -> Sparklines:
        return Sparklines({row: bytes(trail.points) for row, trail in self._trails.items()}, self.step * POINTS)

    def _advance(self, now: float) -> None:
        current = math.floor(now / self.step)
        if self._current is None:
            self._current = self._first = current
        if current > self._current:
            for trail in self._trails.values():
                trail.move(current - self._current)
            self._current = current
        is_full = self._current - self._first >= POINTS
        if is_full and not self.has_history and self.step * 2 <= _MAX_STEP:
            self._change_step(self.step * 2)

    def _change_step(self, step: float) -> None:
        """Each new point is the mean of the old points that fall into it."""
        if step == self.step or self._current is None:
            return
        current = math.floor(self._current * self.step / step)
        for trail in self._trails.values():
            merged: dict[int, list[int]] = {}
            for ago, point in trail.known():
                new_ago = current - math.floor((self._current - ago) * self.step / step)
                if 0 <= new_ago < POINTS:
                    merged.setdefault(new_ago, []).append(point)
            trail.points = bytearray([NO_DATA]) * POINTS
            for ago, points in merged.items():
                trail.points[POINTS - 1 - ago] = round(sum(points) / len(points))
            newest = merged.get(0, [])
            trail.total, trail.count = sum(newest) / FULL, len(newest)
        self._first = math.floor(self._first * self.step / step)
        self._current, self.step = current, step


# Readings


@dataclass(frozen=True, slots=True)
class Seen:
    """The last good reading, and the error of a later one."""

    view: View
    lines: tuple[Line, ...] = ()
    read_at: float = 0.0  # monotonic
    now: float = 0.0  # Unix time of the reading by the source's clock
    sparklines: Sparklines = field(default_factory=Sparklines)
    error: SourceError | StartError | None = None

    @property
    def notes(self) -> list[str]:
        notes = list(self.view.notes)
        for node in self.view.nodes:
            if node.old:
                age = "" if node.age_seconds is None else f": {node.age_seconds:.0f} s"
                notes.append(f"{node.name} is stale{age}")
            notes += [f"{node.name}: {text}" for text in node.notes]
        return notes


class Feed:
    def __init__(self, source: Source, interval: float, clock: Clock | None = None) -> None:
        self._source = source
        self._interval = interval
        self._clock = clock or Clock()
        self._trails = Trails(max(1.0, interval))
        self._history: ServerHistory | None = None  # until the next reading uses it
        self._workers = Workers(self._clock.monotonic)
        self._stopped = threading.Event()
        self.seen: Seen | None = None
        self.name = source.name

    @property
    def api(self) -> PodgpuApi | None:
        return self._source.api

    def read(self) -> Seen:
        """Reads once, within the source's deadline. Raises SourceError or StartError if there never was a reading."""
        result = self._workers.run({self.name: self._source.read}, self._source.deadline)[self.name]
        if result.value is None:
            assert result.error is not None
            if self.seen is None:
                raise result.error
            self.seen = replace(self.seen, error=result.error)
            return self.seen
        view, before = result.value.view, self.seen
        now, wall = self._clock.monotonic(), view.taken_at or self._clock.wall()
        # A cluster's view changes every 15 s. Thousands of lines are not made again in between.
        is_same = before is not None and view.taken_at is not None and view.taken_at == before.view.taken_at
        lines = before.lines if before and is_same else tuple(make_lines(view, wall, result.value.processes))
        self._update_trails(lines, now)
        self.seen = Seen(view, lines, now, wall, self._trails.snapshot())
        return self.seen

    def _update_trails(self, lines: Sequence[Line], now: float) -> None:
        shown = [line for _, line in flatten(lines) if line.kind != "condition"]
        self._trails.update({line.row: line.utilization for line in shown}, now)
        history, self._history = self._history, None
        if history is not None:
            self._trails.add_history(history, {line.row: line.row[1:3] for line in shown if line.is_slot}, now)

    def read_for_print(self) -> Seen:
        """Reads twice if rates need that. Raises SourceError or StartError."""
        seen = self.read()
        if self._source.has_rates:
            self._stopped.wait(min(WARM_UP_SECONDS, self._interval))
            seen = self.read()
        if seen.error is not None:
            raise seen.error
        return seen

    def start(self, notify: Callable[[], object]) -> None:
        """`notify` is called from a thread after each reading."""
        threading.Thread(target=self._run, args=(notify,), name="top-feed", daemon=True).start()
        threading.Thread(target=self._run_history, name="top-history", daemon=True).start()

    def _run(self, notify: Callable[[], object]) -> None:
        wait = min(WARM_UP_SECONDS, self._interval)
        while not self._stopped.wait(wait):
            began = self._clock.monotonic()
            self.read()
            if not self._stopped.is_set():
                notify()
            wait = max(0.0, began + self._interval - self._clock.monotonic())

    def _run_history(self) -> None:
        """In its own thread, so that a slow answer does not delay readings."""
        while True:
            self.read_history()
            if self._stopped.wait(_HISTORY_SECONDS if self._trails.has_history else _HISTORY_RETRY_SECONDS):
                return

    def read_history(self) -> None:
        """For the next reading. Not every server has a history, so errors are ignored."""
        api = self._source.api
        if api is not None:
            try:
                self._history = api.history(POINTS)
            except SourceError:
                self._history = None

    def close(self) -> None:
        self._stopped.set()
        self._source.close()
        self._workers.close()


# Details


@dataclass(frozen=True, slots=True)
class FetchedDetails:
    details: GpuDetails | None = None
    error: str = ""  # why there are none, or no newer ones


class DetailsApi(Protocol):
    def gpu(self, uuid: str) -> GpuDetails:
        """Raises SourceError."""


class DetailsFeed:
    """Fetches the details of the selected GPU, one request at a time."""

    def __init__(self, notify: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`notify` is called from a thread after each answer."""
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._uuid = ""
        self._fetched = FetchedDetails()
        self._requested_at = float("-inf")
        self._requesting = False

    def get(self, uuid: str, api: DetailsApi | None) -> FetchedDetails | None:
        """Returns what is known now, and starts a request if that is old. None: there is no API."""
        if api is None:
            return None
        with self._lock:
            if uuid != self._uuid:
                self._uuid, self._fetched, self._requested_at = uuid, FetchedDetails(), float("-inf")
            if not self._requesting and self._clock() >= self._requested_at + REFRESH_SECONDS:
                self._requesting, self._requested_at = True, self._clock()
                threading.Thread(target=self._fetch, args=(uuid, api), name="top-details", daemon=True).start()
            return self._fetched

    def _fetch(self, uuid: str, api: DetailsApi) -> None:
        fetched = FetchedDetails(error="the request failed")
        try:
            fetched = FetchedDetails(api.gpu(uuid))
        except SourceError as error:
            has_none = error.reason == "http_404"
            fetched = FetchedDetails(GpuDetails()) if has_none else FetchedDetails(error=str(error))
        finally:
            with self._lock:
                self._requesting = False
                if uuid == self._uuid:  # after an error the old details stay
                    self._fetched = fetched if fetched.details else replace(fetched, details=self._fetched.details)
            self._notify()
