"""Computes the values of workloads and pods for autoscalers, and whether a workload is active.

A pod's value is the mean over the window. A workload's value aggregates the values of its running
pods with a GPU. If such a pod has no values, the request fails. With `missing: leave-out`, the pod
is skipped instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from podgpu.errors import few_of
from podgpu.fleet.parts import MPS_REASON
from podgpu.scale.catalogue import IDLE, USED, USED_COUNT, UTILIZATION, ScalingMetric
from podgpu.scale.pods import PodSeen
from podgpu.scale.requests import (
    MetricRequest,
    PodSelector,
    Refusal,
    bad_request,
    no_data,
    not_found,
)
from podgpu.scale.samples import MetricsSnapshot, SampleKey

MIN_VALUE = 0.001
"""Returned instead of 0 if a pod may be active. At 0, an HPA with minReplicas 0 would scale the
workload to zero.
"""


class MetricValue(NamedTuple):
    value: float
    at: float  # end of the window, as Unix time
    window: float  # length in seconds; shorter than requested if the pods started recently


def select_pods(snapshot: MetricsSnapshot, selector: PodSelector) -> Sequence[PodSeen]:
    """Returns the selected running pods. Raises Refusal if the list of running pods is not
    available.
    """
    if snapshot.pods.trouble:
        raise no_data(snapshot.pods.trouble)
    return [pod for pod in snapshot.pods.by_key.values() if selector.matches(pod)]


def _compute_mean(
    snapshot: MetricsSnapshot, keys: Sequence[SampleKey], metric: ScalingMetric, window: float
) -> MetricValue | None:
    """Returns the mean over the rounds (readings of all nodes) in a window. Only the metric USED
    allows several keys.

    Returns None if the last round has no value, or if fewer than half of the rounds have values.
    One missing round is ignored, because the first round after a start has no rates.
    """
    values: list[float] = []
    has_value = False
    for samples in snapshot.rounds_in(window):
        rows = [
            row
            for key in keys
            if (row := samples.rows.get(key)) and not math.isnan(row[metric.column])
        ]
        has_value = bool(rows)
        if rows and metric is USED:
            devices = sum(row[USED_COUNT] for row in rows)
            values.append(sum(row[USED.column] for row in rows) / devices if devices else 0.0)
        elif rows:
            values.append(rows[0][metric.column])
    if not has_value or 2 * len(values) < math.ceil(window / snapshot.interval) - 1:
        return None
    return MetricValue(
        math.fsum(values) / len(values), snapshot.ends_at, len(values) * snapshot.interval
    )


def _compute_pod(
    snapshot: MetricsSnapshot, pod: PodSeen, metric: ScalingMetric, window: float
) -> MetricValue | None:
    """Returns the pod's mean. Ignores samples from before its start, which belong to another pod of
    the same name.
    """
    return _compute_mean(snapshot, [pod.key], metric, min(window, snapshot.age(pod)))


def compute_value(snapshot: MetricsSnapshot, request: MetricRequest) -> MetricValue:
    """Returns one value for all selected pods. Raises Refusal if values are missing."""
    metric, window = request.metric, request.window
    if metric is USED and request.aggregate != "mean":
        raise bad_request(
            f"{metric.name} is a mean over GPUs in use and does not support the aggregate "
            f"{request.aggregate}:"
            f" use the aggregate mean, or the metric {UTILIZATION.name}"
        )
    selected = select_pods(snapshot, request.pods)
    pods = [pod for pod in selected if snapshot.needs_gpu(pod)]
    by_pod = {
        pod.key: value
        for pod in pods
        if (value := _compute_pod(snapshot, pod, metric, window)) is not None
    }
    answered: Iterable[SampleKey] = by_pod
    value = None
    if metric is USED and request.pods.is_scope:
        # For a namespace or the cluster, a GPU is counted once, even if several pods share it.
        value = _compute_mean(snapshot, [(request.pods.namespace, "")], metric, window)
        answered = snapshot.last.rows
    elif metric is USED:
        value = _compute_mean(snapshot, list(by_pod), metric, window)
    elif by_pod:
        combined = aggregate_values(request.aggregate, [each.value for each in by_pod.values()])
        value = MetricValue(
            combined, snapshot.ends_at, max(each.window for each in by_pod.values())
        )
    missing = [pod for pod in pods if pod.key not in answered and not snapshot.is_starting(pod)]
    if value is None or (missing and not request.skip_missing):
        raise _explain_missing(snapshot, request, selected, missing)
    return _raise_zero(value, snapshot, pods, request.idle_for)


def aggregate_values(aggregate: str, values: Sequence[float]) -> float:
    """Returns the mean, max, sum, or a quantile such as p90. `values` must not be empty."""
    if aggregate in ("mean", "sum"):
        return math.fsum(values) / (len(values) if aggregate == "mean" else 1)
    ordered = sorted(values)
    percent = 100 if aggregate == "max" else int(aggregate.removeprefix("p"))
    place = percent / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def compute_pod_values(snapshot: MetricsSnapshot, request: MetricRequest) -> dict[str, MetricValue]:
    """Returns the values by pod name. Omits pods without the metric, because the HPA handles
    missing pods itself.

    A pod's value is 0 only if the pod is known to have been idle for `request.idle_for` seconds.
    Raises Refusal if no pod has a value.
    """
    pods = select_pods(snapshot, request.pods)
    values = {}
    for pod in pods:
        value = _compute_pod(snapshot, pod, request.metric, request.window)
        if value is not None:
            values[pod.name] = _raise_zero(value, snapshot, (pod,), request.idle_for)
    if not values:
        missing = [pod for pod in pods if snapshot.needs_gpu(pod) and not snapshot.is_starting(pod)]
        raise _explain_missing(snapshot, request, pods, missing)
    return values


def _raise_zero(
    value: MetricValue, snapshot: MetricsSnapshot, pods: Iterable[PodSeen], idle_for: float
) -> MetricValue:
    """Replaces 0 by MIN_VALUE unless all pods are known to be idle."""
    if value.value >= MIN_VALUE or all(_is_idle(snapshot, pod, idle_for) for pod in pods):
        return value
    return value._replace(value=MIN_VALUE)


def _is_idle(snapshot: MetricsSnapshot, pod: PodSeen, idle_for: float) -> bool:
    row = snapshot.last.rows.get(pod.key)
    return row is not None and row[IDLE] >= idle_for and snapshot.age(pod) >= idle_for


def is_active(snapshot: MetricsSnapshot, request: MetricRequest) -> bool:
    """Returns False only if every pod with a GPU has been idle for `request.idle_for` seconds.

    Raises Refusal if values are missing, or if there is no pod, because podgpu cannot know whether
    a pod is needed.
    """
    selected = select_pods(snapshot, request.pods)
    pods = [pod for pod in selected if snapshot.needs_gpu(pod)]
    missing = [pod for pod in pods if pod.key not in snapshot.last.rows]
    busy = [
        pod for pod in pods if pod not in missing and not _is_idle(snapshot, pod, request.idle_for)
    ]
    if busy or any(map(snapshot.is_starting, missing)):
        return True
    if missing or not pods:
        raise _explain_missing(snapshot, request, selected, missing)
    return False


def _explain_missing(
    snapshot: MetricsSnapshot,
    request: MetricRequest,
    selected: Sequence[PodSeen],
    missing: Sequence[PodSeen],
) -> Refusal:
    selector, metric = request.pods, request.metric
    notes = f" ({few_of(snapshot.notes, 3)})" if snapshot.notes else ""
    if not selected:
        return not_found(
            f"{selector.text} has no running pod: check the name, the labels and the namespace. "
            "podgpu cannot scale up"
            " from zero pods; add a second trigger for that"
        )
    if not any(map(snapshot.needs_gpu, selected)):
        return not_found(
            f"{selector.text}: none of its {len(selected)} running pods holds a GPU{notes}"
        )
    unreported = [pod for pod in missing if pod.key not in snapshot.last.rows]
    if unreported:
        return no_data(
            f"{selector.text}: {len(unreported)} of {len(selected)} pods request a GPU but are "
            "not reported by any"
            f" exporter ({few_of([_describe_place(snapshot, pod) for pod in unreported], 3)}): "
            "check that podgpu's"
            f" exporter runs on these nodes{notes}"
        )
    if under_mps := [pod.name for pod in missing if pod.key in snapshot.last.mps]:
        return no_data(
            f"{selector.text}: {metric.name} of {few_of(under_mps, 3)} is {MPS_REASON}: the "
            "driver reports only the MPS"
            " server. Use time slices or MIG, or scale by another metric"
        )
    if missing or (metric is USED and selector.is_scope):
        names = few_of((pod.name for pod in missing or selected), 3)
        return no_data(
            f"{selector.text}: exporters have not provided {metric.name} of {names} for at least "
            "half of the window:"
            f" {metric.needs}"
        )
    return no_data(
        f"{selector.text}: its pods have just started and have no values yet: retry later"
    )


def _describe_place(snapshot: MetricsSnapshot, pod: PodSeen) -> str:
    age = snapshot.stale_nodes.get(pod.node)
    return f"{pod.name} on {pod.node or 'no node'}" + (
        "" if age is None else f", last read {age:.0f} s ago"
    )
