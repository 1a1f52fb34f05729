"""The metric families of podgpu's commands: name, type, labels, help. The tables in docs/ are generated from them."""

from __future__ import annotations

from dataclasses import dataclass

from podgpu.metrics.encode import Family, Sample

DEVICE_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "Hostname")
XID_LABELS = (*DEVICE_LABELS, "GPU_I_PROFILE", "GPU_I_ID")
POD_LABELS = ("namespace", "pod", "container")
OLD_POD_LABELS = ("pod_namespace", "pod_name", "container_name")
"""Names in dcgm-exporter 1.x (`-o`)."""
EXPORTED = {name: f"exported_{name}" for name in POD_LABELS}
"""Prometheus renames a label that the scrape target also has (honor_labels: false)."""
JOB_LABEL = "hpc_job"
NAMELESS_LABELS = ("pod_uid", "container_id")
"""Identify a holder whose pod name is unknown."""
HOLDER_LABELS = frozenset(
    {*POD_LABELS, *OLD_POD_LABELS, JOB_LABEL, *NAMELESS_LABELS, "vgpu"}
    | {f"dra_{part}" for part in ("claim_name", "claim_namespace", "device_name", "driver_name", "pool_name")}
    | {"dra_mig_device_uuid", "dra_mig_profile"}
)
"""Labels that name the holder of a device, in all versions of dcgm-exporter and podgpu."""
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
"""Bit of field 112 (DCGM_FI_DEV_CLOCKS_EVENT_REASONS) -> dcgm-exporter's name."""
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
"""DCGM field in nanoseconds -> `reason` of podgpu_device_throttled_seconds_total."""


def clock_events_in_words(mask: int) -> str:
    return ", ".join(event for bit, event in CLOCK_EVENTS.items() if mask & bit) or "nothing"


@dataclass(frozen=True, slots=True)
class FamilySpec:
    name: str
    type: str
    help: str
    labels: tuple[str, ...]

    def of(self, samples: list[Sample]) -> Family:
        return Family(self.name, self.type, self.help, tuple(samples))


def _gauge(name: str, labels: tuple[str, ...], help_text: str) -> FamilySpec:
    return FamilySpec(name, "gauge", help_text, labels)


def _counter(name: str, labels: tuple[str, ...], help_text: str) -> FamilySpec:
    return FamilySpec(name, "counter", help_text, labels)


def _build_info(command: str) -> FamilySpec:
    labels = ("version", "python_version")
    return _gauge(f"podgpu_{command}_build_info", labels, "Always 1. Versions of podgpu and Python.")


# podgpu exporter: devices

# promtool's lint refuses the suffix _count on a gauge; untyped families are exempt.
DEVICE_COUNT = FamilySpec(
    "podgpu_device_count",
    "untyped",
    "Number of GPUs by state: expected (on the PCI bus), visible (listed by the driver), lost (expected or seen "
    "before, but not visible). An unknown number is absent.",
    ("state", "Hostname"),
)
_HEALTH_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname")
DEVICE_HEALTH = _gauge(
    "podgpu_device_health",
    (*_HEALTH_LABELS, "condition"),
    "1 if the GPU has the condition, 0 if not. Absent if unknown. Conditions: lost, unreadable, xid, "
    "row_remap_failure, row_remap_pending, ecc, thermal, power_brake, nvlink, driver_away.",
)
CONDITION_SINCE = _gauge(
    "podgpu_device_condition_since_timestamp_seconds",
    (*_HEALTH_LABELS, "condition", "detail"),
    "Unix time at which the condition began. Absent without the condition. The label detail lists XIDs or links.",
)
LAST_HOLDER = _gauge(
    "podgpu_device_last_holder_info",
    ("gpu", "UUID", "device", "modelName", *POD_LABELS, *NAMELESS_LABELS, JOB_LABEL),
    "Always 1. Last holder of a lost GPU or of one of its MIG instances. Absent for all other GPUs.",
)
THROTTLED = _counter(
    "podgpu_device_throttled_seconds_total",
    (*DEVICE_LABELS, "reason"),
    "Seconds of clock throttling by reason, as counted by the driver. Reasons that it does not count are absent. "
    f"Reasons: {', '.join(sorted(THROTTLE_REASONS.values()))}.",
)
DEVICE_XIDS = _counter(
    "podgpu_device_xid_errors_total", DEVICE_LABELS, "Number of XID errors of the GPU since the exporter started."
)
XIDS = _counter(
    "podgpu_xid_errors_total", (*XID_LABELS, "xid"), "Number of XID errors by XID since the exporter started."
)
XID_LAST_SEEN = _gauge(
    "podgpu_xid_last_seen_timestamp_seconds", (*XID_LABELS, "xid"), "Unix time of the last error with this XID."
)
ALLOCATION_LABELS = (
    *("gpu", "UUID", "device", "GPU_I_ID", "namespace", "pod", "container"),
    *("pod_uid", "container_id", "hpc_job", "source"),
)
ALLOCATION_INFO = _gauge(
    "podgpu_allocation_info",
    ALLOCATION_LABELS,
    "Always 1. Holder of the device and the source that reports it. Absent for a device without a holder.",
)
ALLOCATION_SHARE = _gauge(
    "podgpu_allocation_share_ratio",
    ALLOCATION_LABELS,
    "Part of the device that is allocated to the holder, 0 to 1. Absent if unknown.",
)

