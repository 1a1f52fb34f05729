"""Reads a source in the background, so that the screen never waits, and keeps recent utilisation for sparklines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
    """Points of one row. The last one is the mean of the current step."""

    __slots__ = ("count", "points", "total")

    def __init__(self, points: bytes = b"") -> None:
        self.points = bytearray(points[-POINTS:].rjust(POINTS, bytes([NO_DATA])))
        self.total = 0.0
        self.count = 0

    def add(self, ratio: float) -> None:
        self.total += min(1.0, max(0.0, ratio))
        self.count += 1
        self.points[-1] = round(self.total / self.count * FULL)

    def shift(self, steps: int) -> None:
        self.points = (self.points + bytes([NO_DATA]) * min(steps, POINTS))[-POINTS:]
        self.total, self.count = 0.0, 0

    def merge_pairs(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        known = ([point for point in pair if point != NO_DATA] for pair in pairs)
        merged = bytes(round(sum(points) / len(points)) if points else NO_DATA for points in known)
        self.points = bytearray(merged.rjust(POINTS, bytes([NO_DATA])))


class Trails:
    """Recent utilisation by row: what top saw, and before that what the server remembers.

    Without a server's history the step doubles when all points are used, so that up to half an hour is shown.
    """

    def __init__(self, step: float = 1.0) -> None:
        """`step`: seconds from one point to the next, at first."""
        self.step = step
        self.has_history = False  # of the server
        self._trails: dict[Row, _Trail] = {}
        self._current = 0  # number of the current step
        self._used = POINTS  # points since the start; none before the first update

    def update(self, ratios: Mapping[Row, float | None], now: float) -> None:
        """`now` is monotonic. Other rows are dropped."""
        steps = math.floor(now / self.step) - self._current
        self._current += steps
        self._used = self._used + steps if self._trails else 0
        self._trails = {row: self._trails.get(row) or _Trail() for row in ratios}
        for row, trail in self._trails.items():
            if steps > 0:
                trail.shift(steps)
            if (ratio := ratios[row]) is not None:
                trail.add(ratio)
        if self._used >= POINTS and not self.has_history and self.step * 2 <= _MAX_STEP:
            self.step *= 2
            self._current, self._used = math.floor(now / self.step), POINTS // 2
            for trail in self._trails.values():
                trail.merge_pairs()

    def add_history(self, history: ServerHistory, rows: Mapping[Row, tuple[str, str]], now: float) -> None:
        """Replaces the points, unless the server has just started. `rows`: UUID and MIG instance of each row."""
        known = (len(points) - points.count(NO_DATA) for points in history.devices.values())
        if max(known, default=0) < _MIN_REMEMBERED:
            return
        if history.step != self.step:
            self._trails.clear()
        self.step, self.has_history, self._current = history.step, True, math.floor(now / history.step)
        for row, device in rows.items():
            self._trails[row] = _Trail(history.devices.get(device, b""))

    def snapshot(self) -> Sparklines:
        return Sparklines({row: bytes(trail.points) for row, trail in self._trails.items()}, self.step * POINTS)


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
        history, self._history = self._history, None
        if history is not None:
            self._trails.add_history(history, {line.row: line.row[1:3] for line in shown if line.is_slot}, now)
        self._trails.update({line.row: line.utilization for line in shown}, now)

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
