"""Defines DCGM's fields (fields.csv): their types, units, names in all versions, and how to read
them from NVML.

The column `nvml` contains an expression. It is parsed here and executed in `gpu/nvml/driver.py`:

    nvmlDeviceGetClockInfo(NVML_CLOCK_SM)      a call on the device; arguments are numbers or NVML's constants
    nvmlDeviceGetUtilizationRates().gpu        one field of the result
    nvmlDeviceGetMigMode()[0]                  one element of the result
    field 82        field 139+138@all          nvmlDeviceGetFieldValues; `+` adds two values, `@` sets the scope
    gpm 1                                      a GPM metric, computed from two samples
    event xid       window clock_events        computed by podgpu from driver events or from earlier samples
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from sys import intern
from typing import Literal, NamedTuple

from podgpu.model import Value

ALL_SCOPES = 0xFFFFFFFF
INSTANCE_LEVELS = frozenset({"GPU_I", "GPU_CI"})
DEVICE_LEVELS = INSTANCE_LEVELS | {"GPU", "GLOBAL"}
XID_FIELD = 230
CLOCK_EVENTS_FIELD = 112
CLOCK_EVENTS: dict[int, str] = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bit of field 112 (DCGM_FI_DEV_CLOCKS_EVENT_REASONS) -> dcgm-exporter's name of the event."""
THROTTLE_REASONS: dict[int, str] = {
    240: "power_cap",
    241: "thermal",
    242: "sync_boost",
    243: "board_limit",
    244: "low_utilization",
    245: "reliability",
    1422: "sw_thermal",
    1423: "hw_thermal",
    1424: "hw_power_brake",
}
"""DCGM field id (a time in nanoseconds) -> label `reason` of podgpu_device_throttled_seconds_total.
"""


@dataclass(frozen=True, slots=True)
class NvmlCall:
    function: str
    arguments: tuple[int | str, ...]
    member: str = ""
    element: int | None = None

    @property
    def takes_device(self) -> bool:
        return not self.function.startswith("nvmlSystem") and self.function != "nvmlDeviceGetCount"


@dataclass(frozen=True, slots=True)
class FieldValue:
    ids: tuple[int, ...]
    scope: int = 0