# podgpu exporter: usage

CONTAINER_LABELS = (
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname"),
    *("container", "namespace", "pod"),
)
CONTAINER_UTILIZATION = _gauge(
    "podgpu_container_gpu_utilization_ratio",
    CONTAINER_LABELS,
    "Part of the time between the last two readings in which the container's processes ran on the device, 0 to 1. "
    "Absent if processes are not visible.",
)
CONTAINER_MEMORY = _gauge(
    "podgpu_container_gpu_memory_used_bytes",
    CONTAINER_LABELS,
    "Device memory used by the container's processes, in bytes. Absent if processes are not visible.",
)
CONTAINER_PROCESSES = _gauge(
    "podgpu_container_gpu_processes",
    CONTAINER_LABELS,
    "Number of the container's processes on the device. Absent if processes are not visible.",
)
CONTAINER_ALLOCATED = _counter(
    "podgpu_container_gpu_allocated_seconds_total",
    CONTAINER_LABELS,
    "Allocated GPU seconds: the holder's share of the device times the seconds of holding it.",
)
CONTAINER_BUSY = _counter(
    "podgpu_container_gpu_busy_seconds_total",
    CONTAINER_LABELS,
    "Seconds in which the container's processes ran on the device. Absent if unknown. See podgpu_device_usage_method.",
)
CONTAINER_BUSY_MIN = _counter(
    "podgpu_container_gpu_busy_seconds_min_total",
    CONTAINER_LABELS,
    "Lower bound of the busy seconds. Only with --usage-from switches or exact.",
)
CONTAINER_BUSY_MAX = _counter(
    "podgpu_container_gpu_busy_seconds_max_total",
    CONTAINER_LABELS,
    "Upper bound of the busy seconds. Only with --usage-from switches or exact.",
)
CONTAINER_IDLE = _counter(
    "podgpu_container_gpu_idle_seconds_total",
    CONTAINER_LABELS,
    "Seconds in which the container held the device and ran nothing on it. Absent if unknown.",
)
CONTAINER_ENERGY = _counter(
    "podgpu_container_gpu_energy_joules_total",
    CONTAINER_LABELS,
    "The container's part of the device's energy in joules: by use, or by share while nothing ran. Absent if the "
    "device does not measure energy.",
)
USED_DEVICE_LABELS = CONTAINER_LABELS[:-3]
DEVICE_BUSY = _counter(
    "podgpu_device_busy_seconds_total",
    USED_DEVICE_LABELS,
    "Seconds in which the device was busy. Equals the sum over its containers plus the unattributed seconds.",
)
DEVICE_USAGE_METHOD = _gauge(
    "podgpu_device_usage_method",
    (*USED_DEVICE_LABELS, "method"),
    "Always 1. Method of the last reading of the containers' busy time: samples, switches or exact.",
)
DEVICE_ENERGY = _counter(
    "podgpu_device_energy_joules_total",
    USED_DEVICE_LABELS,
    "Energy of the device in joules since the exporter started. Equals the sum over its containers plus the "
    "unattributed energy.",
)
DEVICE_MEMORY = _gauge(
    "podgpu_device_memory_used_bytes",
    USED_DEVICE_LABELS,
    "Memory in use on the device, in bytes. Equals the sum over its containers plus the unattributed memory.",
)
UNATTRIBUTED_BUSY = _counter(
    "podgpu_device_unattributed_busy_seconds_total",
    USED_DEVICE_LABELS,
    "Busy seconds of the device that belong to no container.",
)
UNATTRIBUTED_ENERGY = _counter(
    "podgpu_device_unattributed_energy_joules_total",
    USED_DEVICE_LABELS,
    "Energy of the device in joules that belongs to no container, such as that of processes on the host.",
)
UNATTRIBUTED_MEMORY = _gauge(
    "podgpu_device_unattributed_memory_bytes",
    USED_DEVICE_LABELS,
    "Memory in use on the device that belongs to no container, in bytes.",
)
NAMESPACE_LABELS = ("namespace", "modelName")
NAMESPACE_ALLOCATED = _counter(
    "podgpu_namespace_gpu_allocated_seconds_total",
    NAMESPACE_LABELS,
    "GPU seconds allocated to the namespace's containers, including ended ones.",
)
NAMESPACE_BUSY = _counter(
    "podgpu_namespace_gpu_busy_seconds_total",
    NAMESPACE_LABELS,
    "Busy GPU seconds of the namespace's containers, including ended ones.",
)
NAMESPACE_ENERGY = _counter(
    "podgpu_namespace_gpu_energy_joules_total",
    NAMESPACE_LABELS,
    "Energy of the namespace's containers in joules, including ended ones.",
)

