"""Builds the state of a past time from SQLite. What the history does not have, such as models, is
that of now.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from sqlite3 import Connection
from typing import Any, NamedTuple

from msgspec.structs import replace

from podgpu.errors import UsageError, utc_text
from podgpu.fleet.choose import RecordedCondition
from podgpu.fleet.readings import NodeEntry, NodeReading, Owners
from podgpu.fleet.state import ClusterState, complete_node
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import (
    DeviceState,
    DeviceTotals,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    WorkloadOwner,
    group_by_key,
)
from podgpu.past.schema import CONDITION, GPU_ITSELF, HOLDER, IDLE

_NOTE = (
    "the history has no processes, waiting times, DCGM fields and reservations; pods that have "
    "ended count with equal"
    " shares; costs are computed with the current prices"
)
# Prefers 15 s samples. A sample is used for up to a minute, because single readings may be missing.
_RECORD = """
SELECT resolution, time FROM round WHERE time <= :at AND time > :at - max(resolution, 60)
ORDER BY resolution, time DESC LIMIT 1"""
_FIGURES = """
SELECT gpu, account, utilization / 1e4, memory * 1048576, power * 100, temperature FROM sample
WHERE resolution = :resolution AND time = :time"""
_CONDITIONS = f"""
SELECT gpu, name, started, '', message FROM span
WHERE kind = '{CONDITION}' AND started <= :at AND (ended IS NULL OR ended > :at)
ORDER BY started"""
_IDLE_SPANS = f"""
SELECT gpu, account, min(started) FROM span
WHERE kind = '{IDLE}' AND started <= :at AND (ended IS NULL OR ended > :at)
GROUP BY gpu, account"""
# While a node does not answer, its pods keep their GPUs. A correlated subquery would be slow (7 s
# for 500,000 spans).
_HOLDERS = f"""
SELECT gpu, account, instr(methods, 'mps'), owner_kind, owner_name, namespace, pod, name, uid,
    container_id, iif(user = '', job, ''), user, 'history'
