"""Defines DCGM's fields (fields.csv): types, units, names in all versions, and NVML calls.

The column `nvml` contains an expression. It is parsed here, and executed in
`node/gpu/nvml/driver.py`:

    nvmlDeviceGetClockInfo(NVML_CLOCK_SM)   a call on the device; arguments: numbers, NVML constants
    nvmlDeviceGetUtilizationRates().gpu     one field of the result
    nvmlDeviceGetMigMode()[0]               one element of the result
    field 82        field 139+138@all       nvmlDeviceGetFieldValues; `+` adds two values, and
                                            `@` sets the scope
    gpm 1                                   a GPM metric, computed from two samples
    event xid       window clock_events     computed by podgpu from events or from earlier samples
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

from podgpu.model import FieldValues, Value

ALL_SCOPES = 0xFFFFFFFF
INSTANCE_LEVELS = frozenset({"GPU_I", "GPU_CI"})
DEVICE_LEVELS = INSTANCE_LEVELS | {"GPU", "GLOBAL"}
XID_FIELD = 230
HEALTH_FIELD = 9003
P2P_FIELD = 9004
P2P_STATES = (
    "OK",
    "ChipsetNotSupported",
    "GPUNotSupported",
    "TopologyNotSupported",
    "DisabledByRegKey",
    "NotSupported",
    "Unknown",
)
"""States of an NVLink connection between two GPUs, by number. NVML and DCGM have the same."""
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
"""DCGM field id (time in nanoseconds) -> `reason` of podgpu_device_throttled_seconds_total."""


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
    type: str  # int, float, text or blob
    unit: str
    # type of the entity: GPU, GPU_I, GPU_CI, GLOBAL, LINK, SWITCH, CPU, CPU_CORE, CONNECTX or VGPU
    level: str
    recipe: Recipe | None  # None if NVML does not provide the field
    convert: str  # key of `CONVERSIONS`
    # True if the value changes only when GPUs are added or removed; such a value is not read
    # periodically
    once: bool
    legacy: int | None = None  # id of the field with the same value in DCGM's older unit
    # the value of the legacy field times this factor is the value of this field
    factor: float = 1.0
    # document that contains the name, for names of DCGM 4.6.1 or later; `inferred` if none does
    seen: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        names = (self.name, self.name_since_4_6, self.name_1x, self.alias)
        return tuple(name for name in names if name)

    @property
    def per_instance(self) -> bool:
        """True if each MIG instance has its own value; False for one value per physical GPU."""
        return self.level in INSTANCE_LEVELS

    @property
    def is_rate(self) -> bool:
        return self.convert.startswith("kib_rate")


_CALL = re.compile(r"(\w+)\(([^)]*)\)(?:\.(\w+)|\[(\d+)\])?")
_FIELD = re.compile(r"field ([\d+]+)(?:@(\w+))?")


def _parse_call(function: str, listed: str, member: str | None, element: str | None) -> NvmlCall:
    arguments: list[int | str] = []
    for text in filter(None, listed.split(",")):
        argument: int | str = text
        if text.isdigit():
            argument = int(text)
        arguments.append(argument)

    index = int(element) if element else None
    return NvmlCall(function, tuple(arguments), member or "", index)


def parse_recipe(text: str) -> Recipe | None:
    """Parses how a field is read from NVML. Returns None if it is not read from NVML."""
    if not text:
        return None
    if call := _CALL.fullmatch(text):
        return _parse_call(*call.groups())
    if value := _FIELD.fullmatch(text):
        ids = tuple(map(int, value[1].split("+")))
        if value[2] == "all":
            return FieldValue(ids, ALL_SCOPES)
        return FieldValue(ids, int(value[2] or 0))
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
    by_id = {}
    for row in table_rows("fields.csv"):
        texts = {column: intern(row[column]) for column in _TEXT_COLUMNS}
        legacy = row["legacy"]
        field = Field(
            id=int(row["id"]),
            recipe=parse_recipe(row["nvml"]),
            once=row["when"] == "once",
            legacy=int(legacy) if legacy else None,
            factor=float(row["factor"] or 1),
            **texts,
        )
        by_id[field.id] = field

    return by_id


def by_name(values: FieldValues) -> dict[str, Value]:
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
def _fields_by_name() -> Mapping[str, Field]:
    named: dict[str, Field] = {}
    for field in fields().values():
        named |= dict.fromkeys(field.names, field)
    return named


def field_named(name: str) -> Field | None:
    """Returns the field with this name.

    Accepts names of all DCGM versions and of dcgm-exporter 1.x, and aliases.
    """
    return _fields_by_name().get(name)


def nearest_names(name: str) -> list[str]:
    """Returns the known name that is most similar to a mistyped name, or no name. Ignores case."""
    folded_names = {known.casefold(): known for known in _fields_by_name()}
    matches = difflib.get_close_matches(name.casefold(), folded_names, 1)
    return [folded_names[match] for match in matches]


@cache
def detail_helps() -> Mapping[int, str]:
    """Returns the help texts in details.csv by field id. A GPU's page keeps this order."""
    return {int(row["id"]): row["help"] for row in table_rows("details.csv")}