# podgpu exporter: itself

BUILD_INFO = _build_info("exporter")
SOURCE_UP = _gauge(
    "podgpu_exporter_source_up", ("source",), "1 if the last reading of the source succeeded, 0 if it failed."
)
SOURCE_ERRORS = _counter(
    "podgpu_exporter_source_errors_total",
    ("source", "reason"),
    "Number of failed readings by source and reason since the exporter started.",
)
COLLECT_DURATION = _gauge(
    "podgpu_exporter_collect_duration_seconds", ("source",), "Duration of the last reading of the source in seconds."
)
SNAPSHOT_TIMESTAMP = _gauge(
    "podgpu_exporter_snapshot_timestamp_seconds",
    (),
    "Unix time of the last reading of the GPUs. time() minus this value is the age of the figures.",
)
UNMAPPED = _gauge(
    "podgpu_exporter_unmapped_assignments",
    ("source", "reason"),
    "Number of assignments whose GPU was not found on this node, by source and reason.",
)
UNSUPPORTED = _gauge(
    "podgpu_exporter_unsupported_field",
    ("gpu", "UUID", "GPU_I_ID", "field"),
    "Always 1. A configured field that the device or the source does not provide.",
)
DROPPED = _counter(
    "podgpu_exporter_dropped_values_total",
    ("field",),
    "Number of invalid values by field since the exporter started: sentinels, not-a-number, impossible values.",
)

OWN_FAMILIES: tuple[FamilySpec, ...] = (
    *(DEVICE_COUNT, DEVICE_HEALTH, CONDITION_SINCE, LAST_HOLDER, THROTTLED, DEVICE_XIDS, XIDS, XID_LAST_SEEN),
    *(ALLOCATION_INFO, ALLOCATION_SHARE),
    *(CONTAINER_UTILIZATION, CONTAINER_MEMORY, CONTAINER_PROCESSES, CONTAINER_ALLOCATED, CONTAINER_BUSY),
    *(CONTAINER_BUSY_MIN, CONTAINER_BUSY_MAX, CONTAINER_IDLE, CONTAINER_ENERGY),
    *(DEVICE_BUSY, DEVICE_USAGE_METHOD, DEVICE_ENERGY, DEVICE_MEMORY),
    *(UNATTRIBUTED_BUSY, UNATTRIBUTED_ENERGY, UNATTRIBUTED_MEMORY),
    *(NAMESPACE_ALLOCATED, NAMESPACE_BUSY, NAMESPACE_ENERGY),
    *(BUILD_INFO, SOURCE_UP, SOURCE_ERRORS, COLLECT_DURATION, SNAPSHOT_TIMESTAMP, UNMAPPED, UNSUPPORTED, DROPPED),
)

# podgpu exporter: tkestack gpu-manager's families, with its names, labels and texts

