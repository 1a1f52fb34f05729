"""Writes the state of all GPUs to an SQLite database, in a file or in memory.

The store only adds. A round adds its charges to the open row of its 5 minutes. Every quarter of an
hour, the open rows are added to the rows of their 5 minutes, hour and day, and deleted, in one
transaction. Nothing is ever computed again from rows that may have expired, so no clock can change
what was recorded.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, UsageAccount
from podgpu.errors import PodgpuError
from podgpu.past.schema import (
    AMOUNT_COLUMNS,
    COARSE,
    CONDITION,
    DAY,
    FINE,
    GPU_ITSELF,
    HOLDER,
    HOUR,
    IDLE,
    OPEN,
    SCHEMA,
    SCHEMA_VERSION,
    UNSETTLED,
    floor_time,
    migrate,
)

MAX_BYTES = 2 * 1024**3  # 8,000 GPUs with one pod each need 1.6 GB
MAX_NEW_ACCOUNTS = 2000  # per node and hour; further workloads of the node share one account
# Open usage is added to the coarser rows every quarter of an hour. With 8,000 GPUs, this takes
# 150 ms, so doing it every 5 minutes would cost 5 ms more per round.
_CARRY_SECONDS = 900
_LATEST = 60  # seconds; if a condition began earlier, only its message changed: the span starts now
MAX_UNWRITTEN = 200_000  # rows in memory (100 MB) while the file cannot be written
_MIN_SHARE = 1000  # accounts that a node may have in a full file
_MAX_TIMES_OTHERS = 10  # a node may have this many times the accounts of the others' mean


class Retention(NamedTuple):
    """How long the rows of each resolution are kept: for this much recorded time, in seconds.

    Time is counted in recorded rounds, hours and days, so a wrong clock deletes nothing.
    """

    fine: int = 2 * HOUR
    coarse: int = 8 * DAY
    usage_per_step: int = 3 * HOUR
    usage_per_hour: int = 8 * DAY
    usage: int = 90 * DAY


IN_MEMORY = Retention(fine=HOUR + COARSE, coarse=DAY + HOUR, usage_per_hour=DAY + HOUR)

_SETTINGS = (
    "journal_mode = WAL",
    # A power failure may lose the last values, but does not damage the file.
    "synchronous = NORMAL",
    # A container may have no writable /tmp.
    "temp_store = MEMORY",
    # Pages (16 MB). The same pages change often, so rare checkpoints save disk writes.
    "wal_autocheckpoint = 4000",
)
_UPSERT_GPU = """
INSERT INTO gpu (uuid, instance, node, gpu_index) VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET node = excluded.node, gpu_index = excluded.gpu_index
RETURNING id"""
_FIND_ACCOUNT = """
SELECT id FROM account
WHERE namespace = ? AND pod = ? AND job = ? AND uid = ? AND container_id = ?"""
_UPSERT_ACCOUNT = """
INSERT INTO account (namespace, pod, job, uid, container_id, owner_kind, owner_name, labels,
    methods, user, node)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    owner_kind = iif(excluded.owner_name = '', owner_kind, excluded.owner_kind),
    owner_name = iif(excluded.owner_name = '', owner_name, excluded.owner_name),
    labels = iif(excluded.labels = '', labels, excluded.labels),
    methods = iif(instr(methods, excluded.methods) OR length(methods) > 256, methods,
        trim(methods || ' ' || excluded.methods))
RETURNING id"""
_INSERT_ROUND = "INSERT OR IGNORE INTO round VALUES (?, ?)"
# SQLite converts the units, because that is faster than Python.
_SAMPLE_ROW = "(?, ?, ?, ?, round(? * 1e4), round(? / 1048576.0), round(? * 10), round(?))"
_SAMPLE_BLOCK = 50  # rows per statement; single rows need twice the CPU time
_ADD_AMOUNTS = "ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in AMOUNT_COLUMNS
)
_ADD_USAGE = f"""
INSERT INTO usage VALUES (?, ?, ?, ?, {", ".join("?" for _ in AMOUNT_COLUMNS)}) {_ADD_AMOUNTS}"""
_SUMS = ", ".join(f"sum({name})" for name in AMOUNT_COLUMNS)
_CARRY_USAGE = f"""
INSERT INTO usage SELECT :resolution, time / :resolution * :resolution AS start, account, currency,
    {_SUMS} FROM usage WHERE resolution = {OPEN} AND time <> :current
