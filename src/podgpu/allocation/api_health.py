"""Says how the API server's feeds fare: a source that names nobody, so that an absence is counted and explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from podgpu.errors import SourceError
from podgpu.model import Allocation, Device


class Feed(Protocol):
    @property
    def error(self) -> SourceError | None: ...

    @property
    def failures(self) -> Mapping[str, int]:
        """Reason word -> how often since the start."""
        ...


class ApiHealth:
    name = "api-server"

    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds = list(feeds)
        self._seen: list[Counter[str]] = [Counter() for _ in self._feeds]

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Fails while a feed does, and once for what went wrong and right again between two readings."""
        passed = [reason for number in range(len(self._feeds)) for reason in self._new_failures(number)]
        for feed in self._feeds:
            if feed.error is not None:
                raise feed.error
        if passed:
            raise SourceError(
                passed[0],
                f"a watch failed since the last reading ({', '.join(passed)}) and goes on again: nothing to do,"
                " unless it happens again and again",
            )
        return Allocation()

    def _new_failures(self, number: int) -> list[str]:
        now = Counter(self._feeds[number].failures)
        before, self._seen[number] = self._seen[number], now
        return sorted(now - before)

    def close(self) -> None:
        """The feeds belong to others."""