GPU_MANAGER_LABELS = ("pod_name", "namespace", "node", "container_name")
GPU_MANAGER_UTILIZATION = _gauge("container_gpu_utilization", (*GPU_MANAGER_LABELS, "gpu"), "gpu utilization")
GPU_MANAGER_MEMORY = _gauge(
    "container_gpu_memory_total", (*GPU_MANAGER_LABELS, "gpu_memory"), "gpu memory usage in MiB"
)
GPU_MANAGER_REQUESTED = _gauge(
    "container_request_gpu_utilization", (*GPU_MANAGER_LABELS, "req_of_gpu"), "request of gpu utilization"
)
GPU_MANAGER_REQUESTED_MEMORY = _gauge(
    "container_request_gpu_memory", (*GPU_MANAGER_LABELS, "req_of_gpu_memory"), "request of gpu memory in MiB"
)
GPU_MANAGER_FAMILIES: tuple[FamilySpec, ...] = (
    *(GPU_MANAGER_UTILIZATION, GPU_MANAGER_MEMORY, GPU_MANAGER_REQUESTED, GPU_MANAGER_REQUESTED_MEMORY),
)

# podgpu cluster: families of older exporters, with their names, labels and texts

MAP_LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")
POD_MAP = _gauge("pod_and_gpu_map_info", MAP_LABELS, "Provide a mapping relationship between pod and gpu")
NODE_MAP = _gauge("<node>_info", MAP_LABELS, "Provide every node's pod and gpu mapping relationship")
LEGACY_MAP = _gauge(
    "POD_GPU_MAP_INFO_<n>", MAP_LABELS, "pod gpu map info - please use labels value to match pod and gpu"
)
AVERAGE = _gauge(
    "avg_GPU_utilization", (), "Mean of --used-field over the GPUs in use in percent. 0 if no GPU is in use."
)
SEED_FAMILIES: tuple[FamilySpec, ...] = (POD_MAP, NODE_MAP, LEGACY_MAP, AVERAGE)

# podgpu cluster: devices

SCOPE_LABELS = ("scope", "namespace", "node", "model", "owner_kind", "owner_name")
USED_UTILIZATION = _gauge(
    "podgpu_used_gpu_utilization_ratio",
    SCOPE_LABELS,
    "Mean of --used-field over the devices in use, 0 to 1, by scope: cluster, namespace, node, model or owner of pods. "
    "0 if no device is in use. Absent without data.",
)
USED_GPUS = _gauge(
    "podgpu_used_gpus",
    SCOPE_LABELS,
    "Number of devices in use, as in podgpu_used_gpu_utilization_ratio.",
)
ROLLING = _gauge(
    "podgpu_used_gpu_utilization_average_ratio",
    ("window", "scope", "namespace", "node", "model"),
    "Mean of podgpu_used_gpu_utilization_ratio over the rounds of the window, 0 to 1. Without the scope owner.",
)
IDLE_LABELS = ("node", "gpu", "gpu_id", "model", "gpu_instance", "namespace", "pod", "container")
IDLE_SINCE = _gauge(
    "podgpu_idle_allocated_gpu_since_timestamp_seconds",
    (*IDLE_LABELS, JOB_LABEL, *NAMELESS_LABELS),
    "Unix time since which the holder has run nothing on the device. Only if that is longer than --idle-after.",
)
_OF_NODE = ("node", "model")
NODE_GPUS = _gauge("podgpu_node_gpus", _OF_NODE, "Number of devices of the node: GPUs, or the MIG instances on them.")
NODE_ALLOCATED = _gauge("podgpu_node_allocated_gpus", _OF_NODE, "Number of devices of the node that have a holder.")
NODE_USED = _gauge("podgpu_node_used_gpus", _OF_NODE, "Number of devices of the node that are in use.")
NODE_FREE = _gauge("podgpu_node_free_gpus", _OF_NODE, "Number of devices of the node that have no holder.")
_OF_MODEL = ("model",)
MODEL_GPUS = _gauge(
    "podgpu_model_gpus", _OF_MODEL, "Number of devices of the model. MIG instances are <model> MIG <profile>."
)
MODEL_ALLOCATED = _gauge("podgpu_model_allocated_gpus", _OF_MODEL, "Number of devices of the model that have a holder.")
MODEL_USED = _gauge("podgpu_model_used_gpus", _OF_MODEL, "Number of devices of the model that are in use.")
MODEL_FREE = _gauge("podgpu_model_free_gpus", _OF_MODEL, "Number of devices of the model that have no holder.")
_OF_NAMESPACE = ("namespace", "model")
NAMESPACE_ALLOCATED_GPUS = _gauge(
    "podgpu_namespace_allocated_gpus",
    _OF_NAMESPACE,
    "Number of devices allocated to the namespace. Shared devices count by share, or in equal parts if it is unknown.",
)
NAMESPACE_USED_GPUS = _gauge(
    "podgpu_namespace_used_gpus", _OF_NAMESPACE, "The part of podgpu_namespace_allocated_gpus that is in use."
)
NAMESPACE_IDLE_GPUS = _gauge(
    "podgpu_namespace_idle_gpus",
    _OF_NAMESPACE,
    "The part of podgpu_namespace_allocated_gpus that is wasteful: idle for longer than --idle-after.",
)

