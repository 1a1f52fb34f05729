"""Runs the writers of a node in a thread. Only one exporter of a node writes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from podgpu.clock import Clock
from podgpu.errors import Note, StartError
from podgpu.kube.client import ApiClient
from podgpu.model import NodeState
from podgpu.writers.gpu_changes import GpuChange, Records, find_changes
from podgpu.writers.node_lock import NodeLock
from podgpu.writers.write_queue import Write, WriteQueue

_log = logging.getLogger(__name__)
INTERVAL = 2.0
"""Seconds between two documents that are compared."""
_STOP_SECONDS = 2.0
_START_SECONDS = 60.0  # for the first readings of the GPUs and their pods


class NodeUpdate(NamedTuple):
    """What is known of the node now, for the writers."""

    state: NodeState
    records: Records
    changes: Sequence[GpuChange]
    is_stale: bool = False  # True if the driver has not answered for some time


class Writer(Protocol):
    def update(self, update: NodeUpdate) -> Iterable[Write]:
        """Returns what must be written. Called again and again until it was sent."""


class WriterSession(NamedTuple):
    """The writers and their connection to the API server. Used in one event loop."""

    writers: Sequence[Writer]
    client: ApiClient


class HealthWriter:
    """A service. Compares the documents of the node, and writes what changed."""

    def __init__(
        self,
        read: Callable[[], tuple[NodeState, bool] | None],
        open_session: Callable[[], WriterSession],
        lock: NodeLock,
        idle_after: float,
        clock: Clock | None = None,
        interval: float = INTERVAL,
    ) -> None:
        """`read` returns the document and whether it is up to date. None before the first one.

        `open_session` is called in the thread's event loop. `idle_after`: seconds.
        """
        self.fatal: StartError | None = None
        self._read = read
        self._open_session = open_session
        self._lock = lock
        self._idle_after = idle_after
        self._clock = clock or Clock()
        self._interval = interval
        self._records: Records = {}
        self._has_compared = False  # since this exporter writes
        self._began = self._clock.monotonic()
        self._warning = ""
        self.queue = WriteQueue(self._clock.monotonic)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def warnings(self) -> list[Note]:
        """Warnings to show on the page."""
        notes = []
        for name, text in self.queue.problems.items():
            notes.append(Note(f"--write {name}", f"--write {name}: {text}"))
        if self._warning:
            notes.append(Note("--write lock", self._warning))
        return notes

    async def update(self, writers: Sequence[Writer]) -> None:
        """Compares the current document with the last one, and sends what changed."""
        answer = self._read()
        if answer is None:
            return

        state, is_fresh = answer
        is_ours = self._acquire_lock()
        changes: list[GpuChange] = []
        if is_fresh:
            changes = self._compare(state, is_ours)
        if not is_ours:
            return

        # Nothing is written before the first comparison, unless it takes too long.
        if not self._has_compared and not self._is_overdue:
            return

        is_known = is_fresh and self._has_compared
        update = NodeUpdate(state, self._records, changes, is_stale=not is_known)
        for writer in writers:
            for write in writer.update(update):
                self.queue.put(write)

        await self.queue.flush()

    def _compare(self, state: NodeState, is_ours: bool) -> list[GpuChange]:
        # Before the first answer of the kubelet, the pods are not known.
        if state.holders_at is None:
            return []
        # Records are kept without the lock, too, to take over from another exporter.
        is_first = is_ours and not self._has_compared
        self._has_compared = is_ours
        now = self._clock.wall()
        self._records, changes = find_changes(
            self._records, state, now, self._idle_after, is_first=is_first
        )
        return changes

    @property
    def _is_overdue(self) -> bool:
        """True if the GPUs should have been read by now. Their state is then written as unknown."""
        return self._clock.monotonic() - self._began >= _START_SECONDS

    def _acquire_lock(self) -> bool:
        is_ours = self._lock.acquire()
        problem = self._lock.problem
        warning = f"--write: nothing is written, because podgpu {problem}" if problem else ""
        if warning and warning != self._warning:
            _log.warning("%s", warning)
        self._warning = warning
        return is_ours

    # Thread

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal  # unused, because podgpu continues without writing
        self._thread = threading.Thread(target=self._run, name="health-writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._loop())
        self._lock.release()

    async def _loop(self) -> None:
        session = self._open_session()
        try:
            while not self._stopping.is_set():
                try:
                    await self.update(session.writers)
                except Exception:  # noqa: BLE001 - a bug must not end the thread
                    _log.exception("unexpected error while writing health; please report it")
                await asyncio.to_thread(self._stopping.wait, self._interval)
        finally:
            await session.client.close()

    def reload(self) -> None:
        """Does nothing, because the writers have no configuration files."""

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
