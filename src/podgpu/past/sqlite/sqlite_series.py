"""Reads the history of GPUs from SQLite.

Each `read_` function takes a connection from `HistoryStore.reader`. All times are Unix times.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from podgpu.charge import Figures
from podgpu.model import group_by
from podgpu.past.books.schema import GPU_ITSELF, fetch_value
from podgpu.past.gpu_history import (
    MAX_DEVICES,
    MAX_POINTS,
    GpuHistory,
    HolderSpan,
    JobHistory,
    Mark,
    PodsDevice,
    add_series,
    make_job_history,
    round_series,
)
from podgpu.past.spans import HOLDER
from podgpu.past.time_steps import COARSE, FINE, ceil_time, floor_time

# The table `round` has the times of samples. Selects those of one resolution, and those without a
# 5-minute mean yet.
_TIMES = """
WITH times AS (
    SELECT * FROM round WHERE resolution = :resolution AND time >= :start AND time < :end
    UNION ALL SELECT * FROM round
    WHERE resolution = :fine AND time >= max(:start, :rolled_up) AND time < :end)"""
# Averages the values of a GPU. If :account is a pod or job, reads only the times in which this
# account held the GPU. On a shared GPU, reads the account's own values instead of the GPU's values.
# CROSS JOIN makes SQLite look up one sample per time instead of scanning all samples.
_FIGURES = f"""{_TIMES}
SELECT (time - :start) / :step AS point,
    avg(utilization) / 1e4, avg(memory) * 1048576, avg(power) / 10, avg(temperature)
FROM times CROSS JOIN sample USING (resolution, time)
WHERE gpu = :gpu AND account = (
    SELECT max(own.account) FROM sample AS own
    WHERE own.resolution = times.resolution AND own.time = times.time
    AND own.gpu = :gpu AND own.account IN ({GPU_ITSELF}, :account))
AND (:account = {GPU_ITSELF} OR EXISTS (
    SELECT * FROM span WHERE span.gpu = :gpu AND span.account = :account AND kind = '{HOLDER}'
    AND started < times.time + times.resolution AND (ended IS NULL OR ended > times.time)))
GROUP BY point"""
_HOLDERS = f"""
SELECT started, ended, namespace, pod, name, uid, container_id, job
FROM span JOIN account ON account.id = span.account
WHERE gpu = :gpu AND kind = '{HOLDER}' AND started < :end AND (ended IS NULL OR ended > :start)
ORDER BY started"""
_MARKS = f"""
SELECT started, ended, name, message FROM span
WHERE gpu = :gpu AND kind <> '{HOLDER}' AND started < :end AND (ended IS NULL OR ended > :start)
ORDER BY started"""
_GPU = f"""
SELECT uuid, instance, node, gpu_index, id, {GPU_ITSELF} FROM gpu
WHERE uuid = ? AND instance = ?"""
_GPUS_OF_POD = f"""
SELECT DISTINCT uuid, instance, gpu.node, gpu_index, gpu.id, account.id
FROM account JOIN span ON span.account = account.id JOIN gpu ON gpu.id = span.gpu
WHERE namespace = ? AND pod = ? AND kind = '{HOLDER}'
    AND started < ? AND (ended IS NULL OR ended > ?)
ORDER BY gpu.node, gpu_index, instance"""
_ACCOUNTS_OF_JOB = f"""
SELECT DISTINCT gpu.node, gpu_index, uuid, instance, gpu.id, account.id, namespace, pod
FROM account JOIN span ON span.account = account.id JOIN gpu ON gpu.id = span.gpu
WHERE namespace = ? AND owner_kind = ? AND owner_name = ? AND kind = '{HOLDER}'
    AND started < ? AND (ended IS NULL OR ended > ?)
