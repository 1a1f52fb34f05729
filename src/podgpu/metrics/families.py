"""This module declares podgpu's metric families, each once: name, type, help, labels. docs/metrics.md's tables are made
of it."""

from __future__ import annotations

from dataclasses import dataclass

from podgpu.series import Family, Sample

DEVICE_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "Hostname")
XID_LABELS = (*DEVICE_LABELS, "GPU_I_PROFILE", "GPU_I_ID")
POD_LABELS = ("namespace", "pod", "container")
OLD_POD_LABELS = ("pod_namespace", "pod_name", "container_name")
"""The same as dcgm-exporter 1.x wrote them (`-o`)."""
EXPORTED = {name: f"exported_{name}" for name in POD_LABELS}
"""What Prometheus calls a series' own label where the scrape target has one of the same name (honor_labels: false)."""
JOB_LABEL = "hpc_job"
NAMELESS_LABELS = ("pod_uid", "container_id")
"""What a holder is known by, beside its container's name, while its pod's is unknown."""
HOLDER_LABELS = frozenset(
    {*POD_LABELS, *OLD_POD_LABELS, JOB_LABEL, *NAMELESS_LABELS, "vgpu"}
    | {f"dra_{part}" for part in ("claim_name", "claim_namespace", "device_name", "driver_name", "pool_name")}
    | {"dra_mig_device_uuid", "dra_mig_profile"}
)
"""Names of labels that say who holds a device, in all the forms dcgm-exporter and podgpu have written them."""


@dataclass(frozen=True, slots=True)
class FamilySpec:
    name: str
    type: str
    help: str
    labels: tuple[str, ...]

    def of(self, samples: list[Sample]) -> Family:
        return Family(self.name, self.type, self.help, tuple(samples))


