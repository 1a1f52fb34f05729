"""Runs each source's calls in its own thread with a deadline, so that a source that hangs does not delay others."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from podgpu.errors import DriverGone, SourceError, StartError
from podgpu.model import SourceStatus

_log = logging.getLogger(__name__)
T = TypeVar("T")
_SLICE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """Value or error of one call, and its duration."""

    value: T | None
    error: SourceError | StartError | None
    seconds: float


class ErrorCounts:
    """Counts failures since the start, by source and reason. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, source: str, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts[source, reason] += count

    def make_status(self, source: str, result: Result[Any], device: str = "") -> SourceStatus:
        """Returns the status of a source after a call, and counts the error. Raises the error if it is a StartError."""
        if isinstance(result.error, StartError):
            raise result.error
        if result.error is None:
            return SourceStatus(source, True, result.seconds, device=device)
        self.add(source, result.error.reason)
        return SourceStatus(source, False, result.seconds, result.error.reason, str(result.error), device)

    def copy(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)


class Workers:
    """Named threads. A call that misses its deadline occupies its thread until it returns; its result is discarded.

    Threads are daemons, so a call that never returns does not prevent the process from exiting.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()
        self._closed = False

    def run(
        self, jobs: Mapping[str, Callable[[], T]], deadline: float, late: Callable[[], object] | None = None
    ) -> dict[str, Result[T]]:
        """Runs one call on each named worker and waits for all until the deadline.

        With `late`, the result of a call that misses the deadline is not discarded. When the call returns, `late` is
        called in the worker's thread, and the next run returns the result. Until then, runs skip that worker.
        """
        began = self._clock()
        with self._lock:
            if self._closed:
                error = SourceError("stopping", "podgpu is stopping")
                return {name: Result(None, error, 0.0) for name in jobs}
            calls = {name: self._find_worker(name).start(job, late is not None) for name, job in jobs.items()}
        timeout = _SharedTimeout(deadline)
        return {name: self._wait(name, call, timeout, began, late) for name, call in calls.items()}

    def forget(self, names: Iterable[str]) -> None:
        """Ends the workers of removed devices. A worker that hangs ends when its call returns."""
        with self._lock:
            self._end(names)

    def close(self) -> None:
        """Ends all workers. Later runs return errors and start no thread."""
        with self._lock:
            self._closed = True
            self._end(tuple(self._workers))

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.end()

    def _find_worker(self, name: str) -> _Worker:
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = _Worker(name, self._clock)
        return worker

    def _wait(
        self,
        name: str,
        call: _Call[T] | float,
        timeout: _SharedTimeout,
        began: float,
        late: Callable[[], object] | None,
    ) -> Result[T]:
        if isinstance(call, float):
            message = f"{name}: a call that began {call:.0f} s ago has not returned; skipped until it does"
            return Result(None, SourceError("hung", message), 0.0)
        # An earlier run has already waited for a late call.
        if not (call.done.is_set() if call.late else timeout.wait(call.done)):
            call.late = late
            if late is None or not call.done.is_set():  # it may have returned after the wait
                seconds = self._clock() - (began if late is None else call.began)
                return Result(None, SourceError("deadline", f"{name}: no answer within {seconds:.1f} s"), seconds)
        call.taken = True
        return Result(call.value, call.error, call.seconds)


class _SharedTimeout:
    """Timeout for several calls together. Excludes time in which podgpu itself was stalled (frozen node, CPU limit)."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def wait(self, done: threading.Event) -> bool:
        while self._left > 0.0:
            piece = min(_SLICE_SECONDS, self._left)
            began = time.monotonic()
            if done.wait(piece):
                self._left -= min(piece, time.monotonic() - began)
                return True
            self._left -= piece
        return done.is_set()


class _Call(Generic[T]):
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


class _Worker:
    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Call[object] | None] = queue.SimpleQueue()
        self._current: _Call[object] | None = None
        threading.Thread(target=self._work, name=f"read-{name}", daemon=True).start()

    def start(self, job: Callable[[], T], wants_late: bool = False) -> _Call[T] | float:
        """Returns the new call, or the age in seconds of an earlier call that has not returned.

        With `wants_late`, returns an earlier call whose result has not been read yet, instead of starting a new one.
        """
        current = self._current
        if current is not None and wants_late and not current.taken:
            return current  # type: ignore[return-value]
        if current is not None and not current.done.is_set():
            return float(self._clock() - current.began)
        call = _Call(job, self._clock())
        self._current = call  # type: ignore[assignment]
        self._inbox.put(call)  # type: ignore[arg-type]
        return call

    def end(self) -> None:
        self._inbox.put(None)

    def _work(self) -> None:
        while (call := self._inbox.get()) is not None:
            began = self._clock()
            try:
                call.value = call.call()
            except (SourceError, StartError) as e:
                call.error = e
            except Exception as e:  # noqa: BLE001 - a bug in one source must not affect the others
                _log.exception("%s: unexpected error, please report it", self._name)
                call.error = SourceError("bug", f"{self._name}: {type(e).__name__}: {e}")
            call.seconds = self._clock() - began
            call.done.set()
            if call.late is not None:
                call.late()
            del call  # do not keep the result alive until the next call


class DriverLock:
    """Opens a library, counts the calls into it, and closes it at a moment when no call is in flight."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._opening = threading.Lock()
        self._idle = threading.Condition()
        self._calls = 0
        self._closers = 0
        self.is_open = False

    def open(self, start: Callable[[], None]) -> None:
        """Calls `start` unless the library is open. If `start` fails, the library stays closed."""
        with self._opening:
            if not self.is_open:
                start()
                self.is_open = True

    def close(self, wait: float, stop: Callable[[], None]) -> bool:
        """Waits until no call is in flight, then calls `stop`. Returns False and stays open if that takes too long.

        New calls are accepted while it waits, because otherwise one call that hangs would block all others.
        """
        if not self._opening.acquire(timeout=wait):
            return False  # `start` hangs
        try:
            if self.is_open:
                if not self._close_when_idle(wait):
                    return False
                stop()
            return True
        finally:
            self._opening.release()

    def _close_when_idle(self, wait: float) -> bool:
        with self._idle:
            self._closers += 1
            try:
                if not self._idle.wait_for(lambda: self._calls == 0, wait):
                    return False
                self.is_open = False
                return True
            finally:
                self._closers -= 1
                self._idle.notify_all()

    @contextmanager
    def hold(self, gives_way: bool = False) -> Iterator[None]:
        """Encloses a group of calls. Raises DriverGone if the library is closed.

        With `gives_way`, waits for pending closers first. Use it in callers that begin the next group immediately;
        otherwise `close` would time out.
        """
        with self._idle:
            if gives_way:
                self._idle.wait_for(lambda: not self._closers)
            if not self.is_open:
                raise DriverGone(f"podgpu has released {self._name}", "released")
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()
