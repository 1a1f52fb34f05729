"""Reads prices from `--prices FILE`, again when it changes, or `--prices example`.

currency: EUR
models:
  "NVIDIA H100 80GB HBM3": {gpu_hour: 2.50, kwh: 0.30}
  "*": {gpu_hour: 1.00, kwh: 0.30}
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from importlib.resources import files
from typing import Annotated

import msgspec

from podgpu.errors import SourceError, UsageError, one_line
from podgpu.figures.prices import Price, Prices, ReadPrices, no_prices
from podgpu.files import ReadOnChange
from podgpu.yaml_file import decode_yaml

EXAMPLE = "example"
_EXAMPLE_FILE = "example_prices.yml"
_LARGEST_FILE = 256 * 1024
_AMOUNT = re.compile(r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,12})?")


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    gpu_hour: str | None = None
    kwh: str | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    currency: Annotated[str, msgspec.Meta(min_length=1, max_length=16)]
    models: Annotated[dict[str, _Entry], msgspec.Meta(min_length=1)]


def parse_prices(content: bytes, file: str) -> Prices:
    """Raises UsageError, which names the file and the path inside it."""
    document = decode_yaml(content, file, _Document)
    prices = {}
    for name, entry in document.models.items():
        place = f"{file}: models.{one_line(name)[:60]}"
        price = prices[name] = Price(_read_amount(entry.gpu_hour, place), _read_amount(entry.kwh, place))
        if price == Price():
            raise UsageError(f"{place}: has neither gpu_hour nor kwh")
    return Prices(document.currency, prices)


def _read_amount(text: str | None, place: str) -> Fraction | None:
    if text is None:
        return None
    if not _AMOUNT.fullmatch(text):
        raise UsageError(f"{place}: prices are numbers of 0 or more, written as in 2.5")
    return Fraction(text)


class PriceFile:
    """Current prices of a file. If it becomes invalid while podgpu runs, the previous prices stay."""

    def __init__(self, path: str, file: ReadOnChange[Prices] | None = None) -> None:
        """Raises UsageError if the file is invalid."""
        self._path = path
        self._file = file or ReadOnChange(parse_prices, _LARGEST_FILE)
        try:
            self._prices = self._file.read(path)
        except SourceError as error:
            raise UsageError(f"--prices: {error}") from error
        except UsageError as error:
            raise UsageError(f"--prices {error}") from error

    def read(self) -> tuple[Prices, tuple[str, ...]]:
        """Returns the prices and the problems of the file."""
        try:
            self._prices = self._file.read(self._path)
        except (SourceError, UsageError) as error:
            return self._prices, (f"--prices: {error}; the previous prices stay",)
        return self._prices, ()


def read_prices(chosen: str) -> ReadPrices:
    """`chosen`: nothing, `example`, or a file. Raises UsageError."""
    if not chosen:
        return no_prices
    if chosen == EXAMPLE:
        prices = example_prices()
        return lambda: (prices, ())
    return PriceFile(chosen).read


def example_prices() -> Prices:
    """Prices that podgpu ships for demonstration."""
    content = files("podgpu.metrics").joinpath(_EXAMPLE_FILE).read_bytes()
    return replace(parse_prices(content, _EXAMPLE_FILE), source="example")
