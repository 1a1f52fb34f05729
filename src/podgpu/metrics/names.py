"""This module knows two generations of DCGM's names, dcgm-exporter 4.8's and 4.9's, and what is one figure in both.

A unit belongs to a field's id, never to its name: `DCGM_FI_DEV_FB_USED` is field 252 in MiB, and field 1627 in bytes is
`DCGM_FI_DEV_FB_USED_BYTES`. Everyone who reads an exposition asks `meaning` what a name in it says.
`fields.csv` has the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from podgpu.metrics.fields import Field, field_named, fields

NameSet = Literal["4.8", "4.9", "both"]
"""Whose names are printed: dcgm-exporter 4.8's, 4.9's, or each family under both."""

HOST_LABELS: Mapping[NameSet, tuple[str, ...]] = MappingProxyType(
    {"4.8": ("Hostname",), "4.9": ("hostname",), "both": ("Hostname", "hostname")}
)
_DECIMALS = 9
"""Of a number that was converted: more than dcgm-exporter prints, fewer than binary fractions show."""
_CLOSE = 1e-6
"""To a whole number from below: the trace of a binary fraction."""
_MOST_OF_RATIO = 1.01
"""A counter read a moment too late tells a little more than everything."""


@dataclass(frozen=True, slots=True)
class Rename:
    """One figure under 4.8's name and under 4.9's."""

    old: Field
    new: Field
    """The same field where only the name changed."""
    new_name: str
    factor: float
    """The old number times this is the new one."""

    @property
    def old_name(self) -> str:
        return self.old.name

    @property
    def old_names(self) -> tuple[str, ...]:
        """Every name that stands for the old figure, without those of 1.x."""
        others = (name for name in self.old.names if name not in (self.new_name, self.old.name_1x))
        return tuple(others)


@cache
def renames() -> tuple[Rename, ...]:
    """All of them, ordered by the old field's id; those of type text are names of labels."""
    found = []
    for old in fields().values():
        new = successors().get(old.id)
        if new is not None:
            found.append(Rename(old, new, new.name, new.factor))
        elif old.name_since_4_6:
            found.append(Rename(old, old, old.name_since_4_6, 1.0))
    return tuple(found)


@cache
def successors() -> Mapping[int, Field]:
    """Id of a field in an older unit -> the field that has the same figure in a base unit, since DCGM 4.6.1 or 4.7."""
    return {field.legacy: field for field in fields().values() if field.legacy is not None}


def counterpart(field: Field) -> tuple[Field, float] | None:
    """The field with the same figure in the other unit, and what its number is to be multiplied by to be this one's."""
    if field.legacy is not None:
        return fields()[field.legacy], field.factor
    new = successors().get(field.id)
    return None if new is None else (new, 1 / new.factor)


@cache
def rename_of(name: str) -> Rename | None:
    """The rename that a name of either generation has part in."""
    return _by_any_name().get(name)


@cache
def _by_any_name() -> Mapping[str, Rename]:
    return {name: rename for rename in renames() for name in (*rename.old_names, rename.new_name)}


class Meaning(NamedTuple):
    """What a series of some name says."""

    field: Field
    """In the older unit where there are two: figures are kept in that one."""
    factor: float
    """What is printed, divided by this, is in that field's unit."""

    def value(self, printed: float) -> float:
        return printed if self.factor == 1.0 else round(printed / self.factor, _DECIMALS)


@cache
def meaning(name: str) -> Meaning | None:
    """Of any name of any generation; None: no field has it.

    `DCGM_FI_DEV_GPU_UTIL_RATIO` is a ratio here, as from DCGM 4.7 on: see `names_meant_as_in_4_6`.
    """
    field = field_named(name)
    if field is None:
        return None
    return Meaning(field, 1.0) if field.legacy is None else Meaning(fields()[field.legacy], field.factor)


def names_meant_as_in_4_6(printed: Iterable[tuple[str, float]]) -> frozenset[str]:
    """Of an exposition's names with their numbers: those under which there can only be what DCGM 4.6 calls so.

    That is percent under a ratio's name: dcgm-exporter 4.8.3 and 4.8.4 print it for who asks for the name.
    """
    doubtful = doubtful_names()
    return frozenset(name for name, number in printed if name in doubtful and number > _MOST_OF_RATIO)


@cache
def doubtful_names() -> frozenset[str]:
    """That mean one field in DCGM 4.6 and another from 4.7 on."""
    return frozenset(field.name_in_4_6 for field in fields().values() if field.name_in_4_6)


def converted(field: Field, number: int | float, factor: float) -> int | float:
    """A number times a factor, as the field has it: what is whole is cut off as DCGM cuts it off, not rounded up."""
    exact = number * factor
    if field.type != "int":
        return round(exact, _DECIMALS)
    return math.floor(exact + _CLOSE) if factor < 1 else round(exact)


def in_legacy_units(values: Mapping[int, float]) -> dict[int, float]:
    """By field, with what is there in a base unit only under the older field's id too."""
    found = dict(values)
    for number, value in values.items():
        known = _legacy().get(number)
        if known is not None:
            legacy, factor = known
            found.setdefault(legacy, round(value / factor, _DECIMALS))
    return found


@cache
def _legacy() -> Mapping[int, tuple[int, float]]:
    return {new.id: (old, new.factor) for old, new in successors().items()}


@cache
def generations(field_id: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a figure by generation: 4.8's with those before it, and 4.9's. One exposition may have both."""
    names = names_of(field_id)
    rename = rename_of(fields()[field_id].name)
    new = () if rename is None else (rename.new_name,)
    return tuple(name for name in names if name not in new), new


@cache
def names_of(field_id: int) -> tuple[str, ...]:
    """Every name under which the figure of a field may stand in an exposition, in either unit, 4.8's first."""
    field = fields()[field_id]
    other = counterpart(field)
    both = (field,) if other is None else sorted((field, other[0]), key=lambda known: known.id)
    return tuple(name for known in both for name in known.names)
