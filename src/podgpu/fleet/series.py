"""Builds the metric families of `podgpu cluster`: pod map, GPUs in use, idle holders, counts,
costs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from podgpu.fleet.hold import wasteful_since
from podgpu.fleet.parts import device_model, device_utilization, gpu_id, holders_of, sum_held
from podgpu.fleet.readings import NodeEntry, duration_text
from podgpu.fleet.state import CLUSTER, ClusterState, Scope
from podgpu.metrics.conditions import NODE_GONE
from podgpu.metrics.encode import (
    NO_LABELS,
    VERSIONS,
    Family,
    Labels,
    Sample,
    families_in,
    make_families,
)
from podgpu.metrics.labels import holder_names
from podgpu.model import DeviceState, MigInstance, group_by_key

_PLACE_LABELS = ("node", "gpu", "gpu_id", "model")
_MAP_LABELS = (
    "gpu_id",
    "gpu_model",
    "namespace",
    "node",
    "pod_name",
)  # `gpu_id`: the GPU, even of a MIG instance


def cluster_families(state: ClusterState, rolling: Mapping[Scope, float]) -> list[Family]:
    """Builds the families of `/metrics`."""
    rows = _map_rows(state)
    return [
        *make_families(
            "seed", {"pod_and_gpu_map_info": [Sample(labels, 1.0) for _, labels in rows]}
        ),
        *(_legacy_map_families(rows) if state.settings.legacy_map_metrics else ()),
        *_used_families(state, rolling),
        *make_families(
            "cluster", {"podgpu_idle_allocated_gpu_since_timestamp_seconds": _idle_samples(state)}
        ),
        *_count_families(state),
        *_cost_families(state),
        *make_families("cluster", {"podgpu_device_health": _health_samples(state)}),
        *self_families(state),
    ]


def node_families(state: ClusterState) -> list[Family]:
    """Builds the families of `/metrics/nodes`: one family per node, which contains the pods and
    GPUs of the node.

    If `metric_name` returns the same name for two nodes, these nodes share a family.
    """
    spec = families_in("seed")["<node>_info"]
    samples = group_by_key(
        (metric_name(node), Sample(labels, 1.0)) for node, labels in _map_rows(state)
    )
    return [Family(name, spec.type, spec.help, tuple(own)) for name, own in samples.items()]


def self_families(state: ClusterState) -> list[Family]:
    """Builds the families about podgpu itself. They are also served when the GPU values are too
    old.
    """
    taken_at = state.taken_at or 0.0
    targets = [(Labels([("target", outcome.target)]), outcome) for outcome in state.outcomes]
    nodes = [(Labels([("node", node.name)]), node) for node in state.nodes]
    last_seen = [
        Sample(labels, round(taken_at - (node.age_seconds or 0.0), 3)) for labels, node in nodes
    ]
    errors = sorted(state.errors.items())
    samples = {
        "podgpu_cluster_build_info": [Sample(VERSIONS, 1)],
        "podgpu_cluster_target_up": [
            Sample(labels, 0 if outcome.error else 1) for labels, outcome in targets
        ],
        "podgpu_cluster_target_errors_total": [
            Sample(_labels(("target", "reason"), key), n) for key, n in errors
        ],
        "podgpu_cluster_target_duration_seconds": [
            Sample(labels, outcome.seconds) for labels, outcome in targets
        ],
        "podgpu_cluster_node_up": [
            Sample(labels, 0 if node.stale else 1) for labels, node in nodes
        ],
        "podgpu_cluster_node_last_seen_timestamp_seconds": last_seen,
        "podgpu_cluster_round_timestamp_seconds": [Sample(NO_LABELS, round(taken_at, 3))],
    }
    return make_families("cluster", samples)


def _labels(names: Iterable[str], values: Iterable[str]) -> Labels:
    """Pairs label names with values. Omits the label `cluster` if it is empty."""
    return Labels(
        (name, value)
        for name, value in zip(names, values, strict=True)
        if value or name != "cluster"
    )


# Pod map: one series per pod and GPU, as in "pod gpu metrics exporter"


def _map_rows(state: ClusterState) -> list[tuple[str, Labels]]:
    """Returns the node and the labels of each pair of GPU and pod, sorted by node and GPU. Omits
    jobs and users.
    """
    rows: dict[tuple[str, ...], str] = {}  # without duplicates
    for node in state.nodes:
        for gpu in node.gpus:
            pods = {
                (h.namespace, h.pod)
                for device in (gpu, *gpu.instances)
                for h in holders_of(gpu, device)
                if h.pod
            }
            for namespace, pod in sorted(pods):
                rows[gpu_id(gpu), gpu.model, namespace, node.name, pod] = node.name
    return [(node, _labels(_MAP_LABELS, row)) for row, node in rows.items()]


def _legacy_map_families(rows: Iterable[tuple[str, Labels]]) -> list[Family]:
    """Builds the families POD_GPU_MAP_INFO_0, POD_GPU_MAP_INFO_1 and so on, one per row."""
    spec = families_in("seed")["POD_GPU_MAP_INFO_<n>"]
    return [
        Family(f"POD_GPU_MAP_INFO_{number}", spec.type, spec.help, (Sample(labels, 0.0),))
        for number, (_, labels) in enumerate(rows)
    ]


def metric_name(node: str) -> str:
    """Converts a node name to a metric name: `gpu-1.lab` becomes `gpu_1:lab_info`.

    `-` becomes `_` and `.` becomes `:`. Other special characters, which Kubernetes does not allow
    in node names, become `::<hex>:`. A name that begins with a digit gets the prefix `_`.
    """
    known = {"-": "_", ".": ":"}
    name = re.sub(r"[^a-zA-Z0-9]", lambda match: known.get(match[0], f"::{ord(match[0]):x}:"), node)
    return f"_{name}_info" if name[:1].isdigit() else f"{name}_info"


# GPUs in use, as in gpu-utilization-metric-exporter


def _used_families(state: ClusterState, rolling: Mapping[Scope, float]) -> list[Family]:
    full, used = state.settings.full, state.used.get(CLUSTER)
    scopes = [(_scope_labels(scope), state.used[scope]) for scope in sorted(state.used)]
    window = ("window", duration_text(state.settings.window))
    average = [] if used is None else [Sample(NO_LABELS, used.mean * (100 / full))]
    means = [Sample(_scope_labels(scope, window), rolling[scope]) for scope in sorted(rolling)]
    samples = {
        "podgpu_used_gpu_utilization_ratio": [
            Sample(labels, used.mean / full) for labels, used in scopes
        ],
        "podgpu_used_gpus": [Sample(labels, used.devices) for labels, used in scopes],
        "podgpu_used_gpu_utilization_average_ratio": means,
    }
    return [
        *make_families("seed", {"avg_GPU_utilization": average}),
        *make_families("cluster", samples),
    ]


def _scope_labels(scope: Scope, *more: tuple[str, str]) -> Labels:
    return Labels(
        (*more, *((name, value) for name, value in zip(Scope._fields, scope, strict=True) if value))
    )


# Idle holders


def _idle_samples(state: ClusterState) -> list[Sample]:
    idle_since: dict[tuple[tuple[str, str], ...], float] = {}
    for node in _fresh(state):
        for part in node.held:
            since = wasteful_since(part, state.taken_at, state.settings.idle_after)
            if since is not None and part.holder.has_labels:
                labels = [*zip(_PLACE_LABELS, _place(node, part.gpu, part.instance), strict=True)]
                if part.instance is not None:
                    labels.append(("gpu_instance", str(part.instance.id)))
                names = holder_names(part.holder).items()
                key = (*labels, *((name, text) for name, text in names if text or part.holder.pod))
                idle_since[key] = min(since, idle_since.get(key, since))
    return [Sample(Labels(pairs), round(since, 3)) for pairs, since in idle_since.items()]


def _place(
    node: NodeEntry, gpu: DeviceState, instance: MigInstance | None
) -> tuple[str, str, str, str]:
    index = "" if gpu.index is None else str(gpu.index)
    return node.name, index, gpu_id(gpu), device_model(gpu, instance)


# Counts. In MIG mode, the instances are counted instead of the GPU, and `model` contains the MIG
# profile.


def _count_families(state: ClusterState) -> list[Family]:
    """Counts devices. As on the web page, a device is in use if its utilisation is above 0."""
    nodes = list(_fresh(state))
    devices = [
        (
            node.name,
            device_model(gpu, instance),
            bool(holders_of(gpu, instance or gpu)),
            device_utilization(instance or gpu),
        )
        for node in nodes
        for gpu in node.gpus
        for instance in [i for i in gpu.instances if not i.hidden] or (None,)
    ]
    samples: dict[str, list[Sample]] = defaultdict(list)
    for scope, names in (("node", ("node", "model")), ("model", ("model",))):
        groups = group_by_key(
            (tuple(place[-len(names) :]), (is_held, ratio)) for *place, is_held, ratio in devices
        )
        for key in sorted(groups):
            total, held = len(groups[key]), sum(is_held for is_held, _ in groups[key])
            ratios = [ratio for _, ratio in groups[key] if ratio is not None]
            used = sum(ratio > 0 for ratio in ratios) if ratios else None
            for name, count in (
                ("", total),
                ("allocated_", held),
                ("used_", used),
                ("free_", total - held),
            ):
                if count is not None:
                    samples[f"podgpu_{scope}_{name}gpus"].append(Sample(_labels(names, key), count))
    return [*make_families("cluster", samples), *_namespace_families(nodes, state)]


def _namespace_families(nodes: Iterable[NodeEntry], state: ClusterState) -> list[Family]:
    at, idle_after = state.taken_at, state.settings.idle_after
    parts = [
        part
        for node in nodes
        for part in node.held
        if part.holder.namespace and not (part.instance is None and part.gpu.instances)
    ]
    groups = group_by_key(
        ((p.holder.namespace, device_model(p.gpu, p.instance), p.cluster), p) for p in parts
    )
    samples: dict[str, list[Sample]] = {
        f"podgpu_namespace_{name}_gpus": [] for name in ("allocated", "used", "idle")
    }
    for key in sorted(groups):
        labels, sums = (
            _labels(("namespace", "model", "cluster"), key),
            sum_held(groups[key], by_device=True),
        )
        idle = (
            part.share for part in groups[key] if wasteful_since(part, at, idle_after) is not None
        )
        samples["podgpu_namespace_allocated_gpus"].append(Sample(labels, round(sums.allocated, 9)))
        samples["podgpu_namespace_idle_gpus"].append(Sample(labels, round(sum(idle, 0.0), 9)))
        if sums.used or sums.idle or not sums.unknown:
            samples["podgpu_namespace_used_gpus"].append(Sample(labels, round(sums.used, 9)))
    return make_families("cluster", samples)


# Costs


def _cost_families(state: ClusterState) -> list[Family]:
    parts = (part for node in state.nodes for part in node.held if part.holder.namespace)
    groups = group_by_key(
        ((part.holder.namespace, state.prices.currency, part.cluster), part) for part in parts
    )
    sums = [
        (_labels(("namespace", "currency", "cluster"), key), sum_held(groups[key]))
        for key in sorted(groups)
    ]
    samples = {
        f"podgpu_namespace_{name}": [
            Sample(labels, amount)
            for labels, total in sums
            if (amount := getattr(total, name)) is not None
        ]
        for name in ("cost_per_hour", "wasted_per_hour")
    }
    return make_families("cluster", samples)


def _health_samples(state: ClusterState) -> list[Sample]:
    """Returns one sample of the condition `node_gone` per GPU. The exporters report all other
    conditions.
    """
    return [
        Sample(
            _labels((*_PLACE_LABELS, "condition"), (*_place(node, gpu, None), NODE_GONE)),
            int(node.gone),
        )
        for node in state.nodes
        for gpu in node.gpus
    ]


def _fresh(state: ClusterState) -> Iterator[NodeEntry]:
    return (node for node in state.nodes if not node.stale)
