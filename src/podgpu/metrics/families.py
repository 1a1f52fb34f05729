"""The metric families of podgpu's commands, read from families.csv. The reference is generated from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from podgpu.metrics.encode import Family, Sample
from podgpu.metrics.fields import table_rows

POD_LABELS = ("namespace", "pod", "container")
OLD_POD_LABELS = ("pod_namespace", "pod_name", "container_name")
"""Pod labels of dcgm-exporter 1.x, used with `-o`."""
EXPORTED = {name: f"exported_{name}" for name in POD_LABELS}
"""Prometheus renames a label that the scrape target also has (honor_labels: false)."""
JOB_LABEL = "hpc_job"
NAMELESS_LABELS = ("pod_uid", "container_id")
"""Labels that identify a holder whose pod name is unknown."""
HOLDER_LABELS = frozenset(
    {*POD_LABELS, *OLD_POD_LABELS, JOB_LABEL, *NAMELESS_LABELS, "vgpu"}
    | {f"dra_{part}" for part in ("claim_name", "claim_namespace", "device_name", "driver_name", "pool_name")}
    | {"dra_mig_device_uuid", "dra_mig_profile"}
)
"""Labels that describe the holder of a device, in all versions of dcgm-exporter and podgpu."""
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
"""DCGM field id (a time in nanoseconds) -> label `reason` of podgpu_device_throttled_seconds_total."""


def clock_events_in_words(mask: int) -> str:
    return ", ".join(event for bit, event in CLOCK_EVENTS.items() if mask & bit) or "nothing"


@dataclass(frozen=True, slots=True)
class FamilySpec:
    name: str
    type: str
    help: str
    labels: tuple[str, ...]
    part: str = ""
    """Part of the document that contains the value, if each sample is one member of that part."""
    member: str = ""
    factor: int = 0
    """If not 0, the sample times this factor is the member, an integer. If 0, both are the same float."""

    def of(self, samples: list[Sample]) -> Family:
        return Family(self.name, self.type, self.help, tuple(samples))


_FAMILIES: dict[str, dict[str, FamilySpec]] = {}
for _row in table_rows("families.csv"):
    _spec = FamilySpec(
        _row["name"],
        _row["type"],
        _row["help"],
        tuple(_row["labels"].split()),
        _row["part"],
        _row["member"],
        int(_row["factor"] or 0),
    )
    _FAMILIES.setdefault(_row["group"], {})[_spec.name] = _spec


def _find(group: str, prefix: str, name: str) -> FamilySpec:
    return _FAMILIES[group][prefix + name]


def _all(group: str) -> tuple[FamilySpec, ...]:
    return tuple(_FAMILIES[group].values())


# podgpu exporter

OWN_FAMILIES = _all("exporter")
_exporter = partial(_find, "exporter", "podgpu_")
DEVICE_COUNT = _exporter("device_count")  # untyped, because promtool rejects gauges with the suffix _count
DEVICE_HEALTH = _exporter("device_health")
CONDITION_SINCE = _exporter("device_condition_since_timestamp_seconds")
LAST_HOLDER = _exporter("device_last_holder_info")
THROTTLED = _exporter("device_throttled_seconds_total")
DEVICE_XIDS = _exporter("device_xid_errors_total")
XIDS = _exporter("xid_errors_total")
XID_LAST_SEEN = _exporter("xid_last_seen_timestamp_seconds")
ALLOCATION_INFO = _exporter("allocation_info")
ALLOCATION_SHARE = _exporter("allocation_share_ratio")
CONTAINER_UTILIZATION = _exporter("container_gpu_utilization_ratio")
CONTAINER_MEMORY = _exporter("container_gpu_memory_used_bytes")
CONTAINER_PROCESSES = _exporter("container_gpu_processes")
CONTAINER_BUSY = _exporter("container_gpu_busy_seconds_total")
CONTAINER_IDLE = _exporter("container_gpu_idle_seconds_total")
CONTAINER_ENERGY = _exporter("container_gpu_energy_joules_total")
DEVICE_USAGE_METHOD = _exporter("device_usage_method")
DEVICE_ENERGY = _exporter("device_energy_joules_total")
DEVICE_MEMORY = _exporter("device_memory_used_bytes")
NAMESPACE_ALLOCATED = _exporter("namespace_gpu_allocated_seconds_total")
NAMESPACE_BUSY = _exporter("namespace_gpu_busy_seconds_total")
NAMESPACE_ENERGY = _exporter("namespace_gpu_energy_joules_total")
BUILD_INFO = _exporter("exporter_build_info")
SOURCE_UP = _exporter("exporter_source_up")
SOURCE_ERRORS = _exporter("exporter_source_errors_total")
COLLECT_DURATION = _exporter("exporter_collect_duration_seconds")
SNAPSHOT_TIMESTAMP = _exporter("exporter_snapshot_timestamp_seconds")
UNMAPPED = _exporter("exporter_unmapped_assignments")
UNSUPPORTED = _exporter("exporter_unsupported_field")
DROPPED = _exporter("exporter_dropped_values_total")

# process_* families of the exporter itself, as in Prometheus' client libraries

PROCESS_FAMILIES = _all("process")

# podgpu exporter: tkestack gpu-manager's families, with its names, labels and help texts

GPU_MANAGER_FAMILIES = _all("gpu-manager")
_gpu_manager = partial(_find, "gpu-manager", "container_")
GPU_MANAGER_UTILIZATION = _gpu_manager("gpu_utilization")
GPU_MANAGER_MEMORY = _gpu_manager("gpu_memory_total")
GPU_MANAGER_REQUESTED = _gpu_manager("request_gpu_utilization")
GPU_MANAGER_REQUESTED_MEMORY = _gpu_manager("request_gpu_memory")

# podgpu cluster: families of older exporters, with their names, labels and help texts

SEED_FAMILIES = _all("seed")
_seed = partial(_find, "seed", "")
POD_MAP = _seed("pod_and_gpu_map_info")
NODE_MAP = _seed("<node>_info")
LEGACY_MAP = _seed("POD_GPU_MAP_INFO_<n>")
AVERAGE = _seed("avg_GPU_utilization")

# podgpu cluster

CLUSTER_FAMILIES = _all("cluster")
_cluster = partial(_find, "cluster", "podgpu_")
USED_UTILIZATION = _cluster("used_gpu_utilization_ratio")
USED_GPUS = _cluster("used_gpus")
ROLLING = _cluster("used_gpu_utilization_average_ratio")
IDLE_SINCE = _cluster("idle_allocated_gpu_since_timestamp_seconds")
NODE_GPUS = _cluster("node_gpus")
NODE_ALLOCATED = _cluster("node_allocated_gpus")
NODE_USED = _cluster("node_used_gpus")
NODE_FREE = _cluster("node_free_gpus")
MODEL_GPUS = _cluster("model_gpus")
MODEL_ALLOCATED = _cluster("model_allocated_gpus")
MODEL_USED = _cluster("model_used_gpus")
MODEL_FREE = _cluster("model_free_gpus")
NAMESPACE_ALLOCATED_GPUS = _cluster("namespace_allocated_gpus")
NAMESPACE_USED_GPUS = _cluster("namespace_used_gpus")
NAMESPACE_IDLE_GPUS = _cluster("namespace_idle_gpus")
BILLED_ALLOCATED = _cluster("cluster_namespace_gpu_allocated_seconds_total")
BILLED_BUSY = _cluster("cluster_namespace_gpu_busy_seconds_total")
BILLED_ENERGY = _cluster("cluster_namespace_gpu_energy_joules_total")
COST = _cluster("namespace_cost_total")
COST_PER_HOUR = _cluster("namespace_cost_per_hour")
WASTED_PER_HOUR = _cluster("namespace_wasted_per_hour")
UNPRICED = _cluster("cluster_unpriced_gpu_seconds_total")
CLUSTER_BUILD_INFO = _cluster("cluster_build_info")
TARGET_UP = _cluster("cluster_target_up")
TARGET_ERRORS = _cluster("cluster_target_errors_total")
TARGET_DURATION = _cluster("cluster_target_duration_seconds")
NODE_UP = _cluster("cluster_node_up")
NODE_LAST_SEEN = _cluster("cluster_node_last_seen_timestamp_seconds")
CLUSTER_DEVICE_HEALTH = _cluster("device_health")
CLUSTER_ROUND_TIMESTAMP = _cluster("cluster_round_timestamp_seconds")

# podgpu autoscale

AUTOSCALE_FAMILIES = _all("autoscale")
_autoscale = partial(_find, "autoscale", "podgpu_autoscale_")
AUTOSCALE_BUILD_INFO = _autoscale("build_info")
AUTOSCALE_REQUESTS = _autoscale("requests_total")
AUTOSCALE_ROUND_TIMESTAMP = _autoscale("round_timestamp_seconds")
AUTOSCALE_PODS = _autoscale("pods")
AUTOSCALE_OLD_NODES = _autoscale("old_nodes")
AUTOSCALE_PODS_SYNCED = _autoscale("pods_synced")

# podgpu hook

HOOK_FAMILIES = _all("hook")
_hook = partial(_find, "hook", "podgpu_hook_")
HOOK_BUILD_INFO = _hook("build_info")
HOOK_SYNCHRONISED = _hook("synchronised")
HOOK_SYNCHRONISATIONS = _hook("synchronisations_total")
HOOK_REQUESTS = _hook("requests_total")
HOOK_REQUEST_SECONDS = _hook("request_seconds_total")
HOOK_ADJUSTMENTS = _hook("adjustments_total")
HOOK_ERRORS = _hook("errors_total")
HOOK_CONTAINERS = _hook("containers")
HOOK_GPU_CONTAINERS = _hook("gpu_containers")
HOOK_WRITES = _hook("podlist_writes_total")
HOOK_UP_TO_DATE = _hook("podlist_up_to_date")
