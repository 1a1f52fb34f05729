"""This module knows what an hour of a GPU costs, by its model, and puts prices on figures.

A MIG instance without a price of its own costs its compute slices' part of the GPU's hour; a kilowatt-hour is one
anywhere. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from podgpu.figures.device import DeviceFigures, device_model
from podgpu.figures.parts import WHOLE, holder_parts, physical_gpus
from podgpu.metrics.mig import parent_and_part

_ANY = "*"
_NEAR = 0.8
MOST_MODELS_NAMED = 8
PriceSource = Literal["", "example", "file"]


class Price(NamedTuple):
    """None: nobody says."""

    gpu_hour: Fraction | None = None
    kwh: Fraction | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    currency: str = ""
    """Empty: there are no prices at all."""
    models: Mapping[str, Price] = field(default_factory=dict)
    source: PriceSource = "file"
    """`example`: those that podgpu ships, which nobody pays."""

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


NO_PRICES = Prices(source="")
ReadPrices = Callable[[], tuple[Prices, tuple[str, ...]]]
"""The prices as they are now, and what is wrong with them."""


def no_prices() -> tuple[Prices, tuple[str, ...]]:
    return NO_PRICES, ()


def _dashed(model: str) -> str:
    return re.sub(r"\s+", "-", model.strip())


def _exactly(part: float) -> Fraction:
    """3/7 again, from what is left of it in a float."""
    return Fraction(part).limit_denominator(64)


# On figures


class PriceTags:
    """Prices by model, each looked up once: a cluster has thousands of devices of a few models."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._of: dict[str, Fraction | None] = {}

    def hour(self, device: DeviceFigures) -> Fraction | None:
        """Of the GPU, or of the instance."""
        model = device_model(device)
        if model not in self._of:
            self._of[model] = self._prices.of(model).gpu_hour if self._prices.currency else None
        return self._of[model]

    def without(self) -> list[str]:
        """The models that were asked for and have no price."""
        return sorted(model for model, price in self._of.items() if price is None)


def with_prices(devices: Sequence[DeviceFigures], tags: PriceTags) -> tuple[DeviceFigures, ...]:
    """One node's devices, and what each holder pays of what it holds."""
    left = _left_of_cut(devices)
    return tuple([_with_price(device, tags.hour(device), left.get(id(device), WHOLE)) for device in devices])


def _with_price(device: DeviceFigures, price: Fraction | None, whole: int) -> DeviceFigures:
    if price is None:
        return device
    holders = device.holders
    if holders:
        parts = holder_parts(holders, whole)
        holders = tuple([replace(of, cost_per_hour=float(price * part / WHOLE)) for of, part in parts])
    return replace(device, price_per_hour=float(price), holders=holders)


def _left_of_cut(devices: Iterable[DeviceFigures]) -> dict[int, int]:
    """Who holds a GPU that is cut into instances holds what is not cut off: id() of the GPU -> that part."""
    cut = {device.uuid for device in devices if device.instance}
    if not cut:
        return {}
    gpus = physical_gpus(device for device in devices if device.uuid in cut)
    return {id(device): part for gpu in gpus for device, part in gpu.slots() if not device.instance}


def unpriced_note(models: Iterable[str], prices: Prices) -> tuple[str, ...]:
    """One sentence that names them all; none where all have a price, or there are no prices."""
    named = sorted({model or "devices of an unknown model" for model in models})
    if not named or not prices.currency:
        return ()
    shown = ", ".join(named[:MOST_MODELS_NAMED])
    if len(named) > MOST_MODELS_NAMED:
        shown += f" and {len(named) - MOST_MODELS_NAMED} more"
    import difflib  # the exporter does without until there is something to say

    near = difflib.get_close_matches(named[0], [name for name in prices.models if name != _ANY], 1, _NEAR)
    meant = f" (the file has {near[0]}: is that meant?)" if near else ""
    if prices.source == "example":
        return (f"--prices example has no price for {shown}: in no cost; write a file of your own (docs/cluster.md)",)
    return (f"--prices has no price for {shown}: in no cost; add it to the file{meant}",)
