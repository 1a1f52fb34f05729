"""The list-then-watch loop of one collection: what client-go calls a reflector. Asks the API server, for ever."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from podgpu.errors import SourceError
from podgpu.kube.answers import Object, Refused
from podgpu.kube.backoff import Backoff
from podgpu.kube.client import ApiClient
from podgpu.kube.events import LONGEST_LINE, Lines, continue_of, is_older, parse_event, parse_list
from podgpu.kube.kept import Kept

_log = logging.getLogger(__name__)
T = TypeVar("T")
_MOST_RESTARTS = 2
"""Of one list in pages, at once; after that with a wait in between."""
_MOST_LISTED = 1_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """Every duration of a watcher, and its dice; tests bring their own."""

    first_wait: float = 1.0
    longest_wait: float = 60.0
    good_after: float = 60.0
    watch_seconds: tuple[int, int] = (300, 600)
    """How long one watch may last: drawn anew each time, so that many watchers do not end theirs together."""
    idle_slack: float = 15.0
    """A watch silent for this long past its end is dead."""
    deadline: float = 30.0
    """For a list, and for the server to accept a watch."""
    chance: Callable[[], float] = random.random

    def backoff(self) -> Backoff:
        return Backoff(self.first_wait, self.longest_wait, self.good_after, self.chance)

    def draw_watch_seconds(self) -> int:
        least, most = self.watch_seconds
        return least + int(self.chance() * (most - least))


class Follower(Generic[T]):
    """Keeps `kept` as the collection is. One connection at a time."""

    def __init__(
        self,
        client: ApiClient,
        path: str,
        params: Mapping[str, str],
        keep: Callable[[Object], T | None],
        key: Callable[[Object], str],
        kept: Kept[T],
        pace: Pace,
        longest_line: int = LONGEST_LINE,
        page_size: int = 0,
    ) -> None:
        self._page_size = page_size
        self._client = client
        self._path = path
        self._params = dict(params)
        self._keep = keep
        self._key = key
        self._kept = kept
        self._pace = pace
        self._longest_line = longest_line
        self._watch_from: str | None = None
        """None: list first."""
        self._seen = ""
        """Newest version known; no list older than this is taken."""
        self._distrust_cache = False
        self._keep_failed = False

    async def run(self) -> NoReturn:
        backoff = self._pace.backoff()
        clock = asyncio.get_running_loop().time
        while True:
            began, stay_away = clock(), 0.0
            try:
                await self._turn()
            except SourceError as error:
                stay_away = error.retry_after if isinstance(error, Refused) else 0.0
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - the edge: a bug must not leave readers with old items for ever
                _log.exception("watching %s: unexpected error, please report it", self._path)
                self._watch_from = None
                self._fail(SourceError("bug", f"watching {self._path}: {type(error).__name__}: {error}"))
            await asyncio.sleep(backoff.after(clock() - began, stay_away))

    async def _turn(self) -> None:
        """A list, if there is nothing to go on from, and one watch until it ends."""
        version = self._watch_from
        if version is None:
            version = await self._list()
        try:
            await self._watch(version)
        except SourceError as error:
            if error.reason in ("gone", "bad_answer"):
                self._watch_from = None
            raise

    async def _list(self) -> str:
        if self._page_size:
            things, version = await self._list_in_pages()
            self._kept.replace(things)
            self._watch_from = self._seen = version
            return version
        # Version 0 is "whatever the API server has in memory": no read of etcd for each of two thousand nodes.
        asked = {} if self._distrust_cache else {"resourceVersion": "0"}
        items, version = parse_list(await self._client.ask(self._path, self._params | asked))
        if not self._distrust_cache and is_older(version, self._seen):
            items, version = await self._list_not_older()
        self._kept.replace(self._kept_of(items))
        self._distrust_cache = False
        self._watch_from = self._seen = version
        return version

    async def _list_not_older(self) -> tuple[list[Object], str]:
        """The server's memory was behind what another server had told us: time must not run backwards."""
        asked = {"resourceVersion": self._seen, "resourceVersionMatch": "NotOlderThan"}
        try:
            return parse_list(await self._client.ask(self._path, self._params | asked))
        except SourceError:
            # After etcd was restored from a backup no server will ever get there. Ask etcd itself, and believe it.
            self._distrust_cache = True
            raise

    async def _list_in_pages(self) -> tuple[dict[str, T], str]:
        """What is kept of each page is small; the pages themselves are never there all at once. From the version of the
        first page, which the API server forgets after some minutes: then it begins anew."""
        things: dict[str, T] = {}
        asked, restarts, count = {"limit": str(self._page_size)}, 0, 0
        while True:
            try:
                answer = await self._client.ask(self._path, self._params | asked)
            except SourceError as error:
                if error.reason != "gone" or "continue" not in asked or restarts == _MOST_RESTARTS:
                    raise
                things, count, restarts = {}, 0, restarts + 1
                del asked["continue"]
                continue
            items, version = parse_list(answer, is_page=True)
            things |= self._kept_of(items)
            count += len(items)
            token = continue_of(answer)
            if not token:
                return things, version
            if count > _MOST_LISTED or not items:
                raise SourceError("bad_answer", f"the list of {self._path} does not end: {count} objects so far")
            asked["continue"] = token

    def _kept_of(self, items: list[Object]) -> dict[str, T]:
        found = ((self._key(one), self._small(one)) for one in items)
        return {key: thing for key, thing in found if thing is not None}

    async def _watch(self, version: str) -> None:
        seconds = self._pace.draw_watch_seconds()
        asked = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            "resourceVersion": version,
        }
        lines = Lines(self._longest_line)
        stream = self._client.stream(self._path, self._params | asked, idle=seconds + self._pace.idle_slack)
        async with aclosing(stream):
            async for piece in stream:
                if not piece:
                    self._recover()
                try:
                    for line in lines.feed(piece):
                        self._apply(line)
                except SourceError:
                    # An event that cannot be read is an event missed. A connection that merely broke misses none.
                    self._watch_from = None
                    raise

    def _apply(self, line: bytes) -> None:
        kind, body, version = parse_event(line)
        if kind == "DELETED":
            self._kept.put(self._key(body), None)
        elif kind != "BOOKMARK":
            self._kept.put(self._key(body), self._small(body))
        self._watch_from = version
        if not is_older(version, self._seen):
            self._seen = version

    def _small(self, body: Object) -> T | None:
        try:
            return self._keep(body)
        except Exception:  # noqa: BLE001 - the edge: one object that the caller cannot take must not hide the others
            if not self._keep_failed:
                _log.exception("an object of %s could not be taken in; it is left out, please report it", self._path)
            self._keep_failed = True
            self._kept.count("bug")
            return None

    def _fail(self, error: SourceError) -> None:
        before = self._kept.error
        self._kept.fail(error)
        if before is None or before.reason != error.reason:
            # A version too old is how every long silence ends: nothing to worry about.
            level = logging.INFO if error.reason == "gone" else logging.WARNING
            _log.log(level, "watching %s: %s", self._path, error)

    def _recover(self) -> None:
        if self._kept.error is not None:
            _log.info("watching %s: up to date again", self._path)
        self._kept.error = None
