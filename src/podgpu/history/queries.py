"""Reads history. Each function takes a connection from `HistoryStore.reader` and a range of Unix times."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from podgpu.history.answers import MAX_POINTS, GpuHistory, Series, Span
from podgpu.history.store import COARSE, DAY, FINE, HOUR, Amounts, Figures, RoundTotals

DIMENSIONS = (
    "cluster",
    "node",
    "namespace",
    "owner_kind",
    "owner_name",
    "pod",
    "job",
    "uid",
    "container_id",
    "model",
)

# The rounds of the chosen resolution, and the newest fine rounds, which are not rolled up yet.
_ROUNDS = """
WITH rounds AS (
    SELECT * FROM round WHERE resolution = :resolution AND time >= :start AND time < :end
    UNION ALL SELECT * FROM round WHERE resolution = :fine AND time >= max(:start, :rolled_up) AND time < :end)"""
_TOTALS = f"""{_ROUNDS}
SELECT (time - :start) / :step AS point, avg(gpus), avg(allocated), avg(used), avg(idle), avg(broken), avg(power)
FROM rounds GROUP BY point"""
# Account 0 reads the figures of the GPU. Any other account reads its own figures while it held the GPU, or those of
# the GPU where it has none. CROSS JOIN keeps SQLite from scanning all samples: it looks up one sample per round.
_FIGURES = f"""{_ROUNDS}
SELECT (time - :start) / :step AS point,
    avg(utilization) / 1e4, avg(memory) * 1048576, avg(sample.power) / 10, avg(temperature)
FROM rounds CROSS JOIN sample USING (resolution, time)
WHERE gpu = :gpu AND account = (
    SELECT max(own.account) FROM sample AS own WHERE own.resolution = rounds.resolution AND own.time = rounds.time
    AND own.gpu = :gpu AND own.account IN (0, :account))
AND (:account = 0 OR EXISTS (SELECT * FROM span WHERE span.gpu = :gpu AND span.account = :account
    AND started < rounds.time + rounds.resolution AND (ended IS NULL OR ended > rounds.time)))
GROUP BY point"""
_SPANS = """
SELECT iif(account = 0, 'condition', 'holder'), started, ended, name, message, ifnull(namespace, ''), ifnull(pod, ''),
    ifnull(job, ''), ifnull(uid, ''), ifnull(container_id, '')
FROM span LEFT JOIN account ON account.id = span.account
WHERE gpu = ? AND started < ? AND (ended IS NULL OR ended > ?) ORDER BY started"""
_GPUS_OF_POD = """
SELECT DISTINCT uuid, instance, gpu.node, gpu_index, gpu.id, account.id
FROM account JOIN span ON span.account = account.id JOIN gpu ON gpu.id = span.gpu
WHERE namespace = ? AND pod = ? AND started < ? AND (ended IS NULL OR ended > ?)
ORDER BY gpu.node, gpu_index, instance"""
_SPARKLINES = """
SELECT iif(instance = '', uuid, uuid || '/' || instance), avg(utilization) / 1e4
FROM sample JOIN gpu ON gpu.id = sample.gpu
WHERE resolution = ? AND time >= ? AND time < ? AND account = 0 GROUP BY gpu"""
# Whole days come from daily rows, the hours before and after them from hourly rows.
_USAGE = """
SELECT {groups}, currency, max(last_seen),
    sum(allocated) / 1e3, sum(busy) / 1e3, sum(idle) / 1e3, sum(energy) / 1e3, sum(cost) / 1e6, sum(idle_cost) / 1e6
FROM account JOIN (
    SELECT account AS id, sum(allocated) AS allocated, sum(busy) AS busy, sum(idle) AS idle,
           sum(energy) AS energy, sum(cost) AS cost, sum(idle_cost) AS idle_cost
    FROM (SELECT * FROM usage WHERE resolution = :day AND time >= :first_day AND time < :last_day
          UNION ALL SELECT * FROM usage WHERE resolution = :hour AND time >= :start AND time < :first_day
          UNION ALL SELECT * FROM usage WHERE resolution = :hour AND time >= :last_day AND time < :end)
    GROUP BY account) USING (id)
