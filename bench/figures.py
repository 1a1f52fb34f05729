"""A figure with its limit, and the table of them. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def missed(self) -> bool:
        too_big = self.at_most is not None and self.value > self.at_most
        return too_big or (self.at_least is not None and self.value < self.at_least)

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}"
        return "" if self.at_least is None else f">= {self.at_least:g} {self.unit}"

    @property
    def verdict(self) -> str:
        """Empty for a figure that only informs."""
        if not self.limit:
            return ""
        return "MISSED" if self.missed else "pass"

    def as_json(self) -> dict[str, object]:
        plain: dict[str, object] = {"name": self.name, "value": self.value, "unit": self.unit}
        return plain | {"limit": self.limit or None, "verdict": self.verdict or None}


def row(figure: Figure) -> str:
    return f"{figure.name:<58} {figure.value:>10.4g} {figure.unit:<6} {figure.limit:<14} {figure.verdict}".rstrip()


def heading() -> str:
    return f"{'figure':<58} {'measured':>10} {'unit':<6} {'limit':<14} verdict"


def any_missed(figures: Iterable[Figure]) -> bool:
    return any(figure.missed for figure in figures)
