"""Describes GPU conditions, XID errors and DCGM's health codes.

The tables are conditions.csv, xids.csv and health_codes.csv. Documents and metrics contain only a
condition's name and detail. This module adds the description and the advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from podgpu.metrics.fields import table_rows

LOST = "lost"
UNREADABLE = "unreadable"
XID = "xid"
NVLINK = "nvlink"
THERMAL = "thermal"
POWER_BRAKE = "power_brake"
DRIVER_AWAY = "driver_away"
NODE_GONE = "node_gone"
UNALLOCATED = "unallocated_use"
FIELD_CONDITIONS: Mapping[int, str] = {
    395: "row_remap_failure",
    396: "row_remap_pending",
    311: "ecc",
}
"""DCGM field id -> condition that is present while the field is above 0."""
_MAX_XIDS = 6  # maximum number of XIDs in the detail of a condition
_ACTIONS: Mapping[str, str] = {
    "reboot": "drain the node and reboot it",
    "reset": "drain the node and reset the GPU",
    "inspect": "check dmesg and the hardware (power, cables, links); contact NVIDIA's support "
    "with the report of nvidia-bug-report.sh",
}
"""Action in xids.csv -> advice. The most drastic action comes first."""


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    name: str
    severity: str  # `broken` or `warning`
    dcgm_watch: str  # DCGM's health check for the same problem; empty if there is none
    dcgm_code: str  # number of DCGM's error in health_codes.csv
    was: str  # after the condition has ended
    says: str
    says_many: str  # of several GPUs of a node, if it has a text of its own
    do: str


@cache
def conditions() -> Mapping[str, ConditionSpec]:
    """Returns the conditions by name, in display order."""
    return {row["name"]: ConditionSpec(**row) for row in table_rows("conditions.csv")}


@lru_cache(maxsize=1024)
def words_for(
    condition: str, detail: str = "", repeated_xids: tuple[tuple[int, int], ...] = ()
) -> tuple[str, str]:
    """Returns two texts: the problem, and advice.

    `repeated_xids`: XIDs and how often they occurred.
    """
    spec = conditions()[condition]
    if condition == XID:
        times = dict(repeated_xids)
        return spec.says.format(detail=_describe_xids(detail, times)), _xid_action(detail, times)
    return spec.says.format(detail=_describe_detail(condition, detail)), spec.do


def _describe_detail(condition: str, detail: str) -> str:
    """Returns the detail as the sentence of the condition needs it."""
    if condition == NVLINK:
        # `3/4` links are `3 of its 4` links.
        return detail.replace("/", " of its ") or "some of its"
    if condition == UNALLOCATED:
        return detail or "a container"
    return f" ({detail})" if detail else ""


def conditions_from_fields(values: Mapping[int, object]) -> dict[str, bool]:
    """Returns whether each condition of `FIELD_CONDITIONS` is present.

    Omits conditions whose field has no value.
    """
    present = {}
    for field, condition in FIELD_CONDITIONS.items():
        value = values.get(field)
        if isinstance(value, int | float):
            present[condition] = value > 0
    return present


# XIDs


class XidSpec(NamedTuple):
    text: str = "unknown error"
    cause: str = ""  # NVIDIA's class: application, driver, hardware or none; empty if unknown
    action: str = "none"  # key of `_ACTIONS`, or `none` if the GPU is healthy
    err_msg: str = "Unknown Error"  # value of this label in dcgm-exporter

    @property
    def needs_action(self) -> bool:
        """True if the XID means that the GPU is broken. False if an application caused it."""
        return self.action != "none"


@cache
def xid_specs() -> Mapping[int, XidSpec]:
    return {int(row.pop("number")): XidSpec(**row) for row in table_rows("xids.csv")}


def xid_spec(xid: int) -> XidSpec:
    return xid_specs().get(xid, XidSpec())


def xid_detail(xids: Iterable[int]) -> str:
    """Returns the detail of the condition `xid`, such as `48,79`."""
    return ",".join(map(str, sorted(set(xids))[:_MAX_XIDS]))


def _xids_in(detail: str) -> list[int]:
    return [int(xid) for xid in detail.split(",") if xid.isdecimal()]


def _describe_xids(detail: str, times: Mapping[int, int]) -> str:
    texts = []
    for xid in _xids_in(detail):
        text = f"XID {xid} ({xid_spec(xid).text})"
        if times.get(xid):
            text += f" {times[xid]} times"
        texts.append(text)
    return ", ".join(texts) or "an XID"


def _xid_action(detail: str, times: Mapping[int, int]) -> str:
    actions = {xid: xid_spec(xid).action for xid in _xids_in(detail)}
    worst = next((action for action in _ACTIONS if action in actions.values()), "inspect")
    do = _ACTIONS[worst]
    if worst == "inspect":
        return do
    if any(actions[xid] == worst for xid in actions.keys() & times.keys()):
        return f"the error came back: {do}, or replace the GPU if this was already done"
    return f"{do}; replace the GPU if the error comes back"


# Health codes


class HealthCode(NamedTuple):
    name: str
    severity: str
    category: str


@cache
def _health_codes() -> Mapping[int, HealthCode]:
    return {int(row.pop("number")): HealthCode(**row) for row in table_rows("health_codes.csv")}


def health_code(number: int) -> HealthCode:
    """Returns the description of a health code, with dcgm-exporter's names.

    DCGM 4 renamed the codes 10, 12 and 43.
    """
    unknown = HealthCode(f"DCGM_FR_UNKNOWN({number})", "UNKNOWN", "UNKNOWN")
    return _health_codes().get(number, unknown)
