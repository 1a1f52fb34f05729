"""Reads the token counters of LLM engines from the pods that hold GPUs.

A pod's endpoint belongs to a tenant, so it is never trusted: short deadlines, a limit of size, no
redirects, no credentials, and only known families. While nothing answers, a container is tried at
most every 5 minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from podgpu.charge import Tokens
from podgpu.clock import Clock
from podgpu.errors import SourceError, UsageError
from podgpu.fleet.parts import ContainerName, EngineState
from podgpu.http_client import METRICS_TYPES, Access, HttpClient, url_host
from podgpu.kube.objects import PodEndpoint
from podgpu.metrics.engines import EngineReading, engines, find_quantile, read_engine
from podgpu.model import PodName

RETRY_SECONDS = 300.0
_TIMEOUT = 1.0  # of a request
_PROBE_TIMEOUTS = 5.0  # how many of them the search for an engine in a container may take
_MAX_BYTES = 2 * 1024 * 1024  # vLLM with one model writes 50 KB
_MAX_PORTS = 6  # of a container
_MAX_FAILURES = 3  # in a row, before the engine is looked for again
_CONCURRENCY = 256
_PROBES = 32  # at the same time
_MAX_RATE = 1e7  # tokens per second; no engine reads them faster, even from its cache
_QUANTILE = 0.95
_QUANTILE_SECONDS = 300.0
_BEFORE_SECONDS = 1800.0  # the time before, with which it is compared
_KEPT_EVERY = 60.0  # seconds; 36 readings of an engine are 50 KB
_METRICS_PORTS = ("metrics", "http-metrics", "system", "prom", "http")  # names, the likeliest first
_ACCESS = Access(advice="podgpu sends no credentials to pods, so its metrics must need none")
_SILENT = frozenset({"timeout", "unreachable"})  # another path of this port is as silent
_HINT = "SGLang needs --enable-metrics, trtllm-serve needs return_perf_metrics: true"

_log = logging.getLogger(__name__)


_Buckets = Mapping[float, float]  # of the histogram of the time to the first token


class _FirstTokens(NamedTuple):
    read_at: float
    buckets: _Buckets


_History = deque[_FirstTokens]


class Place(NamedTuple):
    ip: str
    port: int
    path: str

    @property
    def url(self) -> str:
        return f"http://{url_host(self.ip)}:{self.port}{self.path}"


@dataclass
class _Watched:
    """One container that holds GPUs."""

    state: EngineState = field(default_factory=EngineState)
    place: Place | None = None  # of the engine, once it has answered
    client: HttpClient | None = None
    last: EngineReading | None = None
    read_at: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    probe: asyncio.Task[None] | None = None
    history: _History = field(default_factory=deque)


def list_places(endpoint: PodEndpoint, container: str, is_first: bool) -> list[Place]:
    """Returns where the container's engine may answer, the likeliest place first.

    `is_first`: of the pod's containers that hold GPUs. Ports that no container declares are tried
    for the first one only, so that no engine is counted twice.
    """
    declared = []
    of_others = set()
    for port in endpoint.ports:
        if port.container == container:
            declared.append(port)
        else:
            of_others.add(port.number)

    declared.sort(key=lambda port: (_rank(port.name), port.number))
    numbers = [port.number for port in declared][:_MAX_PORTS]
    # The default ports of the engines, if none is declared.
    if is_first and not numbers:
        default_ports = dict.fromkeys(engine.port for engine in engines())
        numbers = [number for number in default_ports if number not in of_others]

    places = []
    annotated = endpoint.metrics_port
    # The annotation may name a port that no container declares.
    is_own = annotated in numbers or (is_first and annotated not in of_others)
    if annotated and is_own:
        path = endpoint.metrics_path or "/metrics"
        places.append(Place(endpoint.ip, annotated, path))

    paths = dict.fromkeys(engine.path for engine in engines())
    for number in numbers:
        for path in paths:
            places.append(Place(endpoint.ip, number, path))

    # The annotation may name one of the other places.
    return list(dict.fromkeys(places))


def _rank(name: str) -> int:
    if name in _METRICS_PORTS:
        return _METRICS_PORTS.index(name)
    return len(_METRICS_PORTS)


class EngineReader:
    def __init__(
        self,
        read_endpoints: Callable[[], Mapping[PodName, PodEndpoint]],
        clock: Clock | None = None,
        timeout: float = _TIMEOUT,
    ) -> None:
        self._timeout = timeout
        self._read_endpoints = read_endpoints
        self._clock = clock or Clock()
        self._watched: dict[ContainerName, _Watched] = {}
        self._reads = asyncio.Semaphore(_CONCURRENCY)
        self._probes = asyncio.Semaphore(_PROBES)

    @property
    def states(self) -> dict[ContainerName, EngineState]:
        return {name: watched.state for name, watched in self._watched.items()}

    async def read(self, session: aiohttp.ClientSession, held: Collection[ContainerName]) -> None:
        """Reads the known engines, and starts to look for others.

        `held`: the containers that hold GPUs. Never waits longer than a request.
        """
        for name in self._watched.keys() - set(held):
            ended = self._watched.pop(name)
            self._stop_probe(ended)

        endpoints = await asyncio.to_thread(self._read_endpoints)
        now = self._clock.monotonic()
        first: dict[PodName, str] = {}
        reads = []
        for name in sorted(held):
            pod = name[:2]
            container = name[2]
            is_first = first.setdefault(pod, container) == container
            watched = self._watched.setdefault(name, _Watched())
            endpoint = endpoints.get(pod)
            if endpoint is None or endpoint.is_refused:
                watched.state = _describe_missing(endpoint)
            elif watched.place is not None and watched.place.ip == endpoint.ip:
                reads.append(self._read_again(session, watched))
            elif watched.probe is None and now >= watched.retry_at:
                watched.retry_at = now + RETRY_SECONDS
                places = list_places(endpoint, container, is_first)
                search = self._look_for(session, watched, places)
                watched.probe = asyncio.create_task(search)

        await asyncio.gather(*reads)

    async def _look_for(
        self, session: aiohttp.ClientSession, watched: _Watched, places: list[Place]
    ) -> None:
        errors = [SourceError("no_port", "the pod has no port for metrics")]
        try:
            async with self._probes, asyncio.timeout(_PROBE_TIMEOUTS * self._timeout):
                if await self._try_places(session, watched, places, errors):
                    return
        except TimeoutError:
            errors.append(SourceError("timeout", "no answer in time"))
        finally:
            watched.probe = None

        # The error of an answer says more than silence.
        error = max(errors, key=lambda error: _weigh(error.reason))
        message = f"no LLM engine answers, next attempt in 5 minutes: {error} ({_HINT})"
        watched.state = _make_failed(watched.state, error.reason, message)

    async def _try_places(
        self,
        session: aiohttp.ClientSession,
        watched: _Watched,
        places: Iterable[Place],
        errors: list[SourceError],
    ) -> bool:
        """Stores the first answer, and returns whether there is one. Adds errors to `errors`."""
        silent_ports: set[int] = set()
        for place in places:
            if place.port in silent_ports:
                continue

            try:
                client = HttpClient(place.url, _ACCESS, timeout=self._timeout, max_bytes=_MAX_BYTES)
                reading = await _fetch(client, session)
            except UsageError:
                continue  # the address or the annotation is invalid
            except SourceError as error:
                errors.append(error)
                if error.reason in _SILENT:
                    silent_ports.add(place.port)
                continue

            watched.place = place
            watched.client = client
            watched.failures = 0
            self._add(watched, reading)
            return True

        return False

    async def _read_again(self, session: aiohttp.ClientSession, watched: _Watched) -> None:
        assert watched.client is not None
        try:
            async with self._reads:
                reading = await _fetch(watched.client, session)
        except SourceError as error:
            watched.state = _make_failed(watched.state, error.reason, str(error))
            watched.failures += 1
            if watched.failures >= _MAX_FAILURES:
                # The engine may answer at another port when the container is tried again.
                watched.place = None
                watched.retry_at = self._clock.monotonic() + RETRY_SECONDS
            return

        watched.failures = 0
        self._add(watched, reading)

    def _add(self, watched: _Watched, reading: EngineReading) -> None:
        """Adds the tokens since the last reading. The first one says nothing about the time."""
        now = self._clock.monotonic()
        counted = watched.state.counted
        per_second = None
        reason = ""
        message = ""
        last = watched.last
        watched.last = reading
        seconds = now - watched.read_at
        watched.read_at = now
        if last is not None and last.engine == reading.engine and seconds > 0:
            watched.last = reading.with_ranks_of(last)
            increase = reading.since(last)
            tokens = sum(increase)
            if tokens > _MAX_RATE * seconds:
                reason = "impossible"
                message = f"its counters rose by {tokens:,.0f} tokens in {seconds:.0f} s"
            else:
                counted = counted.plus(increase)
                per_second = Tokens(increase.prompt / seconds, increase.generated / seconds)

        first_token, first_token_before = _find_first_tokens(
            watched.history, now, reading.first_token
        )
        watched.state = EngineState(
            engine=reading.engine,
            models=tuple(sorted(filter(None, reading.counters))),
            counted=counted,
            per_second=per_second,
            running=reading.running,
            waiting=reading.waiting,
            cache_ratio=reading.cache_ratio,
            first_token_seconds=first_token,
            first_token_before_seconds=first_token_before,
            reason=reason,
            message=message,
        )

    async def close(self) -> None:
        for watched in self._watched.values():
            self._stop_probe(watched)

    @staticmethod
    def _stop_probe(watched: _Watched) -> None:
        if watched.probe is not None:
            watched.probe.cancel()


async def _fetch(client: HttpClient, session: aiohttp.ClientSession) -> EngineReading:
    body = await client.get(session, accept=METRICS_TYPES)
    try:
        return await asyncio.to_thread(read_engine, body)
    except SourceError:
        raise
    except Exception as error:
        # A bug that one pod triggers must not stop the others.
        _log.exception("%s: unexpected error; please report it", client.shown)
        raise SourceError("bug", f"unexpected error ({type(error).__name__})") from error


def _weigh(reason: str) -> int:
    if reason == "no_port":
        return 0
    if reason in _SILENT:
        return 1
    if reason.startswith("http_") or reason in ("no_tokens", "not_metrics"):
        return 2
    return 3


def _describe_missing(endpoint: PodEndpoint | None) -> EngineState:
    if endpoint is None:
        return EngineState(reason="no_address", message="the API server has no address of the pod")
    message = "the pod's annotation prometheus.io/scrape is false"
    return EngineState(reason="refused", message=message)


def _make_failed(state: EngineState, reason: str, message: str) -> EngineState:
    """Keeps what was counted, and drops the values of the last answer."""
    return EngineState(
        engine=state.engine,
        models=state.models,
        counted=state.counted,
        reason=reason,
        message=message[:400],
    )


def _find_first_tokens(
    history: _History, now: float, buckets: _Buckets
) -> tuple[float | None, float | None]:
    """Returns the 95th percentile of the time to the first token in the last 5 minutes, and in the
    half hour before.
    """
    # After a restart of the engine, its counters cannot be compared.
    if history and not _is_later(history[-1].buckets, buckets):
        history.clear()

    # Keeps one reading per minute, and the last one.
    if len(history) > 1 and history[-1].read_at - history[-2].read_at < _KEPT_EVERY:
        history.pop()
    history.append(_FirstTokens(now, buckets))

    # The oldest reading is the last one before the half hour.
    start = now - _QUANTILE_SECONDS
    oldest = start - _BEFORE_SECONDS
    while len(history) > 2 and history[1].read_at <= oldest:
        history.popleft()

    first = history[0].buckets
    middle = first
    for earlier in history:
        if earlier.read_at <= start:
            middle = earlier.buckets

    recent = _find_quantile_between(middle, buckets)
    return recent, _find_quantile_between(first, middle)


def _find_quantile_between(before: _Buckets, after: _Buckets) -> float | None:
    counts = {}
    for bound, count in after.items():
        counts[bound] = count - before.get(bound, 0.0)
    return find_quantile(counts, _QUANTILE)


def _is_later(before: _Buckets, now: _Buckets) -> bool:
    if before.keys() != now.keys():
        return False
    return all(now[bound] >= count for bound, count in before.items())
