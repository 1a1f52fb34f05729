"""Isolation runs each source's call in a thread of its own, with a deadline. One that hangs costs nobody else anything.

The deadline is of time in which podgpu ran: while it stands still itself, nobody can answer it.
An abandoned call keeps its worker: it is not started again until it returns. A late answer is thrown away, unless the
caller said that it wants those.
Worker threads are daemons, so a call that never returns cannot keep the process from ending.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from podgpu.errors import SourceError, StartError

_log = logging.getLogger(__name__)
T = TypeVar("T")
_PIECE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """What came of one call: a value or an error, and how long it took."""

    value: T | None
    error: SourceError | StartError | None
    seconds: float


class Isolation:
    """Workers by name. `run` starts one call on each named worker and waits for all until the deadline."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()
        """Turns of several cadences come and go here at once."""
        self._closed = False

    def run(
        self, jobs: Mapping[str, Callable[[], T]], deadline: float, late: Callable[[], object] | None = None
    ) -> dict[str, Result[T]]:
        """With `late`, a call that outlasts the deadline is not lost: `late` is called, in the worker's thread, when
        it returns, and the next run gives its answer. Until then it is not asked anew, and no longer waited for."""
        began = self._clock()
        with self._lock:
            if self._closed:
                ended = SourceError("stopping", "podgpu is stopping and asks nothing any more")
                return {name: Result(None, ended, 0.0) for name in jobs}
            turns = {name: self._worker(name).start(job, late is not None) for name, job in jobs.items()}
        patience = _Patience(deadline)
        return {name: self._outcome(name, turn, patience, began, late) for name, turn in turns.items()}

    def forget(self, names: Iterable[str]) -> None:
        """End the workers of devices that are gone; one that still hangs ends when its call returns."""
        with self._lock:
            self._end(names)

    def close(self) -> None:
        """End all workers; whoever asks from now on gets an error and no new thread."""
        with self._lock:
            self._closed = True
            self._end(tuple(self._workers))

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.end()

    def _worker(self, name: str) -> _Worker:
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = _Worker(name, self._clock)
        return worker

    def _outcome(
        self, name: str, turn: _Call[T] | float, patience: _Patience, began: float, late: Callable[[], object] | None
    ) -> Result[T]:
        if isinstance(turn, float):
            message = f"{name}: a call begun {turn:.0f} s ago has not returned; skipped until it does"
            return Result(None, SourceError("hung", message), 0.0)
        # One that is late already has been waited for by an earlier run.
        if not (turn.done.is_set() if turn.late else patience.wait(turn.done)):
            turn.late = late
            if late is None or not turn.done.is_set():  # else it came while nobody was looking
                seconds = self._clock() - (began if late is None else turn.began)
                return Result(None, SourceError("deadline", f"{name}: no answer within {seconds:.1f} s"), seconds)
        turn.taken = True
        return Result(turn.value, turn.error, turn.seconds)


class _Patience:
    """Seconds that are waited for several calls together, in short pieces, each counted as long as it was meant to be.
    A piece that took longer found podgpu itself standing still, and its workers with it: on a node that was frozen,
    or under a CPU limit. No source is blamed for that."""

    __slots__ = ("_left",)

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self, done: threading.Event) -> bool:
        while self._left > 0.0:
            piece = min(_PIECE_SECONDS, self._left)
            began = time.monotonic()
            if done.wait(piece):
                self._left -= min(piece, time.monotonic() - began)
                return True
            self._left -= piece
        return done.is_set()


class _Call(Generic[T]):
    """One call on its way through a worker."""

    __slots__ = ("began", "call", "done", "error", "late", "seconds", "taken", "value")

    def __init__(self, call: Callable[[], T], began: float) -> None:
        self.call = call
        self.began = began
        self.done = threading.Event()
        self.value: T | None = None
        self.error: SourceError | StartError | None = None
        self.seconds = 0.0
        self.taken = False
        self.late: Callable[[], object] | None = None
        """Whom to tell when it returns and nobody waits for it."""


class _Worker:
    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._current: _Call[object] | None = None
        threading.Thread(target=self._work, name=f"read-{name}", daemon=True).start()

    def start(self, call: Callable[[], T], wants_late: bool = False) -> _Call[T] | float:
        """While an earlier call has not returned, for how many seconds it has not; with `wants_late`, that call until
        its answer was taken."""
        current = self._current
        if current is not None and wants_late and not current.taken:
            return current  # type: ignore[return-value]
        if current is not None and not current.done.is_set():
            return float(self._clock() - current.began)
        turn = _Call(call, self._clock())
        self._current = turn  # type: ignore[assignment]
        self._inbox.put(turn)  # type: ignore[arg-type]
        return turn

    def end(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while (turn := self._inbox.get()) is not None:
            began = self._clock()
            try:
                turn.value = turn.call()
            except (SourceError, StartError) as e:
                turn.error = e
            except Exception as e:  # noqa: BLE001 - the edge: a bug in one source must not take the others down
                _log.exception("%s: unexpected error, please report it", self._name)
                turn.error = SourceError("bug", f"{self._name}: {type(e).__name__}: {e}")
            turn.seconds = self._clock() - began
            turn.done.set()
            if turn.late is not None:
                turn.late()
            del turn  # keep no answer alive until the next one comes
