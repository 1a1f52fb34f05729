"""Writes the state of all GPUs to an SQLite database, in a file or in memory.

The store only adds. A round adds its charges to the open row of its 5 minutes. Every quarter of an
hour, the open rows are added to the rows of their 5 minutes, hour and day, and deleted, in one
transaction. Nothing is ever computed again from rows that may have expired, so no clock can change
what was recorded.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from podgpu.charge import UNALLOCATED, Amounts, Figures, UsageAccount
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.history_file import HistoryFile
from podgpu.past.books.load_steps import LoadSteps, PastLoad, write_past_loads, write_steps_of
from podgpu.past.books.retention import IN_MEMORY, Deletion, Retention, keep_again
from podgpu.past.books.schema import (
    ACCOUNT_COLUMNS,
    AMOUNT_COLUMNS,
    GPU_ITSELF,
    INTO_USAGE,
    OPEN,
    SUMS,
    UNSETTLED,
    USAGE_COLUMNS,
    fetch_value,
    split_account,
)
from podgpu.past.spans import CONDITION, HOLDER, IDLE
from podgpu.past.time_steps import COARSE, DAY, FINE, HOUR, floor_time

MAX_BYTES = 2 * 1024**3  # 8,000 GPUs with one pod each need 1.6 GB
MAX_NEW_ACCOUNTS = 2000  # per node and hour; further workloads of the node share one account
# Open usage is added to the coarser rows every quarter of an hour. With 8,000 GPUs, this takes
# 150 ms, so doing it every 5 minutes would cost 5 ms more per round.
_CARRY_SECONDS = 900
_LATEST = 60  # seconds; if a condition began earlier, only its message changed: the span starts now
MAX_UNWRITTEN = 200_000  # rows in memory (100 MB) while the file cannot be written


_UPSERT_GPU = """
INSERT INTO gpu (uuid, instance, node, gpu_index, taken_from) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET node = excluded.node, gpu_index = excluded.gpu_index,
    taken_from = excluded.taken_from
RETURNING id"""
_FIND_ACCOUNT = """
SELECT id FROM account
WHERE namespace = ? AND pod = ? AND job = ? AND uid = ? AND container_id = ?"""
_ACCOUNT_ROW = (*ACCOUNT_COLUMNS, "node")
_UPSERT_ACCOUNT = f"""
INSERT INTO account ({", ".join(_ACCOUNT_ROW)})
VALUES ({", ".join("?" for _ in _ACCOUNT_ROW)}) ON CONFLICT DO UPDATE SET
    owner_kind = iif(excluded.owner_name = '', owner_kind, excluded.owner_kind),
    owner_name = iif(excluded.owner_name = '', owner_name, excluded.owner_name),
    labels = iif(excluded.labels = '', labels, excluded.labels),
    model = iif(excluded.model = '', model, excluded.model),
    methods = iif(instr(methods, excluded.methods) OR length(methods) > 256, methods,
        trim(methods || ' ' || excluded.methods))
RETURNING id"""
_INSERT_ROUND = "INSERT OR IGNORE INTO round VALUES (?, ?)"
# SQLite converts the units, because that is faster than Python.
_SAMPLE_ROW = "(?, ?, ?, ?, round(? * 1e4), round(? / 1048576.0), round(? * 10), round(?))"
_USAGE_ROW = f"({', '.join('?' for _ in USAGE_COLUMNS)})"
_BLOCK = 50  # rows per statement; single rows of samples need twice the CPU time
_ADD_AMOUNTS = "ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in AMOUNT_COLUMNS
)
_CARRY_USAGE = f"""
{INTO_USAGE}
SELECT :resolution, time / :resolution * :resolution AS start, account, currency, {SUMS}
FROM usage WHERE resolution = {OPEN} AND time <> :current
GROUP BY start, account, currency {_ADD_AMOUNTS}"""
_CARRY_PERIODS = f"""
INSERT OR IGNORE INTO period SELECT DISTINCT :resolution, time / :resolution * :resolution
FROM usage WHERE resolution = {OPEN} AND time <> :current"""
_SETTLE_USAGE = f"""
{INTO_USAGE}
SELECT {OPEN}, (time + ?) / {COARSE} * {COARSE} AS start, account, currency, {SUMS}
FROM usage WHERE resolution = {UNSETTLED}
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
# Hours that were deleted are in the rows of days.
_ALL_USAGE = f"""
SELECT resolution, time, currency, node, {", ".join(ACCOUNT_COLUMNS + AMOUNT_COLUMNS)}
FROM usage JOIN account ON account.id = account
WHERE resolution IN ({OPEN}, {UNSETTLED}) OR resolution = iif(
    time < ifnull((SELECT since FROM kept WHERE resolution = {HOUR}), 0), {DAY}, {HOUR})"""


