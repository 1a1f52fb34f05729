"""Sends the documents of nodes to an OTLP receiver, in a thread.

Metrics are sent at an interval, and events (XIDs, lost GPUs) soon after they happened. Only events
wait for a receiver that does not answer: counters are cumulative, so the next request contains
what an earlier one would have said.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
from google.protobuf.message import DecodeError

from podgpu.clock import Clock, FaultLog, double_delay, spread_delay
from podgpu.errors import Note, SourceError, one_line
from podgpu.http_client import HttpClient, HttpResponse, open_session, parse_retry_after
from podgpu.metrics import otlp_pb2 as pb
from podgpu.metrics.otlp import PushedNode, encode_metrics
from podgpu.metrics.otlp_logs import EventFinder
from podgpu.watch import Watch

DEFAULT_INTERVAL = 60.0
_STEP = 5.0  # seconds until an event is sent
_LEAST_PAUSE = 0.1
_EMPTY_SECONDS = 2.0  # until there are readings
_FIRST_RETRY = 5.0
_MAX_RETRY = 300.0
_RETRYABLE = frozenset({429, 502, 503, 504})
# A Collector accepts 20 MiB.
_MAX_REQUEST_BYTES = 4 * 1024 * 1024
_MAX_EVENTS = 1000  # about 1 MiB
_GZIP_LEVEL = 1
_LONGEST_MESSAGE = 200
_REPEAT_SECONDS = 600.0
_log = logging.getLogger(__name__)
ReadNodes = Callable[[], Sequence[PushedNode]]


class Receiver(NamedTuple):
    client: HttpClient
    path: str  # appended to the client's URL


@dataclass(frozen=True)
class PushSettings:
    metrics: Receiver | None  # None: not sent
    logs: Receiver | None
    interval: float = DEFAULT_INTERVAL
    compress: bool = True
    attributes: Mapping[str, str] = field(default_factory=dict)  # of the resource
    kubernetes: bool = False  # True if the names of nodes are those of Kubernetes


class OtlpPusher(Watch):
    name = "otlp"

    def __init__(self, settings: PushSettings, read: ReadNodes, clock: Clock | None = None) -> None:
        """`read` returns the nodes that have current values."""
        super().__init__()
        self._settings = settings
        self._read = read
        self._clock = clock or Clock()
        self._finder = EventFinder(
            self._clock.wall(), settings.attributes, kubernetes=settings.kubernetes
        )
        self._metrics = _Signal("metrics", settings.metrics, self._clock, settings.compress)
        self._logs = _Signal("logs", settings.logs, self._clock, settings.compress)
        self._events: deque[bytes] = deque(maxlen=_MAX_EVENTS)

    def warnings(self) -> list[Note]:
        """Returns what is wrong with the receivers."""
        signals = (self._metrics, self._logs)
        return [signal.problem for signal in signals if signal.problem is not None]

    def update(self) -> None:
        nodes = self._read()
        if self._logs.receiver is not None:
            self._events += self._finder.find(nodes, self._clock.wall())
        asyncio.run(self._send(nodes))
        self.pause = self._find_pause()

    async def _send(self, nodes: Sequence[PushedNode]) -> None:
        async with open_session() as session:
            await self._send_events(session)
            await self._send_metrics(session, nodes)

    async def _send_events(self, session: aiohttp.ClientSession) -> None:
        if not self._events or not self._logs.is_due:
            return
        if await self._logs.post(session, b"".join(self._events)):
            self._events.clear()

    async def _send_metrics(
        self, session: aiohttp.ClientSession, nodes: Sequence[PushedNode]
    ) -> None:
        if not self._metrics.is_due:
            return

        settings = self._settings
        now = self._clock.wall()
        parts = encode_metrics(nodes, settings.attributes, now, kubernetes=settings.kubernetes)
        is_empty = True
        for request in _join_parts(parts):
            is_empty = False
            if not await self._metrics.post(session, request):
                return

        self._metrics.wait(_EMPTY_SECONDS if is_empty else settings.interval)

    def _find_pause(self) -> float:
        """Returns the seconds until the next step, at most until metrics are due."""
        if self._metrics.receiver is None:
            return _STEP
        return min(_STEP, max(_LEAST_PAUSE, self._metrics.seconds_left))


def _join_parts(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yields requests of limited size. A single part may be larger."""
    joined: list[bytes] = []
    size = 0
    for part in parts:
        if joined and size + len(part) > _MAX_REQUEST_BYTES:
            yield b"".join(joined)
            joined = []
            size = 0
        joined.append(part)
        size += len(part)

    if joined:
        yield b"".join(joined)


class _Signal:
    """The receiver of metrics or logs, and when it may get the next request."""

    def __init__(self, name: str, receiver: Receiver | None, clock: Clock, compress: bool) -> None:
        self.receiver = receiver
        self.problem: Note | None = None
        self._name = name
        self._clock = clock
        self._compress = compress
        self._due_at = float("-inf")
        self._failures = 0
        self._faults: FaultLog[str] = FaultLog(clock.monotonic, _REPEAT_SECONDS)

    @property
    def is_due(self) -> bool:
        return self.receiver is not None and self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        return self._due_at - self._clock.monotonic()

    def wait(self, seconds: float) -> None:
        self._due_at = self._clock.monotonic() + seconds

    async def post(self, session: aiohttp.ClientSession, request: bytes) -> bool:
        """Returns False if the receiver must get the data later.

        Data that it rejects are not sent again.
        """
        assert self.receiver is not None
        client, path = self.receiver
        headers = {"Content-Type": "application/x-protobuf"}
        if self._compress:
            headers["Content-Encoding"] = "gzip"
            request = gzip.compress(request, _GZIP_LEVEL)

        try:
            response = await client.send(session, "POST", path, content=request, headers=headers)
        except SourceError as error:
            return self._retry(error, "")

        if response.status in _RETRYABLE:
            return self._retry(client.status_error(response), response.retry_after)

        self._failures = 0
        rejection = _explain_rejection(client, response)
        if rejection is None:
            self.problem = None
            if self._faults.recover(self._name):
                _log.info("OTLP %s: %s accepts them again", self._name, client.shown)
        else:
            self._report(rejection, "they are lost")

        return True

    def _retry(self, error: SourceError, retry_after: str) -> bool:
        longest = double_delay(self._failures, _FIRST_RETRY, _MAX_RETRY)
        self._failures += 1
        requested = parse_retry_after(retry_after, self._clock.wall())
        self.wait(max(spread_delay(longest), requested))
        self._report(error, "podgpu will retry")
        return False

    def _report(self, error: SourceError, consequence: str) -> None:
        text = f"OTLP {self._name}: {error}; {consequence}"
        self.problem = Note(f"OTLP {self._name}", text, is_logged=True)
        if self._faults.fail(self._name, error.reason):
            _log.warning("%s", text)


def _explain_rejection(client: HttpClient, response: HttpResponse) -> SourceError | None:
    if not 200 <= response.status < 300:
        return client.status_error(response)

    try:
        partial = pb.Response.FromString(response.body).partial_success
    except DecodeError:
        return None  # for example, an empty JSON object

    if not partial.rejected:
        return None

    reason = one_line(partial.error_message[:_LONGEST_MESSAGE])
    text = f"{client.shown} rejected {partial.rejected} of them: {reason}"
    return SourceError("partial_success", text)
