"""This module says what dcgm-exporter's YAML configuration can say, in one shape for both versions; durations as Go
writes them. Pure.

Apart from `config_yaml.py`, which reads it: an exporter without such a file loads no YAML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

from podgpu.metrics.counters import Counter

MOST_BYTES = 256 * 1024
MOST_SAMPLES = 2**31 - 1

_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(?:ns|us|µs|μs|ms|s|m|h)")
_PART = re.compile(r"([0-9.]+)([a-zµμ]+)")
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "μs": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}


@dataclass(frozen=True, slots=True)
class Retention:
    """How long DCGM keeps samples; None: not said, as those above it say."""

    max_age: float | None = None
    """Seconds; 0: no limit by age."""
    max_samples: int | None = None
    """0: no limit by number."""

    def over(self, other: Retention) -> Retention:
        """This, and the other where it says nothing."""
        return Retention(
            other.max_age if self.max_age is None else self.max_age,
            other.max_samples if self.max_samples is None else self.max_samples,
        )

    @property
    def is_endless(self) -> bool:
        return self.max_age == 0 and self.max_samples == 0


DEFAULT_RETENTION = Retention(600.0, 0)


@dataclass(frozen=True, slots=True)
class Collection:
    """Fields that are read at an interval of their own."""

    name: str
    every: float
    include: tuple[str, ...]
    """Names of fields, or shell patterns of them."""
    retention: Retention = field(default_factory=Retention)
    place: str = ""
    """file:line:column, for complaints."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What the file says; None where it says nothing."""

    path: str
    counters_file: str = ""
    counters: tuple[Counter, ...] | None = None
    """Written in the file itself."""
    exporter_metrics: bool | None = None
    interval: float | None = None
    retention: Retention = field(default_factory=Retention)
    collections: tuple[Collection, ...] = ()
    """Those for some fields only."""
    bind_unbind: bool | None = None
    bind_unbind_interval: float | None = None
    max_concurrent_scrapes: int | None = None


def parse_go_duration(text: str) -> Fraction | None:
    """Seconds of `1h30m`, `1.5s`, `500ms` or `0`; None for what is none, or is negative."""
    if text == "0":
        return Fraction(0)
    if not text or len(text) > 64 or _DURATION.sub("", text):
        return None
    return sum((Fraction(number) * _SECONDS[unit] for number, unit in _PART.findall(text)), Fraction(0))