# promtool's lint refuses the suffix _count on a gauge; untyped families are exempt, and PromQL does not care.
DEVICE_COUNT = FamilySpec(
    "podgpu_device_count",
    "untyped",
    "Number of GPUs by state: expected (on the PCI bus), visible (the driver answers for them), lost (expected or seen "
    "before, not visible now); a state that cannot be counted here is absent.",
    ("state", "Hostname"),
)
_HEALTH_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname")
DEVICE_HEALTH = FamilySpec(
    "podgpu_device_health",
    "gauge",
    "1 while the GPU has the condition, 0 while it has not; absent where that cannot be known. Conditions: lost, "
    "unreadable, xid, row_remap_failure, row_remap_pending, ecc, thermal, power_brake, nvlink, driver_away.",
    (*_HEALTH_LABELS, "condition"),
)
CONDITION_SINCE = FamilySpec(
    "podgpu_device_condition_since_timestamp_seconds",
    "gauge",
    "Unix time in seconds since which the GPU has had the condition; absent while it has not. detail: which XIDs, "
    "how many links.",
    (*_HEALTH_LABELS, "condition", "detail"),
)
LAST_HOLDER = FamilySpec(
    "podgpu_device_last_holder_info",
    "gauge",
    "Always 1; who held a GPU that is lost, or an instance of it, once nobody is said to hold it any more; absent for "
    "every other GPU.",
    ("gpu", "UUID", "device", "modelName", "namespace", "pod", "container", "pod_uid", "container_id", "hpc_job"),
)
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
"""DCGM field id -> `reason` of podgpu_device_throttled_seconds_total; all count nanoseconds."""
THROTTLED = FamilySpec(
    "podgpu_device_throttled_seconds_total",
    "counter",
    "Seconds in which the GPU's clocks were held down, as the driver counts them, by reason; one that it does not "
    f"count is absent. Reasons: {', '.join(sorted(THROTTLE_REASONS.values()))}.",
    (*DEVICE_LABELS, "reason"),
)
DEVICE_XIDS = FamilySpec(
    "podgpu_device_xid_errors_total",
    "counter",
    "Number of XID errors of the GPU since the exporter started, all XIDs together.",
    DEVICE_LABELS,
)
XIDS = FamilySpec(
    "podgpu_xid_errors_total",
    "counter",
    "Number of XID errors since the exporter started, by XID; absent for an XID that was not reported.",
    (*XID_LABELS, "xid"),
)
XID_LAST_SEEN = FamilySpec(
    "podgpu_xid_last_seen_timestamp_seconds",
    "gauge",
    "Unix time in seconds at which the XID was last reported; absent for an XID that was not.",
    (*XID_LABELS, "xid"),
)
ALLOCATION_LABELS = (
    *("gpu", "UUID", "device", "GPU_I_ID", "namespace", "pod", "container"),
    *("pod_uid", "container_id", "hpc_job", "source"),
)
"""pod_uid and container_id where the pod's name is not known; hpc_job instead of a pod."""
ALLOCATION_INFO = FamilySpec(
    "podgpu_allocation_info",
    "gauge",
    "Always 1; who holds the device, from the moment it is held, used or not, and which source says so; a device that "
    "nobody holds has none.",
    ALLOCATION_LABELS,
)
ALLOCATION_SHARE = FamilySpec(
    "podgpu_allocation_share_ratio",
    "gauge",
    "Part of the device that the holder was given, 0 to 1: 1 is a whole one; absent where nobody knows.",
    ALLOCATION_LABELS,
)
CONTAINER_LABELS = (
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname"),
    *("container", "namespace", "pod"),
)
CONTAINER_UTILIZATION = FamilySpec(
    "podgpu_container_gpu_utilization_ratio",
    "gauge",
    "Part of the time between the last two readings (a second, or a few), 0 to 1, in which the container's processes "
    "ran on the device; absent where processes cannot be seen.",
    CONTAINER_LABELS,
)
CONTAINER_MEMORY = FamilySpec(
    "podgpu_container_gpu_memory_used_bytes",
    "gauge",
    "Device memory in bytes that the container's processes use; absent where processes cannot be seen.",
    CONTAINER_LABELS,
)
CONTAINER_PROCESSES = FamilySpec(
    "podgpu_container_gpu_processes",
    "gauge",
    "Number of the container's processes on the device; absent where processes cannot be seen.",
    CONTAINER_LABELS,
)
CONTAINER_ALLOCATED = FamilySpec(
    "podgpu_container_gpu_allocated_seconds_total",
    "counter",
    "GPU seconds allocated: the share of the device held, times the seconds it was held.",
    CONTAINER_LABELS,
)
CONTAINER_BUSY = FamilySpec(
    "podgpu_container_gpu_busy_seconds_total",
    "counter",
    "Seconds in which the container's processes ran on the device; absent where that cannot be seen. "
    "podgpu_device_usage_method tells how it is known.",
    CONTAINER_LABELS,
)
CONTAINER_BUSY_MIN = FamilySpec(
    "podgpu_container_gpu_busy_seconds_min_total",
    "counter",
    "The least seconds the container's processes can have run; only with --usage-from switches or exact.",
    CONTAINER_LABELS,
)
CONTAINER_BUSY_MAX = FamilySpec(
    "podgpu_container_gpu_busy_seconds_max_total",
    "counter",
    "The most seconds the container's processes can have run; only with --usage-from switches or exact.",
    CONTAINER_LABELS,
)
CONTAINER_IDLE = FamilySpec(
    "podgpu_container_gpu_idle_seconds_total",
    "counter",
    "Seconds in which the container held the device and ran nothing on it; absent where that cannot be seen.",
    CONTAINER_LABELS,
)
CONTAINER_ENERGY = FamilySpec(
    "podgpu_container_gpu_energy_joules_total",
    "counter",
    "Joules of the device's energy that are the container's part: by use, or by share held while nobody ran anything; "
    "absent where the device does not count energy.",
    CONTAINER_LABELS,
)
USED_DEVICE_LABELS = CONTAINER_LABELS[:-3]
DEVICE_BUSY = FamilySpec(
    "podgpu_device_busy_seconds_total",
    "counter",
    "Seconds in which anything ran on the device; the containers' and the unattributed seconds add up to it.",
    USED_DEVICE_LABELS,
)
DEVICE_USAGE_METHOD = FamilySpec(
    "podgpu_device_usage_method",
    "gauge",
    "Always 1; how the containers' busy time was told at the last reading: samples, switches or exact.",
    (*USED_DEVICE_LABELS, "method"),
)
DEVICE_ENERGY = FamilySpec(
    "podgpu_device_energy_joules_total",
    "counter",
    "Joules the device used since the exporter started; the containers' and the unattributed joules add up to it.",
    USED_DEVICE_LABELS,
)
DEVICE_MEMORY = FamilySpec(
    "podgpu_device_memory_used_bytes",
    "gauge",
    "Memory in use on the device, in bytes; the containers' and the unattributed memory add up to it.",
    USED_DEVICE_LABELS,
)
UNATTRIBUTED_BUSY = FamilySpec(
    "podgpu_device_unattributed_busy_seconds_total",
    "counter",
    "Busy seconds of the device that no container could be charged for.",
    USED_DEVICE_LABELS,
)
UNATTRIBUTED_ENERGY = FamilySpec(
    "podgpu_device_unattributed_energy_joules_total",
    "counter",
    "Joules of the device that no container could be charged for: of processes outside containers, of shares that "
    "nobody holds.",
    USED_DEVICE_LABELS,
)
UNATTRIBUTED_MEMORY = FamilySpec(
    "podgpu_device_unattributed_memory_bytes",
    "gauge",
    "Memory in use on the device, in bytes, that belongs to no container.",
    USED_DEVICE_LABELS,
)
NAMESPACE_LABELS = ("namespace", "modelName")
NAMESPACE_ALLOCATED = FamilySpec(
    "podgpu_namespace_gpu_allocated_seconds_total",
    "counter",
    "GPU seconds allocated to the namespace's containers, those that ended included.",
    NAMESPACE_LABELS,
)
NAMESPACE_BUSY = FamilySpec(
    "podgpu_namespace_gpu_busy_seconds_total",
    "counter",
    "GPU seconds in which the namespace's containers were busy, those that ended included.",
    NAMESPACE_LABELS,
)
NAMESPACE_ENERGY = FamilySpec(
    "podgpu_namespace_gpu_energy_joules_total",
    "counter",
    "Joules charged to the namespace's containers, those that ended included.",
    NAMESPACE_LABELS,
)
BUILD_INFO = FamilySpec(
    "podgpu_exporter_build_info", "gauge", "Always 1; version of podgpu and of Python.", ("version", "python_version")
)
SOURCE_UP = FamilySpec(
    "podgpu_exporter_source_up",
    "gauge",
    "1 when the source's last reading went well, 0 when it failed (see podgpu_exporter_source_errors_total).",
    ("source",),
)
SOURCE_ERRORS = FamilySpec(
    "podgpu_exporter_source_errors_total",
    "counter",
    "Number of failed readings since the exporter started, by source and reason.",
    ("source", "reason"),
)
COLLECT_DURATION = FamilySpec(
    "podgpu_exporter_collect_duration_seconds",
    "gauge",
    "Seconds the source's last reading took.",
    ("source",),
)
SNAPSHOT_TIMESTAMP = FamilySpec(
    "podgpu_exporter_snapshot_timestamp_seconds",
    "gauge",
    "Unix time in seconds at which the GPUs were last read; time() minus this is the age of the figures.",
    (),
)
UNMAPPED = FamilySpec(
    "podgpu_exporter_unmapped_assignments",
    "gauge",
    "Number of assignments that name a GPU podgpu cannot find on this node, by source and reason.",
    ("source", "reason"),
)
UNSUPPORTED = FamilySpec(
    "podgpu_exporter_unsupported_field",
    "gauge",
    "Always 1; a configured field this device or source cannot give, so it has no series.",
    ("gpu", "UUID", "GPU_I_ID", "field"),
)
DROPPED = FamilySpec(
    "podgpu_exporter_dropped_values_total",
    "counter",
    "Number of values refused since the exporter started, by field: sentinels, not-a-number, impossible ones.",
    ("field",),
)

