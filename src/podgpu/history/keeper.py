"""Keeper takes a sample of everything every 15 s into the ring, in a thread of its own, and has another write it.

A disk that hangs holds up nothing but what is written to it. The ring's clock only goes on: when the wall clock is set,
what was a minute ago stays a minute ago.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from podgpu.clock import Clock, Faults, WallClock
from podgpu.errors import StartError
from podgpu.files import OutputError
from podgpu.history.asking import STEP
from podgpu.history.ring import Ring, Told

if TYPE_CHECKING:  # only for those who keep it on disk
    from podgpu.history.journal import Journal

_LOAD_SECONDS = 5.0
"""For so long the first sample waits for what is read from the disk."""
_SOON_SECONDS = 2.0
"""While there is nothing to take, as before the first round, it is looked again this soon."""
_STOP_SECONDS = 2.0
_TIDY_SECONDS = 60.0
_AGAIN_SECONDS, _LONGEST_AGAIN = 60.0, 900.0
_LATE_SECONDS = 120.0
_SAY_SECONDS = 3600.0
_log = logging.getLogger(__name__)
T = TypeVar("T")
Read = Callable[[], Iterable[Told]]


class KeptBeside(Protocol):
    """Something else that is kept in the directory."""

    def load(self) -> Sequence[str]:
        """Reads it, once; what to say of it. Raises OutputError: to be tried again."""

    def save(self) -> None:
        """Raises OutputError."""


class RingClock:
    """The ring's time: that of the wall clock at the start, going on by a clock that nobody sets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun = clock.wall() - clock.monotonic()
        self._wall = WallClock()
        self._ahead = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._clock.monotonic() + self._begun

    def ahead(self) -> float:
        """What is to be added to the ring's time to have Unix time: it changes when the wall clock is set."""
        with self._lock:
            self._ahead += self._wall.step(self._clock.monotonic(), self._clock.wall())
            return self._ahead


class Keeper:
    """Runs beside what it takes samples of; a part of what is served."""

    def __init__(
        self, read: Read, clock: Clock | None = None, directory: str = "", beside: KeptBeside | None = None
    ) -> None:
        """`read` is asked for what is known now; `beside` is kept in the same directory. Raises UsageError for a
        directory that can be none."""
        self._read = read
        self.clock = RingClock(clock or Clock())
        self.clock.ahead()
        self.ring = Ring()
        self.fatal: StartError | None = None
        self._journal = _journal(directory, self.ring) if directory else None
        self._faults: Faults[str] = Faults((clock or Clock()).monotonic, _SAY_SECONDS)
        self._words = ""
        self._beside = beside if directory else None
        self._beside_loaded = False
        self._beside_saved_at = float("-inf")
        self._loaded = self._journal is None
        self._retry_at, self._wait = float("-inf"), _AGAIN_SECONDS
        self._tidied_at = self._saved_at = float("-inf")
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._taken = threading.Event()
        self._threads: list[threading.Thread] = []

    # Turns

    def take(self) -> bool:
        """One sample of everything; whether there was anything."""
        return self.ring.record(self.clock.now(), self._read(), self.clock.ahead())

    def write(self) -> None:
        """What is new, to the disk; the first time what is there is read before. Faults are said, never raised."""
        if self._journal is None:
            return
        now, ahead = self.clock.now(), self.clock.ahead()
        if now < self._retry_at:
            return
        try:
            if not self._loaded:
                notes = self._journal.load(now, ahead)
                self._loaded = True
                _warn(notes)
            if self._beside is not None and not self._beside_loaded:
                of_beside = self._beside.load()
                self._beside_loaded = True
                _warn(of_beside)
            if now - self._tidied_at >= _TIDY_SECONDS:
                self._journal.tidy(now, ahead)  # before anything is written: on a full disk it makes room
                self._tidied_at = now
            self._journal.save(now, ahead)
            if self._beside is not None and now - self._beside_saved_at >= _TIDY_SECONDS:
                self._beside.save()
                self._beside_saved_at = now
        except OutputError as error:
            self._retry_at = now + self._wait
            self._wait = min(2 * self._wait, _LONGEST_AGAIN)
            self._words = (
                f"{error}: history is kept in memory only, and is lost when podgpu ends; see that the directory of"
                " --history-dir can be read and written and has room"
            )
            if self._faults.fails("disk", str(error)):
                _log.warning("history: %s", self._words)
        else:
            self._saved_at, self._wait, self._words = now, _AGAIN_SECONDS, ""
            if self._faults.answers("disk"):
                _log.info("history is written again")

    def notes(self) -> tuple[str, ...]:
        """What is not as it should be, for the person who looks."""
        if self._words:
            return (self._words,)
        since = self.clock.now() - self._saved_at
        if self._saved_at > float("-inf") and since > _LATE_SECONDS:
            return (f"history has not been written for {since:.0f} s: the disk of --history-dir does not answer",)
        return ()

    # Life

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal  # whatever goes wrong here is no reason to end
        jobs = {"history": self._take_turns} | ({"history-disk": self._write_turns} if self._journal else {})
        for name, job in jobs.items():
            thread = threading.Thread(target=job, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take_turns(self) -> None:
        if self._journal is not None:
            self._ready.wait(_LOAD_SECONDS)
        while not self._stopping.is_set():
            taken = self._guarded(self.take)
            self._taken.set()
            until_next = STEP - self.clock.now() % STEP
            self._stopping.wait(until_next if taken else min(until_next, _SOON_SECONDS))

    def _write_turns(self) -> None:
        while not self._stopping.is_set():
            self._guarded(self.write)
            self._ready.set()
            self._taken.wait()
            self._taken.clear()

    def _guarded(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except Exception:  # noqa: BLE001 - the edge: figures are served without a past too
            if self._faults.fails("bug", "bug"):
                _log.exception("unexpected error in the history, please report it; podgpu goes on")
            return None

    def reload(self) -> None:
        """Nothing here may change."""

    def stop(self) -> None:
        self._stopping.set()
        self._taken.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)
        if self._journal is not None and not any(thread.is_alive() for thread in self._threads):
            self._beside_saved_at = float("-inf")
            self._guarded(self.write)
            self._journal.close()


def _warn(sentences: Iterable[str]) -> None:
    for words in sentences:
        _log.warning("history: %s", words)


def _journal(directory: str, ring: Ring) -> Journal:
    from podgpu.history.directory import Directory
    from podgpu.history.journal import Journal

    return Journal(Directory(directory), ring)
