"""Parses KEDA triggers and paths of the custom metrics API.

Both specify a metric, the pods and a window. Unknown keys are errors, so that a misspelt key does
not scale a workload by the wrong value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from podgpu.clock import parse_duration
from podgpu.errors import PodgpuError
from podgpu.scale.catalogue import METRICS, UTILIZATION, ScalingMetric
from podgpu.scale.pods import PodSeen

DEFAULT_WINDOW = 120.0
DEFAULT_IDLE = 300.0
_MAX_IDLE = 86_400.0
_MAX_QUOTED = 80


# Requests that are rejected or cannot be answered


class Refusal(PodgpuError):
    """An error with a message for the user: what is wrong, and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # HTTP status


bad_request = partial(Refusal, 400)  # the request is invalid; retrying does not help
forbidden = partial(Refusal, 403)
not_found = partial(Refusal, 404)  # no such metric, no matching pod, or no pod with a GPU
no_data = partial(Refusal, 503)  # values are missing now, but may be available later


def quote(text: str) -> str:
    """Quotes user input for messages. Truncates it and escapes control characters."""
    return repr(text[:_MAX_QUOTED])


# Label selectors, such as `a=b,c in (d,e),!f`

_REQUIREMENT = re.compile(
    r"(?P<negation>!?)\s*(?P<key>[\w./-]+)"
    r"(?:\s*(?P<operator>==|=|!=)\s*(?P<value>[\w.-]*)"
    r"|\s+(?P<membership>in|notin)\s*\((?P<members>[\w.,\s-]*)\))?",
    re.ASCII,
)
_COMMA = re.compile(r",(?![^(]*\))")  # a comma outside parentheses


class LabelRequirement(NamedTuple):
    text: str
    key: str
    values: frozenset[str] | None  # None: any value
    negated: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        matches = value is not None and (self.values is None or value in self.values)
        return matches is not self.negated


Selector = tuple[LabelRequirement, ...]
"""A selector matches if all its requirements match, so an empty selector matches everything."""


def parse_selector(text: str) -> Selector:
    requirements = []
    if text.strip():
        for part in _COMMA.split(text):
            requirements.append(_parse_requirement(part.strip(), text))
    return tuple(requirements)


def _parse_requirement(part: str, whole: str) -> LabelRequirement:
    match = _REQUIREMENT.fullmatch(part)
    # `!key` has no values.
    has_values = match is not None and (match["operator"] or match["membership"])
    if match is None or (match["negation"] and has_values):
        raise bad_request(
            f"cannot parse {quote(part)} in the label selector {quote(whole)}: "
            "write key=value, key!=value, key in (a,b), key notin (a,b), key or !key, "
            "separated by commas"
        )

    negation, key, operator, value, membership, members = match.groups()
    if operator:
        return LabelRequirement(part, key, frozenset({value}), operator == "!=")
    if membership:
        values = frozenset(map(str.strip, members.split(",")))
        return LabelRequirement(part, key, values, membership == "notin")
    return LabelRequirement(part, key, None, bool(negation))


# Requests


@dataclass(frozen=True, slots=True)
class PodSelector:
    """Selects the pods of a request. An empty namespace selects the whole cluster."""

    namespace: str
    owner: tuple[str, str] | None = None  # kind and name
    labels: Selector = ()
    name: str = ""  # name of a single pod

    @property
    def is_scope(self) -> bool:
        """True if all pods of a namespace or of the cluster are selected."""
        return self.owner is None and not self.labels and not self.name

    def matches(self, pod: PodSeen) -> bool:
        if self.namespace and pod.namespace != self.namespace:
            return False
        if self.owner is not None and pod.owner != self.owner:
            return False
        if self.name and pod.name != self.name:
            return False

        labels = dict(pod.labels) if self.labels else {}
        return all(requirement.matches(labels) for requirement in self.labels)

    @property
    def text(self) -> str:
        if self.name:
            return f"pod {self.namespace}/{self.name}"
        if self.owner is not None:
            kind, name = self.owner
            return f"{kind} {self.namespace}/{name}"
        if self.labels:
            labels = ",".join(requirement.text for requirement in self.labels)
            return f"pods of {self.namespace} with {labels}"
        if not self.namespace:
            return "the cluster"
        return f"namespace {self.namespace}"


