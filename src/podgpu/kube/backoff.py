"""How long to stay away after a connection ended. Pure: time is handed in."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Exponential with full jitter, so that two thousand nodes do not come back as one."""

    def __init__(
        self,
        first: float = 1.0,
        longest: float = 60.0,
        good_after: float = 60.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._longest = longest
        self._good_after = good_after
        self._chance = chance
        self._bad_turns = 0

    def after(self, lasted: float, at_least: float = 0.0) -> float:
        """Seconds to wait after a turn of `lasted` seconds; `at_least`: what the server itself asked for.

        A turn that lasted a good minute starts the count anew. In a shorter one the time it lasted is taken off the
        wait: a load balancer that cuts every silent connection after 50 s would otherwise leave us blind half the time.
        """
        if lasted >= self._good_after:
            self._bad_turns = 0
            wait = self._chance() * self._first
        else:
            wait = self._chance() * min(self._longest, self._first * 2.0 ** min(self._bad_turns, 60)) - lasted
        self._bad_turns += 1
        return max(wait, at_least, 0.0)
