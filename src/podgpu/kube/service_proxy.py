"""Reads a view through the service proxy of the API server, with the user's own kubeconfig.

Nothing is forwarded and nobody logs in again: the API server decides with the verb `get` of
`services/proxy` who may read. It removes the user's credentials from proxied requests.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from podgpu.decode import BAD_JSON, find_decoder
from podgpu.errors import SourceError, UsageError, few_of, one_line
from podgpu.http_client import read_error
from podgpu.kube.client import ApiClient, ApiResponse, Credentials, explain_status
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import KubeObject, read_list, read_map
from podgpu.view_address import ViewClient

_SEARCH_SECONDS = 15.0
_SELECTOR = "app.kubernetes.io/part-of=podgpu,app.kubernetes.io/component in (cluster,demo)"
_COMPONENT = "app.kubernetes.io/component"
_PORT_NAMES = ("page", "metrics")  # of the chart's Services; the demo has both
_USUAL_NAMESPACES = ("monitoring", "podgpu")
"""Namespaces of our documentation. Tried if the user may not list Services."""
_USUAL_NAME = "podgpu-cluster"
_USUAL_PORT = "9401"
_SERVICE = re.compile(
    r"(?P<namespace>[a-z0-9-]+)/(?:(?P<scheme>https?):)?(?P<name>[a-z0-9-]+)(?::(?P<port>[a-z0-9-]+))?"
)
_ROLE = """\
An administrator can allow it with `kubectl apply -f FILE`:

apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: podgpu-view
  namespace: {namespace}
rules:
- apiGroups: [""]
  resources: ["services/proxy"]
  resourceNames: ["{segment}"]
  verbs: ["get"]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: podgpu-view
  namespace: {namespace}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: podgpu-view
subjects:
- apiGroup: rbac.authorization.k8s.io
  kind: User
  name: {user}
"""
_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


class ServiceName(NamedTuple):
    namespace: str
    name: str
    port: str = _USUAL_PORT
    scheme: str = "http"

    @property
    def segment(self) -> str:
        """The Service in a path of the proxy, and in `resourceNames` of a Role."""
        return f"{self.scheme}:{self.name}:{self.port}"

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/services/{self.segment}/proxy/"

    @property
    def text(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_service(text: str) -> ServiceName:
    """Parses NAMESPACE/[https:]NAME[:PORT]. Raises UsageError."""
    match = _SERVICE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--service {one_line(text)[:100]}: write NAMESPACE/NAME, NAMESPACE/NAME:PORT or "
            "NAMESPACE/https:NAME:PORT"
        )

    port = match["port"] or _USUAL_PORT
    return ServiceName(match["namespace"], match["name"], port, match["scheme"] or "http")


class AccessDenied(SourceError):
    """The user may not use the proxy. `remedy` has a Role that would allow it."""

    def __init__(self, message: str, service: ServiceName, user: str) -> None:
        super().__init__("forbidden", message)
        self.remedy = _ROLE.format(
            namespace=service.namespace,
            segment=service.segment,
            user=json.dumps(user or "NAME OF THE USER"),
        )


class KubeAddress:
    """A view behind the service proxy of an API server."""

    def __init__(self, config: ApiConfig, service: ServiceName | None = None) -> None:
        """Without `service`, the Service is found by the labels of podgpu's chart."""
        self._config = config
        self._service = service
        self._credentials = Credentials(config, is_attended=True)
        self._lock = threading.Lock()

    def open(self, timeout: float) -> ViewClient:
        """Finds the Service. Raises SourceError if there is none."""
        if self._service is None:
            with self._lock:
                self._service = asyncio.run(self._find_service())
        return _ProxyClient(self, self._service, timeout)

    def read(
        self, service: ServiceName, path: str, query: Mapping[str, str] | None, timeout: float
    ) -> bytes:
        with self._lock:
            return asyncio.run(self._read(service, path, query, timeout))

    def _connect(self, timeout: float) -> ApiClient:
        return ApiClient(self._config, timeout, credentials=self._credentials)

    async def _read(
        self, service: ServiceName, path: str, query: Mapping[str, str] | None, timeout: float
    ) -> bytes:
        async with self._connect(timeout) as client:
            response = await client.fetch(service.path + path.lstrip("/"), query)
            if response.status == 200:
                return response.body
            raise await self._explain(client, service, response)

    async def _explain(
        self, client: ApiClient, service: ServiceName, response: ApiResponse
    ) -> SourceError:
        """Distinguishes the answers of the API server from those of the view."""
        message = _read_status(response.body)
        if not message:
            return _explain_view(service, response)
        if response.status == 401:
            return _refuse_login(self._config)

        if response.status == 403:
            user = await _find_user(client)
            text = (
                f"you may not read podgpu through the API server: verb get, resource "
                f"services/proxy, namespace {service.namespace} ({message})"
            )
            return AccessDenied(text, service, user)

        if response.status == 404:
            text = (
                f"there is no Service {service.text} ({message}): install podgpu's chart with the "
                "cluster view, or name its Service with --service NAMESPACE/NAME"
            )
            return SourceError("not_found", text)

        if response.status == 503:
            text = (
                f"the Service {service.text} does not answer ({message}): check that its pod is "
                f"ready (kubectl -n {service.namespace} get pods,endpoints) and that network "
                "policies let the API server reach it"
            )
            return SourceError("unreachable", text)

        text = f"the API server answers {response.status} for the Service {service.text}: {message}"
        return SourceError(f"http_{response.status}", text)

    # Finds the Service

    async def _find_service(self) -> ServiceName:
        async with self._connect(_SEARCH_SECONDS) as client:
            services = await self._list_services(client, "")
            if services is not None:
                return _choose(services)

            # The user may list the Services of some namespaces only.
            if self._config.namespace:
                services = await self._list_services(client, self._config.namespace)
                if services:
                    return _choose(services)

            return await self._try_usual_names(client)

    async def _list_services(self, client: ApiClient, namespace: str) -> list[KubeObject] | None:
        """Returns None if the user may not list the Services. An empty namespace stands for all."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/services"
        if not namespace:
            path = "/api/v1/services"

        response = await client.fetch(path, {"labelSelector": _SELECTOR})
        if response.status == 403:
            return None
        if response.status == 401:
            raise _refuse_login(self._config)

        if response.status == 200:
            with suppress(*BAD_JSON):
                return read_list(find_decoder(KubeObject).decode(response.body), "items")

        if _read_status(response.body):
            raise explain_status(response.status, response.body, path, self._config.origin)

        text = (
            f"{self._config.server} answers {path} with status {response.status} (the answer is "
            f"not a list of Services): check that it is an API server ({self._config.origin})"
        )
        raise SourceError("bad_answer", text)

    async def _try_usual_names(self, client: ApiClient) -> ServiceName:
        """Returns the first Service with a usual name that the user may reach."""
        namespaces = dict.fromkeys([self._config.namespace, *_USUAL_NAMESPACES])
        services = [ServiceName(name, _USUAL_NAME) for name in namespaces if name]
        missing = []
        for service in services:
            response = await client.fetch(f"{service.path}health")
            # Only the API server answers with a Status object. Without it, podgpu has answered.
            is_refused = response.status in (403, 404) and _read_status(response.body)
            if not is_refused:
                return service
            if response.status == 404:
                missing.append(service)

        names = few_of(service.text for service in services)
        if missing == services:
            text = (
                f"none of the Services {names} exists, and you may not list Services: name "
                "podgpu's Service with --service NAMESPACE/NAME"
            )
            raise SourceError("not_found", text)

        denied = [service for service in services if service not in missing]
        text = (
            "you may not read podgpu through the API server: verb get, resource services/proxy; "
            f"tried {names}, because you may not list Services either. If podgpu is elsewhere, "
            "use --service NAMESPACE/NAME"
        )
        raise AccessDenied(text, denied[0], await _find_user(client))


class _ProxyClient:
    def __init__(self, address: KubeAddress, service: ServiceName, timeout: float) -> None:
        self.shown = f"Service {service.text}"
        self._address = address
        self._service = service
        self._timeout = timeout

    def get_blocking(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        return self._address.read(self._service, path, query, self._timeout)


class _Status(msgspec.Struct):
    kind: Literal["Status"]
    message: str = ""
    reason: str = ""


def _read_status(body: bytes) -> str:
    """Returns the API server's own message. Empty if the Service answered."""
    try:
        status = find_decoder(_Status).decode(body)
    except BAD_JSON:
        return ""
    text = status.message or status.reason or "no message"
    return one_line(" ".join(text.split()))[:600]


