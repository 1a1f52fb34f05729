"""This module makes metric families of the view: who is on which GPU, how the used ones are doing, waste, cost, and
cluster on itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from podgpu import __version__
from podgpu.cluster.bills import MJ, NS, Amounts
from podgpu.cluster.counts import DeviceCount, NamespaceCount
from podgpu.cluster.labels import LabelMemory
from podgpu.cluster.pod_map import legacy_map_families, map_family, node_map_families
from podgpu.cluster.reading import Scope
from podgpu.cluster.settings import duration_text
from podgpu.cluster.used import CLUSTER
from podgpu.cluster.view import ClusterView
from podgpu.figures.device import device_model
from podgpu.figures.parts import WHOLE
from podgpu.figures.waste_rows import hourly_by_namespace
from podgpu.metrics import families as f
from podgpu.metrics.conditions import NODE_GONE
from podgpu.metrics.encode import NO_LABELS, Family, Labels, Sample
from podgpu.metrics.families import JOB_LABEL, NAMELESS_LABELS, POD_LABELS, FamilySpec
from podgpu.model import Workload

T = TypeVar("T")
Key = TypeVar("Key", bound=tuple[str, ...])
Pairs = tuple[tuple[str, ...], tuple[str, ...]]
_NODE_COUNTS: tuple[tuple[FamilySpec, FamilySpec, Callable[[DeviceCount], int | None]], ...] = (
    (f.NODE_GPUS, f.MODEL_GPUS, lambda c: c.devices),
    (f.NODE_ALLOCATED, f.MODEL_ALLOCATED, lambda c: c.allocated),
    (f.NODE_USED, f.MODEL_USED, lambda c: c.used),
    (f.NODE_FREE, f.MODEL_FREE, lambda c: c.free),
)
_NAMESPACE_COUNTS: tuple[tuple[FamilySpec, Callable[[NamespaceCount], int | None]], ...] = (
    (f.NAMESPACE_ALLOCATED_GPUS, lambda c: c.allocated),
    (f.NAMESPACE_USED_GPUS, lambda c: c.used),
    (f.NAMESPACE_IDLE_GPUS, lambda c: c.idle),
)
_BILLS: tuple[tuple[FamilySpec, Callable[[Amounts], int | None], int], ...] = (
    (f.BILLED_ALLOCATED, lambda a: a.allocated, NS),
    (f.BILLED_BUSY, lambda a: a.busy, NS),
    (f.BILLED_ENERGY, lambda a: a.energy, MJ),
)


def cluster_families(view: ClusterView, labels: LabelMemory | None = None) -> list[Family]:
    """`/metrics`. `labels` is what the rendering before this one left."""
    kept = LabelMemory() if labels is None else labels
    return [
        map_family(view.rows, kept),
        *(legacy_map_families(view.rows, kept) if view.settings.legacy_map_metrics else ()),
        *_used_families(view, kept),
        f.IDLE_SINCE.of(_idle(view, kept)),
        *_count_families(view, kept),
        *_bill_families(view, kept),
        f.CLUSTER_DEVICE_HEALTH.of(_health(view, kept)),
        *self_families(view, kept),
    ]


def node_families(view: ClusterView, labels: LabelMemory | None = None) -> list[Family]:
    """`/metrics/nodes`."""
    return node_map_families(view.rows, LabelMemory() if labels is None else labels)


def self_families(view: ClusterView, labels: LabelMemory | None = None) -> list[Family]:
    """What stays true even when the figures are too old to be served."""
    kept = LabelMemory() if labels is None else labels
    of_target, of_node = kept.with_names(f.TARGET_UP.labels), kept.with_names(f.NODE_UP.labels)
    targets = [(of_target((outcome.target,)), outcome) for outcome in view.outcomes]
    nodes = [(of_node((node.name,)), node) for node in view.nodes]
    errors = sorted(view.errors.items())
    return [
        f.CLUSTER_BUILD_INFO.of([Sample(_build_labels(), 1)]),
        f.TARGET_UP.of([Sample(of, 0 if outcome.error else 1) for of, outcome in targets]),
        f.TARGET_ERRORS.of([Sample(kept.of(f.TARGET_ERRORS.labels, key), n) for key, n in errors]),
        f.TARGET_DURATION.of([Sample(of, outcome.seconds) for of, outcome in targets]),
        f.NODE_UP.of([Sample(of, 0 if node.old else 1) for of, node in nodes]),
        f.NODE_LAST_SEEN.of([Sample(of, round(view.taken_at - node.age, 3)) for of, node in nodes]),
        f.CLUSTER_ROUND_TIMESTAMP.of([Sample(NO_LABELS, round(view.taken_at, 3))]),
    ]


@lru_cache(maxsize=1)
def _build_labels() -> Labels:
    return Labels([("version", __version__), ("python_version", "{}.{}.{}".format(*sys.version_info))])


# In use


def _used_families(view: ClusterView, kept: LabelMemory) -> list[Family]:
    full, used = view.settings.full, view.used.get(CLUSTER)
    scopes = _scoped(view.used, (), kept)
    rolling = _scoped(view.rolling, (("window", duration_text(view.settings.window)),), kept)
    return [
        f.AVERAGE.of([] if used is None else [Sample(NO_LABELS, used.mean * (100 / full))]),
        f.USED_UTILIZATION.of([Sample(of, used.mean / full) for of, used in scopes]),
        f.USED_GPUS.of([Sample(of, used.devices) for of, used in scopes]),
        f.ROLLING.of([Sample(of, ratio) for of, ratio in rolling]),
    ]


_SCOPES: Mapping[str, tuple[tuple[str, ...], Callable[[Scope], tuple[str, ...]]]] = {
    "cluster": ((), lambda s: ()),
    "namespace": (("namespace",), lambda s: (s.namespace,)),
    "node": (("node",), lambda s: (s.node,)),
    "model": (("model",), lambda s: (s.model,)),
    "owner": (("namespace", "owner_kind", "owner_name"), lambda s: (s.namespace, s.owner_kind, s.owner_name)),
}
"""The labels of each scope: those of others are left out."""


def _scoped(figures: Mapping[Scope, T], more: tuple[tuple[str, str], ...], kept: LabelMemory) -> list[tuple[Labels, T]]:
    """Labels with `more` before them."""
    names, values = tuple(name for name, _ in more), tuple(value for _, value in more)
    of = {scope: kept.with_names((*names, "scope", *parts)) for scope, (parts, _) in _SCOPES.items()}
    return [
        (of[scope.scope]((*values, scope.scope, *_SCOPES[scope.scope][1](scope))), figures[scope])
        for scope in sorted(figures)
        if scope.scope in of
    ]


# Idle


_PLACE, _INSTANCE = ("node", "gpu", "gpu_id", "model"), ("node", "gpu", "gpu_id", "model", "gpu_instance")
_NAMELESS = (POD_LABELS[2], *NAMELESS_LABELS)


def _idle(view: ClusterView, kept: LabelMemory) -> list[Sample]:
    """By node and GPU, where series stay; not by how long it is."""
    found: dict[Labels, float] = {}
    for node, device, of, since in view.wasted:
        index = str(device.index) if device.index >= 0 else ""
        place = node.name, index, device.uuid, device_model(device)
        instance = (device.instance,) if device.instance else ()
        who, named = _holder_pairs(of.holder)
        labels = kept.of((_INSTANCE if instance else _PLACE) + who, place + instance + named)
        found[labels] = min(since, found.get(labels, since))
    return [Sample(labels, round(since, 3)) for labels, since in found.items()]


def _holder_pairs(holder: Workload) -> Pairs:
    if holder.pod and not holder.job:
        return POD_LABELS, (holder.namespace, holder.pod, holder.container)
    if holder.job:
        return (JOB_LABEL,), (holder.job,)
    named = (_NAMELESS, (holder.container, holder.uid, holder.container_id))
    return named if holder.container else (NAMELESS_LABELS, (holder.uid, holder.container_id))


# Health


def _health(view: ClusterView, kept: LabelMemory) -> list[Sample]:
    """Each GPU of a node once, its instances with it."""
    of = kept.with_names(f.CLUSTER_DEVICE_HEALTH.labels)
    samples: list[Sample] = []
    for node in view.nodes:
        gpus = {device.uuid: device for device in node.devices}
        gone = int(node.gone)
        for uuid, device in gpus.items():
            index = str(device.index) if device.index >= 0 else ""
            samples.append(Sample(of((node.name, index, uuid, device.model, NODE_GONE)), gone))
    return samples


# Counts, bills, costs


def _count_families(view: ClusterView, kept: LabelMemory) -> list[Family]:
    counts = view.counts
    nodes = _labelled(counts.nodes, f.NODE_GPUS, kept)
    models = [(kept.of(f.MODEL_GPUS.labels, (model,)), counts.models[model]) for model in sorted(counts.models)]
    namespaces = _labelled(counts.namespaces, f.NAMESPACE_ALLOCATED_GPUS, kept)
    return [
        *(of_node.of(_known(nodes, figure)) for of_node, _, figure in _NODE_COUNTS),
        *(of_model.of(_known(models, figure)) for _, of_model, figure in _NODE_COUNTS),
        *(spec.of(list(_amounts(namespaces, figure, WHOLE))) for spec, figure in _NAMESPACE_COUNTS),
    ]


def _known(counts: Iterable[tuple[Labels, T]], figure: Callable[[T], int | None]) -> list[Sample]:
    return [Sample(labels, number) for labels, count in counts if (number := figure(count)) is not None]


def _bill_families(view: ClusterView, kept: LabelMemory) -> list[Family]:
    bills = _labelled(view.bills, f.BILLED_ALLOCATED, kept)
    return [
        *(spec.of(list(_amounts(bills, figure, unit))) for spec, figure, unit in _BILLS),
        f.COST.of([Sample(of, cost) for of, cost in _labelled(view.costs, f.COST, kept)]),
        *_hourly_families(view, kept),
        f.UNPRICED.of([Sample(kept.of(f.UNPRICED.labels, (m,)), s) for m, s in sorted(view.unpriced.items())]),
    ]


def _hourly_families(view: ClusterView, kept: LabelMemory) -> list[Family]:
    of, currency = kept.with_names(f.COST_PER_HOUR.labels), view.prices.currency
    rows = [(of((name, currency)), hourly) for name, hourly in sorted(hourly_by_namespace(view.waste).items())]
    return [
        f.COST_PER_HOUR.of([Sample(labels, hourly.cost) for labels, hourly in rows]),
        f.WASTED_PER_HOUR.of([Sample(labels, hourly.wasted) for labels, hourly in rows]),
    ]


def _amounts(rows: Iterable[tuple[Labels, T]], figure: Callable[[T], int | None], unit: int) -> Iterator[Sample]:
    for labels, amounts in rows:
        amount = figure(amounts)
        if amount is not None:
            yield Sample(labels, amount / unit)


def _labelled(rows: Mapping[Key, T], spec: FamilySpec, kept: LabelMemory) -> list[tuple[Labels, T]]:
    of = kept.with_names(spec.labels)
    return [(of(key), rows[key]) for key in sorted(rows)]
