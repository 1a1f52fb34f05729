"""Parses KEDA triggers and metrics API paths: which metric, of which pods, over which window.

Unknown keys are errors, so that a misspelt key does not scale a workload by the wrong value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.autoscale.metrics import (
    MEAN,
    UTILIZATION,
    Aggregate,
    ScalingMetric,
    find_metric,
    parse_aggregate,
    parse_target,
    parse_window,
)
from podgpu.autoscale.refusal import Refusal, bad_request, did_you_mean, find_nearest, not_found, quote
from podgpu.autoscale.selectors import EVERYTHING, LabelSelector, parse_selector

DEFAULT_WINDOW = 120.0
DEFAULT_IDLE = 300.0
_MAX_IDLE = 86_400.0


@dataclass(frozen=True, slots=True)
class AggregationOptions:
    """How the values of pods are combined into one."""

    window: float = DEFAULT_WINDOW
    aggregate: Aggregate = MEAN
    skip_missing: bool = False  # skip pods without values instead of failing
    idle_for: float = DEFAULT_IDLE


@dataclass(frozen=True, slots=True)
class PodSelector:
    """Selects the pods of a request. An empty namespace selects the whole cluster."""

    namespace: str
    owner: tuple[str, str] | None = None  # kind and name
    labels: LabelSelector = EVERYTHING

    @property
    def is_scope(self) -> bool:
        """True if all pods of a namespace or of the cluster are selected."""
        return self.owner is None and not self.labels.requirements

    @property
    def text(self) -> str:
        if self.owner is not None:
            return f"{self.owner[0]} {self.namespace}/{self.owner[1]}"
        if self.labels.requirements:
            return f"pods of {self.namespace} with {self.labels.text}"
        return f"namespace {self.namespace}" if self.namespace else "the cluster"


# KEDA's triggers

TRIGGER_KEYS = ("metric", "target", "owner", "selector", "scope", "window", "aggregate", "idleFor", "missing")
_AGGREGATION_KEYS = ("window", "aggregate", "idleFor", "missing")
_KEDA_KEYS = frozenset({"scaleraddress", "enabletls", "unsafessl", "tlscertfile"})  # KEDA's own keys
_SYNONYMS = {
    **dict.fromkeys(("targetvalue", "threshold", "value", "targetutilization"), "target"),
    **dict.fromkeys(("metricname", "name", "query"), "metric"),
    **dict.fromkeys(("deployment", "statefulset", "workload", "targetref", "scaletargetref"), "owner"),
    **dict.fromkeys(("labelselector", "labels", "podselector", "matchlabels"), "selector"),
    **dict.fromkeys(("idle", "idleseconds", "idleafter", "cooldown", "cooldownperiod"), "idleFor"),
    **dict.fromkeys(("aggregation", "function", "statistic"), "aggregate"),
    **dict.fromkeys(("period", "timewindow", "range"), "window"),
}
_FROM_ENV = "FromEnv"
_OWNER_KINDS = ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet", "Job", "ReplicationController")


@dataclass(frozen=True, slots=True)
class Trigger:
    metric: ScalingMetric
    target: float
    pods: PodSelector
    aggregation: AggregationOptions


def parse_trigger(namespace: str, metadata: Mapping[str, str], max_window: float) -> Trigger:
    """`metadata` is the trigger's metadata in the ScaledObject. Raises Refusal."""
    values = _read_trigger_keys(metadata)
    if not values.get("target"):
        raise bad_request('the trigger\'s metadata has no target: add the desired value, such as target: "60"')
    return Trigger(
        find_metric(values["metric"]) if "metric" in values else UTILIZATION,
        parse_target(values["target"]),
        _parse_trigger_pods(namespace, values),
        parse_aggregation(values, max_window),
    )


def parse_aggregation(values: Mapping[str, str], max_window: float) -> AggregationOptions:
    """Raises Refusal."""
    missing = values.get("missing", "refuse")
    if missing not in ("refuse", "leave-out"):
        raise bad_request(f"missing {quote(missing)}: must be refuse, or leave-out to skip pods without values")
    return AggregationOptions(
        parse_window(values["window"], "window", max_window) if "window" in values else DEFAULT_WINDOW,
        parse_aggregate(values["aggregate"]) if "aggregate" in values else MEAN,
        missing == "leave-out",
        parse_window(values["idleFor"], "idleFor", _MAX_IDLE) if "idleFor" in values else DEFAULT_IDLE,
    )


def _check_key(key: str, known: tuple[str, ...], where: str) -> None:
    if key in known:
        return
    near = _SYNONYMS.get(key.lower(), "")
    if near not in known:
        near = find_nearest(key, known)
    hint = f": did you mean {near}?" if near else did_you_mean(key, known)
    raise bad_request(f"{where} has an unknown key {quote(key)}{hint}")


