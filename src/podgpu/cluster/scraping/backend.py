"""The embedded backend: scrapes the exporters itself, keeps what each said last, and nothing else.

A slow or dead exporter never delays the others: one that failed last time waits in a lane of its own, and there never
so long that nobody notices when it is back; one that is slow for the first time gives its slot away after a moment, and
goes on without it until its deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from podgpu.clock import Clock
from podgpu.cluster.reading import NodeReading, Owner, Reading, TargetOutcome
from podgpu.cluster.scraping.connections import allow_connections
from podgpu.cluster.scraping.lanes import Lane
from podgpu.cluster.scraping.page import USED_FIELD, PageReader, names_read
from podgpu.cluster.scraping.page_chunks import Chunks
from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Credentials
from podgpu.fetch.endpoint import KEEP_ALIVE_SECONDS, open_session
from podgpu.fetch.page import UrlPage
from podgpu.figures.from_page import NODE_LABELS

LARGEST_PAGE = 16 * 1024 * 1024
"""A node of 16 GPUs cut into 112 slices has a page of 2 MB."""
_ROUNDS_TO_ASK_FAILED = 4
_NO_OWNERS: Mapping[tuple[str, str], Owner] = {}


@dataclass(frozen=True)
class ScrapeSettings:
    deadline: float = 5.0
    """For one exporter's whole page."""
    concurrency: int = 64
    """How many are asked at a time; those that are slow come on top, four times as many at most."""
    used_field: str = USED_FIELD
    node_labels: tuple[str, ...] = NODE_LABELS
    largest: int = LARGEST_PAGE

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

    def __init__(self, urls: Sequence[str], credentials: Credentials | None = None) -> None:
        """The same URL twice is meant once. Raises UsageError for what is no URL."""
        found: dict[str, str] = {}
        for url in filter(None, (url.strip() for url in urls)):
            shown = UrlPage(url, credentials).shown
            before = found.setdefault(shown, url)
            if before != url and ("@" in before + url or "?" in before + url):
                raise UsageError(f"--scrape: {shown} is named twice, with different logins or queries; keep one")
        if not found:
            raise UsageError("--scrape names no exporter: write http://HOST:9400/metrics,…")
        self._urls = tuple(found.values())

    def urls(self) -> Sequence[str]:
        return self._urls

    def notes(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """Nothing is open."""


class _Target:
    """One exporter, and what it said last."""

    __slots__ = ("asked_at", "node", "outcome", "page", "reader")

    def __init__(self, page: UrlPage, settings: ScrapeSettings, chunks: Chunks) -> None:
        self.page = page
        self.reader = PageReader(page.shown, page.host, settings.used_field, settings.node_labels, chunks)
        self.node: NodeReading | None = None
        self.outcome: TargetOutcome | None = None
        self.asked_at = float("-inf")

    @property
    def failed(self) -> bool:
        return self.outcome is not None and bool(self.outcome.error)


class ScrapeBackend:
    def __init__(
        self,
        targets: Targets,
        credentials: Credentials | None = None,
        settings: ScrapeSettings | None = None,
        clock: Clock | None = None,
        owners: Callable[[], Mapping[tuple[str, str], Owner]] | None = None,
        notes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`notes`: what else there is to say, of `owners` for one."""
        self._source = targets
        self._credentials = credentials or Credentials()
        self._settings = settings or ScrapeSettings()
        self._clock = clock or Clock()
        self._owners = owners
        self._notes = notes
        self._targets: dict[str, _Target] = {}
        """By URL."""
        self._errors: Counter[tuple[str, str]] = Counter()
        self._chunks = Chunks(names_read(self._settings.used_field))
        self._refused: tuple[str, ...] = ()
        self._room = ""
        self._session: aiohttp.ClientSession | None = None

    async def turn(self) -> None:
        self._take_targets(self._source.urls())
        session = await self._open()
        well = [t for t in self._targets.values() if not t.failed]
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
        wanted = dict.fromkeys(urls)
        refused: list[str] = []
        for url in wanted:
            if url not in self._targets:
                try:
                    page = UrlPage(url, self._credentials, self._settings.deadline, self._settings.largest)
                except UsageError as error:
                    refused.append(str(error))
                    continue
                self._targets[url] = _Target(page, self._settings, self._chunks)
        for url in self._targets.keys() - wanted.keys():
            self._forget(self._targets.pop(url).page.shown)
        self._refused = tuple(refused)

    def _forget(self, shown: str) -> None:
        for key in [key for key in self._errors if key[0] == shown]:
            del self._errors[key]

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

    async def _scrape(self, target: _Target, session: aiohttp.ClientSession) -> None:
        began = target.asked_at = self._clock.monotonic()
        shown = target.page.shown
        try:
            body = await target.page.fetch_with(session)
            target.node = target.reader.read(body, self._clock.monotonic(), self._clock.wall())
        except SourceError as error:
            self._errors[shown, error.reason] += 1
            target.outcome = TargetOutcome(shown, self._clock.monotonic() - began, error.reason, str(error))
        else:
            target.outcome = TargetOutcome(shown, self._clock.monotonic() - began)

    def reading(self) -> Reading:
        targets = self._targets.values()
        return Reading(
            nodes=tuple([t.node for t in targets if t.node is not None]),
            outcomes=tuple([t.outcome for t in targets if t.outcome is not None]),
            errors=dict(self._errors),
            notes=(*self._source.notes(), *self._refused, *filter(None, (self._room,)), *self._notes()),
            owners=self._owners() if self._owners is not None else _NO_OWNERS,
        )

    async def close(self) -> None:
        self._source.close()
        if self._session is not None:
            await self._session.close()