@dataclass(frozen=True, slots=True)
class MetricRequest:
    metric: ScalingMetric
    pods: PodSelector
    window: float = DEFAULT_WINDOW
    # how the values of several pods are combined: mean, max, sum, or a quantile such as p90
    aggregate: str = "mean"
    skip_missing: bool = False  # skip pods without values instead of failing
    idle_for: float = DEFAULT_IDLE
    resource: str = ""  # in the custom metrics API: pods, namespaces, or one of WORKLOADS
    # the metric's selector; the response must repeat it
    metric_labels: Mapping[str, str] = field(default_factory=dict)


_AGGREGATE = re.compile(r"mean|max|sum|p(\d{1,2}|100)", re.ASCII)
_TARGET = re.compile(r"\d{1,12}(\.\d{1,6})?", re.ASCII)
_AGGREGATION_KEYS = ("window", "aggregate", "idleFor", "missing")


def _make_request(
    metric: ScalingMetric, pods: PodSelector, values: Mapping[str, str], max_window: float
) -> MetricRequest:
    missing = values.get("missing", "refuse")
    if missing not in ("refuse", "leave-out"):
        raise bad_request(
            f"missing {quote(missing)}: must be refuse, or leave-out to skip pods without values"
        )

    aggregate = values.get("aggregate", "mean")
    if _AGGREGATE.fullmatch(aggregate) is None:
        raise bad_request(
            f"aggregate {quote(aggregate)}: must be mean, max, sum, or a quantile such as p90"
        )

    window = _parse_seconds(values, "window", DEFAULT_WINDOW, max_window)
    idle_for = _parse_seconds(values, "idleFor", DEFAULT_IDLE, _MAX_IDLE)
    skip_missing = missing == "leave-out"
    return MetricRequest(metric, pods, window, aggregate, skip_missing, idle_for)


def find_metric(name: str) -> ScalingMetric:
    by_name = {metric.name: metric for metric in METRICS}
    if name not in by_name:
        raise not_found(f"there is no metric {quote(name)}: must be one of {', '.join(by_name)}")
    return by_name[name]


def _parse_seconds(values: Mapping[str, str], key: str, default: float, longest: float) -> float:
    """Parses `90s`, `5m`, or a plain number of seconds. Raises Refusal for other texts."""
    if key not in values:
        return default

    text = values[key]
    duration = f"{text}s" if text.isdecimal() else text
    seconds = parse_duration(duration) or 0.0
    if not 1 <= seconds <= longest:
        raise bad_request(
            f"{key} {quote(text)}: must be a duration such as 90s or 5m, at most {longest:g}s"
        )
    return seconds


# KEDA's triggers

TRIGGER_KEYS = ("metric", "target", "owner", "selector", "scope", *_AGGREGATION_KEYS)
_KEDA_KEYS = {"scaleraddress", "enabletls", "unsafessl", "tlscertfile"}  # keys for KEDA itself


def parse_trigger(
    namespace: str, metadata: Mapping[str, str], max_window: float
) -> tuple[MetricRequest, float]:
    """Parses a trigger's `metadata`. Returns the request and the target value.

    Raises Refusal if a value is invalid.
    """
    values: dict[str, str] = {}
    for written, value in metadata.items():
        # KEDA has already resolved the environment variable.
        key = written.removesuffix("FromEnv")
        if key.lower() not in _KEDA_KEYS:
            _check_key(key, TRIGGER_KEYS, "the trigger's metadata")
            values[key] = value.strip()

    target = values.get("target")
    if not target:
        raise bad_request(
            'the trigger\'s metadata has no target: add the desired value, such as target: "60"'
        )

    if _TARGET.fullmatch(target) is None or float(target) <= 0:
        raise bad_request(
            f"target {quote(target)}: must be a number above 0 in the metric's unit, "
            "such as 60 for 60 %"
        )

    metric = find_metric(values.get("metric", UTILIZATION.name))
    pods = _parse_trigger_pods(namespace, values)
    return _make_request(metric, pods, values, max_window), float(target)


