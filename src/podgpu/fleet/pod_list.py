"""The JSON of `/api/v1/pods` (docs/api.md): one row for each pod, job or user that holds a GPU.

Rows are sums over the holders of a view. So they have the same figures as the page, and show what
the view shows: if a user may not see a namespace, its holders are one row without a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from podgpu.charge import Waste
from podgpu.fleet.parts import WasteRate
from podgpu.fleet.view import Answer, HolderView, NodeView, View
from podgpu.known import add_known, mean_known, round_known
from podgpu.model import Workload, WorkloadOwner, group_by_key

# Decimal places, as in the view.
_GPU_DIGITS = 6
_MONEY_DIGITS = 4


class PodRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    cluster: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    user: str = ""
    uid: str = ""  # without a pod's name
    container_id: str = ""
    hidden: bool = False  # True for the sum of the holders that the user may not see
    owner: WorkloadOwner | None = None
    nodes: list[str]
    allocated_gpus: float
    used_gpus: float
    idle_gpus: float
    unknown_gpus: float
    utilization_ratio: float | None = None  # mean, weighted by the part of a GPU
    memory_used_bytes: int | None = None
    wait_ratio: float | None = None  # mean over its devices
    idle_since: float | None = None  # None if a part of it is in use
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None  # cost of idle GPUs
    waste: WasteRate | None = None

    @property
    def name(self) -> str:
        if self.hidden:
            return "other namespaces"

        workload = Workload(
            self.namespace,
            self.pod,
            uid=self.uid,
            container_id=self.container_id,
            job=self.job,
            user=self.user,
        )
        return workload.text or "unknown holder"


class PodsResponse(Answer, kw_only=True):
    """`/api/v1/pods`."""

    taken_at: float | None = None
    simulated: bool = False
    currency: str = ""
    prices: str = ""
    pods: list[PodRow]


class _RowKey(NamedTuple):
    cluster: str
    hidden: bool
    namespace: str
    pod: str
    job: str
    user: str
    uid: str
    container_id: str


class _Held(NamedTuple):
    """One holder on one device."""

    holder: HolderView
    node: str
    utilization: float | None
    memory: int | None


def make_pods(view: View) -> PodsResponse:
    groups = group_by_key(_list_held(view.nodes))
    rows = [_make_row(key, held) for key, held in groups.items()]
    rows.sort(key=lambda row: (row.hidden, row.cluster, row.namespace, row.name))

    return PodsResponse(
        taken_at=view.taken_at,
        simulated=view.simulated,
        currency=view.currency,
        prices=view.prices,
        pods=rows,
    )


def _list_held(nodes: Iterable[NodeView]) -> Iterator[tuple[_RowKey, _Held]]:
    for node in nodes:
        for gpu in node.gpus:
            for device in (gpu, *gpu.instances):
                is_sole = len(device.holders) == 1
                for holder in device.holders:
                    utilization = holder.utilization_ratio
                    memory = holder.memory_used_bytes
                    if is_sole and utilization is None:
                        utilization = device.utilization_ratio
                    if is_sole and memory is None:
                        memory = device.memory_used_bytes
                    # Figures of a stale node are those of an earlier time.
                    if node.old:
                        utilization = None
                        memory = None

                    held = _Held(holder, node.name, utilization, memory)
                    yield _make_key(node.cluster, holder), held


def _make_key(cluster: str, holder: HolderView) -> _RowKey:
    is_named = bool(holder.pod or holder.job)
    return _RowKey(
        cluster=cluster,
        hidden=holder.hidden,
        namespace=holder.namespace,
        pod=holder.pod,
        job=holder.job,
        user=holder.user,
        uid="" if is_named else holder.uid,
        container_id="" if is_named else holder.container_id,
    )


def _make_row(key: _RowKey, held: Sequence[_Held]) -> PodRow:
    row = PodRow(
        **key._asdict(),
        nodes=[],
        allocated_gpus=0.0,
        used_gpus=0.0,
        idle_gpus=0.0,
        unknown_gpus=0.0,
    )
    waste = WasteRate()
    for each in held:
        holder = each.holder
        _add_gpus(row, holder)
        if each.node not in row.nodes:
            row.nodes.append(each.node)

        row.memory_used_bytes = add_known(row.memory_used_bytes, each.memory)
        row.cost_per_hour = add_known(row.cost_per_hour, holder.cost_per_hour)
        row.owner = row.owner or holder.owner
        waste = waste.plus(holder.waste or WasteRate())

    row.allocated_gpus = round(row.allocated_gpus, _GPU_DIGITS)
    row.used_gpus = round(row.used_gpus, _GPU_DIGITS)
    row.idle_gpus = round(row.idle_gpus, _GPU_DIGITS)
    row.unknown_gpus = round(row.unknown_gpus, _GPU_DIGITS)
    row.utilization_ratio = round_known(_mean_utilization(held))
    row.wait_ratio = round_known(mean_known(each.holder.wait_ratio for each in held))
    row.idle_since = _find_idle_since(held)
    row.cost_per_hour = round_known(row.cost_per_hour)
    row.waste = waste.rounded()
    # `wasted_per_hour` is older than `waste`. It still counts idle GPUs only.
    if row.cost_per_hour is not None:
        waste_cost = waste.cost_per_hour or Waste()
        row.wasted_per_hour = round(waste_cost.idle or 0.0, _MONEY_DIGITS)

    return row


def _add_gpus(row: PodRow, holder: HolderView) -> None:
    part = holder.part or 0.0
    row.allocated_gpus += part
    if holder.use == "used":
        row.used_gpus += part
    elif holder.use == "idle":
        row.idle_gpus += part
    else:
        row.unknown_gpus += part


def _mean_utilization(held: Iterable[_Held]) -> float | None:
    """Returns the mean, weighted by the part of a GPU."""
    busy = 0.0
    weights = 0.0
    for each in held:
        if each.utilization is not None:
            weight = each.holder.part or 1.0
            busy += each.utilization * weight
            weights += weight

    if not weights:
        return None

    return busy / weights


def _find_idle_since(held: Iterable[_Held]) -> float | None:
    """Returns since when all parts are idle. None if one is in use."""
    times = []
    for each in held:
        holder = each.holder
        if holder.use != "idle" or holder.idle_since is None:
            return None
        times.append(holder.idle_since)
    return max(times)
