"""Parses counter files, which list the exported fields with name, type and help text.

The format is dcgm-exporter's. `--dcgm-names` chooses between the names of dcgm-exporter 4.8 and 4.9.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from podgpu.errors import UsageError
from podgpu.metrics.fields import Field, field_named, nearest_names, table_text
from podgpu.metrics.names import HOST_LABELS, NameSet, rename_of

SHIPPED: Mapping[str, str] = MappingProxyType(
    {
        "default": "default-counters.csv",
        "dcp": "dcp-metrics-included.csv",
        "1.x": "1.x-compatibility-metrics.csv",
    }
)
"""Short name -> name of the file in dcgm-exporter."""
MOST_BYTES = 1 << 20
MOST_ROWS = 5_000
_ADDED = "added-in-4.9.csv"
_PRINTED_AS = {
    "gauge": "gauge",
    "counter": "counter",
    "untyped": "untyped",
    "label": "label",
    "histogram": "gauge",
    "summary": "gauge",
}
_IN_UNIT = re.compile(r" ?\((?:in [^()]*|0 to 1)\)")
_UNIT_WORDS = {"ratio": "0 to 1", "ratio 0-1": "0 to 1", "B/s": "in bytes per second", "C": "in C"}
_QUOTES = 'start a quoted cell directly after the comma, close it before the next comma, and write "" for a quote in it'


@dataclass(frozen=True, slots=True)
class Counter:
    """One row of a counter file."""

    field: Field
    name: str
    """Name of the metric or of the label, as in the row."""
    type: str
    """gauge, counter, untyped or label."""
    help: str

    @property
    def is_label(self) -> bool:
        return self.type == "label"


def parse_counters(text: str, origin: str) -> tuple[Counter, ...]:
    """Returns the counters in the order of the file. `origin` is its name in messages. Raises UsageError.

    If several rows have the same field, the first one is used. Rows of type `histogram` and `summary`, which
    dcgm-exporter accepts, become gauges.
    """
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise UsageError(f"{origin}:1: more than 1 MiB of text: is this a counter file? Keep only the rows you need")
    chosen: dict[int, Counter] = {}
    for number, (line, cells) in enumerate(_read_rows(text, origin), start=1):
        if number > MOST_ROWS:
            raise UsageError(f"{origin}:{line}: more than {MOST_ROWS} rows: keep one row per field")
        try:
            counter = _parse_row(cells)
        except UsageError as error:
            raise UsageError(f"{origin}:{line}: {error}") from None
        chosen.setdefault(counter.field.id, counter)
    if not chosen:
        raise UsageError(
            f"{origin}:1: the file has no counters: add or uncomment rows, or use -f none to export no DCGM metrics"
        )
    return tuple(chosen.values())


@cache
def shipped_counters(short: str) -> tuple[Counter, ...] | None:
    """Returns the counters of a shipped file, by short name or file name, or None if there is no such file."""
    file_name = SHIPPED.get(short, short)
    if file_name not in SHIPPED.values():
        return None
    return parse_counters(table_text("counters", file_name), file_name)


def _read_rows(text: str, origin: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (number of the first line, cells). Lines that begin with # are comments, except in a quoted cell."""
    at_row_start = True

    def lines() -> Iterator[str]:
        nonlocal at_row_start
        for line in text.removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\r").split("\n"):
            is_comment, at_row_start = at_row_start and line.startswith("#"), False
            yield "\n" if is_comment else f"{line}\n"

    reader = csv.reader(lines(), strict=True)
    while True:
        first, at_row_start = reader.line_num + 1, True
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UsageError(f"{origin}:{first}: {error}: {_QUOTES}") from error
        if cells:
            yield first, cells


def _parse_row(cells: list[str]) -> Counter:
    if len(cells) != 3:
        raise UsageError(_wrong_count(cells))
    name, kind, help_text = (cell.strip(" \t") for cell in cells)
    return make_counter(name, kind, help_text)


def make_counter(name: str, kind: str, help_text: str) -> Counter:
    """Raises UsageError."""
    field = field_named(name)
    if field is None:
        raise UsageError(_unknown_field(name))
    printed = _PRINTED_AS.get(kind)
    if printed is None and name.startswith("DCGM_EXP_"):
        printed = "gauge"  # dcgm-exporter ignores the type of these rows
    if printed is None:
        raise UsageError(
            f"{name} has the unknown type {_shorten(kind)}: use gauge, counter, untyped, histogram, summary or label"
        )
    if field.type in ("blob", "time"):
        raise UsageError(f"{name} cannot be exported, its values are not numbers or text: remove the row")
    if field.type == "text" and printed != "label":
        raise UsageError(f"{name} is a text and cannot be of type {kind}: use label as its type")
    return Counter(field, name, printed, help_text)


