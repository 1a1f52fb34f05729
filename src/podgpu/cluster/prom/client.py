"""This module asks a server with Prometheus' HTTP API, a few queries at a time, each within its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from podgpu.cluster.prom.answer import MOST_BESIDE, Matrix, Vector, parse_answer, parse_error, parse_matrix
from podgpu.cluster.prom.series import KnownSeries
from podgpu.errors import SourceError
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session

_INSTANT, _RANGE = "/api/v1/query", "/api/v1/query_range"
LARGEST_ANSWER = 32 * 1024 * 1024
"""Several are on their way at a time, and the chart gives the cluster view 512 MiB. 8,000 GPUs need half of it."""
AT_A_TIME = 5
"""A quarter of the 20 queries a Prometheus works on at a time, unless told otherwise: one answer is read here while it
makes others."""


class PrometheusClient:
    def __init__(self, url: str, access: Access | None = None, timeout: float = 10.0) -> None:
        """`url` may have a path, which is kept: …/prometheus for Mimir, …/select/0/prometheus for VictoriaMetrics'
        cluster. Raises UsageError."""
        access = access or Access(prefix="prometheus", server="Prometheus")
        self._client = HttpClient(url, access, timeout=timeout, max_bytes=LARGEST_ANSWER)
        self.shown = self._client.shown
        self._timeout = f"{max(1, round(timeout * 1000))}ms"
        self._method = "POST"
        self._session: aiohttp.ClientSession | None = None
        self._turns: asyncio.Semaphore | None = None

    async def ask(
        self,
        query: str,
        at: float | None = None,
        known: KnownSeries | None = None,
        most_values: Callable[[], int] = lambda: MOST_BESIDE,
    ) -> Vector:
        """The samples at that time; without one, now by the server's clock. `most_values`: asked when the answer is
        there. Raises SourceError."""
        form = {} if at is None else {"time": f"{at:.3f}"}
        return parse_answer(await self._answer(_INSTANT, query, form), self.shown, known, most_values())

    async def ask_range(self, query: str, start: float, end: float, step: float) -> Matrix:
        """The same at every step from one time to another; read in a thread. Raises SourceError."""
        form = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        body = await self._answer(_RANGE, query, form)
        return await asyncio.to_thread(parse_matrix, body, self.shown)

    async def _answer(self, path: str, query: str, form: dict[str, str]) -> bytes:
        # VictoriaMetrics would else answer for half a minute ago; to others the word means nothing.
        form = {"query": query, "timeout": self._timeout, "nocache": "1", **form}
        if self._session is None or self._turns is None:
            self._session, self._turns = open_session(), asyncio.Semaphore(AT_A_TIME)
        async with self._turns:
            answer = await self._send(self._session, path, form)
        if answer.status != 200:
            raise self._refused(answer)
        return answer.body

    async def _send(self, session: aiohttp.ClientSession, path: str, form: dict[str, str]) -> HttpResponse:
        """A query may be longer than a URL can be, so it is posted; some proxies let only GET through."""
        answer = await self._client.send(session, self._method, path, form, "application/json")
        if answer.status == 405 and self._method == "POST":
            answer = await self._client.send(session, "GET", path, form, "application/json")
            if answer.status == 200:
                self._method = "GET"
        return answer

    def _refused(self, answer: HttpResponse) -> SourceError:
        """It says in JSON why it refuses a query: 400 and 422 for what is wrong with it, 503 when it gave up."""
        said = parse_error(answer.body)
        if not said or answer.status in (401, 403) or 300 <= answer.status < 400:
            return self._client.status_error(answer)
        advice = "; see that --match is right" if answer.status in (400, 422) else ""
        return SourceError(f"http_{answer.status}", f"{self.shown} answers {answer.status}: {said}{advice}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = self._turns = None
