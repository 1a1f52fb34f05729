"""When the wall clock was set: moments kept by it must move along. Pure but for what it showed before."""

from __future__ import annotations

_LEAST_SECONDS = 2.0
"""A smaller step moves nothing: moments that are told as series should stay where they are."""


class WallClock:
    """Compared with a clock that only goes on; one that stands still while the machine sleeps makes that a step too."""

    def __init__(self) -> None:
        self._ahead: float | None = None

    def step(self, now: float, wall: float) -> float:
        """Seconds by which it was set since it was last compared; 0 when it was not. `now` is monotonic."""
        ahead = wall - now
        step = 0.0 if self._ahead is None else ahead - self._ahead
        if self._ahead is None or abs(step) >= _LEAST_SECONDS:
            self._ahead = ahead
            return step
        return 0.0
