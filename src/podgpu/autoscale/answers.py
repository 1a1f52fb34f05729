"""Computes the values that autoscalers request for workloads, pods and nodes, and whether a workload is active.

A pod's value is the mean over the window. A workload's value aggregates the values of its running pods with a GPU. If
a pod requests a GPU but has no values, the request fails, unless the caller skips such pods.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from podgpu.autoscale.metrics import MEAN, USED, USED_COUNT, UTILIZATION, ScalingMetric
from podgpu.autoscale.pods import PodSeen
from podgpu.autoscale.refusal import Refusal, bad_request, no_data, not_found
from podgpu.autoscale.requests import AggregationOptions, PodSelector
from podgpu.autoscale.samples import ScopeKey
from podgpu.autoscale.store import MetricsSnapshot, SampleRings
from podgpu.errors import few_of

K = TypeVar("K", bound=Hashable)
MIN_VALUE = 0.001
"""Returned instead of 0 if a pod may be active, because at 0 an HPA with minReplicas 0 scales to zero."""


class MetricValue(NamedTuple):
    value: float
    at: float  # end of the window, as Unix time
    window: float  # length in seconds; shorter than requested for young pods


class _PodGroups(NamedTuple):
    """The pods of a workload, grouped by the available data."""

    with_values: list[tuple[PodSeen, MetricValue]]
    starting: list[PodSeen]
    without_metric: list[PodSeen]  # their node is reachable, but the metric is missing
    unreported: list[PodSeen]  # they request a GPU, but no exporter reports them


def select_pods(snapshot: MetricsSnapshot, selector: PodSelector) -> Sequence[PodSeen]:
    """Returns the selected running pods. Raises Refusal if the list of running pods is not available."""
    running = snapshot.pods
    if running.trouble:
        raise no_data(running.trouble)
    if selector.owner is not None:
        return running.by_owner.get((selector.namespace, *selector.owner), ())
    if not selector.namespace:
        return tuple(running.by_key.values())
    pods = running.by_namespace.get(selector.namespace, ())
    if not selector.labels.requirements:
        return pods
    return [pod for pod in pods if selector.labels.matches(dict(pod.labels))]


def _find_known(
    samples: SampleRings[K], members: Iterable[tuple[K, int]], metric: ScalingMetric, last: int
) -> dict[int, float]:
    """Returns the available values by round. `members` has keys and their round counts; only USED allows several."""
    if metric is not USED:
        ((key, rounds),) = members
        return samples.known(key, metric.column, last, rounds)
    sums, counts = defaultdict[int, float](float), defaultdict[int, float](float)
    for key, rounds in members:
        devices = samples.known(key, USED_COUNT, last, rounds)
        for number, total in samples.known(key, USED.column, last, rounds).items():
            sums[number] += total
            counts[number] += devices[number]
    return {number: total / counts[number] if counts[number] else 0.0 for number, total in sums.items()}


def _compute_pod(snapshot: MetricsSnapshot, pod: PodSeen, metric: ScalingMetric, window: float) -> MetricValue | None:
    rounds = snapshot.rounds_of(pod, window)
    known = _find_known(snapshot.pod_samples, [(pod.key, rounds)], metric, snapshot.number)
    return _make_value(snapshot, known) if snapshot.number in known and _covers_half(len(known), rounds) else None


def _make_value(snapshot: MetricsSnapshot, known: Mapping[int, float]) -> MetricValue:
    mean = math.fsum(known.values()) / len(known)
    return MetricValue(mean, snapshot.ends_at, len(known) * snapshot.interval)


def _covers_half(known_rounds: int, rounds: int) -> bool:
    """One more round may be missing, because the first round after a start has no rates."""
    return 2 * known_rounds >= rounds - 1


def _group_pods(snapshot: MetricsSnapshot, pods: Iterable[PodSeen], metric: ScalingMetric, window: float) -> _PodGroups:
    groups = _PodGroups([], [], [], [])
    for pod in pods:
        if not snapshot.needs_gpu(pod):
            continue
        holds = pod.key in snapshot.holding
        value = _compute_pod(snapshot, pod, metric, window) if holds else None
        if value is not None:
            groups.with_values.append((pod, value))
        elif snapshot.is_starting(pod):
            groups.starting.append(pod)
        else:
            (groups.without_metric if holds else groups.unreported).append(pod)
    return groups


# A workload, a namespace, the cluster


def compute_value(
    snapshot: MetricsSnapshot, selector: PodSelector, metric: ScalingMetric, aggregation: AggregationOptions
) -> MetricValue:
    """Returns one value for all selected pods. Raises Refusal."""
    if metric is USED and aggregation.aggregate != MEAN:
        raise bad_request(
            f"{metric.name} is a mean over GPUs in use and does not support the aggregate {aggregation.aggregate.name}:"
            f" use the aggregate mean, or the metric {UTILIZATION.name}"
        )
    if metric is not USED or not selector.is_scope:
        return _compute_workload(snapshot, selector, metric, aggregation)
    # For a namespace or the cluster, a GPU is counted once, even if several pods share it.
    pods = select_pods(snapshot, selector)
    unreported = [pod for pod in _find_unreported(snapshot, pods) if not snapshot.is_starting(pod)]
    if unreported and not aggregation.skip_missing:
        raise _explain_missing(snapshot, selector, pods, _PodGroups([], [], [], unreported), metric)
    scope = ("namespace", selector.namespace) if selector.namespace else ("cluster", "")
    value = compute_scope_value(snapshot, scope, metric, aggregation.window)
    return _raise_zero(value, snapshot, pods, aggregation)


def _compute_workload(
    snapshot: MetricsSnapshot, selector: PodSelector, metric: ScalingMetric, aggregation: AggregationOptions
) -> MetricValue:
    pods = select_pods(snapshot, selector)
    groups = _group_pods(snapshot, pods, metric, aggregation.window)
    incomplete = (groups.without_metric or groups.unreported) and not aggregation.skip_missing
    if not groups.with_values or incomplete:
        raise _explain_missing(snapshot, selector, pods, groups, metric)
    if metric is USED:
        members = [(pod.key, snapshot.rounds_of(pod, aggregation.window)) for pod, _ in groups.with_values]
        value = _make_value(snapshot, _find_known(snapshot.pod_samples, members, metric, snapshot.number))
    else:
        longest = max(value.window for _, value in groups.with_values)
        combined = aggregation.aggregate.combine([value.value for _, value in groups.with_values])
        value = MetricValue(combined, snapshot.ends_at, longest)
    return _raise_zero(value, snapshot, pods, aggregation)


def _raise_zero(
    value: MetricValue, snapshot: MetricsSnapshot, pods: Iterable[PodSeen], aggregation: AggregationOptions
) -> MetricValue:
    """Replaces 0 by MIN_VALUE unless all pods are known to be idle."""
    if value.value >= MIN_VALUE or all(
        _is_idle(snapshot, pod, aggregation.idle_for) if pod.key in snapshot.holding else not snapshot.needs_gpu(pod)
        for pod in pods
    ):
        return value
    return value._replace(value=MIN_VALUE)


def compute_scope_value(
    snapshot: MetricsSnapshot, scope: ScopeKey, metric: ScalingMetric, window: float
) -> MetricValue:
    """Returns the value of a node, or of the used GPUs of a namespace or the cluster. Raises Refusal.

    A node's value is never 0, because its figures alone do not show that the whole node is idle.
    """
    rounds = snapshot.rounds_in(window)
    known = _find_known(snapshot.scope_samples, [(scope, rounds)], metric, snapshot.number)
    if snapshot.number not in known:
        raise _explain_missing_scope(snapshot, scope, metric)
    if not _covers_half(len(known), rounds):
        raise no_data(
            f"{metric.name} of {_scope_text(scope)} is available for {len(known)} of {rounds} rounds, less than half of"
            " the window: retry later, or use a shorter window"
        )
    value = _make_value(snapshot, known)
    return value._replace(value=max(value.value, MIN_VALUE)) if scope[0] == "node" else value


# Each pod


def compute_pod_values(
    snapshot: MetricsSnapshot, pods: Iterable[PodSeen], metric: ScalingMetric, aggregation: AggregationOptions
) -> dict[str, MetricValue]:
    """Returns the values by pod, without pods that do not have the metric. The HPA handles missing pods itself.

    A pod's value is 0 only if the pod is known to have been idle for `aggregation.idle_for` seconds.
    """
    values = {}
    for pod in pods:
        value = _compute_pod(snapshot, pod, metric, aggregation.window)
        if value is not None:
            values[pod.name] = _raise_zero(value, snapshot, (pod,), aggregation)
    return values


def explain_missing_pods(
    snapshot: MetricsSnapshot, selector: PodSelector, pods: Sequence[PodSeen], metric: ScalingMetric, window: float
) -> Refusal:
    """Returns the error for a request in which no pod has a value."""
    return _explain_missing(snapshot, selector, pods, _group_pods(snapshot, pods, metric, window), metric)


# Activity


def is_active(snapshot: MetricsSnapshot, selector: PodSelector, idle_for: float) -> bool:
    """Returns False only if every pod with a GPU has been idle for `idle_for` seconds.

    Raises Refusal if values are missing, or if there is no pod, because podgpu cannot decide whether one is needed.
    """
    pods = select_pods(snapshot, selector)
    holding = [pod for pod in pods if pod.key in snapshot.holding]
    unreported = _find_unreported(snapshot, pods)
    if any(not _is_idle(snapshot, pod, idle_for) for pod in holding) or any(map(snapshot.is_starting, unreported)):
        return True
    if unreported or not holding:
        raise _explain_missing(snapshot, selector, pods, _PodGroups([], [], [], unreported), UTILIZATION)
    return False


def _is_idle(snapshot: MetricsSnapshot, pod: PodSeen, idle_for: float) -> bool:
    seconds = snapshot.holding.get(pod.key)
    return seconds is not None and min(seconds, snapshot.ends_at - pod.started_at) >= idle_for


def _find_unreported(snapshot: MetricsSnapshot, pods: Iterable[PodSeen]) -> list[PodSeen]:
    """Returns the pods that need a GPU but are not reported by any exporter."""
    return [pod for pod in pods if pod.key not in snapshot.holding and snapshot.needs_gpu(pod)]


# Errors


def _explain_missing(
    snapshot: MetricsSnapshot,
    selector: PodSelector,
    pods: Sequence[PodSeen],
    groups: _PodGroups,
    metric: ScalingMetric,
) -> Refusal:
    if not pods:
        return not_found(
            f"{selector.text} has no running pod: check the name, the labels and the namespace. podgpu cannot scale up"
            " from zero pods; add a second trigger for that"
        )
    if groups.unreported:
        where = [f"{pod.name} on {pod.node or 'no node'}{_age_text(snapshot, pod.node)}" for pod in groups.unreported]
        return no_data(
            f"{selector.text}: {len(groups.unreported)} of {len(pods)} pods request a GPU but are not reported by any"
            f" exporter ({few_of(where, 3)}): check that podgpu's exporter runs on these nodes{_notes_text(snapshot)}"
        )
    if groups.without_metric:
        names = few_of((pod.name for pod in groups.without_metric), 3)
        return no_data(
            f"{selector.text}: exporters have not provided {metric.name} of {names} for at least half of the window:"
            f" {metric.needs}"
        )
    if groups.starting:
        return no_data(f"{selector.text}: its pods have just started and have no values yet: retry later")
    return not_found(f"{selector.text}: none of its {len(pods)} running pods holds a GPU{_notes_text(snapshot)}")


def _explain_missing_scope(snapshot: MetricsSnapshot, scope: ScopeKey, metric: ScalingMetric) -> Refusal:
    kind, name = scope
    if kind == "node":
        if name in snapshot.stale_nodes:
            return no_data(
                f"node {name} was last read {snapshot.stale_nodes[name]:.0f} s ago: check that its exporter runs"
            )
        if scope not in snapshot.scope_samples:
            return not_found(f"no exporter reports node {name}: check that podgpu's exporter runs there")
    return no_data(f"no exporter provides {metric.name} of {_scope_text(scope)}: {metric.needs}{_notes_text(snapshot)}")


def _scope_text(scope: ScopeKey) -> str:
    kind, name = scope
    return f"{kind} {name}" if name else "the cluster"


def _age_text(snapshot: MetricsSnapshot, node: str) -> str:
    age = snapshot.stale_nodes.get(node)
    return "" if age is None else f", last read {age:.0f} s ago"


def _notes_text(snapshot: MetricsSnapshot) -> str:
    return f" ({few_of(snapshot.notes, 3)})" if snapshot.notes else ""