def clock_events_of(mask: int) -> list[str]:
    return [event for bit, event in CLOCK_EVENTS.items() if mask & bit]


def clock_events_in_words(mask: int) -> str:
    return ", ".join(clock_events_of(mask)) or "nothing"


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
        others = (self.new_name, self.old.name_1x)
        return tuple(name for name in self.old.names if name not in others)


@cache
def renames() -> tuple[Rename, ...]:
    """Returns all renames, ordered by the id of the old field.

    For a text field, the label is renamed, not a metric.
    """
    # the same value in the base unit of DCGM 4.6.1
    successors = {field.legacy: field for field in fields().values()}
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
    named: dict[str, Rename] = {}
    for rename in renames():
        named |= dict.fromkeys((*rename.old_names, rename.new_name), rename)
    return named


class Meaning(NamedTuple):
    """The field that a metric name stands for.

    If two fields differ only in their unit, it is the older field.
    """

    field: Field
    factor: float  # value in the metrics text = value in the field's unit * factor

    def value(self, printed: float) -> float:
        if self.factor == 1.0:
            return printed
        return round(printed / self.factor, DECIMALS)


@lru_cache(maxsize=8192)  # exporters choose the names of labels, so the cache needs a limit
def meaning(name: str) -> Meaning | None:
    """Returns the meaning of a metric name of any dcgm-exporter version, or None if unknown."""
    field = field_named(name)
    if field is None:
        return None
    if name == field.name_1x:
        return Meaning(field, factor_1x(field))
    if field.legacy is not None:
        return Meaning(fields()[field.legacy], field.factor)
    return Meaning(field, 1.0)


def factor_1x(field: Field) -> float:
    """Returns the factor by which dcgm-exporter 1.x multiplied a value: it printed times in µs."""
    if field.unit == "ns":
        return 1e-3
    return 1.0


@cache
def generations(field_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the field's metric names in dcgm-exporter 4.8 and earlier, and its new name in 4.9.

    The second tuple is empty if 4.9 did not rename the field.
    """
    rename = rename_of(field_name)
    if rename is None:
        return _fields_by_name()[field_name].names, ()
    # If only the name changed, `old` and `new` are the same field.
    names = dict.fromkeys((*rename.old.names, *rename.new.names))
    del names[rename.new_name]
    return tuple(names), (rename.new_name,)


def names_of(field_name: str) -> tuple[str, ...]:
    """Returns all metric names of a field: of dcgm-exporter 4.8 and earlier, then of 4.9."""
    old, new = generations(field_name)
    return old + new


# Fields that are also attributes of DeviceState, GpuOrInstance or HolderUsage

UTIL = "DCGM_FI_DEV_GPU_UTIL"
ENGINE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
POWER = "DCGM_FI_DEV_POWER_USAGE"
TOTAL_ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
FB_TOTAL = "DCGM_FI_DEV_FB_TOTAL"
FB_FREE = "DCGM_FI_DEV_FB_FREE"
FB_USED = "DCGM_FI_DEV_FB_USED"
FB_RESERVED = "DCGM_FI_DEV_FB_RESERVED"
MEMORY_FIELDS = (FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED)
KEY_FIELDS = (UTIL, ENGINE, POWER, TEMPERATURE, *MEMORY_FIELDS)
XID_NAME = "DCGM_FI_DEV_XID_ERRORS"
HEALTH = "DCGM_EXP_GPU_HEALTH_STATUS"
P2P = "DCGM_EXP_P2P_STATUS"
TENSOR_ACTIVE = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
DRAM_ACTIVE = "DCGM_FI_PROF_DRAM_ACTIVE"
PCIE_BYTES = ("DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES")
NVLINK_BYTES = ("DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES")
ACTIVITY_FIELDS = frozenset({TENSOR_ACTIVE, DRAM_ACTIVE, *PCIE_BYTES, *NVLINK_BYTES})
"""Fields that tell why a GPU is slow."""
