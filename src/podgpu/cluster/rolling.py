"""RollingMemory computes the rolling average where no Prometheus does: the mean of the rounds in the window.

Rounds are taken at multiples of the interval, one to each, so this is what `avg_over_time((…)[window:interval])` gives
at such an instant, its window open at the older end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from podgpu.cluster.reading import Scope, round_number

_UNIT = 1 << 60
"""Sums are whole numbers of this part, so that taking away what was added once leaves nothing behind."""
AVERAGED = frozenset({"cluster", "namespace", "node", "model"})


class _Window:
    __slots__ = ("rounds", "total")

    def __init__(self) -> None:
        self.rounds: deque[tuple[int, int]] = deque()
        self.total = 0

    def add(self, number: int, value: float) -> None:
        units = round(value * _UNIT)
        self.rounds.append((number, units))
        self.total += units

    def drop_before(self, number: int) -> None:
        while self.rounds and self.rounds[0][0] < number:
            self.total -= self.rounds.popleft()[1]

    @property
    def mean(self) -> float:
        return self.total / (_UNIT * len(self.rounds))


class RollingMemory:
    """The last rounds' figures, no longer than the window. A scope that is gone ends when its last round leaves it."""

    def __init__(self) -> None:
        self._windows: dict[Scope, _Window] = {}
        self._last: int | None = None

    def add(self, wall: float, interval: float, values: Mapping[Scope, float]) -> None:
        """One round's ratios. A second round in the same interval (somebody asked for it) would be one too many."""
        number = round_number(wall, interval)
        if self._last is not None and number < self._last - 1:
            self.clear()  # the clock was set back: what was kept lies in the future
        elif self._last is not None and number <= self._last:
            return
        self._last = number
        for scope, value in values.items():
            if scope.scope in AVERAGED:
                window = self._windows.get(scope)
                if window is None:
                    window = self._windows[scope] = _Window()
                window.add(number, value)

    def averages(self, wall: float, interval: float, window: float) -> dict[Scope, float]:
        oldest = round_number(wall, interval) - math.ceil(window / interval) + 1
        for kept in self._windows.values():
            kept.drop_before(oldest)
        self._windows = {scope: kept for scope, kept in self._windows.items() if kept.rounds}
        return {scope: kept.mean for scope, kept in self._windows.items()}

    def clear(self) -> None:
        self._windows.clear()
        self._last = None
