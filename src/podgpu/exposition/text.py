"""Families to text format 0.0.4, and that text to OpenMetrics 1.0.

Everything that can be prepared (label text, headers) is prepared once and reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from podgpu.model import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_HEAD = "# HELP "
_UNITS = ("seconds", "bytes", "joules", "ratio", "celsius", "volts", "amperes", "watts", "hertz", "meters", "grams")
_LAST_LINE = b"# EOF\n"


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
    escaped = help_text.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


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