# Plain tuples: with 8,000 GPUs, named ones cost 40 ms per round.
_Span = tuple[int, int, str, str, str]  # GPU, account, kind, name and message of an open span
# OPEN or UNSETTLED, start of the 5 minutes, account, currency, node.
_UsageKey = tuple[int, int, UsageAccount, str, str]
_Usage = dict[_UsageKey, Amounts]


class _PeriodUsage(NamedTuple):
    """Usage, with the period in which the amounts were used."""

    key: _UsageKey
    amounts: Amounts
    start: int
    end: int

    def amounts_after(self, time: int) -> Amounts:
        if time <= self.start:
            return self.amounts
        if time >= self.end:
            return Amounts()
        part = (self.end - time) / (self.end - self.start)
        return Amounts(*(amount * part for amount in self.amounts))


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


class HistoryStore(HistoryFile):
    """Writes history to a file, or to memory if `path` is None. No other process may write to it.

    Call the methods that write from one thread. The other methods, and `write_notices`, may be
    called from any thread.
    """

    _step: int  # start of the 5 minutes of the last round

    def __init__(
        self,
        path: Path | None = None,
        max_bytes: int = MAX_BYTES,
        max_unwritten: int = MAX_UNWRITTEN,
    ) -> None:
        """Opens or creates the file. A damaged file is renamed to `*.damaged`."""
        super().__init__(path)
        self._max_bytes = max_bytes
        self._max_unwritten = max_unwritten
        self._retention = Retention() if path else IN_MEMORY
        self._unsettled_since = math.inf  # Unix time of the first round that is not settled
        # Usage that is not written yet, also because writing failed.
        self._unwritten: _Usage = {}
        self._unwritten_lock = threading.Lock()
        self._loads = LoadSteps()
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
            # A time that may still move is unknown in savings.
            if is_settled:
                self._loads.add(start, gpus)

    def append_loads(self, loads: Sequence[PastLoad]) -> None:
        with self._transaction():
            write_past_loads(self._db, loads, self._find_account)

    def _add_unwritten(self, usage: Iterable[tuple[_UsageKey, Amounts]]) -> None:
        with self._unwritten_lock:
            for key, amounts in usage:
                _add_up(self._unwritten, key, amounts)

    @contextmanager
    def _take_unwritten(self) -> Iterator[_Usage]:
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

            shorter: _Usage = {}
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
        if not is_settled:
            self._unsettled_since = min(self._unsettled_since, floor_time(now, FINE))

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
        settled: _Usage = {}
        with self._unwritten_lock:
            for (kind, start, account, currency, node), amounts in self._unwritten.items():
                if kind == UNSETTLED:
                    start = floor_time(start + shift, COARSE)
                _add_up(settled, (OPEN, start, account, currency, node), amounts)
            self._unwritten = settled

    def settle(self, shift: float, now: float) -> None:
        """Moves unsettled usage in the file by `shift` seconds.

        Samples and spans since the clock jumped are moved, too.
        """
        with self._transaction():
            self._db.execute(_SETTLE_USAGE, (round(shift),))
            self._db.execute(f"DELETE FROM usage WHERE resolution = {UNSETTLED}")
            if shift:
                self._correct_times(shift, now)
            self.last_round = self._fetch_last_round()
        self._unsettled_since = math.inf

    def _correct_times(self, shift: float, now: float) -> None:
        """Moves samples and spans since the clock jumped. Deletes earlier samples in the future."""
        samples_shift = floor_time(shift, FINE)
        for table in ("round", "sample"):
            self._move_samples(table, samples_shift, now)

        # Of the spans, times in the future are wrong, too.
        for column in ("started", "ended"):
            sql = f"UPDATE span SET {column} = {column} + ? WHERE {column} > ? OR {column} >= ?"
            self._db.execute(sql, (round(shift), now, self._unsettled_since))

        moved_to = self._unsettled_since + shift
        keep_again(self._db, min(now, moved_to))

    def _move_samples(self, table: str, shift: int, now: float) -> None:
        # Times are negative at first, so that no row meets one that has not been moved yet.
        sql = f"UPDATE {table} SET time = -time - ? WHERE resolution = {FINE} AND time >= ?"
        self._db.execute(sql, (shift, self._unsettled_since))
        for resolution in (FINE, COARSE):
            sql = f"DELETE FROM {table} WHERE resolution = {resolution} AND time > ?"
            self._db.execute(sql, (now,))

        self._db.execute(
            f"UPDATE OR REPLACE {table} SET time = -time WHERE resolution = {FINE} AND time < 0"
        )

    def take_over(self, other: HistoryStore) -> None:
        """Adds the usage of another store, which is then closed.

        Used if history was kept in memory, because the file could not be opened.
        """
        # If another process has written to the file meanwhile, it has the time until then already.
        recorded_until = self.last_round + FINE
        # A file of the future was written with another clock, so its time is not comparable.
        if recorded_until > other.last_round + FINE + COARSE:
            recorded_until = 0

        periods = other._read_written() + other._list_unwritten()
        self._add_unwritten((usage.key, usage.amounts_after(recorded_until)) for usage in periods)
        self.write_notices(other.read_notices())
        other.close()

    def _read_written(self) -> list[_PeriodUsage]:
        with self.reader() as db:
            since = fetch_value(db, "SELECT ifnull(min(time), 0) FROM round")
            rows = db.execute(_ALL_USAGE).fetchall()

        until = self.last_round + FINE
        # Rows of hours and days end where the open rows begin.
        open_starts = [start for resolution, start, *_ in rows if resolution == OPEN]
        open_since = min(open_starts, default=until)
        periods = []
        for resolution, start, currency, node, *row in rows:
            kind = UNSETTLED if resolution == UNSETTLED else OPEN
            account, amounts = split_account(row)
            key = kind, start, account, currency, node
            end = min(until, start + COARSE)
            if resolution in (HOUR, DAY):
                end = min(open_since, start + resolution)
            periods.append(_PeriodUsage(key, Amounts(*amounts), max(since, start), end))

        return periods

    def _list_unwritten(self) -> list[_PeriodUsage]:
        until = self.last_round + FINE
        periods = []
        with self._unwritten_lock:
            for key, amounts in self._unwritten.items():
                start = key[1]
                periods.append(_PeriodUsage(key, amounts, max(until, start), start + COARSE))

        return periods

    def read_notices(self) -> dict[str, bytes]:
        with self.reader() as db:
            return dict(db.execute("SELECT key, content FROM notice"))

    def write_notices(self, changes: Mapping[str, bytes | None]) -> None:
        """Stores what a webhook reported. None deletes an entry."""
        deleted = []
        changed = []
        for key, content in changes.items():
            if content is None:
                deleted.append((key,))
            else:
                changed.append((key, content))

        with self._transaction():
            self._db.executemany("DELETE FROM notice WHERE key = ?", deleted)
            self._db.executemany("INSERT OR REPLACE INTO notice VALUES (?, ?)", changed)

    def _reset_caches(self) -> None:
        """Clears what may differ from the file, and reads the open spans of the file."""
        self._ids: dict[tuple[object, ...], int] = {}
        self._ids_hour = -1
        self._step = -1
        self._new_accounts: Counter[str] = Counter()  # by node, in this hour
        self.last_round = self._fetch_last_round()  # Unix time of the newest round, or 0
        self._read_open_spans()

    def _fetch_last_round(self) -> int:
        newest = "SELECT ifnull(max(time), 0) FROM round WHERE resolution = ?"
        return int(fetch_value(self._db, newest, FINE))

    def _read_open_spans(self) -> None:
        spans = "SELECT gpu, account, kind, name, message FROM span WHERE ended IS NULL"
        self._open_spans: Set[_Span] = set(self._db.execute(spans))

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
        self._insert_rows("INSERT OR REPLACE INTO sample", _SAMPLE_ROW, chain(samples, own))
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
            # Nobody holds it.
            if charge.account == UNALLOCATED:
                continue
            account_id = self._find_account(charge.account, gpu.node)
            rows.spans[gpu_id, account_id, HOLDER, charge.container, ""] = rows.time
            if charge.figures is not None:
                key = gpu_id, account_id
                figures = rows.own.get(key, Figures())
                rows.own[key] = figures.plus(charge.figures)

        for condition in gpu.conditions:
            account_id = GPU_ITSELF
            kind = CONDITION
            if condition.account is not None:
                account_id = self._find_account(condition.account, gpu.node)
                kind = IDLE

            span = (gpu_id, account_id, kind, condition.name, condition.message)
            rows.spans[span] = rows.time
            since = condition.since
            # A time in the future is that of a wrong clock.
            if since is not None and self.last_round - _LATEST < since <= now + 1:
                rows.spans[span] = round(since)

    def _find_gpu(self, gpu: GpuSample) -> int:
        key = (gpu.uuid, gpu.instance, gpu.node, gpu.gpu_index, gpu.taken_from)
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

        if self._db.execute(_FIND_ACCOUNT, account.key).fetchone() is None:
            if self._new_accounts[node] >= MAX_NEW_ACCOUNTS:
                account = UsageAccount(job=f"more workloads of node {node}")
            self._new_accounts[node] += 1

        row = (*account, node)
        row_id: int = self._db.execute(_UPSERT_ACCOUNT, row).fetchone()[0]
        self._ids[account] = row_id
        return row_id

    def _insert_rows(
        self, into: str, row: str, rows: Iterable[tuple[object, ...]], on_conflict: str = ""
    ) -> None:
        """Inserts blocks of rows. `row`: the values of one row in SQL."""
        remaining = iter(rows)
        while block := list(islice(remaining, _BLOCK)):
            values = ", ".join([row] * len(block))
            sql = f"{into} VALUES {values} {on_conflict}"
            self._db.execute(sql, list(chain.from_iterable(block)))

    def _update_spans(self, rows: _Round) -> None:
        new = []
        for span, began in rows.spans.items():
            if span not in self._open_spans:
                new.append((*span, began))

        self._db.executemany(_START_SPAN, new)

        ended = rows.time
        if rows.time - self.last_round > COARSE:
            # podgpu did not run for some time, so holders and conditions are recorded as ended at
            # the last round before.
            ended = self.last_round + FINE

        ended_spans = self._open_spans - rows.spans.keys()
        self._db.executemany(_END_SPAN, [(ended, *span) for span in ended_spans])

        self._open_spans = rows.spans.keys()
        self.last_round = rows.time

    # Usage

    def _write_usage(self, usage: _Usage) -> None:
        rows = []
        for (kind, start, account, currency, node), amounts in usage.items():
            account_id = self._find_account(account, node)
            rows.append((kind, start, account_id, currency, *amounts))
        self._insert_rows(INTO_USAGE, _USAGE_ROW, rows, _ADD_AMOUNTS)

    def _close_step(self, now: float) -> None:
        """Completes the 5 minutes before the current ones."""
        self._make_means(self._step)
        with self._unwritten_lock:
            loads = self._loads.take(self._step)
        write_steps_of(self._db, loads, self._find_account)
        if self._step % _CARRY_SECONDS == 0:
            self._carry_usage()
            self._delete(now)

    def _carry_usage(self) -> None:
        """Adds open usage to the coarser rows, except that of the current 5 minutes."""
        for resolution in (COARSE, HOUR, DAY):
            parameters = {"resolution": resolution, "current": self._step}
            self._db.execute(_CARRY_USAGE, parameters)
            self._db.execute(_CARRY_PERIODS, parameters)
        sql = f"DELETE FROM usage WHERE resolution = {OPEN} AND time <> ?"
        self._db.execute(sql, (self._step,))

    def _delete(self, now: float) -> None:
        deletion = Deletion(self._db)
        deletion.expire(self._retention, now)
        deletion.enforce_size_limit(self._max_bytes)
        if deletion.names_deleted:
            self._ids.clear()
            self._read_open_spans()

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


def _add_up(total: _Usage, key: _UsageKey, amounts: Amounts) -> None:
    earlier = total.get(key)
    if earlier is not None:
        total[key] = earlier.plus(amounts)
    elif any(amounts):
        total[key] = amounts
