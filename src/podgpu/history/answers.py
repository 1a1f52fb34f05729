"""Builds the JSON of `/api/v1/history`, and reads the history from SQLite.

Each `read_` function takes a connection from `HistoryStore.reader`. All times are Unix times.
"""

from __future__ import annotations

import math
import re
import sqlite3
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from podgpu.errors import UsageError
from podgpu.history.store import AMOUNT_UNITS, COARSE, DAY, FINE, GPU_ITSELF, HOUR, Amounts, Figures, UsageAccount

MAX_POINTS = 500
SPARKLINE_STEP, SPARKLINE_POINTS = 60, 60
FULL, NO_DATA = 200, 255
"""A point of a sparkline is one byte: FULL means 100 %, and NO_DATA means that there is no data."""
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
JSON = dict[str, Any]
Values = Sequence[float | None]  # one per step; None if there is no data
_DIGITS = {"utilization_ratio": 4, "memory_used_bytes": None, "power_watts": 1, "temperature_celsius": None}


class HolderSpan(msgspec.Struct, omit_defaults=True):
    """A period in which a container held a GPU. `to` is None while the container holds the GPU."""

    from_: float = msgspec.field(name="from")
    to: float | None = None
    container: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""


class Mark(msgspec.Struct, omit_defaults=True):
    """A period in which a GPU had a condition, such as an XID. `until` is None while the condition lasts."""

    at: float
    until: float | None = None
    condition: str = ""
    says: str = ""
    uuid: str = ""  # set only in the history of a pod
    instance: str = ""


class DeviceHistory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """History of a GPU or MIG instance. `series` maps a quantity, such as power_watts, to one mean per time step."""

    uuid: str
    instance: str = ""
    node: str = ""
    index: int | None = None
    series: Mapping[str, Values]
    holders: list[HolderSpan]


