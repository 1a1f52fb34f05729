"""Families to text format 0.0.4. Everything that can be prepared (label text, headers) is prepared once and reused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from podgpu.model import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
