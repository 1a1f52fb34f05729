"""This module owns where prices come from while podgpu runs: `--prices FILE`, read again when it changes, or `--prices
example`.

currency: EUR
models:
  "NVIDIA H100 80GB HBM3": {gpu_hour: 2.50, kwh: 0.30}
  "*": {gpu_hour: 1.00, kwh: 0.30}
"""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

from podgpu.errors import SourceError, UsageError
from podgpu.figures.prices import Price, Prices, ReadPrices, no_prices
from podgpu.files import ReadOnChange
from podgpu.strict_yaml import StrictMapping, parse_strict

EXAMPLE = "example"
_EXAMPLE_FILE = "example_prices.yml"
_LARGEST_FILE = 256 * 1024


def parse_prices(content: bytes, file: str) -> Prices:
    """Raises UsageError that names the place."""
    top = parse_strict(content, file)
    top.allow(("currency", "models"))
    currency, models = top.text("currency"), top.mapping("models")
    if not currency or len(currency) > 16 or not currency.isprintable():
        raise top.complaint("currency", "is missing or not the name of a currency: write one such as EUR")
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
        except UsageError as error:
            raise UsageError(f"--prices {error}") from error

    def read(self) -> tuple[Prices, tuple[str, ...]]:
        """The prices, and what is wrong with the file."""
        try:
            self._prices = self._file.read(self._path)
        except (SourceError, UsageError) as error:
            return self._prices, (f"--prices: {error}; the prices before that stay",)
        return self._prices, ()


def read_prices(chosen: str) -> ReadPrices:
    """What `--prices` names: nothing, `example`, or a file. Raises UsageError."""
    if not chosen:
        return no_prices
    if chosen == EXAMPLE:
        prices = example_prices()
        return lambda: (prices, ())
    return PriceFile(chosen).read


def example_prices() -> Prices:
    """Those that podgpu ships, so that there is something to look at."""
    content = files("podgpu.metrics").joinpath(_EXAMPLE_FILE).read_bytes()
    return replace(parse_prices(content, _EXAMPLE_FILE), source="example")
