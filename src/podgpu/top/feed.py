"""Reads a source in the background, so that the screen never waits, and stores recent utilisation for sparklines."""

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

WARM_UP_SECONDS = 1.0  # time between the first two readings; short, because rates need two readings
REFRESH_SECONDS = 5.0  # how often the selected GPU's details are fetched
POINTS = 60
_HISTORY_SECONDS = 300.0  # how often the server's history is read, to include new GPUs and times when top was stopped
_HISTORY_RETRY_SECONDS = 30.0  # used instead while the server has no history
_MAX_STEP = 60.0
_MIN_KNOWN_POINTS = 6  # fewer points do not make a useful sparkline


# Sparklines


@dataclass(frozen=True, slots=True)
class Sparklines:
    points: Mapping[Row, bytes] = field(default_factory=dict)  # encoded as described at `text.FULL`, newest last
    span: float = 60.0  # time covered by all points, in seconds


class _RowPoints:
    """Points of one row. The last point is the mean of the current step."""

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


class RecentUtilization:
    """Recent utilisation by row: top's own readings, preceded by the server's history.

    Without a server's history, the step doubles whenever all points are used, until they cover half an hour or more.
    """

    def __init__(self, step: float = 1.0) -> None:
        """`step` is the initial time between two points, in seconds."""
        self.step = step
        self.has_history = False  # True after the server's history was added
        self._points: dict[Row, _RowPoints] = {}
        self._current = 0  # number of the current step
        self._used = POINTS  # number of points since the first reading; set to 0 by the first update

    def update(self, ratios: Mapping[Row, float | None], now: float) -> None:
        """Adds one reading at the monotonic time `now`. Removes rows that are not in `ratios`."""
        steps = math.floor(now / self.step) - self._current
        self._current += steps
        self._used = self._used + steps if self._points else 0
        self._points = {row: self._points.get(row) or _RowPoints() for row in ratios}
        for row, points in self._points.items():
            if steps > 0:
                points.shift(steps)
            if (ratio := ratios[row]) is not None:
                points.add(ratio)
        if self._used >= POINTS and not self.has_history and self.step * 2 <= _MAX_STEP:
            self.step *= 2
            self._current, self._used = math.floor(now / self.step), POINTS // 2
            for points in self._points.values():
                points.merge_pairs()

    def add_history(self, history: ServerHistory, rows: Mapping[Row, tuple[str, str]], now: float) -> None:
        """Replaces the points by the server's, unless it has too few. `rows` has UUID and MIG instance of each row."""
        known = (len(points) - points.count(NO_DATA) for points in history.devices.values())
        if max(known, default=0) < _MIN_KNOWN_POINTS:
            return
        if history.step != self.step:
            self._points.clear()
        self.step, self.has_history, self._current = history.step, True, math.floor(now / history.step)
        for row, device in rows.items():
            self._points[row] = _RowPoints(history.devices.get(device, b""))

    def snapshot(self) -> Sparklines:
        return Sparklines({row: bytes(points.points) for row, points in self._points.items()}, self.step * POINTS)


# Readings


@dataclass(frozen=True, slots=True)
class Seen:
    """The last successful reading, and the error if a later one failed."""

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
        self._recent = RecentUtilization(max(1.0, interval))
        self._history: ServerHistory | None = None  # added to the sparklines by the next reading
        self._workers = Workers(self._clock.monotonic)
        self._stopped = threading.Event()
        self.seen: Seen | None = None
        self.name = source.name

    @property
    def api(self) -> PodgpuApi | None:
        return self._source.api

    def read(self) -> Seen:
        """Reads once, within the source's deadline. Raises SourceError or StartError if no reading succeeded before."""
        result = self._workers.run({self.name: self._source.read}, self._source.deadline)[self.name]
        if result.value is None:
            assert result.error is not None
            if self.seen is None:
                raise result.error
            self.seen = replace(self.seen, error=result.error)
            return self.seen
        view, before = result.value.view, self.seen
        now, wall = self._clock.monotonic(), view.taken_at or self._clock.wall()
        # A cluster's view changes every 15 s. In between, reuse the lines, because there may be thousands.
        is_same = before is not None and view.taken_at is not None and view.taken_at == before.view.taken_at
        lines = before.lines if before and is_same else tuple(make_lines(view, wall, result.value.processes))
        self._update_recent(lines, now)
        self.seen = Seen(view, lines, now, wall, self._recent.snapshot())
        return self.seen

    def _update_recent(self, lines: Sequence[Line], now: float) -> None:
        shown = [line for _, line in flatten(lines) if line.kind != "condition"]
        history, self._history = self._history, None
        if history is not None:
            self._recent.add_history(history, {line.row: line.row[1:3] for line in shown if line.is_slot}, now)
        self._recent.update({line.row: line.utilization for line in shown}, now)

    def read_for_print(self) -> Seen:
        """Reads twice if the source computes rates. Raises SourceError or StartError."""
        seen = self.read()
        if self._source.has_rates:
            self._stopped.wait(min(WARM_UP_SECONDS, self._interval))
            seen = self.read()
        if seen.error is not None:
            raise seen.error
        return seen

    def start(self, notify: Callable[[], object]) -> None:
        """Starts the background threads. Calls `notify` from a thread after each reading."""
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
        """Runs in its own thread, so that a slow response does not delay readings."""
        while True:
            self.read_history()
            if self._stopped.wait(_HISTORY_SECONDS if self._recent.has_history else _HISTORY_RETRY_SECONDS):
                return

    def read_history(self) -> None:
        """Fetches the history for the next reading. Ignores errors, because not every server has a history."""
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
    error: str = ""  # why the last request failed


class DetailsApi(Protocol):
    def gpu(self, uuid: str) -> GpuDetails:
        """Raises SourceError."""


class DetailsFeed:
    """Fetches the details of the selected GPU, one request at a time."""

    def __init__(self, notify: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """Calls `notify` from a thread after each response."""
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._uuid = ""
        self._fetched = FetchedDetails()
        self._requested_at = float("-inf")
        self._requesting = False

    def get(self, uuid: str, api: DetailsApi | None) -> FetchedDetails | None:
        """Returns the cached details, and starts a request if they are old. Returns None if there is no API."""
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
                if uuid == self._uuid:  # after an error, keep the old details
                    self._fetched = fetched if fetched.details else replace(fetched, details=self._fetched.details)
            self._notify()
