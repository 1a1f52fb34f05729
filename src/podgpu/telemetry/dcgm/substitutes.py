"""This module asks an engine that is too old to know a field in a base unit for the older field instead. Pure.

DCGM 4.7 has 1613 and the later ones, 4.6.1 those from 1600 on; every version has the fields in the older units. A field
that engine and library both know is asked for by its own id: the older one would be less exact, or cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podgpu.catalog.fields import Field
from podgpu.catalog.names import converted, counterpart
from podgpu.telemetry.dcgm.values import Latest

_FIRST_OF_4_7 = 1613
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine is asked for, so that the wanted fields can be told."""

    fields: tuple[Field, ...]
    instead: tuple[tuple[Field, int, float], ...]
    """A wanted field that is not asked for, the one that is, and what its number is to be multiplied by."""

    def complete(self, latest: Latest) -> None:
        """Adds the fields that were not asked for: their values, and that there cannot be any."""
        for wanted, number, factor in self.instead:
            for values in latest.values.values():
                value = values.get(number)
                if value is not None and not isinstance(value, str):
                    values[wanted.id] = converted(wanted, value, factor)
            latest.unsupported += [(entity, wanted.id) for entity, i in latest.unsupported if i == number]


def asked_of(version: Version, wanted: Sequence[Field]) -> Asked:
    """`version`: the older one of library and engine; empty: not known, and the older fields are asked for."""
    instead: list[tuple[Field, int, float]] = []
    asked: dict[int, Field] = {}
    for field in wanted:
        other = None if knows(version, field) else counterpart(field)
        if other is None:
            asked[field.id] = field
        else:
            asked[other[0].id] = other[0]
            instead.append((field, other[0].id, other[1]))
    return Asked(tuple(asked.values()), tuple(instead))


def knows(version: Version, field: Field) -> bool:
    """Whether a DCGM of this version has a field, as far as its unit goes."""
    if field.legacy is None:
        return True
    return version >= ((4, 7) if field.id >= _FIRST_OF_4_7 else (4, 6, 1))
