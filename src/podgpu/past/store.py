"""Writes the state of all GPUs to an SQLite database, in a file or in memory."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, UsageAccount
from podgpu.errors import PodgpuError

SCHEMA_VERSION = 4
FINE, COARSE, HOUR, DAY = 15, 300, 3600, 86_400  # resolutions in seconds; days are UTC days
# the `account` of rows about the GPU itself: its values in `sample`, its conditions in `span`
GPU_ITSELF = 0
# seconds; if a condition began earlier than this, only its message changed: the new span starts now
_LATEST = 60
MAX_BYTES = 2 * 1024**3  # 8,000 GPUs with one pod each need 1.6 GB


class Retention(NamedTuple):
    """How long the rows of each resolution are kept, in seconds."""

    fine: int = 2 * HOUR
    coarse: int = 8 * DAY
    usage_per_step: int = 3 * HOUR
    usage_per_hour: int = 8 * DAY
    usage: int = 90 * DAY


IN_MEMORY = Retention(fine=HOUR + COARSE, coarse=DAY + HOUR, usage_per_hour=DAY + HOUR)

_SETTINGS = (
    "journal_mode = WAL",
    # a power failure may lose the last values, but does not damage the file
    "synchronous = NORMAL",
    "temp_store = MEMORY",  # a container may have no writable /tmp
    # pages (16 MB); the same pages change often, so rare checkpoints save disk writes
    "wal_autocheckpoint = 4000",
)
_SCHEMA = f"""
BEGIN;
CREATE TABLE gpu (               -- a GPU, or one MIG instance of it
    id INTEGER PRIMARY KEY,
    uuid TEXT, instance TEXT,    -- instance is empty for a whole GPU
    node TEXT, gpu_index INTEGER,
    last_seen INTEGER,           -- start of the hour
    UNIQUE (uuid, instance)
);
CREATE TABLE account (           -- a pod or job; usage is charged to it
    id INTEGER PRIMARY KEY,
    namespace TEXT, pod TEXT,
    job TEXT, uid TEXT, container_id TEXT,  -- for workloads without a pod name
    owner_kind TEXT, owner_name TEXT,
    last_seen INTEGER,           -- start of the hour
    labels TEXT NOT NULL DEFAULT '',  -- JSON object
    methods TEXT NOT NULL DEFAULT '', -- how use was measured: words
    UNIQUE (namespace, pod, job, uid, container_id)
);
CREATE TABLE round (             -- times with samples
    resolution INTEGER, time INTEGER,
    PRIMARY KEY (resolution, time)
) WITHOUT ROWID;
CREATE TABLE sample (
    resolution INTEGER, time INTEGER, gpu INTEGER,
    account INTEGER,             -- {GPU_ITSELF} for the GPU itself; else the account's own values (without power and
                                 -- temperature), or a copy of the GPU's values, see _COPY_GPU_VALUES
    utilization INTEGER,         -- 1/10,000
    memory INTEGER,              -- MiB
    power INTEGER,               -- 1/10 W
    temperature INTEGER,         -- degrees Celsius
    PRIMARY KEY (resolution, time, gpu, account)
) WITHOUT ROWID;
CREATE TABLE span (              -- the time when a GPU had a holder or a condition
    gpu INTEGER, account INTEGER,    -- the holder, or {GPU_ITSELF} for a condition of the GPU itself
    name TEXT, message TEXT,         -- name of the container or the condition
    started INTEGER, ended INTEGER   -- ended is NULL if the span has not ended
);
CREATE INDEX span_gpu ON span (gpu);
CREATE INDEX span_account ON span (account);
CREATE TABLE usage (             -- usage of one account in 5 minutes, an hour or a day
    resolution INTEGER, time INTEGER, account INTEGER,
    currency TEXT,                    -- empty if the GPU has no price
    allocated INTEGER, idle INTEGER,  -- GPU milliseconds
    cost INTEGER, idle_cost INTEGER,  -- 1/1,000,000,000 of the currency
    measured INTEGER, busy INTEGER,   -- GPU milliseconds; measured is the allocated time for which busy is known
    busy_min INTEGER, busy_max INTEGER,  -- GPU milliseconds
    energy INTEGER,                   -- millijoules
    waited INTEGER,                   -- GPU milliseconds
    PRIMARY KEY (resolution, time, account, currency)
) WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_UPSERT_GPU = """
INSERT INTO gpu (uuid, instance, node, gpu_index, last_seen) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET node = excluded.node, gpu_index = excluded.gpu_index, last_seen = excluded.last_seen
RETURNING id"""
_UPSERT_ACCOUNT = """
INSERT INTO account (namespace, pod, job, uid, container_id, owner_kind, owner_name, labels, methods, last_seen)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET last_seen = excluded.last_seen,
    owner_kind = iif(excluded.owner_name = '', owner_kind, excluded.owner_kind),
    owner_name = iif(excluded.owner_name = '', owner_name, excluded.owner_name),
    labels = iif(excluded.labels = '', labels, excluded.labels),
    methods = iif(instr(methods, excluded.methods), methods, trim(methods || ' ' || excluded.methods))
RETURNING id"""
_INSERT_ROUND = "INSERT OR REPLACE INTO round VALUES (?, ?)"
# SQLite converts the units, because that is faster than Python.
_SAMPLE_ROW = "(?, ?, ?, ?, round(? * 1e4), round(? / 1048576.0), round(? * 10), round(?))"
_SAMPLE_BLOCK = 50  # rows per statement; single rows need twice the CPU time
AMOUNT_UNITS = {
    **dict.fromkeys(("allocated", "idle"), "1e3"),
    **dict.fromkeys(("cost", "idle_cost"), "1e9"),
    **dict.fromkeys(("measured", "busy", "busy_min", "busy_max", "energy", "waited"), "1e3"),
}
_ADD_USAGE = f"""
INSERT INTO usage VALUES (?, ?, ?, ?, {", ".join(f"round(? * {unit})" for unit in AMOUNT_UNITS.values())})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in AMOUNT_UNITS)}"""
# REPLACE allows the statement to be repeated after a failure.
_ROLL_UP_USAGE = f"""
INSERT OR REPLACE INTO usage SELECT :resolution, time / :resolution * :resolution AS start, account, currency,
    {", ".join(f"sum({name})" for name in AMOUNT_UNITS)}
FROM usage WHERE resolution = :finer AND time >= :since AND time < :until GROUP BY start, account, currency"""
_FIGURE_MEANS = (
    "round(avg(utilization)), round(avg(memory)), round(avg(power)), round(avg(temperature))"
)
_STEPS = """
SELECT DISTINCT time / :coarse * :coarse FROM round WHERE resolution = :fine AND time >= :since AND time < :until"""
_ROLL_UP_SAMPLES = f"""
INSERT OR REPLACE INTO sample SELECT :coarse, :start, gpu, account, {_FIGURE_MEANS} FROM sample
WHERE resolution = :fine AND time >= :start AND time < :start + :coarse GROUP BY gpu, account"""
# If a pod starts or ends within a 5-minute step and has no values of its own, copies the GPU's
# values to the pod: the mean over the rounds in which the pod held the GPU. The GPU's mean of the
# whole step includes times without the pod.
_COPY_GPU_VALUES = f"""
WITH changed AS MATERIALIZED (
    SELECT * FROM span WHERE account <> {GPU_ITSELF} AND (started > :since OR ended BETWEEN :since AND :until))
INSERT OR IGNORE INTO sample
SELECT :coarse, round.time / :coarse * :coarse AS start, changed.gpu, changed.account, {_FIGURE_MEANS}
FROM round CROSS JOIN changed CROSS JOIN sample ON sample.resolution = round.resolution
    AND sample.time = round.time AND sample.gpu = changed.gpu AND sample.account = {GPU_ITSELF}
WHERE round.resolution = :fine AND round.time >= :since AND round.time < :until
    AND started <= round.time AND (ended IS NULL OR ended > round.time)
GROUP BY start, changed.gpu, changed.account"""
_START_SPAN = "INSERT INTO span VALUES (?, ?, ?, ?, ?, NULL)"
_END_SPAN = """
UPDATE span SET ended = max(started, ?) WHERE gpu = ? AND account = ? AND name = ? AND message = ? AND ended IS NULL"""
_USED_BYTES = """
SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""

_log = logging.getLogger(__name__)


class HistoryError(PodgpuError):
    """The history cannot be opened, written or read."""


class GpuSample(NamedTuple):
    """State of a GPU or MIG instance. `figures` is None if the GPU could not be read."""

    uuid: str
    instance: str = ""
    node: str = ""
    gpu_index: int | None = None
    figures: Figures | None = None
    charges: Sequence[
        Charge
    ] = ()  # of the holders and, if a part of the GPU was unallocated, of UNALLOCATED
    conditions: Sequence[
        tuple[str, str]
    ] = ()  # name and message, such as ("xid", "XID 79: fallen off the bus")
    since: Mapping[str, float] = {}  # name of a condition -> Unix time when it began
    holders_known: bool = True  # if False, the previous holders still count as holders


class HistoryStore:
    """Writes history to a file, or to memory if `path` is None. No other process may write to the
    file.

    Call `append` from one thread. `reader` may be called from any thread.
    """

    def __init__(self, path: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        """Opens or creates the file. A damaged file is renamed to `*.damaged`, and an empty one is
        created.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._retention = Retention() if path else IN_MEMORY
        self._pending_usage: dict[tuple[int, UsageAccount, str], Amounts] = defaultdict(Amounts)
        """Usage that could not be written, by start of the 5-minute step, account and currency."""
        self._damage: Exception | None = None
        self._in_memory = threading.RLock()
        with self._translate_errors("open"), ExitStack() as lock:
            if path is not None:
                lock.enter_context(_lock_file(path))
            self._open_or_replace()
            self._lock = lock.pop_all()

    def append(self, now: float, gpus: Sequence[GpuSample]) -> None:
        """Stores a round: the state of all GPUs at the Unix time `now`. Replaces a round in the
        same interval of 15 s.

        The holders and conditions of a GPU end if the GPU is missing in the round. Raises
        HistoryError if the file cannot be written. The values of the round are then lost, but its
        usage is kept in memory and written with the next round.
        """
        try:
            with self._translate_errors("write"), self._in_memory:
                if self._damage is not None:
                    self._replace_file(self._damage)
                try:
                    with self._db:  # commits, or rolls back on an exception
                        self._write_round(now, gpus)
                except BaseException:
                    self._reset_caches()
                    raise
        except BaseException:
            self._add_pending_usage(now, gpus)
            raise
        self._pending_usage.clear()

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """Opens a read-only connection for the functions in `answers`. Raises HistoryError if this
        fails.
        """
        with self._translate_errors("read"):
            if self._path is None:
                with self._in_memory:
                    yield self._db
                return
            uri = f"{self._path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True)) as db:
                db.execute("PRAGMA temp_store = MEMORY")
                db.execute("BEGIN")  # all queries see the same snapshot
                yield db

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    @contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        """Converts errors to HistoryError. If the file is damaged, the next `append` creates a new
        file.
        """
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError) as error:
            if _is_damage(error):
                self._damage = error
            code = (
                getattr(error, "sqlite_errorcode", 0) & 0xFF
            )  # SQLite reports some full disks as I/O errors
            hint = (
                "; check that the disk has free space"
                if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
                else ""
            )
            raise HistoryError(
                f"cannot {action} {self._path or 'history'}: {error}{hint}"
            ) from error

    def _open_or_replace(self) -> None:
        try:
            self._open()
        except sqlite3.Error as error:
            has_other_tables = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR
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
        version = self._fetch_value("PRAGMA user_version")
        if version not in (0, SCHEMA_VERSION):
            raise HistoryError(
                f"{self._path} was written by another version of podgpu (schema {version}; this "
                "version supports"
                f" {SCHEMA_VERSION}); use that version or another --history-dir"
            )
        for setting in _SETTINGS:
            self._db.execute(f"PRAGMA {setting}")
        if version == 0:
            self._db.executescript(_SCHEMA)
        self._reset_caches()

    def _replace_file(self, error: Exception) -> None:
        # must precede the renaming, because closing deletes the write-ahead log by its name
        self._db.close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}{suffix}", f"{self._path}.damaged{suffix}")
        _log.error(
            "%s is damaged (%s); it was renamed to *.damaged, and a new file was created",
            self._path,
            error,
        )
        self._damage = None
        self._open()

    def _reset_caches(self) -> None:
        """Replaces cached values by those in the file. Needed after a rollback, which may
        invalidate cached row ids.
        """
        self._ids: dict[tuple[object, ...], int] = {}
        self._ids_hour = self._window = -1
        self._last_round = self._fetch_value(
            "SELECT ifnull(max(time), 0) FROM round WHERE resolution = ?", FINE
        )
        self._open_spans = set(
            self._db.execute("SELECT gpu, account, name, message FROM span WHERE ended IS NULL")
        )

    def _add_pending_usage(self, now: float, gpus: Sequence[GpuSample]) -> None:
        """Keeps the usage of a round that could not be written."""
        step = int(now) // COARSE * COARSE
        for gpu in gpus:
            for charge in gpu.charges:
                key = step, charge.account, charge.currency
                self._pending_usage[key] = self._pending_usage[key].plus(charge.amounts)

    def _write_round(self, now: float, gpus: Sequence[GpuSample]) -> None:
        time = int(now) // FINE * FINE
        self._last_round = min(
            self._last_round, time
        )  # if the clock was set back, the last round may be in the future
        rolled_up_until = self._last_round
        if (
            self._ids_hour != time // HOUR * HOUR
        ):  # clears cached ids every hour, so that the upserts update last_seen
            self._ids_hour = time // HOUR * HOUR
            self._ids.clear()
        gpu_ids = [
            self._row_id(_UPSERT_GPU, (gpu.uuid, gpu.instance, gpu.node, gpu.gpu_index))
            for gpu in gpus
        ]
        usage: dict[tuple[int, str], Amounts] = {}  # by account and currency
        own: dict[
            tuple[int, int], Figures
        ] = {}  # values of the holders of shared GPUs, by GPU and account
        unknown: set[int] = set()  # GPUs without known holders
        spans: dict[
            tuple[int, int, str, str], int
        ] = {}  # with the start of each span, if it is new
        for gpu_id, gpu in zip(gpu_ids, gpus, strict=True):
            if not gpu.holders_known:
                unknown.add(gpu_id)
            for charge in gpu.charges:
                account_id = self._row_id(_UPSERT_ACCOUNT, charge.account)
                earlier = usage.get((account_id, charge.currency))
                usage[account_id, charge.currency] = (
                    earlier.plus(charge.amounts) if earlier else charge.amounts
                )
                if charge.account != UNALLOCATED:
                    spans[gpu_id, account_id, charge.container, ""] = time
                if charge.figures is not None:
                    key = gpu_id, account_id
                    own[key] = own.get(key, Figures()).plus(charge.figures)
            for name, message in gpu.conditions:
                since = gpu.since.get(name, time)
                is_new = rolled_up_until - _LATEST < since <= now + 1
                spans[gpu_id, GPU_ITSELF, name, message] = round(since) if is_new else time
        if unknown:
            spans |= {
                span: time
                for span in self._open_spans
                if span[0] in unknown and span[1] != GPU_ITSELF
            }
        # The rows are generators, because lists of them would cost a fifth of the CPU time in the
        # garbage collector.
        samples = (
            (FINE, time, gpu_id, GPU_ITSELF, *gpu.figures)
            for gpu_id, gpu in zip(gpu_ids, gpus, strict=True)
            if gpu.figures is not None
        )
        step = time // COARSE * COARSE
        added = ((COARSE, step, *key, *amounts) for key, amounts in usage.items() if any(amounts))
        pending = (
            (COARSE, start, self._row_id(_UPSERT_ACCOUNT, account), currency, *amounts)
            for (start, account, currency), amounts in self._pending_usage.items()
        )
        self._db.execute(_INSERT_ROUND, (FINE, time))
        self._insert_samples(
            chain(samples, ((FINE, time, *key, *figures) for key, figures in own.items()))
        )
        self._db.executemany(_ADD_USAGE, chain(added, pending))
        new = ((*span, started) for span, started in spans.items() if span not in self._open_spans)
        self._db.executemany(_START_SPAN, new)
        # If podgpu did not run for some time, holders and conditions are recorded as ended at the
        # last round before.
        ended = time if time - self._last_round <= COARSE else self._last_round + FINE
        self._db.executemany(
            _END_SPAN, [(ended, *span) for span in self._open_spans - spans.keys()]
        )
        self._open_spans, self._last_round = set(spans), time
        if self._window != time // COARSE:
            self._window = time // COARSE
            self._roll_up_usage(rolled_up_until, time)
            self._roll_up_and_expire(time)
            self._enforce_size_limit()

    def _insert_samples(self, rows: Iterator[tuple[float | None, ...]]) -> None:
        while block := list(islice(rows, _SAMPLE_BLOCK)):
            values = ", ".join([_SAMPLE_ROW] * len(block))
            self._db.execute(
                f"INSERT OR REPLACE INTO sample VALUES {values}", list(chain.from_iterable(block))
            )

    def _row_id(self, upsert: str, row: tuple[object, ...]) -> int:
        row_id = self._ids.get(row)
        if row_id is None:
            [(row_id,)] = self._db.execute(upsert, (*row, self._ids_hour)).fetchall()
            self._ids[row] = row_id
        return row_id

    def _roll_up_usage(self, last: int, time: int) -> None:
        """Stores the total usage of each hour and day that ended since the last round."""
        for finer, resolution in ((COARSE, HOUR), (HOUR, DAY)):
            since, until = (at // resolution * resolution for at in (last, time))
            if since < until:
                window = {"finer": finer, "resolution": resolution, "since": since, "until": until}
                self._db.execute(_ROLL_UP_USAGE, window)

    def _roll_up_and_expire(self, time: int) -> None:
        """Stores the means of the 15 s samples for each 5-minute step that has ended, then deletes
        expired rows.
        """
        keep, until = self._retention, time // COARSE * COARSE
        newest = "SELECT ifnull(max(time) + ?, 0) FROM round WHERE resolution = ? AND time < ?"
        since = self._fetch_value(newest, COARSE, COARSE, until)
        window = {"fine": FINE, "coarse": COARSE, "since": since, "until": until}
        for (start,) in self._db.execute(
            _STEPS, window
        ).fetchall():  # one by one, because SQLite then sorts faster
            self._db.execute(_ROLL_UP_SAMPLES, {"fine": FINE, "coarse": COARSE, "start": start})
            self._db.execute(_INSERT_ROUND, (COARSE, start))
        for resolution, retention in ((FINE, keep.fine), (COARSE, keep.coarse)):
            for table in ("sample", "round"):
                expired = f"DELETE FROM {table} WHERE resolution = ? AND time < ?"
                self._db.execute(expired, (resolution, time - retention))
        self._db.execute(_COPY_GPU_VALUES, window)
        self._db.execute("DELETE FROM span WHERE ended < ?", (time - keep.coarse,))
        for resolution, retention in (
            (COARSE, keep.usage_per_step),
            (HOUR, keep.usage_per_hour),
            (DAY, keep.usage),
        ):
            self._db.execute(
                "DELETE FROM usage WHERE resolution = ? AND time < ?",
                (resolution, time - retention),
            )
        for table in ("gpu", "account"):
            self._db.execute(f"DELETE FROM {table} WHERE last_seen < ?", (time - keep.usage - DAY,))

    def _enforce_size_limit(self) -> None:
        """While the data exceeds the limit, deletes the oldest hours of samples, then the oldest
        days of usage.
        """
        for rows, length in (
            (f"sample WHERE resolution = {COARSE}", HOUR),
            (f"usage WHERE resolution = {HOUR}", DAY),
            (f"usage WHERE resolution = {DAY}", DAY),
        ):
            while self._fetch_value(_USED_BYTES) > self._max_bytes:
                oldest = self._fetch_value(f"SELECT min(time) FROM {rows}")
                if oldest is None:
                    break
                self._db.execute(f"DELETE FROM {rows} AND time < ?", (oldest + length,))

    def _fetch_value(self, sql: str, *parameters: int) -> Any:
        return self._db.execute(sql, parameters).fetchone()[0]


def _lock_file(path: Path) -> IO[bytes]:
    """Locks the file `PATH.lock` until the returned file is closed. After a crash, the kernel
    releases the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(f"{path}.lock", "ab")  # noqa: SIM115 - the store closes it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise HistoryError(
            f"{path} is in use by another podgpu; give each process its own --history-dir"
        ) from None
    return lock


def _is_damage(error: Exception) -> bool:
    primary_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return primary_code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