FROM span JOIN account ON account.id = account
WHERE kind = '{HOLDER}' AND started <= :at AND (ended IS NULL OR ended > :at
    OR (gpu, ended) IN (SELECT gpu, started FROM span
    WHERE kind = '{CONDITION}' AND name = 'node_gone'
    AND started <= :at AND (ended IS NULL OR ended > :at))) ORDER BY started"""
_GPUS = (
    "SELECT id, node, uuid, instance, gpu_index FROM gpu ORDER BY node, gpu_index, uuid, instance"
)
_UNKNOWN = (None, None, None, None)
_UNKNOWN_STATE = NodeState(producer="podgpu")
_UNKNOWN_NODE = NodeEntry(NodeReading("", _UNKNOWN_STATE), _UNKNOWN_STATE)
# the values of all holders may exceed the GPU's by this factor, because pods start within a step
_MAX_SUM = 1.05


class _PastHolder(NamedTuple):
    account: int
    is_mps_client: bool
    holder: Holder


class _Device(NamedTuple):
    uuid: str
    instance: str
    number: int | None
    figures: Mapping[int, Sequence[Any]]  # account -> utilisation, bytes, milliwatts, degrees
    conditions: Sequence[RecordedCondition]
    holders: Sequence[_PastHolder]
    idle_alarms: Mapping[int, float]  # account -> start


def read_past(db: Connection, at: float, current: ClusterState) -> ClusterState:
    """Returns the state at the Unix time `at`. Raises UsageError if there is no record of this
    time.
    """
    found = db.execute(_RECORD, {"at": at}).fetchone()
    if found is None:
        [(later,)] = db.execute("SELECT min(time) FROM round WHERE time > ?", (at,)).fetchall()
        more = "" if later is None else f"; the next record is of {utc_text(later)}"
        raise UsageError(f"there is no record of {utc_text(at)}{more}")
    time = {"at": at, "resolution": found[0], "time": found[1]}
    figures = group_by_key(
        (gpu, (account, row)) for gpu, account, *row in db.execute(_FIGURES, time)
    )
    conditions = group_by_key(
        (gpu, RecordedCondition(*row)) for gpu, *row in db.execute(_CONDITIONS, time)
    )
    idle_alarms: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for gpu, account, started in db.execute(_IDLE_SPANS, time):
        idle_alarms[gpu][account] = started
    held: defaultdict[int, list[_PastHolder]] = defaultdict(list)
    owners: dict[tuple[str, str], WorkloadOwner] = {}
    for gpu, account, mps, kind, owner_name, *names in db.execute(_HOLDERS, time):
        holder = Holder(*names)
        held[gpu].append(_PastHolder(account, bool(mps), holder))
        if owner_name:
            owners[holder.namespace, holder.pod] = WorkloadOwner(kind, owner_name)
    devices = group_by_key(
        (
            node,
            _Device(
                uuid,
                instance,
                number,
                dict(figures.get(id_, ())),
                conditions.get(id_, ()),
                held.get(id_, ()),
                idle_alarms.get(id_, {}),
            ),
        )
        for id_, node, uuid, instance, number in db.execute(_GPUS)
        if id_ in figures or id_ in conditions or id_ in held
    )
    now = {node.name: node for node in current.nodes}
    nodes = tuple(
        _make_node(name, members, at, now.get(name, _UNKNOWN_NODE), current, owners)
        for name, members in devices.items()
    )
    changes: dict[str, Any] = {"nodes": nodes, "notes": (_NOTE,), "alerts": (), "used": {}}
    return dataclasses.replace(current, taken_at=at, is_past=True, step_seconds=found[0], **changes)


def _make_node(
    name: str,
    devices: Sequence[_Device],
    at: float,
    now: NodeEntry,
    current: ClusterState,
    owners: Owners,
) -> NodeEntry:
    """Builds one node of the past state. `now`: the same node in the current state."""
    known = {gpu.uuid: gpu for gpu in now.state.devices}
    gpus = []
    by_gpu = group_by_key((device.uuid, device) for device in devices)
    for uuid, parts in by_gpu.items():
        gpus.append(_make_gpu(parts, known.get(uuid), current.settings.idle_after))
    state = NodeState(
        producer="podgpu",
        node=name,
        devices=tuple(gpus),
        simulated=now.state.simulated,
    )

    gone_since = _find_gone_since(devices, at)
    age = 0.0 if gone_since is None else at - gone_since
    is_gone = gone_since is not None
    has_values = any(device.figures or device.conditions for device in devices)

    offset = current.clock_offset
    reading = NodeReading("", state, at - age - offset, labels=now.reading.labels)
    entry = NodeEntry(
        reading,
        state,
        age_seconds=age,
        stale=is_gone or not has_values,
        gone=is_gone,
    )
    return complete_node(entry, None, current.prices, offset, owners)


def _find_gone_since(devices: Sequence[_Device], at: float) -> float | None:
    """Returns the time when the node stopped answering. None if it answered at the time `at`."""
    for device in devices:
        for condition in device.conditions:
            if condition.name == NODE_GONE:
                return condition.since or at
    return None


def _make_gpu(
    devices: Sequence[_Device], known: DeviceState | None, idle_after: float | None
) -> DeviceState:
    known_devices: dict[str, Any] = (
        {"": known, **{str(one.id): one for one in known.instances}} if known else {}
    )
    is_hidden, model = all(device.instance for device in devices), known.model if known else ""
    gpu = DeviceState(uuid=devices[0].uuid, index=devices[0].number, model=model, hidden=is_hidden)
    for device in devices:
        now = known_devices.get(device.instance)
        utilization, memory, power, temperature = device.figures.get(GPU_ITSELF, _UNKNOWN)
        # Clients that share an MPS server have values, but no utilisation.
        is_mps = any(
            mps and device.figures.get(account, (0,))[0] is None
            for account, mps, *_ in device.holders
        )
        shared: dict[str, Any] = {
            "utilization_ratio": utilization,
            "memory_used_bytes": memory,
            "memory_total_bytes": now.memory_total_bytes if now else None,
            "holders": tuple(_make_holders(device, now.holders if now else (), idle_after)),
            "usage": DeviceTotals(method="mps") if is_mps else None,
        }
        if device.instance:
            instance = MigInstance(
                id=int(device.instance), profile=now.profile if now else "", **shared
            )
            gpu = replace(gpu, instances=(*gpu.instances, instance))
        else:
            gpu = replace(gpu, power_mw=power, temperature_celsius=temperature, **shared)
    conditions = {
        one.name: one for device in devices for one in device.conditions if one.name != NODE_GONE
    }
    return replace(gpu, conditions=tuple(conditions.values()))


def _make_holders(
    device: _Device, now: Sequence[Holder], idle_after: float | None
) -> Iterator[Holder]:
    own = _select_own_figures(device)
    shares = {holder.key: holder for holder in now}
    for account, _, holder in device.holders:
        same = shares.get(holder.key, holder)
        idle_since = device.idle_alarms.get(account)
        if idle_since is not None:
            # An alarm begins when the holder has been idle for `idle_after` seconds.
            idle_since -= idle_after or 0.0
        utilization, memory, *_ = own.get(account, _UNKNOWN)
        usage = HolderUsage(utilization, memory, idle_since=idle_since)
        yield replace(holder, share_ratio=same.share_ratio, user=same.user, usage=usage)


def _select_own_figures(device: _Device) -> Mapping[int, Sequence[Any]]:
    """Returns the values of each account with one holder. The containers of a pod have only a
    common sum.

    On a shared GPU, omits copies of the GPU's values (see `_COPY_GPU_VALUES`). They have a power or
    exceed its values.
    """
    holders = Counter(account for account, *_ in device.holders)
    own = {account: device.figures[account] for account in holders if account in device.figures}
    if len(holders) > 1:
        own = {account: figures for account, figures in own.items() if figures[2:] == [None, None]}
        for whole, *values in zip(
            device.figures.get(GPU_ITSELF, _UNKNOWN), *own.values(), strict=True
        ):
            if whole is not None and sum(value or 0 for value in values) > whole * _MAX_SUM:
                return {}
    return {account: figures for account, figures in own.items() if holders[account] == 1}
