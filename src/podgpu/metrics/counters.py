"""Parses counter files, which list the DCGM fields to export with their name, type and help text.

The files have dcgm-exporter's format. `--dcgm-names` selects the names of dcgm-exporter 4.8, of
4.9, or both.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from io import StringIO

from podgpu.errors import UsageError
from podgpu.metrics.fields import Field, NameSet, field_named, nearest_names, rename_of, table_text

SHIPPED = {
    "default": "default-counters.csv",
    "dcp": "dcp-metrics-included.csv",
    "1.x": "1.x-compatibility-metrics.csv",
    "1.x-all": "1.x-all-metrics.csv",
}
"""Short name -> name of the file in dcgm-exporter, which has no file `1.x-all`."""
_ADDED_IN_4_9 = "DCGM_FI_DEV_FB_CAPACITY_BYTES", "gauge", "Total framebuffer memory (in bytes)."
_PRINTED_AS_GAUGE = ("histogram", "summary")
_TYPES = ("gauge", "counter", "untyped", "label", *_PRINTED_AS_GAUGE)
_UNIT = re.compile(r" ?\((?:in [^()]*|0 to 1)\)")


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """One row of a counter file."""

    field: Field
    name: str  # name of the metric, or of the label for rows of type label
    type: str  # gauge, counter, untyped or label
    help: str

    @property
    def is_label(self) -> bool:
        return self.type == "label"


def parse_counters(text: str, origin: str, names: NameSet = "4.8") -> tuple[CounterSpec, ...]:
    """Returns the counters of a user's file in file order. Raises UsageError for an invalid file.

    `origin`: the file's name, used in messages. If several rows have the same field, the first row
    is used. The types `histogram` and `summary` become gauges. `names` "4.9" changes only unchanged
    copies of shipped files. In other files, the user's names are kept.
    """
    counters = _parse_rows(text, origin)
    # Files have the names of 4.8, so nothing is to be changed.
    if names == "4.8":
        return counters

    file_name = origin.rpartition("/")[2]
    shipped = shipped_counters(file_name, names)
    is_unchanged_copy = counters == shipped_counters(file_name)
    if shipped is not None and is_unchanged_copy:
        return shipped
    return add_other_names(counters, names)


def _parse_rows(text: str, origin: str) -> tuple[CounterSpec, ...]:
    counters: dict[int, CounterSpec] = {}
    lines = StringIO(text.removeprefix("\ufeff"))
    # Comments become empty lines, so that the numbers of lines stay right.
    rows = ("\n" if line.startswith("#") else line for line in lines)
    reader = csv.reader(rows, strict=True)
    first_line = 1  # of the row, which may have several lines
    try:
        for cells in reader:
            if cells:
                counter = _parse_row(cells)
                counters.setdefault(counter.field.id, counter)

            first_line = reader.line_num + 1
    except (csv.Error, UsageError) as error:
        raise UsageError(f"{origin}:{first_line}: {error}") from None

    if not counters:
        raise UsageError(
            f"{origin}:1: the file has no counters: add or uncomment rows, or use -f none to "
            "export no DCGM metrics"
        )
    return tuple(counters.values())


def _parse_row(cells: list[str]) -> CounterSpec:
    if len(cells) != 3:
        raise UsageError(
            f"expected name, type and help separated by commas, found {len(cells)} cell(s): "
            "start comments in the first column, and begin a help text that contains commas "
            "with a double quote directly after the comma"
        )

    name, kind, help_text = (cell.strip(" \t") for cell in cells)
    return make_counter(name, kind, help_text)


def make_counter(name: str, kind: str, help_text: str) -> CounterSpec:
    """Creates a counter from the cells of a row. Raises UsageError if a cell is invalid."""
    field = field_named(name)
    if field is None:
        near = nearest_names(name[:100])
        advice = "use a DCGM_FI_*, DCGM_EXP_* or 1.x name that DCGM knows"
        if near:
            advice = f"did you mean {near[0]}?"
        raise UsageError(f"unknown field {name[:80]!a}: {advice}")

    # dcgm-exporter ignores the type of DCGM_EXP_* rows.
    if kind not in _TYPES and not name.startswith("DCGM_EXP_"):
        raise UsageError(
            f"{name} has the unknown type {kind[:80]!a}: "
            f"use {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
        )

    if field.type == "text" and kind != "label":
        raise UsageError(
            f"{name} has text values and cannot be of type {kind}: use label as its type"
        )

    # Only a DCGM_EXP_* row can have an unknown type here.
    if kind in _PRINTED_AS_GAUGE or kind not in _TYPES:
        kind = "gauge"
    return CounterSpec(field, name, kind, help_text)


@cache
def shipped_counters(name: str, names: NameSet = "4.8") -> tuple[CounterSpec, ...] | None:
    """Returns the counters of a shipped file, or None if there is no such file.

    `name`: key of `SHIPPED`, or file name.
    """
    file_name = SHIPPED.get(name, name)
    if file_name not in SHIPPED.values():
        return None

    counters = _parse_rows(table_text("counters", file_name), file_name)
    # 4.9 did not change the names of 1.x.
    if names == "4.8" or file_name.startswith("1."):
        return counters

    added = make_counter(*_ADDED_IN_4_9)
    if names == "4.9":
        renamed = [_rename(counter) for counter in counters]
        return (*renamed, added)
    return (*add_other_names(counters, names), added)


# Names in dcgm-exporter 4.8 and 4.9


def add_other_names(counters: tuple[CounterSpec, ...], names: NameSet) -> tuple[CounterSpec, ...]:
    """If `names` is `both`, adds a counter for each other name of a field in 4.8 and 4.9."""
    if names != "both":
        return counters
    written = {counter.name for counter in counters}
    both = []
    for counter in counters:
        both.append(counter)
        other = _rename(counter)
        # A row that the file has itself keeps its help text.
        if other.name not in written:
            both.append(other)

    return tuple(both)


def _rename(counter: CounterSpec) -> CounterSpec:
    """Converts a name of 4.8 to that of 4.9, and the reverse."""
    rename = rename_of(counter.name)
    if rename is None:
        return counter
    if counter.name == rename.new_name:
        field = rename.old
        name = rename.old.name
    else:
        field = rename.new
        name = rename.new_name

    kind = counter.type
    # Rates are gauges, but dcgm-exporter up to 4.8.2 declares NVLink bandwidth as a counter.
    if field.unit == "B/s" and kind == "counter":
        kind = "gauge"
    help_text = counter.help
    if field.unit != counter.field.unit:
        help_text = _UNIT.sub("", help_text)
    return CounterSpec(field, name, kind, help_text)
