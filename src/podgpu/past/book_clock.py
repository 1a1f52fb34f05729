"""The clock of the books: it follows the monotonic clock and does not trust a jump."""

from __future__ import annotations

from typing import NamedTuple

from podgpu.clock import Clock

STABLE_SECONDS = 600.0  # a wall clock that jumped is accepted after this time without another jump
_SAME_CLOCK = 2.0  # seconds; smaller differences are corrections of a running clock


class BookTime(NamedTuple):
    time: float  # Unix time
    is_settled: bool = True  # False while the wall clock may be wrong
    has_jumped: bool = False  # the wall clock has just begun to disagree
    shift: float = 0.0  # the clock was accepted: rounds since the jump were this much earlier


class BookClock:
    """Converts monotonic time to Unix time.

    If the wall clock jumps, the time goes on as before the jump. If the new wall clock stays
    stable for ten minutes, it is accepted, and the rounds since the jump are moved to it. So a
    clock that is wrong for a shorter time changes nothing.
    """

    def __init__(self, clock: Clock, last_round: float = 0.0) -> None:
        """`last_round`: Unix time of the newest record. Time does not start before it."""
        self._clock = clock
        now = clock.monotonic()
        self._offset = max(clock.wall(), last_round) - now
        self._jumped_offset: float | None = None  # of the wall clock, while it is not accepted
        self._unsettled_since = now

    @property
    def now(self) -> float:
        return self._clock.monotonic() + self._offset

    @property
    def jump(self) -> float:
        """By how many seconds the wall clock jumped. 0 if it agrees, or is accepted."""
        return 0.0 if self._jumped_offset is None else self._jumped_offset - self._offset

    def read(self) -> BookTime:
        """Compares the clocks. Call it once per round."""
        now = self._clock.monotonic()
        offset = self._clock.wall() - now
        is_stable = now - self._unsettled_since >= STABLE_SECONDS
        if abs(offset - self._offset) < _SAME_CLOCK:
            if self._jumped_offset is not None:
                self._jumped_offset = None
                self._unsettled_since = now - STABLE_SECONDS
                is_stable = True
            self._offset = offset
            return BookTime(now + offset, is_stable)

        if self._jumped_offset is None or abs(offset - self._jumped_offset) >= _SAME_CLOCK:
            had_jumped = self._jumped_offset is not None
            self._jumped_offset = offset
            self._unsettled_since = now
            # Before the first jump, the time was settled only if it had been stable.
            return BookTime(now + self._offset, False, has_jumped=is_stable and not had_jumped)

        if not is_stable:
            return BookTime(now + self._offset, False)

        shift = offset - self._offset
        self._offset = offset
        self._jumped_offset = None
        return BookTime(now + offset, shift=shift)
