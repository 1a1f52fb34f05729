"""Serves the custom metrics API (HTTPS): discovery, values, and errors in Kubernetes' format.

Only the API server can connect, with the certificate of its front proxy. The API server
authenticates and authorizes users before it forwards their requests, so podgpu does not
authenticate users.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from podgpu import __version__
from podgpu.clock import FaultLog
from podgpu.errors import SourceError, utc_text
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import KubeObject
from podgpu.scale.answers import MIN_VALUE, MetricValue, compute_pod_values, compute_value
from podgpu.scale.catalogue import METRICS
from podgpu.scale.requests import (
    API_GROUP,
    API_VERSIONS,
    KINDS,
    MetricRequest,
    Refusal,
    forbidden,
    parse_path,
)
from podgpu.scale.samples import MetricsSnapshot, SampleStore
from podgpu.tls import LastValid, MakeTlsContext, Pem, load_authorities, load_pair

API_OPTION = "--api-address"
# longer than a process runs, so that podgpu never renews the certificate
_LIFETIME = timedelta(days=3650)
_CLOCK_SKEW = timedelta(hours=1)
_MAX_NAME = 40  # a common name has at most 64 characters
MAX_CERTIFICATES = 32
_CHECK_SECONDS = 5.0
_LOG_AGAIN_SECONDS = 600.0
_API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices/"
_REASONS = {403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 503: "ServiceUnavailable"}
_log = logging.getLogger(__name__)


# The front proxy


class FrontProxy(NamedTuple):
    """Describes the API server's client certificate.

    Read from the ConfigMap extension-apiserver-authentication.
    """

    ca: str = ""  # PEM; if empty, every connection is rejected
    allowed_names: tuple[str, ...] = ()  # common names; empty to allow every certificate of the CA


def parse_front_proxy(configmap: Mapping[str, Any]) -> FrontProxy | None:
    """Returns None if the ConfigMap does not describe a front proxy."""
    data = configmap.get("data") or {}
    ca = data.get("requestheader-client-ca-file")
    if not ca:
        return None
    names = data.get("requestheader-allowed-names", "[]")
    return FrontProxy(ca, msgspec.json.decode(names, type=tuple[str, ...]))


def _make_api_tls(
    certificate: Pem, key: Pem, find_proxy: Callable[[], FrontProxy | None]
) -> MakeTlsContext:
    """Returns a function that builds the current TLS context.

    The context requires a client certificate.
    """
    names = f"{certificate.name} and {key.name}"

    @lru_cache(maxsize=1)
    def make(certificate_pem: bytes, key_pem: bytes, ca: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # No session tickets: a resumed session would not be verified against a new CA.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        context.verify_mode = ssl.CERT_REQUIRED
        # Accepts an intermediate CA as a root, as Go does.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        load_pair(context, certificate_pem, key_pem, names)
        if ca:
            load_authorities(context, ca.encode(), "requestheader-client-ca-file")
        return context

    def make_current() -> ssl.SSLContext:
        proxy = find_proxy() or FrontProxy()
        return make(certificate.read(), key.read(), proxy.ca)

    latest = LastValid(make_current, "the metrics API keeps its previous certificate and CA")
    return latest.get


def _read_common_name(request: web.Request) -> str:
    if request.transport is None:
        return ""
    certificate = request.transport.get_extra_info("peercert") or {}
    names: dict[str, str] = {}
    for pairs in certificate.get("subject", ()):
        names.update(pairs)
    return names.get("commonName", "")


# The API


class MetricsApi:
    def __init__(
        self,
        store: SampleStore,
        certificate: Pem,
        key: Pem,
        find_proxy: Callable[[], FrontProxy | None],
    ) -> None:
        """`find_proxy` returns None until the ConfigMap of the front proxy has been read."""
        self._store = store
        self.find_proxy = find_proxy
        self.tls = _make_api_tls(certificate, key, find_proxy)
        self.calls: Counter[tuple[str, str]] = Counter()  # by API and HTTP status

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024, middlewares=[self._guard])
        documents = make_discovery()

        async def discover(request: web.Request) -> web.StreamResponse:
            return _respond(documents[request.path])

        for path in documents:
            app.router.add_get(path, discover)
        versions = "|".join(API_VERSIONS)
        values_path = f"/apis/{API_GROUP}/{{version:{versions}}}/namespaces/{{path:.+}}"
        app.router.add_get(values_path, self._get_values)
        return app

    async def _get_values(self, request: web.Request) -> web.StreamResponse:
        query = parse_path(request.match_info["path"], request.query, self._store.max_window)
        return _respond(answer(self._store.snapshot(), request.match_info["version"], query))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Rejects clients that are no front proxy, explains errors, and counts the calls."""
        try:
            self._require_front_proxy(request)
            response = await handler(request)
        except Refusal as error:
            response = _respond_status(error.status, str(error))
        except web.HTTPException as error:
            response = _respond_status(error.status, f"{error.reason}: see /apis")

        # Discovery has no path of a metric, and is not counted.
        if "path" in request.match_info:
            self.calls[API_GROUP, str(response.status)] += 1
        return response

    def _require_front_proxy(self, request: web.Request) -> None:
        proxy = self.find_proxy() or FrontProxy()
        name = _read_common_name(request)
        # Without names, every certificate of the front proxy's CA is allowed.
        if proxy.allowed_names and name not in proxy.allowed_names:
            raise forbidden(f"{name!r} may not act as a front proxy (requestheader-allowed-names)")


