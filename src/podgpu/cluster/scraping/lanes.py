"""This module asks many at once, a bounded number at a time: who is slow holds up nobody else. It also says how many
connections may stay open."""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_OTHER_FILES = 256
"""What else is open: whoever asks us, the API server, files."""


class Lane(Generic[T]):
    """Workers that take from one queue. A worker held up past `patience` gets a stand-in, and goes home when done."""

    def __init__(
        self,
        queue: Sequence[T],
        ask: Callable[[T], Awaitable[None]],
        *,
        slots: int,
        most: int = 0,
        patience: float = math.inf,
        until: float = math.inf,
    ) -> None:
        """`most`: workers at a time, stand-ins and those they stand in for. `until`: seconds from the start after
        which nobody takes any more from the queue.
        """
        self._queue: Iterator[T] = iter(queue)
        self._ask = ask
        self._slots = min(slots, len(queue))
        self._most = most
        self._patience = patience
        self._until = until
        self._workers: set[asyncio.Task[None]] = set()
        self._ends_at = math.inf

    async def run(self) -> None:
        """Until the queue is done. `ask` has a deadline of its own, and raises nothing."""
        loop = asyncio.get_running_loop()
        self._ends_at = loop.time() + self._until
        try:
            for _ in range(self._slots):
                self._hire()
            while self._workers:
                done, _ = await asyncio.wait(self._workers, return_when=asyncio.FIRST_COMPLETED)
                self._workers -= done
                for worker in done:
                    worker.result()
        finally:
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    @staticmethod
    async def run_all(*lanes: Lane[T]) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(lane.run())

    def _hire(self) -> None:
        self._workers.add(asyncio.create_task(self._work()))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < self._ends_at:
            try:
                item = next(self._queue)
            except StopIteration:
                return
            if self._patience == math.inf:
                await self._ask(item)
                continue
            stand_in = _StandIn(self)
            timer = loop.call_later(self._patience, stand_in.come)
            try:
                await self._ask(item)
            finally:
                timer.cancel()
            if stand_in.came:
                return

    def stand_in(self) -> bool:
        """Hires one more, where there may be more."""
        if len(self._workers) >= self._most:
            return False
        self._hire()
        return True


class _StandIn:
    __slots__ = ("_lane", "came")

    def __init__(self, lane: Lane[T]) -> None:
        self._lane = lane
        self.came = False

    def come(self) -> None:
        self.came = self._lane.stand_in()


def allow_connections(count: int) -> str:
    """Raises the process's own limit as far as it may. Empty when there is room; else a note that says what to do."""
    wanted = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ""
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most >= wanted:
        return ""
    return (
        f"{count} exporters and only {hard} files may be open (ulimit -n): connections are not kept open between"
        f" rounds; allow {wanted}"
    )
