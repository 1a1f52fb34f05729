"""Runs the calls of each source in a separate thread.

So a source that hangs does not delay the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from podgpu.errors import DriverGone, SourceError, StartError
from podgpu.model import SourceStatus, Unmapped

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The value or error of a call, and the duration of the call."""

    value: T | None
    error: SourceError | StartError | None
    seconds: float


class ErrorCounts:
    """Counts failures since the start, by source and reason. Thread-safe."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._lock = threading.Lock()

    def add(self, source: str, reason: str, count: int = 1) -> None:
        with self._lock:
            self._counts[source][reason] += count

    def record(self, source: str, result: Result[Any], device: str = "") -> SourceStatus:
        """Counts the error of a call, if any. Returns the status of the source after the call.

        Re-raises a StartError.
        """
        error = result.error
        if isinstance(error, StartError):
            raise error
        if error is None:
            return SourceStatus(source, up=True, seconds=result.seconds, device=device)
        self.add(source, error.reason)
        return SourceStatus(
            source,
            up=False,
            seconds=result.seconds,
            error=error.reason,
            message=str(error),
            device=device,
        )

    def add_to(
        self, statuses: Sequence[SourceStatus], unmapped: Iterable[Unmapped]
    ) -> tuple[SourceStatus, ...]:
        """Adds the error counters to the statuses.

        Creates a status for each source that has only counters. If several statuses have the same
        name, the first one gets the counters.
        """
        lost: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for entry in unmapped:
            lost[entry.source][entry.reason] += 1
        with self._lock:
            errors = {source: dict(counts) for source, counts in self._counts.items()}

        listed = {status.name for status in statuses}
        others = sorted((errors.keys() | lost.keys()) - listed)
        all_statuses = [*statuses, *map(SourceStatus, others)]

        counted = []
        for status in all_statuses:
            own_errors = errors.pop(status.name, {})
            own_lost = dict(lost.pop(status.name, {}))
            counted.append(replace(status, errors=own_errors, unmapped=own_lost))
        return tuple(counted)


class Workers:
    """Runs named calls. Each name has its own thread, which runs one call at a time.

    The threads are daemons, so that a call that never returns does not prevent the process from
    exiting.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, idle_seconds: float = 300.0
    ) -> None:
        """`clock` measures calls. Deadlines always use the real clock.

        `idle_seconds`: time without a call after which a thread ends. It must be longer than
        collection intervals.
        """
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._calls: dict[str, _Call[Any]] = {}  # the last call of each name
        self._inboxes: dict[str, SimpleQueue[_Call[Any] | None]] = {}  # queue of each name's thread
        self._lock = threading.Lock()
        self._closed = False

    def run(
        self,
        jobs: Mapping[str, Callable[[], T]],
        deadline: float,
        on_late: Callable[[], object] | None = None,
    ) -> dict[str, Result[T]]:
        """Starts all calls and waits for them until the deadline.

        A call that misses the deadline continues in its thread, and is not repeated before it ends.
        Without `on_late`, its result is discarded. With `on_late`, its thread then calls `on_late`,
        and the next run returns the result.
        """
        calls = {}
        with self._lock:
            if self._closed:
                error = SourceError("stopping", "podgpu is stopping")
                return {name: Result(None, error, 0.0) for name in jobs}
            for name, job in jobs.items():
                calls[name] = self._start(name, job, on_late is not None)

        until = time.monotonic() + deadline
        results = {}
        for name, (call, is_new) in calls.items():
            results[name] = self._wait(name, call, is_new, until, on_late)
        return results

    def close(self) -> None:
        """Ends the threads. Later calls of `run` return errors."""
        with self._lock:
            self._closed = True
            for inbox in self._inboxes.values():
                inbox.put(None)

    def _start(self, name: str, job: Callable[[], T], keeps_late: bool) -> tuple[_Call[T], bool]:
        """Starts a call. Returns the call and True.

        If the result of the earlier call is still needed, returns that call and False.
        """
        earlier = self._calls.get(name)
        if earlier is not None:
            is_over = earlier.is_returned if keeps_late else earlier.done.is_set()
            if not is_over:
                return earlier, False

        call = self._calls[name] = _Call(name, job, self._clock)
        if name not in self._inboxes:
            self._inboxes[name] = SimpleQueue()
            work = partial(self._work, name)
            threading.Thread(target=work, name=f"read-{name}", daemon=True).start()
        self._inboxes[name].put(call)
        return call, True

    def _work(self, name: str) -> None:
        """Runs the calls of one name, until there was no call for `idle_seconds`."""
        inbox = self._inboxes[name]
        while True:
            try:
                call = inbox.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    # A call may have been added meanwhile.
                    if inbox.empty():
                        del self._inboxes[name], self._calls[name]
                        return
                continue
            if call is None:
                return
            call.run()

    def _wait(
        self,
        name: str,
        call: _Call[T],
        is_new: bool,
        until: float,
        on_late: Callable[[], object] | None,
    ) -> Result[T]:
        """Returns the result of a call, or an error if it has not returned by `until`.

        Does not wait for a call that began earlier (not `is_new`), because it may hang.
        """
        if is_new:
            call.done.wait(until - time.monotonic())
        if not call.done.is_set():
            call.on_late = on_late
        # The call may have ended before `on_late` was set.
        if call.done.is_set():
            call.is_returned = True
            return call.result

        seconds = self._clock() - call.began
        # With `on_late`, the result of an earlier call is still used, so this call is not skipped.
        if is_new or on_late is not None:
            error = SourceError("deadline", f"{name}: no answer within {seconds:.1f} s")
            return Result(None, error, seconds)
        error = SourceError(
            "hung",
            f"{name}: a call that began {seconds:.0f} s ago has not returned; "
            "skipped until it does",
        )
        return Result(None, error, 0.0)


@dataclass(eq=False)
class _Call(Generic[T]):
    _name: str
    _job: Callable[[], T]
    _clock: Callable[[], float]
    done: threading.Event = field(default_factory=threading.Event)
    result: Result[T] = Result(None, None, 0.0)
    is_returned: bool = False  # True if a run has returned the result
    on_late: Callable[[], object] | None = None
    """Set if the call missed its deadline. Called at its end."""

    def __post_init__(self) -> None:
        self.began = self._clock()

    def run(self) -> None:
        value: T | None = None
        error: SourceError | StartError | None = None
        try:
            value = self._job()
        except (SourceError, StartError) as e:
            error = e
        except Exception as e:  # noqa: BLE001 - a bug in one source must not affect the others
            _log.exception("%s: unexpected error, please report it", self._name)
            error = SourceError("bug", f"{self._name}: {type(e).__name__}: {e}")
        self.result = Result(value, error, self._clock() - self.began)
        self.done.set()
        if self.on_late is not None:
            self.on_late()


def run_loop(name: str, loop: Callable[[], object]) -> StartError | None:
    """Runs a loop of the process.

    Returns the error that must end the process, or None if the loop was stopped. A bug in a loop
    ends the process, because podgpu would otherwise serve old values forever.
    """
    try:
        loop()
    except StartError as error:
        return error
    except Exception as error:  # noqa: BLE001 - the outermost frame of a thread
        _log.exception("unexpected error in the %s loop, please report it", name)
        return StartError(
            f"the {name} loop stopped because of a bug ({type(error).__name__}: {error}); exiting"
        )
    return None


class DriverLock:
    """Opens and closes a library. Closes it only when no call is in progress."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._opening = threading.Lock()
        self._idle = threading.Condition()
        self._calls = 0
        self._closers = 0
        self.is_open = False
        self._was_open = False

    def open(self, start: Callable[[], None]) -> None:
        """Calls `start`, unless the library is open. If `start` fails, the library stays closed."""
        with self._opening:
            if not self.is_open:
                start()
                self.is_open = True
                self._was_open = True

    def close(self, wait: float, stop: Callable[[], None]) -> bool:
        """Waits until no call is in progress, then calls `stop`.

        Gives up after `wait` seconds and returns False. New calls are allowed during the wait, so
        that one call that hangs does not block all others.
        """
        if not self._opening.acquire(timeout=wait):
            # `start` hangs.
            return False
        try:
            with self._idle:
                self._closers += 1
                is_idle = self._idle.wait_for(lambda: self._calls == 0, wait)
                can_stop = self.is_open and is_idle
                if can_stop:
                    self.is_open = False
                self._closers -= 1
                self._idle.notify_all()
            if can_stop:
                stop()
            return is_idle
        finally:
            self._opening.release()

    @contextmanager
    def hold(self, gives_way: bool = False) -> Iterator[None]:
        """Prevents `close` from closing the library during the enclosed calls.

        Raises DriverGone if it is closed. With `gives_way`, first waits until pending `close` calls
        are done. Callers that use the library all the time must set `gives_way`. Otherwise, `close`
        would time out.
        """
        with self._idle:
            if gives_way:
                self._idle.wait_for(lambda: not self._closers)
            if not self._was_open:
                raise DriverGone(f"{self._name} is not loaded")
            if not self.is_open:
                raise DriverGone(f"podgpu has released {self._name}", reason="released")
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()