GROUP BY {groups}, currency ORDER BY sum(idle_cost) DESC, sum(idle) DESC"""


class UsageRow(NamedTuple):
    """Usage of one group of pods in one currency. `last_seen` is the hour in which a pod of the group was last seen."""

    group: tuple[str, ...]
    currency: str
    last_seen: int
    amounts: Amounts


def read_totals(db: sqlite3.Connection, start: float, end: float) -> Series:
    """Totals over all GPUs in at most 500 points."""
    return _read_series(db, _TOTALS, _choose_window(db, start, end), RoundTotals._fields)


def read_gpu(db: sqlite3.Connection, uuid: str, start: float, end: float, instance: str = "") -> GpuHistory | None:
    """One GPU in at most 500 points. None if the GPU is unknown."""
    sql = "SELECT uuid, instance, node, gpu_index, id, 0 FROM gpu WHERE uuid = ? AND instance = ?"
    row = db.execute(sql, (uuid, instance)).fetchone()
    return None if row is None else _read_history(db, row, _choose_window(db, start, end))


def read_pod(db: sqlite3.Connection, namespace: str, pod: str, start: float, end: float) -> list[GpuHistory]:
    """The GPUs that a pod held, with its own figures on shared GPUs. Also for pods that have ended."""
    window = _choose_window(db, start, end)
    return [_read_history(db, row, window) for row in db.execute(_GPUS_OF_POD, (namespace, pod, end, start)).fetchall()]


def read_utilization(db: sqlite3.Connection, start: int, end: int) -> Mapping[str, float | None]:
    """Mean utilisation of every GPU, by `UUID` or `UUID/INSTANCE`, within the last hour."""
    return dict(db.execute(_SPARKLINES, (FINE, start, end)).fetchall())


def read_first_usage(db: sqlite3.Connection) -> int | None:
    """Start of the first hour with usage."""
    first: int | None = db.execute("SELECT min(time) FROM usage WHERE resolution = ?", (HOUR,)).fetchone()[0]
    return first


def read_usage(db: sqlite3.Connection, start: float, end: float, group_by: Sequence[str]) -> list[UsageRow]:
    """Usage of all pods in a range of whole hours, including ended pods. The most wasteful group comes first.

    `group_by` has names from `DIMENSIONS`, or `label:KEY` for the value of a pod label.
    """
    start, end = int(start) // HOUR * HOUR, -(-int(end) // HOUR) * HOUR
    newest_day = db.execute("SELECT max(time) FROM usage WHERE resolution = ?", (DAY,)).fetchone()[0]
    first_day = -(-start // DAY) * DAY
    last_day = first_day if newest_day is None else min(end // DAY * DAY, newest_day + DAY)
    if first_day >= last_day:
        first_day = last_day = end
    window = {"hour": HOUR, "day": DAY, "start": start, "end": end, "first_day": first_day, "last_day": last_day}
    groups, paths = [], {}
    for number, name in enumerate(group_by):
        if name.startswith("label:"):
            paths[f"label{number}"] = f'$."{name.removeprefix("label:")}"'
            groups.append(f"ifnull(json_extract(labels, :label{number}), '')")
        elif name in DIMENSIONS:
            groups.append(name)
        else:
            raise ValueError(f"cannot group by {name!r}: write one of {', '.join(DIMENSIONS)}, or label:KEY")
    rows, n = db.execute(_USAGE.format(groups=", ".join(groups)), window | paths), len(groups)
    return [UsageRow(row[:n], row[n], row[n + 1], Amounts(*row[n + 2 :])) for row in rows]


def _choose_window(db: sqlite3.Connection, start: float, end: float) -> dict[str, int]:
    """Chooses resolution and step, and returns them with the range as parameters for the queries."""
    sql = "SELECT resolution FROM round WHERE time + resolution > ? AND time < ? ORDER BY time + resolution LIMIT 1"
    oldest = db.execute(sql, (start, end)).fetchone()
    newest_coarse = db.execute("SELECT max(time) FROM round WHERE resolution = ?", (COARSE,)).fetchone()[0]
    # A short range is read from fine samples, unless it begins before the oldest of them.
    resolution = FINE if end - start <= MAX_POINTS * FINE and oldest != (COARSE,) else COARSE
    first, last = int(start // resolution) * resolution, -int(-end // resolution) * resolution
    step = resolution * -(-(last - first) // (resolution * MAX_POINTS))
    rolled_up = last if resolution == FINE else 0 if newest_coarse is None else newest_coarse + COARSE
    return {"resolution": resolution, "fine": FINE, "rolled_up": rolled_up, "start": first, "end": last, "step": step}


def _read_history(db: sqlite3.Connection, row: Sequence[Any], window: dict[str, int]) -> GpuHistory:
    uuid, instance, node, index, gpu_id, account_id = row
    figures = _read_series(db, _FIGURES, window | {"gpu": gpu_id, "account": account_id}, Figures._fields)
    spans = db.execute(_SPANS, (gpu_id, window["end"], window["start"]))
    return GpuHistory(uuid, instance, node, index, figures, [Span(*span) for span in spans])


def _read_series(db: sqlite3.Connection, sql: str, parameters: dict[str, int], names: Sequence[str]) -> Series:
    start, end, step = parameters["start"], parameters["end"], parameters["step"]
    values: dict[str, list[float | None]] = {name: [None] * -(-(end - start) // step) for name in names}
    for point, *means in db.execute(sql, parameters):
        for name, mean in zip(names, means, strict=True):
            values[name][point] = mean
    return Series(start, step, values)
