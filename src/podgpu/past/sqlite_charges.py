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
from podgpu.past.schema import (
    ACCOUNT_COLUMNS,
    AMOUNT_COLUMNS,
    COARSE,
    DAY,
    HOUR,
    OPEN,
    SUMS,
    UNSETTLED,
    ceil_time,
    floor_time,
    split_account,
)

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
GROUP BY {{names}} ORDER BY {{names}}"""
# Much faster if many accounts have one row: few sums are sorted and joined.
_ROWS_OF_WINDOW = f"""
SELECT {{step}} AS start, {{fields}}, currency, {SUMS}, ? AS part
FROM usage JOIN account ON account.id = usage.account
WHERE resolution = ? AND time >= ? AND time < ? GROUP BY {{by}}{{keys}}, currency"""
_CHARGES_OF_ROWS = f"""
SELECT start, {", ".join(ACCOUNT_COLUMNS)}, currency, {_SUMS_OF_PARTS} FROM ({{windows}})
GROUP BY {{names}} ORDER BY {{names}}"""
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


StepCharge = tuple[int, Charge]
"""With the number or the start of a step."""


class Grouping(NamedTuple):
    """Which accounts the database adds up."""

    condition: str = "FALSE"  # SQL; True for accounts that are added up
    kept: frozenset[str] = frozenset()  # fields that must be equal; the others become empty

    @property
    def fields(self) -> str:
        columns = []
        for name in ACCOUNT_COLUMNS:
            is_kept = name in self.kept
            if is_kept:
                columns.append(name)
            else:
                columns.append(f"iif({self.condition}, '', {name}) AS {name}")
        return ", ".join(columns)

    @property
    def keys(self) -> str:
        """Few, because each makes sorting slower. The id stands for all fields."""
        account = f"iif({self.condition}, 0, account.id)"
        return ", ".join([*sorted(self.kept), account])


SINGLE = Grouping()  # each account by itself


class _Window(NamedTuple):
    """Rows of one resolution."""

    part: float  # how much of the usage counts
    resolution: int
    start: int
    end: int


def read_range(db: Connection, start: float, end: float) -> tuple[int, int, list[Charge]]:
    """Returns start, end and charges.

    Start and end are extended to whole stored steps: 5 minutes, hours or days.
    """
    first, last, windows = _list_windows(db, start, end, DAY)
    charges = [charge for _, charge in _read_windows(db, windows)]
    return first, last, charges


def read_charges(
    db: Connection, start: float, end: float, now: float, grouping: Grouping = SINGLE
) -> list[Charge]:
    """Returns the charges from `start` to `end`.

    A stored step that is only partly in the period is split in proportion to the time. So a
    constant load has the same sum at any time, and periods that meet share no usage.
    """
    windows = _split_windows(db, start, end, now, DAY)
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
        steps.append((step, Charge(account, amounts=Amounts(*amounts))))

    return steps


def read_steps(
    db: Connection, start: int, end: float, now: float, step: int, grouping: Grouping
) -> dict[int, list[Charge]]:
    """Returns the charges by hour or UTC day. They add up to those of the period.

    Hours must be kept from `start` on.
    """
    windows = _split_windows(db, start, end, now, step)
    step_start = f"time / {step} * {step}"
    steps: dict[int, list[Charge]] = {}
    for time, charge in _read_windows(db, windows, step_start, grouping):
        steps.setdefault(time, []).append(charge)
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
    """Yields the start of the step and a charge. `step`: the start as SQL, or NULL."""
    sql = _write_sum(len(windows), step, grouping)
    parameters = list(chain.from_iterable(windows))
    for time, *row in db.execute(sql, parameters):
        account, (currency, *amounts) = split_account(row)
        yield time, Charge(account, amounts=Amounts(*amounts), currency=currency)


def _write_sum(windows: int, step: str, grouping: Grouping) -> str:
    """`windows`: how many. `step`: see `_read_windows`."""
    window = _WINDOW
    charges = _CHARGES
    if grouping != SINGLE:
        window = _ROWS_OF_WINDOW
        charges = _CHARGES_OF_ROWS

    numbers = range(1, len(ACCOUNT_COLUMNS) + 3)
    parts = {
        # To group by a constant, too, takes 10 % more time.
        "by": "" if step == "NULL" else "start, ",
        "fields": grouping.fields,
        "keys": grouping.keys,
        "names": ", ".join(map(str, numbers)),
    }
    rows = [window.format(step=step, **parts)] * windows
    return charges.format(windows=" UNION ALL ".join(rows), **parts)


def _list_windows(
    db: Connection, start: float, end: float, longest: int
) -> tuple[int, int, list[_Window]]:
    """Returns start and end, extended to whole stored steps, and the rows to add up.

    `longest`: the coarsest rows to read, HOUR or DAY.
    """
    kept_since = dict(db.execute("SELECT resolution, since FROM kept").fetchall())
    first_resolution = _find_resolution(start, kept_since)
    first = floor_time(start, first_resolution)
    # The last hour is read from 5-minute rows only if they are kept from its start on.
    last_hour_start = max(first, floor_time(end, HOUR))
    last_resolution = _find_resolution(last_hour_start, kept_since)
    last = ceil_time(end, last_resolution)

    # Open rows are in none of the others.
    first_hour = min(ceil_time(first, HOUR), last)
    last_hour = max(floor_time(last, HOUR), first_hour)
    first_day = last_hour
    if longest == DAY:
        first_day = min(ceil_time(first_hour, DAY), last_hour)

    last_day = max(floor_time(last_hour, DAY), first_day)

    windows = [
        _Window(1.0, OPEN, first, last),
        _Window(1.0, UNSETTLED, first, last),
        _Window(1.0, COARSE, first, first_hour),
        _Window(1.0, HOUR, first_hour, first_day),
        _Window(1.0, DAY, first_day, last_day),
        _Window(1.0, HOUR, last_day, last_hour),
        _Window(1.0, COARSE, last_hour, last),
    ]
    return first, last, windows


def _find_resolution(time: float, kept_since: Mapping[int, int]) -> int:
    """Returns the finest resolution of which the rows of this time are kept."""
    for resolution in (COARSE, HOUR):
        if time >= kept_since.get(resolution, -math.inf):
            return resolution
    return DAY


def _split_windows(
    db: Connection, start: float, end: float, now: float, longest: int
) -> list[_Window]:
    since = read_usage_start(db)
    recorded = (start if since is None else since, now)
    _, _, windows = _list_windows(db, start, end, longest)
    parts: list[_Window] = []
    for window in windows:
        parts.extend(_split_window(window, start, end, recorded))
    return parts


def _split_window(
    window: _Window, start: float, end: float, recorded: tuple[float, float]
) -> Iterable[_Window]:
    """Separates the steps at the start and the end of the range."""
    since, until = recorded
    length = max(COARSE, window.resolution)  # open rows are of 5 minutes
    first_step = floor_time(start, length)
    last_step = floor_time(end, length)
    first = max(window.start, first_step)
    last = min(window.end, ceil_time(end, length))
    for step in sorted({first_step, last_step}):
        if not first <= step < last:
            continue

        yield window._replace(start=first, end=step)

        recorded_from = max(step, since)
        if step == since:
            # The first day may have begun late: its first round is deleted.
            recorded_from = max(step, start)

        recorded_to = min(step + length, until)
        counted = min(end, recorded_to) - max(start, recorded_from)
        whole = recorded_to - recorded_from
        part = max(0.0, counted / whole) if whole > 0 else 1.0
        first = step + length
        yield window._replace(part=part, start=step, end=first)

    yield window._replace(start=first, end=last)