GROUP BY start, account, currency {_ADD_AMOUNTS}"""
_CARRY_PERIODS = f"""
INSERT OR IGNORE INTO period SELECT DISTINCT :resolution, time / :resolution * :resolution
FROM usage WHERE resolution = {OPEN} AND time <> :current"""
_SETTLE_USAGE = f"""
INSERT INTO usage SELECT {OPEN}, (time + ?) / {COARSE} * {COARSE} AS start, account, currency,
    {_SUMS} FROM usage WHERE resolution = {UNSETTLED}
GROUP BY start, account, currency {_ADD_AMOUNTS}"""
_FIGURE_MEANS = (
    "round(avg(utilization)), round(avg(memory)), round(avg(power)), round(avg(temperature))"
)
# The 5-minute steps that have ended, and have no means yet.
_STEPS = """
SELECT DISTINCT time / :coarse * :coarse AS start FROM round
WHERE resolution = :fine AND start <> :current
    AND start NOT IN (SELECT time FROM round WHERE resolution = :coarse)"""
_MEAN_SAMPLES = f"""
INSERT OR IGNORE INTO sample SELECT :coarse, :start, gpu, account, {_FIGURE_MEANS} FROM sample
WHERE resolution = :fine AND time >= :start AND time < :start + :coarse GROUP BY gpu, account"""
# If a pod starts or ends within a 5-minute step and has no values of its own, copies the GPU's
# values to the pod: the mean over the rounds in which the pod held the GPU. The GPU's mean of the
# whole step includes times without the pod.
_COPY_GPU_VALUES = f"""
WITH changed AS MATERIALIZED (
    SELECT * FROM span WHERE kind = '{HOLDER}'
    AND (started > :start OR ended BETWEEN :start AND :start + :coarse))
INSERT OR IGNORE INTO sample
SELECT :coarse, :start, changed.gpu, changed.account, {_FIGURE_MEANS}
FROM round CROSS JOIN changed CROSS JOIN sample ON sample.resolution = round.resolution
    AND sample.time = round.time AND sample.gpu = changed.gpu AND sample.account = {GPU_ITSELF}
WHERE round.resolution = :fine AND round.time >= :start AND round.time < :start + :coarse
    AND started <= round.time AND (ended IS NULL OR ended > round.time)
GROUP BY changed.gpu, changed.account"""
_START_SPAN = "INSERT INTO span VALUES (?, ?, ?, ?, ?, ?, NULL)"
_END_SPAN = """
UPDATE span SET ended = max(started, ?)
WHERE gpu = ? AND account = ? AND kind = ? AND name = ? AND message = ? AND ended IS NULL"""
_DELETE_OLDEST_SPANS = """
DELETE FROM span WHERE ended <= (
    SELECT ended FROM span WHERE ended IS NOT NULL ORDER BY ended
    LIMIT 1 OFFSET (SELECT count(ended) / 2 FROM span))"""
# The time of the oldest of :most rows that are not in the future.
_OLDEST_KEPT = """
SELECT time FROM {table} WHERE resolution = ? AND time <= ? ORDER BY time DESC
LIMIT 1 OFFSET ?"""
_COARSER = {COARSE: HOUR, HOUR: DAY}
_KEEP_SINCE = """
INSERT INTO kept VALUES (?, ?) ON CONFLICT DO UPDATE SET since = max(since, excluded.since)"""
_HOURS_KEPT = f"ifnull((SELECT since FROM kept WHERE resolution = {HOUR}), 0)"
_USED_BYTES = """
SELECT (page_count - freelist_count) * page_size
FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""

_log = logging.getLogger(__name__)


class HistoryError(PodgpuError):
    """The history cannot be opened, written or read."""


class ConditionRecord(NamedTuple):
    """A condition of a GPU, such as ("xid", "XID 79: fallen off the bus")."""

    name: str
    message: str
    since: float | None = None  # Unix time; None if it is unknown
    account: UsageAccount | None = None  # the holder, if it is a condition of a holder (idle)


