"""This module says what each name becomes on the way from one dcgm-exporter's names to the other's, and what its number
is worth.

The facts are the catalogue's (`metrics/names.py`); here they are read in one direction. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.names import HOST_LABELS, renames

Generation = Literal["4.9", "4.8"]
_CARRIERS = re.compile(r"(?:DCGM_|dcgm_|podgpu[_:]|ALERTS(?:_FOR_STATE)?$)")
"""Metrics whose labels are the exporter's: its own, and what podgpu's rules make of them."""
_WORDS = re.compile(r"[A-Za-z_:][\w:]*")


@dataclass(frozen=True, slots=True)
class Renamed:
    name: str
    worth: Fraction
    """The old figure is the new one times this."""
    is_default: bool
    """dcgm-exporter prints it without a counter file of one's own."""
    is_inferred: bool
    """Nobody has seen the new name."""

    @property
    def conversion(self) -> str:
        return conversion(self.worth)


def conversion(worth: Fraction) -> str:
    """` * 100`, ` / 1048576`, or nothing."""
    if worth == 1:
        return ""
    return f" * {_plain(worth)}" if worth > 1 else f" / {_plain(1 / worth)}"


def _plain(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.17g}"


@dataclass(frozen=True)
class Direction:
    to: Generation

    def metric(self, name: str) -> Renamed | None:
        return _metrics(self.to).get(name)

    def label(self, name: str) -> str | None:
        return _labels(self.to).get(name)

    @property
    def is_telling(self) -> bool:
        """A label of the names one comes from is hardly anybody else's: `Hostname`. `hostname` is everybody's."""
        return self.to == "4.9"

    @staticmethod
    def carries(metric: str) -> bool:
        """Whether its labels are the exporter's."""
        return _CARRIERS.match(metric) is not None

    def mentions(self, text: str) -> list[str]:
        """Names of metrics and labels in any text that would be others; `Hostname` is too common a word to count."""
        words = dict.fromkeys(_WORDS.findall(text))
        return [w for w in words if self.metric(w) or (self.label(w) and w.startswith("DCGM_"))]


@cache
def _metrics(to: Generation) -> dict[str, Renamed]:
    default = {counter.name for counter in shipped_counters("default") or ()}
    found: dict[str, Renamed] = {}
    for rename in renames():
        if rename.old.type == "text" or rename.new_name == rename.old_name:
            continue
        factor = Fraction(str(rename.factor))
        facts = rename.old_name in default, "infer" in rename.new.seen
        if to == "4.9":
            for name in rename.old_names:
                found[name] = Renamed(rename.new_name, 1 / factor, *facts)
        else:
            found[rename.new_name] = Renamed(rename.old_name, factor, *facts)
    return found


@cache
def _labels(to: Generation) -> dict[str, str]:
    old, new = HOST_LABELS["4.8"][0], HOST_LABELS["4.9"][0]
    pairs = {old: new} | {r.old_name: r.new_name for r in renames() if r.old.type == "text"}
    return pairs if to == "4.9" else {b: a for a, b in pairs.items()}
