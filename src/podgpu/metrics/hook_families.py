"""This module declares the families of `podgpu hook`, each once: name, type, help, labels. The table in docs/hook.md is
made from this."""

from __future__ import annotations

from podgpu.metrics.families import FamilySpec

BUILD_INFO = FamilySpec(
    "podgpu_hook_build_info", "gauge", "Always 1; version of podgpu and of Python.", ("version", "python_version")
)
SYNCHRONISED = FamilySpec(
    "podgpu_hook_synchronised",
    "gauge",
    "1 while the runtime is connected and has told of all its containers, else 0: podlist.json then stays as it was.",
    (),
)
SYNCHRONISATIONS = FamilySpec(
    "podgpu_hook_synchronisations_total",
    "counter",
    "Number of times the runtime told of all its containers: at the start, and after each restart of either side.",
    (),
)
REQUESTS = FamilySpec(
    "podgpu_hook_requests_total",
    "counter",
    "Number of the runtime's requests that were answered, by method.",
    ("method",),
)
REQUEST_SECONDS = FamilySpec(
    "podgpu_hook_request_seconds_total",
    "counter",
    "Seconds the runtime waited for the hook's answers, by method; over podgpu_hook_requests_total, what one costs.",
    ("method",),
)
ADJUSTMENTS = FamilySpec(
    "podgpu_hook_adjustments_total",
    "counter",
    "Number of containers whose NVIDIA_VISIBLE_DEVICES was set (--inject).",
    (),
)
ERRORS = FamilySpec(
    "podgpu_hook_errors_total",
    "counter",
    "Number of errors since the hook started, by reason; no container waited or failed for them.",
    ("reason",),
)
CONTAINERS = FamilySpec("podgpu_hook_containers", "gauge", "Number of containers the runtime told of.", ())
GPU_CONTAINERS = FamilySpec("podgpu_hook_gpu_containers", "gauge", "Number of containers in podlist.json.", ())
DISAGREEING = FamilySpec(
    "podgpu_hook_disagreeing_containers",
    "gauge",
    "Number of containers whose NVIDIA_VISIBLE_DEVICES names other GPUs than koordinator gave them.",
    (),
)
WRITES = FamilySpec("podgpu_hook_podlist_writes_total", "counter", "Number of times podlist.json was written.", ())
IS_TRUE = FamilySpec(
    "podgpu_hook_podlist_up_to_date",
    "gauge",
    "1 while podlist.json is what the runtime told, 0 while it cannot be written or nothing was told yet.",
    (),
)

HOOK_FAMILIES: tuple[FamilySpec, ...] = (
    BUILD_INFO,
    SYNCHRONISED,
    SYNCHRONISATIONS,
    REQUESTS,
    REQUEST_SECONDS,
    ADJUSTMENTS,
    ERRORS,
    CONTAINERS,
    GPU_CONTAINERS,
    DISAGREEING,
    WRITES,
    IS_TRUE,
)
