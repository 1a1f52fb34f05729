"""This module scrapes the exporters itself, as the embedded backend: it keeps what each said last, and nothing else.

What one exporter writes costs it only. Whose address left the list is kept as it last was, until it is too old.

A slow or dead exporter never delays the others: one that failed last time waits in a lane of its own, and there never
so long that nobody notices when it is back; one that is slow for the first time gives its slot away after a moment, and
goes on without it until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import aiohttp

from podgpu.clock import Clock
from podgpu.cluster.reading import ClusterReading, NodeReading, TargetOutcome
from podgpu.cluster.scraping.exposition import USED_FIELD, ExpositionReader, Shelf
from podgpu.cluster.scraping.lanes import Lane, allow_connections
from podgpu.errors import SourceError, UsageError
from podgpu.figures.device import Owner
from podgpu.figures.from_exposition import NODE_LABELS
from podgpu.http_client import KEEP_ALIVE_SECONDS, MAX_METRICS_BYTES, Access, HttpClient, open_session, redact_url

_USUAL_SIZE = 1024 * 1024
_LARGE_AT_A_TIME = 4
"""Expositions larger than usual are in memory at a time."""
_LONG = 512 * 1024
_GIVE_WAY_SECONDS = 0.002
"""Between two parts of a long text. Whoever is answered meanwhile needs the interpreter a dozen times, and gets it late
each time from a thread that works on: of 250,000 lines a scrape waited 109 ms, and 39 with pauses."""
_ROUNDS_TO_ASK_FAILED = 4
_LARGEST_DETAILS = 256 * 1024
"""Of one GPU: JSON is read in one go, in which no other thread runs."""
_ASIDE = 2.5
"""Seconds for what somebody who looks waits for."""
_PLAIN = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_log = logging.getLogger(__name__)
_NO_OWNERS: Mapping[tuple[str, str], Owner] = {}


@dataclass(frozen=True)
class ScrapeSettings:
    deadline: float = 5.0
    """For one exporter's whole exposition."""
    concurrency: int = 64
    """How many are asked at a time; those that are slow come on top, four times as many at most."""
    used_field: str = USED_FIELD
    fields_beside: tuple[int, ...] = ()
    node_labels: tuple[str, ...] = NODE_LABELS
    largest: int = MAX_METRICS_BYTES
    most_targets: int = 10_000
    """Twice the nodes of the largest cluster that Kubernetes supports. In many a cluster anybody can make a Service."""
    keep_gone: float = 300.0
    """Seconds for which one that left the list is kept as it last was: --drop-after."""

    @property
    def patience(self) -> float:
        """After which a slow one no longer counts among those under way."""
        return min(1.0, self.deadline / 4)

    def slots_for_failed(self, failed: int) -> int:
        """So many that each of them is asked at least in every fourth round, where that is not too many at a time."""
        return min(max(1, self.concurrency // 8, -(-failed // _ROUNDS_TO_ASK_FAILED)), 4 * self.concurrency)


class Targets(Protocol):
    def urls(self) -> Sequence[str]:
        """Whom to ask now; those that could not be asked for lately as they last were."""

    def notes(self) -> Sequence[str]:
        """What is not as it should be with this list."""

    def close(self) -> None: ...


class FixedTargets:
    """The list of --scrape."""

    def __init__(self, urls: Sequence[str], access: Access | None = None) -> None:
        """The same URL twice is meant once. Raises UsageError for what is no URL."""
        found: dict[str, str] = {}
        for url in filter(None, (url.strip() for url in urls)):
            shown = HttpClient(url, access, default_path="/metrics").shown
            before = found.setdefault(shown, url)
            if before != url and ("@" in before + url or "?" in before + url):
                raise UsageError(f"--scrape: {shown} is named twice, with different logins or queries; keep one")
        if not found:
            raise UsageError("--scrape names no exporter: write HOST:9400,HOST:9400,…")
        self._urls = tuple(found.values())

    def urls(self) -> Sequence[str]:
        return self._urls

    def notes(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


def _give_way() -> None:
    time.sleep(_GIVE_WAY_SECONDS)


class _Target:
    """One exporter, and what it said last."""

    __slots__ = ("_beside", "_exposition", "_large", "asked_at", "bug", "node", "outcome", "reader")

    def __init__(self, url: str, access: Access, settings: ScrapeSettings) -> None:
        """Raises UsageError for what is no URL."""
        client = partial(HttpClient, url, access, timeout=settings.deadline, default_path="/metrics")
        self._exposition = client(max_bytes=min(_USUAL_SIZE, settings.largest))
        self._large = client(max_bytes=settings.largest)
        base = re.split(r"[?#]", url, maxsplit=1)[0].rstrip("/").removesuffix("/metrics")
        self._beside = partial(HttpClient, base, access, timeout=_ASIDE, max_bytes=_LARGEST_DETAILS)
        self.reader = ExpositionReader(
            self.shown, self._exposition.host, settings.used_field, settings.node_labels, settings.fields_beside
        )
        self.node: NodeReading | None = None
        self.outcome: TargetOutcome | None = None
        self.asked_at = float("-inf")
        self.bug = ""
        """The last one met in its exposition."""

    @property
    def shown(self) -> str:
        return self._exposition.shown

    @property
    def failed(self) -> bool:
        return self.outcome is not None and bool(self.outcome.error)

    async def beside(self, session: aiohttp.ClientSession, path: Sequence[str]) -> bytes:
        """What else its server has. Raises SourceError."""
        if not all(_PLAIN.fullmatch(part) and part.strip(".") for part in path):
            raise SourceError("unaskable", f"{self.shown} cannot be asked for {'/'.join(path)[:64]!r}")
        return await self._beside().get(session, "/".join(path))

    async def fetch(self, session: aiohttp.ClientSession, large: asyncio.Semaphore) -> bytes:
        """Its exposition. Raises SourceError."""
        if self._exposition is not self._large:
            try:
                return await self._exposition.get_metrics(session)
            except SourceError as error:
                if error.reason != "too_large":
                    raise
            self._exposition = self._large  # the next time at once
        async with large:
            return await self._large.get_metrics(session)


class ScrapeBackend:
    def __init__(
        self,
        targets: Targets,
        access: Access | None = None,
        settings: ScrapeSettings | None = None,
        clock: Clock | None = None,
        owners: Callable[[], Mapping[tuple[str, str], Owner]] | None = None,
        notes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`notes`: what else there is to say, of `owners` for one."""
        self._source = targets
        self._access = access or Access()
        self._settings = settings or ScrapeSettings()
        self._clock = clock or Clock()
        self._owners = owners
        self._notes = notes
        self._targets: dict[str, _Target] = {}
        """By URL."""
        self._gone: dict[str, _Target] = {}
        """Those that left the list, while what they said is not too old."""
        self._shelf = Shelf()
        self._large = asyncio.Semaphore(_LARGE_AT_A_TIME)
        self._errors: Counter[tuple[str, str]] = Counter()
        self._refused: tuple[str, ...] = ()
        self._room = ""
        self._session: aiohttp.ClientSession | None = None

    async def turn(self) -> None:
        self._take_targets(self._source.urls())
        session = await self._open()
        # Whoever has answered before is asked before those of whom nobody knows yet whether they are there.
        well = sorted((t for t in self._targets.values() if not t.failed), key=lambda t: t.node is None)
        failed = sorted((t for t in self._targets.values() if t.failed), key=lambda t: t.asked_at)
        settings = self._settings

        async def ask(target: _Target) -> None:
            await self._scrape(target, session)

        slots = settings.concurrency
        first = Lane(well, ask, slots=slots, most=5 * slots, patience=settings.patience)
        # Those at the end of the second wait for the next turn: they are asked in the order of when they last were.
        second = Lane(failed, ask, slots=settings.slots_for_failed(len(failed)), until=settings.deadline)
        await Lane.run_all(first, second)

    def _take_targets(self, urls: Sequence[str]) -> None:
        wanted, too_many = self._within_bounds(urls)
        refused = [too_many] if too_many else []
        for url in wanted:
            if url not in self._targets:
                try:
                    target = self._gone.pop(url, None) or _Target(url, self._access, self._settings)
                except UsageError as error:
                    refused.append(str(error))
                    continue
                self._targets[url] = target
                _mark(target, listed=True)
        for url in self._targets.keys() - wanted.keys():
            self._gone[url] = target = self._targets.pop(url)
            target.outcome = None
            _mark(target, listed=False)
            self._forget_errors(target.shown)
        self._drop_gone()
        self._refused = tuple(refused)

    def _within_bounds(self, urls: Sequence[str]) -> tuple[dict[str, None], str]:
        """Those to be asked, and what to say of the rest. Who is there stays, whoever else is named."""
        wanted, most = dict.fromkeys(urls), self._settings.most_targets
        if len(wanted) <= most:
            return wanted, ""
        known = [url for url in wanted if url in self._targets]
        chosen = dict.fromkeys([*known, *(url for url in wanted if url not in self._targets)][:most])
        left_out = next(url for url in wanted if url not in chosen)
        return chosen, (
            f"{len(wanted):,} exporters are named and {most:,} are asked: {redact_url(left_out)} is one of"
            " those left out; see which Services the selector chooses, or give each podgpu part of the nodes"
        )

    def _forget_errors(self, shown: str) -> None:
        for key in [key for key in self._errors if key[0] == shown]:
            del self._errors[key]

    def _drop_gone(self) -> None:
        oldest = self._clock.monotonic() - self._settings.keep_gone
        for url, target in list(self._gone.items()):
            if target.node is None or target.node.read_at < oldest:
                del self._gone[url]
                self._shelf.remove(target.shown)

    async def _open(self) -> aiohttp.ClientSession:
        """Connections stay open between rounds where the system allows as many as there are exporters."""
        room = allow_connections(len(self._targets))
        if self._session is not None and room != self._room:
            await self._session.close()
            self._session = None
        if self._session is None:
            self._room = room
            self._session = open_session(0.0 if room else KEEP_ALIVE_SECONDS)
        return self._session

    async def ask(self, target: str, path: Sequence[str]) -> bytes:
        """What the exporter of this target answers at another of its paths. Raises SourceError."""
        found = next((t for t in self._targets.values() if t.shown == target), None)
        if found is None:
            raise SourceError("not_listed", f"{target} is no longer in the list of exporters")
        return await found.beside(await self._open(), path)

    async def _scrape(self, target: _Target, session: aiohttp.ClientSession) -> None:
        began = target.asked_at = self._clock.monotonic()
        shown, reason, message = target.shown, "", ""
        try:
            body = await target.fetch(session, self._large)
            between = _give_way if len(body) > _LONG else int
            node = target.reader.read(body, self._clock.monotonic(), self._clock.wall(), between)
            self._shelf.put(shown, node)
            target.node, target.bug = node, ""
        except SourceError as error:
            reason, message = error.reason, str(error)
        except Exception as error:  # noqa: BLE001 - the edge: a bug that one exporter's text brings out costs that exporter only
            reason, message = "bug", f"{shown}: its metrics cannot be read ({type(error).__name__}: {str(error)[:200]})"
            if target.bug != message:
                target.bug = message
                _log.exception("%s: unexpected error in its metrics, please report it", shown)
        if reason:
            self._errors[shown, reason] += 1
        target.outcome = TargetOutcome(shown, self._clock.monotonic() - began, reason, message)

    def reading(self) -> ClusterReading:
        targets = self._targets.values()
        return ClusterReading(
            nodes=tuple([t.node for t in (*targets, *self._gone.values()) if t.node is not None]),
            outcomes=tuple([t.outcome for t in targets if t.outcome is not None]),
            errors=dict(self._errors),
            notes=(*self._source.notes(), *self._refused, *filter(None, (self._room,)), *self._notes()),
            owners=self._owners() if self._owners is not None else _NO_OWNERS,
        )

    async def close(self) -> None:
        self._source.close()
        if self._session is not None:
            await self._session.close()


def _mark(target: _Target, *, listed: bool) -> None:
    if target.node is not None:
        target.node = replace(target.node, listed=listed)
