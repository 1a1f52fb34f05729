"""Reads the records of a past time from SQLite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from sqlite3 import Connection

from podgpu.errors import UsageError, utc_text
from podgpu.fleet.state import ClusterState
from podgpu.model import Condition, Holder, WorkloadOwner
from podgpu.past.books.schema import GPU_ITSELF, fetch_value
from podgpu.past.moment import DeviceRecord, HolderRecord, RecordedValues, make_past_state
from podgpu.past.spans import CONDITION, HOLDER, IDLE

# Prefers 15 s samples. A sample is used for up to a minute, because single readings may be missing.
_RECORD = """
SELECT resolution, time FROM round WHERE time <= :at AND time > :at - max(resolution, 60)
ORDER BY resolution, time DESC LIMIT 1"""
_FIGURES = """
SELECT gpu, account, utilization / 1e4, memory * 1048576, power * 100, temperature FROM sample
WHERE resolution = :resolution AND time = :time"""
_CONDITIONS = f"""
SELECT gpu, name, started, message FROM span
WHERE kind = '{CONDITION}' AND started <= :at AND (ended IS NULL OR ended > :at)
ORDER BY started"""
_IDLE_SPANS = f"""
SELECT gpu, account, min(started) FROM span
WHERE kind = '{IDLE}' AND started <= :at AND (ended IS NULL OR ended > :at)
GROUP BY gpu, account"""
# While a node does not answer, its pods keep their GPUs.
# A correlated subquery would be slow (7 s for 500,000 spans).
_HOLDERS = f"""
SELECT gpu, account, methods, owner_kind, owner_name, namespace, pod, name, uid,
    container_id, iif(user = '', job, ''), user, 'history'
FROM span JOIN account ON account.id = account
WHERE kind = '{HOLDER}' AND started <= :at AND (ended IS NULL OR ended > :at
    OR (gpu, ended) IN (SELECT gpu, started FROM span
    WHERE kind = '{CONDITION}' AND name = 'node_gone'
    AND started <= :at AND (ended IS NULL OR ended > :at))) ORDER BY started"""
_GPUS = (
    "SELECT id, node, uuid, instance, gpu_index FROM gpu ORDER BY node, gpu_index, uuid, instance"
)


def read_past(db: Connection, at: float, current: ClusterState) -> ClusterState:
    """Returns the state at the Unix time `at`.

    Raises UsageError if there is no record of this time.
    """
    resolution, time = _find_record(db, at)
    devices = _read_devices(db, {"at": at, "resolution": resolution, "time": time})
    return make_past_state(devices, at, resolution, current)


def _find_record(db: Connection, at: float) -> tuple[int, int]:
    """Returns the resolution and time of the record to read."""
    record: tuple[int, int] | None = db.execute(_RECORD, {"at": at}).fetchone()
    if record is not None:
        return record

    problem = f"there is no record of {utc_text(at)}"
    later = fetch_value(db, "SELECT min(time) FROM round WHERE time > ?", at)
    if later is None:
        raise UsageError(problem)

    problem += f"; the next record is of {utc_text(later)}"
    raise UsageError(problem, next_record_at=later)


def _read_devices(db: Connection, moment: Mapping[str, float]) -> list[DeviceRecord]:
    """Returns the devices that have a record of this moment, by node and index.

    `moment`: its time `at`, and `time` and `resolution` of its samples.
    """
    devices: dict[int, DeviceRecord] = {}
    for gpu, *names in db.execute(_GPUS):
        devices[gpu] = DeviceRecord(*names)

    for gpu, account, *values in db.execute(_FIGURES, moment):
        recorded = RecordedValues(*values)
        if account == GPU_ITSELF:
            devices[gpu].values = recorded
        else:
            devices[gpu].account_values[account] = recorded

    for gpu, name, since, text in db.execute(_CONDITIONS, moment):
        condition = Condition(name, since, text=text)
        devices[gpu].conditions.append(condition)

    for gpu, account, started in db.execute(_IDLE_SPANS, moment):
        device = devices[gpu]
        device.idle_alarms[account] = started

    for gpu, record in _read_holders(db, moment):
        devices[gpu].holders.append(record)

    return [device for device in devices.values() if device.has_reading or device.holders]


def _read_holders(
    db: Connection, moment: Mapping[str, float]
) -> Iterator[tuple[int, HolderRecord]]:
    """Yields the id of a device, and a holder of it."""
    for gpu, account, methods, kind, owner_name, *names in db.execute(_HOLDERS, moment):
        owner = None
        if owner_name:
            owner = WorkloadOwner(kind, owner_name)
        yield gpu, HolderRecord(account, methods, owner, Holder(*names))