ORDER BY gpu.node, gpu_index, uuid, instance, account.id"""
_OLDEST = """
SELECT resolution FROM round WHERE time + resolution > ? AND time < ?
ORDER BY time + resolution LIMIT 1"""
# End of the last 5 minutes that are complete.
_ROLLED_UP = f"""
SELECT ifnull(max(time) + {COARSE}, 0) FROM round WHERE resolution = {COARSE}"""
_SPARKLINES = f"""
SELECT iif(instance = '', uuid, uuid || '/' || instance), avg(utilization) / 1e4
FROM sample JOIN gpu ON gpu.id = sample.gpu
WHERE resolution = ? AND time >= ? AND time < ? AND account = {GPU_ITSELF} GROUP BY gpu"""


def read_gpu(
    db: sqlite3.Connection, uuid: str, start: float, end: float, instance: str = ""
) -> GpuHistory | None:
    """Returns the history of a GPU in at most MAX_POINTS steps, or None if the GPU is unknown."""
    row = db.execute(_GPU, (uuid, instance)).fetchone()
    if row is None:
        return None
    return _read_history(db, row, _choose_window(db, start, end))


def read_pod(
    db: sqlite3.Connection, namespace: str, pod: str, start: float, end: float
) -> list[GpuHistory]:
    """Returns the history of each GPU that a pod held.

    On a shared GPU, the values are those of the pod alone.
    """
    window = _choose_window(db, start, end)
    gpus = db.execute(_GPUS_OF_POD, (namespace, pod, end, start)).fetchall()
    return [_read_history(db, row, window) for row in gpus]


def read_job(
    db: sqlite3.Connection, kind: str, namespace: str, name: str, start: float, end: float
) -> JobHistory | None:
    """Returns the history of the devices that pods of this owner held. None if there are none."""
    window = _choose_window(db, start, end)
    rows = db.execute(_ACCOUNTS_OF_JOB, (namespace, kind, name, end, start)).fetchall()
    by_device = group_by(rows, lambda row: row[:5])
    shown = list(by_device.items())[:MAX_DEVICES]
    if not shown:
        return None

    held = []
    for (node, index, uuid, instance, gpu_id), accounts in shown:
        pods = set()
        histories = []
        for *_, account_id, pod_namespace, pod in accounts:
            pods.add((pod_namespace, pod))
            gpu_row = uuid, instance, node, index, gpu_id, account_id
            histories.append(_read_history(db, gpu_row, window))

        gpu = histories[0]
        gpu.series = add_series([history.series for history in histories])
        held.append(PodsDevice(gpu, pods))

    left_out = len(by_device) - len(shown)
    return make_job_history(kind, namespace, name, held, left_out)


def read_utilization(db: sqlite3.Connection, start: int, end: int) -> Mapping[str, float | None]:
    """Returns the mean utilisation by `UUID` or `UUID/INSTANCE`.

    Reads 15 s samples, which are kept for an hour.
    """
    return dict(db.execute(_SPARKLINES, (FINE, start, end)).fetchall())


def _choose_window(db: sqlite3.Connection, start: float, end: float) -> dict[str, int]:
    """Returns the SQL parameters for a time range.

    These are its start and end, the resolution to read, and the step.
    """
    oldest_resolution = fetch_value(db, _OLDEST, start, end)
    # A short range is read from 15 s samples, if they go back far enough.
    is_short = end - start <= MAX_POINTS * FINE
    is_fine = is_short and oldest_resolution != COARSE
    resolution = FINE if is_fine else COARSE
    first = floor_time(start, resolution)
    last = ceil_time(end, resolution)
    steps_per_point = -(-(last - first) // (resolution * MAX_POINTS))  # rounded up
    step = resolution * steps_per_point
    # 15 s samples that are newer are read, too, because they have no 5-minute means yet.
    rolled_up = last if is_fine else fetch_value(db, _ROLLED_UP)

    return {
        "resolution": resolution,
        "fine": FINE,
        "rolled_up": rolled_up,
        "start": first,
        "end": last,
        "step": step,
    }


def _read_history(db: sqlite3.Connection, row: Sequence[Any], window: dict[str, int]) -> GpuHistory:
    uuid, instance, node, index, gpu_id, account_id = row
    parameters = window | {"gpu": gpu_id, "account": account_id}
    start = window["start"]
    step = window["step"]
    steps = math.ceil((window["end"] - start) / step)

    series: dict[str, list[float | None]] = {}
    for name in Figures._fields:
        series[name] = [None] * steps

    for point, *means in db.execute(_FIGURES, parameters):
        for name, mean in zip(Figures._fields, means, strict=True):
            series[name][point] = mean

    holders = []
    for started, ended, *names in db.execute(_HOLDERS, parameters):
        holders.append(HolderSpan(*names, from_=started, to=ended))

    return GpuHistory(
        uuid=uuid,
        instance=instance,
        node=node,
        index=index,
        from_=start,
        to=start + step * steps,
        step_seconds=step,
        series=round_series(series),
        holders=holders,
        marks=[Mark(*span) for span in db.execute(_MARKS, parameters)],
    )