def _refuse_login(config: ApiConfig) -> SourceError:
    text = (
        f"the API server {config.server} rejected your credentials from {config.origin} (401): "
        "log in again; `kubectl auth whoami` uses the same credentials"
    )
    return SourceError("unauthorized", text)


def _explain_view(service: ServiceName, response: ApiResponse) -> SourceError:
    status = response.status
    if status == 401:
        text = (
            f"podgpu behind the Service {service.text} asks for a login of its own (401), and the "
            "API server does not pass credentials on: for a password, run kubectl -n "
            f"{service.namespace} port-forward service/{service.name} 9401:{service.port} and use "
            "--url http://USER:PASSWORD@localhost:9401; for --auth kubernetes, see docs/kubectl.md"
        )
        return SourceError("unauthorized", text)

    message = read_error(response.body) or "is it the Service of podgpu cluster?"
    return SourceError(f"http_{status}", f"Service {service.text} answers {status}: {message}")


async def _find_user(client: ApiClient) -> str:
    """Returns the user's name as the API server knows it. Empty if it is not known."""
    document = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        body = await client.create(_REVIEWS, document)
        review: Any = find_decoder(KubeObject).decode(body)
        return str(review["status"]["userInfo"]["username"])
    except (SourceError, *BAD_JSON, LookupError, TypeError):
        return ""


def _choose(objects: list[KubeObject]) -> ServiceName:
    """Returns the only Service. Ignores a demo beside a real view."""
    views = []
    for item in objects:
        labels = read_map(read_map(item, "metadata"), "labels")
        if labels[_COMPONENT] != "demo":
            views.append(item)

    services = [_make_service(item) for item in views or objects]
    if not services:
        text = (
            "this Kubernetes cluster has no Service of podgpu's cluster view: install podgpu's "
            "chart with cluster.enabled, or name a Service with --service NAMESPACE/NAME"
        )
        raise SourceError("not_found", text)

    if len(services) > 1:
        names = few_of(service.text for service in services)
        text = f"there are {len(services)} views of podgpu: choose one of {names} with --service"
        raise SourceError("ambiguous", text)

    return services[0]


def _make_service(item: KubeObject) -> ServiceName:
    metadata = read_map(item, "metadata")
    port = _find_port(read_list(read_map(item, "spec"), "ports"))
    scheme = "https" if port.get("appProtocol") == "https" else "http"
    number = str(port.get("port", _USUAL_PORT))
    return ServiceName(metadata["namespace"], metadata["name"], number, scheme)


def _find_port(ports: Sequence[KubeObject]) -> KubeObject:
    """Returns the port with a known name, or else the first one. Empty if there is none."""
    for name in _PORT_NAMES:
        for port in ports:
            if port.get("name", "") == name:
                return port
    return ports[0] if ports else {}
