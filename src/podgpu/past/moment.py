"""Builds the state of a past time from its records.

What the history does not have, such as models, is that of now.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from podgpu.charge import HeldTime
from podgpu.errors import Note
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import HeldPart
from podgpu.fleet.readings import NodeReading
from podgpu.fleet.state import ClusterState, complete_node
from podgpu.known import select_known
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import (
    Condition,
    DeviceState,
    DeviceTotals,
    GpuOrInstance,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    PodName,
    WorkloadOwner,
    group_by,
)

_NOTE = (
    "the history has no processes, waiting times, DCGM fields and reservations; pods that have"
    " ended count with equal shares; costs are computed with the current prices"
)
_UNKNOWN_STATE = NodeState(producer="podgpu")
_UNKNOWN_NODE = NodeEntry(NodeReading("", _UNKNOWN_STATE), _UNKNOWN_STATE)
_UNKNOWN_GPU = DeviceState()
_UNKNOWN_INSTANCE = MigInstance(id=0)
# The values of all holders may exceed the GPU's by this factor, because pods start within a step.
_MAX_SUM = 1.05
_SAMPLES = "samples"


class RecordedValues(NamedTuple):
    """Means of a device, or of one account on it."""

    utilization: float | None = None
    memory: int | None = None  # bytes
    power: int | None = None  # milliwatts
    temperature: float | None = None  # degrees Celsius


_NO_VALUES = RecordedValues()


class HolderRecord(NamedTuple):
    account: int
    methods: str  # names of the methods that measured it, separated by spaces
    owner: WorkloadOwner | None
    holder: Holder


@dataclass(slots=True)
class DeviceRecord:
    """What is recorded of one GPU or MIG instance."""

    node: str
    uuid: str
    instance: str
    gpu_index: int | None
    values: RecordedValues | None = None  # of the device itself
    account_values: dict[int, RecordedValues] = field(default_factory=dict)
    conditions: list[Condition] = field(default_factory=list)
    holders: list[HolderRecord] = field(default_factory=list)
    idle_alarms: dict[int, float] = field(default_factory=dict)  # account -> start

    @property
    def has_reading(self) -> bool:
        return bool(self.values or self.account_values or self.conditions)


def make_past_state(
    devices: Iterable[DeviceRecord], at: float, step_seconds: int, current: ClusterState
) -> ClusterState:
    """Returns the state at the Unix time `at`. `devices`: those that have a record of it."""
    devices_by_node = group_by(devices, lambda device: device.node)
    now = {node.name: node for node in current.nodes}
    nodes = []
    for name, own in devices_by_node.items():
        node_now = now.get(name, _UNKNOWN_NODE)
        nodes.append(_make_node(name, own, at, node_now, current))

    return dataclasses.replace(
        current,
        taken_at=at,
        is_past=True,
        step_seconds=step_seconds,
        nodes=tuple(nodes),
        notes=(Note("past", _NOTE),),
        alerts=(),
        used={},
    )


def _make_node(
    name: str, devices: Sequence[DeviceRecord], at: float, now: NodeEntry, current: ClusterState
) -> NodeEntry:
    """Builds one node of the past state. `now`: the same node in the current state."""
    gpus = _make_gpus(devices, now.state, current.settings.idle_after)
    state = NodeState(
        producer="podgpu",
        node=name,
        devices=tuple(gpus),
        simulated=now.state.simulated,
    )

    gone_since = _find_gone_since(devices, at)
    is_gone = gone_since is not None
    age = 0.0 if gone_since is None else at - gone_since
    read_at = at - age - current.clock_offset
    has_reading = any(device.has_reading for device in devices)
    entry = NodeEntry(
        NodeReading("", state, read_at, labels=now.reading.labels),
        state,
        age_seconds=age,
        stale=is_gone or not has_reading,
        gone=is_gone,
    )

    owners = _find_owners(devices)
    entry = complete_node(entry, None, current.prices, current.clock_offset, owners)
    held = tuple(_estimate_underuse(part) for part in entry.held)
    return replace(entry, held=held)


def _find_owners(devices: Iterable[DeviceRecord]) -> dict[PodName, WorkloadOwner]:
    owners = {}
    for device in devices:
        for record in device.holders:
            if record.owner is not None:
                owners[record.holder.pod_name] = record.owner
    return owners


def _estimate_underuse(part: HeldPart) -> HeldPart:
    """Sets what the holder did not use of its share, by the mean utilisation of the step."""
    used = part.holder.known_usage.utilization_ratio
    # Samples of a shared GPU are inexact. Only what nobody used is certainly unused.
    if part.device.known_usage.method == _SAMPLES:
        used = part.device.utilization_ratio
    if used is None:
        return part

    underused = max(0.0, part.share - used)
    return replace(part, spent=HeldTime(1.0, part.share, underused=underused))


def _find_gone_since(devices: Sequence[DeviceRecord], at: float) -> float | None:
    """Returns the time when the node stopped answering. None if it answered at the time `at`."""
    for device in devices:
        for condition in device.conditions:
            if condition.name == NODE_GONE:
                return condition.since or at
    return None


def _make_gpus(
    devices: Sequence[DeviceRecord], now: NodeState, idle_after: float | None
) -> Iterator[DeviceState]:
    """`now`: the same node in the current state."""
    current_gpus = {gpu.uuid: gpu for gpu in now.devices}
    for uuid, parts in group_by(devices, lambda device: device.uuid).items():
        gpu_now = current_gpus.get(uuid, _UNKNOWN_GPU)
        yield _make_gpu(parts, gpu_now, idle_after)


def _make_gpu(
    devices: Sequence[DeviceRecord], now: DeviceState, idle_after: float | None
) -> DeviceState:
    """Builds a GPU of its own rows and those of its MIG instances.

    `now`: the same GPU in the current state.
    """
    first = devices[0]
    # Without rows of its own, the GPU is not shown: only its instances are recorded.
    gpu = DeviceState(uuid=first.uuid, index=first.gpu_index, model=now.model, hidden=True)
    current_instances = {str(instance.id): instance for instance in now.instances}
    instances = []
    conditions = {}
    for device in devices:
        if device.instance:
            instance_now = current_instances.get(device.instance, _UNKNOWN_INSTANCE)
            instance = MigInstance(
                id=int(device.instance),
                profile=instance_now.profile,
                **_make_common_fields(device, instance_now, idle_after),
            )
            instances.append(instance)
        else:
            values = device.values or _NO_VALUES
            gpu = replace(
                gpu,
                hidden=False,
                power_mw=values.power,
                temperature_celsius=values.temperature,
                **_make_common_fields(device, now, idle_after),
            )

        for condition in device.conditions:
            if condition.name != NODE_GONE:
                conditions[condition.name] = condition

    return replace(gpu, instances=tuple(instances), conditions=tuple(conditions.values()))


def _make_common_fields(
    device: DeviceRecord, now: GpuOrInstance, idle_after: float | None
) -> dict[str, Any]:
    """Returns the fields that a GPU and a MIG instance have in common."""
    values = device.values or _NO_VALUES
    method = _find_method(device)
    return {
        "utilization_ratio": values.utilization,
        "memory_used_bytes": values.memory,
        "memory_total_bytes": now.memory_total_bytes,
        "holders": tuple(_make_holders(device, now.holders, idle_after)),
        "usage": DeviceTotals(method=method) if method else None,
    }


def _find_method(device: DeviceRecord) -> str:
    """Returns the method that measured the holders, as far as their figures depend on it."""
    method = ""
    for record in device.holders:
        methods = record.methods.split()
        holder_values = device.account_values.get(record.account)
        # Clients that share an MPS server have values, but no utilisation.
        has_no_use = holder_values is not None and holder_values.utilization is None
        if "mps" in methods and has_no_use:
            return "mps"
        if _SAMPLES in methods:
            method = _SAMPLES

    return method


def _make_holders(
    device: DeviceRecord, current: Sequence[Holder], idle_after: float | None
) -> Iterator[Holder]:
    values_of = _select_own_values(device)
    current_by_key = {holder.key: holder for holder in current}
    for record in device.holders:
        holder = record.holder
        # Shares, and the users of jobs, are not stored: take them from the same holder now.
        same_now = current_by_key.get(holder.key, holder)
        idle_since = device.idle_alarms.get(record.account)
        if idle_since is not None:
            # An alarm begins when the holder has been idle for `idle_after` seconds.
            idle_since -= idle_after or 0.0

        values = values_of.get(record.account, _NO_VALUES)
        usage = HolderUsage(values.utilization, values.memory, idle_since=idle_since)
        yield replace(holder, share_ratio=same_now.share_ratio, user=same_now.user, usage=usage)


def _select_own_values(device: DeviceRecord) -> dict[int, RecordedValues]:
    """Returns the values of each account with one holder.

    The containers of a pod have only a common sum. On a shared GPU, omits copies of the GPU's
    values (see `_COPY_GPU_VALUES`). They have a power or exceed its values.
    """
    number_of_holders = Counter(record.account for record in device.holders)
    is_shared = len(number_of_holders) > 1
    own_values = {}
    for account in number_of_holders:
        values = device.account_values.get(account, _NO_VALUES)
        is_copy = values.power is not None or values.temperature is not None
        if not (is_shared and is_copy):
            own_values[account] = values

    if is_shared:
        gpu = device.values or _NO_VALUES
        utilizations = [values.utilization for values in own_values.values()]
        memory = [values.memory for values in own_values.values()]
        if _exceed(utilizations, gpu.utilization) or _exceed(memory, gpu.memory):
            return {}

    single = {}
    for account, values in own_values.items():
        if number_of_holders[account] == 1:
            single[account] = values
    return single


def _exceed(values: Iterable[float | None], gpu_value: float | None) -> bool:
    """Returns whether the values of holders add up to more than that of the GPU."""
    if gpu_value is None:
        return False
    return sum(select_known(values)) > gpu_value * _MAX_SUM
