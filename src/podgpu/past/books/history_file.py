"""The SQLite database of the history: a file that survives damage, deletion and a full disk."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from podgpu.errors import PodgpuError
from podgpu.past.books.schema import SCHEMA, SCHEMA_VERSION, add_columns, fetch_value, migrate

_SETTINGS = (
    "journal_mode = WAL",
    # A power failure may lose the last values, but does not damage the file.
    "synchronous = NORMAL",
    # A container may have no writable /tmp.
    "temp_store = MEMORY",
    # Pages (16 MB). The same pages change often, so rare checkpoints save disk writes.
    "wal_autocheckpoint = 4000",
)

_log = logging.getLogger(__name__)


class HistoryError(PodgpuError):
    """The history cannot be opened, written or read."""


class HistoryFile(ABC):
    """A database in a file, or in memory if `path` is None. No other process may write to it."""

    def __init__(self, path: Path | None) -> None:
        """Opens or creates the file. A damaged file is renamed to `*.damaged`."""
        self._path = path
        self._damage: Exception | None = None
        # Readers of a history in memory use the connection of the writer.
        self._connection_lock = threading.RLock()
        with self._translate_errors("open"), ExitStack() as file_locks:
            if path is not None:
                file_locks.enter_context(_lock_file(path))
            self._open_or_replace()
            # Not released at the end of this block, but by `close`.
            self._file_locks = file_locks.pop_all()

    @abstractmethod
    def _reset_caches(self) -> None:
        """Replaces cached values by those in the file.

        Needed after a rollback, which may invalidate cached row ids.
        """

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """Opens a read-only connection for the functions that read. Raises HistoryError."""
        with self._translate_errors("read"):
            if self._path is None:
                with self._connection_lock:
                    yield self._db
                return

            uri = f"{self._path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True)) as db:
                db.execute("PRAGMA temp_store = MEMORY")
                db.execute("BEGIN")  # all queries see the same snapshot
                yield db

    def close(self) -> None:
        self._db.close()
        self._file_locks.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translate_errors("write"), self._connection_lock:
            if self._damage is not None:
                self._replace_file(self._damage)

            self._restore_deleted_file()
            try:
                with self._db:  # commits, or rolls back on an exception
                    yield
            except BaseException:
                self._reset_caches()
                raise

    @contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        """Converts errors to HistoryError. If the file is damaged, the next round replaces it."""
        try:
            yield
        # A number of more than 64 bits is an OverflowError.
        except (sqlite3.Error, OSError, OverflowError) as error:
            if _is_damage(error):
                self._damage = error

            # SQLite reports some full disks as I/O errors.
            is_full = _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
            hint = "; check that the disk has free space" if is_full else ""
            name = self._path or "history"
            raise HistoryError(f"cannot {action} {name}: {error}{hint}") from error

    def _open_or_replace(self) -> None:
        try:
            self._open()
        except sqlite3.Error as error:
            # The file is a database of another program, so our statements fail.
            has_other_tables = _primary_code(error) == sqlite3.SQLITE_ERROR
            if not (_is_damage(error) or has_other_tables):
                raise
            self._replace_file(error)

    def _open(self) -> None:
        self._db = sqlite3.connect(self._path or ":memory:", check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        """Checks the schema of the file. Creates the tables of a new file."""
        if self._path is not None:
            self._path.chmod(0o600)  # pod names are private

        # 0 is a new file. Files of schema 4 can be converted.
        version = fetch_value(self._db, "PRAGMA user_version")
        if version not in (0, 4, SCHEMA_VERSION):
            raise HistoryError(
                f"{self._path} was written by another version of podgpu (schema {version}; this"
                f" version supports {SCHEMA_VERSION}); use that version or another --history-dir"
            )

        for setting in _SETTINGS:
            self._db.execute(f"PRAGMA {setting}")

        if version == 0:
            self._db.executescript(SCHEMA)
        elif version < SCHEMA_VERSION:
            migrate(self._db, self._path)

        add_columns(self._db)
        self._inode = None if self._path is None else self._path.stat().st_ino
        self._reset_caches()

    def _replace_file(self, error: Exception) -> None:
        # Must precede the renaming, because closing deletes the write-ahead log by its name.
        self._db.close()
        aside = _find_free_name(f"{self._path}.damaged")
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}{suffix}", f"{aside}{suffix}")

        _log.error(
            "%s is damaged (%s); it was renamed to %s, and a new file was created",
            self._path,
            error,
            aside,
        )
        self._damage = None
        self._open()

    def _restore_deleted_file(self) -> None:
        """Writes the file again if it was deleted or replaced: its content is still readable."""
        if self._path is None:
            return

        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                return

        # They belong to the file that is gone. SQLite would read them with the new one.
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)

        if not _lock_path(self._path).exists():
            # The whole directory may be gone.
            self._file_locks.enter_context(_lock_file(self._path))

        if self._path.exists():
            aside = _find_free_name(f"{self._path}.other")
            os.replace(self._path, aside)
            _log.error(
                "%s was replaced while podgpu runs; the new file is now %s", self._path, aside
            )
        else:
            _log.error("%s was deleted while podgpu runs; it is written again", self._path)

        with closing(sqlite3.connect(self._path)) as copy:
            self._db.backup(copy)

        self._db.close()
        self._open()


def _find_free_name(name: str) -> str:
    """Adds a number if the name is used, so that no file is overwritten."""
    free = name
    number = 1
    while os.path.exists(free):
        number += 1
        free = f"{name}-{number}"
    return free


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock_file(path: Path) -> IO[bytes]:
    """Locks the file `PATH.lock` until the returned file is closed. Creates its directory.

    After a crash, the kernel releases the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(_lock_path(path), "ab")  # noqa: SIM115 - the store closes it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise HistoryError(
            f"{path} is in use by another podgpu; give each process its own --history-dir"
        ) from None

    return lock


def _is_damage(error: Exception) -> bool:
    return _primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _primary_code(error: Exception) -> int:
    """Returns the error code of SQLite without details. 0 for other errors."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF
