"""Deletes old rows of the history, and rows beyond the size limit."""

from __future__ import annotations

import logging
import sqlite3
from typing import NamedTuple

from podgpu.past.books.schema import fetch_value
from podgpu.past.time_steps import COARSE, DAY, FINE, HOUR, ceil_time, floor_time

_MIN_SHARE = 1000  # accounts that a node may have in a full file
_MAX_TIMES_OTHERS = 10  # a node may have this many times the accounts of the others' mean
_TIMES_OF = {"sample": "round", "usage": "period"}  # the table that lists the times of the rows
_COARSER = {COARSE: HOUR, HOUR: DAY}
# The time of the oldest of the newest rows that are not in the future.
_OLDEST_KEPT = """
SELECT time FROM {table} WHERE resolution = ? AND time <= ? ORDER BY time DESC
LIMIT 1 OFFSET ?"""
_KEEP_SINCE = """
INSERT INTO kept VALUES (?, ?) ON CONFLICT DO UPDATE SET since = max(since, excluded.since)"""
_DELETE_OLDEST_SPANS = """
DELETE FROM span WHERE ended <= (
    SELECT ended FROM span WHERE ended IS NOT NULL ORDER BY ended
    LIMIT 1 OFFSET (SELECT count(ended) / 2 FROM span))"""
