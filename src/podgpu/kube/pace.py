"""This module says how long a watcher waits: for an answer, for an event, and until it asks again. Pure: time is handed
in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

REFUSALS = frozenset({"forbidden", "unauthorized", "not_found", "no_token", "bad_kubeconfig"})
"""Reasons that stand until a person changes something: asking every few seconds helps nobody."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Every duration of a watcher, and its dice; tests bring their own."""

    first_wait: float = 1.0
    longest_wait: float = 10.0
    """While the server is away: its return is seen within about as long."""
    longest_refused: float = 60.0
    """While it answers, and says no: a person must change something first."""
    good_after: float = 60.0
    settle: float = 1.0
    """A watch that stands for so long is believed: one from a forgotten version is accepted first, and then ended."""
    silence: float = 150.0
    """A watch without a byte for so long is doubted. A server sends bookmarks about every minute, but none while
    nothing of that kind changes anywhere in the cluster: silence alone is no failure."""
    watch_seconds: tuple[int, int] = (300, 600)
    """How long one watch may last: drawn anew each time, so that many watchers do not end theirs together."""
    deadline: float = 30.0
    """For a list, and for the server to accept a watch."""
    chance: Callable[[], float] = random.random

    def draw_watch_seconds(self) -> int:
        least, most = self.watch_seconds
        return least + int(self.chance() * (most - least))


class Backoff:
    """Exponential with full jitter, so that two thousand nodes do not come back as one.

    A server that is away is looked for every few seconds, so that its return is seen soon; one that answers with a
    refusal is asked less and less. Refusals are counted apart: one that has just come back may refuse for a moment.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._away_turns = 0
        self._refused_turns = 0
        self._last = ""

    def after(self, lasted: float, reason: str = "", at_least: float = 0.0) -> float:
        """Seconds to wait after a turn of `lasted` seconds that failed for `reason` (empty: it just ended);
        `at_least`: what the server itself asked for.

        A turn that lasted a good minute starts the count anew. In a shorter one the time it lasted is taken off the
        wait: a load balancer that cuts every silent connection after 50 s would otherwise leave us blind half the time.
        """
        if lasted >= self._pace.good_after:
            self._away_turns = self._refused_turns = 0
            lasted = 0.0
        new_start = reason == "gone" and self._last != "gone"
        self._last = reason
        wait = self._pace.chance() * (self._pace.first_wait if new_start else self._grown(reason)) - lasted
        return max(wait, at_least, 0.0)

    def _grown(self, reason: str) -> float:
        if reason in REFUSALS:
            self._refused_turns += 1
            return self._doubled(self._refused_turns, self._pace.longest_refused)
        self._refused_turns = 0
        self._away_turns += 1
        return self._doubled(self._away_turns, self._pace.longest_wait)

    def _doubled(self, turns: int, longest: float) -> float:
        return min(longest, self._pace.first_wait * 2.0 ** min(turns - 1, 60))
