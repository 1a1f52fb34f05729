"""Serves the custom and the external metrics API: discovery, values, and errors in Kubernetes' format.

All requests except probes are authenticated and authorized.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu import __version__
from podgpu.autoscale.answers import (
    MIN_VALUE,
    MetricValue,
    compute_pod_values,
    compute_scope_value,
    compute_value,
    explain_missing_pods,
    select_pods,
)
from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.refusal import Refusal, no_data, not_found
from podgpu.autoscale.requests import (
    ANY,
    CUSTOM_GROUP,
    CUSTOM_VERSIONS,
    EXTERNAL_GROUP,
    EXTERNAL_VERSION,
    WORKLOADS,
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
_PROBES = ("/healthz", "/livez", "/readyz")
Object = dict[str, Any]


class Gate(Protocol):
    async def check(self, request: web.Request, target: ResourceAttributes | None) -> None: ...  # raises Refusal


class MetricsApi:
    def __init__(self, store: SampleStore, gate: Gate, *, external: bool = False) -> None:
        self._store = store
        self._gate = gate
        self._external = external
        self.calls: Counter[tuple[str, str]] = Counter()  # (API group, status)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024, middlewares=[self._count_and_explain])
        for probe in _PROBES:
            app.router.add_get(probe, _answer_probe)
        for path, document in make_discovery(self._external).items():
            app.router.add_get(path, self._discovery(document))
        app.router.add_get(
            f"/apis/{CUSTOM_GROUP}/{{version:{'|'.join(CUSTOM_VERSIONS)}}}/{{path:.+}}", self._get_custom
        )
        if self._external:
            app.router.add_get(f"/apis/{EXTERNAL_GROUP}/{EXTERNAL_VERSION}/{{path:.+}}", self._get_external)
        return app

    def _discovery(self, document: Object) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            await self._gate.check(request, None)
            return _respond(document)

        return handle

    async def _get_custom(self, request: web.Request) -> web.StreamResponse:
        version = request.match_info["version"]
        target = parse_custom_path(version, request.match_info["path"])
        await self._gate.check(request, target)
        query = parse_custom(target, request.query, self._store.max_window)
        return _respond(answer_custom(self._store.snapshot(), version, query))

    async def _get_external(self, request: web.Request) -> web.StreamResponse:
        target = parse_external_path(request.match_info["path"], request.query)
        await self._gate.check(request, target)
        query = parse_external(target, request.query, self._store.max_window)
        return _respond(answer_external(self._store.snapshot(), query))

    @web.middleware
    async def _count_and_explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except Refusal as error:
            response = _respond_status(*error.kind.value, str(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            reason = {404: "NotFound", 405: "MethodNotAllowed"}.get(error.status, "BadRequest")
            message = "unknown path: see /apis" if error.status == 404 else error.reason
            response = _respond_status(error.status, reason, message)
        if "path" in request.match_info:
            group = EXTERNAL_GROUP if request.path.startswith(f"/apis/{EXTERNAL_GROUP}/") else CUSTOM_GROUP
            self.calls[group, str(response.status)] += 1
        return response


async def _answer_probe(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


def _respond(body: Object, code: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=code, content_type="application/json")


def _respond_status(code: int, reason: str, message: str) -> web.Response:
    """Builds an error response in Kubernetes' format."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return _respond({**status, "message": message, "reason": reason, "code": code}, code)


# Values


def answer_custom(snapshot: MetricsSnapshot, version: str, query: MetricRequest) -> Object:
    """Raises Refusal."""
    if query.resource == "pods":
        values = _answer_pods(snapshot, query)
    elif query.resource == "nodes":
        values = _answer_nodes(snapshot, query)
    else:
        values = [(query.describe(), compute_value(snapshot, query.pods, query.metric, query.aggregation))]
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{CUSTOM_GROUP}/{version}",
        "metadata": {},
        "items": [_make_item(version, query, described, value) for described, value in values],
    }


