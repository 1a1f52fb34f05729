"""Describes GPU conditions, XID errors and DCGM's health codes.

The tables are conditions.csv, xids.csv and health_codes.csv. Documents and metrics contain only a
condition's name and detail. This module adds the description and the advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from podgpu.errors import utc_text
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
APPLICATION_XID = "application_xid"
ORPHANED = "orphaned_memory"
RECOVERY = "recovery_action"
RECURRING = "recurring"
FABRIC = "fabric"
KUBERNETES_HEALTHY = "kubernetes_healthy"
KUBERNETES_UNHEALTHY = "kubernetes_unhealthy"
RECOVERY_FIELD = 1523  # DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION
FABRIC_FIELD = 170  # DCGM_FI_DEV_FABRIC_MANAGER_STATUS
FIELD_CONDITIONS: Mapping[int, str] = {
    395: "row_remap_failure",
    396: "row_remap_pending",
    311: "ecc",
    RECOVERY_FIELD: RECOVERY,
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
NO_RECOVERY = "none"
REPAIRS = ("replace", "reboot", "reset")
"""Repairs of a GPU that need an empty node. The most drastic one comes first."""
# The remedy of these problems is a recovery action of the driver, if it advises one.
_RECOVERABLE = frozenset({XID, "ecc", "row_remap_pending", NVLINK, FABRIC})
_FABRIC_TEXTS: Mapping[str, str] = {
    "not_started": "the GPU is not registered with the NVLink fabric",
    "in_progress": "the GPU waits to be registered with the NVLink fabric",
    "failed": "the registration of the GPU with the NVLink fabric failed",
}
_FABRIC_STATES: Mapping[int, str | None] = {
    1: "not_started",
    2: "in_progress",
    3: None,
    4: "failed",
}
"""Value of `FABRIC_FIELD` -> detail of the condition. None if the GPU is registered."""


@dataclass(frozen=True, slots=True)
class ConditionSpec:
    name: str
    severity: str  # `broken` or `warning`
    of: str  # `gpu`; `workload` or `kubernetes` if podgpu finds no problem of the GPU itself
    recurs: str  # how many failures within a day make the GPU unreliable; empty: it is no failure
    dcgm_watch: str  # DCGM's health check for the same problem; empty if there is none
    dcgm_code: str  # number of DCGM's error in health_codes.csv
    was: str  # after the condition has ended
    says: str
    says_many: str  # of several GPUs of a node, if it has a text of its own
    do: str
    repair: str  # key of `REPAIRS`; empty if it depends on the detail, or if there is none


@cache
def conditions() -> Mapping[str, ConditionSpec]:
    """Returns the conditions by name, in display order."""
    return {row["name"]: ConditionSpec(**row) for row in table_rows("conditions.csv")}


@cache
def _ranks() -> Mapping[str, int]:
    return {name: rank for rank, name in enumerate(conditions())}


def rank_condition(condition: str) -> int:
    """Returns a number that is lower for worse conditions.

    A condition that this version does not know may be worse than all others.
    """
    return _ranks().get(condition, -1)


def breaks_gpu(condition: str) -> bool:
    """Returns False for a problem of a workload, and for an opinion of Kubernetes: they do not mean
    that the GPU is broken.
    """
    spec = conditions().get(condition)
    return spec is None or spec.of == "gpu"


def names_workload(condition: str) -> bool:
    """Returns True if the text of the condition may name a container."""
    spec = conditions().get(condition)
    return spec is not None and spec.of == "workload"


def is_grave(condition: str) -> bool:
    """Returns True for a problem that makes a GPU unusable, and False for a warning.

    A condition of a newer version may make it unusable.
    """
    spec = conditions().get(condition)
    return spec is None or (spec.of == "gpu" and spec.severity == "broken")


@cache
def failure_conditions() -> Mapping[str, int]:
    """Returns the conditions that are failures of a GPU, and how often a GPU may have them within a
    day before it is unreliable.
    """
    specs = [spec for spec in conditions().values() if spec.recurs]
    return {spec.name: int(spec.recurs) for spec in specs}


@cache
def harmless_conditions() -> tuple[str, ...]:
    """Returns the conditions of GPUs that are not broken."""
    return tuple(name for name in conditions() if not breaks_gpu(name))


@lru_cache(maxsize=1024)
def words_for(
    condition: str,
    detail: str = "",
    repeated_xids: tuple[tuple[int, int], ...] = (),
    recovery: str = "",
) -> tuple[str, str]:
    """Returns two texts: the problem, and advice.

    `repeated_xids`: XIDs and how often they occurred. `recovery`: the recovery action that the
    driver advises for this GPU, `NO_RECOVERY`, or empty if the driver does not report it.
    """
    times = dict(repeated_xids)
    if condition == XID:
        described = _describe_xids(detail, times)
    else:
        described = _describe_detail(condition, detail)

    problem = conditions()[condition].says.format(detail=described)
    return problem, _find_advice(condition, detail, times, recovery)


def _find_advice(condition: str, detail: str, times: Mapping[int, int], recovery: str) -> str:
    # Advises the same as `find_repair`. What the driver advises comes first.
    if condition == RECOVERY:
        return _recovery_action(detail).do
    if condition in _RECOVERABLE and recovery not in ("", NO_RECOVERY):
        advice = f"{_recovery_action(recovery).do}, as the driver advises"
        if times:
            advice += "; the error came back: replace the GPU if this was already done"
        return advice

    if condition == XID:
        advice = _xid_action(detail, times)
        if recovery == NO_RECOVERY:
            return (
                "the driver advises no recovery, so new processes can use the GPU; "
                f"otherwise {advice}"
            )
        return advice

    return conditions()[condition].do


def find_repair(condition: str, detail: str = "", recovery: str = "") -> str:
    """Returns the repair that `words_for` advises: one of `REPAIRS`, or empty if it advises none.

    `recovery`: as for `words_for`.
    """
    if condition == RECOVERY:
        return _recovery_action(detail).repair
    if condition in _RECOVERABLE and recovery not in ("", NO_RECOVERY):
        return _recovery_action(recovery).repair
    if condition == XID:
        action = _worst_action(parse_xids(detail))
        return action if action in REPAIRS else ""

    spec = conditions().get(condition)
    return "" if spec is None else spec.repair


_CHECKS: Mapping[str, tuple[str, ...]] = {
    LOST: ("dmesg",),
    UNREADABLE: ("dmesg",),
    NVLINK: ("dmesg", NVLINK),
}


def find_checks(condition: str, detail: str = "") -> tuple[str, ...]:
    """Returns what shows the cause on the node: `dmesg`, or `nvlink` (`nvidia-smi nvlink -s`)."""
    if condition == XID and _worst_action(parse_xids(detail)) == "inspect":
        return ("dmesg",)
    return _CHECKS.get(condition, ())


_UNKNOWN_DETAILS = {
    UNALLOCATED: "a container",
    APPLICATION_XID: "13, 31, 43 or 45",
    ORPHANED: "a process holds memory",
    RECURRING: "several times within 24 hours",
}
"""Conditions whose sentence needs a detail, and the one that stands for an unknown detail."""


def _describe_detail(condition: str, detail: str) -> str:
    """Returns the detail as the sentence of the condition needs it."""
    if condition == NVLINK:
        # `3/4` links are `3 of its 4` links.
        return detail.replace("/", " of its ") or "some of its"
    if condition in _UNKNOWN_DETAILS:
        return detail or _UNKNOWN_DETAILS[condition]
    if condition == RECOVERY:
        return _recovery_action(detail).says
    if condition == FABRIC:
        return _FABRIC_TEXTS.get(detail, "the GPU is not registered with the NVLink fabric")
    if not detail:
        return ""
    return f" ({detail})"


def conditions_from_fields(values: Mapping[int, object]) -> dict[str, str | None]:
    """Returns the detail of each condition of `FIELD_CONDITIONS`, or None if it is absent.

    Omits conditions whose field has no value.
    """
    details: dict[str, str | None] = {}
    for field, condition in FIELD_CONDITIONS.items():
        value = values.get(field)
        if not isinstance(value, int | float):
            continue
        details[condition] = None
        if value > 0:
            details[condition] = field_detail(condition, value)
    return details


def field_detail(condition: str, value: float) -> str:
    """Returns the detail of a condition of `FIELD_CONDITIONS` that is present."""
    if condition != RECOVERY:
        return ""
    for action in recovery_actions().values():
        if action.number == value:
            return action.name
    return f"{value:.0f}"


def fabric_detail(status: object, links_up: int | None) -> dict[str, str | None]:
    """Returns the detail of the condition `fabric`, or None if it is absent. Empty if unknown.

    `status`: value of `FABRIC_FIELD`. A GPU without an active NVLink needs no fabric.
    """
    if not isinstance(status, int) or status not in _FABRIC_STATES:
        return {}
    detail = _FABRIC_STATES[status]
    # A GPU that is registered, or could not be, has a fabric even if no NVLink is active.
    needs_fabric = bool(links_up) or detail in (None, "failed")
    if not needs_fabric:
        return {}
    return {FABRIC: detail}


# Recovery actions


class RecoveryAction(NamedTuple):
    """What the driver advises for a GPU (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)."""

    number: int
    name: str
    says: str
    do: str
    repair: str = ""  # as in `ConditionSpec`


@cache
def recovery_actions() -> Mapping[str, RecoveryAction]:
    """Returns the actions by name."""
    rows = table_rows("recovery_actions.csv")
    return {row["name"]: RecoveryAction(int(row.pop("number")), **row) for row in rows}


def _recovery_action(name: str) -> RecoveryAction:
    unknown = RecoveryAction(
        0, name, f"action {name or 'unknown'}", "run `nvidia-smi -q` on the node"
    )
    return recovery_actions().get(name, unknown)


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


def parse_xids(detail: str) -> list[int]:
    """Returns the XIDs of the detail of a condition. Empty for a detail of another form."""
    return [int(xid) for xid in detail.split(",") if xid.isdecimal()]


def _describe_xids(detail: str, times: Mapping[int, int]) -> str:
    texts = []
    for xid in parse_xids(detail):
        text = f"XID {xid} ({xid_spec(xid).text})"
        if times.get(xid):
            text += f" {times[xid]} times"
        texts.append(text)
    return ", ".join(texts) or "an XID"


def _worst_action(xids: Iterable[int]) -> str:
    """Returns the most drastic action, a key of `_ACTIONS`. `inspect` if the XIDs are unknown."""
    actions = {xid_spec(xid).action for xid in xids}
    for action in _ACTIONS:
        if action in actions:
            return action
    return "inspect"


def _xid_action(detail: str, times: Mapping[int, int]) -> str:
    xids = parse_xids(detail)
    worst = _worst_action(xids)
    do = _ACTIONS[worst]
    if worst == "inspect":
        return do
    if any(xid in times and xid_spec(xid).action == worst for xid in xids):
        return f"the error came back: {do}, or replace the GPU if this was already done"
    return f"{do}; replace the GPU if the error comes back"


# Failures


def describe_failures(failures: Iterable[tuple[str, int]], last: float) -> str:
    """Returns text such as `lost 3 times; last at 2026-11-19T06:10:00Z`.

    `failures`: conditions and how often they began.
    """
    texts = []
    for name, count in failures:
        words = name.replace("_", " ")
        words = words.replace("xid", "XID").replace("ecc", "ECC")
        texts.append(f"{words} {count} times")
    return f"{', '.join(texts)} within 24 hours; last at {utc_text(last)}"


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
