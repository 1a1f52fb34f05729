"""Says what would improve the measurement of busy time on a shared GPU."""

from __future__ import annotations

from collections.abc import Mapping

BY_SWITCHES = frozenset({"switches", "exact"})
"""Methods that measure how long containers wait for each other."""

NO_CAPABILITY = "no_capability"
HIDDEN_USERS = "hidden_users"
NOT_MEASURED = "not_measured"
LOG_FAILED = "log_failed"
MPS = "mps"

IMPROVEMENTS: Mapping[str, str] = {
    NO_CAPABILITY: (
        "exact busy time needs CAP_SYS_ADMIN (chart: exporter.usage.from: exact; "
        "docker run --cap-add SYS_ADMIN --user 0), without a user namespace"
    ),
    HIDDEN_USERS: (
        "several containers run as other users than podgpu, and only CAP_SYS_ADMIN shows which of "
        "them ran (chart: exporter.usage.from: exact). Their waiting time is not known, and the "
        "driver's samples divide their busy time"
    ),
    NOT_MEASURED: (
        "the driver's context-switch log was not measured on this GPU and driver. "
        "--usage-from switches uses it anyway"
    ),
    LOG_FAILED: (
        "the driver's context-switch log cannot be used. podgpu doctor reports what to do, and "
        "podgpu_exporter_source_errors_total with source switches has the reasons"
    ),
    MPS: (
        "under MPS, the driver reports only the MPS server. MIG instances, or time slices "
        "without MPS, have usage by container"
    ),
}
"""`DeviceTotals.method_limit` -> what would improve it."""
