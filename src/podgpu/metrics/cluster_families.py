"""This module declares the families of `podgpu cluster`, each once: name, type, help, labels. The table in
docs/cluster.md is made from this."""

from __future__ import annotations

from podgpu.metrics.families import FamilySpec

MAP_LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")
POD_MAP = FamilySpec("pod_and_gpu_map_info", "gauge", "Provide a mapping relationship between pod and gpu", MAP_LABELS)
NODE_MAP = FamilySpec("<node>_info", "gauge", "Provide every node's pod and gpu mapping relationship", MAP_LABELS)
LEGACY_MAP = FamilySpec(
    "POD_GPU_MAP_INFO_<n>",
    "gauge",
    "pod gpu map info - please use labels value to match pod and gpu",
    MAP_LABELS,
)
"""These three are pod gpu metrics exporter's, to the letter."""

AVERAGE = FamilySpec(
    "avg_GPU_utilization",
    "gauge",
    "Mean of --used-field over the GPUs in use, in per cent; 0 when none is in use, absent without data.",
    (),
)
SCOPE_LABELS = ("scope", "namespace", "node", "model", "owner_kind", "owner_name")
USED_UTILIZATION = FamilySpec(
    "podgpu_used_gpu_utilization_ratio",
    "gauge",
    "Mean of --used-field over the devices in use, 0 to 1, by scope: cluster, namespace, node, model or owner (of "
    "pods); 0 where none is in use, absent without data.",
    SCOPE_LABELS,
)
USED_GPUS = FamilySpec(
    "podgpu_used_gpus",
    "gauge",
    "Number of devices in use that podgpu_used_gpu_utilization_ratio is the mean over.",
    SCOPE_LABELS,
)
ROLLING = FamilySpec(
    "podgpu_used_gpu_utilization_average_ratio",
    "gauge",
    "Mean of podgpu_used_gpu_utilization_ratio over the rounds of the window, 0 to 1; scopes as there, but for owner.",
    ("window", "scope", "namespace", "node", "model"),
)
IDLE_LABELS = ("node", "gpu", "gpu_id", "model", "gpu_instance", "namespace", "pod", "container")
IDLE_SINCE = FamilySpec(
    "podgpu_idle_allocated_gpu_since_timestamp_seconds",
    "gauge",
    "Unix time in seconds since which the holder has been idle; only holders that are wasteful: idle for longer than "
    "--idle-after. Without a pod's name: hpc_job, or pod_uid and container_id.",
    (*IDLE_LABELS, "hpc_job", "pod_uid", "container_id"),
)

_OF_NODE = ("node", "model")
NODE_GPUS = FamilySpec(
    "podgpu_node_gpus",
    "gauge",
    "Number of devices of the node: GPUs, or the MIG instances they are cut into.",
    _OF_NODE,
)
NODE_ALLOCATED = FamilySpec(
    "podgpu_node_allocated_gpus", "gauge", "Number of devices of the node that somebody holds.", _OF_NODE
)
NODE_USED = FamilySpec(
    "podgpu_node_used_gpus",
    "gauge",
    "Number of devices of the node in use: --used-field is above 0, or without it the utilisation.",
    _OF_NODE,
)
NODE_FREE = FamilySpec("podgpu_node_free_gpus", "gauge", "Number of devices of the node that nobody holds.", _OF_NODE)
_OF_MODEL = ("model",)
MODEL_GPUS = FamilySpec(
    "podgpu_model_gpus",
    "gauge",
    "Number of devices of the model in the cluster: GPUs, or MIG instances as <model> MIG <profile>.",
    _OF_MODEL,
)
MODEL_ALLOCATED = FamilySpec(
    "podgpu_model_allocated_gpus", "gauge", "Number of devices of the model that somebody holds.", _OF_MODEL
)
MODEL_USED = FamilySpec(
    "podgpu_model_used_gpus", "gauge", "Number of devices of the model in use, as in podgpu_node_used_gpus.", _OF_MODEL
)
MODEL_FREE = FamilySpec(
    "podgpu_model_free_gpus", "gauge", "Number of devices of the model that nobody holds.", _OF_MODEL
)
_OF_NAMESPACE = ("namespace", "model")
NAMESPACE_ALLOCATED_GPUS = FamilySpec(
    "podgpu_namespace_allocated_gpus",
    "gauge",
    "Number of devices the namespace holds, shared ones by its part of them: as given, else in equal parts.",
    _OF_NAMESPACE,
)
NAMESPACE_USED_GPUS = FamilySpec(
    "podgpu_namespace_used_gpus",
    "gauge",
    "The part of podgpu_namespace_allocated_gpus whose holders work. Absent while that is not known of any.",
    _OF_NAMESPACE,
)
NAMESPACE_IDLE_GPUS = FamilySpec(
    "podgpu_namespace_idle_gpus",
    "gauge",
    "The part of podgpu_namespace_allocated_gpus that is wasteful: idle for longer than --idle-after.",
    _OF_NAMESPACE,
)

