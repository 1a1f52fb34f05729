"""This module reads beside an event loop: a disk that hangs keeps neither a scrape waiting nor the process from
ending."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from podgpu.errors import PodgpuError

T = TypeVar("T")
PATIENCE_SECONDS = 0.25


class Aside:
    """One thread that does what it is given, in turn. A daemon: a read that never returns cannot hold up the end."""

    def __init__(self, name: str) -> None:
        self._name = f"podgpu-{name}"
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], object]) -> None:
        """For one thread to call. It begins with the first work, and again after a work that broke."""
        self._work.put(work)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    async def ask(self, work: Callable[[], T], patience: float) -> T:
        """What `work` returns, or raises of podgpu's own errors. TimeoutError after `patience` seconds."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def deliver(how: Callable[[], object]) -> None:
            if not answer.done():
                how()

        def run() -> None:
            how: Callable[[], object]
            try:
                how = partial(answer.set_result, work())
            except PodgpuError as error:
                how = partial(answer.set_exception, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(deliver, how)

        self.do(run)
        async with asyncio.timeout(patience):
            return await answer

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class Turns:
    """Work for those who look, in other threads and little at a time; the others wait, in the order in which they came.

    All of Python's threads for this are a handful, and one interpreter: a hundred who look at once would take them from
    a scraper who needs one, and the interpreter from everybody.
    """

    def __init__(self, at_a_time: int) -> None:
        self._free = asyncio.Semaphore(at_a_time)

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        async with self._free:
            return await asyncio.to_thread(work, *arguments)


class Latest(Generic[T]):
    """What `read` says at the moment; while the disk does not answer, what it said last.

    Those who ask while a read is on its way share it, and wait no longer for it than the first of them. `read` raises
    nothing.
    """

    def __init__(self, read: Callable[[], T], first: T, aside: Aside, patience: float = PATIENCE_SECONDS) -> None:
        self._read = read
        self._last = first
        self._aside = aside
        self._patience = patience
        self._coming: asyncio.Future[T] | None = None
        self._until = 0.0

    async def now(self) -> T:
        clock = asyncio.get_running_loop().time
        if self._coming is None:
            self._coming, self._until = self._asked(), clock() + self._patience
        done, _ = await asyncio.wait({self._coming}, timeout=max(0.0, self._until - clock()))
        return next(iter(done)).result() if done else self._last

    def _asked(self) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[T] = loop.create_future()

        def arrive(value: T) -> None:
            self._last, self._coming = value, None
            if not coming.done():
                coming.set_result(value)

        def work() -> None:
            value = self._read()
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(arrive, value)

        self._aside.do(work)
        return coming
