"""Maps the field names of dcgm-exporter 4.8 and 4.9 to each other and converts between their units (fields.csv).

Each field id has one unit. A value with two units has two ids: field 252 (`DCGM_FI_DEV_FB_USED`) is in MiB, and
field 1627 (`DCGM_FI_DEV_FB_USED_BYTES`) is in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from podgpu.metrics.fields import XID_FIELD, Field, field_named, fields
from podgpu.model import MIB

NameSet = Literal["4.8", "4.9", "both"]
HOST_LABELS: Mapping[NameSet, tuple[str, ...]] = {
    "4.8": ("Hostname",),
    "4.9": ("hostname",),
    "both": ("Hostname", "hostname"),
}
_DECIMALS = 9  # rounding converted numbers to nine decimals removes floating-point errors
_CLOSE = 1e-6  # a number this close to a whole number is rounded to it


class Rename(NamedTuple):
    """The names and units of one value in dcgm-exporter 4.8 and 4.9."""

    old: Field
    new: Field  # same as `old` if only the name changed
    new_name: str
    factor: float  # new value = old value * factor

    @property
    def old_names(self) -> tuple[str, ...]:
        """Names before 4.9, except those of dcgm-exporter 1.x."""
        return tuple(name for name in self.old.names if name not in (self.new_name, self.old.name_1x))


@cache
def renames() -> tuple[Rename, ...]:
    """Returns all renames, ordered by the id of the old field. For a text field, the label is renamed, not a metric."""
    all_renames = []
    for old in fields().values():
        new = successors().get(old.id)
        if new is not None:
            all_renames.append(Rename(old, new, new.name, new.factor))
        elif old.name_since_4_6:
            all_renames.append(Rename(old, old, old.name_since_4_6, 1.0))
    return tuple(all_renames)


@cache
def successors() -> Mapping[int, Field]:
    """Maps the id of a field in an older unit to the field that DCGM 4.6.1 added in a base unit."""
    return {field.legacy: field for field in fields().values() if field.legacy is not None}


def rename_of(name: str) -> Rename | None:
    """Returns the rename that has this old or new name, or None."""
    return _renames_by_name().get(name)


@cache
def _renames_by_name() -> Mapping[str, Rename]:
    return {name: rename for rename in renames() for name in (*rename.old_names, rename.new_name)}


class Meaning(NamedTuple):
    """The field that a metric name stands for. If two fields differ only in their unit, it is the older field."""

    field: Field
    factor: float  # value in the metrics text = value in the field's unit * factor

    def value(self, printed: float) -> float:
        return printed if self.factor == 1.0 else round(printed / self.factor, _DECIMALS)


@cache
def meaning(name: str) -> Meaning | None:
    """Returns the meaning of a metric name of any dcgm-exporter version, or None if no field has this name."""
    field = field_named(name)
    if field is None:
        return None
    if name == field.name_1x:
        return Meaning(field, factor_1x(field))
    return Meaning(field, 1.0) if field.legacy is None else Meaning(fields()[field.legacy], field.factor)


def factor_1x(field: Field) -> float:
    """Returns the factor by which dcgm-exporter 1.x multiplied a field's value, for example to print a time in µs."""
    return 1e-3 if field.unit == "ns" else 1.0


def converted(field: Field, number: int | float, factor: float) -> int | float:
    """Multiplies the number by the factor and converts it to the field's type. Integers are truncated, as in DCGM."""
    exact = number * factor
    if field.type != "int":
        return round(exact, _DECIMALS)
    return math.floor(exact + _CLOSE) if factor < 1 else round(exact)


def in_legacy_units(values: Mapping[int, float]) -> dict[int, float]:
    """Returns the values by field id. If a value is present only in a base unit, adds it in the older unit."""
    completed = dict(values)
    for number, value in values.items():
        legacy = fields()[number].legacy
        if legacy is not None:
            completed.setdefault(legacy, round(value / fields()[number].factor, _DECIMALS))
    return completed


@cache
def generations(field_id: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns two tuples: the field's metric names in dcgm-exporter 4.8 and earlier, and its names in 4.9."""
    rename = rename_of(fields()[field_id].name)
    if rename is None:
        return fields()[field_id].names, ()
    names = dict.fromkeys((*rename.old.names, *rename.new.names))
    return tuple(name for name in names if name != rename.new_name), (rename.new_name,)


def names_of(field_id: int) -> tuple[str, ...]:
    """Returns all metric names of a field's value, in the older and the newer unit. The names of 4.8 come first."""
    old, new = generations(field_id)
    return old + new


# Fields that are also attributes of DeviceState or GpuOrInstance

UTIL, ENGINE, POWER, TEMPERATURE, FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED = KEY_FIELDS = tuple(
    fields()[number].name for number in (203, 1001, 155, 150, 250, 251, 252, 253)
)
XID_NAME = fields()[XID_FIELD].name
_MAX_RATIO = 1.01  # a ratio can exceed 1 if its counter is read slightly late


def gpu_figures(values: Mapping[str, float]) -> dict[str, float | None]:
    """Computes attributes of `DeviceState` from fields in the units of dcgm-exporter 4.8."""
    power = values.get(POWER)
    return {
        "power_mw": None if power is None else round(power * 1000),
        "temperature_celsius": values.get(TEMPERATURE),
    }


def device_figures(values: Mapping[str, float]) -> dict[str, float | None]:
    """Computes attributes of `GpuOrInstance` from fields. MIG instances have no GPU_UTIL, so `ENGINE` is used."""
    used, total = values.get(FB_USED), values.get(FB_TOTAL)
    if total is None and used is not None and FB_FREE in values:
        total = used + values[FB_FREE] + values.get(FB_RESERVED, 0)
    ratio = values[UTIL] / 100 if UTIL in values else values.get(ENGINE)
    return {
        "utilization_ratio": ratio if ratio is not None and 0 <= ratio <= _MAX_RATIO else None,
        "memory_used_bytes": None if used is None else round(used * MIB),
        "memory_total_bytes": None if total is None else round(total * MIB),
    }
