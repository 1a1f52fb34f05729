"""This module reads what is asked of the custom and the external metrics API: which object, which metric, over what.
Pure.

`attributes` is what Kubernetes' authorization is asked about the same request, as it reads such paths itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.autoscale.metrics import Metric, metric_named
from podgpu.autoscale.questions import Over, Whom
from podgpu.autoscale.refusal import Refusal, bad_request, not_found, quoted
from podgpu.autoscale.selectors import Selector, parse_selector
from podgpu.autoscale.trigger import check_key, owner_kind, parse_over

CUSTOM = "custom.metrics.k8s.io"
CUSTOM_VERSIONS = ("v1beta2", "v1beta1")
EXTERNAL = "external.metrics.k8s.io"
EXTERNAL_VERSION = "v1beta1"
_OVER_KEYS = ("window", "aggregate", "idleFor", "missing")
_SCOPE_KEYS = ("owner", "scope")
_LONGEST = 2048
_PLURALS = {
    "deployments.apps": "Deployment",
    "statefulsets.apps": "StatefulSet",
    "replicasets.apps": "ReplicaSet",
    "daemonsets.apps": "DaemonSet",
    "jobs.batch": "Job",
}
WORKLOADS = tuple(_PLURALS)
"""What pods may belong to, as paths have it."""
_API_VERSIONS = {"deployments.apps": "apps/v1", "jobs.batch": "batch/v1"}
ANY = "*"


class Attributes(NamedTuple):
    """What may be allowed or not, as a SubjectAccessReview has it."""

    verb: str
    group: str
    version: str
    resource: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Described:
    """The object that a value is of."""

    kind: str
    api_version: str
    namespace: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request for a metric."""

    metric: Metric
    over: Over
    resource: str
    """`pods`, `nodes`, `namespaces`, one of WORKLOADS; of the external API `external`."""
    namespace: str
    name: str
    """`*`: all that `selector` matches."""
    selector: Selector
    whom: Whom | None = None
    """Of the external API."""
    given: tuple[tuple[str, str], ...] = ()
    """The metric's own selector, which says how the figure is made: answers repeat it, as adapters do."""

    def described(self, name: str = "") -> Described:
        name = name or self.name
        if self.resource == "pods":
            return Described("Pod", "/v1", self.namespace, name)
        if self.resource == "nodes":
            return Described("Node", "/v1", "", name)
        if self.resource == "namespaces":
            return Described("Namespace", "/v1", "", self.namespace)
        version = _API_VERSIONS.get(self.resource, "apps/v1")
        return Described(_PLURALS[self.resource], version, self.namespace, name)

    def pods(self) -> Whom:
        if self.whom is not None:
            return self.whom
        if self.resource in _PLURALS:
            return Whom(self.namespace, owner=(_PLURALS[self.resource], self.name))
        return Whom(self.namespace, selector=self.selector)


def custom_attributes(version: str, path: str) -> Attributes:
    """Of the path behind /apis/custom.metrics.k8s.io/VERSION/. Raises Refusal for what is no such path."""
    parts = _parts(path)
    if len(parts) == 4 and parts[0] == "namespaces" and parts[2] == "metrics":
        return Attributes("get", CUSTOM, version, "metrics", "", parts[1], parts[3])
    if len(parts) == 5 and parts[0] == "namespaces":
        return Attributes("get", CUSTOM, version, parts[2], parts[4], parts[1], parts[3])
    if len(parts) == 3:
        return Attributes("get", CUSTOM, version, parts[0], parts[2], "", parts[1])
    raise not_found(
        f"{quoted(path)} is not a path of this API: write namespaces/NAMESPACE/pods/*/METRIC, "
        "namespaces/NAMESPACE/deployments.apps/NAME/METRIC, namespaces/NAMESPACE/metrics/METRIC or nodes/NAME/METRIC"
    )


