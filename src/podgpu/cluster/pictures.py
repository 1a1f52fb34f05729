"""This module makes of the view the picture that people look at: the web page, `top --cluster`, `/api/v1`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from podgpu import __version__
from podgpu.cluster.bills import MJ, NS, Amounts
from podgpu.cluster.costs import KINDS
from podgpu.cluster.nodes import NodeView
from podgpu.cluster.view import ClusterView
from podgpu.figures.device import DeviceFigures
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.figures.prices import PriceTags, with_prices
from podgpu.figures.totals import Totals, namespace_totals, with_totals
from podgpu.metrics.mig import parent_and_part
from podgpu.model import Who

_NS_PER_HOUR = 3600 * NS
_MJ_PER_KWH = 3_600_000 * MJ
IdleSince = Mapping[int, Mapping[Who, float]]
"""id() of a device of the view, which holds it fast -> idle holder -> Unix time."""


def picture_of(view: ClusterView) -> Picture:
    idle, tags, priced = _idle_since(view), PriceTags(view.prices), bool(view.prices.currency)
    nodes = tuple(_node(node, view, idle, tags if priced else None) for node in view.nodes)
    return Picture(
        scope="cluster",
        taken_at=view.taken_at,
        interval_seconds=view.settings.interval,
        nodes=nodes,
        notes=tuple(dict.fromkeys((*(alert.text for alert in view.alerts), *view.notes))),
        alerts=view.alerts,
        namespaces=_namespaces(view, namespace_totals(nodes, watched=True, priced=priced)),
        used_utilization=view.used_ratio,
        used_field=view.settings.used_field,
        idle_after_seconds=view.settings.idle_after,
        currency=view.prices.currency,
        prices=view.prices.source if priced else "",
        counting_since=view.counting_since,
        version=__version__,
        simulated=any(node.simulated for node in nodes),
    )


def _idle_since(view: ClusterView) -> IdleSince:
    found: dict[int, dict[Who, float]] = {}
    for idler in view.idle:
        found.setdefault(id(idler.device), {})[idler.of.who] = idler.since
    return found


def _node(node: NodeView, view: ClusterView, idle: IdleSince, tags: PriceTags | None) -> NodePicture:
    devices = tuple([_with_what_is_known(device, view, idle.get(id(device), {})) for device in node.devices])
    if tags is not None:
        devices = with_prices(devices, tags)
    age = round(node.age, 1)
    return NodePicture(node.name, devices, node.old, age, node.notes, node.simulated, node.gone)


def _with_what_is_known(device: DeviceFigures, view: ClusterView, idle: Mapping[Who, float]) -> DeviceFigures:
    """Since when its holders are idle, and what made them."""
    if not device.holders or not (idle or view.owners):
        return device
    owners = view.owners
    return replace(
        device,
        holders=tuple(
            [
                replace(of, idle_since=idle.get(of.who), owner=owners.get((of.holder.namespace, of.holder.pod)))
                for of in device.holders
            ]
        ),
    )


# Namespaces


def _namespaces(view: ClusterView, held: Mapping[str, Totals]) -> tuple[NamespacePicture, ...]:
    bills: dict[str, list[tuple[str, Amounts]]] = {}
    for (namespace, model), amounts in sorted(view.bills.items()):
        bills.setdefault(namespace, []).append((model, amounts))
    currency = view.prices.currency
    costs = {(key.namespace, key.kind): cost for key, cost in view.costs.items() if key.currency == currency}
    names = sorted((held.keys() | bills.keys()) - {""})
    hours = (_hours(name, bills.get(name, []), costs) for name in names)
    return tuple(with_totals(of, held.get(of.namespace), bool(currency)) for of in hours)


def _hours(name: str, bills: Iterable[tuple[str, Amounts]], costs: Mapping[tuple[str, str], float]) -> NamespacePicture:
    bills = list(bills)
    return NamespacePicture(
        name,
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