def _respond(body: KubeObject, code: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=code, content_type="application/json"
    )


def _respond_status(code: int, message: str) -> web.Response:
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS.get(code, "BadRequest"),
        "code": code,
    }
    return _respond(status, code)


def answer(snapshot: MetricsSnapshot, version: str, query: MetricRequest) -> KubeObject:
    """Returns a MetricValueList. Raises Refusal if the request is invalid or values are missing."""
    if query.resource == "pods":
        values = compute_pod_values(snapshot, query)
    else:
        name = query.pods.namespace
        if query.pods.owner is not None:
            _, name = query.pods.owner
        values = {name: compute_value(snapshot, query)}

    items = [_make_item(version, query, name, value) for name, value in values.items()]
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{API_GROUP}/{version}",
        "metadata": {},
        "items": items,
    }


def _make_item(version: str, query: MetricRequest, name: str, value: MetricValue) -> KubeObject:
    kind, api_version = KINDS[query.resource]
    described = {"kind": kind, "name": name, "apiVersion": api_version}
    if kind != "Namespace":
        described["namespace"] = query.pods.namespace

    item = {
        "describedObject": described,
        "timestamp": utc_text(value.at),
        "value": format_quantity(value.value),
    }

    metric = query.metric.name
    window = round(value.window)
    selector = None
    if query.metric_labels:
        selector = {"matchLabels": query.metric_labels}
    if version == "v1beta1":
        return item | {"metricName": metric, "window": window, "selector": selector}
    return item | {"metric": {"name": metric, "selector": selector}, "windowSeconds": window}


def format_quantity(value: float) -> str:
    """Formats a Kubernetes quantity such as `73500m` or `73`.

    A value above 0 is never formatted as 0.
    """
    if value <= 0:
        return "0"
    thousandths = round(max(value, MIN_VALUE) * 1000)
    whole, rest = divmod(thousandths, 1000)
    if rest == 0:
        return str(whole)
    return f"{thousandths}m"


def make_discovery() -> dict[str, KubeObject]:
    """Returns the discovery documents by path. Aggregated discovery is optional and missing."""
    versions = []
    for version in API_VERSIONS:
        versions.append({"groupVersion": f"{API_GROUP}/{version}", "version": version})
    group = {"name": API_GROUP, "versions": versions, "preferredVersion": versions[0]}

    documents: dict[str, KubeObject] = {
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        f"/apis/{API_GROUP}": {"kind": "APIGroup", "apiVersion": "v1", **group},
        # If the following two documents are missing, the API server logs errors.
        "/openapi/v2": {
            "swagger": "2.0",
            "info": {"title": "podgpu autoscale", "version": __version__},
            "paths": {},
        },
        "/openapi/v3": {"paths": {}},
    }

    resources = _list_resources()
    for entry in versions:
        group_version = entry["groupVersion"]
        documents[f"/apis/{group_version}"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group_version,
            "resources": resources,
        }
    return documents


def _list_resources() -> list[KubeObject]:
    resources: list[KubeObject] = []
    for resource in KINDS:
        for metric in METRICS:
            document = {
                "name": f"{resource}/{metric.name}",
                "singularName": "",
                "namespaced": resource != "namespaces",
                "kind": "MetricValueList",
                "verbs": ["get"],
            }
            resources.append(document)
    return resources


# podgpu's own certificate. Every replica creates a self-signed certificate at start and keeps the
# key only in memory. The caBundle of the APIServices contains the certificates of all replicas.
# After a restart, a replica replaces its earlier certificate.


