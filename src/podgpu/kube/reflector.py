"""Keeps local copies of API objects up to date.

Lists a collection, watches it, and recovers from failures. The terms reflector and informer come
from client-go.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import msgspec

from podgpu.decode import find_decoder
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient, explain_status
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import KubeObject

_log = logging.getLogger(__name__)
T = TypeVar("T")
REFUSALS = frozenset({"forbidden", "unauthorized", "not_found", "no_token"})
"""Errors with these reasons persist until the cluster or the configuration is changed."""
_CLOSE_SECONDS = 2.0
FindPath = Callable[[ApiClient], Awaitable[str]]
"""Finds the path of a collection, if it depends on the API versions that the server supports."""


@dataclass(frozen=True, slots=True)
class ReflectorSettings:
    first_delay: float = 0.5
    max_delay: float = 8.0  # longest retry delay in seconds while the API server is unreachable
    max_refused_delay: float = 60.0  # longest retry delay after errors in REFUSALS
    # If a watch delivers no data for this long, the collection is listed again. Servers send a
    # bookmark every minute.
    silence_seconds: float = 150.0
    # A watch lasts a random time between these, so that clients do not renew together.
    watch_seconds: tuple[int, int] = (300, 600)
    request_seconds: float = 30.0  # timeout of one page of a list, and of the start of a watch


class _Page(msgspec.Struct):
    metadata: KubeObject
    items: list[msgspec.Raw] | None


class _Event(msgspec.Struct):
    type: str
    object: KubeObject


def _key(item: KubeObject) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


class Informer(Generic[T]):
    """Stores the converted objects of a collection.

    Its own thread keeps them up to date. Any thread may read them. While the API server is
    unreachable, the last objects are kept.
    """

    def __init__(
        self,
        config: ApiConfig,
        path: str,
        params: Mapping[str, str],
        convert: Callable[[KubeObject], T | None],
        *,
        settings: ReflectorSettings | None = None,
        metadata_only: bool = False,
        find_path: FindPath | None = None,
        page_size: int = 0,
        is_optional: bool = False,
    ) -> None:
        """Starts the thread.

        `params` may contain fieldSelector and labelSelector, to select for example the objects of
        one node. `convert` returns the value to store, or None to skip the object. With
        `page_size` 0, the list is not paged. `is_optional`: the server may lack the API.
        """
        # Read by any thread
        self._lock = threading.Lock()
        self._objects: dict[str, T] = {}
        self.synced = False  # True after the whole collection has been read once
        # Set when the collection was read, or access was rejected.
        self._answered = threading.Event()
        # The last error. None while the watch works, and before the first response. If set, objects
        # may be stale.
        self.error: SourceError | None = None

        # What is read, and how
        self._settings = settings or ReflectorSettings()
        self._client = ApiClient(config, self._settings.request_seconds, metadata_only)
        self._path = path
        self._params = dict(params)
        self._convert = convert
        self._find_path = find_path
        self._page_size = page_size
        self._is_optional = is_optional

        # State between two requests, used by the thread of the watch only
        # Reason -> longest next delay. Kept by reason, so that a new kind of failure is retried
        # soon.
        self._delays: dict[str, float] = {}
        # The watch resumes after this version. If empty, the collection is listed first.
        self._resume_version = ""
        # True if the next list must come from etcd, not from the API server's cache, which may have
        # the same expired version.
        self._reads_etcd = False

        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        name = f"watch-{path.rpartition('/')[2]}"
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the connection and ends the thread.

        The objects stay readable. Can be called twice.
        """
        with suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._stop.set)
        # A DNS lookup cannot be cancelled, so the thread may run longer.
        self._thread.join(_CLOSE_SECONDS)

    def items(self) -> tuple[T, ...]:
        with self._lock:
            return tuple(self._objects.values())

    def wait_synced(self, timeout: float) -> bool:
        """Waits until the collection is read or access is rejected.

        Returns True if the collection was read.
        """
        self._answered.wait(timeout)
        return self.synced

    def _run_thread(self) -> None:
        async def reflect_until_stopped() -> None:
            reflecting = asyncio.create_task(self._reflect())
            await self._stop.wait()
            reflecting.cancel()
            # Closing the client first aborts TLS connections. If the task closed them, it would
            # wait for the server.
            await self._client.close()

            with suppress(asyncio.CancelledError):
                await reflecting

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(reflect_until_stopped())

    async def _reflect(self) -> NoReturn:
        while True:
            try:
                if not self._resume_version:
                    await self._list()
                await self._watch()
            except SourceError as error:
                await self._recover(error)
            except Exception as error:  # noqa: BLE001 - malformed answers raise various types
                problem = (
                    f"the response for {self._path} cannot be processed ({type(error).__name__}: "
                    f"{error})"
                )
                await self._recover(SourceError("bad_answer", problem))

    async def _recover(self, error: SourceError) -> None:
        # The version to resume from has expired.
        is_gone = error.reason == "gone"
        self._reads_etcd = is_gone
        if is_gone or error.reason in ("not_found", "bad_answer"):
            self._resume_version = ""

        if self.error is None or self.error.reason != error.reason:
            _log.log(self._find_level(error), "watch of %s: %s", self._path, error)

        self.error = error

        limit = self._settings.max_delay
        if error.reason in REFUSALS:
            limit = self._settings.max_refused_delay
            self._answered.set()

        delay = self._delays.get(error.reason, self._settings.first_delay)
        longest = min(limit, delay)
        self._delays[error.reason] = 2 * longest
        # Random, so that thousands of nodes do not reconnect together.
        await asyncio.sleep(random.uniform(0, longest))

    def _find_level(self, error: SourceError) -> int:
        if self._is_optional and error.reason == "not_found":
            # Most clusters lack some of these APIs, and nobody has to do anything.
            return logging.DEBUG
        if error.reason == "gone":
            # A server always responds so after a long outage.
            return logging.INFO
        return logging.WARNING

    async def _list(self) -> None:
        if self._find_path is not None:
            self._path = await self._find_path(self._client)

        query: dict[str, str] = {}
        if self._page_size:
            query = {"limit": str(self._page_size)}
        elif not self._reads_etcd:
            # Reads from the API server's cache, because thousands of nodes must not read from etcd.
            query = {"resourceVersion": "0", "resourceVersionMatch": "NotOlderThan"}

        objects: dict[str, T] = {}
        while True:
            body = await self._client.read(self._path, self._params | query)
            page = find_decoder(_Page).decode(body)
            for raw in page.items or ():
                item = find_decoder(KubeObject).decode(raw)
                value = self._reduce(item)
                if value is not None:
                    objects[_key(item)] = value

            next_page = page.metadata.get("continue")
            if not next_page:
                break

            query = {"limit": str(self._page_size), "continue": next_page}

        with self._lock:
            self._objects = objects

        self.synced = True
        self._answered.set()
        self._resume_version = page.metadata["resourceVersion"]

    async def _watch(self) -> None:
        settings = self._settings
        seconds = random.randint(*settings.watch_seconds)
        params = self._params | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
            "resourceVersion": self._resume_version,
        }
        # A server may ignore timeoutSeconds.
        limit = asyncio.timeout(seconds + settings.request_seconds)
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            opened = self._client.watch(self._path, params, settings.silence_seconds)
            async with limit, opened as lines:
                if self.error is not None:
                    level = min(logging.INFO, self._find_level(self.error))
                    _log.log(level, "watch of %s: resumed", self._path)
                self.error = None
                async for line in lines:
                    self._apply(line)
        except (TimeoutError, SourceError) as error:
            if isinstance(error, SourceError) and error.reason != "timeout":
                raise
            self._resume_version = ""  # forces a new list, because a proxy may have dropped events
        finally:
            # A watch that worked for a while was no failure.
            if clock() - started > settings.max_delay:
                self._delays.clear()

        # A server may end each watch at once, and must not be called without a pause.
        await asyncio.sleep(settings.first_delay)

    def _apply(self, line: bytes) -> None:
        event = find_decoder(_Event).decode(line)
        item = event.object
        if event.type == "ERROR":
            self._resume_version = ""
            raise explain_status(
                item.get("code", 0),
                msgspec.json.encode(item),
                self._path,
                self._client.config.origin,
            )

        if event.type != "BOOKMARK":
            value = None
            if event.type != "DELETED":
                value = self._reduce(item)

            with self._lock:
                if value is None:
                    self._objects.pop(_key(item), None)
                else:
                    self._objects[_key(item)] = value

        self._resume_version = item["metadata"]["resourceVersion"]
        self._delays.clear()

    def _reduce(self, item: KubeObject) -> T | None:
        """Converts one object. If that fails, returns None, so that only this object is skipped."""
        try:
            return self._convert(item)
        except Exception as error:  # noqa: BLE001 - malformed answers raise various types
            _log.warning(
                "an object of %s cannot be converted and is skipped: %r", self._path, error
            )
            return None
