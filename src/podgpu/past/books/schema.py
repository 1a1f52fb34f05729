"""The tables of the history file, and the migration of files of older versions."""

from __future__ import annotations

import errno
import filecmp
import logging
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podgpu.charge import AMOUNTS, UsageAccount
from podgpu.past.spans import CONDITION, HOLDER, IDLE
from podgpu.past.time_steps import COARSE, DAY, HOUR

SCHEMA_VERSION = 5
# Instead of a resolution: usage of 5 minutes that is not yet added to the coarser rows, and usage
# whose time may still move, because the clock jumped.
OPEN = 1
UNSETTLED = 2
GPU_ITSELF = 0  # the `account` of rows about the GPU itself

_log = logging.getLogger(__name__)
_COPY_SUFFIX = ".schema4"
_BYTES_TO_CONVERT = 4  # per byte of the file: the copy, and the tables of both versions
ACCOUNT_COLUMNS = UsageAccount._fields  # a field has the name of its column
AMOUNT_COLUMNS = tuple(amount.column for amount in AMOUNTS)
USAGE_COLUMNS = ("resolution", "time", "account", "currency", *AMOUNT_COLUMNS)
SUMS = ", ".join(f"sum({name}) AS {name}" for name in AMOUNT_COLUMNS)
INTO_USAGE = f"INSERT INTO usage ({', '.join(USAGE_COLUMNS)})"
_USAGE_TABLE = f"""
CREATE TABLE usage (             -- usage of one account in 5 minutes, an hour or a day
    resolution INTEGER,          -- {OPEN}, {UNSETTLED}, {COARSE}, {HOUR} or {DAY}
    time INTEGER,
    account INTEGER,
    currency TEXT,               -- empty if the GPU has no price
    {", ".join(f"{name} REAL NOT NULL DEFAULT 0" for name in AMOUNT_COLUMNS)},
    PRIMARY KEY (resolution, time, account, currency)
) WITHOUT ROWID;
CREATE TABLE period (            -- times for which `usage` has rows, or had rows of hours
    resolution INTEGER, time INTEGER,
    PRIMARY KEY (resolution, time)
) WITHOUT ROWID;
CREATE TABLE kept (              -- older rows of `usage` were deleted
    resolution INTEGER PRIMARY KEY, since INTEGER
);
"""
_LOAD_TABLE = """
CREATE TABLE IF NOT EXISTS load ( -- what one account did in an hour (`load_steps.py`)
    time INTEGER,                -- start of the hour
    account INTEGER,
    busy BLOB,                   -- twelve values of 5 minutes
    memory INTEGER,              -- MiB: the largest sum over its GPUs in a round
    PRIMARY KEY (time, account)
) WITHOUT ROWID;
"""
_NOTICE_TABLE = """
CREATE TABLE IF NOT EXISTS notice ( -- what a webhook reported and has not ended
    key TEXT PRIMARY KEY,
    content BLOB                 -- JSON
) WITHOUT ROWID;
"""
_SPAN_TABLE = f"""
CREATE TABLE span (              -- the time when a GPU had a holder or a condition
    gpu INTEGER,
    account INTEGER,             -- the holder, or {GPU_ITSELF} for a condition of the GPU itself
    kind TEXT,                   -- {HOLDER}, {CONDITION}, or {IDLE} (a condition of a holder)
    name TEXT,                   -- name of the container or the condition
    message TEXT,
    started INTEGER,
    ended INTEGER                -- NULL if the span has not ended
);
CREATE INDEX span_gpu ON span (gpu);
CREATE INDEX span_account ON span (account);
"""
SCHEMA = f"""
BEGIN;
CREATE TABLE gpu (               -- a GPU, or one MIG instance of it
    id INTEGER PRIMARY KEY,
    uuid TEXT, instance TEXT,    -- instance is empty for a whole GPU
    node TEXT, gpu_index INTEGER,
    taken_from TEXT NOT NULL DEFAULT '',  -- the node that had it before and does not answer
    UNIQUE (uuid, instance)
);
CREATE TABLE account (           -- a pod or job; usage is charged to it
    id INTEGER PRIMARY KEY,
    namespace TEXT, pod TEXT,
    job TEXT, uid TEXT, container_id TEXT,  -- for workloads without a pod name
    owner_kind TEXT, owner_name TEXT,
    labels TEXT NOT NULL DEFAULT '',  -- JSON object
    methods TEXT NOT NULL DEFAULT '', -- how use was measured: words
    user TEXT NOT NULL DEFAULT '',    -- if the workload is neither a pod nor a job
    model TEXT NOT NULL DEFAULT '',   -- that its LLM engine serves
    node TEXT NOT NULL DEFAULT '',    -- whose exporter reported it first
    UNIQUE (namespace, pod, job, uid, container_id)
);
CREATE TABLE round (             -- times with samples
    resolution INTEGER, time INTEGER,
    PRIMARY KEY (resolution, time)
) WITHOUT ROWID;
CREATE TABLE sample (
    resolution INTEGER, time INTEGER, gpu INTEGER,
    account INTEGER,             -- {GPU_ITSELF} for the GPU itself; else the account's own values
                                 -- (without power and temperature), or a copy of the GPU's values
    utilization INTEGER,         -- 1/10,000
    memory INTEGER,              -- MiB
    power INTEGER,               -- 1/10 W
    temperature INTEGER,         -- degrees Celsius
    PRIMARY KEY (resolution, time, gpu, account)
) WITHOUT ROWID;
{_SPAN_TABLE}
{_USAGE_TABLE}
{_LOAD_TABLE}
{_NOTICE_TABLE}
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
# Schema 4 had integers, and a coarser row only after its hour or day had ended.
_FINER = ((HOUR, COARSE), (DAY, HOUR))
_MIGRATION = (
    f"""
