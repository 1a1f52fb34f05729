"""The clock of the books: it follows the monotonic clock and does not trust a jump."""

from __future__ import annotations

from typing import NamedTuple

from podgpu.clock import Clock

STABLE_SECONDS = 600.0  # a wall clock that jumped is accepted after this time without another jump
_SAME_CLOCK = 2.0  # seconds; smaller differences are corrections of a running clock


class BookTime(NamedTuple):
    time: float  # Unix time
    is_settled: bool = True  # False while the wall clock may be wrong, so the time may be, too
    # Set only if the time has become settled with this reading: the unsettled rounds before belong
    # this many seconds later.
    settled_shift: float | None = None


class BookClock:
    """Converts monotonic time to Unix time.

    If the wall clock jumps, the time goes on as before the jump, but is not settled. If the wall
    clock returns, nothing has happened. If it stays stable for ten minutes, it is accepted, and the
    rounds since the jump are moved to it. The first ten minutes are not settled either.
    """

    def __init__(self, clock: Clock, last_round: float = 0.0) -> None:
        """`last_round`: Unix time of the newest record. Time does not start before it."""
        self._clock = clock
        self._offset = max(clock.wall(), last_round) - clock.monotonic()
        self._has_settled = False  # True if `_offset` is trusted
        self._jumped_offset: float | None = None  # of the wall clock, while it is not accepted
        self._unsettled_since = clock.monotonic()

    @property
    def now(self) -> float:
        return self._clock.monotonic() + self._offset

    @property
    def is_settled(self) -> bool:
        return self._has_settled and self._jumped_offset is None

    @property
    def jump(self) -> float:
        """By how many seconds the wall clock jumped. 0 if it agrees, or is accepted."""
        if self._jumped_offset is None:
            return 0.0
        return self._jumped_offset - self._offset

    def read(self) -> BookTime:
        """Compares the clocks. Call it once per round."""
        now = self._clock.monotonic()
        offset = self._clock.wall() - now
        if abs(offset - self._offset) < _SAME_CLOCK:
            return self._agree(now, offset)

        jumped_again = (
            self._jumped_offset is None or abs(offset - self._jumped_offset) >= _SAME_CLOCK
        )
        if jumped_again:
            self._jumped_offset = offset
            self._unsettled_since = now
        if now - self._unsettled_since < STABLE_SECONDS:
            return BookTime(now + self._offset, is_settled=False)

        return self._settle(now, offset)

    def _agree(self, now: float, offset: float) -> BookTime:
        if self.is_settled:
            self._offset = offset
            return BookTime(now + offset)
        if self._has_settled:
            # The clock has returned.
            return self._settle(now, self._offset)
        if self._jumped_offset is not None:
            # It jumped in the first ten minutes and has returned: these begin again.
            self._jumped_offset = None
            self._unsettled_since = now
        if now - self._unsettled_since < STABLE_SECONDS:
            return BookTime(now + self._offset, is_settled=False)

        return self._settle(now, self._offset)

    def _settle(self, now: float, offset: float) -> BookTime:
        shift = offset - self._offset
        self._offset = offset
        self._has_settled = True
        self._jumped_offset = None
        return BookTime(now + offset, settled_shift=shift)