def _wrong_count(cells: list[str]) -> str:
    expected = f"expected name, type and help separated by commas, found {len(cells)} "
    if not "".join(cells).strip():
        return expected + "blank cell(s): leave the line empty, or remove it"
    if cells[0].lstrip().startswith("#"):
        return expected + "cell(s): a comment needs its # in the first column"
    if any(cell.lstrip().startswith('"') for cell in cells):
        return expected + f"cell(s): {_QUOTES}"
    if len(cells) > 3:
        return expected + "cells: put double quotes around a help text that contains commas"
    return expected + "cell(s): add the missing ones"


def _unknown_field(name: str) -> str:
    if not name:
        return "the first cell is empty: write a field's name there, such as DCGM_FI_DEV_GPU_TEMP"
    upper = name.upper()
    near = [upper] if field_named(upper) else nearest_names(name[:100])
    advice = f"did you mean {near[0]}?" if near else "use a DCGM_FI_*, DCGM_EXP_* or 1.x name that DCGM knows"
    return f"unknown field {_shorten(name)}: {advice}"


def _shorten(cell: str) -> str:
    return ascii(cell if len(cell) <= 80 else cell[:80] + "...")


# Names of 4.8 and 4.9


@dataclass(frozen=True, slots=True)
class Naming:
    """The names chosen by `--dcgm-names`. Shipped files use them.

    Rows of the user's file keep their names. With `both`, the name in the other generation is added.
    """

    names: NameSet = "4.8"

    @property
    def host_labels(self) -> tuple[str, ...]:
        return HOST_LABELS[self.names]

    def shipped(self, short: str) -> tuple[Counter, ...] | None:
        """Returns the counters of a shipped file in the chosen names, or None if there is no such file."""
        counters = shipped_counters(short)
        if counters is None or self.names == "4.8":
            return counters
        if SHIPPED.get(short, short) == SHIPPED["1.x"]:
            return counters  # the names of 1.x belong to neither generation
        renamed = map(_rename, counters) if self.names == "4.9" else _add_other_names(counters)
        added = parse_counters(table_text(_ADDED), _ADDED)
        return _unique((*renamed, *added))

    def parse(self, text: str, origin: str) -> tuple[Counter, ...]:
        """Parses a user's file. A copy of a shipped file is treated as that file. Raises UsageError."""
        counters = parse_counters(text, origin)
        name = origin.rpartition("/")[2]
        if counters == shipped_counters(name):
            return self.shipped(name) or counters
        return self.of_user(counters)

    def of_user(self, counters: tuple[Counter, ...]) -> tuple[Counter, ...]:
        return _unique(_add_other_names(counters)) if self.names == "both" else counters

    def remarks(self, counters: Iterable[Counter]) -> list[str]:
        """Returns hints about a user's file."""
        old = [c.name for c in counters if (rename := rename_of(c.name)) is not None and c.name != rename.new_name]
        if self.names != "4.9" or not old:
            return []
        return [
            f"{len(old)} rows have dcgm-exporter 4.8's names ({old[0]}, ...) and keep them and their units, because "
            "--dcgm-names does not rename rows of your file; write 4.9's names, or use --dcgm-names both"
        ]


def _add_other_names(counters: Iterable[Counter]) -> Iterator[Counter]:
    """Yields each counter, and its other name unless another row has that name."""
    written = list(counters)
    names = {counter.name for counter in written}
    for counter in written:
        yield counter
        other = _other_name(counter)
        if other.name not in names:
            yield other


def _unique(counters: Iterable[Counter]) -> tuple[Counter, ...]:
    by_name: dict[str, Counter] = {}
    for counter in counters:
        by_name.setdefault(counter.name, counter)
    return tuple(by_name.values())


def _rename(counter: Counter) -> Counter:
    """Returns the counter with 4.9's name."""
    rename = rename_of(counter.name)
    if rename is None or counter.name == rename.new_name:
        return counter
    new = rename.new
    # NVLink bandwidth is a rate. dcgm-exporter declares it as a counter up to 4.8.2 and as a gauge since 4.8.3.
    kind = "gauge" if new.unit == "B/s" and counter.type == "counter" else counter.type
    return Counter(new, rename.new_name, kind, _help_in_unit(counter, new))


def _other_name(counter: Counter) -> Counter:
    """Returns the counter with the name of the other generation, or unchanged if there is no other name."""
    rename = rename_of(counter.name)
    if rename is None or counter.name != rename.new_name:
        return _rename(counter)
    return Counter(rename.old, rename.old_name, counter.type, _help_in_unit(counter, rename.old))


def _help_in_unit(counter: Counter, field: Field) -> str:
    if field.unit == counter.field.unit:
        return counter.help
    unit = f"({_UNIT_WORDS.get(field.unit) or f'in {field.unit.split()[0]}'})"
    sentence = _IN_UNIT.sub("", counter.help).rstrip(". ")
    return f"{sentence} {unit}." if sentence else unit
