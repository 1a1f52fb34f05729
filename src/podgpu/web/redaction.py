"""Hides what a user may not see (`--auth kubernetes`).

Holders in other namespaces become one anonymous sum for each device and use, so that sums stay
right. Texts of nodes are left out, because they may name pods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from typing import TypeVar

from msgspec.structs import replace

from podgpu.fleet.parts import add_waste
from podgpu.fleet.view import (
    GpuResponse,
    GpuView,
    HolderView,
    InstanceView,
    NamespaceView,
    NodeView,
    PodResponse,
    View,
    XidView,
)
from podgpu.known import add_known
from podgpu.metrics.conditions import names_workload
from podgpu.model import Workload, group_by
from podgpu.past.events import Event, EventsAnswer
from podgpu.past.gpu_history import DeviceHistory, GpuHistory, HolderSpan, Mark, PodHistory
from podgpu.past.spans import IDLE

Visible = Collection[str]
"""Namespaces that the user may see. Work outside Kubernetes has no namespace and is hidden."""
_Device = TypeVar("_Device", GpuView, InstanceView)
_History = TypeVar("_History", DeviceHistory, GpuHistory)
_Workload = TypeVar("_Workload", bound=Workload)
_SUMMED = (
    "share_ratio",
    "utilization_ratio",
    "memory_used_bytes",
    "power_watts",
    "processes",
    "busy_seconds",
    "idle_seconds",
    "energy_joules",
    "cost_per_hour",
    "part",
)
_NAMESPACE_SUMS = (
    "allocated_gpus",
    "used_gpus",
    "idle_gpus",
    "unknown_gpus",
    "cost_per_hour",
    "wasted_per_hour",
)


def list_namespaces(nodes: Iterable[NodeView]) -> Iterator[str]:
    """Yields the namespaces of all holders, with repetitions."""
    for node in nodes:
        for gpu in node.gpus:
            for device in (gpu, *gpu.instances):
                for holder in (*device.holders, *device.last_holders):
                    yield holder.namespace


def hide_in_view(view: View, visible: Visible) -> View:
    return replace(
        view,
        notes=[],
        alerts=[alert for alert in view.alerts if alert.severity == "broken"],
        namespaces=_hide_namespaces(view.namespaces, visible),
        nodes=[_hide_in_node(node, visible) for node in view.nodes],
    )


def hide_in_pod(answer: PodResponse, visible: Visible) -> PodResponse:
    return replace(answer, nodes=[_hide_in_node(node, visible) for node in answer.nodes])


def hide_in_gpu(answer: GpuResponse, visible: Visible) -> GpuResponse:
    sources = [replace(source, message="") for source in answer.sources]
    gpu = _hide_in_gpu(answer.gpu, visible)
    xids = None
    if answer.xids is not None:
        xids = [_hide_in_xid(xid, visible) for xid in answer.xids]
    return replace(answer, gpu=gpu, xids=xids, sources=sources)


def _hide_in_xid(xid: XidView, visible: Visible) -> XidView:
    culprits = []
    for culprit in xid.culprits:
        if culprit.namespace in visible:
            affected = _select_visible(culprit.affected, visible)
            culprits.append(replace(culprit, affected=affected))
    return replace(xid, culprits=tuple(culprits))


def _hide_in_node(node: NodeView, visible: Visible) -> NodeView:
    gpus = [_hide_in_gpu(gpu, visible) for gpu in node.gpus]
    return replace(node, notes=[], gpus=gpus)


def _hide_in_gpu(gpu: GpuView, visible: Visible) -> GpuView:
    instances = [_hide_in_device(instance, visible) for instance in gpu.instances]
    repair = gpu.repair
    if repair is not None:
        evicts = []
        for pod in repair.evicts:
            namespace, _, _ = pod.partition("/")
            if namespace in visible:
                evicts.append(pod)
        repair = replace(repair, evicts=tuple(evicts))

    device = _hide_in_device(gpu, visible)
    return replace(device, instances=instances, repair=repair)


def _hide_in_device(device: _Device, visible: Visible) -> _Device:
    holders = []
    hidden = []
    for holder in device.holders:
        if holder.namespace in visible:
            waits = _select_visible(holder.waits_for, visible)
            holders.append(replace(holder, waits_for=waits))
        else:
            hidden.append(holder)

    by_use = group_by(hidden, lambda holder: holder.use)
    holders += [_sum_holders(group) for group in by_use.values()]
    # The text of a workload's condition names the container.
    conditions = [each for each in device.conditions if not names_workload(each.condition)]
    last = _select_visible(device.last_holders, visible)
    return replace(device, holders=holders, conditions=conditions, last_holders=last)


def _select_visible(workloads: Iterable[_Workload], visible: Visible) -> tuple[_Workload, ...]:
    return tuple(each for each in workloads if each.namespace in visible)


def _sum_holders(hidden: Sequence[HolderView]) -> HolderView:
    sums = {}
    for name in _SUMMED:
        values = [getattr(holder, name) for holder in hidden]
        sums[name] = reduce(add_known, values)
    wastes = [holder.waste for holder in hidden]
    waste = reduce(add_waste, wastes)
    return HolderView(hidden=True, use=hidden[0].use, waste=waste, **sums)


def _hide_namespaces(rows: Iterable[NamespaceView], visible: Visible) -> list[NamespaceView]:
    shown = []
    hidden: dict[str, NamespaceView] = {}
    for row in rows:
        if row.namespace in visible:
            shown.append(row)
            continue

        anonymous = replace(row, namespace="", hidden=True)
        earlier = hidden.get(row.cluster)
        if earlier is not None:
            for name in _NAMESPACE_SUMS:
                total = add_known(getattr(earlier, name), getattr(row, name))
                setattr(anonymous, name, total)
            anonymous.waste = add_waste(earlier.waste, row.waste)

        hidden[row.cluster] = anonymous

    return [*shown, *hidden.values()]


# The past


def hide_in_events(answer: EventsAnswer, visible: Visible) -> EventsAnswer:
    """Leaves out events of hidden pods. Conditions of GPUs stay."""
    shown = [event for event in answer.events if _is_shown(event, visible)]
    return replace(answer, events=shown)


def _is_shown(event: Event, visible: Visible) -> bool:
    if event.namespace or event.pod or event.kind in ("started", "ended", IDLE):
        return event.namespace in visible
    return not names_workload(event.kind) and not names_workload(event.condition or "")


def hide_in_history(history: _History, visible: Visible) -> _History:
    holders = [_hide_span(span, visible) for span in history.holders]
    hidden = replace(history, holders=holders)
    if isinstance(hidden, GpuHistory):
        hidden.marks = hide_in_marks(hidden.marks)
    return hidden


def hide_in_pod_history(history: PodHistory, visible: Visible) -> PodHistory:
    devices = [hide_in_history(device, visible) for device in history.devices]
    return replace(history, devices=devices, marks=hide_in_marks(history.marks))


def _hide_span(span: HolderSpan, visible: Visible) -> HolderSpan:
    if span.namespace in visible:
        return span
    return HolderSpan(from_=span.from_, to=span.to, hidden=True)


def hide_in_marks(marks: Iterable[Mark]) -> list[Mark]:
    """Leaves out marks whose text names a pod."""
    not_idle = (mark for mark in marks if mark.condition != IDLE)
    return [mark for mark in not_idle if not names_workload(mark.condition)]


def list_event_namespaces(answer: EventsAnswer) -> Iterator[str]:
    return (event.namespace for event in answer.events)


def list_held_namespaces(histories: Iterable[DeviceHistory]) -> Iterator[str]:
    """Yields the namespaces of all past holders, with repetitions."""
    for history in histories:
        for span in history.holders:
            yield span.namespace