def _read_trigger_keys(metadata: Mapping[str, str]) -> dict[str, str]:
    """Removes KEDA's own keys. KEDA has already replaced the values of keys such as `targetFromEnv`."""
    values: dict[str, str] = {}
    for written, value in metadata.items():
        key = written.removesuffix(_FROM_ENV)
        if key.lower() in _KEDA_KEYS:
            continue
        _check_key(key, TRIGGER_KEYS, "the trigger's metadata")
        if key in values:
            raise bad_request(f"the trigger's metadata has both {key} and {key}{_FROM_ENV}: keep one")
        values[key] = value.strip()
    return values


def _parse_trigger_pods(namespace: str, values: Mapping[str, str]) -> PodSelector:
    if not namespace:
        raise bad_request("the request has no namespace: KEDA must send the ScaledObject's namespace")
    keys = [key for key in ("owner", "selector", "scope") if values.get(key)]
    if len(keys) != 1:
        raise bad_request(
            "the trigger's metadata must have exactly one of owner, selector and scope, such as owner:"
            f" Deployment/inference, selector: app=inference, or scope: namespace; found {' and '.join(keys) or 'none'}"
        )
    text = values[keys[0]]
    if keys[0] == "selector":
        return PodSelector(namespace, labels=parse_selector(text))
    if keys[0] == "scope":
        return PodSelector(_parse_scope(text, namespace))
    kind, slash, name = text.partition("/")
    if not slash or not kind or not name or "/" in name:
        raise bad_request(f"owner {quote(text)}: must be KIND/NAME, such as Deployment/inference")
    return PodSelector(namespace, owner=(_normalize_kind(kind), name))


def _parse_scope(text: str, namespace: str) -> str:
    if text not in ("namespace", "cluster"):
        raise bad_request(f"scope {quote(text)}: must be namespace or cluster")
    return namespace if text == "namespace" else ""


def _normalize_kind(text: str) -> str:
    """Corrects the case of Kubernetes' own kinds. Other kinds, such as Rollout, are not changed."""
    return {kind.lower(): kind for kind in _OWNER_KINDS}.get(text.lower(), text)


# Paths of the metrics APIs

CUSTOM_GROUP, CUSTOM_VERSIONS = "custom.metrics.k8s.io", ("v1beta2", "v1beta1")
EXTERNAL_GROUP, EXTERNAL_VERSION = "external.metrics.k8s.io", "v1beta1"
WORKLOADS = {  # kind and apiVersion by resource
    "deployments.apps": ("Deployment", "apps/v1"),
    "statefulsets.apps": ("StatefulSet", "apps/v1"),
    "replicasets.apps": ("ReplicaSet", "apps/v1"),
    "daemonsets.apps": ("DaemonSet", "apps/v1"),
    "jobs.batch": ("Job", "batch/v1"),
}
_KINDS = {"pods": ("Pod", "/v1"), "nodes": ("Node", "/v1"), "namespaces": ("Namespace", "/v1"), **WORKLOADS}
ANY = "*"


class ResourceAttributes(NamedTuple):
    """The request attributes that a SubjectAccessReview checks."""

    verb: str
    group: str
    version: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class MetricRequest:
    """One request to the custom or external metrics API."""

    metric: ScalingMetric
    aggregation: AggregationOptions
    resource: str  # pods, nodes, namespaces, external, or one of WORKLOADS
    namespace: str
    name: str  # `*` for all objects that match `labels`
    labels: LabelSelector = EVERYTHING
    external_pods: PodSelector | None = None
    metric_labels: tuple[tuple[str, str], ...] = ()  # the metric's own selector, which is repeated in responses

    def describe(self, name: str = "") -> dict[str, str]:
        """Returns a reference to the object that a value belongs to."""
        kind, api_version = _KINDS[self.resource]
        reference = {"kind": kind, "name": name or self.name, "apiVersion": api_version}
        return {**reference, "namespace": self.namespace} if self.resource in ("pods", *WORKLOADS) else reference

    @property
    def pods(self) -> PodSelector:
        if self.external_pods is not None:
            return self.external_pods
        if self.resource in WORKLOADS:
            return PodSelector(self.namespace, owner=(WORKLOADS[self.resource][0], self.name))
        return PodSelector(self.namespace, labels=self.labels)


