"""This module owns what namespaces cost: what an hour of what they hold costs now, and what they owe for what they
used, each moment at its own price. Pure but for what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from podgpu.cluster.bills import MJ, NS, Amounts, Series
from podgpu.cluster.idle import IdleHolder
from podgpu.cluster.nodes import NodeView
from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.figures.prices import Price, Prices, PriceTags
from podgpu.figures.totals import Tallies, Use, is_blind, use_of

KINDS = ("allocated", "used", "energy")
_NS_PER_HOUR = 3600 * NS
_MJ_PER_KWH = 3_600_000 * MJ


class CostKey(NamedTuple):
    namespace: str
    kind: str
    currency: str


class Hourly(NamedTuple):
    """What an hour costs now."""

    cost: float
    wasted: float
    """Of that, what is held and idle."""


def hourly_costs(nodes: Iterable[NodeView], idle: Iterable[IdleHolder], prices: Prices) -> dict[str, Hourly]:
    """By namespace, of what has a price: what the page has as `cost_per_hour` and `wasted_per_hour`, without a picture
    being made of every round."""
    if not prices.currency:
        return {}
    resting = {(id(one.device), one.of.who) for one in idle}
    tags = PriceTags(prices)

    def use(device: DeviceFigures, of: HolderFigures) -> Use:
        is_resting = (id(device), of.who) in resting and not is_blind(device)
        return "idle" if is_resting else use_of(device, of, watched=True)

    def cost(device: DeviceFigures, _of: HolderFigures, part: int, whole: int) -> float | None:
        price = tags.hour(device)
        return None if price is None else float(price) * part / (whole or 1)

    tallies = Tallies(use, cost)
    for node in nodes:
        tallies.add_node(node.devices, node.old)
    found = {name: tally.totals(priced=True) for name, tally in tallies.namespaces.items()}
    return {
        name: Hourly(of.cost_per_hour, of.wasted_per_hour)
        for name, of in found.items()
        if of.cost_per_hour is not None and of.wasted_per_hour is not None
    }


class CostLedger:
    """What was used in each round, at the price of that round. Exact fractions; never goes down."""

    def __init__(self) -> None:
        self._costs: dict[CostKey, Fraction] = {}
        self._unpriced: dict[str, int] = {}

    def charge(self, gains: Mapping[Series, Amounts], prices: Prices) -> None:
        """What has no price is counted as unpriced, where there are prices at all."""
        if not prices.currency:
            return
        price_of: dict[str, Price] = {}
        for (namespace, model), gain in gains.items():
            price = price_of.get(model)
            if price is None:
                price = price_of[model] = prices.of(model)
            for kind, cost in _costs(gain, price):
                key = CostKey(namespace, kind, prices.currency)
                self._costs[key] = self._costs.get(key, Fraction(0)) + cost
            if price.gpu_hour is None and gain.allocated is not None:
                self._unpriced[model] = self._unpriced.get(model, 0) + gain.allocated

    def totals(self) -> dict[CostKey, float]:
        return {key: float(cost) for key, cost in self._costs.items()}

    def unpriced(self) -> dict[str, float]:
        """Model -> GPU seconds."""
        return {model: ns / NS for model, ns in self._unpriced.items()}

    def keep(self, accounts: Iterable[Series]) -> None:
        """Forgets the namespaces and models whose accounts were closed."""
        namespaces, models = set[str](), set[str]()
        for namespace, model in accounts:
            namespaces.add(namespace)
            models.add(model)
        if any(key.namespace not in namespaces for key in self._costs):
            self._costs = {key: cost for key, cost in self._costs.items() if key.namespace in namespaces}
        if not self._unpriced.keys() <= models:
            self._unpriced = {model: ns for model, ns in self._unpriced.items() if model in models}


def _costs(gain: Amounts, price: Price) -> Iterator[tuple[str, Fraction]]:
    for kind, amount, unit_price, unit in (
        ("allocated", gain.allocated, price.gpu_hour, _NS_PER_HOUR),
        ("used", gain.busy, price.gpu_hour, _NS_PER_HOUR),
        ("energy", gain.energy, price.kwh, _MJ_PER_KWH),
    ):
        if amount is not None and unit_price is not None:
            yield kind, unit_price * amount / unit
