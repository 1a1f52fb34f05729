"""This module says which of DCGM's series figures are made of, and what a number under each name means. Pure.

Names of either generation lead to one field, in its older unit: what is in a base unit is converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from podgpu.catalog.conditions import FIELD_CONDITIONS
from podgpu.catalog.fields import XID_FIELD, fields
from podgpu.catalog.names import Meaning, doubtful_names, meaning, names_meant_as_in_4_6, names_of
from podgpu.exposition.parse import ParsedSample
from podgpu.figures.device import FIELDS

HEALTH_FIELDS = (*FIELD_CONDITIONS, XID_FIELD)
UNKNOWN_FIELD = 0
"""Of a series that was asked for by a name no field has."""


class FigureName(NamedTuple):
    """What a series of some name is about."""

    number: int
    """Of the field, in the older unit where there are two."""
    per_instance: bool
    """MIG instances have their own."""
    meaning: Meaning | None = None
    """How the number printed is brought to that unit; None: it is in it."""


@lru_cache(maxsize=16)
def field_names(measured: str, beside: tuple[int, ...]) -> dict[str, FigureName]:
    numbers = [*FIELDS, *HEALTH_FIELDS, *beside]
    known = meaning(measured)
    if known is not None:
        numbers.append(known.field.id)
    found = {name: _figure_name(name, number) for number in numbers for name in names_of(number)}
    if measured and known is None:
        found[measured] = FigureName(UNKNOWN_FIELD, True)
    return found


def _figure_name(name: str, number: int) -> FigureName:
    known = meaning(name)
    return FigureName(number, fields()[number].per_instance, known if known and known.factor != 1.0 else None)


def names_printed(samples: Sequence[ParsedSample], measured: str, beside: tuple[int, ...]) -> dict[str, FigureName]:
    """As the names are meant in this exposition."""
    names = field_names(measured, beside)
    doubtful = doubtful_names()
    old = names_meant_as_in_4_6([(s.name, s.value) for s in samples if s.name in doubtful])
    return {**names, **{name: names[name]._replace(meaning=None) for name in old & names.keys()}} if old else names