def answer_external(snapshot: MetricsSnapshot, query: MetricRequest) -> Object:
    """Raises Refusal."""
    value = compute_value(snapshot, query.pods, query.metric, query.aggregation)
    item = {
        "metricName": query.metric.name,
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


def _answer_pods(snapshot: MetricsSnapshot, query: MetricRequest) -> list[tuple[Object, MetricValue]]:
    selector = query.pods
    pods = select_pods(snapshot, selector)
    if query.name != ANY:
        pods = [pod for pod in pods if pod.name == query.name]
        if not pods:
            raise not_found(f"no running pod {query.namespace}/{query.name}: check its name and whether it runs")
        selector = PodSelector(query.namespace, owner=("pod", query.name))
    values = compute_pod_values(snapshot, pods, query.metric, query.aggregation)
    if not values:
        raise explain_missing_pods(snapshot, selector, pods, query.metric, query.aggregation.window)
    return [(query.describe(name), value) for name, value in values.items()]


def _answer_nodes(snapshot: MetricsSnapshot, query: MetricRequest) -> list[tuple[Object, MetricValue]]:
    window = query.aggregation.window
    if query.name != ANY:
        return [(query.describe(), compute_scope_value(snapshot, ("node", query.name), query.metric, window))]
    values, last_error = [], None
    for name in _select_nodes(snapshot, query):
        try:
            value = compute_scope_value(snapshot, ("node", name), query.metric, window)
            values.append((query.describe(name), value))
        except Refusal as error:
            last_error = error
    if not values:
        raise last_error or not_found("no node with a GPU matches: check the label selector and the exporters")
    return values


def _select_nodes(snapshot: MetricsSnapshot, query: MetricRequest) -> Iterator[str]:
    labels = snapshot.node_labels
    if query.labels.requirements and labels is None:
        raise no_data("the labels of nodes are not available yet: check that podgpu may list and watch nodes")
    for name in snapshot.nodes:
        if not query.labels.requirements or (labels and query.labels.matches(dict(labels.get(name, ())))):
            yield name


def format_quantity(value: float) -> str:
    """Formats a Kubernetes quantity such as `73500m` or `73`. A value above 0 is never formatted as 0."""
    thousandths = round(value * 1000)
    if thousandths == 0 and value > 0:
        thousandths = round(MIN_VALUE * 1000)
    whole, rest = divmod(thousandths, 1000)
    return str(whole) if rest == 0 else f"{thousandths}m"


def format_timestamp(at: float) -> str:
    return datetime.fromtimestamp(math.floor(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _make_item(version: str, query: MetricRequest, described: Object, value: MetricValue) -> Object:
    selector = {"matchLabels": dict(query.metric_labels)} if query.metric_labels else None
    common = {"timestamp": format_timestamp(value.at), "value": format_quantity(value.value)}
    if version == "v1beta2":
        metric = {"name": query.metric.name, "selector": selector}
        return {"describedObject": described, "metric": metric, "windowSeconds": round(value.window), **common}
    return {
        "describedObject": described,
        "metricName": query.metric.name,
        "window": round(value.window),
        "selector": selector,
        **common,
    }


# Discovery


def make_discovery(external: bool) -> dict[str, Object]:
    """Returns the discovery documents by path. Aggregated discovery is optional and not provided."""
    groups = {CUSTOM_GROUP: CUSTOM_VERSIONS} | ({EXTERNAL_GROUP: (EXTERNAL_VERSION,)} if external else {})
    documents: dict[str, Object] = {
        "/version": {"gitVersion": f"v{__version__}"},
        # Without the following two documents, the API server logs errors.
        "/openapi/v2": {"swagger": "2.0", "info": {"title": "podgpu autoscale", "version": __version__}, "paths": {}},
        "/openapi/v3": {"paths": {}},
    }
    listed = []
    for group, versions in groups.items():
        names = [{"groupVersion": f"{group}/{version}", "version": version} for version in versions]
        listed.append({"name": group, "versions": names, "preferredVersion": names[0]})
        documents[f"/apis/{group}"] = {"kind": "APIGroup", "apiVersion": "v1", **listed[-1]}
        for version in versions:
            documents[f"/apis/{group}/{version}"] = _make_resources(group, version)
    documents["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    return documents


def _make_resources(group: str, version: str) -> Object:
    names = [metric.name for metric in METRICS]
    kind = "ExternalMetricValueList"
    if group == CUSTOM_GROUP:
        names = [f"{resource}/{name}" for resource in ("pods", "nodes", "namespaces", *WORKLOADS) for name in names]
        kind = "MetricValueList"
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": not name.startswith(("nodes/", "namespaces/")),
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