class GpuSample(NamedTuple):
    """State of a GPU or MIG instance. `figures` is None if the GPU could not be read."""

    uuid: str
    instance: str = ""
    node: str = ""
    gpu_index: int | None = None
    figures: Figures | None = None
    charges: Sequence[Charge] = ()  # of holders and, for what nobody held, of `UNALLOCATED`
    conditions: Sequence[ConditionRecord] = ()
    holders_known: bool = True  # if False, the previous holders still count as holders


# Plain tuples: with 8,000 GPUs, named ones cost 40 ms per round.
_Span = tuple[int, int, str, str, str]  # GPU, account, kind, name and message of an open span
# OPEN or UNSETTLED, start of the 5 minutes, account, currency, node.
_UsageKey = tuple[int, int, UsageAccount, str, str]


@dataclass
class _Round:
    """The rows of one round."""

    time: int
    own: dict[tuple[int, int], Figures] = field(default_factory=dict)
    """Values of the holders of shared GPUs, by GPU and account."""
    spans: dict[_Span, int] = field(default_factory=dict)
    """With the start of each span, if it is new."""
    unknown_gpus: set[int] = field(default_factory=set)
    """GPUs whose holders are unknown."""


class HistoryStore:
    """Writes history to a file, or to memory if `path` is None. No other process may write to it.

    Call the methods that write from one thread. The other methods may be called from any thread.
    """

    _step: int  # start of the 5 minutes of the last round

    def __init__(
        self,
        path: Path | None = None,
        max_bytes: int = MAX_BYTES,
        max_unwritten: int = MAX_UNWRITTEN,
    ) -> None:
        """Opens or creates the file. A damaged file is renamed to `*.damaged`."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_unwritten = max_unwritten
        self._retention = Retention() if path else IN_MEMORY
        # Usage that is not written yet, also because writing failed.
        self._unwritten: dict[_UsageKey, Amounts] = {}
        self._unwritten_lock = threading.Lock()
        self._damage: Exception | None = None
        self._in_memory = threading.RLock()
        with self._translate_errors("open"), ExitStack() as lock:
            if path is not None:
                lock.enter_context(_lock_file(path))
            self._open_or_replace()
            self._lock = lock.pop_all()
        try:
            self.settle(0.0, math.inf)  # usage of the last process
        except BaseException:
            self.close()
            raise

    def append(self, now: float, gpus: Sequence[GpuSample]) -> None:
        """Charges and writes a round."""
        self.charge(now, gpus)
        self.write(now, gpus)

    def charge(self, now: float, gpus: Sequence[GpuSample], is_settled: bool = True) -> None:
        """Adds up the charges of a round in memory, until `write` stores them.

        If the time is not settled, it may still be changed by `settle`.
        """
        start = floor_time(now, COARSE)
        kind = OPEN if is_settled else UNSETTLED
        with self._unwritten_lock:
            for gpu in gpus:
                for charge in gpu.charges:
                    key = (kind, start, charge.account, charge.currency, gpu.node)
                    _add_up(self._unwritten, key, charge.amounts)

    def _add_unwritten(self, usage: Iterable[tuple[_UsageKey, Amounts]]) -> None:
        with self._unwritten_lock:
            for key, amounts in usage:
                _add_up(self._unwritten, key, amounts)

    @contextmanager
    def _take_unwritten(self) -> Iterator[Mapping[_UsageKey, Amounts]]:
        """Takes the usage that is not written yet. If writing fails, it is kept."""
        with self._unwritten_lock:
            usage = self._unwritten
            self._unwritten = {}
        try:
            yield usage
        except BaseException:
            self._add_unwritten(usage.items())
            self._shorten_unwritten()
            raise

    def _shorten_unwritten(self) -> None:
        """If the disk is full for days, keeps usage per hour, then per day, to save memory."""
        for length in (HOUR, DAY):
            if len(self._unwritten) <= self._max_unwritten:
                return
            shorter: dict[_UsageKey, Amounts] = {}
            with self._unwritten_lock:
                for (kind, start, account, currency, node), amounts in self._unwritten.items():
                    key = (kind, floor_time(start, length), account, currency, node)
                    _add_up(shorter, key, amounts)
                self._unwritten = shorter

    def write(self, now: float, gpus: Sequence[GpuSample], is_settled: bool = True) -> None:
        """Stores the state of all GPUs at the Unix time `now`, and all charges so far.

        Replaces samples of the same interval of 15 s. The holders and conditions of a GPU end if
        the GPU is missing in the round. While the time is not settled, usage stays open and nothing
        is deleted. Raises HistoryError if the file cannot be written. The samples of the round are
        then lost, but its usage is kept in memory and written with the next round.
        """
        with self._take_unwritten() as usage, self._transaction():
            self._write_round(floor_time(now, FINE), now, gpus)
            self._write_usage(usage)
            if is_settled and self._step != floor_time(now, COARSE):
                self._step = floor_time(now, COARSE)
                self._close_step(now)

    def settle_unwritten(self, shift: float) -> None:
        """Moves unsettled charges that are not written yet by `shift` seconds.

        Call it when the time becomes settled, and `settle` as soon as the file can be written.
        """
        settled: dict[_UsageKey, Amounts] = {}
        with self._unwritten_lock:
            for (kind, start, account, currency, node), amounts in self._unwritten.items():
                moved = floor_time(start + shift, COARSE) if kind == UNSETTLED else start
                _add_up(settled, (OPEN, moved, account, currency, node), amounts)
            self._unwritten = settled

    def settle(self, shift: float, now: float) -> None:
        """Moves unsettled usage in the file by `shift` seconds.

        Samples after `now` have a wrong time, so they are deleted. Spans are moved.
        """
        with self._transaction():
            self._db.execute(_SETTLE_USAGE, (round(shift),))
            self._db.execute(f"DELETE FROM usage WHERE resolution = {UNSETTLED}")
            for table in ("round", "sample"):
                for resolution in (FINE, COARSE):
                    sql = f"DELETE FROM {table} WHERE resolution = ? AND time > ?"
                    self._db.execute(sql, (resolution, now))
            for column in ("started", "ended"):
                sql = f"UPDATE span SET {column} = {column} + ? WHERE {column} > ?"
                self._db.execute(sql, (round(shift), now))
            self.last_round = self._fetch_last_round()

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """Opens a read-only connection for the functions that read. Raises HistoryError."""
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

    def take_over(self, other: HistoryStore) -> None:
        """Adds the usage of another store, which is then closed.

        Used if history was kept in memory, because the file could not be opened.
        """
        with other.reader() as db:
            names = (
                "namespace, pod, job, uid, container_id, owner_kind, owner_name, labels, methods"
            )
            sql = f"""
            SELECT resolution, time, currency, node, {names}, user, {", ".join(AMOUNT_COLUMNS)}
            FROM usage JOIN account ON account.id = account
            WHERE resolution IN ({OPEN}, {UNSETTLED})
                OR resolution = iif(time < {_HOURS_KEPT}, {DAY}, {HOUR})"""
            rows = db.execute(sql).fetchall()
        usage = []
        for resolution, start, currency, node, *row in rows:
            kind = UNSETTLED if resolution == UNSETTLED else OPEN
            key = (kind, start, UsageAccount(*row[:10]), currency, node)
            usage.append((key, Amounts(*row[10:])))
        with other._unwritten_lock:
            usage += other._unwritten.items()
        self._add_unwritten(usage)
        other.close()

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    # The file

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._translate_errors("write"), self._in_memory:
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
        except (sqlite3.Error, OSError, OverflowError) as error:
            if _is_damage(error):
                self._damage = error
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            # SQLite reports some full disks as I/O errors.
            is_full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
            hint = "; check that the disk has free space" if is_full else ""
            what = self._path or "history"
            raise HistoryError(f"cannot {action} {what}: {error}{hint}") from error

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
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
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

    def _reset_caches(self) -> None:
        """Replaces cached values by those in the file.

        Needed after a rollback, which may invalidate cached row ids.
        """
        self._ids: dict[tuple[object, ...], int] = {}
        self._ids_hour = -1
        self._step = -1
        self._new_accounts: Counter[str] = Counter()  # by node, in this hour
        self.last_round = self._fetch_last_round()  # Unix time of the newest round, or 0
        self._read_open_spans()

    def _fetch_last_round(self) -> int:
        newest = "SELECT ifnull(max(time), 0) FROM round WHERE resolution = ?"
        return int(self._fetch_value(newest, FINE))

    def _read_open_spans(self) -> None:
        spans = "SELECT gpu, account, kind, name, message FROM span WHERE ended IS NULL"
        self._open_spans: set[_Span] = set(self._db.execute(spans))

    def _fetch_value(self, sql: str, *parameters: int) -> Any:
        row = self._db.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    # Rows of a round

    def _write_round(self, time: int, now: float, gpus: Sequence[GpuSample]) -> None:
        hour = floor_time(time, HOUR)
        if self._ids_hour != hour:
            # The limit of new accounts is per hour, and cached ids must not pile up.
            self._ids_hour = hour
            self._ids.clear()
            self._new_accounts.clear()

        rows = _Round(time)
        gpu_ids = [self._find_gpu(gpu) for gpu in gpus]
        for gpu_id, gpu in zip(gpu_ids, gpus, strict=True):
            self._add_gpu(rows, gpu_id, gpu, now)
        if rows.unknown_gpus:
            self._keep_open_spans(rows)

        # Generators, because lists of rows cost a fifth of the CPU time in the garbage collector.
        samples = (
            (FINE, time, gpu_id, GPU_ITSELF, *gpu.figures)
            for gpu_id, gpu in zip(gpu_ids, gpus, strict=True)
            if gpu.figures is not None
        )
        own = ((FINE, time, *key, *figures) for key, figures in rows.own.items())
        self._db.execute(_INSERT_ROUND, (FINE, time))
        self._insert_samples(chain(samples, own))
        self._update_spans(rows)

    def _keep_open_spans(self, rows: _Round) -> None:
        """Keeps the holders of GPUs whose holders are unknown."""
        for span in self._open_spans:
            gpu_id, _, kind, _, _ = span
            if gpu_id in rows.unknown_gpus and kind != CONDITION:
                rows.spans.setdefault(span, rows.time)

    def _add_gpu(self, rows: _Round, gpu_id: int, gpu: GpuSample, now: float) -> None:
        if not gpu.holders_known:
            rows.unknown_gpus.add(gpu_id)

        for charge in gpu.charges:
            if charge.account == UNALLOCATED:
                continue
            account_id = self._find_account(charge.account, gpu.node)
            rows.spans[gpu_id, account_id, HOLDER, charge.container, ""] = rows.time
            if charge.figures is not None:
                key = gpu_id, account_id
                rows.own[key] = rows.own.get(key, Figures()).plus(charge.figures)

        for condition in gpu.conditions:
            account_id = GPU_ITSELF
            kind = CONDITION
            if condition.account is not None:
                account_id = self._find_account(condition.account, gpu.node)
                kind = IDLE
            span = (gpu_id, account_id, kind, condition.name, condition.message)
            since = condition.since
            is_new = since is not None and self.last_round - _LATEST < since <= now + 1
            rows.spans[span] = round(since) if since is not None and is_new else rows.time

    def _find_gpu(self, gpu: GpuSample) -> int:
        key = (gpu.uuid, gpu.instance, gpu.node, gpu.gpu_index)
        row_id = self._ids.get(key)
        if row_id is None:
            [(row_id,)] = self._db.execute(_UPSERT_GPU, key).fetchall()
            self._ids[key] = row_id
        return row_id

    def _find_account(self, account: UsageAccount, node: str) -> int:
        """Returns the id of the account, which is created if it is new.

        If a node has created too many accounts in this hour, returns a common one.
        """
        known_id = self._ids.get(account)
        if known_id is not None:
            return known_id
        if self._db.execute(_FIND_ACCOUNT, account[:5]).fetchone() is None:
            if self._new_accounts[node] >= MAX_NEW_ACCOUNTS:
                account = UsageAccount(job=f"more workloads of node {node}")
            self._new_accounts[node] += 1
        row = (*account, node)
        row_id: int = self._db.execute(_UPSERT_ACCOUNT, row).fetchone()[0]
        self._ids[account] = row_id
        return row_id

    def _insert_samples(self, rows: Iterable[tuple[float | None, ...]]) -> None:
        remaining = iter(rows)
        while block := list(islice(remaining, _SAMPLE_BLOCK)):
            values = ", ".join([_SAMPLE_ROW] * len(block))
            sql = f"INSERT OR REPLACE INTO sample VALUES {values}"
            self._db.execute(sql, list(chain.from_iterable(block)))

    def _update_spans(self, rows: _Round) -> None:
        new = [(*span, began) for span, began in rows.spans.items() if span not in self._open_spans]
        self._db.executemany(_START_SPAN, new)
        # If podgpu did not run for some time, holders and conditions are recorded as ended at the
        # last round before.
        is_gap = rows.time - self.last_round > COARSE
        ended = self.last_round + FINE if is_gap else rows.time
        self._db.executemany(
            _END_SPAN, [(ended, *span) for span in self._open_spans - rows.spans.keys()]
        )
        self._open_spans = set(rows.spans)
        self.last_round = rows.time

    # Usage

    def _write_usage(self, usage: Mapping[_UsageKey, Amounts]) -> None:
        accounts = [self._find_account(account, node) for _, _, account, _, node in usage]
        rows = (
            (kind, start, account_id, currency, *amounts)
            for account_id, ((kind, start, _, currency, _), amounts) in zip(
                accounts, usage.items(), strict=True
            )
        )
        self._db.executemany(_ADD_USAGE, rows)

    def _close_step(self, now: float) -> None:
        self._make_means(self._step)
        if self._step % _CARRY_SECONDS == 0:
            self._carry_usage()
            self._expire(now)
            self._enforce_size_limit()

    def _carry_usage(self) -> None:
        """Adds open usage to the coarser rows, except that of the current 5 minutes."""
        for resolution in (COARSE, HOUR, DAY):
            parameters = {"resolution": resolution, "current": self._step}
            self._db.execute(_CARRY_USAGE, parameters)
            self._db.execute(_CARRY_PERIODS, parameters)
        sql = f"DELETE FROM usage WHERE resolution = {OPEN} AND time <> ?"
        self._db.execute(sql, (self._step,))

    # Samples

    def _make_means(self, current: int) -> None:
        """Stores the means of the 15 s samples for each 5-minute step that has ended, once."""
        window = {"fine": FINE, "coarse": COARSE, "current": current}
        # One by one, because SQLite then sorts faster.
        for (start,) in self._db.execute(_STEPS, window).fetchall():
            step = {"fine": FINE, "coarse": COARSE, "start": start}
            self._db.execute(_MEAN_SAMPLES, step)
            self._db.execute(_COPY_GPU_VALUES, step)
            self._db.execute(_INSERT_ROUND, (COARSE, start))

    # Deletion

    def _expire(self, now: float) -> None:
        keep = self._retention
        self._expire_rows("round", "sample", FINE, keep.fine, now)
        self._expire_rows("round", "sample", COARSE, keep.coarse, now)
        self._expire_rows("period", "usage", COARSE, keep.usage_per_step, now)
        self._expire_rows("period", "usage", HOUR, keep.usage_per_hour, now)
        is_day_over = self._expire_rows("period", "usage", DAY, keep.usage, now)
        oldest = self._fetch_value("SELECT min(time) FROM round")
        self._db.execute("DELETE FROM span WHERE ended < ?", (oldest,))
        if is_day_over:
            self._delete_unused_names()

    def _expire_rows(
        self, times: str, table: str, resolution: int, seconds: int, now: float
    ) -> bool:
        """Deletes the oldest rows, but at most those of one day. Returns False if there are none.

        `times`: the table that lists the times of the rows.
        """
        most = seconds // resolution
        sql = _OLDEST_KEPT.format(table=times)
        since = self._fetch_value(sql, resolution, round(now), most - 1)
        oldest = self._fetch_value(
            f"SELECT min(time) FROM {times} WHERE resolution = ?", resolution
        )
        if since is None or oldest >= since:
            return False
        self._delete_rows(times, table, resolution, min(since, oldest + DAY))
        return True

    def _delete_rows(self, times: str, table: str, resolution: int, since: int) -> None:
        if table == "usage":
            # The rows of an hour, or of a day, are deleted together.
            since = floor_time(since, _COARSER.get(resolution, resolution))
            self._db.execute(_KEEP_SINCE, (resolution, since))
        for name in (table, times):
            sql = f"DELETE FROM {name} WHERE resolution = ? AND time < ?"
            self._db.execute(sql, (resolution, since))

    def _delete_unused_names(self) -> None:
        self._db.execute("""
            DELETE FROM account WHERE id NOT IN (SELECT account FROM usage)
            AND id NOT IN (SELECT account FROM span)""")
        self._db.execute("""
            DELETE FROM gpu WHERE id NOT IN (SELECT gpu FROM span)
            AND id NOT IN (SELECT gpu FROM sample)""")
        self._ids.clear()

    def _enforce_size_limit(self) -> None:
        """While the data exceeds the limit, deletes rows.

        First what one exporter created beyond its share, then the oldest hours of samples, then the
        oldest spans, and only then the oldest days of usage.
        """
        if not self._is_full():
            return
        self._delete_excess_accounts()
        self._delete_oldest("round", "sample", COARSE, HOUR)
        self._delete_oldest("round", "sample", FINE, HOUR)
        self._delete_oldest_spans()
        self._delete_oldest("period", "usage", HOUR, DAY)
        self._delete_oldest("period", "usage", DAY, DAY)

    def _delete_oldest(self, times: str, table: str, resolution: int, length: int) -> None:
        while self._is_full():
            sql = f"SELECT min(time) FROM {times} WHERE resolution = ?"
            oldest = self._fetch_value(sql, resolution)
            if oldest is None:
                return
            self._delete_rows(times, table, resolution, oldest + length)

    def _delete_oldest_spans(self) -> None:
        """Deletes ended spans, half of them at a time, and GPUs of which nothing is left.

        An exporter may report other conditions, or other GPUs, in every round.
        """
        while self._is_full():
            deleted = self._db.execute(_DELETE_OLDEST_SPANS).rowcount
            self._delete_unused_names()
            if deleted == 0:
                return

    def _is_full(self) -> bool:
        return bool(self._fetch_value(_USED_BYTES) > self._max_bytes)

    def _delete_excess_accounts(self) -> None:
        sql = "SELECT node, count(*) FROM account GROUP BY node"
        counts: dict[str, int] = dict(self._db.execute(sql).fetchall())
        total = sum(counts.values())
        for node, number in counts.items():
            others = (total - number) / max(1, len(counts) - 1)
            share = max(_MIN_SHARE, round(_MAX_TIMES_OTHERS * others))
            if number > share:
                _log.warning(
                    "the history is full, and %s has %d of %d accounts: its newest go",
                    node,
                    number,
                    total,
                )
                self._delete_newest_accounts(node, number - share)

    def _delete_newest_accounts(self, node: str, number: int) -> None:
        self._db.execute("CREATE TEMP TABLE excess (id INTEGER PRIMARY KEY)")
        sql = "INSERT INTO excess SELECT id FROM account WHERE node = ? ORDER BY id DESC LIMIT ?"
        self._db.execute(sql, (node, number))
        for table in ("usage", "sample", "span"):
            self._db.execute(f"DELETE FROM {table} WHERE account IN (SELECT id FROM excess)")
        self._db.execute("DELETE FROM account WHERE id IN (SELECT id FROM excess)")
        self._db.execute("DROP TABLE excess")
        self._ids.clear()
        self._read_open_spans()


def _add_up(total: dict[_UsageKey, Amounts], key: _UsageKey, amounts: Amounts) -> None:
    earlier = total.get(key)
    if earlier is not None:
        total[key] = earlier.plus(amounts)
    elif any(amounts):
        total[key] = amounts


def _find_free_name(name: str) -> str:
    """Adds a number if the name is used, so that no file is overwritten."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(free for free in names if not os.path.exists(free))


def _lock_file(path: Path) -> IO[bytes]:
    """Locks the file `PATH.lock` until the returned file is closed.

    After a crash, the kernel releases the lock.
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
