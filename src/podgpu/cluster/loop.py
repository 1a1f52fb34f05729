"""Cluster takes a round every interval, in a thread with an event loop of its own, and leaves the bytes that are handed
out.

What is served is one reference, replaced whole. Rounds begin at multiples of the interval, so that the rolling average
is taken over the same instants as Prometheus takes it over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from podgpu.clock import Clock
from podgpu.cluster.change_log import ChangeLog
from podgpu.cluster.forgotten import Found, state_of
from podgpu.cluster.publish import Publisher
from podgpu.cluster.reading import AsksExporters, Backend, ClusterReading, MakeBackend
from podgpu.errors import SourceError, StartError
from podgpu.figures.as_json import PageState

LOOK_SECONDS = 1.0
"""So often is shown what a round has found until now: a dead node must not keep the others waiting."""
LATE_ROUNDS = 3.0
LOOKED_AT_SECONDS = 300.0
"""The page's figures are made ready with every round for so long after somebody looked; before that, when asked for."""
_CLOSE_SECONDS = 3.0
_log = logging.getLogger(__name__)


class Cluster:
    def __init__(
        self,
        make_backend: MakeBackend,
        publisher: Publisher,
        clock: Clock | None = None,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._make_backend = make_backend
        self._publisher = publisher
        self.interval = publisher.settings.interval
        self.clock = clock or Clock()
        self._look_seconds = look_seconds
        self.fatal: StartError | None = None
        self.published = publisher.nothing_yet(self.clock.wall())
        self._changes = ChangeLog(self.clock.monotonic)
        self._looked_at = float("-inf")
        self._asked: tuple[Backend, asyncio.AbstractEventLoop] | None = None
        """Who is asked, and on whose loop."""
        self._turned_at = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    # -- rounds --------------------------------------------------------------------------------------------------

    async def round(self, backend: Backend) -> None:
        """One round; what it finds is published while it lasts, and at its end."""
        self._asked = backend, asyncio.get_running_loop()
        turn = asyncio.create_task(backend.turn())
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=self._look_seconds)
                if not turn.done():
                    self._publish(backend.reading(), whole_round=False)
            turn.result()
        finally:
            turn.cancel()
        self._publish(backend.reading(), whole_round=True)
        self._changes.report(self.published.view)
        self._turned_at = self.clock.monotonic()

    def _publish(self, reading: ClusterReading, whole_round: bool) -> None:
        now = self.clock.monotonic()
        published = self._publisher.publish(reading, now, self.clock.wall(), whole_round)
        if now - self._looked_at <= LOOKED_AT_SECONDS:
            published.page()  # here, where it keeps no request waiting
        self.published = published

    def page(self) -> PageState:
        """What the web page draws."""
        self._looked_at = self.clock.monotonic()
        return self.published.page()

    async def ask_exporter(self, target: str, path: Sequence[str]) -> bytes:
        """What a node's exporter answers at another path than its metrics'; from any loop. Raises SourceError."""
        backend, loop = self._asked or (None, None)
        if loop is None or not isinstance(backend, AsksExporters):
            raise SourceError("not_asked", "the figures are Prometheus', the exporters themselves are not asked")
        asking = backend.ask(target, path)
        try:
            future = asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as error:  # the loop is closed: podgpu ends
            asking.close()
            raise SourceError("not_asked", "the rounds have ended") from error
        return await asyncio.wrap_future(future)

    def forget(self, uuid: str) -> Found:
        """An operator has seen to a GPU that is lost, or whose node is gone: it is left out from the next round on,
        until it is back."""
        found = state_of(self.published.view.nodes, uuid)
        if found == "away":
            self._publisher.forget(uuid)
            self.reload()
        return found

    async def _rounds(self) -> None:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        backend = self._make_backend()
        try:
            while True:
                await self.round(backend)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._until_next())
                self._wake.clear()
        finally:
            await backend.close()

    def _until_next(self) -> float:
        return self.interval - self.clock.wall() % self.interval

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, on_fatal: Callable[[], object]) -> None:
        """`on_fatal` is called from the thread when `fatal` says why podgpu must end."""
        self._turned_at = self.clock.monotonic()  # a loop that never turns is late from now on
        self._thread = threading.Thread(target=self._guard, args=(on_fatal,), name="cluster", daemon=True)
        self._thread.start()

    def _guard(self, on_fatal: Callable[[], object]) -> None:
        """A loop that ended by mistake would leave its figures standing for ever: end the process instead."""
        try:
            asyncio.run(self._rounds())
        except asyncio.CancelledError:
            return  # stopped
        except StartError as e:
            self.fatal = e
        except Exception as e:  # noqa: BLE001 - the edge: where a thread of its own begins
            _log.exception("unexpected error in the cluster's loop, please report it")
            self.fatal = StartError(f"the cluster's loop ended by a bug ({type(e).__name__}: {e}); exiting")
        if self.fatal is not None:
            on_fatal()

    @property
    def turns(self) -> bool:
        """Rounds end, and not too long ago."""
        return self.clock.monotonic() - self._turned_at <= self.late_after

    @property
    def late_after(self) -> float:
        return LATE_ROUNDS * self.interval + 30.0  # a first round over thousands of nodes takes its time

    def reload(self) -> None:
        """A round at once (SIGHUP)."""
        self._call(self._wake.set)

    def stop(self) -> None:
        if self._task is not None:
            self._call(self._task.cancel)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _call(self, act: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(act)