def issue(
    host: str, replica: str, now: datetime | None = None
) -> tuple[x509.Certificate, Pem, Pem]:
    """Returns a self-signed certificate, its PEM text and its key.

    `host`: the name that the API server uses in the TLS handshake. `replica` must stay the same
    after a restart.
    """
    now = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    # The end of a pod's name tells replicas apart.
    common_name = f"podgpu autoscale {replica[-_MAX_NAME:]}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - _CLOCK_SKEW,
        not_valid_after=now + _LIFETIME,
    )

    names = x509.SubjectAlternativeName([x509.DNSName(host)])
    builder = builder.add_extension(names, critical=False)
    no_ca = x509.BasicConstraints(ca=False, path_length=None)
    builder = builder.add_extension(no_ca, critical=True)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = builder.add_extension(usage, critical=False)
    certificate = builder.sign(key, hashes.SHA256())

    public = Pem(text=_to_pem(certificate), origin="podgpu's certificate")
    key_text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    secret = Pem(text=key_text, origin="its key")
    return certificate, public, secret


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def parse_bundle(bundle: str) -> list[x509.Certificate]:
    """Returns the certificates in a PEM text, or an empty list if the text is malformed."""
    try:
        return x509.load_pem_x509_certificates(bundle.encode())
    except ValueError:
        return []


def merge_bundle(bundle: str, own: x509.Certificate) -> str:
    """Adds `own` to the PEM text, in place of this replica's earlier certificate.

    Keeps the newest MAX_CERTIFICATES.
    """
    others = [each for each in parse_bundle(bundle) if each.subject != own.subject]
    others.sort(key=lambda certificate: certificate.not_valid_before_utc, reverse=True)
    kept = [own, *others][:MAX_CERTIFICATES]
    return "".join(map(_to_pem, kept))


@dataclass(eq=False)
class CaBundleUpdater:
    """Keeps podgpu's certificate in the caBundle of all APIServices of podgpu's Service."""

    client: ApiClient
    _certificate: x509.Certificate
    _api_services: Sequence[str]
    _service: str  # namespace and name of the Service in front of podgpu, separated by a slash
    ready: bool = False  # True after podgpu's certificate was added to all APIServices of podgpu
    _faults: FaultLog[str] = field(
        default_factory=lambda: FaultLog(time.monotonic, _LOG_AGAIN_SECONDS)
    )

    async def run(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(_CHECK_SECONDS)

    async def update(self) -> None:
        results = [await self._update_one(name) for name in self._api_services]
        self.ready = self.ready or all(results)

    async def _update_one(self, name: str) -> bool:
        """Updates one APIService. Returns False if the update must be retried."""
        try:
            await self._merge_into(name)
        except SourceError as error:
            # A missing APIService is not an error: deleting it is the documented way to disable the
            # API. A conflict (409) means that another replica has changed the bundle at the same
            # time.
            if error.reason != "conflict" and self._faults.fail(name, error.reason):
                _log.warning(
                    "cannot add podgpu's certificate to the APIService %s: %s", name, error
                )
            # Nothing is left to do for these.
            return error.reason in ("not_found", "foreign")
        self._faults.recover(name)
        return True

    async def _merge_into(self, name: str) -> None:
        api_service = await self.client.get(f"{_API_SERVICES}{name}")
        spec = api_service["spec"]
        service = spec.get("service") or {}  # null if the API server itself serves the API
        owner = f"{service.get('namespace')}/{service.get('name')}"
        if owner != self._service:
            raise SourceError(
                "foreign",
                f"it points to {owner}. podgpu receives no requests for these metrics. "
                "Delete that APIService if it is not needed, or disable podgpu's API",
            )

        bundle = base64.b64decode(spec.get("caBundle") or "").decode("ascii", "ignore")
        if self._certificate in parse_bundle(bundle):
            return

        merged = merge_bundle(bundle, self._certificate)
        # With the resource version, the API server rejects the patch if the bundle has changed
        # since it was read.
        patch = {
            "metadata": {"resourceVersion": api_service["metadata"]["resourceVersion"]},
            "spec": {
                "caBundle": base64.b64encode(merged.encode()).decode(),
                "insecureSkipTLSVerify": False,
            },
        }

        await self.client.patch(f"{_API_SERVICES}{name}", patch)
        _log.info("added podgpu's certificate to the APIService %s", name)
