"""Reads the charges of a period from SQLite. The only reader of the table `usage` for answers.

Whole days are read from daily rows, other whole hours from hourly rows, and the remainder from
5-minute rows. So all answers about the same period have the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from sqlite3 import Connection
from typing import NamedTuple

from podgpu.charge import Amounts, Charge, UsageAccount
from podgpu.model import PodName
from podgpu.past.bills.bill import StepCharge
from podgpu.past.books.schema import (
    ACCOUNT_COLUMNS,
    AMOUNT_COLUMNS,
    OPEN,
    SUMS,
    UNSETTLED,
    split_account,
)
from podgpu.past.spans import Interval
from podgpu.past.time_steps import COARSE, DAY, HOUR, ceil_time, floor_time

# Sums each window by itself, and joins the sums: both save a quarter of the time.
_WINDOW = f"""
SELECT {{step}} AS start, account, currency, {SUMS}, ? AS part FROM usage
WHERE resolution = ? AND time >= ? AND time < ? GROUP BY {{by}}account, currency"""
_SUMS_OF_PARTS = ", ".join(f"sum({name} * part) AS {name}" for name in AMOUNT_COLUMNS)
_ACCOUNTS = f"""
SELECT start, account AS id, currency, {_SUMS_OF_PARTS} FROM ({{windows}})
GROUP BY {{by}}account, currency"""
_CHARGES = f"""
SELECT start, {{fields}}, currency, {SUMS} FROM account JOIN ({_ACCOUNTS}) USING (id)
GROUP BY {{positions}} ORDER BY {{positions}}"""
# Much faster if many accounts have one row: few sums are sorted and joined.
_ROWS_OF_WINDOW = f"""
SELECT {{step}} AS start, {{fields}}, currency, {SUMS}, ? AS part
FROM usage JOIN account ON account.id = usage.account
WHERE resolution = ? AND time >= ? AND time < ? GROUP BY {{by}}{{keys}}, currency"""
_CHARGES_OF_ROWS = f"""
SELECT start, {", ".join(ACCOUNT_COLUMNS)}, currency, {_SUMS_OF_PARTS} FROM ({{windows}})
GROUP BY {{positions}} ORDER BY {{positions}}"""
_ENGINES = f"""
SELECT DISTINCT account FROM usage
WHERE resolution IN ({OPEN}, {UNSETTLED}, {DAY}) AND token_seconds > 0"""
_ACCOUNT = f"""
SELECT {", ".join(ACCOUNT_COLUMNS)} FROM account
WHERE namespace = ? AND pod = ? AND job = ? AND uid = ? AND container_id = ?"""
# A pod whose tokens were read in a part of the 5 minutes only says nothing about its tokens.
_TOKEN_STEPS = f"""
SELECT time / {COARSE} AS step, {", ".join(ACCOUNT_COLUMNS)}, {SUMS}
FROM usage JOIN account ON account.id = usage.account
WHERE resolution IN ({OPEN}, {COARSE}) AND time >= ? AND time < ? {{only}}
GROUP BY step, usage.account HAVING sum(token_seconds) >= 0.95 * sum(allocated)"""
_USAGE_START = f"""
SELECT (SELECT min(time) FROM usage WHERE resolution = {DAY}), (SELECT min(time) FROM round)"""


class Grouping(NamedTuple):
    """Which accounts the database adds up."""

    condition: str = "FALSE"  # SQL; true for accounts that are added up
    kept: frozenset[str] = frozenset()  # fields that must be equal; the others become empty

    @property
    def fields(self) -> str:
        columns = []
        for name in ACCOUNT_COLUMNS:
            if name in self.kept:
                columns.append(name)
            else:
                columns.append(f"iif({self.condition}, '', {name}) AS {name}")
        return ", ".join(columns)

    @property
    def keys(self) -> str:
        """SQL of the columns to group by. Few, because each makes sorting slower."""
        account = f"iif({self.condition}, 0, account.id)"
        return ", ".join([*sorted(self.kept), account])


SINGLE = Grouping()  # each account by itself


class _Window(NamedTuple):
    """Rows of one resolution."""

    part: float  # fraction of the usage that counts
    resolution: int
    start: int
    end: int


def read_range(db: Connection, start: float, end: float) -> list[Charge]:
    """Returns the charges of all stored steps (5 minutes, hours or days) that are in the period.

    Steps that are only partly in the period count as a whole.
    """
    windows = _list_windows(db, Interval(start, end), DAY)
    return [charge for _, charge in _read_windows(db, windows)]


def read_charges(
    db: Connection, start: float, end: float, now: float, grouping: Grouping = SINGLE
) -> list[Charge]:
    """Returns the charges from `start` to `end`.

    A stored step that is only partly in the period is split in proportion to the time. So a
    constant load has the same sum at any time, and periods that meet share no usage.
    """
    windows = _split_windows(db, Interval(start, end), now, DAY)
    return [charge for _, charge in _read_windows(db, windows, grouping=grouping)]


def read_accounts(db: Connection, keys: Iterable[tuple[str, ...]]) -> list[UsageAccount]:
    """Returns the stored accounts with these keys (`UsageAccount.key`)."""
    accounts = []
    for key in keys:
        row = db.execute(_ACCOUNT, key).fetchone()
        if row is not None:
            accounts.append(UsageAccount(*row))
    return accounts


def read_engines(db: Connection) -> list[int]:
    """Returns the ids of the accounts whose tokens were read."""
    return [account for (account,) in db.execute(_ENGINES)]


def read_token_steps(
    db: Connection, start: float, end: float, pod: PodName | None = None
) -> list[StepCharge]:
    """Returns the number of each 5 minutes, and the charges of the pods whose tokens were read."""
    sql = _TOKEN_STEPS.format(only="")
    parameters: list[object] = [ceil_time(start, COARSE), end]
    if pod is not None:
        sql = _TOKEN_STEPS.format(only="AND namespace = ? AND pod = ?")
        parameters += pod

    steps = []
    for step, *row in db.execute(sql, parameters):
        account, amounts = split_account(row)
        charge = Charge(account, amounts=Amounts(*amounts))
        steps.append(StepCharge(step, charge))

    return steps


def read_steps(
    db: Connection, start: int, end: float, now: float, step: int, grouping: Grouping
) -> dict[int, list[Charge]]:
    """Returns the charges by hour or UTC day. They add up to those of the period.

    Hours must be kept from `start` on.
    """
    windows = _split_windows(db, Interval(start, end), now, step)
    step_sql = f"time / {step} * {step}"
    steps: dict[int, list[Charge]] = {}
    for step_start, charge in _read_windows(db, windows, step_sql, grouping):
        steps.setdefault(step_start, []).append(charge)
    return steps


def read_usage_start(db: Connection) -> int | None:
    """Returns the start of the oldest stored usage as Unix time, or None if there is no usage."""
    first_day, first_round = db.execute(_USAGE_START).fetchone()
    start: int | None = first_day
    # A round of the first day tells the start more exactly.
    if first_round is not None and (first_day is None or first_round < first_day + DAY):
        start = first_round
    return start


def _read_windows(
    db: Connection, windows: Sequence[_Window], step: str = "NULL", grouping: Grouping = SINGLE
) -> Iterable[StepCharge]:
    """Adds up each account by step. `step`: its start as SQL, or NULL for one sum of all steps."""
    sql = _write_sum(len(windows), step, grouping)
    parameters = list(chain.from_iterable(windows))
    for step_start, *row in db.execute(sql, parameters):
        account, (currency, *amounts) = split_account(row)
        charge = Charge(account, amounts=Amounts(*amounts), currency=currency)
        yield StepCharge(step_start, charge)


def _write_sum(number_of_windows: int, step: str, grouping: Grouping) -> str:
    """Returns SQL whose parameters are the windows. `step`: see `_read_windows`."""
    window = _WINDOW
    charges = _CHARGES
    if grouping != SINGLE:
        window = _ROWS_OF_WINDOW
        charges = _CHARGES_OF_ROWS

    # SQLite also groups and sorts by the positions of columns: here start, account and currency.
    positions = range(1, len(ACCOUNT_COLUMNS) + 3)
    parts = {
        # To group by a constant, too, takes 10 % more time.
        "by": "" if step == "NULL" else "start, ",
        "fields": grouping.fields,
        "keys": grouping.keys,
        "positions": ", ".join(map(str, positions)),
    }
    sums = [window.format(step=step, **parts)] * number_of_windows
    return charges.format(windows=" UNION ALL ".join(sums), **parts)


def _list_windows(db: Connection, period: Interval, coarsest: int) -> list[_Window]:
    """Returns the rows to add up. The period is extended to whole stored steps.

    `coarsest`: the coarsest rows to read, HOUR or DAY.
    """
    kept_since = dict(db.execute("SELECT resolution, since FROM kept").fetchall())
    first_resolution = _find_resolution(period.start, kept_since)
    first = floor_time(period.start, first_resolution)
    # The last hour is read from 5-minute rows only if they are kept from its start on.
    last_hour_start = max(first, floor_time(period.end, HOUR))
    last_resolution = _find_resolution(last_hour_start, kept_since)
    last = ceil_time(period.end, last_resolution)

    first_hour = min(ceil_time(first, HOUR), last)
    last_hour = max(floor_time(last, HOUR), first_hour)
    first_day = last_hour
    if coarsest == DAY:
        first_day = min(ceil_time(first_hour, DAY), last_hour)

    last_day = max(floor_time(last_hour, DAY), first_day)

    return [
        # Open and unsettled rows are not included in coarser rows yet.
        _Window(1.0, OPEN, first, last),
        _Window(1.0, UNSETTLED, first, last),
        _Window(1.0, COARSE, first, first_hour),
        _Window(1.0, HOUR, first_hour, first_day),
        _Window(1.0, DAY, first_day, last_day),
        _Window(1.0, HOUR, last_day, last_hour),
        _Window(1.0, COARSE, last_hour, last),
    ]


def _find_resolution(time: float, kept_since: Mapping[int, int]) -> int:
    """Returns the finest resolution of which the rows of this time are kept."""
    for resolution in (COARSE, HOUR):
        if time >= kept_since.get(resolution, -math.inf):
            return resolution
    return DAY


def _split_windows(db: Connection, period: Interval, now: float, coarsest: int) -> list[_Window]:
    """Returns the rows to add up. At the start and the end, only parts of their usage count."""
    since = read_usage_start(db)
    recorded = Interval(period.start if since is None else since, now)
    parts: list[_Window] = []
    for window in _list_windows(db, period, coarsest):
        parts.extend(_split_window(window, period, recorded))
    return parts


def _split_window(window: _Window, period: Interval, recorded: Interval) -> Iterable[_Window]:
    """Separates the steps in which the period starts and ends."""
    length = max(COARSE, window.resolution)  # open and unsettled rows are of 5 minutes
    first_step = floor_time(period.start, length)
    last_step = floor_time(period.end, length)
    whole_from = max(window.start, first_step)
    whole_until = min(window.end, ceil_time(period.end, length))
    for step in sorted({first_step, last_step}):
        if not whole_from <= step < whole_until:
            continue

        yield window._replace(start=whole_from, end=step)

        whole_from = step + length
        part = _find_part(Interval(step, whole_from), period, recorded)
        yield window._replace(part=part, start=step, end=whole_from)

    yield window._replace(start=whole_from, end=whole_until)


def _find_part(step: Interval, period: Interval, recorded: Interval) -> float:
    """Returns which fraction of the recorded time of a step is in the period."""
    recorded_from = max(step.start, recorded.start)
    if recorded.start == step.start:
        # The rounds of the oldest day are deleted. Its record may have begun at any time of the
        # day, so all of its usage counts.
        recorded_from = max(step.start, period.start)

    recorded_until = min(step.end, recorded.end)
    recorded_seconds = recorded_until - recorded_from
    # Usage may be stored for a time without a record, if the clock was corrected.
    if recorded_seconds <= 0:
        return 1.0

    counted_seconds = min(period.end, recorded_until) - max(period.start, recorded_from)
    return max(0.0, counted_seconds / recorded_seconds)