# podgpu cluster: bills

BILLED_ALLOCATED = _counter(
    "podgpu_cluster_namespace_gpu_allocated_seconds_total",
    _OF_NAMESPACE,
    "GPU seconds allocated to the namespace on all nodes since cluster started. Restarts of exporters do not reset it.",
)
BILLED_BUSY = _counter(
    "podgpu_cluster_namespace_gpu_busy_seconds_total",
    _OF_NAMESPACE,
    "Busy GPU seconds of the namespace on all nodes since cluster started. Restarts of exporters do not reset it.",
)
BILLED_ENERGY = _counter(
    "podgpu_cluster_namespace_gpu_energy_joules_total",
    _OF_NAMESPACE,
    "Energy of the namespace in joules on all nodes since cluster started. Restarts of exporters do not reset it.",
)
COST = _counter(
    "podgpu_namespace_cost_total",
    ("namespace", "kind", "currency"),
    "Cost of the namespace by --prices since cluster started, at the price of each moment, by kind: allocated, used "
    "(the part of allocated that was used), energy (electricity). Do not add up the three.",
)
_MONEY = ("namespace", "currency")
COST_PER_HOUR = _gauge(
    "podgpu_namespace_cost_per_hour",
    _MONEY,
    "Cost per hour of the namespace's devices by --prices. Models without a price are not included.",
)
WASTED_PER_HOUR = _gauge(
    "podgpu_namespace_wasted_per_hour",
    _MONEY,
    "The part of podgpu_namespace_cost_per_hour that is idle now, from the first second, whatever --idle-after is.",
)
UNPRICED = _counter(
    "podgpu_cluster_unpriced_gpu_seconds_total",
    _OF_MODEL,
    "Allocated GPU seconds of a model that has no price per hour in --prices. They are in no cost.",
)

# podgpu cluster: itself

CLUSTER_BUILD_INFO = _build_info("cluster")
TARGET_UP = _gauge("podgpu_cluster_target_up", ("target",), "1 if the last reading of the target succeeded, 0 if not.")
TARGET_ERRORS = _counter(
    "podgpu_cluster_target_errors_total",
    ("target", "reason"),
    "Number of failed readings by target and reason since cluster started.",
)
TARGET_DURATION = _gauge(
    "podgpu_cluster_target_duration_seconds", ("target",), "Duration of the last reading of the target in seconds."
)
NODE_UP = _gauge(
    "podgpu_cluster_node_up", ("node",), "1 if the node's figures are fresh, 0 if they are older than --stale-after."
)
NODE_LAST_SEEN = _gauge(
    "podgpu_cluster_node_last_seen_timestamp_seconds",
    ("node",),
    "Unix time of the node's figures, by the clock of cluster or of Prometheus.",
)
CLUSTER_DEVICE_HEALTH = _gauge(
    "podgpu_device_health",
    ("node", "gpu", "gpu_id", "model", "condition"),
    "1 if the GPU's node does not answer (condition node_gone), 0 if it does. Exporters report the other conditions.",
)
CLUSTER_ROUND_TIMESTAMP = _gauge(
    "podgpu_cluster_round_timestamp_seconds", (), "Unix time of the round that these metrics are from."
)
CLUSTER_FAMILIES: tuple[FamilySpec, ...] = (
    *(USED_UTILIZATION, USED_GPUS, ROLLING, IDLE_SINCE),
    *(NODE_GPUS, NODE_ALLOCATED, NODE_USED, NODE_FREE),
    *(MODEL_GPUS, MODEL_ALLOCATED, MODEL_USED, MODEL_FREE),
    *(NAMESPACE_ALLOCATED_GPUS, NAMESPACE_USED_GPUS, NAMESPACE_IDLE_GPUS),
    *(BILLED_ALLOCATED, BILLED_BUSY, BILLED_ENERGY, COST, COST_PER_HOUR, WASTED_PER_HOUR, UNPRICED),
    *(CLUSTER_BUILD_INFO, TARGET_UP, TARGET_ERRORS, TARGET_DURATION),
    *(NODE_UP, NODE_LAST_SEEN, CLUSTER_DEVICE_HEALTH, CLUSTER_ROUND_TIMESTAMP),
)

