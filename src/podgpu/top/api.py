"""This module asks podgpu's own servers, an exporter or the cluster, for what their pages show: view, history, a GPU's
facts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from podgpu.cluster.view import decode_view
from podgpu.errors import SourceError
from podgpu.http_client import Access, HttpClient
from podgpu.top.api_answers import GpuFacts, ServerHistory, parse_gpu_facts, parse_history
from podgpu.top.figures import FlatView, flat_view

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _:-]{0,127}")
DEADLINE = 10.0
"""Thousands of GPUs are some megabytes."""


class PodgpuApi:
    def __init__(self, url: str, server: str = "podgpu cluster", deadline: float = DEADLINE) -> None:
        """`url`: where it listens; its /metrics will do. `server` is what should run there. Raises UsageError."""
        base = url.rstrip("/").removesuffix("/metrics")
        self._client = HttpClient(base, Access(prefix="", server=server), timeout=deadline)
        self._server = server
        self.name = self._client.shown

    def view(self) -> FlatView:
        """Raises SourceError."""
        body = self._get("api/v1/view")
        try:
            return flat_view(decode_view(body))
        except SourceError as error:
            raise SourceError(error.reason, f"{self.name} {error}: is it the address of {self._server}?") from error

    def history(self, points: int) -> ServerHistory:
        """Raises SourceError, also where the server has none."""
        return parse_history(self._get("api/v1/history", {"points": str(points)}))

    def gpu(self, uuid: str) -> GpuFacts:
        """Raises SourceError."""
        if not _PLAIN_NAME.fullmatch(uuid):  # it came from a server, and is to be a part of a path
            raise SourceError("http_404", f"{self.name} cannot be asked about a GPU of this name")
        return parse_gpu_facts(self._get(f"api/v1/gpus/{uuid}"))

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        return self._client.get_blocking(path, query)


class ClusterSource:
    """`podgpu cluster` as a source: every node it sees."""

    deadline = DEADLINE + 1.0
    """Of the whole reading in `feed.py`; the request's own message says more."""
    has_rates = False
    """It has a round of its own, every 15 s: two readings in a second are mostly the same."""

    def __init__(self, url: str) -> None:
        """`url` is where `podgpu cluster` (or an exporter: it has the same API) listens. Raises UsageError."""
        self._own_api = PodgpuApi(url)
        self.name = self._own_api.name

    @property
    def api(self) -> PodgpuApi | None:
        return self._own_api

    def read(self) -> FlatView:
        """Raises SourceError."""
        return self._own_api.view()

    def close(self) -> None:
        """Nothing stays open between readings."""
