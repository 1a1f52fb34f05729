"""Parsed families back to text format 0.0.4: `parse_text`'s way back, for pages that are passed on. Pure.

Timestamps are not written: node_exporter's textfile collector skips a file that has one. Numbers are written in the
shortest form that reads back the same, whole ones plainly, whatever form they came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from podgpu.exposition.parse import ParsedFamily
from podgpu.exposition.text import format_float
from podgpu.model import Labels

_LARGEST_PLAIN = 2.0**53
"""Up to here every whole number is a float of its own."""


def encode_parsed(families: Iterable[ParsedFamily]) -> bytes:
    """HELP and TYPE where the page had something to say, every sample under its own name and in its order."""
    texts: dict[int, str] = {}
    lines: list[str] = []
    for family in families:
        lines += _head(family)
        for name, labels, value, _timestamp in family.samples:
            text = texts.get(id(labels))
            if text is None:
                text = texts[id(labels)] = Labels(labels.items()).text
            lines.append(f"{name}{text} {_number(value)}\n")
    return "".join(lines).encode()


def _head(family: ParsedFamily) -> Iterator[str]:
    if family.help:
        escaped = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {family.name} {escaped}\n"
    if family.help or family.type != "untyped" or not family.samples:
        yield f"# TYPE {family.name} {family.type}\n"


def _number(value: float) -> str:
    if -_LARGEST_PLAIN < value < _LARGEST_PLAIN and value == (whole := int(value)) and (whole or repr(value) == "0.0"):
        return str(whole)
    return format_float(value)
