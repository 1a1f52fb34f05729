"""Pictures of clusters as flat devices, and the view that the page gets of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from podgpu.cluster.alerts import Alert
from podgpu.cluster.collect import ClusterReading, NodeReading
from podgpu.cluster.parts import Totals
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import build_cluster_state, build_single_node_state
from podgpu.cluster.view import ConditionView, GpuView, NamespaceView, NodeView, PageState, SlotView, View, make_view
from podgpu.metrics.encode import Body, etag_of
from podgpu.model import NodeState
from tests.browser.flat_documents import DeviceFigures, documents_of


@dataclass(frozen=True, slots=True)
class NodePicture:
    name: str
    devices: tuple[DeviceFigures, ...] = ()
    old: bool = False
    age_seconds: float | None = None
    notes: tuple[str, ...] = ()
    simulated: bool = False
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    scope: str
    taken_at: float | None
    interval_seconds: float
    nodes: tuple[NodePicture, ...] = ()
    notes: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    namespaces: tuple[NamespaceView, ...] = ()
    used_utilization: float | None = None
    used_field: str = ""
    idle_after_seconds: float | None = None
    currency: str = ""
    prices: str = ""
    counting_since: float | None = None
    version: str = ""
    simulated: bool = False


def page_of(picture: Picture) -> PageState:
    """`PageState` with the view of the picture."""
    view = view_of(picture)
    plain = msgspec.json.encode(view)
    state = build_cluster_state(ClusterReading(), None, ViewSettings(), 0.0, picture.taken_at or 0.0)
    return PageState(state, view, Body.of(plain), etag_of(plain))


def view_of(picture: Picture) -> View:
    nodes = [_node(node, picture) for node in picture.nodes]
    return View(
        version=picture.version,
        scope=picture.scope,
        taken_at=picture.taken_at,
        interval_seconds=picture.interval_seconds,
        simulated=picture.simulated,
        notes=list(picture.notes),
        alerts=list(picture.alerts),
        used_utilization_ratio=picture.used_utilization,
        used_field=picture.used_field,
        idle_after_seconds=picture.idle_after_seconds,
        counting_since=picture.counting_since,
        currency=picture.currency,
        prices=picture.prices,
        totals=totals_of(nodes, bool(picture.currency)),
        namespaces=list(picture.namespaces),
        nodes=nodes,
    )


def _node(node: NodePicture, picture: Picture) -> NodeView:
    state = NodeState(
        node=node.name, producer="podgpu", exporter_id=node.name, devices=tuple(documents_of(node.devices))
    )
    settings, wall = ViewSettings(idle_after=picture.idle_after_seconds), picture.taken_at or 0.0
    if picture.idle_after_seconds is None:
        made = make_view(build_single_node_state(state, settings, 0.0, wall))
    else:
        made = make_view(build_cluster_state(ClusterReading((NodeReading("", state),)), None, settings, 0.0, wall))
    (view,) = made.nodes
    flat = {(device.uuid, device.instance): device for device in node.devices}
    for gpu in view.gpus:
        if (gpu.uuid, "") in flat:
            _complete(gpu, flat[gpu.uuid, ""], node)
        for instance in gpu.instances:
            _complete(instance, flat[gpu.uuid, instance.id], node)
    view.old, view.gone, view.simulated = node.old, node.gone, node.simulated
    view.age_seconds, view.notes = node.age_seconds, list(node.notes)
    return view


def _complete(slot: SlotView, flat: DeviceFigures, node: NodePicture) -> None:
    """What the flat device says beyond a document: prices, owners, words."""
    slot.price_per_hour = flat.price_per_hour
    slot.energy_joules = flat.energy_joules
    if isinstance(slot, GpuView) and flat.power_watts is not None:
        slot.power_watts = round(flat.power_watts, 1)
    slot.absent = not flat.present
    slot.conditions = [ConditionView(condition=c.name, since=c.since, says=c.says, do=c.do) for c in flat.conditions]
    slot.holders = [
        msgspec.structs.replace(
            holder,
            owner=own.owner,
            cost_per_hour=own.cost_per_hour,
            use="unknown" if node.old or node.gone else holder.use,
        )
        for holder, own in zip(slot.holders, flat.holders, strict=True)
    ]


def totals_of(nodes: list[NodeView], priced: bool) -> Totals:
    gpus = [(node, gpu) for node in nodes for gpu in node.gpus]
    holders = [holder for _, gpu in gpus for slot in _slots(gpu) for holder in slot.holders]
    uses = {use: sum(h.part or 0.0 for h in holders if h.use == use) for use in ("used", "idle", "unknown")}
    costs = [h.cost_per_hour for h in holders if h.cost_per_hour is not None]
    wasted = sum(h.cost_per_hour or 0.0 for h in holders if h.use == "idle")
    has_cost = priced and (bool(costs) or not holders)
    watts = [gpu.power_watts for node, gpu in gpus if gpu.power_watts is not None and not node.old]
    allocated = sum(uses.values())
    return Totals(
        gpus=len(gpus),
        allocated=round(allocated, 4),
        used=round(uses["used"], 4),
        idle=round(uses["idle"], 4),
        unknown=round(uses["unknown"], 4),
        free=round(len(gpus) - allocated, 4),
        broken=sum(any(slot.conditions or slot.absent for slot in _slots(gpu)) for _, gpu in gpus),
        power_watts=sum(watts) if watts else None,
        cost_per_hour=round(sum(costs), 4) if has_cost else None,
        wasted_per_hour=round(wasted, 4) if has_cost else None,
    )


def _slots(gpu: GpuView) -> list[SlotView]:
    return [gpu, *gpu.instances]
