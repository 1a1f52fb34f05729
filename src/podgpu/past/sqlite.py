"""Builds the JSON of `/api/v1/history`, and reads the history from SQLite.

Each `read_` function takes a connection from `HistoryStore.reader`. All times are Unix times.
"""

from __future__ import annotations

import math
import sqlite3
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgspec

from podgpu.charge import Figures
from podgpu.known import select_known
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import PodName, Workload, group_by
from podgpu.past.schema import GPU_ITSELF, fetch_value
from podgpu.past.spans import HOLDER
from podgpu.past.time_steps import (
    COARSE,
    FINE,
    ceil_time,
    floor_time,
)

MAX_POINTS = 500
MAX_DEVICES = 64  # of a job; 64 devices with 500 points are about 1 MB of JSON
_SPARKLINE_STEP = 60  # seconds
_SPARKLINE_POINTS = 60
# A point of a sparkline is one byte: FULL means 100 %, and NO_DATA means that there is no data.
FULL = 200
NO_DATA = 255
JSON = dict[str, Any]
Values = Sequence[float | None]  # one per step; None if there is no data
Series = Mapping[str, Values]
_DIGITS = {
    "utilization_ratio": 4,
    "memory_used_bytes": None,
    "power_watts": 1,
    "temperature_celsius": None,
}


class HolderSpan(Workload, frozen=True, kw_only=True):
    """A period in which a container held a GPU. `to` is None while the container holds the GPU."""

    from_: float = msgspec.field(name="from")
    to: float | None = None
    hidden: bool = False  # True if the user may not see whose it is


class Mark(msgspec.Struct, omit_defaults=True):
    """A period in which a GPU had a condition, such as an XID.

    `until` is None while the condition lasts.
    """

    at: float
    until: float | None = None
    condition: str = ""
    says: str = ""
    uuid: str = ""  # set only in the history of a pod
    instance: str = ""


class DeviceHistory(msgspec.Struct, omit_defaults=True, kw_only=True):
    """History of a GPU or MIG instance.

    `series` maps a quantity, such as power_watts, to one mean per time step.
    """

    uuid: str
    instance: str = ""
    node: str = ""
    index: int | None = None
    series: Series
    holders: list[HolderSpan]


class GpuHistory(DeviceHistory, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    marks: list[Mark]


class _DevicesHistory(msgspec.Struct, kw_only=True):
    """History of the devices that pods held, while they held them."""

    api: str = "podgpu/v1"
    from_: float = msgspec.field(name="from")
    to: float
    step_seconds: int
    devices: list[DeviceHistory]
    marks: list[Mark]  # sorted by time


class PodHistory(_DevicesHistory, kw_only=True):
    namespace: str
    pod: str


class JobHistory(_DevicesHistory, kw_only=True):
    kind: str
    namespace: str
    name: str
    left_out: int = 0  # devices above MAX_DEVICES


def sparkline_times(now: float) -> range:
    """Returns the Unix time of each point.

    A sparkline has 60 points and ends with the current minute.
    """
    end = (int(now) // _SPARKLINE_STEP + 1) * _SPARKLINE_STEP
    return range(end - _SPARKLINE_POINTS * _SPARKLINE_STEP, end, _SPARKLINE_STEP)


def utilization_byte(ratio: float | None) -> int:
    """Encodes a ratio from 0 to 1 as a byte from 0 to FULL. A ratio above 0 never becomes 0."""
    if ratio is None:
        return NO_DATA
    if ratio > 0:
        return min(FULL, max(1, round(ratio * FULL)))
    return 0


def sparklines_json(times: range, lines: Series) -> JSON:
    """Builds the JSON of sparklines. Omits devices without data.

    `lines` maps `UUID` or `UUID/INSTANCE` to ratios.
    """
    devices = {}
    for name, line in lines.items():
        if any(ratio is not None for ratio in line):
            content = bytes(map(utilization_byte, line))
            devices[name] = b64encode(content).decode()

    return {
        "api": "podgpu/v1",
        "from": times.start,
        "step_seconds": times.step,
        "points": len(times),
        "devices": devices,
    }


def round_series(series: Series) -> dict[str, Values]:
    rounded: dict[str, Values] = {}
    for name, values in series.items():
        digits = _DIGITS[name]
        rounded[name] = [None if value is None else round(value, digits) for value in values]
    return rounded


def make_pod_history(namespace: str, pod: str, gpus: Sequence[GpuHistory]) -> PodHistory | None:
    """Combines the histories of a pod's GPUs. None if there are none."""
    if not gpus:
        return None
    pods = {(namespace, pod)}
    fields = _combine([_PodsDevice(gpu, pods) for gpu in gpus])
    return PodHistory(namespace=namespace, pod=pod, **fields)


class _PodsDevice(NamedTuple):
    history: GpuHistory
    pods: Set[PodName]  # whose history it is. Other pods may have held it, too


def _combine(held: Sequence[_PodsDevice]) -> JSON:
    """Returns the fields of `_DevicesHistory`.

    Omits conditions from times when none of the pods held the device.
    """
    devices = []
    marks: list[Mark] = []
    for gpu, pods in held:
        own = [span for span in gpu.holders if span.pod_name in pods]
        marks += _select_marks(gpu, own)
        device = DeviceHistory(
            uuid=gpu.uuid,
            instance=gpu.instance,
            node=gpu.node,
            index=gpu.index,
            series=gpu.series,
            holders=own,
        )
        devices.append(device)

    marks.sort(key=lambda mark: mark.at)
    first = held[0].history
    return {
        "from_": first.from_,
        "to": first.to,
        "step_seconds": first.step_seconds,
        "devices": devices,
        "marks": marks,
    }


def _select_marks(gpu: GpuHistory, own: Sequence[HolderSpan]) -> Iterator[Mark]:
    """Yields the conditions at the time of the spans."""
    for mark in gpu.marks:
        if any(_overlap(mark, span) for span in own):
            yield msgspec.structs.replace(mark, uuid=gpu.uuid, instance=gpu.instance)


def _overlap(mark: Mark, span: HolderSpan) -> bool:
    mark_start = mark.at
    if mark.condition == NODE_GONE:
        # A holder's span ends when its node is gone. The second before overlaps with the span.
        mark_start -= 1
    mark_end = math.inf if mark.until is None else mark.until
    span_end = span.to or math.inf
    return span.from_ < mark_end and mark_start < span_end


# Reading from SQLite

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
        gpu.series = _add_series([history.series for history in histories])
        held.append(_PodsDevice(gpu, pods))

    return JobHistory(
        kind=kind,
        namespace=namespace,
        name=name,
        left_out=len(by_device) - len(shown),
        **_combine(held),
    )


def _add_series(histories: Sequence[Series]) -> dict[str, Values]:
    """Adds up what several pods of a job did on one device, such as before and after a restart."""
    added: dict[str, Values] = {}
    for name in Figures._fields:
        lines = [history[name] for history in histories]
        values: list[float | None] = []
        for values_of_step in zip(*lines, strict=True):
            known = select_known(values_of_step)
            values.append(_unite_values(name, known) if known else None)
        added[name] = values

    return added


def _unite_values(name: str, values: Sequence[float]) -> float:
    """Returns the sum. Temperatures have no sum; the highest counts."""
    if name == "temperature_celsius":
        return max(values)
    total = sum(values)
    if name == "utilization_ratio":
        return min(total, 1.0)
    return total


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
