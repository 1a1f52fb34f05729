"""Computes the values of workloads and pods for autoscalers, and whether a workload is active.

A pod's value is the mean over the window. A workload's value aggregates the values of its running
pods with a GPU. If such a pod has no values, the request fails. With `missing: leave-out`, the pod
is skipped instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from podgpu.scale.samples import MetricsSnapshot, RoundSamples, SampleKey

MIN_VALUE = 0.001
"""Returned instead of 0 if a pod may be active.

At 0, an HPA with minReplicas 0 would scale the workload to zero.
"""


class MetricValue(NamedTuple):
    value: float
    at: float  # end of the window, as Unix time
    window: float  # length in seconds; shorter than requested if the pods started recently


def _select_pods(snapshot: MetricsSnapshot, selector: PodSelector) -> list[PodSeen]:
    """Returns the selected running pods. Raises Refusal if the running pods are unknown."""
    if snapshot.pods.trouble:
        raise no_data(snapshot.pods.trouble)
    return [pod for pod in snapshot.pods.by_key.values() if selector.matches(pod)]


def _select_gpu_pods(snapshot: MetricsSnapshot, selector: PodSelector) -> list[PodSeen]:
    pods = _select_pods(snapshot, selector)
    return [pod for pod in pods if pod.requests_gpu or pod.key in snapshot.held]


def _compute_mean(
    snapshot: MetricsSnapshot, request: MetricRequest, ages: Mapping[SampleKey, float]
) -> MetricValue | None:
    """Returns the mean over the rounds (readings of all nodes) in the window.

    Returns None if the last round has no value, or if fewer than half of the rounds have values.
    One missing round is ignored, because the first round after a start has no rates.

    `ages`: by row, the time for which it counts. Earlier rounds belong to another pod of the same
    name.
    """
    if not ages:
        return None
    window = min(request.window, max(ages.values()))
    starts = {key: snapshot.find_start(age) for key, age in ages.items()}

    known = []
    last = None
    for samples in snapshot.rounds_in(window):
        keys = [key for key, start in starts.items() if samples.at > start]
        last = _read_value(samples, keys, request.metric)
        if last is not None:
            known.append(last)

    rounds = math.ceil(window / snapshot.interval)
    half_without_first = (rounds - 1) / 2
    if last is None or len(known) < half_without_first:
        return None
    mean = math.fsum(known) / len(known)
    return MetricValue(mean, snapshot.ends_at, len(known) * snapshot.interval)


def _read_value(
    samples: RoundSamples, keys: Sequence[SampleKey], metric: ScalingMetric
) -> float | None:
    """Returns the value in one round, or None if no key has one.

    Only the metric USED allows several keys.
    """
    total: float | None = None
    devices = 0.0
    for key in keys:
        row = samples.rows.get(key)
        if row is None or math.isnan(row[metric.column]):
            continue
        if metric is not USED:
            return row[metric.column]
        total = row[USED.column] + (total or 0.0)
        devices += row[USED_COUNT]

    if total is None:
        return None
    # No device is in use.
    if not devices:
        return 0.0
    return total / devices


def compute_value(snapshot: MetricsSnapshot, request: MetricRequest) -> MetricValue:
    """Returns one value for all selected pods. Raises Refusal if values are missing."""
    metric = request.metric
    if metric is USED and request.aggregate != "mean":
        raise bad_request(
            f"{metric.name} is a mean over GPUs in use and does not support the aggregate "
            f"{request.aggregate}: use the aggregate mean, or the metric {UTILIZATION.name}"
        )

    pods = _select_gpu_pods(snapshot, request.pods)
    answered: Collection[SampleKey]
    if metric is USED and request.pods.is_scope:
        # The row of a namespace or the cluster has each GPU once, even if several pods share it.
        scope = (request.pods.namespace, "")
        value = _compute_mean(snapshot, request, {scope: math.inf})
        answered = snapshot.last.rows
    else:
        by_pod = _compute_pods(snapshot, request, pods)
        value = _combine(snapshot, request, pods, by_pod)
        answered = by_pod

    missing = [pod for pod in pods if pod.key not in answered and not snapshot.is_starting(pod)]
    if value is None or (missing and not request.skip_missing):
        raise _explain_missing(snapshot, request, missing)
    return _avoid_zero(value, snapshot, pods, request.idle_for)


def _compute_pods(
    snapshot: MetricsSnapshot, request: MetricRequest, pods: Iterable[PodSeen]
) -> dict[SampleKey, MetricValue]:
    """Returns the values of the pods that have one."""
    values = {}
    for pod in pods:
        value = _compute_mean(snapshot, request, {pod.key: snapshot.age(pod)})
        if value is not None:
            values[pod.key] = value
    return values


def _combine(
    snapshot: MetricsSnapshot,
    request: MetricRequest,
    pods: Iterable[PodSeen],
    by_pod: Mapping[SampleKey, MetricValue],
) -> MetricValue | None:
    """Returns the value of all pods together, or None if there is none."""
    if request.metric is USED:
        ages = {}
        for pod in pods:
            if pod.key in by_pod:
                ages[pod.key] = snapshot.age(pod)
        return _compute_mean(snapshot, request, ages)
    if not by_pod:
        return None

    values = []
    window = 0.0
    for each in by_pod.values():
        values.append(each.value)
        window = max(window, each.window)
    return MetricValue(aggregate_values(request.aggregate, values), snapshot.ends_at, window)


def aggregate_values(aggregate: str, values: Sequence[float]) -> float:
    """Returns the mean, max, sum, or a quantile such as p90. `values` must not be empty."""
    if aggregate == "mean":
        return math.fsum(values) / len(values)
    if aggregate == "sum":
        return math.fsum(values)
    if aggregate == "max":
        return max(values)

    ordered = sorted(values)
    quantile = int(aggregate.removeprefix("p")) / 100
    # Between two values, interpolates.
    place = quantile * (len(ordered) - 1)
    below = ordered[math.floor(place)]
    above = ordered[math.ceil(place)]
    fraction = place - math.floor(place)
    return below + (above - below) * fraction


def compute_pod_values(snapshot: MetricsSnapshot, request: MetricRequest) -> dict[str, MetricValue]:
    """Returns the values by pod name.

    Omits pods without the metric, because the HPA handles missing pods itself. A pod's value is 0
    only if the pod is known to have been idle for `request.idle_for` seconds. Raises Refusal if no
    pod has a value.
    """
    pods = _select_gpu_pods(snapshot, request.pods)
    by_pod = _compute_pods(snapshot, request, pods)
    values = {}
    for pod in pods:
        if pod.key in by_pod:
            value = by_pod[pod.key]
            values[pod.name] = _avoid_zero(value, snapshot, (pod,), request.idle_for)

    if not values:
        missing = [pod for pod in pods if not snapshot.is_starting(pod)]
        raise _explain_missing(snapshot, request, missing)
    return values


def _avoid_zero(
    value: MetricValue, snapshot: MetricsSnapshot, pods: Iterable[PodSeen], idle_for: float
) -> MetricValue:
    """Replaces 0 by MIN_VALUE unless all pods are known to be idle."""
    if value.value >= MIN_VALUE or all(_is_idle(snapshot, pod, idle_for) for pod in pods):
        return value
    return value._replace(value=MIN_VALUE)


def _is_idle(snapshot: MetricsSnapshot, pod: PodSeen, idle_for: float) -> bool:
    """Returns True if the pod is known to be idle for this time.

    A row may include idle time of an earlier pod of the same name, so the pod's age counts too.
    """
    row = snapshot.last.rows.get(pod.key)
    return row is not None and row[IDLE] >= idle_for and snapshot.age(pod) >= idle_for


def is_active(snapshot: MetricsSnapshot, request: MetricRequest) -> bool:
    """Returns False only if every pod with a GPU has been idle for `request.idle_for` seconds.

    Raises Refusal if values are missing, or if there is no pod, because podgpu cannot know whether
    a pod is needed.
    """
    pods = _select_gpu_pods(snapshot, request.pods)
    missing = []
    for pod in pods:
        if pod.key not in snapshot.last.rows:
            missing.append(pod)
            may_be_busy = snapshot.is_starting(pod)
        else:
            may_be_busy = not _is_idle(snapshot, pod, request.idle_for)
        if may_be_busy:
            return True
    if missing or not pods:
        raise _explain_missing(snapshot, request, missing)
    return False


def _explain_missing(
    snapshot: MetricsSnapshot, request: MetricRequest, missing: Sequence[PodSeen]
) -> Refusal:
    """`missing`: the pods with a GPU and without a value."""
    subject = request.pods.text
    selected = _select_pods(snapshot, request.pods)
    if not selected:
        return not_found(
            f"{subject} has no running pod: check the name, the labels and the namespace. "
            "podgpu cannot scale up from zero pods; add a second trigger for that"
        )

    notes = f" ({few_of(snapshot.notes, 3)})" if snapshot.notes else ""
    if not _select_gpu_pods(snapshot, request.pods):
        return not_found(f"{subject}: none of its {len(selected)} running pods holds a GPU{notes}")

    unreported = []
    under_mps = []
    for pod in missing:
        if pod.key not in snapshot.last.rows:
            unreported.append(_describe_place(snapshot, pod))
        if pod.key in snapshot.last.mps:
            under_mps.append(pod.name)

    if unreported:
        return no_data(
            f"{subject}: {len(unreported)} of {len(selected)} pods request a GPU but are "
            f"not reported by any exporter ({few_of(unreported, 3)}): "
            f"check that podgpu's exporter runs on these nodes{notes}"
        )
    if under_mps:
        return no_data(
            f"{subject}: {request.metric.name} of {few_of(under_mps, 3)} is {MPS_REASON}: "
            "the driver reports only the MPS server. "
            "Use time slices or MIG, or scale by another metric"
        )

    # The row of a scope may have no value although all pods are reported.
    silent = missing
    if not missing and request.metric is USED and request.pods.is_scope:
        silent = selected
    if silent:
        return _explain_silent(subject, request.metric, silent)
    return no_data(f"{subject}: its pods have just started and have no values yet: retry later")


def _explain_silent(subject: str, metric: ScalingMetric, pods: Iterable[PodSeen]) -> Refusal:
    names = few_of((pod.name for pod in pods), 3)
    return no_data(
        f"{subject}: exporters have not provided {metric.name} of {names} "
        f"for at least half of the window: {metric.needs}"
    )


def _describe_place(snapshot: MetricsSnapshot, pod: PodSeen) -> str:
    place = f"{pod.name} on {pod.node or 'no node'}"
    age = snapshot.stale_nodes.get(pod.node)
    if age is None:
        return place
    return f"{place}, last read {age:.0f} s ago"
