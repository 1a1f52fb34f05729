"""Prices of GPU hours by model, read from `--prices FILE` or `--prices example`.

currency: EUR
models:
  "NVIDIA H100 80GB HBM3": {gpu_hour: 2.50}
  "*": {gpu_hour: 1.00}
nodes:  # optional: prices of nodes that have all of these labels; the first match is used
  - {labels: {karpenter.sh/capacity-type: spot}, factor: 0.4}
  - {labels: {reserved: "true"}, models: {"NVIDIA H100 80GB HBM3": {gpu_hour: 1.80}}}
changes:  # optional: prices that are valid from a date (UTC) on
  - from: 2026-12-01
    models: {"NVIDIA H100 80GB HBM3": {gpu_hour: 2.00}}
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from podgpu.errors import Note, UsageError
from podgpu.files import read_last_valid
from podgpu.metrics.mig import parent_and_fraction

PriceSource = Literal["", "example", "file"]
EXAMPLE = "example"
_EXAMPLE_FILE = "example_prices.yml"
_OTHERS = "*"
_MAX_FILE_BYTES = 256 * 1024
_CACHED_MODELS = 1024  # exporters choose the names of models, so the cache needs a limit
_Money = Annotated[float, Meta(ge=0, le=1e12)]  # the upper limit excludes infinity


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The price of one model. `gpu_hour` is None if it is not in the file."""

    gpu_hour: _Money | None = None


class _NodePrices(msgspec.Struct, forbid_unknown_fields=True):
    """Prices of the nodes that have all of `labels`.

    Models that are not in `models` cost `factor` times as much.
    """

    labels: Annotated[dict[str, str], Meta(min_length=1)]
    factor: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    models: dict[str, Price] = {}


class _PriceChange(msgspec.Struct, forbid_unknown_fields=True):
    from_: date = msgspec.field(name="from")
    models: dict[str, Price] = {}
    nodes: list[_NodePrices] | None = None  # None: keep the earlier rules


class _PriceFile(msgspec.Struct, forbid_unknown_fields=True):
    currency: Annotated[str, Meta(min_length=1, max_length=16)]
    models: Annotated[dict[str, Price], Meta(min_length=1)]
    nodes: list[_NodePrices] = []
    changes: list[_PriceChange] = []


class Prices:
    """Prices by model, valid until the first price change.

    If there are no prices, `currency` is empty.
    """

    def __init__(
        self,
        currency: str,
        models: Mapping[str, Price],
        source: PriceSource = "file",
        changes: Sequence[tuple[float, Prices]] = (),
        nodes: Sequence[tuple[Mapping[str, str], Prices]] = (),
    ) -> None:
        """`changes`: Unix time of each price change, and all prices after it.

        `nodes`: labels, and the prices of nodes that have all of these labels.
        """
        self.changes = changes
        # Each `Prices` of a node has no `nodes` itself.
        self.nodes = list(nodes)
        if nodes:
            # The last rule has no labels, so it matches all other nodes.
            self.nodes.append(({}, Prices(currency, models, source)))
        self.currency = currency
        self.models = models
        self.source: PriceSource = source if currency else ""
        self._by_name = {_dashed(name): price for name, price in models.items()}
        self.of: Callable[[str], Price] = lru_cache(maxsize=_CACHED_MODELS)(self._find)
        """Returns the price of `<model>` or `<model> MIG <profile>`.

        A dash in a name matches a space. A MIG profile that is not in the file costs the GPU's
        price times its fraction of the compute slices. If prices depend on node labels, returns no
        price: call `on_node` first.
        """

    @property
    def label_names(self) -> list[str]:
        """Names of the node labels on which prices depend, now or after a price change."""
        all_prices = [self]
        all_prices += [prices for _, prices in self.changes]
        names: set[str] = set()
        for prices in all_prices:
            for labels, _ in prices.nodes:
                names.update(labels)
        return sorted(names)

    def on_node(self, labels: Mapping[str, str] | None) -> Prices:
        """Returns the prices of a node.

        If its labels are unknown (None) and prices depend on them, it has no price: `of` of a
        `Prices` with rules for nodes returns none.
        """
        if labels is None:
            return self
        for wanted, prices in self.nodes:
            if wanted.items() <= labels.items():
                return prices
        return self

    def periods(self, start: float, end: float) -> Iterator[tuple[float, float, Prices]]:
        """Splits the range where prices change. Yields start, end and prices of each period."""
        valid_from = -math.inf
        prices = self
        for changed_at, next_prices in self.changes:
            if valid_from < end and changed_at > start:
                yield max(valid_from, start), min(changed_at, end), prices
            valid_from = changed_at
            prices = next_prices

        if valid_from < end:
            yield max(valid_from, start), end, prices

    def at(self, time: float) -> Prices:
        valid = self
        for start, prices in self.changes:
            if start <= time:
                valid = prices
        return valid

    def _find(self, model: str) -> Price:
        if self.nodes:
            return Price()

        price = self._by_name.get(_dashed(model))
        if price is not None:
            return price

        parent, fraction = parent_and_fraction(model)
        whole = self._by_name.get(_dashed(parent)) or self.models.get(_OTHERS) or Price()
        if whole.gpu_hour is None or fraction is None:
            return Price()

        return Price(whole.gpu_hour * fraction)


