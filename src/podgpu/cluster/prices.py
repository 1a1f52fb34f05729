"""`--prices FILE`: what an hour of a model and a kilowatt-hour cost, and what namespaces owe for what they used.
Reads that file and nothing else.

    currency: EUR
    models:
      "NVIDIA H100 80GB HBM3": {gpu_hour: 2.50, kwh: 0.30}
      "*": {gpu_hour: 1.00, kwh: 0.30}

A MIG instance without a price of its own costs its compute slices' part of the GPU's hour; a kilowatt-hour is one
anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from podgpu.catalog.mig import parent_and_part
from podgpu.cluster.bills import MJ, NS, Amounts, Series
from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange
from podgpu.strict_yaml import StrictMapping, parse_strict

_LARGEST_FILE = 256 * 1024
_ANY = "*"
KINDS = ("allocated", "used", "energy")
_NS_PER_HOUR = 3600 * NS
_MJ_PER_KWH = 3_600_000 * MJ


class Price(NamedTuple):
    """None: nobody says."""

    gpu_hour: Fraction | None = None
    kwh: Fraction | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    currency: str = ""
    """Empty: there are no prices at all."""
    models: Mapping[str, Price] = field(default_factory=dict)

    def of(self, model: str) -> Price:
        """An exporter may write blanks in model names as dashes: both are found."""
        named = self._named(model)
        if named is not None:
            return named
        parent, part = parent_and_part(model)
        whole = self._named(parent) or self.models.get(_ANY) or Price()
        if part == 1:
            return whole
        if whole.gpu_hour is None or part is None:
            return Price(None, whole.kwh)
        return Price(whole.gpu_hour * _exactly(part), whole.kwh)

    def _named(self, model: str) -> Price | None:
        found = self.models.get(model)
        if found is None and model != _ANY:
            dashed = _dashed(model)
            found = next((price for name, price in self.models.items() if _dashed(name) == dashed), None)
        return found


NO_PRICES = Prices()


def _dashed(model: str) -> str:
    return re.sub(r"\s+", "-", model.strip())


def _exactly(part: float) -> Fraction:
    """3/7 again, from what is left of it in a float."""
    return Fraction(part).limit_denominator(64)


def parse_prices(content: bytes, file: str) -> Prices:
    """Raises UsageError that names the place."""
    top = parse_strict(content, file)
    top.allow(("currency", "models"))
    currency, models = top.text("currency"), top.mapping("models")
    if not currency or len(currency) > 16 or not currency.isprintable():
        raise top.complaint("currency", "is missing or no name of a currency: write one such as EUR")
    if not models.names():
        raise top.complaint("models", "names no model: write one, or * for all others")
    return Prices(currency, {name: _price(models, name) for name in models.names()})


def _price(models: StrictMapping, name: str) -> Price:
    entry = models.mapping(name)
    entry.allow(Price._fields)
    price = Price(entry.amount("gpu_hour"), entry.amount("kwh"))
    if price == Price():
        raise models.complaint(name, "has neither gpu_hour nor kwh")
    return price


class PriceFile:
    """The prices as they stand in the file now. What it says wrongly while podgpu runs is told, and what it said before
    stays true."""

    def __init__(self, path: str, file: ReadOnChange[Prices] | None = None) -> None:
        """Raises UsageError where the file is wrong from the start."""
        self._path = path
        self._file = file or ReadOnChange(parse_prices, _LARGEST_FILE)
        try:
            self._prices = self._file.read(path)
        except SourceError as error:
            raise UsageError(f"--prices: {error}") from error

    def read(self) -> tuple[Prices, tuple[str, ...]]:
        """The prices, and what is wrong with the file."""
        try:
            self._prices = self._file.read(self._path)
        except (SourceError, UsageError) as error:
            return self._prices, (f"--prices: {error}; the prices before that stay",)
        return self._prices, ()


ReadPrices = Callable[[], tuple[Prices, tuple[str, ...]]]


# What it comes to


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
