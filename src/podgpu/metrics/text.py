"""This module writes families, ours and parsed ones, as text format 0.0.4, and that text as OpenMetrics 1.0. Pure.

Everything that can be prepared (label text, headers) is prepared once and reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from podgpu.series import Family, Labels

if TYPE_CHECKING:  # an exporter parses no exposition
    from podgpu.metrics.parse import ParsedFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_HEAD = "# HELP "
_UNITS = ("seconds", "bytes", "joules", "ratio", "celsius", "volts", "amperes", "watts", "hertz", "meters", "grams")
_LAST_LINE = b"# EOF\n"
_LARGEST_PLAIN = 2.0**53
"""Up to here every whole number is a float of its own."""


def encode(families: Iterable[Family]) -> bytes:
    """One HELP and TYPE per family, samples in the order given; a family without samples is left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(_head(family.name, family.type, family.help))
            lines += _dcgm_lines(family) if family.dcgm_numbers else _plain_lines(family)
    return "".join(lines).encode()


@lru_cache(maxsize=2048)
def _head(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {_escaped(help_text)}\n# TYPE {name} {kind}\n"


def _escaped(help_text: str) -> str:
    return help_text.replace("\\", "\\\\").replace("\n", "\\n")


def _dcgm_lines(family: Family) -> list[str]:
    """As dcgm-exporter prints: floats with six decimals, integers plain."""
    name = family.name
    return [
        f"{name}{s.labels.text} {s.value:.6f}\n" if s.value.__class__ is float else f"{name}{s.labels.text} {s.value}\n"
        for s in family.samples
    ]


def _plain_lines(family: Family) -> list[str]:
    name = family.name
    return [
        f"{name}{s.labels.text} {format_float(s.value)}\n"
        if s.value.__class__ is float
        else f"{name}{s.labels.text} {s.value}\n"
        for s in family.samples
    ]


def format_float(value: float) -> str:
    """The shortest text that reads back to the same number."""
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


# Somebody else's families


def encode_parsed(families: Iterable[ParsedFamily]) -> bytes:
    """`parse_text`'s way back, for what is passed on: HELP and TYPE where there was something to say, every
    sample under its own name and in its order.

    Timestamps are not written: node_exporter's textfile collector skips a file that has one. Numbers are written in the
    shortest form that reads back the same, whole ones plainly, whatever form they came in.
    """
    texts: dict[int, str] = {}
    lines: list[str] = []
    for family in families:
        lines += _parsed_head(family)
        for name, labels, value, _timestamp in family.samples:
            text = texts.get(id(labels))
            if text is None:
                text = texts[id(labels)] = Labels(labels.items()).text
            lines.append(f"{name}{text} {_number(value)}\n")
    return "".join(lines).encode()


def _parsed_head(family: ParsedFamily) -> Iterator[str]:
    if family.help:
        yield f"# HELP {family.name} {_escaped(family.help)}\n"
    if family.help or family.type != "untyped" or not family.samples:
        yield f"# TYPE {family.name} {family.type}\n"


def _number(value: float) -> str:
    if -_LARGEST_PLAIN < value < _LARGEST_PLAIN and value == (whole := int(value)) and (whole or repr(value) == "0.0"):
        return str(whole)
    return format_float(value)


# OpenMetrics


def to_openmetrics(text: bytes) -> bytes:
    """The same series under the same names, from what `encode` wrote: only what is said of each family differs.

    A counter without `_total` (dcgm-exporter's have none) has no name that OpenMetrics allows for a counter, and giving
    it one would rename the series in every dashboard. It is of unknown type there.
    """
    if not text:
        return _LAST_LINE
    heads = [family.split("\n", 2) for family in text.decode().removeprefix(_HEAD).split(f"\n{_HEAD}")]
    families = {help_line.partition(" ")[0]: type_line.rpartition(" ")[2] for help_line, type_line, _ in heads}
    parts = [_openmetrics_head(help_line, families) + samples for help_line, _, samples in heads]
    return "\n".join(parts).encode() + _LAST_LINE


def _openmetrics_head(help_line: str, families: Mapping[str, str]) -> str:
    name, _, help_text = help_line.partition(" ")
    family, kind = name, families[name]
    base = name.removesuffix("_total")
    if kind == "counter" and base != name and not {base, f"{base}_created"} & families.keys():
        family = base
    elif kind != "gauge":
        kind = "unknown"
    unit = next((unit for unit in _UNITS if family.endswith(f"_{unit}")), "")
    said_unit = f"# UNIT {family} {unit}\n" if unit else ""
    escaped = help_text.replace('"', '\\"')  # all else is escaped as in the text format
    return f"# HELP {family} {escaped}\n# TYPE {family} {kind}\n{said_unit}"
