"""This module says what DCGM's numbers mean: every field once, its names, type, unit, level and how NVML gives it.

The tables are CSV files beside this: fields.csv, xids.csv for the texts of XID errors, health_codes.csv for what DCGM's
health checks find, details.csv for what a GPU's own view shows.

The `nvml` column is a small language, parsed here and carried out in `gpu/nvml/plan.py`:

    nvmlDeviceGetClockInfo(NVML_CLOCK_SM)      a call on the device; arguments are numbers or NVML's constants
    nvmlDeviceGetUtilizationRates().gpu        ... of which one member is taken
    nvmlDeviceGetMigMode()[0]                  ... or one element
    field 82        field 139+138@all          nvmlDeviceGetFieldValues, summed over ids, with a scope
    gpm 1                                      a GPM metric between two samples
    event xid       window clock_events        kept by the exporter from events or past samples
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from sys import intern

ALL_SCOPES = 0xFFFFFFFF
INSTANCE_LEVELS = frozenset({"GPU_I", "GPU_CI"})
DEVICE_LEVELS = INSTANCE_LEVELS | {"GPU", "GLOBAL"}
UNKNOWN_XID = "unknown error"
XID_FIELD = 230
"""The number of the newest XID."""


@dataclass(frozen=True, slots=True)
class Call:
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
class Kept:
    """Not asked of the driver in a tick: the exporter keeps it (XID events, sample windows)."""

    what: str


Recipe = Call | FieldValue | Gpm | Kept


@dataclass(frozen=True, slots=True)
class Field:
    id: int
    name: str
    name_since_4_6: str
    name_1x: str
    alias: str
    type: str
    """int, float, text, blob or time."""
    unit: str
    level: str
    """The entity DCGM declares it for: GPU, GPU_I, GPU_CI, GLOBAL, LINK, SWITCH, CPU, CPU_CORE, CONNECTX, VGPU."""
    recipe: Recipe | None
    """None: NVML does not give it."""
    convert: str
    """Name of a function in `conversions`; empty: as is."""
    once: bool
    """Does not change while the topology stands: read once, not every tick."""
    name_in_4_6: str = ""
    """What DCGM 4.6 called it and no other version does: from 4.7 on the name is another field's."""
    legacy: int | None = None
    """The field that has the same figure in DCGM's older unit."""
    factor: float = 1.0
    """Of that unit to this one: the legacy field's number times this is this field's."""
    seen: str = ""
    """Where its newest name was found, of fields whose names came with DCGM 4.6.1 and later; `inferred`: nowhere."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.name, self.name_since_4_6, self.name_1x, self.alias) if n)

    @property
    def per_instance(self) -> bool:
        """A MIG instance has its own value; other fields exist once per physical GPU."""
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
        return Call(m[1], arguments, m[3] or "", int(m[4]) if m[4] else None)
    if m := _FIELD.fullmatch(text):
        scope = {None: 0, "all": ALL_SCOPES}.get(m[2])
        return FieldValue(tuple(int(i) for i in m[1].split("+")), int(m[2]) if scope is None else scope)
    kind, _, rest = text.partition(" ")
    if kind == "gpm":
        return Gpm(int(rest))
    if kind in ("event", "window"):
        return Kept(text)
    raise ValueError(f"fields.csv: no such recipe: {text!r}")


@cache
def fields() -> Mapping[int, Field]:
    return {int(row["id"]): _field(row) for row in table_rows("fields.csv")}


def table_text(*names: str) -> str:
    """Of a file beside this one: `importlib.resources` would bring zipfile and more with it, half a MiB."""
    folder, _, _ = __file__.rpartition("/")
    with open("/".join((folder, *names)), encoding="utf-8") as file:
        return file.read()


def table_rows(table: str) -> Iterator[dict[str, str]]:
    return iter(csv.DictReader(table_text(table).splitlines()))


def _field(row: Mapping[str, str]) -> Field:
    """With one text for what stands in hundreds of rows: 0.1 MiB."""
    return Field(
        id=int(row["id"]),
        name=row["name"],
        name_since_4_6=row["name_since_4_6"],
        name_1x=row["name_1x"],
        alias=row["alias"],
        type=intern(row["type"]),
        unit=intern(row["unit"]),
        level=intern(row["level"]),
        recipe=parse_recipe(row["nvml"]),
        convert=intern(row["convert"]),
        once=row["when"] == "once",
        name_in_4_6=row["name_in_4_6"],
        legacy=int(row["legacy"]) if row["legacy"] else None,
        factor=float(row["factor"] or 1),
        seen=intern(row["seen"]),
    )


@cache
def _by_name() -> Mapping[str, Field]:
    return {name: field for field in fields().values() for name in field.names}


def field_named(name: str, *, in_4_6: bool = False) -> Field | None:
    """The field with exactly this name: DCGM's old one, the one since 4.6, the 1.x one or an alias.

    `in_4_6`: as DCGM 4.6 has it, in which DCGM_FI_DEV_GPU_UTIL_RATIO is field 203, in percent.
    """
    return (_by_name_in_4_6().get(name) if in_4_6 else None) or _by_name().get(name)


@cache
def _by_name_in_4_6() -> Mapping[str, Field]:
    return {field.name_in_4_6: field for field in fields().values() if field.name_in_4_6}


@cache
def _by_folded_name() -> Mapping[str, str]:
    return {name.casefold(): name for name in _by_name()}


def nearest_names(name: str, n: int = 1) -> list[str]:
    """Real names close to a mistyped one, upper and lower case taken as the same."""
    import difflib  # not needed until there is something to say

    close = difflib.get_close_matches(name.casefold(), _by_folded_name(), n, 0.6)
    return [_by_folded_name()[folded] for folded in close]


# Words for numbers that are values of a field


def xid_text(xid: int) -> str:
    """What an XID number means in a few words; unused, reserved and newer numbers are unknown errors."""
    return _xid_texts().get(xid, UNKNOWN_XID)


@dataclass(frozen=True, slots=True)
class HealthCode:
    """What a health check found, how bad DCGM thinks it is and of what kind."""

    name: str
    severity: str
    category: str


def health_code(number: int) -> HealthCode:
    """Where DCGM 4 renamed a code (10, 12, 43) the name is what dcgm-exporter still prints."""
    return _health_codes().get(number) or HealthCode(f"DCGM_FR_UNKNOWN({number})", "UNKNOWN", "UNKNOWN")


@cache
def _xid_texts() -> Mapping[int, str]:
    return {int(row["number"]): row["text"] for row in table_rows("xids.csv")}


@cache
def _health_codes() -> Mapping[int, HealthCode]:
    rows = table_rows("health_codes.csv")
    return {int(row["number"]): HealthCode(row["name"], row["severity"], row["category"]) for row in rows}


@cache
def detail_helps() -> Mapping[int, str]:
    """What a GPU's own view shows beside the counters: field id -> what it is, in the order in which they are shown."""
    return {int(row["id"]): row["help"] for row in table_rows("details.csv")}


def detail_fields() -> tuple[Field, ...]:
    return tuple(fields()[number] for number in detail_helps())
