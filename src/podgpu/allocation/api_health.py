"""Says how the API server's feeds fare: a source that names nobody, so that an absence is counted and explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from podgpu.errors import SourceError
from podgpu.model import Allocation, Device


class Feed(Protocol):
    @property
    def error(self) -> SourceError | None: ...


class ApiHealth:
    name = "api-server"

    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds = list(feeds)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        for feed in self._feeds:
            if feed.error is not None:
                raise feed.error
        return Allocation()

    def close(self) -> None:
        """The feeds belong to others."""
