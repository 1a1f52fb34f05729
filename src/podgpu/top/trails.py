"""This module keeps utilisation of late, a row each: what top saw itself, and before that what the server remembers.
Pure.

A row keeps one byte a point and one mean for the moment. As long as nobody remembers more, points come closer
together at the beginning and further apart the longer top looks on, so that all it has seen is shown, up to an hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from podgpu.top.api_answers import FULL, NO_DATA, ServerHistory
from podgpu.top.lines import Row

POINTS = 60
_LONGEST_STEP = 60.0
_LEAST_REMEMBERED = 6
"""Points, with which a sparkline says something."""


class _Trail:
    __slots__ = ("count", "points", "total")

    def __init__(self) -> None:
        self.points = bytearray([NO_DATA]) * POINTS
        """The oldest first; the last is of the step that is not over."""
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
        """How many steps ago, and what it was."""
        return ((POINTS - 1 - at, point) for at, point in enumerate(self.points) if point != NO_DATA)


class Trails:
    def __init__(self, step: float = 1.0) -> None:
        """`step`: seconds from one point to the next, to begin with."""
        self.step = step
        self._trails: dict[Row, _Trail] = {}
        self._head: int | None = None
        """Number of the step that is not over."""
        self._first = 0
        self._remembered = False

    @property
    def remembers(self) -> bool:
        """A server's memory was taken up."""
        return self._remembered

    @property
    def span(self) -> float:
        """Seconds that all points together stand for."""
        return self.step * POINTS

    def note(self, ratios: Mapping[Row, float | None], now: float) -> None:
        """By row; `now` is monotonic. A row that is not there any more is forgotten."""
        self._advance(now)
        for gone in self._trails.keys() - ratios.keys():
            del self._trails[gone]
        for row, ratio in ratios.items():
            trail = self._trails.setdefault(row, _Trail())
            if ratio is not None:
                trail.add(ratio)

    def remember(self, history: ServerHistory, rows: Mapping[Row, tuple[str, str]], now: float) -> None:
        """What the server saw before top did. `rows`: the device that each row is about. A server that has hardly
        begun remembers less than top sees by itself: it is asked again later."""
        self._advance(now)
        if max(map(_known_points, history.devices.values()), default=0) < _LEAST_REMEMBERED:
            return
        self._space_out(history.step)
        self._remembered = True
        for row, device in rows.items():
            trail, points = self._trails.get(row), history.devices.get(device)
            if trail is not None and points:
                _fill(trail.points, points)

    def all(self) -> dict[Row, bytes]:
        return {row: bytes(trail.points) for row, trail in self._trails.items()}

    def _advance(self, now: float) -> None:
        head = math.floor(now / self.step)
        if self._head is None:
            self._head = self._first = head
        if head > self._head:
            for trail in self._trails.values():
                trail.move(head - self._head)
            self._head = head
        is_full = self._head - self._first >= POINTS
        if is_full and not self._remembered and self.step * 2 <= _LONGEST_STEP:
            self._space_out(self.step * 2)

    def _space_out(self, step: float) -> None:
        """The same points, as far apart as `step`: each is the mean of those that fall into it."""
        if step == self.step or self._head is None:
            return
        head = math.floor(self._head * self.step / step)
        for trail in self._trails.values():
            _respace(trail, self._head, self.step, head, step)
        self._first = math.floor(self._first * self.step / step)
        self._head, self.step = head, step


def _respace(trail: _Trail, head: int, step: float, new_head: int, new_step: float) -> None:
    found: dict[int, list[int]] = {}
    for ago, point in trail.known():
        new_ago = new_head - math.floor((head - ago) * step / new_step)
        if 0 <= new_ago < POINTS:
            found.setdefault(new_ago, []).append(point)
    trail.points = bytearray([NO_DATA]) * POINTS
    for ago, points in found.items():
        trail.points[POINTS - 1 - ago] = round(sum(points) / len(points))
    now = found.get(0, [])
    trail.total, trail.count = sum(now) / FULL, len(now)


def _known_points(points: bytes) -> int:
    return len(points) - points.count(NO_DATA)


def _fill(own: bytearray, remembered: bytes) -> None:
    """Where top saw nothing itself."""
    for ago in range(1, min(len(remembered), POINTS) + 1):
        if own[-ago] == NO_DATA:
            own[-ago] = remembered[-ago]
