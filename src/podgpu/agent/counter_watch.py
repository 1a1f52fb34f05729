"""CounterWatch looks whether the counters changed, and keeps what went wrong with them: the last good ones stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from podgpu.catalog.counters import Counter as MetricCounter
from podgpu.configuration.counter_feeds import CounterFeed
from podgpu.errors import SourceError, UsageError
from podgpu.isolate import Isolation
from podgpu.model import Outcome

_NAME = "counters"


class CounterWatch:
    def __init__(self, feed: CounterFeed | None, isolation: Isolation, deadline: float) -> None:
        self._feed = feed
        self._isolation = isolation
        self._deadline = deadline
        self.outcomes: tuple[Outcome, ...] = ()
        self.errors: Mapping[tuple[str, str], int] = {}
        """(source, reason) -> how often since the start. Replaced, never changed: others read it meanwhile."""

    @property
    def watches(self) -> bool:
        """There is something that may change."""
        return self._feed is not None

    def read(self, take: Callable[[tuple[MetricCounter, ...]], None]) -> None:
        """Hands over the counters as they are now; `take` may refuse them by a UsageError."""
        if self._feed is None:
            return
        result = self._isolation.run({_NAME: self._feed.read}, self._deadline)[_NAME]
        if isinstance(result.error, SourceError):
            self._refuse(result.error)
        elif result.value is not None:
            try:
                take(result.value)
            except UsageError as e:  # a collection of the configuration file has none of them
                self._refuse(SourceError("malformed", str(e)))
            else:
                self.outcomes = (Outcome(_NAME, result.seconds),)

    def _refuse(self, error: SourceError) -> None:
        self.errors = Counter(self.errors) + Counter([(_NAME, error.reason)])
        self.outcomes = (Outcome(_NAME, 0.0, error.reason, str(error)),)
