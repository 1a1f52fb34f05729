"""This module owns what namespaces owe for what they used, each moment at its own price. Pure but for what it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from podgpu.cluster.bills import MJ, NS, Amounts, Series
from podgpu.figures.prices import Price, Prices

KINDS = ("allocated", "used", "energy")
_NS_PER_HOUR = 3600 * NS
_MJ_PER_KWH = 3_600_000 * MJ


class CostKey(NamedTuple):
    namespace: str
    kind: str
    currency: str


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