ALTER TABLE account ADD COLUMN user TEXT NOT NULL DEFAULT '';
ALTER TABLE account ADD COLUMN node TEXT NOT NULL DEFAULT '';
UPDATE account SET user = substr(job, 6) WHERE job LIKE 'user %';
DROP INDEX span_gpu;
DROP INDEX span_account;
ALTER TABLE span RENAME TO old_span;
{_SPAN_TABLE}
INSERT INTO span SELECT gpu, account, iif(account = {GPU_ITSELF}, '{CONDITION}', '{HOLDER}'),
    name, message, started, ended FROM old_span WHERE name <> '{IDLE}' OR account <> {GPU_ITSELF};
INSERT INTO span SELECT old_span.gpu, holder.account, '{IDLE}', old_span.name, old_span.message,
    old_span.started, old_span.ended
FROM old_span JOIN old_span AS holder ON holder.gpu = old_span.gpu
    AND holder.account <> {GPU_ITSELF} AND holder.started <= old_span.started
    AND (holder.ended IS NULL OR holder.ended > old_span.started)
JOIN account ON account.id = holder.account
WHERE old_span.account = {GPU_ITSELF} AND old_span.name = '{IDLE}'
    AND instr(old_span.message, namespace || '/' || pod || '/' || holder.name || ' ') = 1;
DROP TABLE old_span;
ALTER TABLE usage RENAME TO old_usage;
{_USAGE_TABLE}
INSERT INTO usage (resolution, time, account, currency, allocated, idle, cost, idle_cost,
    measured, busy, busy_min, busy_max, energy, waited)
SELECT resolution, time, account, currency, allocated / 1e3, idle / 1e3, cost / 1e9,
    idle_cost / 1e9, measured / 1e3, busy / 1e3, busy_min / 1e3, busy_max / 1e3, energy / 1e3,
    waited / 1e3 FROM old_usage;
DROP TABLE old_usage;
"""
    + "".join(
        f"""
{INTO_USAGE}
SELECT {coarser}, time / {coarser} * {coarser} AS start, account, currency, {SUMS}
FROM usage WHERE resolution = {finer}
    AND start NOT IN (SELECT DISTINCT time FROM usage WHERE resolution = {coarser})
GROUP BY start, account, currency;
"""
        for coarser, finer in _FINER
    )
    + f"""
INSERT INTO period SELECT DISTINCT resolution, time FROM usage;
INSERT INTO kept SELECT resolution, min(time) FROM usage GROUP BY resolution;
PRAGMA user_version = {SCHEMA_VERSION};
"""
)


def split_account(row: Sequence[Any]) -> tuple[UsageAccount, Sequence[Any]]:
    """Splits a row that begins with ACCOUNT_COLUMNS. Returns the account and the other columns."""
    number = len(ACCOUNT_COLUMNS)
    return UsageAccount(*row[:number]), row[number:]


def fetch_value(db: sqlite3.Connection, sql: str, *parameters: float) -> Any:
    """Returns the only value of the only row. None if there is no row."""
    row = db.execute(sql, parameters).fetchone()
    if row is None:
        return None
    return row[0]


def migrate(db: sqlite3.Connection, path: Path | None) -> None:
    """Converts a file of schema 4 in one transaction. Keeps a copy, because 0.3 reads only that."""
    if path is not None:
        _copy(db, path)
    db.executescript(f"BEGIN IMMEDIATE; {_MIGRATION} COMMIT;")
    _log.warning("%s was converted to schema %d", path, SCHEMA_VERSION)


def add_columns(db: sqlite3.Connection) -> None:
    """Adds what the version that wrote the file did not know: columns and tables."""
    db.execute(_LOAD_TABLE)
    db.execute(_NOTICE_TABLE)
    for name in AMOUNT_COLUMNS:
        _add_column(db, "usage", name, "REAL NOT NULL DEFAULT 0")
    for name in ACCOUNT_COLUMNS:
        _add_column(db, "account", name, "TEXT NOT NULL DEFAULT ''")
    _add_column(db, "gpu", "taken_from", "TEXT NOT NULL DEFAULT ''")


def _add_column(db: sqlite3.Connection, table: str, column: str, definition: str) -> None:
    columns = db.execute(f"PRAGMA table_info({table})")
    names = {name for _, name, *_ in columns}
    if column not in names:
        db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {definition}")


def _copy(db: sqlite3.Connection, path: Path) -> None:
    copy = Path(f"{path}{_COPY_SUFFIX}")
    partial = Path(f"{copy}.partial")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # The conversion is tried again every minute while the disk is full. One copy is enough.
    if copy.exists() and filecmp.cmp(path, copy):
        return

    try:
        size = path.stat().st_size
        free = shutil.disk_usage(path.parent).free
        if free < _BYTES_TO_CONVERT * size:
            raise OSError(errno.ENOSPC, f"{free >> 20:,} MiB of the disk are free")

        shutil.copyfile(path, partial)
        shutil.copystat(path, partial)  # the two files are compared by their times
        partial.chmod(0o600)
        partial.rename(copy)
    except OSError as error:
        partial.unlink(missing_ok=True)
        _log.warning("%s is converted without a copy of the old file: %s", path, error)
