"""This module makes the picture of one node, from its agent's snapshot: what the exporter's own page shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from podgpu.figures.device import Alert
from podgpu.figures.from_state import view_of_state
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.figures.prices import NO_PRICES, Prices, PriceTags, unpriced_note, with_prices
from podgpu.figures.totals import namespace_totals, with_totals
from podgpu.metrics.mig import part_of_gpu
from podgpu.node_state import NamespaceUsage, NodeState

_NS_PER_HOUR = 3_600 * 1_000_000_000
_MJ_PER_KWH = 3_600_000_000


def node_picture(
    state: NodeState,
    node: str,
    interval: float,
    notes: Sequence[str] = (),
    *,
    fresh: bool = True,
    version: str = "",
    prices: Prices = NO_PRICES,
) -> Picture:
    """`fresh`: False when the figures are too old to be shown. Then the node is there, old, without any, and the first
    of the notes says why."""
    view, tags = view_of_state(state, node), PriceTags(prices)
    devices = with_prices(view.devices, tags) if prices.currency and fresh else view.devices
    shown = NodePicture(node, devices if fresh else (), old=not fresh, simulated=view.simulated)
    alerts = view.alerts if fresh else tuple(Alert("broken", text, node) for text in notes[:1])
    texts = (alert.text for alert in alerts)
    return Picture(
        scope="node",
        taken_at=state.taken_at,
        interval_seconds=interval,
        nodes=(shown,),
        notes=tuple(dict.fromkeys((*texts, *notes, *unpriced_note(tags.without(), prices)))),
        alerts=alerts,
        namespaces=tuple(_namespaces(shown, state.namespaces, bool(prices.currency))) if fresh else (),
        version=version,
        simulated=view.simulated,
        currency=prices.currency,
        prices=prices.source if prices.currency else "",
    )


def _namespaces(node: NodePicture, counted: Sequence[NamespaceUsage], priced: bool) -> Iterator[NamespacePicture]:
    held = namespace_totals((node,), watched=False, priced=priced)
    for name in sorted((held.keys() | {t.namespace for t in counted}) - {""}):
        of = [t for t in counted if t.namespace == name]
        hours = NamespacePicture(
            name,
            allocated_hours=_sum((t.allocated_ns or 0) * _part(t) / _NS_PER_HOUR for t in of),
            busy_hours=_sum(t.busy_ns * _part(t) / _NS_PER_HOUR for t in of if t.busy_ns is not None),
            energy_kwh=_sum(t.energy_mj / _MJ_PER_KWH for t in of if t.energy_mj is not None),
        )
        yield with_totals(hours, held.get(name), priced)


def _part(of: NamespaceUsage) -> float:
    """Part of a GPU."""
    return (part_of_gpu(of.model, of.profile) or 0.0) if of.profile else 1.0


def _sum(amounts: Iterable[float]) -> float | None:
    """None where there is nothing to sum."""
    known = list(amounts)
    return sum(known) if known else None
