"""Encodes metric families as text: Prometheus format 0.0.4 and OpenMetrics 1.0.

The text of labels and headers is cached.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_HEAD = "# HELP "
_UNITS = ("seconds", "bytes", "joules", "ratio", "celsius", "volts", "amperes", "watts", "hertz", "meters", "grams")
_LAST_LINE = b"# EOF\n"
_GZIP_LEVEL = 1  # fast, because the first scrape waits for it; metrics text compresses 20:1 even at this level


class Labels:
    """Ordered label pairs with their escaped text. Samples with the same labels share one object."""

    __slots__ = ("pairs", "text")

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.pairs: tuple[tuple[str, str], ...] = tuple(pairs)
        inner = ",".join(f'{name}="{_escape_label(value)}"' for name, value in self.pairs)
        self.text = "{" + inner + "}" if inner else ""

    def __repr__(self) -> str:
        return f"Labels{self.text}"


def _escape_label(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


NO_LABELS = Labels(())


class Sample(NamedTuple):  # a tuple is three times as fast to create as a frozen dataclass
    labels: Labels
    value: int | float


class Family(NamedTuple):
    """A metric family. With `dcgm_numbers`, floats have six decimals, as in dcgm-exporter."""

    name: str
    type: str
    help: str
    samples: tuple[Sample, ...]
    dcgm_numbers: bool = False


def encode(families: Iterable[Family]) -> bytes:
    """Encodes the families in format 0.0.4. Families without samples are omitted."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(_head(family.name, family.type, family.help))
            lines += _dcgm_lines(family) if family.dcgm_numbers else _plain_lines(family)
    return "".join(lines).encode()


@lru_cache(maxsize=2048)
def _head(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {escape_help(help_text)}\n# TYPE {name} {kind}\n"


def escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _dcgm_lines(family: Family) -> list[str]:
    name = family.name
    return [
        f"{name}{labels.text} {value:.6f}\n" if value.__class__ is float else f"{name}{labels.text} {value}\n"
        for labels, value in family.samples
    ]


def _plain_lines(family: Family) -> list[str]:
    name = family.name
    return [
        f"{name}{labels.text} {format_float(value) if value.__class__ is float else value}\n"
        for labels, value in family.samples
    ]


def format_float(value: float) -> str:
    """Returns the shortest text that parses to the same number."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


# OpenMetrics


def to_openmetrics(text: bytes) -> bytes:
    """Converts the output of `encode` to OpenMetrics. Series keep their names; only HELP, TYPE and UNIT lines differ.

    OpenMetrics requires the suffix `_total` for counters. A counter without the suffix, as in dcgm-exporter, gets
    the type unknown, because a new name would break dashboards.
    """
    if not text:
        return _LAST_LINE
    heads = [family.split("\n", 2) for family in text.decode().removeprefix(_HEAD).split(f"\n{_HEAD}")]
    types = {help_line.partition(" ")[0]: type_line.rpartition(" ")[2] for help_line, type_line, _ in heads}
    parts = [_openmetrics_head(help_line, types) + samples for help_line, _, samples in heads]
    return "\n".join(parts).encode() + _LAST_LINE


def _openmetrics_head(help_line: str, types: Mapping[str, str]) -> str:
    name, _, help_text = help_line.partition(" ")
    family, kind = name, types[name]
    base = name.removesuffix("_total")
    if kind == "counter" and base != name and not {base, f"{base}_created"} & types.keys():
        family = base
    elif kind != "gauge":
        kind = "unknown"
    unit = next((unit for unit in _UNITS if family.endswith(f"_{unit}")), "")
    unit_line = f"# UNIT {family} {unit}\n" if unit else ""
    escaped = help_text.replace('"', '\\"')  # everything else is escaped as in format 0.0.4
    return f"# HELP {family} {escaped}\n# TYPE {family} {kind}\n{unit_line}"


# Response bodies


class Body:
    """A response body, plain and compressed."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain
        self.zipped = gzip.compress(plain, _GZIP_LEVEL, mtime=0)


class Exposition(Body):
    """Metrics text. OpenMetrics is rendered on the first request and cached."""

    @cached_property
    def openmetrics(self) -> Body:
        return Body(to_openmetrics(self.plain))


NO_METRICS = Exposition(b"")


def etag_of(plain: bytes) -> str:
    """Returns a weak ETag, which is the same for the plain and the compressed body."""
    return f'W/"{blake2b(plain, digest_size=12).hexdigest()}"'