def parse_custom(attributes: Attributes, query: Mapping[str, str], longest_window: float) -> Asked:
    """Raises Refusal."""
    given = _given(query.get("metricLabelSelector", ""), _OVER_KEYS)
    over = parse_over(given, longest_window)
    selector = parse_selector(query.get("labelSelector", ""))

    def asked(metric: Metric, resource: str, namespace: str, name: str) -> Asked:
        return Asked(metric, over, resource, namespace, name, selector, given=tuple(given.items()))

    resource, namespace, name = attributes.resource, attributes.namespace, attributes.name
    if resource == "metrics":
        return asked(metric_named(name), "namespaces", namespace, namespace)
    metric = metric_named(attributes.subresource)
    resource = resource.removesuffix(".") if resource.endswith(".") else resource
    if resource == "namespaces" and not namespace and name != ANY:
        return asked(metric, "namespaces", name, name)
    if (resource == "pods" and namespace) or (resource == "nodes" and not namespace):
        return asked(metric, resource, namespace, name)
    if resource in _PLURALS and namespace and name != ANY:
        return asked(metric, resource, namespace, name)
    raise not_found(
        f"podgpu has no metrics of {quoted(resource)} {quoted(name)}{f' in {namespace}' if namespace else ''}: "
        f"of pods, nodes, namespaces and, by name, {', '.join(WORKLOADS)} it has"
    )


def external_attributes(path: str, query: Mapping[str, str]) -> Attributes:
    """Who asks for `scope=cluster` must be allowed all namespaces, whichever the path names. Raises Refusal for what is
    no such path."""
    parts = _parts(path)
    if len(parts) == 3 and parts[0] == "namespaces":
        namespace = "" if _is_of_cluster(query) else parts[1]
        return Attributes("list", EXTERNAL, EXTERNAL_VERSION, parts[2], "", namespace)
    raise not_found(f"{quoted(path)} is not a path of this API: write namespaces/NAMESPACE/METRIC")


def parse_external(attributes: Attributes, query: Mapping[str, str], longest_window: float) -> Asked:
    """The metric's labels say whose it is: `owner=Deployment.inference`, or `scope=namespace` (as without), or
    `scope=cluster`. Raises Refusal."""
    given = _external_given(query)
    namespace = attributes.namespace
    over = parse_over({key: value for key, value in given.items() if key in _OVER_KEYS}, longest_window)
    if "owner" in given and "scope" in given:
        raise bad_request("the metric's selector has both owner and scope: keep one")
    whom = Whom(namespace)
    if "owner" in given:
        kind, dot, name = given["owner"].partition(".")
        if not dot or not kind or not name:
            raise bad_request(f"owner {quoted(given['owner'])}: write KIND.NAME, such as Deployment.inference")
        whom = Whom(namespace, owner=(owner_kind(kind), name))
    elif given.get("scope", "namespace") == "cluster":
        whom = Whom("")
    elif given.get("scope", "namespace") != "namespace":
        raise bad_request(f"scope {quoted(given['scope'])}: write namespace or cluster")
    return Asked(metric_named(attributes.resource), over, "external", namespace, "", parse_selector(""), whom)


def _external_given(query: Mapping[str, str]) -> dict[str, str]:
    return _given(query.get("labelSelector", ""), (*_OVER_KEYS, *_SCOPE_KEYS))


def _is_of_cluster(query: Mapping[str, str]) -> bool:
    try:
        return _external_given(query).get("scope") == "cluster"
    except Refusal:  # told once it is known that they may ask
        return False


def _given(text: str, known: tuple[str, ...]) -> dict[str, str]:
    """A metric's selector, whose labels say how the figure is to be made."""
    given: dict[str, str] = {}
    for requirement in parse_selector(text).requirements:
        check_key(requirement.key, known, "the metric's selector")
        if requirement.operator != "in" or len(requirement.values) != 1:
            raise bad_request(f"the metric's selector says how the figure is made: write {requirement.key}=VALUE")
        given[requirement.key] = requirement.values[0]
    return given


def _parts(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    if len(path) > _LONGEST or not all(parts) or not path.isprintable():
        raise not_found(f"{quoted(path)} is not a path of this API")
    return parts