BILLED_ALLOCATED = FamilySpec(
    "podgpu_cluster_namespace_gpu_allocated_seconds_total",
    "counter",
    "GPU seconds allocated to the namespace on all nodes since cluster started, through restarts of exporters.",
    _OF_NAMESPACE,
)
BILLED_BUSY = FamilySpec(
    "podgpu_cluster_namespace_gpu_busy_seconds_total",
    "counter",
    "GPU seconds in which the namespace was busy on all nodes since cluster started, through restarts of exporters.",
    _OF_NAMESPACE,
)
BILLED_ENERGY = FamilySpec(
    "podgpu_cluster_namespace_gpu_energy_joules_total",
    "counter",
    "Joules charged to the namespace on all nodes since cluster started, through restarts of exporters.",
    _OF_NAMESPACE,
)
COST = FamilySpec(
    "podgpu_namespace_cost_total",
    "counter",
    "What the namespace has cost by --prices since cluster started, each moment at its own price, by kind: allocated "
    "(what it held), used (the part of that it used), energy (its electricity). Three views, not to be added up.",
    ("namespace", "kind", "currency"),
)
_MONEY = ("namespace", "currency")
COST_PER_HOUR = FamilySpec(
    "podgpu_namespace_cost_per_hour",
    "gauge",
    "What the namespace holds now costs in an hour by --prices; a model without a price is not in it.",
    _MONEY,
)
WASTED_PER_HOUR = FamilySpec(
    "podgpu_namespace_wasted_per_hour",
    "gauge",
    "The part of podgpu_namespace_cost_per_hour that is idle now: from the first second, whatever --idle-after is.",
    _MONEY,
)
UNPRICED = FamilySpec(
    "podgpu_cluster_unpriced_gpu_seconds_total",
    "counter",
    "GPU seconds allocated of a model that has no price per hour in --prices, and so is in no cost.",
    _OF_MODEL,
)

BUILD_INFO = FamilySpec(
    "podgpu_cluster_build_info", "gauge", "Always 1; version of podgpu and of Python.", ("version", "python_version")
)
TARGET_UP = FamilySpec(
    "podgpu_cluster_target_up",
    "gauge",
    "1 when the target could be read when last asked, 0 when it failed (see podgpu_cluster_target_errors_total).",
    ("target",),
)
TARGET_ERRORS = FamilySpec(
    "podgpu_cluster_target_errors_total",
    "counter",
    "Number of failed readings since cluster started, by target and reason.",
    ("target", "reason"),
)
TARGET_DURATION = FamilySpec(
    "podgpu_cluster_target_duration_seconds", "gauge", "Seconds the target's last reading took.", ("target",)
)
NODE_UP = FamilySpec(
    "podgpu_cluster_node_up",
    "gauge",
    "1 while the node's figures are fresh, 0 when they are older than --stale-after.",
    ("node",),
)
NODE_LAST_SEEN = FamilySpec(
    "podgpu_cluster_node_last_seen_timestamp_seconds",
    "gauge",
    "Unix time in seconds at which the node's figures were true, by the clock of cluster or of Prometheus.",
    ("node",),
)
DEVICE_HEALTH = FamilySpec(
    "podgpu_device_health",
    "gauge",
    "1 while the GPU's node does not answer (condition node_gone), 0 while it does; the exporters tell the others.",
    ("node", "gpu", "gpu_id", "model", "condition"),
)
ROUND_TIMESTAMP = FamilySpec(
    "podgpu_cluster_round_timestamp_seconds",
    "gauge",
    "Unix time in seconds at which this view was assembled.",
    (),
)

SEED_FAMILIES: tuple[FamilySpec, ...] = (POD_MAP, NODE_MAP, LEGACY_MAP, AVERAGE)
"""Under the names that older exporters gave them."""
CLUSTER_FAMILIES: tuple[FamilySpec, ...] = (
    *(USED_UTILIZATION, USED_GPUS, ROLLING, IDLE_SINCE),
    *(NODE_GPUS, NODE_ALLOCATED, NODE_USED, NODE_FREE),
    *(MODEL_GPUS, MODEL_ALLOCATED, MODEL_USED, MODEL_FREE),
    *(NAMESPACE_ALLOCATED_GPUS, NAMESPACE_USED_GPUS, NAMESPACE_IDLE_GPUS),
    *(BILLED_ALLOCATED, BILLED_BUSY, BILLED_ENERGY, COST, COST_PER_HOUR, WASTED_PER_HOUR, UNPRICED),
    *(BUILD_INFO, TARGET_UP, TARGET_ERRORS, TARGET_DURATION),
    *(NODE_UP, NODE_LAST_SEEN, DEVICE_HEALTH, ROUND_TIMESTAMP),
)
