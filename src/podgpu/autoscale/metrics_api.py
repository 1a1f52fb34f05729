"""Serves the custom metrics API (HTTPS): discovery, values, and errors in Kubernetes' format.

Only the API server can connect, with its front proxy's certificate. It authenticates and authorizes every request
before it forwards the request, so podgpu does not authenticate users itself.
"""

from __future__ import annotations

import math
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu import __version__
from podgpu.autoscale.answers import MIN_VALUE, MetricValue, compute_pod_values, compute_value
from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.requests import (
    CUSTOM_GROUP,
    CUSTOM_VERSIONS,
    WORKLOADS,
    MetricRequest,
    Refusal,
    forbidden,
    parse_path,
)
from podgpu.autoscale.samples import MetricsSnapshot, SampleStore
from podgpu.kube.objects import KubeObject
from podgpu.tls import ContextCache, MakeTlsContext, Pem, load_authorities, load_pair
from podgpu.web.web_config import LastValid

API_OPTION = "--api-address"
_REASONS = {403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 503: "ServiceUnavailable"}


# The front proxy


class FrontProxy(NamedTuple):
    """How the API server identifies itself, from the ConfigMap extension-apiserver-authentication."""

    ca: str = ""  # PEM; if empty, every connection is rejected
    allowed_names: tuple[str, ...] = ()  # common names; empty to allow every certificate of the CA


def parse_front_proxy(configmap: Mapping[str, Any]) -> FrontProxy | None:
    """Returns None if the ConfigMap does not describe a front proxy."""
    data = configmap.get("data") or {}
    ca = data.get("requestheader-client-ca-file")
    if not ca:
        return None
    return FrontProxy(ca, msgspec.json.decode(data.get("requestheader-allowed-names", "[]"), type=tuple[str, ...]))


def _make_api_tls(certificate: Pem, key: Pem, find_proxy: Callable[[], FrontProxy | None]) -> MakeTlsContext:
    """Returns a function that builds the current TLS context. It requires a client certificate."""
    names = f"{certificate.name} and {key.name}"

    def make(material: tuple[bytes, bytes, str]) -> ssl.SSLContext:
        certificate_pem, key_pem, ca = material
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.num_tickets = 0  # a resumed session would not be verified against a new CA
        context.options |= ssl.OP_NO_TICKET
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go, an intermediate CA is sufficient
        load_pair(context, certificate_pem, key_pem, names)
        if ca:
            load_authorities(context, ca.encode(), "requestheader-client-ca-file")
        return context

    cache = ContextCache(make)
    read = LastValid(
        lambda: cache.get((certificate.read(), key.read(), (find_proxy() or FrontProxy()).ca)),
        "the metrics API keeps its previous certificate and CA",
    )
    return read.get


def _read_common_name(request: web.Request) -> str:
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    names = dict(pair for pairs in (certificate or {}).get("subject", ()) for pair in pairs)
    return str(names.get("commonName", ""))


# The API


class MetricsApi:
    def __init__(
        self, store: SampleStore, certificate: Pem, key: Pem, find_proxy: Callable[[], FrontProxy | None]
    ) -> None:
        """`find_proxy` returns None until the ConfigMap of the front proxy has been read."""
        self._store = store
        self.find_proxy = find_proxy
        self.tls = _make_api_tls(certificate, key, find_proxy)
        self.calls: Counter[tuple[str, str]] = Counter()  # by API and HTTP status

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024, middlewares=[self._explain_errors])
        documents = make_discovery()

        async def discover(request: web.Request) -> web.StreamResponse:
            return _respond(documents[request.path])

        for path in documents:
            app.router.add_get(path, discover)
        app.router.add_get(
            f"/apis/{CUSTOM_GROUP}/{{version:{'|'.join(CUSTOM_VERSIONS)}}}/namespaces/{{path:.+}}", self._get_values
        )
        return app

    async def _get_values(self, request: web.Request) -> web.StreamResponse:
        query = parse_path(request.match_info["path"], request.query, self._store.max_window)
        return _respond(answer(self._store.snapshot(), request.match_info["version"], query))

    @web.middleware
    async def _explain_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        allowed, name = (self.find_proxy() or FrontProxy()).allowed_names, _read_common_name(request)
        try:
            if allowed and name not in allowed:
                raise forbidden(f"{name!r} may not act as a front proxy (requestheader-allowed-names)")
            response = await handler(request)
        except Refusal as error:
            response = _respond_status(error.status, str(error))
        except web.HTTPException as error:
            response = _respond_status(error.status, f"{error.reason}: see /apis")
        if "path" in request.match_info:
            self.calls[CUSTOM_GROUP, str(response.status)] += 1
        return response


def _respond(body: KubeObject, code: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=code, content_type="application/json")


def _respond_status(code: int, message: str) -> web.Response:
    """Builds an error response in Kubernetes' format."""
    reason = _REASONS.get(code, "BadRequest")
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return _respond({**status, "message": message, "reason": reason, "code": code}, code)


def answer(snapshot: MetricsSnapshot, version: str, query: MetricRequest) -> KubeObject:
    """Returns a MetricValueList. Raises Refusal if the request is invalid or values are missing."""
    if query.resource == "pods":
        values = compute_pod_values(snapshot, query)
    else:
        name = query.pods.owner[1] if query.pods.owner else query.pods.namespace
        values = {name: compute_value(snapshot, query)}
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{CUSTOM_GROUP}/{version}",
        "metadata": {},
        "items": [_make_item(version, query, name, value) for name, value in values.items()],
    }


def _make_item(version: str, query: MetricRequest, name: str, value: MetricValue) -> KubeObject:
    item = {
        "describedObject": query.describe(name),
        "timestamp": datetime.fromtimestamp(math.floor(value.at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": format_quantity(value.value),
    }
    metric, window = query.metric.name, round(value.window)
    selector = {"matchLabels": query.metric_labels} if query.metric_labels else None
    if version == "v1beta1":
        return {**item, "metricName": metric, "window": window, "selector": selector}
    return {**item, "metric": {"name": metric, "selector": selector}, "windowSeconds": window}


def format_quantity(value: float) -> str:
    """Formats a Kubernetes quantity such as `73500m` or `73`. A value above 0 is never formatted as 0."""
    thousandths = round(max(value, MIN_VALUE) * 1000) if value > 0 else 0
    whole, rest = divmod(thousandths, 1000)
    return str(whole) if rest == 0 else f"{thousandths}m"


def make_discovery() -> dict[str, KubeObject]:
    """Returns the discovery documents by path. Aggregated discovery is optional and not provided."""
    versions = [{"groupVersion": f"{CUSTOM_GROUP}/{version}", "version": version} for version in CUSTOM_VERSIONS]
    group = {"name": CUSTOM_GROUP, "versions": versions, "preferredVersion": versions[0]}
    resources = [
        {
            "name": f"{resource}/{metric.name}",
            "singularName": "",
            "namespaced": resource != "namespaces",
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for resource in ("pods", "namespaces", *WORKLOADS)
        for metric in METRICS
    ]
    documents: dict[str, KubeObject] = {
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        f"/apis/{CUSTOM_GROUP}": {"kind": "APIGroup", "apiVersion": "v1", **group},
        # If the following two documents are missing, the API server logs errors.
        "/openapi/v2": {"swagger": "2.0", "info": {"title": "podgpu autoscale", "version": __version__}, "paths": {}},
        "/openapi/v3": {"paths": {}},
    }
    for version in versions:
        documents[f"/apis/{version['groupVersion']}"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version["groupVersion"],
            "resources": resources,
        }
    return documents
