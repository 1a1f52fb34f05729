"""Stores the state of all GPUs every 15 s in a thread, and reads the stored history."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection
from typing import NamedTuple, TypeVar

from podgpu.clock import Clock
from podgpu.errors import Note, SourceError, StartError, UsageError
from podgpu.past.books.book_clock import STABLE_SECONDS, BookClock, BookTime
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.history_file import HistoryError
from podgpu.past.books.load_steps import PastLoad
from podgpu.past.books.store import HistoryStore
from podgpu.past.spans import CONDITION
from podgpu.past.time_steps import FINE

FILE_NAME = "history.db"
_OLD_FILES = ("*.history", "waste.json")  # of podgpu 0.1 and 0.2
_REOPEN_SECONDS = 60.0
_EMPTY_RETRY_SECONDS = 2.0  # interval of attempts until the first values are available
_STOP_SECONDS = 2.0
T = TypeVar("T")
_log = logging.getLogger(__name__)


class ConditionSpan(NamedTuple):
    uuid: str
    condition: str
    started: float
    ended: float | None


_FAILURES = """
SELECT DISTINCT uuid, name, started, ended FROM span JOIN gpu ON gpu.id = span.gpu
WHERE kind = ? AND started > ?"""


class HistoryRecorder:
    """Records the history of a node or a cluster.

    Without a directory, the history is kept in memory. The times of records follow the monotonic
    clock (`BookClock`).
    """

    def __init__(
        self,
        read_gpus: Callable[[], Sequence[GpuSample] | None] | None = None,
        clock: Clock | None = None,
        directory: str = "",
    ) -> None:
        """`read_gpus` returns the current state, or None if it is not available.

        Without `read_gpus`, the state of every round is given to `add`.
        """
        # Methods of Path raise PermissionError in a directory that cannot be searched.
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise UsageError(
                f"--history-dir {directory}: not a directory; give a directory that podgpu may"
                " write to"
            )

        self.fatal: StartError | None = None
        self._read_gpus = read_gpus
        self._clock = clock or Clock()
        self._path = Path(directory) / FILE_NAME if directory else None
        self._problem = ""
        self._latest: Sequence[GpuSample] | None = None  # the last round, until it is written
        # Shifts of usage in the file that became settled while it could not be written.
        self._shifts: list[float] = []
        # Guards the clock, the choice of the store and the time of charges, so that no charge is
        # made with the former clock or in the former store. Short: no file is read or written.
        self._lock = threading.Lock()
        self._store = HistoryStore()
        # The next attempt to open the file. Infinite if it is open, or if there is none.
        self._reopen_at = self._clock.monotonic() if self._path else float("inf")
        self._reopen()
        self._books = BookClock(self._clock, self._store.last_round)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, gpus: Sequence[GpuSample]) -> None:
        """Adds a round. Its charges are added up until the next `record`."""
        with self._lock:
            self._store.charge(self._books.now, gpus, self._books.is_settled)
            self._latest = gpus

    def record(self) -> bool:
        """Stores the last round. Returns False if there is none yet."""
        self._reopen()
        if self._read_gpus is not None:
            gpus = self._read_gpus()
            if gpus is not None:
                self.add(gpus)

        with self._lock:
            latest = self._latest
            self._latest = None
            if latest is None:
                return False

            moment = self._books.read()
            if moment.settled_shift is not None:
                self._store.settle_unwritten(moment.settled_shift)
                self._shifts.append(moment.settled_shift)

        is_written = self._try(lambda: self._write(moment, latest))
        with self._lock:
            # A stop, or the next call, writes it if there is no newer round.
            if not is_written and self._latest is None:
                self._latest = latest

        return True

    def _write(self, moment: BookTime, gpus: Sequence[GpuSample]) -> None:
        while self._shifts:
            self._store.settle(self._shifts[0], moment.time)
            del self._shifts[0]
        self._store.write(moment.time, gpus, moment.is_settled)

    def append(self, now: float, gpus: Sequence[GpuSample]) -> None:
        """Stores a round of the Unix time `now`, such as a past one of the demo."""
        self._try(lambda: self._store.append(now, gpus))

    def append_loads(self, loads: Sequence[PastLoad]) -> None:
        """Stores what pods did in past hours, for the demo."""
        self._try(lambda: self._store.append_loads(loads))

    def _try(self, write: Callable[[], None]) -> bool:
        """Returns False if the file cannot be written."""
        try:
            write()
        except HistoryError as error:
            self._report(f"{error}; values are not stored until this is solved")
            return False

        if not self.is_in_memory:
            self._report("")

        return True

    def read_time(self) -> float:
        """Returns the Unix time of the books, which does not jump with the machine's clock."""
        return self._books.now

    def list_nodes(self) -> dict[str, str]:
        """Returns the node of each recorded GPU, by UUID. Empty if the history cannot be read.

        If another node took the GPU while its node did not answer, returns its node.
        """
        sql = "SELECT uuid, iif(taken_from = '', node, taken_from) FROM gpu"
        try:
            with self._store.reader() as db:
                return dict(db.execute(sql).fetchall())
        except HistoryError:
            return {}

    def list_failures(self, since: float) -> list[ConditionSpan]:
        """Returns the conditions of GPUs that began after `since`. Empty if the history cannot be
        read.
        """
        try:
            with self._store.reader() as db:
                rows = db.execute(_FAILURES, (CONDITION, since)).fetchall()
        except HistoryError:
            return []
        return [ConditionSpan(*row) for row in rows]

    def read_notices(self) -> dict[str, bytes]:
        """Returns what a webhook reported, by key. Raises HistoryError."""
        return self._store.read_notices()

    def write_notices(self, changes: Mapping[str, bytes | None]) -> None:
        """Stores what a webhook reported. None deletes an entry. Raises HistoryError."""
        self._store.write_notices(changes)

    @property
    def is_in_memory(self) -> bool:
        """True also while the file cannot be opened."""
        is_file_missing = self._reopen_at != float("inf")
        return self._path is None or is_file_missing

    def warnings(self) -> tuple[Note, ...]:
        """Warnings to show on the page."""
        notes = []
        if self._problem:
            # `_report` has logged it.
            notes.append(Note("history file", self._problem, is_logged=True))
        jump = self._books.jump
        if jump:
            direction = "ahead" if jump > 0 else "back"
            text = (
                f"the clock of this machine jumped {direction} by {abs(jump):,.0f} s: history and"
                " cost go on with the former time until the clock has been stable for"
                f" {STABLE_SECONDS / 60:.0f} minutes"
            )
            notes.append(Note(f"history clock {direction}", text))

        return tuple(notes)

    def _reopen(self) -> None:
        """Opens the file. After a failure, retries every minute and meanwhile uses memory."""
        is_too_early = self._clock.monotonic() < self._reopen_at
        if self._path is None or is_too_early:
            return

        try:
            store = HistoryStore(self._path)
        except HistoryError as error:
            self._reopen_at = self._clock.monotonic() + _REOPEN_SECONDS
            self._report(f"{error}; history is kept in memory only, and is lost when podgpu ends")
            return

        self._reopen_at = float("inf")
        with self._lock:
            store.take_over(self._store)
            self._store = store

        self._report("")
        _warn_of_old_files(self._path.parent)

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            _log.warning("history: %s", problem)
        elif self._problem and not problem:
            _log.info("history can be written again")
        self._problem = problem

    # Thread

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal  # unused, because podgpu continues without history
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                stored = self.record()
            except Exception:  # noqa: BLE001 - outermost frame of a thread; podgpu continues
                _log.exception("unexpected error while storing history; please report it")
                stored = True
            pause = FINE - self._books.now % FINE
            if not stored:
                pause = min(pause, _EMPTY_RETRY_SECONDS)
            self._stopping.wait(pause)

    def reload(self) -> None: ...

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        # A thread that hangs in a file system keeps the store.
        if self._thread is None or not self._thread.is_alive():
            if self._latest is not None:
                self.record()
            self._store.close()

    # Reading

    async def ask(self, read: Callable[[Connection, float], T]) -> T:
        """Calls `read` in a thread with a connection and the current Unix time.

        Raises SourceError if reading fails.
        """

        def ask() -> T:
            try:
                with self._store.reader() as db:
                    return read(db, self._books.now)
            except HistoryError as error:
                raise SourceError("history_unreadable", str(error)) from error

        return await asyncio.to_thread(ask)


def _warn_of_old_files(folder: Path) -> None:
    old = []
    for pattern in _OLD_FILES:
        old += [path.name for path in folder.glob(pattern)]

    if old:
        _log.warning(
            "history: files of podgpu 0.1 or 0.2 in %s are not read: %s",
            folder,
            ", ".join(sorted(old)),
        )
