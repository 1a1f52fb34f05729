"""This module keeps one collection of the API server in memory, in a thread of its own. Readers never wait for the
network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from podgpu.errors import SourceError
from podgpu.kube.access import ApiConfig
from podgpu.kube.answers import Object
from podgpu.kube.client import ApiClient
from podgpu.kube.events import uid
from podgpu.kube.follow import Bounds, FindPath, Follower, Kept
from podgpu.kube.pace import Pace

__all__ = ["Bounds", "Pace", "Watcher", "uid"]

T = TypeVar("T")

_CLOSE_SECONDS = 2.0


class Watcher(Generic[T]):
    """Lists and watches `path` from the moment it is made until `close`.

    `keep` turns an object of the API into something small and frozen, or None to leave it out: whole pods are not
    held in memory. It runs in the watcher's thread. While the API server is away the last items stay.
    """

    def __init__(
        self,
        config: ApiConfig,
        path: str,
        params: Mapping[str, str],
        keep: Callable[[Object], T | None],
        key: Callable[[Object], str] = uid,
        *,
        pace: Pace | None = None,
        metadata_only: bool = False,
        bounds: Bounds | None = None,
        find_path: FindPath | None = None,
        page_size: int = 0,
    ) -> None:
        """`params`: fieldSelector, labelSelector. A node's agent always says `spec.nodeName=…`: they are 2,000.

        `metadata_only`: `keep` reads nothing of spec and status. `find_path`: asked before each list where the
        collection is, if that depends on the server; `path` is then what to call it until it is found. `page_size`:
        lists come in pages of so many, for collections of a whole cluster; 0: in one answer.
        """
        self._kept: Kept[T] = Kept()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        tempo, limits = pace or Pace(), bounds or Bounds()

        async def follow() -> None:
            verbs = ("list", "watch")
            client = ApiClient(
                config,
                deadline=tempo.deadline,
                largest_answer=limits.answer,
                verbs=verbs,
                metadata_only=metadata_only,
            )
            async with client:
                await Follower(client, path, params, keep, key, self._kept, tempo, limits, find_path, page_size).run()

        self._thread = threading.Thread(
            target=self._run, args=(follow,), name=f"watch-{path.rpartition('/')[2]}", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def items(self) -> tuple[T, ...]:
        """All that is kept, as of now; the same tuple until something changes."""
        return self._kept.items()

    @property
    def synced(self) -> bool:
        """The collection was read in full at least once."""
        return self._kept.synced.is_set()

    @property
    def error(self) -> SourceError | None:
        """Why the items may be out of date; None while the watch stands (or nothing was tried yet: see `synced`)."""
        return self._kept.error

    @property
    def version(self) -> int:
        """Rises whenever `items()` changes, and only then."""
        return self._kept.version

    @property
    def failures(self) -> Mapping[str, int]:
        """Reason word -> how often since the start."""
        return self._kept.failures()

    def wait_synced(self, timeout: float) -> bool:
        """Whether the collection was read in full by then. Who is refused is not kept waiting."""
        self._kept.answered.wait(timeout)
        return self.synced

    def close(self) -> None:
        """Ends the connection and the thread; the last items stay readable. May be called twice."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        # A name look-up cannot be cut short: a daemon thread that waits for one is left behind.
        self._thread.join(_CLOSE_SECONDS)

    def _run(self, follow: Callable[[], Coroutine[None, None, None]]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped(follow))

    async def _until_stopped(self, follow: Callable[[], Coroutine[None, None, None]]) -> None:
        following = asyncio.create_task(follow())
        await self._stop.wait()
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
