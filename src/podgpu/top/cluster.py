"""`podgpu cluster` as a source of `top`: every node it sees, by its `/api/v1/view`."""

from __future__ import annotations

import asyncio

from podgpu.errors import SourceError
from podgpu.fetch.access import Access
from podgpu.fetch.endpoint import Answer, Endpoint
from podgpu.figures.device import View
from podgpu.figures.from_json import parse_view
from podgpu.http.exchange import open_session

DEADLINE = 10.0
"""Thousands of GPUs are some megabytes."""
_PATH = "api/v1/view"


class ClusterSource:
    deadline = DEADLINE + 1.0
    """Of the whole reading in `feed.py`; the request's own message says more."""
    has_rates = False
    """It has a round of its own, every 15 s: two readings in a second are mostly the same."""

    def __init__(self, url: str) -> None:
        """`url` is where `podgpu cluster` (or an exporter: it has the same API) listens. Raises UsageError."""
        self._endpoint = Endpoint(_base(url), Access(prefix="", server="podgpu cluster"), deadline=DEADLINE)
        self.name = self._endpoint.shown

    def read(self) -> View:
        """Raises SourceError."""
        answer = asyncio.run(self._ask())
        if answer.status != 200:
            raise self._endpoint.refused(answer)
        try:
            return parse_view(answer.body)
        except SourceError as error:
            raise SourceError(error.reason, f"{self.name} {error}: is it the address of podgpu cluster?") from error

    async def _ask(self) -> Answer:
        async with open_session() as session:
            return await self._endpoint.ask(session, path=_PATH, accept="application/json")

    def close(self) -> None:
        """Nothing stays open between readings."""


def _base(url: str) -> str:
    """Whoever has its metrics at hand has the right server."""
    return url.rstrip("/").removesuffix("/metrics")
