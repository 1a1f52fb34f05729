"""Reads a source in the background, so that the screen never waits, and stores recent utilisation for sparklines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from podgpu.clock import Clock
from podgpu.cluster.view import View
from podgpu.errors import SourceError, StartError
from podgpu.top.lines import Line, flatten, make_lines
from podgpu.top.source import POINTS, FetchedDetails, Source, Sparklines
from podgpu.top.text import FULL, NO_DATA
from podgpu.workers import Workers


@dataclass(frozen=True, slots=True)
class Seen:
    """The last successful reading, and the error if a later one failed."""

    view: View
    lines: tuple[Line, ...] = ()
    read_at: float = 0.0  # monotonic
    now: float = 0.0  # Unix time of the reading by the source's clock
    sparklines: Sparklines = field(default_factory=Sparklines)
    fetched: FetchedDetails | None = None
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
        self._workers = Workers(self._clock.monotonic)
        self._wake = threading.Event()
        self._stopped = False
        self._recent: dict[tuple[str, str], deque[int]] = {}  # own readings, encoded as described at `text.FULL`
        self._selected = ""
        self.seen: Seen | None = None
        self.name = source.name

    def read(self) -> Seen:
        """Reads once, within the source's deadline. Raises SourceError or StartError if no reading succeeded before."""
        result = self._workers.run({self.name: partial(self._source.read, self._selected)}, self._source.deadline)[
            self.name
        ]
        if result.value is None:
            assert result.error is not None
            if self.seen is None:
                raise result.error
            self.seen = replace(self.seen, error=result.error)
            return self.seen
        (view, processes, history, fetched), before = result.value, self.seen
        wall = view.taken_at or self._clock.wall()
        # A cluster's view changes every 15 s. In between, reuse the lines, because there may be thousands.
        is_same = before is not None and not processes and (view, wall) == (before.view, before.now)
        lines = before.lines if before and is_same else tuple(make_lines(view, wall, processes))
        self._add_points(lines)
        sparklines = history if history is not None and history.points else self._own_sparklines()
        self.seen = Seen(view, lines, self._clock.monotonic(), wall, sparklines, fetched)
        return self.seen

    def _add_points(self, lines: tuple[Line, ...]) -> None:
        ratios = {line.row[1:3]: line.utilization for _, line in flatten(lines) if line.is_slot}
        self._recent = {key: self._recent.get(key) or deque(maxlen=POINTS) for key in ratios}
        for key, ratio in ratios.items():
            self._recent[key].append(NO_DATA if ratio is None else round(min(1.0, max(0.0, ratio)) * FULL))

    def _own_sparklines(self) -> Sparklines:
        """Returns the readings since the start, for a server without history."""
        points = {key: bytes(points) for key, points in self._recent.items()}
        return Sparklines(points, self._interval * POINTS)

    def select(self, uuid: str) -> None:
        """Selects the GPU whose details are read. An empty UUID selects none."""
        if uuid != self._selected:
            self._selected = uuid
            self._wake.set()

    def start(self, notify: Callable[[], object]) -> None:
        """Starts the background thread. Calls `notify` from it after each reading."""
        threading.Thread(target=self._run, args=(notify,), name="top-feed", daemon=True).start()

    def _run(self, notify: Callable[[], object]) -> None:
        while not self._stopped:
            began = self._clock.monotonic()
            self._wake.clear()
            self.read()
            notify()
            self._wake.wait(max(0.0, began + self._interval - self._clock.monotonic()))

    def close(self) -> None:
        self._stopped = True
        self._wake.set()
        self._workers.close()
