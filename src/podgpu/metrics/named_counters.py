"""This module prints counters under the names the user chose: dcgm-exporter 4.8's, 4.9's, or each under both. Pure.

The files podgpu ships are written in 4.8's names and follow the choice, wherever a copy of them lies. A row of a user's
file asks for a name and gets it: what it stands for is printed under that name, in that field's unit. With `both` its
other name stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from podgpu.metrics.counters import SHIPPED, Counter, parse_counters, shipped_counters
from podgpu.metrics.fields import Field, table_text
from podgpu.metrics.names import HOST_LABELS, NameSet, Rename, rename_of

_ADDED = "added-in-4.9.csv"
_IN_UNIT = re.compile(r" ?\((?:in [^()]*|0 to 1)\)")
_UNIT_WORDS = {"ratio": "0 to 1", "ratio 0-1": "0 to 1", "B/s": "in bytes per second", "C": "in C"}


@dataclass(frozen=True, slots=True)
class Naming:
    """What `--dcgm-names` says."""

    names: NameSet = "4.8"
    as_in_4_6: bool = False
    """4.8 was asked for in so many words: a name of the user's means what it means to dcgm-exporter 4.8.3 and 4.8.4,
    to whom DCGM_FI_DEV_GPU_UTIL_RATIO is field 203, in percent."""

    @property
    def host_labels(self) -> tuple[str, ...]:
        return HOST_LABELS[self.names]

    def shipped(self, short: str) -> tuple[Counter, ...] | None:
        """The counters of a file podgpu brings along, by short or file name; None if it has no such file."""
        counters = shipped_counters(short)
        if counters is None or self.names == "4.8":
            return counters
        if SHIPPED.get(short, short) == SHIPPED["1.x"]:
            return counters  # its names are of neither generation
        renamed = map(_under_new_name, counters) if self.names == "4.9" else _under_both(counters)
        return _each_name_once((*renamed, *_added()))

    def parse(self, text: str, origin: str) -> tuple[Counter, ...]:
        """The counters of a file, be it a user's or a copy of one podgpu ships, as its image has. Raises UsageError."""
        counters = parse_counters(text, origin, in_4_6=self.as_in_4_6)
        name = origin.rpartition("/")[2]
        if counters == shipped_counters(name):
            return self.shipped(name) or counters
        return self.of_user(counters)

    def of_user(self, counters: tuple[Counter, ...]) -> tuple[Counter, ...]:
        """Those the user wrote, as they are printed."""
        return _each_name_once(_under_both(counters)) if self.names == "both" else counters

    def remarks(self, counters: Iterable[Counter]) -> list[str]:
        """What may surprise who reads the exposition of a user's file."""
        old = [c.name for c in counters if (rename := rename_of(c.name)) is not None and c.name != rename.new_name]
        if self.names != "4.9" or not old:
            return []
        return [
            f"{len(old)} rows have dcgm-exporter 4.8's names ({old[0]}, ...) and keep them and their units, whatever "
            "--dcgm-names says: a row is printed under the name it has; write 4.9's names, or use --dcgm-names both"
        ]


@cache
def _added() -> tuple[Counter, ...]:
    """What 4.9 has in its default file and 4.8 has not."""
    return parse_counters(table_text(_ADDED), _ADDED)


def _under_both(counters: Iterable[Counter]) -> Iterator[Counter]:
    """What is written stands before what is made of it, should a file have both."""
    written = list(counters)
    names = {counter.name for counter in written}
    for counter in written:
        yield counter
        other = _under_other_name(counter)
        if other.name not in names:
            yield other


def _each_name_once(counters: Iterable[Counter]) -> tuple[Counter, ...]:
    found: dict[str, Counter] = {}
    for counter in counters:
        found.setdefault(counter.name, counter)
    return tuple(found.values())


def _under_new_name(counter: Counter) -> Counter:
    rename = rename_of(counter.name)
    if rename is None or counter.name == rename.new_name:
        return counter
    return Counter(rename.new, rename.new_name, _type(counter, rename.new), _help(counter, rename.new))


def _under_other_name(counter: Counter) -> Counter:
    """The same counter where it has only one."""
    rename: Rename | None = rename_of(counter.name)
    if rename is None or counter.name != rename.new_name:
        return _under_new_name(counter)
    return Counter(rename.old, rename.old_name, counter.type, _help(counter, rename.old))


def _type(counter: Counter, field: Field) -> str:
    """NVLink's bandwidth is a rate: dcgm-exporter calls it a counter up to 4.8.2, and a gauge since."""
    return "gauge" if field.unit == "B/s" and counter.type == "counter" else counter.type


def _help(counter: Counter, field: Field) -> str:
    """The same words about the other unit."""
    if field.unit == counter.field.unit:
        return counter.help
    unit = f"({_UNIT_WORDS.get(field.unit) or f'in {field.unit.split()[0]}'})"
    sentence = _IN_UNIT.sub("", counter.help).rstrip(". ")
    return f"{sentence} {unit}." if sentence else unit
