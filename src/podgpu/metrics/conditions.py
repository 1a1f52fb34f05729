"""This module owns the closed list of what can be wrong with a GPU, in conditions.csv, and the words for each.

An exporter, the cluster and `top` all have their words from here: what is told from one to the other is a condition's
name and its detail (which XIDs, how many links), never a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from podgpu.metrics.fields import UNKNOWN_XID, table_rows, xid_text

LOST, UNREADABLE, XID, NVLINK = "lost", "unreadable", "xid", "nvlink"
THERMAL, POWER_BRAKE = "thermal", "power_brake"
DRIVER_AWAY, NODE_GONE = "driver_away", "node_gone"
FIELD_CONDITIONS: Mapping[int, str] = {395: "row_remap_failure", 396: "row_remap_pending", 311: "ecc"}
"""DCGM field -> the condition that there is while it is above 0."""
_MOST_XIDS = 6
"""Named at once."""
_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")
_LINKS = re.compile(r"([0-9]{1,3})/([0-9]{1,3})")
_ACTIONS: Mapping[str, str] = {
    "reboot": "drain the node and reboot it; have the GPU replaced if it comes back",
    "reset": "drain the node and reset the GPU; have it replaced if it comes back",
    "inspect": "see dmesg and the hardware (power, cables, links); ask NVIDIA's support with a report of"
    " nvidia-bug-report.sh",
}
"""Action of xids.csv -> what to do; the first that any of them asks for. `none`: the GPU is well."""


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    name: str
    severity: str
    """`broken` or `warning`: how loud it is; a GPU with either is broken."""
    says: str
    do: str


@cache
def conditions() -> Mapping[str, ConditionSpec]:
    """In the order in which they are told."""
    rows = table_rows("conditions.csv")
    return {row["condition"]: ConditionSpec(row["condition"], row["severity"], row["says"], row["do"]) for row in rows}


@cache
def order_of(condition: str) -> int:
    return list(conditions()).index(condition)


@lru_cache(maxsize=1024)
def words_for(condition: str, detail: str = "") -> tuple[str, str]:
    """What is wrong and what to do. `detail` may come from anybody's exposition: what it cannot mean is left out."""
    spec = conditions()[condition]
    if condition == XID:
        return spec.says.format(detail=_xids_in_words(detail)), _xid_action(detail)
    if condition == NVLINK:
        links = _LINKS.fullmatch(detail)
        return spec.says.format(detail=f"{links[1]} of its {links[2]}" if links else "some of its"), spec.do
    word = f" ({detail})" if _WORD.fullmatch(detail) else ""
    return spec.says.format(detail=word), spec.do


def told_by_fields(values: Mapping[int, object]) -> dict[str, bool]:
    """Condition -> whether it is there, of those that a field says; one whose field is not known is not here."""
    found = ((condition, values.get(field)) for field, condition in FIELD_CONDITIONS.items())
    return {condition: value > 0 for condition, value in found if isinstance(value, int | float)}


# XIDs


@cache
def _xid_kinds() -> Mapping[int, tuple[str, str]]:
    """Number -> class and action."""
    return {int(row["number"]): (row["class"], row["action"]) for row in table_rows("xids.csv")}


def xid_class(xid: int) -> str:
    """By NVIDIA's classes: application, driver or hardware; empty: nobody knows."""
    return _xid_kinds().get(xid, ("", "none"))[0]


def xid_needs_action(xid: int) -> bool:
    """Whether the GPU has to be looked after: an application's fault passes with the application."""
    return _xid_kinds().get(xid, ("", "none"))[1] != "none"


def xid_detail(xids: Iterable[int]) -> str:
    """As the label `detail` has them."""
    return ",".join(map(str, sorted(set(xids))[:_MOST_XIDS]))


def _xids_in(detail: str) -> list[int]:
    return [int(part) for part in detail.split(",") if part.isdecimal() and len(part) < 6][:_MOST_XIDS]


def _xids_in_words(detail: str) -> str:
    texts = ((xid, xid_text(xid)) for xid in _xids_in(detail))
    return ", ".join(f"XID {xid}" + (f" ({text})" if text != UNKNOWN_XID else "") for xid, text in texts) or "an XID"


def _xid_action(detail: str) -> str:
    actions = {_xid_kinds().get(xid, ("", "none"))[1] for xid in _xids_in(detail)}
    return next((do for action, do in _ACTIONS.items() if action in actions), _ACTIONS["inspect"])
