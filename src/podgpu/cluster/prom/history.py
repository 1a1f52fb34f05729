"""This module asks Prometheus about the past, for those who look at it: a few questions at a time, answers kept for a
moment.

Nothing here runs in the rounds. It is asked on the server's own loop, where no answer is waited for by anybody but who
asked; what is long to read is read in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.answer import Line
from podgpu.cluster.prom.backend import PrometheusPlace, check_node_labels
from podgpu.cluster.prom.client import PrometheusClient
from podgpu.cluster.prom.past import PastAnswers, PastQueries, device_of, kept_of, values_of
from podgpu.cluster.reading import moment
from podgpu.errors import SourceError
from podgpu.history import telling
from podgpu.history.asking import JSON, STEP, Kept, Range, Window
from podgpu.history.columns import byte_of
from podgpu.history.rows import Key
from podgpu.metrics import families as f

KEEP_SECONDS = float(STEP)
"""For so long an answer is given again to whoever asks the same."""
_MOST_KEPT = 64
_AT_A_TIME = 2
MOST_DEVICES = 256
"""Of one pod."""


class PrometheusHistory:
    def __init__(self, place: PrometheusPlace, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError."""
        PrometheusClient(place.url, place.access, place.timeout)
        self._place = place
        self._match = promql.parse_matchers(place.match)
        self._node_labels = check_node_labels(place.node_labels)
        self._clock = clock
        self._answers: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}
        self._turns: asyncio.Semaphore | None = None

    async def sparklines(self, asked: Range) -> bytes:
        found: bytes = await self._once(("lines", asked), lambda: self._sparklines(asked))
        return found

    async def gpu(self, device: Key, asked: Range) -> JSON | None:
        found: JSON | None = await self._once((device, asked), lambda: self._gpu(device, asked))
        return found

    async def pod(self, namespace: str, pod: str, asked: Range) -> JSON | None:
        key = namespace, pod, asked
        found: JSON | None = await self._once(key, lambda: self._pod(namespace, pod, asked))
        return found

    async def _once(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Everybody who asks the same within a moment has the same answer. One that failed is not kept."""
        known = self._answers.get(key)
        asking: asyncio.Future[Any]
        if known is None or self._clock() - known[0] > KEEP_SECONDS:
            asking = asyncio.ensure_future(ask())
            asking.add_done_callback(_look_at)
            self._answers[key] = self._clock(), asking
            while len(self._answers) > _MOST_KEPT:
                self._answers.pop(next(iter(self._answers)))
        else:
            asking = known[1]
        try:
            return await asyncio.shield(asking)
        except SourceError:
            if (now := self._answers.get(key)) is not None and now[1] is asking:
                del self._answers[key]
            raise

    # What is asked

    @asynccontextmanager
    async def _asking(self, asked: Range) -> AsyncIterator[_Asking]:
        self._turns = self._turns or asyncio.Semaphore(_AT_A_TIME)
        async with self._turns:
            client = PrometheusClient(self._place.url, self._place.access, self._place.timeout)
            try:
                answer = await client.ask("time()")
                now = moment(answer.samples[0].value) if answer.samples else None
                if now is None:
                    raise SourceError("malformed", f"{client.shown} does not tell the time when asked for time()")
                end = now // STEP * STEP
                window = Window(end - asked.step * asked.steps, asked.step, asked.steps)
                yield _Asking(client, window, PastQueries(self._match, self._node_labels, asked.step))
            finally:
                await client.close()

    async def _sparklines(self, asked: Range) -> bytes:
        async with self._asking(asked) as ask:
            lines = await ask.lines(ask.queries.utilization())
        return await asyncio.to_thread(_sparklines_json, ask.window, lines)

    async def _gpu(self, device: Key, asked: Range) -> JSON | None:
        async with self._asking(asked) as ask:
            answers = await ask.about([device.uuid])
        kept = await asyncio.to_thread(kept_of, answers, self._node_labels)
        found = next((keep for keep in kept if keep.key == device), None)
        return None if found is None else telling.gpu_json(ask.window, found)

    async def _pod(self, namespace: str, pod: str, asked: Range) -> JSON | None:
        async with self._asking(asked) as ask:
            held = {device_of(line.labels).uuid for line in await ask.lines(ask.queries.held_by(namespace, pod))}
            uuids = sorted(held - {""})[:MOST_DEVICES]
            if not uuids:
                return None
            answers = await ask.about(uuids)
        return await asyncio.to_thread(_pod_json, answers, self._node_labels, namespace, pod)


def _look_at(asking: asyncio.Future[Any]) -> None:
    """Whoever asked may be gone when it fails: asyncio would complain that nobody looked."""
    if not asking.cancelled():
        asking.exception()


class _Asking:
    """The questions about one window."""

    def __init__(self, client: PrometheusClient, window: Window, queries: PastQueries) -> None:
        self._client = client
        self.window = window
        self.queries = queries

    async def lines(self, query: str) -> Sequence[Line]:
        window = self.window
        answer = await self._client.ask_range(query, window.start + window.step, window.end, window.step)
        return answer.lines

    async def about(self, uuids: Sequence[str]) -> PastAnswers:
        queries = self.queries
        figures = queries.figures(uuids)
        presence, targets, ratios, memory, health, *each = await asyncio.gather(
            self.lines(queries.presence(uuids)),
            self.lines(queries.targets(uuids)),
            self.lines(queries.own(f.CONTAINER_UTILIZATION.name, uuids)),
            self.lines(queries.own(f.CONTAINER_MEMORY.name, uuids)),
            self.lines(queries.health(uuids)),
            *(self.lines(query) for query in figures.values()),
        )
        return PastAnswers(
            self.window, dict(zip(figures, each, strict=True)), presence, targets, ratios, memory, health
        )


def _sparklines_json(window: Window, lines: Sequence[Line]) -> bytes:
    found: dict[str, bytes] = {}
    for line in lines:
        key = device_of(line.labels)
        if key.uuid:
            found[key.text] = bytes([byte_of(value) for value in values_of(line, window)])
    return telling.sparklines_json(window, found)


def _pod_json(answers: PastAnswers, node_labels: Sequence[str], namespace: str, pod: str) -> JSON | None:
    kept: list[Kept] = kept_of(answers, node_labels)
    return telling.pod_json(answers.window, namespace, pod, kept)
