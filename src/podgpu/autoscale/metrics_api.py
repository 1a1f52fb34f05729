"""Serves the custom and the external metrics API: discovery, values, and errors as Kubernetes' clients expect them.

`ApiGate` decides about every request except probes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii as _encode_text
from typing import Any, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu import __version__
from podgpu.autoscale.answers import (
    MIN_VALUE,
    MetricValue,
    PodValue,
    compute_pod_values,
    compute_scope_value,
    compute_value,
    explain_missing_pods,
    select_pods,
)
from podgpu.autoscale.authentication import Rejection
from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.refusal import Refusal, RefusalKind, no_data, not_found
from podgpu.autoscale.requests import (
    ANY,
    CUSTOM_GROUP,
    CUSTOM_VERSIONS,
    EXTERNAL_GROUP,
    EXTERNAL_VERSION,
    WORKLOADS,
    DescribedObject,
    MetricRequest,
    PodSelector,
    ResourceAttributes,
    parse_custom,
    parse_custom_path,
    parse_external,
    parse_external_path,
)
from podgpu.autoscale.store import MetricsSnapshot, SampleStore

API_OPTION = "--api-address"
AGGREGATED_TYPE = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_STATUS = {
    RefusalKind.BAD_REQUEST: 400,
    RefusalKind.FORBIDDEN: 403,
    RefusalKind.NOT_FOUND: 404,
    RefusalKind.NO_DATA: 503,
}
_RESOURCES = ("pods", "nodes", "namespaces", *WORKLOADS)
_CLUSTER_SCOPED = frozenset({"nodes", "namespaces"})
_PROBES = ("/healthz", "/livez", "/readyz")
Object = dict[str, Any]


class Gate(Protocol):
    async def check(self, request: web.Request, target: ResourceAttributes | None) -> Rejection | None: ...


class MetricsApi:
    def __init__(self, store: SampleStore, gate: Gate, *, external: bool = False) -> None:
        self._store = store
        self._gate = gate
        self._external = external
        self.calls: Counter[tuple[str, str]] = Counter()  # (API group, status)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024, middlewares=[self._errors_as_json])
        for probe in _PROBES:
            app.router.add_get(probe, _answer_probe)
        app.router.add_get("/version", self._discovery(lambda: {"gitVersion": f"v{__version__}"}))
        app.router.add_get("/apis", self._get_groups)
        app.router.add_get("/openapi/v2", self._discovery(make_openapi_v2))
        app.router.add_get("/openapi/v3", self._discovery(lambda: {"paths": {}}))
        for version in CUSTOM_VERSIONS:
            app.router.add_get(f"/apis/{CUSTOM_GROUP}/{version}", self._discovery(_custom_resources_of(version)))
            app.router.add_get(f"/apis/{CUSTOM_GROUP}/{version}/{{path:.+}}", self._custom(version))
        app.router.add_get(f"/apis/{CUSTOM_GROUP}", self._discovery(lambda: make_group(CUSTOM_GROUP)))
        if self._external:
            base = f"/apis/{EXTERNAL_GROUP}/{EXTERNAL_VERSION}"
            app.router.add_get(base, self._discovery(make_external_resources))
            app.router.add_get(f"{base}/{{path:.+}}", self._get_external)
            app.router.add_get(f"/apis/{EXTERNAL_GROUP}", self._discovery(lambda: make_group(EXTERNAL_GROUP)))
        return app

    def _discovery(self, make: Callable[[], Object]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            rejection = await self._gate.check(request, None)
            return _reject(rejection) if rejection is not None else _respond(make())

        return handle

    async def _get_groups(self, request: web.Request) -> web.StreamResponse:
        rejection = await self._gate.check(request, None)
        if rejection is not None:
            return _reject(rejection)
        if _wants_aggregated(",".join(request.headers.getall("Accept", ()))):
            body = json.dumps(make_aggregated_discovery(self._external), separators=(",", ":"))
            return web.Response(body=body.encode(), headers={"Content-Type": AGGREGATED_TYPE})
        return _respond(make_group_list(self._external))

    def _custom(self, version: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            target = parse_custom_path(version, request.match_info["path"])
            rejection = await self._gate.check(request, target)
            if rejection is not None:
                return self._count(CUSTOM_GROUP, _reject(rejection))
            asked = parse_custom(target, request.query, self._store.max_window)
            return self._count(CUSTOM_GROUP, _respond(answer_custom(self._store.snapshot(), version, asked)))

        return handle

    async def _get_external(self, request: web.Request) -> web.StreamResponse:
        target = parse_external_path(request.match_info["path"], request.query)
        rejection = await self._gate.check(request, target)
        if rejection is not None:
            return self._count(EXTERNAL_GROUP, _reject(rejection))
        asked = parse_external(target, request.query, self._store.max_window)
        return self._count(EXTERNAL_GROUP, _respond(answer_external(self._store.snapshot(), asked)))

    def _count(self, group: str, response: web.Response) -> web.Response:
        self.calls[group, str(response.status)] += 1
        return response

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            code = _STATUS[error.kind]
            group = EXTERNAL_GROUP if request.path.startswith(f"/apis/{EXTERNAL_GROUP}/") else CUSTOM_GROUP
            return self._count(group, _respond(make_status(code, error.kind.value, str(error)), code))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            reason = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status, "BadRequest")
            message = "unknown path: see /apis" if error.status == 404 else f"{error.reason}"
            return _respond(make_status(error.status, reason, message), error.status)


def _wants_aggregated(accept: str) -> bool:
    wanted = set(AGGREGATED_TYPE.split(";"))
    return any(wanted <= {part.strip() for part in kind.split(";")} for kind in accept.split(","))


def _custom_resources_of(version: str) -> Callable[[], Object]:
    return lambda: make_custom_resources(version)


async def _answer_probe(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


def _reject(rejection: Rejection) -> web.Response:
    return _respond(make_status(rejection.code, rejection.reason, rejection.message), rejection.code)


def _respond(body: Object | bytes, code: int = 200) -> web.Response:
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return web.Response(body=content, status=code, content_type="application/json")


# Values


def answer_custom(snapshot: MetricsSnapshot, version: str, asked: MetricRequest) -> Object | bytes:
    """Returns bytes for pods, because there may be thousands. Raises Refusal."""
    if asked.resource == "pods":
        return _answer_pods(snapshot, version, asked)
    if asked.resource == "nodes":
        values = _answer_nodes(snapshot, asked)
    else:
        values = [(asked.describe(), compute_value(snapshot, asked.pods, asked.metric, asked.aggregation))]
    return make_value_list(version, asked, values)


def answer_external(snapshot: MetricsSnapshot, asked: MetricRequest) -> Object:
    """Raises Refusal."""
    value = compute_value(snapshot, asked.pods, asked.metric, asked.aggregation)
    item = {
        "metricName": asked.metric.name,
        "metricLabels": {},
        "timestamp": format_timestamp(value.at),
        "window": round(value.window),
        "value": format_quantity(value.value),
    }
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": f"{EXTERNAL_GROUP}/{EXTERNAL_VERSION}",
        "metadata": {},
        "items": [item],
    }


def _answer_pods(snapshot: MetricsSnapshot, version: str, asked: MetricRequest) -> bytes:
    selector = asked.pods
    pods = select_pods(snapshot, selector)
    if asked.name != ANY:
        pods = [pod for pod in pods if pod.name == asked.name]
        if not pods:
            raise not_found(f"no running pod {asked.namespace}/{asked.name}: check its name and whether it runs")
        selector = PodSelector(asked.namespace, owner=("pod", asked.name))
    values = compute_pod_values(snapshot, pods, asked.metric, asked.aggregation)
    if not values:
        raise explain_missing_pods(snapshot, selector, pods, asked.metric, asked.aggregation.window)
    return encode_pod_values(version, asked, values, snapshot.ends_at, snapshot.interval)


def _answer_nodes(snapshot: MetricsSnapshot, asked: MetricRequest) -> list[tuple[DescribedObject, MetricValue]]:
    window = asked.aggregation.window
    if asked.name != ANY:
        return [(asked.describe(), compute_scope_value(snapshot, ("node", asked.name), asked.metric, window))]
    values, last_error = [], None
    for name in _select_nodes(snapshot, asked):
        try:
            value = compute_scope_value(snapshot, ("node", name), asked.metric, window)
            values.append((asked.describe(name), value))
        except Refusal as error:
            last_error = error
    if not values:
        raise last_error or not_found("no node with a GPU matches: check the label selector and the exporters")
    return values


def _select_nodes(snapshot: MetricsSnapshot, asked: MetricRequest) -> Iterator[str]:
    labels = snapshot.node_labels
    if asked.labels.requirements and labels is None:
        raise no_data("the labels of nodes are not known yet: check that podgpu may list and watch nodes")
    for name in snapshot.nodes:
        if not asked.labels.requirements or (labels and asked.labels.matches(dict(labels.get(name, ())))):
            yield name


def format_quantity(value: float) -> str:
    """In thousandths if it is not an integer: `73500m`. A value above 0 is never written as 0."""
    thousandths = round(value * 1000)
    if thousandths == 0 and value > 0:
        thousandths = round(MIN_VALUE * 1000)
    whole, rest = divmod(thousandths, 1000)
    return str(whole) if rest == 0 else f"{thousandths}m"


def format_timestamp(at: float) -> str:
    return datetime.fromtimestamp(math.floor(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_value_list(
    version: str, asked: MetricRequest, values: Iterable[tuple[DescribedObject, MetricValue]]
) -> Object:
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{CUSTOM_GROUP}/{version}",
        "metadata": {},
        "items": [_make_item(version, asked, described, value) for described, value in values],
    }


def encode_pod_values(
    version: str, asked: MetricRequest, values: Sequence[PodValue], ends_at: float, interval: float
) -> bytes:
    """The same list for pods. Formats one item and fills in name, window and value, because pods may be thousands."""
    item = _make_item(version, asked, asked.describe("NAME"), MetricValue(0.0, ends_at, 0.0))
    item |= {"windowSeconds" if version == "v1beta2" else "window": "WINDOW", "value": "VALUE"}
    pattern = json.dumps(item, separators=(",", ":")).replace("%", "%%")
    for word in ('"NAME"', '"WINDOW"', '"VALUE"'):
        pattern = pattern.replace(word, "%s", 1)
    items = ",".join(
        [
            pattern % (_encode_text(pod.name), round(pod.rounds * interval), f'"{format_quantity(pod.value)}"')
            for pod in values
        ]
    )
    empty = json.dumps(make_value_list(version, asked, ()), separators=(",", ":"))
    return empty.replace('"items":[]', f'"items":[{items}]').encode()


def _make_item(version: str, asked: MetricRequest, described: DescribedObject, value: MetricValue) -> Object:
    reference = {"kind": described.kind, "name": described.name, "apiVersion": described.api_version}
    if described.namespace:
        reference["namespace"] = described.namespace
    selector = {"matchLabels": dict(asked.metric_labels)} if asked.metric_labels else None
    common = {"timestamp": format_timestamp(value.at), "value": format_quantity(value.value)}
    if version == "v1beta2":
        metric = {"name": asked.metric.name, "selector": selector}
        return {"describedObject": reference, "metric": metric, "windowSeconds": round(value.window), **common}
    return {
        "describedObject": reference,
        "metricName": asked.metric.name,
        "window": round(value.window),
        "selector": selector,
        **common,
    }


# Discovery


def make_group_list(external: bool) -> Object:
    groups = [_group_versions(CUSTOM_GROUP, CUSTOM_VERSIONS)]
    if external:
        groups.append(_group_versions(EXTERNAL_GROUP, (EXTERNAL_VERSION,)))
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def make_group(name: str) -> Object:
    versions = CUSTOM_VERSIONS if name == CUSTOM_GROUP else (EXTERNAL_VERSION,)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group_versions(name, versions)}


def _group_versions(name: str, versions: Sequence[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def make_custom_resources(version: str) -> Object:
    names = (f"{resource}/{metric.name}" for resource in _RESOURCES for metric in METRICS)
    return _make_resources(CUSTOM_GROUP, version, "MetricValueList", names)


def make_external_resources() -> Object:
    names = (metric.name for metric in METRICS)
    return _make_resources(EXTERNAL_GROUP, EXTERNAL_VERSION, "ExternalMetricValueList", names)


def _make_resources(group: str, version: str, kind: str, names: Iterable[str]) -> Object:
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": name.partition("/")[0] not in _CLUSTER_SCOPED,
            "kind": kind,
            "verbs": ["get"],
        }
        for name in names
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}",
        "resources": resources,
    }


def make_aggregated_discovery(external: bool) -> Object:
    """All groups in one document, as API servers since 1.30 request it."""
    items = [_discover_group(CUSTOM_GROUP, {version: make_custom_resources(version) for version in CUSTOM_VERSIONS})]
    if external:
        items.append(_discover_group(EXTERNAL_GROUP, {EXTERNAL_VERSION: make_external_resources()}))
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _discover_group(name: str, versions: Mapping[str, Object]) -> Object:
    listed = [
        {"version": version, "freshness": "Current", "resources": _group_by_parent(resources["resources"])}
        for version, resources in versions.items()
    ]
    return {"metadata": {"name": name}, "versions": listed}


def _group_by_parent(resources: Iterable[Object]) -> list[Object]:
    """`pods/gpu_power` is a subresource of `pods`, which has no verbs of its own."""
    parents: dict[str, Object] = {}
    for resource in resources:
        name, slash, metric = resource["name"].partition("/")
        kind = {"group": "", "version": "", "kind": resource["kind"]}
        parent = parents.setdefault(
            name,
            {
                "resource": name,
                "responseKind": kind,
                "scope": "Namespaced" if resource["namespaced"] else "Cluster",
                "singularResource": "",
                "verbs": [] if slash else resource["verbs"],
            },
        )
        if slash:
            subresource = {"subresource": metric, "responseKind": kind, "verbs": resource["verbs"]}
            parent.setdefault("subresources", []).append(subresource)
    return list(parents.values())


def make_openapi_v2() -> Object:
    """Describes no path, but without an answer the API server logs errors."""
    return {"swagger": "2.0", "info": {"title": "podgpu autoscale", "version": __version__}, "paths": {}}


def make_status(code: int, reason: str, message: str) -> Object:
    """The error object of Kubernetes' API."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