OWN_FAMILIES: tuple[FamilySpec, ...] = (
    DEVICE_COUNT,
    DEVICE_HEALTH,
    CONDITION_SINCE,
    LAST_HOLDER,
    THROTTLED,
    DEVICE_XIDS,
    XIDS,
    XID_LAST_SEEN,
    ALLOCATION_INFO,
    ALLOCATION_SHARE,
    CONTAINER_UTILIZATION,
    CONTAINER_MEMORY,
    CONTAINER_PROCESSES,
    CONTAINER_ALLOCATED,
    CONTAINER_BUSY,
    CONTAINER_BUSY_MIN,
    CONTAINER_BUSY_MAX,
    CONTAINER_IDLE,
    CONTAINER_ENERGY,
    DEVICE_BUSY,
    DEVICE_USAGE_METHOD,
    DEVICE_ENERGY,
    DEVICE_MEMORY,
    UNATTRIBUTED_BUSY,
    UNATTRIBUTED_ENERGY,
    UNATTRIBUTED_MEMORY,
    NAMESPACE_ALLOCATED,
    NAMESPACE_BUSY,
    NAMESPACE_ENERGY,
    BUILD_INFO,
    SOURCE_UP,
    SOURCE_ERRORS,
    COLLECT_DURATION,
    SNAPSHOT_TIMESTAMP,
    UNMAPPED,
    UNSUPPORTED,
    DROPPED,
)

# tkestack gpu-manager's families, with its names, labels and texts: what reads them expects exactly these.
GPU_MANAGER_LABELS = ("pod_name", "namespace", "node", "container_name")
GPU_MANAGER_UTILIZATION = FamilySpec(
    "container_gpu_utilization", "gauge", "gpu utilization", (*GPU_MANAGER_LABELS, "gpu")
)
GPU_MANAGER_MEMORY = FamilySpec(
    "container_gpu_memory_total", "gauge", "gpu memory usage in MiB", (*GPU_MANAGER_LABELS, "gpu_memory")
)
GPU_MANAGER_REQUESTED = FamilySpec(
    "container_request_gpu_utilization", "gauge", "request of gpu utilization", (*GPU_MANAGER_LABELS, "req_of_gpu")
)
GPU_MANAGER_REQUESTED_MEMORY = FamilySpec(
    "container_request_gpu_memory",
    "gauge",
    "request of gpu memory in MiB",
    (*GPU_MANAGER_LABELS, "req_of_gpu_memory"),
)
GPU_MANAGER_FAMILIES: tuple[FamilySpec, ...] = (
    GPU_MANAGER_UTILIZATION,
    GPU_MANAGER_MEMORY,
    GPU_MANAGER_REQUESTED,
    GPU_MANAGER_REQUESTED_MEMORY,
)

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
"""Bit of DCGM_FI_DEV_CLOCKS_EVENT_REASONS -> dcgm-exporter's name for it."""
CLOCK_EVENTS_FIELD = 112
"""DCGM's number for it."""


def clock_events_in_words(mask: int) -> str:
    return ", ".join(event for bit, event in CLOCK_EVENTS.items() if mask & bit) or "nothing"