NO_PRICES = Prices("", {})
ReadPrices = Callable[[], tuple[Prices, tuple[Note, ...]]]
"""Returns the prices, and notes about problems of the price file."""


def no_prices() -> tuple[Prices, tuple[Note, ...]]:
    return NO_PRICES, ()


def _dashed(model: str) -> str:
    return re.sub(r"\s+", "-", model.strip())


def parse_prices(content: bytes, file: str, source: PriceSource = "file") -> Prices:
    """Parses the file. Raises UsageError, with the file and the invalid entry in the message."""
    # imported here, so that an exporter without prices does not load YAML
    from podgpu.decode import decode_yaml

    parsed = decode_yaml(content, file, _PriceFile)
    first = _PriceChange(date.min, parsed.models, parsed.nodes)
    changes = [first]
    changes += sorted(parsed.changes, key=lambda change: change.from_)
    # A change keeps the prices and rules that it does not set.
    models: dict[str, Price] = {}
    nodes: list[_NodePrices] = []
    periods = []
    for change in changes:
        models = {**models, **change.models}
        if change.nodes is not None:
            nodes = change.nodes

        rules = []
        for rule in nodes:
            adapted = _adapt(models, rule)
            rules.append((rule.labels, Prices(parsed.currency, adapted, source)))

        day = change.from_
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        prices = Prices(parsed.currency, models, source, nodes=rules)
        periods.append((start.timestamp(), prices))

    first_prices = periods[0][1]
    first_prices.changes = periods[1:]
    return first_prices


def _adapt(models: Mapping[str, Price], rule: _NodePrices) -> dict[str, Price]:
    adapted = {}
    for name, price in models.items():
        gpu_hour = price.gpu_hour
        if gpu_hour is not None:
            gpu_hour *= rule.factor
        adapted[name] = Price(gpu_hour)
    return adapted | rule.models


def read_prices(option: str) -> ReadPrices:
    """Returns a reader for the value of `--prices`: empty, `example`, or a file.

    The file is read again when it changes. If the new content is invalid, the last valid prices are
    used.
    """
    if not option:
        return no_prices
    if option == EXAMPLE:
        content = files("podgpu.metrics").joinpath(_EXAMPLE_FILE).read_bytes()
        example = parse_prices(content, _EXAMPLE_FILE, "example")
        return lambda: (example, ())
    try:
        return read_last_valid("--prices", "prices", option, parse_prices, _MAX_FILE_BYTES)
    except UsageError as error:
        if os.path.exists(option):
            raise
        raise UsageError(f"{error}; for built-in prices, write {EXAMPLE}") from error
