"""Keeps a store equal to one collection of the API server: lists it, watches it, and recovers from failures.

The names are client-go's: a `Reflector` fills a `Store`; an `Informer` is a store with a reflector in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

import msgspec

from podgpu.errors import SourceError
from podgpu.kube.client import MAX_BYTES, ApiClient, ApiError, Object, explain_status, status_message
from podgpu.kube.config import ApiConfig

_log = logging.getLogger(__name__)
T = TypeVar("T")
REFUSALS = frozenset({"forbidden", "unauthorized", "not_found", "no_token", "bad_kubeconfig"})
"""Reasons that persist until a person changes something."""
_CLOSE_SECONDS = 2.0
FindPath = Callable[[ApiClient], Awaitable[str]]
"""Returns the path of a collection, if it depends on the versions that the server has."""


@dataclass(frozen=True, slots=True)
class ReflectorSettings:
    first_delay: float = 0.5
    max_delay: float = 8.0
    """While the API server is away. Its return is noticed after 4 s on average."""
    max_refused_delay: float = 60.0
    silence_seconds: float = 150.0
    """A watch without a byte for this long is replaced by a new list. API servers send a bookmark every minute."""
    watch_seconds: tuple[int, int] = (300, 600)
    """Random, so that many clients do not renew their watches together."""
    request_seconds: float = 30.0
    """Timeout of one page of a list, and of the start of a watch."""


class Store(Generic[T]):
    """Converted objects by namespace and name. May be read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, T] = {}
        self._failures: Counter[str] = Counter()
        self._synced = threading.Event()
        self._answered = threading.Event()
        """Synced or refused, so that waiting longer is pointless."""
        self.version = 0
        """Increases with every change."""
        self.error: SourceError | None = None
        """Why the objects may be stale; None while the watch works or before the first answer."""

    @property
    def synced(self) -> bool:
        """True once the whole collection was read."""
        return self._synced.is_set()

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of failures by reason."""
        with self._lock:
            return dict(self._failures)

    def items(self) -> tuple[T, ...]:
        with self._lock:
            return tuple(self._objects.values())

    def wait_synced(self, timeout: float) -> bool:
        """Waits until the collection was read or refused. Returns True if it was read."""
        self._answered.wait(timeout)
        return self.synced

    def replace(self, objects: dict[str, T]) -> None:
        with self._lock:
            if objects != self._objects:
                self._objects = objects
                self.version += 1
        self._synced.set()
        self._answered.set()

    def set(self, key: str, value: T | None) -> None:
        """Adds, changes or (None) removes one object."""
        with self._lock:
            if self._objects.get(key) == value:
                return
            if value is None:
                del self._objects[key]
            else:
                self._objects[key] = value
            self.version += 1

    def count_failure(self, reason: str) -> None:
        with self._lock:
            self._failures[reason] += 1
        if reason in REFUSALS:
            self._answered.set()


class Backoff:
    """Exponential delays with full jitter, so that thousands of nodes do not return together.

    Refusals have a longer limit and are counted separately: a server that just started refuses for a moment.
    """

    def __init__(self, settings: ReflectorSettings) -> None:
        self._settings = settings
        self._failures = self._refusals = 0
        self._last_reason = ""

    def reset(self) -> None:
        self._failures = self._refusals = 0
        self._last_reason = ""

    def next_delay(self, error: SourceError) -> float:
        settings, exponent, limit = self._settings, 0, self._settings.max_delay
        if error.reason in REFUSALS:
            exponent, limit = self._refusals, settings.max_refused_delay
            self._refusals += 1
        elif error.reason != "gone" or self._last_reason == "gone":
            exponent = self._failures
            self._failures += 1
            self._refusals = 0
        self._last_reason = error.reason
        longest = min(limit, settings.first_delay * 2.0 ** min(exponent, 30))
        retry_after = error.retry_after if isinstance(error, ApiError) else 0.0
        return max(retry_after, random.uniform(0, longest))


class _Page(msgspec.Struct):
    metadata: Object
    items: list[msgspec.Raw] | None


class _Event(msgspec.Struct):
    type: str
    object: Object


def _key(item: Object) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


class Reflector(Generic[T]):
    """Runs one list and one watch at a time."""

    def __init__(
        self,
        client: ApiClient,
        path: str,
        params: Mapping[str, str],
        convert: Callable[[Object], T | None],
        store: Store[T],
        settings: ReflectorSettings,
        find_path: FindPath | None = None,
        page_size: int = 0,
    ) -> None:
        """`convert` reduces an object to the stored value, or to None to skip it. `page_size` 0 lists at once."""
        self._client = client
        self._path = path
        self._params = dict(params)
        self._convert = convert
        self._store = store
        self._settings = settings
        self._find_path = find_path
        self._page_size = page_size
        self._backoff = Backoff(settings)
        self._version = ""
        """Resume the watch after this version; empty: list first."""
        self._newest_version = "0"
        """A list must not be older than this; empty: read from etcd."""
        self._logged_conversion = False

    async def run(self) -> NoReturn:
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except SourceError as error:
                await self._recover(error)
            except Exception as error:  # noqa: BLE001 - malformed answers raise various types
                self._version = ""
                problem = f"an answer about {self._path} cannot be processed ({type(error).__name__}: {error})"
                await self._recover(SourceError("bad_answer", problem))

    async def _recover(self, error: SourceError) -> None:
        if not self._version and isinstance(error, ApiError) and error.status in (410, 504):
            self._newest_version = ""  # etcd was restored from a backup: no server will reach the version seen before
        if error.reason in ("gone", "not_found", "bad_answer"):
            self._version = ""
        if self._store.error is None or self._store.error.reason != error.reason:
            # Every long outage ends with "gone", so it is not a warning.
            _log.log(logging.INFO if error.reason == "gone" else logging.WARNING, "watch of %s: %s", self._path, error)
        self._store.error = error
        self._store.count_failure(error.reason)
        await asyncio.sleep(self._backoff.next_delay(error))

    async def _list(self) -> None:
        if self._find_path is not None:
            self._path = await self._find_path(self._client)
        objects: dict[str, T] = {}
        query = self._list_query()
        while True:
            page = msgspec.json.decode(await self._client.read(self._path, self._params | query), type=_Page)
            for raw in page.items or ():
                item = msgspec.json.decode(raw, type=Object)
                value = self._reduce(item)
                if value is not None:
                    objects[_key(item)] = value
            token = page.metadata.get("continue")
            if not token:
                break
            if not page.items:
                raise SourceError("bad_answer", f"the API server returned an empty page of {self._path}")
            query = {"limit": str(self._page_size), "continue": token}
        version = page.metadata["resourceVersion"]
        self._store.replace(objects)
        self._version = self._newest_version = version

    def _list_query(self) -> dict[str, str]:
        if self._page_size:
            return {"limit": str(self._page_size)}
        if not self._newest_version:
            return {}
        # From the API server's cache: thousands of nodes must not read from etcd.
        return {"resourceVersion": self._newest_version, "resourceVersionMatch": "NotOlderThan"}

    async def _watch(self) -> None:
        seconds = random.randint(*self._settings.watch_seconds)
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query["resourceVersion"] = self._version
        clock = asyncio.get_running_loop().time
        started, is_open, is_alive = clock(), False, False
        try:
            async with (
                asyncio.timeout(seconds + self._settings.request_seconds),
                self._client.watch(self._path, self._params | query, self._settings.silence_seconds) as lines,
            ):
                if self._store.error is not None:
                    _log.info("watch of %s: resumed", self._path)
                self._store.error, is_open = None, True
                async for line in lines:
                    self._apply(line)
                    is_alive = True
        except TimeoutError:
            is_alive = False  # the server ignored timeoutSeconds
        except SourceError as error:
            if not is_open or error.reason != "timeout":
                raise
            is_alive = False  # silent
        finally:
            if clock() - started > self._settings.max_delay:
                self._backoff.reset()
        if not is_alive:
            self._version = ""  # a proxy may have withheld events
        if clock() - started < 1:
            await asyncio.sleep(self._settings.first_delay)

    def _apply(self, line: bytes) -> None:
        event = msgspec.json.decode(line, type=_Event)
        kind, item = event.type, event.object
        if kind == "ERROR":
            raise self._explain_error(item)
        version = item["metadata"]["resourceVersion"]
        if kind in ("ADDED", "MODIFIED"):
            self._store.set(_key(item), self._reduce(item))
        elif kind == "DELETED":
            self._store.set(_key(item), None)
        elif kind != "BOOKMARK":
            raise SourceError("bad_answer", f"the watch of {self._path} has an event of an unknown type")
        self._version = self._newest_version = version
        self._backoff.reset()

    def _explain_error(self, status: Object) -> SourceError:
        body = msgspec.json.encode(status)
        if status.get("code") == 410 or status.get("reason") in ("Expired", "Gone"):
            return explain_status(410, body, self._path, self._client.config.origin, ())
        problem = f"the API server ended the watch of {self._path} ({status_message(body)}): podgpu lists it again"
        return SourceError("bad_answer", problem)

    def _reduce(self, item: Object) -> T | None:
        """One object that cannot be converted must not hide the others."""
        try:
            return self._convert(item)
        except Exception:  # noqa: BLE001
            if not self._logged_conversion:
                _log.exception("an object of %s cannot be converted and is skipped, please report it", self._path)
            self._logged_conversion = True
            self._store.count_failure("bug")
            return None


class Informer(Store[T]):
    """A store whose reflector runs in a thread until `close`. While the API server is away, the objects stay."""

    def __init__(
        self,
        config: ApiConfig,
        path: str,
        params: Mapping[str, str],
        convert: Callable[[Object], T | None],
        *,
        settings: ReflectorSettings | None = None,
        metadata_only: bool = False,
        max_bytes: int = MAX_BYTES,
        find_path: FindPath | None = None,
        page_size: int = 0,
    ) -> None:
        """`params`: fieldSelector, labelSelector. An agent always selects its node: a cluster may have 2,000."""
        super().__init__()
        settings = settings or ReflectorSettings()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

        async def reflect() -> None:
            async with ApiClient(
                config,
                deadline=settings.request_seconds,
                max_bytes=max_bytes,
                verbs=("list", "watch"),
                metadata_only=metadata_only,
            ) as client:
                await Reflector(client, path, params, convert, self, settings, find_path, page_size).run()

        async def reflect_until_stopped() -> None:
            reflecting = asyncio.create_task(reflect())
            await self._stop.wait()
            reflecting.cancel()
            with suppress(asyncio.CancelledError):
                await reflecting

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(reflect_until_stopped())

        self._thread = threading.Thread(target=run, name=f"watch-{path.rpartition('/')[2]}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the thread; the objects stay readable. May be called twice."""
        with suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_SECONDS)  # a DNS lookup cannot be cancelled: the daemon thread is then left