# podgpu autoscale

AUTOSCALE_BUILD_INFO = _build_info("autoscale")
AUTOSCALE_REQUESTS = _counter(
    "podgpu_autoscale_requests_total",
    ("api", "code"),
    "Number of requests: KEDA's by method and gRPC status, those to the metrics APIs by group and HTTP status.",
)
AUTOSCALE_ROUND_TIMESTAMP = _gauge(
    "podgpu_autoscale_round_timestamp_seconds", (), "Unix time of the newest round that answers are based on."
)
AUTOSCALE_PODS = _gauge("podgpu_autoscale_pods", (), "Number of pods that hold a GPU.")
AUTOSCALE_OLD_NODES = _gauge(
    "podgpu_autoscale_old_nodes", (), "Number of nodes with stale figures. Their pods have no figures."
)
AUTOSCALE_PODS_SYNCED = _gauge(
    "podgpu_autoscale_pods_synced", (), "1 after the list of pods was read from the API server. Before, requests fail."
)
AUTOSCALE_FAMILIES: tuple[FamilySpec, ...] = (
    *(AUTOSCALE_BUILD_INFO, AUTOSCALE_REQUESTS, AUTOSCALE_ROUND_TIMESTAMP),
    *(AUTOSCALE_PODS, AUTOSCALE_OLD_NODES, AUTOSCALE_PODS_SYNCED),
)

# podgpu hook

HOOK_BUILD_INFO = _build_info("hook")
HOOK_SYNCHRONISED = _gauge(
    "podgpu_hook_synchronised",
    (),
    "1 if the container runtime is connected and has listed its containers. Otherwise podlist.json is not changed.",
)
HOOK_SYNCHRONISATIONS = _counter(
    "podgpu_hook_synchronisations_total", (), "Number of complete lists of containers received from the runtime."
)
HOOK_REQUESTS = _counter("podgpu_hook_requests_total", ("method",), "Number of the runtime's requests by method.")
HOOK_REQUEST_SECONDS = _counter(
    "podgpu_hook_request_seconds_total", ("method",), "Seconds the runtime waited for the hook, by method."
)
HOOK_ADJUSTMENTS = _counter(
    "podgpu_hook_adjustments_total", (), "Number of containers whose NVIDIA_VISIBLE_DEVICES was set (--inject)."
)
HOOK_ERRORS = _counter(
    "podgpu_hook_errors_total", ("reason",), "Number of errors by reason. Errors never delay or fail a container."
)
HOOK_CONTAINERS = _gauge("podgpu_hook_containers", (), "Number of containers reported by the runtime.")
HOOK_GPU_CONTAINERS = _gauge("podgpu_hook_gpu_containers", (), "Number of containers in podlist.json.")
HOOK_DISAGREEING = _gauge(
    "podgpu_hook_disagreeing_containers",
    (),
    "Number of containers whose NVIDIA_VISIBLE_DEVICES differs from koordinator's allocation.",
)
HOOK_WRITES = _counter("podgpu_hook_podlist_writes_total", (), "Number of writes of podlist.json.")
HOOK_IS_TRUE = _gauge(
    "podgpu_hook_podlist_up_to_date",
    (),
    "1 if podlist.json matches the runtime's containers, 0 if it cannot be written or the list is not known yet.",
)
HOOK_FAMILIES: tuple[FamilySpec, ...] = (
    *(HOOK_BUILD_INFO, HOOK_SYNCHRONISED, HOOK_SYNCHRONISATIONS, HOOK_REQUESTS, HOOK_REQUEST_SECONDS),
    *(HOOK_ADJUSTMENTS, HOOK_ERRORS, HOOK_CONTAINERS, HOOK_GPU_CONTAINERS, HOOK_DISAGREEING, HOOK_WRITES),
    HOOK_IS_TRUE,
)
