"""How long to stay away after a connection ended. Pure: time is handed in."""

from __future__ import annotations

import random
from collections.abc import Callable

_REFUSALS = frozenset({"forbidden", "unauthorized", "not_found", "no_token", "bad_kubeconfig"})
"""Reasons that stand until a person changes something: asking every few seconds helps nobody."""


class Backoff:
    """Exponential with full jitter, so that two thousand nodes do not come back as one.

    A server that is away is looked for every few seconds, so that its return is seen soon; one that answers with a
    refusal is asked less and less. Refusals are counted apart: one that has just come back may refuse for a moment.
    """

    def __init__(
        self,
        first: float = 1.0,
        longest: float = 10.0,
        longest_refused: float = 60.0,
        good_after: float = 60.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first = first
        self._longest = longest
        self._longest_refused = longest_refused
        self._good_after = good_after
        self._chance = chance
        self._away_turns = 0
        self._refused_turns = 0
        self._last = ""

    def after(self, lasted: float, reason: str = "", at_least: float = 0.0) -> float:
        """Seconds to wait after a turn of `lasted` seconds that failed for `reason` (empty: it just ended);
        `at_least`: what the server itself asked for.

        A turn that lasted a good minute starts the count anew. In a shorter one the time it lasted is taken off the
        wait: a load balancer that cuts every silent connection after 50 s would otherwise leave us blind half the time.
        """
        if lasted >= self._good_after:
            self._away_turns = self._refused_turns = 0
            lasted = 0.0
        new_start = reason == "gone" and self._last != "gone"
        self._last = reason
        wait = self._chance() * (self._first if new_start else self._grown(reason)) - lasted
        return max(wait, at_least, 0.0)

    def _grown(self, reason: str) -> float:
        if reason in _REFUSALS:
            self._refused_turns += 1
            return self._doubled(self._refused_turns, self._longest_refused)
        self._refused_turns = 0
        self._away_turns += 1
        return self._doubled(self._away_turns, self._longest)

    def _doubled(self, turns: int, longest: float) -> float:
        return min(longest, self._first * 2.0 ** min(turns - 1, 60))