@dataclass(frozen=True, slots=True)
class Gpm:
    metric: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A value that podgpu computes from driver events (XIDs) or from its own earlier samples."""

    what: str


Recipe = NvmlCall | FieldValue | Gpm | Recorded


@dataclass(frozen=True, slots=True)
class Field:
    id: int
    name: str
    name_since_4_6: str
    name_1x: str
    alias: str
    type: str  # int, float, text, blob or time
    unit: str
    # type of the entity: GPU, GPU_I, GPU_CI, GLOBAL, LINK, SWITCH, CPU, CPU_CORE, CONNECTX or VGPU
    level: str
    recipe: Recipe | None  # None if NVML does not provide the field
    convert: str  # key of `CONVERSIONS`
    # True if the value changes only when GPUs are added or removed; such a value is not read
    # periodically
    once: bool
    legacy: int | None = None  # id of the field with the same value in DCGM's older unit
    factor: float = (
        1.0  # the value of the legacy field times this factor is the value of this field
    )
    seen: str = ""
    """Document that contains the name, for names of DCGM 4.6.1 or later. `inferred` if no document
    does.
    """

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.name, self.name_since_4_6, self.name_1x, self.alias) if n)

    @property
    def per_instance(self) -> bool:
        """True if each MIG instance has its own value; False if there is one value per physical
        GPU.
        """
        return self.level in INSTANCE_LEVELS

    @property
    def is_rate(self) -> bool:
        return self.convert.startswith("kib_rate")


_CALL = re.compile(r"(\w+)\(([^)]*)\)(?:\.(\w+)|\[(\d+)\])?")
_FIELD = re.compile(r"field ([\d+]+)(?:@(\w+))?")


def parse_recipe(text: str) -> Recipe | None:
    if not text:
        return None
    if m := _CALL.fullmatch(text):
        arguments = tuple(int(a) if a.isdigit() else a for a in m[2].split(",") if a)
        return NvmlCall(m[1], arguments, m[3] or "", int(m[4]) if m[4] else None)
    if m := _FIELD.fullmatch(text):
        scope = {None: 0, "all": ALL_SCOPES}.get(m[2])
        return FieldValue(
            tuple(int(i) for i in m[1].split("+")), int(m[2]) if scope is None else scope
        )
    kind, _, rest = text.partition(" ")
    if kind == "gpm":
        return Gpm(int(rest))
    if kind in ("event", "window"):
        return Recorded(text)
    raise ValueError(f"fields.csv: unknown recipe {text!r}")


_TEXT_COLUMNS = (
    "name",
    "name_since_4_6",
    "name_1x",
    "alias",
    "type",
    "unit",
    "level",
    "convert",
    "seen",
)


@cache
def fields() -> Mapping[int, Field]:
    """Returns the fields by id. Repeated strings are interned, which saves 0.1 MiB."""
    return {
        int(row["id"]): Field(
            id=int(row["id"]),
            recipe=parse_recipe(row["nvml"]),
            once=row["when"] == "once",
            legacy=int(row["legacy"]) if row["legacy"] else None,
            factor=float(row["factor"] or 1),
            **{column: intern(row[column]) for column in _TEXT_COLUMNS},
        )
        for row in table_rows("fields.csv")
    }


def by_name(values: Mapping[int, Value]) -> dict[str, Value]:
    """Replaces field ids by field names."""
    return {fields()[number].name: value for number, value in values.items()}


def table_text(*names: str) -> str:
    """Reads a file of this package. `importlib.resources` would use half a MiB more memory."""
    folder, _, _ = __file__.rpartition("/")
    with open("/".join((folder, *names)), encoding="utf-8") as file:
        return file.read()


def table_rows(table: str) -> Iterator[dict[str, str]]:
    for row in csv.DictReader(table_text(table).splitlines()):
        assert None not in row, f"{table} has an unquoted comma in {row}"
        yield row


@cache
def _by_name() -> Mapping[str, Field]:
    return {name: field for field in fields().values() for name in field.names}


def field_named(name: str) -> Field | None:
    """Returns the field with this name. Accepts names of all DCGM versions and of dcgm-exporter
    1.x, and aliases.
    """
    return _by_name().get(name)


def nearest_names(name: str) -> list[str]:
    """Returns the known name that is most similar to a mistyped name, or no name. Ignores case."""
    folded_names = {known.casefold(): known for known in _by_name()}
    return [
        folded_names[close] for close in difflib.get_close_matches(name.casefold(), folded_names, 1)
    ]


@cache
def detail_helps() -> Mapping[int, str]:
    """Returns the help texts in details.csv by field id. A GPU's page shows these fields in the
    same order.
    """
    return {int(row["id"]): row["help"] for row in table_rows("details.csv")}


def clock_events_in_words(mask: int) -> str:
    return ", ".join(event for bit, event in CLOCK_EVENTS.items() if mask & bit) or "nothing"


# Names and units in dcgm-exporter 4.8 and 4.9. Each field id has one unit. A value with two units
# has two ids: field 252 (`DCGM_FI_DEV_FB_USED`) is in MiB, and field 1627
# (`DCGM_FI_DEV_FB_USED_BYTES`) is in bytes.

NameSet = Literal["4.8", "4.9", "both"]
HOST_LABELS: Mapping[NameSet, tuple[str, ...]] = {
    "4.8": ("Hostname",),
    "4.9": ("hostname",),
    "both": ("Hostname", "hostname"),
}
DECIMALS = 9  # rounding converted numbers to nine decimals removes floating-point errors


class Rename(NamedTuple):
    """The names and units of one value in dcgm-exporter 4.8 and 4.9."""

    old: Field
    new: Field  # same as `old` if only the name changed
    new_name: str
    factor: float  # new value = old value * factor

    @property
    def old_names(self) -> tuple[str, ...]:
        """Names before 4.9, except those of dcgm-exporter 1.x."""
        return tuple(
            name for name in self.old.names if name not in (self.new_name, self.old.name_1x)
        )


@cache
def renames() -> tuple[Rename, ...]:
    """Returns all renames, ordered by the id of the old field. For a text field, the label is
    renamed, not a metric.
    """
    successors = {
        field.legacy: field for field in fields().values()
    }  # the same value in the base unit of DCGM 4.6.1
    all_renames = []
    for old in fields().values():
        new = successors.get(old.id)
        if new is not None:
            all_renames.append(Rename(old, new, new.name, new.factor))
        elif old.name_since_4_6:
            all_renames.append(Rename(old, old, old.name_since_4_6, 1.0))
    return tuple(all_renames)


def rename_of(name: str) -> Rename | None:
    """Returns the rename that has this old or new name, or None."""
    return _renames_by_name().get(name)


@cache
def _renames_by_name() -> Mapping[str, Rename]:
    return {name: rename for rename in renames() for name in (*rename.old_names, rename.new_name)}


class Meaning(NamedTuple):
    """The field that a metric name stands for. If two fields differ only in their unit, it is the
    older field.
    """

    field: Field
    factor: float  # value in the metrics text = value in the field's unit * factor

    def value(self, printed: float) -> float:
        return printed if self.factor == 1.0 else round(printed / self.factor, DECIMALS)


@lru_cache(maxsize=8192)  # exporters choose the names of labels, so the cache needs a limit
def meaning(name: str) -> Meaning | None:
    """Returns the meaning of a metric name of any dcgm-exporter version, or None if no field has
    this name.
    """
    field = field_named(name)
    if field is None:
        return None
    if name == field.name_1x:
        return Meaning(field, factor_1x(field))
    return (
        Meaning(field, 1.0)
        if field.legacy is None
        else Meaning(fields()[field.legacy], field.factor)
    )


def factor_1x(field: Field) -> float:
    """Returns the factor by which dcgm-exporter 1.x multiplied a field's value, for example to
    print a time in µs.
    """
    return 1e-3 if field.unit == "ns" else 1.0


@cache
def generations(field_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns two tuples: the field's metric names in dcgm-exporter 4.8 and earlier, and its names
    in 4.9.
    """
    rename = rename_of(field_name)
    if rename is None:
        return _by_name()[field_name].names, ()
    names = dict.fromkeys((*rename.old.names, *rename.new.names))
    return tuple(name for name in names if name != rename.new_name), (rename.new_name,)


def names_of(field_name: str) -> tuple[str, ...]:
    """Returns all metric names of a field: those of dcgm-exporter 4.8 and earlier, then the name in
    4.9.
    """
    old, new = generations(field_name)
    return old + new


# Fields that are also attributes of DeviceState or GpuOrInstance

UTIL, ENGINE, POWER, TEMPERATURE, FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED = KEY_FIELDS = tuple(
    fields()[number].name for number in (203, 1001, 155, 150, 250, 251, 252, 253)
)
MEMORY_FIELDS = (FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED)
XID_NAME = fields()[XID_FIELD].name
TENSOR_ACTIVE, DRAM_ACTIVE = fields()[1004].name, fields()[1005].name
