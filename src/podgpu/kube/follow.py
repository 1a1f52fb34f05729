"""This module lists one collection and then watches it, for ever: what client-go calls a reflector. It asks the API
server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from podgpu.errors import SourceError
from podgpu.kube.answers import Object, Refused
from podgpu.kube.client import LARGEST_ANSWER, ApiClient
from podgpu.kube.events import LONGEST, Lines, is_older, parse_event, parse_list
from podgpu.kube.pace import REFUSALS, Backoff, Pace

_log = logging.getLogger(__name__)
T = TypeVar("T")

_LIST_AGAIN = frozenset({"gone", "bad_answer", "not_found"})
"""Answers to a watch after which there is nothing to go on from."""
_BROKEN = frozenset({"unreachable", "tls"})
"""Ends of a watch that miss nothing: it goes on where it was."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is taken from an API server. What is past them is refused, and costs this collection only."""

    answer: int = LARGEST_ANSWER
    object: int = LONGEST
    objects: int = 500_000


FindPath = Callable[[ApiClient], Awaitable[str]]
"""Asks the server where a collection is: which of its versions it has."""


class Kept(Generic[T]):
    """Things by key, how fresh they are, and what went wrong. No lock is ever held while waiting for anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[str, T] = {}
        self._snapshot: tuple[T, ...] | None = ()
        self._failures: Counter[str] = Counter()
        self.synced = threading.Event()
        self.answered = threading.Event()
        """Synced, or refused for good: there is nothing to wait for."""
        self.version = 0
        self.error: SourceError | None = None

    def __len__(self) -> int:
        return len(self._things)

    def items(self) -> tuple[T, ...]:
        with self._lock:
            if self._snapshot is None:
                # Made when asked for, not per event: a busy cluster changes more often than anybody looks.
                self._snapshot = tuple(self._things.values())
            return self._snapshot

    def failures(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._failures)

    def replace(self, things: dict[str, T]) -> None:
        """A whole list came in."""
        if things != self._things:
            with self._lock:
                self._things = things
                self._changed()
        self.synced.set()
        self.answered.set()

    def put(self, key: str, thing: T | None) -> None:
        """One thing is new, changed, or (None) gone."""
        if self._things.get(key) == thing:
            return
        with self._lock:
            if thing is None:
                del self._things[key]
            else:
                self._things[key] = thing
            self._changed()

    def fail(self, error: SourceError) -> None:
        self.error = error
        self.count(error.reason)
        if error.reason in REFUSALS:
            self.answered.set()

    def count(self, reason: str) -> None:
        with self._lock:
            self._failures[reason] += 1

    def _changed(self) -> None:
        self._snapshot = None
        self.version += 1


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
        bounds: Bounds,
        find_path: FindPath | None = None,
        page_size: int = 0,
    ) -> None:
        self._client = client
        self._path = path
        self._params = dict(params)
        self._keep = keep
        self._key = key
        self._kept = kept
        self._pace = pace
        self._bounds = bounds
        self._find_path = find_path
        self._page_size = page_size
        self._watch_from: str | None = None
        """None: list first."""
        self._seen = ""
        """Newest version known; no list older than this is taken."""
        self._distrust_cache = False
        self._doubted = False
        """The last watch ended without a word, or fell silent: did it miss anything?"""
        self._keep_failed = False

    async def run(self) -> NoReturn:
        backoff = Backoff(self._pace)
        clock = asyncio.get_running_loop().time
        while True:
            began, reason, stay_away = clock(), "", 0.0
            try:
                await self._turn()
            except SourceError as error:
                reason, stay_away = error.reason, error.retry_after if isinstance(error, Refused) else 0.0
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - the edge: a bug must not leave readers with old items for ever
                _log.exception("watching %s: unexpected error, please report it", self._path)
                reason, self._watch_from = "bug", None
                self._fail(SourceError("bug", f"watching {self._path}: {type(error).__name__}: {error}"))
            await asyncio.sleep(backoff.after(clock() - began, reason, stay_away))

    async def _turn(self) -> None:
        """A list, if there is nothing to go on from, and one watch until it ends."""
        try:
            version = self._watch_from
            if version is None:
                version = await self._list()
            await self._watch(version)
        except SourceError as error:
            if error.reason in _LIST_AGAIN:
                self._watch_from = None
            raise

    async def _list(self) -> str:
        if self._find_path is not None:
            self._path = await self._find_path(self._client)
        things, version = await self._read_list(self._first_question())
        if not self._reads_etcd and is_older(version, self._seen):
            things, version = await self._list_not_older()
        before = self._kept.version
        self._kept.replace(things)
        if self._doubted and self._kept.version != before:
            self._kept.count("deaf_watch")
            _log.warning(
                "watching %s: the watch was silent although things had changed: podgpu lists them again and again;"
                " does a proxy or load balancer hold the API server's answers back?",
                self._path,
            )
        self._distrust_cache = self._doubted = False
        self._watch_from = self._seen = version
        return version

    @property
    def _reads_etcd(self) -> bool:
        return self._distrust_cache or bool(self._page_size)

    def _first_question(self) -> dict[str, str]:
        if self._page_size:  # a server's memory would give all of it at once
            return {"limit": str(self._page_size)}
        # Version 0 is "whatever the API server has in memory": no read of etcd for each of two thousand nodes.
        return {} if self._distrust_cache else {"resourceVersion": "0"}

    async def _read_list(self, asked: dict[str, str]) -> tuple[dict[str, T], str]:
        """What is kept of a list, and its version. Each object is cut down before the next one is made.

        Between two pages the server may forget the list: that is `gone`, and it begins anew.
        """
        found: dict[str, T] = {}
        taken = 0

        def take(body: Object) -> None:
            nonlocal taken
            taken += 1
            self._check_count(taken)
            key, thing = self._key(body), self._small(body)
            if thing is not None:
                found[key] = thing

        while True:
            before, body = taken, await self._client.read(self._path, self._params | asked)
            version, more = parse_list(body, take, self._bounds.object)
            if not more:
                return found, version
            if not self._page_size or taken == before:
                raise SourceError("bad_answer", f"the API server gave only part of {self._path}, or a page without end")
            asked = asked | {"continue": more}

    async def _list_not_older(self) -> tuple[dict[str, T], str]:
        """The server's memory was behind what another server had told us: time must not run backwards."""
        asked = {"resourceVersion": self._seen, "resourceVersionMatch": "NotOlderThan"}
        try:
            return await self._read_list(asked)
        except SourceError:
            # After etcd was restored from a backup no server will ever get there. Ask etcd itself, and believe it.
            self._distrust_cache = True
            raise

    async def _watch(self, version: str) -> None:
        seconds = self._pace.draw_watch_seconds()
        asked = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            "resourceVersion": version,
        }
        lines, heard, settled = Lines(self._bounds.object), False, None
        stream = self._client.stream(self._path, self._params | asked, self._pace.silence)
        try:
            async with asyncio.timeout(seconds + self._pace.deadline), aclosing(stream):
                async for piece in stream:
                    if not piece:
                        settled = asyncio.get_running_loop().call_later(self._pace.settle, self._recover)
                    for line in lines.feed(piece):
                        self._apply(line)
                        self._recover()
                        heard = True
        except TimeoutError:
            heard = False  # it goes on past its end: nothing of it is to be trusted
        except SourceError as error:
            if settled is None or error.reason in _BROKEN:
                raise
            # An event that cannot be read is an event missed.
            self._watch_from = None
            if error.reason != "timeout":
                raise
            heard = False
        finally:
            if settled is not None:
                settled.cancel()
        if not heard:
            self._watch_from, self._doubted = None, True

    def _apply(self, line: bytes) -> None:
        kind, body, version = parse_event(line)
        if kind == "DELETED":
            self._kept.put(self._key(body), None)
        elif kind != "BOOKMARK":
            self._kept.put(self._key(body), self._small(body))
            self._check_count(len(self._kept))
        self._watch_from = version
        if not is_older(version, self._seen):
            self._seen = version

    def _check_count(self, count: int) -> None:
        if count > self._bounds.objects:
            raise SourceError(
                "bad_answer", f"{self._path} has more than the {self._bounds.objects} objects podgpu takes"
            )

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
