"""This module reads counter files: which fields are exported, under which name, type and help. Text in, counters out.

The format is dcgm-exporter's, so files made for it work here. The three shipped files lie in the folder
`counters`; a user's own file is read by the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from podgpu.errors import UsageError
from podgpu.metrics.fields import Field, field_named, nearest_names, table_text

SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        "default": "default-counters.csv",
        "dcp": "dcp-metrics-included.csv",
        "1.x": "1.x-compatibility-metrics.csv",
    }
)
"""Short name to file name, the latter as NVIDIA calls it."""

MOST_BYTES = 1 << 20
MOST_ROWS = 5_000

_PRINTED_AS = {
    "gauge": "gauge",
    "counter": "counter",
    "untyped": "untyped",
    "label": "label",
    "histogram": "gauge",
    "summary": "gauge",
}
_QUOTED = re.compile(r'"([^"]*+(?:""[^"]*+)*+)"')
_UNQUOTED = re.compile(r"[^,\n]*+")


@dataclass(frozen=True, slots=True)
class Counter:
    """One row of a counter file."""

    field: Field
    name: str
    """As the row writes it: the metric's name, or the label's."""
    type: str
    """gauge, counter, untyped or label."""
    help: str

    @property
    def is_label(self) -> bool:
        return self.type == "label"


def parse_counters(text: str, origin: str, *, in_4_6: bool = False) -> tuple[Counter, ...]:
    """The counters a file asks for, in its order; `origin` is what error messages call the file.

    Of several rows for one field the first wins, whichever of the field's names they use. A field has one
    value per reading, so `histogram` and `summary` rows, which dcgm-exporter accepts, become gauges. `in_4_6`: names
    mean what they mean to DCGM 4.6 (see `field_named`).
    """
    source = _Source(_normalised(text), origin)
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise source.refusal(0, "more than 1 MiB of text: is this a counter file? Keep only the rows you need")
    chosen: dict[int, Counter] = {}
    for number, (start, cells) in enumerate(_records(source), start=1):
        if number > MOST_ROWS:
            raise source.refusal(start, f"more than {MOST_ROWS} rows: keep one row per field")
        counter = _counter(source, start, cells, in_4_6)
        chosen.setdefault(counter.field.id, counter)
    if not chosen:
        raise source.refusal(0, "no counters in it: add or uncomment rows, or use -f none to have no DCGM families")
    return tuple(chosen.values())


@cache
def shipped_counters(short: str) -> tuple[Counter, ...] | None:
    """The counters of a file podgpu brings along, by short or file name; None if it has no such file."""
    file_name = SHIPPED.get(short, short)
    if file_name not in SHIPPED.values():
        return None
    return parse_counters(table_text("counters", file_name), file_name)


# --- the format: Go's encoding/csv with '#' comments, strict quotes, spaces kept until the cell is cut out


@dataclass(frozen=True, slots=True)
class _Source:
    text: str
    origin: str

    def refusal(self, at: int, why: str) -> UsageError:
        line = self.text.count("\n", 0, at) + 1
        return UsageError(f"{self.origin}:{line}: {why}")


def _normalised(text: str) -> str:
    """Line ends as Go reads them, and without the byte order mark that Windows editors put in front."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\r")


def _records(source: _Source) -> Iterator[tuple[int, list[str]]]:
    """Every record with the offset it starts at. Python's own csv reader forgives quotes that Go refuses."""
    text, at = source.text, 0
    while at < len(text):
        if text[at] == "\n":
            at += 1
        elif text[at] == "#":
            at = _end_of_line(text, at)
        else:
            start = at
            cells, at = _read_record(source, at)
            yield start, cells


def _end_of_line(text: str, at: int) -> int:
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline


def _read_record(source: _Source, at: int) -> tuple[list[str], int]:
    cells = []
    while True:
        cell, at = _read_cell(source, at)
        cells.append(cell)
        if not source.text.startswith(",", at):
            return cells, at
        at += 1


def _read_cell(source: _Source, at: int) -> tuple[str, int]:
    text = source.text
    if text.startswith('"', at):
        return _read_quoted(source, at)
    match = _UNQUOTED.match(text, at)
    assert match is not None  # it matches the empty string too
    end = match.end()
    if (quote := text.find('"', at, end)) >= 0:
        raise source.refusal(
            quote,
            "a double quote inside an unquoted cell: start a quoted cell directly after the comma, no space,"
            ' and write "" for a quote inside it',
        )
    return text[at:end], end


def _read_quoted(source: _Source, at: int) -> tuple[str, int]:
    match = _QUOTED.match(source.text, at)
    if match is None:
        raise source.refusal(at, "a double quote is opened and never closed: close it, or remove it")
    end = match.end()
    if source.text[end : end + 1] not in ("", ",", "\n"):
        raise source.refusal(
            end,
            "text after a closing double quote: expected a comma or the end of the line;"
            ' write "" for a quote inside the cell',
        )
    return match[1].replace('""', '"'), end


# --- what a record means


def _counter(source: _Source, at: int, cells: list[str], in_4_6: bool) -> Counter:
    if len(cells) != 3:
        raise source.refusal(at, _wrong_count(cells))
    try:
        name, asked, help_text = (cell.strip(" \t") for cell in cells)
        return make_counter(name, asked, help_text, in_4_6)
    except UsageError as e:
        raise source.refusal(at, str(e)) from None


def make_counter(name: str, asked: str, help_text: str, in_4_6: bool = False) -> Counter:
    """One row's; raises UsageError, which says what is wrong but not where."""
    field = field_named(name, in_4_6=in_4_6)
    if field is None:
        raise UsageError(_unknown_field(name))
    printed = _PRINTED_AS.get(asked)
    if printed is None and name.startswith("DCGM_EXP_"):
        printed = "gauge"  # dcgm-exporter does not look at the type of its own collectors' rows
    if printed is None:
        raise UsageError(
            f"{name} has the unknown type {_shown(asked)}: use gauge, counter, untyped, histogram, summary or label"
        )
    if field.type in ("blob", "time"):
        raise UsageError(f"{name} cannot be exported, its values are not numbers or text: remove the row")
    if field.type == "text" and printed != "label":
        raise UsageError(f"{name} is a text and cannot be of type {asked}: use label as its type")
    return Counter(field, name, printed, help_text)


def _wrong_count(cells: list[str]) -> str:
    expected = f"expected name, type and help separated by commas, found {len(cells)} "
    if not "".join(cells).strip():
        return expected + "blank cell(s): leave the line empty, or remove it"
    if cells[0].lstrip().startswith("#"):
        return expected + "cell(s): a comment needs its # in the first column"
    if len(cells) > 3:
        return expected + "cells: put a help text that has commas between double quotes"
    return expected + "cell(s): add what is missing"


def _unknown_field(name: str) -> str:
    if not name:
        return "the first cell is empty: write a field's name there, such as DCGM_FI_DEV_GPU_TEMP"
    upper = name.upper()
    near = [upper] if field_named(upper) else nearest_names(name[:100])
    advice = f"did you mean {near[0]}?" if near else "use a DCGM_FI_*, DCGM_EXP_* or 1.x name that DCGM knows"
    return f"unknown field {_shown(name)}: {advice}"


def _shown(cell: str) -> str:
    """A cell as it can stand in a one-line message."""
    return ascii(cell if len(cell) <= 80 else cell[:80] + "...")
