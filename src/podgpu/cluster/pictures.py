"""The view as the picture that people look at: the web page, `top --cluster`, `/api/v1`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from podgpu import __version__
from podgpu.catalog.mig import parent_and_part
from podgpu.cluster.bills import MJ, NS, Amounts
from podgpu.cluster.counts import WHOLE
from podgpu.cluster.nodes import NodeView
from podgpu.cluster.prices import KINDS
from podgpu.cluster.view import ClusterView
from podgpu.figures.device import DeviceFigures
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.model import Who

_NS_PER_HOUR = 3600 * NS
_MJ_PER_KWH = 3_600_000 * MJ
IdleSince = Mapping[int, Mapping[Who, float]]
"""id() of a device of the view, which holds it fast -> idle holder -> Unix time."""


def picture_of(view: ClusterView) -> Picture:
    idle = _idle_since(view)
    return Picture(
        scope="cluster",
        taken_at=view.taken_at,
        interval_seconds=view.settings.interval,
        nodes=tuple(_node(node, idle) for node in view.nodes),
        notes=tuple(dict.fromkeys((*(alert.text for alert in view.alerts), *view.notes))),
        alerts=view.alerts,
        namespaces=_namespaces(view),
        used_utilization=view.used_ratio,
        used_field=view.settings.used_field,
        idle_after_seconds=view.settings.idle_after,
        currency=view.currency,
        counting_since=view.counting_since,
        version=__version__,
        simulated=view.settings.simulated,
    )


def _idle_since(view: ClusterView) -> IdleSince:
    found: dict[int, dict[Who, float]] = {}
    for one in view.idle:
        found.setdefault(id(one.device), {})[one.of.who] = one.since
    return found


def _node(node: NodeView, idle: IdleSince) -> NodePicture:
    devices = tuple(_with_idle(d, idle[id(d)]) if id(d) in idle else d for d in node.devices)
    return NodePicture(node.name, devices, node.old, round(node.age, 1), node.notes, node.gone)


def _with_idle(device: DeviceFigures, idle: Mapping[Who, float]) -> DeviceFigures:
    return replace(device, holders=tuple(replace(of, idle_since=idle.get(of.who)) for of in device.holders))


# Namespaces


@dataclass(slots=True)
class _Held:
    """In GPUs: a MIG instance is as much of one as its compute slices are."""

    allocated: float = 0.0
    used: float | None = None
    """None: of no part of it is it known."""
    idle: float = 0.0


def _namespaces(view: ClusterView) -> tuple[NamespacePicture, ...]:
    held: dict[str, _Held] = {}
    for (namespace, model), count in sorted(view.counts.namespaces.items()):
        of, part = held.setdefault(namespace, _Held()), _part(model) / WHOLE
        of.allocated += count.allocated * part
        if count.used is not None:
            of.used = (of.used or 0.0) + count.used * part
        of.idle += count.idle * part
    bills: dict[str, list[tuple[str, Amounts]]] = {}
    for (namespace, model), amounts in sorted(view.bills.items()):
        bills.setdefault(namespace, []).append((model, amounts))
    costs = {(key.namespace, key.kind): cost for key, cost in view.costs.items() if key.currency == view.currency}
    names = sorted((held.keys() | bills.keys()) - {""})
    nothing = _Held(used=0.0)
    return tuple(_namespace(name, held.get(name, nothing), bills.get(name, []), costs) for name in names)


def _namespace(
    name: str, held: _Held, bills: Iterable[tuple[str, Amounts]], costs: Mapping[tuple[str, str], float]
) -> NamespacePicture:
    bills = list(bills)
    return NamespacePicture(
        name,
        allocated_gpus=held.allocated,
        used_gpus=held.used,
        idle_gpus=held.idle,
        allocated_hours=_sum(a.allocated * _part(m) / _NS_PER_HOUR for m, a in bills if a.allocated is not None),
        busy_hours=_sum(a.busy * _part(m) / _NS_PER_HOUR for m, a in bills if a.busy is not None),
        energy_kwh=_sum(a.energy / _MJ_PER_KWH for _, a in bills if a.energy is not None),
        cost=tuple((kind, costs[name, kind]) for kind in KINDS if (name, kind) in costs),
    )


def _part(model: str) -> float:
    return parent_and_part(model)[1] or 0.0


def _sum(amounts: Iterable[float]) -> float | None:
    """None where there is nothing to sum."""
    known = list(amounts)
    return sum(known) if known else None