def parse_custom_path(version: str, path: str) -> ResourceAttributes:
    """Parses the path after /apis/custom.metrics.k8s.io/VERSION/. Raises Refusal."""
    parts = _split_path(path)
    if len(parts) == 4 and parts[0] == "namespaces" and parts[2] == "metrics":
        return ResourceAttributes("get", CUSTOM_GROUP, version, "metrics", "", parts[1], parts[3])
    if len(parts) == 5 and parts[0] == "namespaces":
        return ResourceAttributes("get", CUSTOM_GROUP, version, parts[2], parts[4], parts[1], parts[3])
    if len(parts) == 3:
        return ResourceAttributes("get", CUSTOM_GROUP, version, parts[0], parts[2], "", parts[1])
    raise not_found(
        f"{quote(path)} is not a path of this API: write namespaces/NAMESPACE/pods/*/METRIC,"
        " namespaces/NAMESPACE/deployments.apps/NAME/METRIC, namespaces/NAMESPACE/metrics/METRIC or nodes/NAME/METRIC"
    )


def parse_custom(attributes: ResourceAttributes, query: Mapping[str, str], max_window: float) -> MetricRequest:
    """Raises Refusal."""
    values = _parse_metric_labels(query.get("metricLabelSelector", ""), _AGGREGATION_KEYS)
    aggregation = parse_aggregation(values, max_window)
    labels = parse_selector(query.get("labelSelector", ""))
    resource, namespace, name = attributes.resource.removesuffix("."), attributes.namespace, attributes.name
    metric = find_metric(name if resource == "metrics" else attributes.subresource)
    if resource == "metrics":
        resource, name = "namespaces", namespace
    elif resource == "namespaces" and not namespace and name != ANY:
        namespace = name
    elif not (
        (resource == "pods" and namespace)
        or (resource == "nodes" and not namespace)
        or (resource in WORKLOADS and namespace and name != ANY)
    ):
        raise not_found(
            f"podgpu has no metrics of {quote(resource)} {quote(name)}{f' in {namespace}' if namespace else ''}: it has"
            f" metrics of pods, nodes, namespaces and, by name, {', '.join(WORKLOADS)}"
        )
    return MetricRequest(metric, aggregation, resource, namespace, name, labels, metric_labels=tuple(values.items()))


def parse_external_path(path: str, query: Mapping[str, str]) -> ResourceAttributes:
    """Raises Refusal. With `scope=cluster`, the namespace is empty: the caller needs access to all namespaces."""
    parts = _split_path(path)
    if len(parts) != 3 or parts[0] != "namespaces":
        raise not_found(f"{quote(path)} is not a path of this API: write namespaces/NAMESPACE/METRIC")
    try:
        is_cluster = _parse_external_labels(query).get("scope") == "cluster"
    except Refusal:  # reported after authorization
        is_cluster = False
    return ResourceAttributes("list", EXTERNAL_GROUP, EXTERNAL_VERSION, parts[2], "", "" if is_cluster else parts[1])


def parse_external(attributes: ResourceAttributes, query: Mapping[str, str], max_window: float) -> MetricRequest:
    """Raises Refusal.

    The label selector selects the pods: `owner=Deployment.inference`, `scope=namespace` or `scope=cluster`.
    """
    values, namespace = _parse_external_labels(query), attributes.namespace
    aggregation = parse_aggregation(
        {key: value for key, value in values.items() if key in _AGGREGATION_KEYS}, max_window
    )
    if "owner" in values and "scope" in values:
        raise bad_request("the metric's selector has both owner and scope: keep one")
    if "owner" in values:
        kind, dot, name = values["owner"].partition(".")
        if not dot or not kind or not name:
            raise bad_request(f"owner {quote(values['owner'])}: must be KIND.NAME, such as Deployment.inference")
        pods = PodSelector(namespace, owner=(_normalize_kind(kind), name))
    else:
        pods = PodSelector(_parse_scope(values.get("scope", "namespace"), namespace))
    metric = find_metric(attributes.resource)
    return MetricRequest(metric, aggregation, "external", namespace, "", external_pods=pods)


def _parse_external_labels(query: Mapping[str, str]) -> dict[str, str]:
    return _parse_metric_labels(query.get("labelSelector", ""), (*_AGGREGATION_KEYS, "owner", "scope"))


def _parse_metric_labels(text: str, known: tuple[str, ...]) -> dict[str, str]:
    """Parses a metric's selector, which contains options such as window=5m."""
    values: dict[str, str] = {}
    for requirement in parse_selector(text).requirements:
        _check_key(requirement.key, known, "the metric's selector")
        if requirement.operator != "in" or len(requirement.values) != 1:
            raise bad_request(f"the metric's selector must have the form {requirement.key}=VALUE")
        values[requirement.key] = requirement.values[0]
    return values


def _split_path(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    if not all(parts) or not path.isprintable():
        raise not_found(f"{quote(path)} is not a path of this API")
    return parts