_USED_BYTES = """
SELECT (page_count - freelist_count) * page_size
FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""

_log = logging.getLogger(__name__)


class Retention(NamedTuple):
    """How long the rows of each resolution are kept: for this much recorded time, in seconds.

    Time is counted in recorded rounds, hours and days, so a wrong clock deletes nothing.
    """

    fine: int = 2 * HOUR
    coarse: int = 8 * DAY
    usage_per_step: int = 25 * HOUR  # the default range, 24 h, is exact to 5 minutes
    usage_per_hour: int = 8 * DAY
    usage: int = 90 * DAY
    load: int = 8 * DAY


IN_MEMORY = Retention(
    fine=HOUR + COARSE,
    coarse=DAY + HOUR,
    usage_per_step=3 * HOUR,
    usage_per_hour=DAY + HOUR,
)


def keep_again(db: sqlite3.Connection, since: float) -> None:
    """After the clock was set back, says that rows are kept again from the time `since` on.

    While the clock was ahead, rows were deleted up to a time that is still to come.
    """
    sql = "UPDATE kept SET since = min(since, ?) WHERE resolution = ?"
    db.execute(sql, (floor_time(since, COARSE), COARSE))
    db.execute(sql, (ceil_time(since, DAY), HOUR))


class Deletion:
    """Deletes rows in the transaction of the store.

    `names_deleted` is True if GPUs or accounts were deleted, so that known ids may be wrong.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.names_deleted = False

    def expire(self, keep: Retention, now: float) -> None:
        """Deletes rows that are old by recorded time."""
        self._expire_rows("sample", FINE, keep.fine, now)
        self._expire_rows("sample", COARSE, keep.coarse, now)
        self._expire_rows("usage", COARSE, keep.usage_per_step, now)
        self._expire_rows("usage", HOUR, keep.usage_per_hour, now)
        is_day_over = self._expire_rows("usage", DAY, keep.usage, now)

        oldest_round = fetch_value(self._db, "SELECT min(time) FROM round")
        self._db.execute("DELETE FROM span WHERE ended < ?", (oldest_round,))

        most_hours = keep.load // HOUR
        sql = _OLDEST_KEPT.format(table="period")
        load_since = fetch_value(self._db, sql, HOUR, round(now), most_hours - 1)
        self._db.execute("DELETE FROM load WHERE time < ?", (load_since,))

        if is_day_over:
            self._delete_unused_names()

    def enforce_size_limit(self, max_bytes: int) -> None:
        """While the data exceeds the limit, deletes rows.

        First what one exporter created beyond its share, then the oldest hours of samples and
        loads, then the oldest spans, and only then the oldest days of usage.
        """
        if not self._exceeds(max_bytes):
            return

        self._delete_excess_accounts()
        self._delete_oldest("sample", COARSE, HOUR, max_bytes)
        self._delete_oldest("sample", FINE, HOUR, max_bytes)
        self._delete_oldest_loads(max_bytes)
        self._delete_oldest_spans(max_bytes)
        self._delete_oldest("usage", HOUR, DAY, max_bytes)
        self._delete_oldest("usage", DAY, DAY, max_bytes)

    def _expire_rows(self, table: str, resolution: int, seconds: int, now: float) -> bool:
        """Deletes the oldest rows, but at most those of one day, because that takes time.

        Returns whether there were any.
        """
        most_times = seconds // resolution
        sql = _OLDEST_KEPT.format(table=_TIMES_OF[table])
        keep_since = fetch_value(self._db, sql, resolution, round(now), most_times - 1)
        oldest = self._fetch_oldest(table, resolution)
        if keep_since is None or oldest is None or oldest >= keep_since:
            return False

        until = min(keep_since, oldest + DAY)
        self._delete_rows(table, resolution, until)
        return True

    def _delete_rows(self, table: str, resolution: int, until: int) -> None:
        """Deletes the rows before `until`, and the list of their times."""
        if table == "usage":
            # The rows of an hour, or of a day, are deleted together.
            until = floor_time(until, _COARSER.get(resolution, resolution))
            self._db.execute(_KEEP_SINCE, (resolution, until))

        times = _TIMES_OF[table]
        deleted = [(table, resolution), (times, resolution)]
        # Times of hours are kept as long as their days: they say which days are complete.
        if (table, resolution) == ("usage", HOUR):
            deleted = [(table, HOUR)]
        elif (table, resolution) == ("usage", DAY):
            deleted.append((times, HOUR))

        for name, row_resolution in deleted:
            sql = f"DELETE FROM {name} WHERE resolution = ? AND time < ?"
            self._db.execute(sql, (row_resolution, until))

    def _delete_oldest(self, table: str, resolution: int, length: int, max_bytes: int) -> None:
        while self._exceeds(max_bytes):
            oldest = self._fetch_oldest(table, resolution)
            if oldest is None:
                return
            self._delete_rows(table, resolution, oldest + length)

    def _delete_oldest_loads(self, max_bytes: int) -> None:
        while self._exceeds(max_bytes):
            sql = "DELETE FROM load WHERE time = (SELECT min(time) FROM load)"
            if self._db.execute(sql).rowcount == 0:
                return

    def _delete_oldest_spans(self, max_bytes: int) -> None:
        """Deletes ended spans, half of them at a time, and GPUs of which nothing is left.

        An exporter may report other conditions, or other GPUs, in every round.
        """
        while self._exceeds(max_bytes):
            deleted = self._db.execute(_DELETE_OLDEST_SPANS).rowcount
            self._delete_unused_names()
            if deleted == 0:
                return

    def _delete_unused_names(self) -> None:
        self._db.execute("""
            DELETE FROM account WHERE id NOT IN (SELECT account FROM usage)
            AND id NOT IN (SELECT account FROM span)""")
        self._db.execute("""
            DELETE FROM gpu WHERE id NOT IN (SELECT gpu FROM span)
            AND id NOT IN (SELECT gpu FROM sample)""")
        self.names_deleted = True

    def _delete_excess_accounts(self) -> None:
        sql = "SELECT node, count(*) FROM account GROUP BY node"
        counts: dict[str, int] = dict(self._db.execute(sql).fetchall())
        total = sum(counts.values())
        other_nodes = max(1, len(counts) - 1)
        for node, number in counts.items():
            mean_of_others = (total - number) / other_nodes
            share = max(_MIN_SHARE, round(_MAX_TIMES_OTHERS * mean_of_others))
            if number > share:
                _log.warning(
                    "the history is full, and %s has %d of %d accounts: its newest go",
                    node,
                    number,
                    total,
                )
                self._delete_newest_accounts(node, number - share)

    def _delete_newest_accounts(self, node: str, number: int) -> None:
        """Deletes the newest, because a node with too many accounts probably makes up names."""
        self._db.execute("CREATE TEMP TABLE excess (id INTEGER PRIMARY KEY)")
        sql = "INSERT INTO excess SELECT id FROM account WHERE node = ? ORDER BY id DESC LIMIT ?"
        self._db.execute(sql, (node, number))
        for table in ("usage", "sample", "span", "load"):
            self._db.execute(f"DELETE FROM {table} WHERE account IN (SELECT id FROM excess)")

        self._db.execute("DELETE FROM account WHERE id IN (SELECT id FROM excess)")
        self._db.execute("DROP TABLE excess")
        self.names_deleted = True

    def _exceeds(self, max_bytes: int) -> bool:
        return bool(fetch_value(self._db, _USED_BYTES) > max_bytes)

    def _fetch_oldest(self, table: str, resolution: int) -> int | None:
        # The times of hours are kept longer than their usage.
        times = "usage" if table == "usage" else "round"
        sql = f"SELECT min(time) FROM {times} WHERE resolution = ?"
        oldest: int | None = fetch_value(self._db, sql, resolution)
        return oldest