def _check_key(key: str, known: tuple[str, ...], where: str) -> None:
    if key not in known:
        raise bad_request(
            f"{where} has an unknown key {quote(key)}: must be one of {', '.join(known)}"
        )


def _parse_trigger_pods(namespace: str, values: Mapping[str, str]) -> PodSelector:
    # An empty namespace would select the pods of all namespaces.
    if not namespace:
        raise bad_request(
            "the request has no namespace: KEDA must send the ScaledObject's namespace"
        )

    keys = [key for key in ("owner", "selector", "scope") if values.get(key)]
    if len(keys) != 1:
        raise bad_request(
            "the trigger's metadata must have exactly one of owner, selector or scope, "
            "such as owner: Deployment/inference, selector: app=inference, or scope: namespace; "
            f"found {' and '.join(keys) or 'none'}"
        )

    (key,) = keys
    text = values[key]
    if key == "selector":
        return PodSelector(namespace, labels=parse_selector(text))
    if key == "owner":
        return PodSelector(namespace, owner=_parse_owner(text))

    scopes = {"namespace": namespace, "cluster": ""}
    if text not in scopes:
        raise bad_request(f"scope {quote(text)}: must be namespace or cluster")
    return PodSelector(scopes[text])


def _parse_owner(text: str) -> tuple[str, str]:
    kind, _, name = text.partition("/")
    if not kind or not name or "/" in name:
        raise bad_request(f"owner {quote(text)}: must be KIND/NAME, such as Deployment/inference")
    return kind, name


# Paths of the custom metrics API

API_GROUP = "custom.metrics.k8s.io"
API_VERSIONS = ("v1beta2", "v1beta1")
WORKLOADS = {  # kind and apiVersion by resource
    "deployments.apps": ("Deployment", "apps/v1"),
    "statefulsets.apps": ("StatefulSet", "apps/v1"),
    "replicasets.apps": ("ReplicaSet", "apps/v1"),
    "daemonsets.apps": ("DaemonSet", "apps/v1"),
    "jobs.batch": ("Job", "batch/v1"),
}
KINDS = {"pods": ("Pod", "/v1"), "namespaces": ("Namespace", "/v1"), **WORKLOADS}


def parse_path(path: str, query: Mapping[str, str], max_window: float) -> MetricRequest:
    """Parses the path after /apis/custom.metrics.k8s.io/VERSION/namespaces/.

    Raises Refusal if the path is invalid.
    """
    match path.split("/"):
        case [namespace, "metrics", metric] if namespace:
            resource = "namespaces"
            name = ""
        case [namespace, resource, name, metric] if (
            namespace and name and resource in ("pods", *WORKLOADS)
        ):
            pass
        case _:
            raise not_found(
                f"{quote(path)} is not a path of this API: "
                "write NAMESPACE/pods/*/METRIC, NAMESPACE/metrics/METRIC, "
                f"or NAMESPACE/RESOURCE/NAME/METRIC with one of {', '.join(WORKLOADS)}"
            )

    labels = parse_selector(query.get("labelSelector", ""))
    if resource in WORKLOADS:
        kind, _ = WORKLOADS[resource]
        pods = PodSelector(namespace, owner=(kind, name))
    else:
        pods = PodSelector(namespace, labels=labels, name="" if name == "*" else name)

    metric_labels = _parse_metric_labels(query.get("metricLabelSelector", ""))
    request = _make_request(find_metric(metric), pods, metric_labels, max_window)
    return replace(request, resource=resource, metric_labels=metric_labels)


def _parse_metric_labels(text: str) -> dict[str, str]:
    """Parses a metric's selector, which contains options such as window=5m."""
    values: dict[str, str] = {}
    for requirement in parse_selector(text):
        key = requirement.key
        _check_key(key, _AGGREGATION_KEYS, "the metric's selector")
        if requirement.negated or requirement.values is None or len(requirement.values) != 1:
            raise bad_request(f"the metric's selector must have the form {key}=VALUE")
        (values[key],) = requirement.values
    return values
