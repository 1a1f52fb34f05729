"""This module declares the families of `podgpu autoscale` about itself, each once: name, type, help, labels. The table
in docs/autoscaling.md is made from this."""

from __future__ import annotations

from podgpu.metrics.families import FamilySpec

BUILD_INFO = FamilySpec(
    "podgpu_autoscale_build_info", "gauge", "Always 1; version of podgpu and of Python.", ("version", "python_version")
)
REQUESTS = FamilySpec(
    "podgpu_autoscale_requests_total",
    "counter",
    "Number of questions that were answered or refused: KEDA's by method and gRPC status, those to the metrics APIs by "
    "group and HTTP status.",
    ("api", "code"),
)
ROUND_TIMESTAMP = FamilySpec(
    "podgpu_autoscale_round_timestamp_seconds",
    "gauge",
    "Unix time in seconds of the newest round that answers are made of.",
    (),
)
PODS = FamilySpec("podgpu_autoscale_pods", "gauge", "Number of pods that hold a GPU, as the exporters tell.", ())
PODS_LEFT_OUT = FamilySpec(
    "podgpu_autoscale_pods_left_out",
    "gauge",
    "Number of pods that hold a GPU and are not answered for: there are more than podgpu remembers.",
    (),
)
OLD_NODES = FamilySpec(
    "podgpu_autoscale_old_nodes",
    "gauge",
    "Number of nodes that were not heard of lately: their pods have no figures.",
    (),
)
PODS_SYNCED = FamilySpec(
    "podgpu_autoscale_pods_synced",
    "gauge",
    "1 once the API server has told which pods run, else 0: until then nothing is answered.",
    (),
)

AUTOSCALE_FAMILIES: tuple[FamilySpec, ...] = (
    BUILD_INFO,
    REQUESTS,
    ROUND_TIMESTAMP,
    PODS,
    PODS_LEFT_OUT,
    OLD_NODES,
    PODS_SYNCED,
)