class GpuHistory(DeviceHistory, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    marks: list[Mark]


class PodHistory(msgspec.Struct, kw_only=True):
    api: str = "podgpu/v1"
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    namespace: str
    pod: str
    devices: list[DeviceHistory]
    marks: list[Mark]


class HistorySource(Protocol):
    """Provides the JSON of `/api/v1/history`. The methods raise SourceError if history cannot be read."""

    async def sparklines(self) -> JSON: ...

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        """Returns None if the GPU is unknown."""

    async def pod(self, namespace: str, pod: str, seconds: int, cluster: str | None = None) -> PodHistory | None:
        """Returns None if the pod held no GPU in the last `seconds`. A history in SQLite ignores `cluster`."""


def parse_range(text: str) -> int:
    """Converts a duration such as `30m` or `7d` to seconds. Raises UsageError for other texts."""
    found = re.fullmatch(r"([1-9]\d{0,3})([mhdw])", text, re.ASCII)
    if found is None:
        raise UsageError(f"range={text[:40]!a}: write a length of time, such as 30m, 1h, 24h, 7d or 12w")
    return int(found[1]) * _UNITS[found[2]]


def parse_time(query: Mapping[str, str], name: str, most: float = 1e11) -> float | None:
    """Returns a Unix time of the query, or None if it is not given. Raises UsageError."""
    if name not in query:
        return None
    try:
        time = float(query[name])
    except ValueError:
        time = math.nan
    if not 0 <= time < most:
        raise UsageError(f"{name}={query[name][:60]!r}: write a Unix time in seconds, from 0 to {most:.0f}")
    return time


def sparkline_start(now: float) -> int:
    """Returns the Unix time of the first point. A sparkline has 60 points and ends with the current minute."""
    return (int(now) // SPARKLINE_STEP + 1 - SPARKLINE_POINTS) * SPARKLINE_STEP


def utilization_byte(ratio: float | None) -> int:
    """Encodes a ratio from 0 to 1 as a byte from 0 to FULL. A ratio above 0 never becomes 0."""
    if ratio is None:
        return NO_DATA
    return min(FULL, max(1, round(ratio * FULL))) if ratio > 0 else 0


def sparklines_json(start: float, lines: Mapping[str, bytes]) -> JSON:
    """Builds the JSON of sparklines. `lines` maps `UUID` or `UUID/INSTANCE` to points. Omits devices without data."""
    devices = {name: b64encode(line).decode() for name, line in lines.items() if line.count(NO_DATA) < len(line)}
    return {
        **{"api": "podgpu/v1", "from": start, "step_seconds": SPARKLINE_STEP, "points": SPARKLINE_POINTS},
        "devices": devices,
    }


def round_series(series: Mapping[str, Values]) -> dict[str, Values]:
    return {
        name: [None if value is None else round(value, _DIGITS[name]) for value in values]
        for name, values in series.items()
    }


def make_pod_history(namespace: str, pod: str, gpus: Iterable[GpuHistory]) -> PodHistory | None:
    """Combines the histories of a pod's GPUs. Omits conditions from times when the pod did not hold the GPU."""
    devices: list[DeviceHistory] = []
    marks: list[Mark] = []
    for gpu in gpus:
        own = [span for span in gpu.holders if (span.namespace, span.pod) == (namespace, pod)]
        names: dict[str, Any] = {"uuid": gpu.uuid, "instance": gpu.instance, "node": gpu.node, "index": gpu.index}
        devices.append(DeviceHistory(**names, series=gpu.series, holders=own))
        for mark in gpu.marks:
            end = math.inf if mark.until is None else mark.until
            if any(span.from_ < end and (span.to is None or mark.at < span.to) for span in own):
                marks.append(msgspec.structs.replace(mark, uuid=gpu.uuid, instance=gpu.instance))
    if not devices:
        return None
    marks.sort(key=lambda mark: mark.at)
    return PodHistory(
        from_=gpu.from_,
        to=gpu.to,
        step_seconds=gpu.step_seconds,
        namespace=namespace,
        pod=pod,
        devices=devices,
        marks=marks,
    )


# Reading from SQLite

# A round is a time with samples. Selects the rounds of one resolution, and 15 s rounds that have no 5-minute mean yet.
_ROUNDS = """
WITH rounds AS (
    SELECT * FROM round WHERE resolution = :resolution AND time >= :start AND time < :end
    UNION ALL SELECT * FROM round WHERE resolution = :fine AND time >= max(:start, :rolled_up) AND time < :end)"""
# Averages the values of a GPU. If :account is a pod or job, reads only the rounds in which this account held the GPU.
# On a shared GPU, reads the account's own values instead of the GPU's values.
# CROSS JOIN makes SQLite look up one sample per round instead of scanning all samples.
_FIGURES = f"""{_ROUNDS}
SELECT (time - :start) / :step AS point,
    avg(utilization) / 1e4, avg(memory) * 1048576, avg(power) / 10, avg(temperature)
FROM rounds CROSS JOIN sample USING (resolution, time)
WHERE gpu = :gpu AND account = (
    SELECT max(own.account) FROM sample AS own WHERE own.resolution = rounds.resolution AND own.time = rounds.time
    AND own.gpu = :gpu AND own.account IN ({GPU_ITSELF}, :account))
AND (:account = {GPU_ITSELF} OR EXISTS (SELECT * FROM span WHERE span.gpu = :gpu AND span.account = :account
    AND started < rounds.time + rounds.resolution AND (ended IS NULL OR ended > rounds.time)))
GROUP BY point"""
_HOLDERS = """
SELECT started, ended, name, namespace, pod, job, uid, container_id
FROM span JOIN account ON account.id = span.account
WHERE gpu = :gpu AND started < :end AND (ended IS NULL OR ended > :start) ORDER BY started"""
_MARKS = f"""
SELECT started, ended, name, message FROM span
WHERE gpu = :gpu AND account = {GPU_ITSELF} AND started < :end AND (ended IS NULL OR ended > :start) ORDER BY started"""
_GPUS_OF_POD = """
SELECT DISTINCT uuid, instance, gpu.node, gpu_index, gpu.id, account.id
FROM account JOIN span ON span.account = account.id JOIN gpu ON gpu.id = span.gpu
WHERE namespace = ? AND pod = ? AND started < ? AND (ended IS NULL OR ended > ?)
ORDER BY gpu.node, gpu_index, instance"""
_SPARKLINES = f"""
SELECT iif(instance = '', uuid, uuid || '/' || instance), avg(utilization) / 1e4
FROM sample JOIN gpu ON gpu.id = sample.gpu
WHERE resolution = ? AND time >= ? AND time < ? AND account = {GPU_ITSELF} GROUP BY gpu"""
# Sums the usage of each account before the join, because joining every row is slower.
_RANGE = f"""
SELECT namespace, pod, job, uid, container_id, owner_kind, owner_name, labels, methods, currency,
    {", ".join(f"{name} / {unit}" for name, unit in AMOUNT_UNITS.items())}
FROM account JOIN (
    SELECT account AS id, currency, {", ".join(f"sum({name}) AS {name}" for name in AMOUNT_UNITS)}
    FROM ({{rows}}) GROUP BY account, currency) USING (id)
ORDER BY namespace, pod, job, uid, container_id, currency"""
_RANGE_ROWS = "SELECT * FROM usage WHERE resolution = ? AND time >= ? AND time < ?"


class UsageSum(NamedTuple):
    """Usage of a pod, a job, or all unallocated GPUs in a time range. `currency` is empty if the GPUs have no price."""

    account: UsageAccount
    currency: str
    amounts: Amounts
    cluster: str = ""  # set only if the usage is read from Prometheus
    methods: tuple[str, ...] = ()  # how the use of the GPUs was measured; empty if unknown


def read_gpu(db: sqlite3.Connection, uuid: str, start: float, end: float, instance: str = "") -> GpuHistory | None:
    """Returns the history of a GPU in at most MAX_POINTS steps, or None if the GPU is unknown."""
    sql = f"SELECT uuid, instance, node, gpu_index, id, {GPU_ITSELF} FROM gpu WHERE uuid = ? AND instance = ?"
    row = db.execute(sql, (uuid, instance)).fetchone()
    return None if row is None else _read_history(db, row, _choose_window(db, start, end))


def read_pod(db: sqlite3.Connection, namespace: str, pod: str, start: float, end: float) -> list[GpuHistory]:
    """Returns the history of each GPU that a pod held. On a shared GPU, the values are those of the pod alone."""
    window = _choose_window(db, start, end)
    return [_read_history(db, row, window) for row in db.execute(_GPUS_OF_POD, (namespace, pod, end, start)).fetchall()]


def read_utilization(db: sqlite3.Connection, start: int, end: int) -> Mapping[str, float | None]:
    """Returns the mean utilisation by `UUID` or `UUID/INSTANCE`. Reads 15 s samples, which are kept for an hour."""
    return dict(db.execute(_SPARKLINES, (FINE, start, end)).fetchall())


def read_range(db: sqlite3.Connection, start: float, end: float) -> tuple[int, int, list[UsageSum]]:
    """Returns start, end and usage. Start and end are extended to whole stored steps (5 minutes, hours or days)."""
    times = {
        resolution: db.execute("SELECT min(time), max(time) FROM usage WHERE resolution = ?", (resolution,)).fetchone()
        for resolution in (COARSE, HOUR, DAY)
    }
    oldest = {resolution: math.inf if first is None else first for resolution, (first, _) in times.items()}
    rolled_up = {resolution: 0 if last is None else last + resolution for resolution, (_, last) in times.items()}

    def step(time: float) -> int:
        """Returns the finest resolution that covers `time`, or that goes back as far as the next coarser resolution."""
        for finer, coarser in ((COARSE, HOUR), (HOUR, DAY)):
            if time >= oldest[finer] or not oldest[finer] // coarser * coarser > oldest[coarser]:
                return finer
        return DAY

    first, last = _floor(start, step(start)), _ceil(end, step(end))
    # Reads whole days from daily rows, other whole hours from hourly rows, and the remainder from 5-minute rows.
    first_hour = min(_ceil(first, HOUR), last)
    last_hour = max(min(_floor(last, HOUR), rolled_up[HOUR]), first_hour)
    first_day = min(_ceil(first_hour, DAY), last_hour)
    last_day = max(min(_floor(last_hour, DAY), rolled_up[DAY]), first_day)
    rows = (
        *(COARSE, first, first_hour),
        *(HOUR, first_hour, first_day),
        *(DAY, first_day, last_day),
        *(HOUR, last_day, last_hour),
        *(COARSE, last_hour, last),
    )
    query = _RANGE.format(rows=" UNION ALL ".join([_RANGE_ROWS] * (len(rows) // 3)))
    found = ((UsageAccount(*row[:9]), row[9], Amounts(*row[10:])) for row in db.execute(query, rows))
    sums = [UsageSum(*one, methods=tuple(one[0].methods.split())) for one in found]
    return first, last, sums


def read_usage_start(db: sqlite3.Connection) -> int | None:
    """Returns the start of the oldest stored usage as Unix time, or None if there is no usage."""
    sql = "SELECT (SELECT min(time) FROM usage WHERE resolution = 86400), (SELECT min(time) FROM round)"
    first_day, first_round = db.execute(sql).fetchone()
    start: int | None = first_round if first_day is None or first_round < first_day + DAY else first_day
    return start


def _floor(time: float, step: int) -> int:
    return int(time // step) * step


def _ceil(time: float, step: int) -> int:
    return -int(-time // step) * step


def _choose_window(db: sqlite3.Connection, start: float, end: float) -> dict[str, int]:
    """Returns the SQL parameters for a time range: its start and end, the resolution to read, and the step."""
    sql = "SELECT resolution FROM round WHERE time + resolution > ? AND time < ? ORDER BY time + resolution LIMIT 1"
    oldest = db.execute(sql, (start, end)).fetchone()
    newest_coarse = db.execute("SELECT max(time) FROM round WHERE resolution = ?", (COARSE,)).fetchone()[0]
    # A short range is read from 15 s samples, if they go back far enough.
    resolution = FINE if end - start <= MAX_POINTS * FINE and oldest != (COARSE,) else COARSE
    first, last = _floor(start, resolution), _ceil(end, resolution)
    step = resolution * -(-(last - first) // (resolution * MAX_POINTS))
    rolled_up = last if resolution == FINE else 0 if newest_coarse is None else newest_coarse + COARSE
    return {"resolution": resolution, "fine": FINE, "rolled_up": rolled_up, "start": first, "end": last, "step": step}


def _read_history(db: sqlite3.Connection, row: Sequence[Any], window: dict[str, int]) -> GpuHistory:
    uuid, instance, node, index, gpu_id, account_id = row
    start, end, step = window["start"], window["end"], window["step"]
    steps = -(-(end - start) // step)
    series: dict[str, list[float | None]] = {name: [None] * steps for name in Figures._fields}
    parameters = window | {"gpu": gpu_id, "account": account_id}
    for point, *means in db.execute(_FIGURES, parameters):
        for name, mean in zip(series, means, strict=True):
            series[name][point] = mean
    return GpuHistory(
        uuid=uuid,
        instance=instance,
        node=node,
        index=index,
        from_=start,
        to=start + step * steps,
        step_seconds=step,
        series=round_series(series),
        holders=[HolderSpan(*span) for span in db.execute(_HOLDERS, parameters)],
        marks=[Mark(*span) for span in db.execute(_MARKS, parameters)],
    )
