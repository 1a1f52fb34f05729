"""Reads addresses of exporters (EndpointSlices) and data of pods and nodes from the API server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from podgpu.errors import Note, UsageError, few_of
from podgpu.http_client import url_host
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import PODS_PATH, KubeObject, PodOwnership, parse_ownership
from podgpu.kube.reflector import Informer, ReflectorSettings
from podgpu.model import PodName, WorkloadOwner

K = TypeVar("K")
V = TypeVar("V")
_SYNC_CHECKS = 100  # every 0.1 s; without an error, the first values are awaited for 10 s
_PAGE_SIZE = 500  # as in kubectl; a page has about 500 KB of metadata
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class ServiceSelector(NamedTuple):
    namespace: str  # empty for all namespaces
    labels: str

    @classmethod
    def parse(cls, text: str) -> ServiceSelector:
        """Parses `[NAMESPACE/]SELECTOR`. Raises UsageError.

        A label name may also contain a slash. The text before the first slash is a namespace if it
        contains no dot. A leading slash means all namespaces.
        """
        before, slash, after = text.strip().partition("/")
        is_namespace = not before or _NAMESPACE.fullmatch(before) is not None
        if slash and is_namespace:
            namespace = before
            labels = after
        else:
            namespace = ""
            labels = text.strip()

        if not labels or not labels.isprintable():
            raise UsageError(
                f"--discover-kubernetes {text!r}: "
                "write [NAMESPACE/]LABEL=VALUE with a label of the exporters' Service"
            )

        return cls(namespace, labels)

    def __str__(self) -> str:
        if self.namespace:
            return f"{self.namespace}/{self.labels}"
        return self.labels


SERVICE_LABEL = "kubernetes.io/service-name"
"""Kubernetes sets this label on EndpointSlices. The value is the name of the Service."""
# name of the port to scrape; if a Service has only one port, the port may have any name
METRICS_PORT = "metrics"


class ExporterEndpoint(NamedTuple):
    pod_uid: str  # may be empty
    url: str


class EndpointSliceRecord(NamedTuple):
    """The endpoints of a Service.

    Endpoints that are not ready are included: failing exporters are still scraped.
    """

    service: tuple[str, str]  # namespace and name
    endpoints: tuple[ExporterEndpoint, ...] = ()
    problem: str = ""  # message if the Service has no port for metrics


def _collection_path(api: str, kind: str, namespace: str) -> str:
    if namespace:
        return f"{api}/namespaces/{namespace}/{kind}"
    return f"{api}/{kind}"


def parse_endpoint_slice(body: KubeObject, https: bool = False) -> EndpointSliceRecord:
    """Parses an EndpointSlice.

    With `https`, all URLs use https; otherwise only those of ports declared as https.
    """
    metadata = body["metadata"]
    labels = metadata.get("labels") or {}
    service = (metadata["namespace"], labels.get(SERVICE_LABEL) or metadata["name"])
    endpoints = body.get("endpoints")
    if not endpoints:
        return EndpointSliceRecord(service)

    ports = []
    for port in body.get("ports") or ():
        if port.get("port") and port.get("protocol") in (None, "TCP"):
            ports.append(port)

    chosen = _choose_port(ports)
    if chosen is None:
        return EndpointSliceRecord(service, problem=_explain_ports(service, ports))

    names = f"{chosen.get('appProtocol')} {chosen.get('name')}"
    is_https = https or "https" in names.lower()
    scheme = "https" if is_https else "http"
    exporters = []
    for endpoint in endpoints:
        pod_uid = (endpoint.get("targetRef") or {}).get("uid", "")
        host = url_host(endpoint["addresses"][0])
        url = f"{scheme}://{host}:{chosen['port']}/metrics"
        exporters.append(ExporterEndpoint(pod_uid, url))

    return EndpointSliceRecord(service, tuple(exporters))


def _explain_ports(service: tuple[str, str], ports: Iterable[KubeObject]) -> str:
    shown = []
    for port in ports:
        name = port.get("name") or "unnamed"
        shown.append(f"{name} ({port['port']})")
    existing = few_of(shown)

    return (
        f"the Service {'/'.join(service)} has no port named {METRICS_PORT}; "
        f"it has {existing}: rename a port"
    )


def _choose_port(ports: Sequence[KubeObject]) -> KubeObject | None:
    for port in ports:
        if port.get("name") == METRICS_PORT:
            return port
    if len(ports) != 1:
        return None
    return ports[0]


def merge_urls(slices: Iterable[EndpointSliceRecord]) -> tuple[str, ...]:
    """Returns one URL per pod, sorted.

    If a pod has an IPv4 and an IPv6 address, uses the IPv4 address.
    """
    endpoints: list[ExporterEndpoint] = []
    for record in slices:
        endpoints += record.endpoints

    # URLs with an IPv6 address come last.
    endpoints.sort(key=lambda endpoint: ("[" in endpoint.url, endpoint.url))
    urls: dict[str, str] = {}
    for endpoint in endpoints:
        pod = endpoint.pod_uid or endpoint.url
        urls.setdefault(pod, endpoint.url)

    # An endpoint without a uid may repeat the URL of a pod.
    return tuple(dict.fromkeys(urls.values()))


class KubernetesTargets:
    """Lists the exporters that --discover-kubernetes selects.

    Keeps the last list while the API server is unavailable. The list includes endpoints that are
    not ready, so that a failing exporter stays visible.
    """

    def __init__(
        self,
        config: ApiConfig,
        selector: ServiceSelector,
        *,
        https: bool = False,
        settings: ReflectorSettings | None = None,
    ) -> None:
        """`https`: use HTTPS for all exporters, otherwise only for ports declared as https."""
        self._config = config
        self._selector = selector
        self._https = https
        self._settings = settings
        self._services: Informer[tuple[str, str]] = Informer(
            config,
            _collection_path("/api/v1", "services", selector.namespace),
            {"labelSelector": selector.labels},
            lambda body: (body["metadata"]["namespace"], body["metadata"]["name"]),
            settings=settings,
            metadata_only=True,
        )
        self._labelled = self._watch_slices(selector.labels)
        # watches EndpointSlices that lack the selector's labels, if their Service has the labels
        self._unlabelled: Informer[EndpointSliceRecord] | None = None
        self._unlabelled_names: tuple[str, ...] = ()

    def _watch_slices(self, selector: str) -> Informer[EndpointSliceRecord]:
        return Informer(
            self._config,
            _collection_path(
                "/apis/discovery.k8s.io/v1", "endpointslices", self._selector.namespace
            ),
            {"labelSelector": selector},
            lambda body: parse_endpoint_slice(body, self._https),
            settings=self._settings,
        )

    def wait_synced(self, timeout: float) -> bool:
        return self._labelled.wait_synced(timeout)

    def urls(self) -> Sequence[str]:
        return merge_urls(self._update_slices())

    def _watch_unlabelled(self, names: tuple[str, ...]) -> None:
        """Watches the slices of these services instead of the former ones."""
        if self._unlabelled is not None:
            self._unlabelled.close()
            self._unlabelled = None
        if names:
            self._unlabelled = self._watch_slices(f"{SERVICE_LABEL} in ({','.join(names)})")
        self._unlabelled_names = names

    def _update_slices(self) -> tuple[EndpointSliceRecord, ...]:
        """Returns the slices. If a Service has none with its labels, watches its other slices."""
        labelled = self._labelled.items()
        if not self._labelled.synced or not self._services.synced:
            return labelled

        with_slices = {record.service for record in labelled}
        missing = set(self._services.items()) - with_slices
        names = tuple(sorted({name for _, name in missing}))
        if names != self._unlabelled_names:
            self._watch_unlabelled(names)
        if self._unlabelled is None:
            return labelled

        # Other namespaces may have a Service of the same name.
        unlabelled = [slice for slice in self._unlabelled.items() if slice.service in missing]
        return (*labelled, *unlabelled)

    def notes(self) -> Sequence[Note]:
        slices = self._update_slices()
        problems = []
        for record in slices:
            if record.problem:
                problems.append(Note(f"Service {'/'.join(record.service)}", record.problem))

        problems = list(dict.fromkeys(problems))
        error = self._labelled.error
        if error is not None:
            text = f"the list of exporters may be out of date: {error}"
            return [Note("exporters", text), *problems]
        if problems or merge_urls(slices):
            return problems

        for informer in (self._services, self._labelled, self._unlabelled):
            if informer is not None and not (informer.synced or informer.error):
                text = "the API server has not yet returned the list of exporters"
                return [Note("exporters unread", text)]

        text = f"no Service with the labels {self._selector} has an endpoint"
        return [Note("no exporters", text)]

    def close(self) -> None:
        for informer in (self._services, self._labelled, self._unlabelled):
            if informer is not None:
                informer.close()


@dataclass
class ApiMap(Generic[K, V]):
    """Watches the objects at an API path and reads a key and a value from each.

    The first `read` starts the watch.
    """

    config: ApiConfig
    path: str
    parse: Callable[[KubeObject], tuple[K, V] | None]
    what: str  # describes the values in warnings, such as "owners of pods"
    settings: ReflectorSettings | None = None
    metadata_only: bool = True
    _objects: Informer[tuple[K, V]] | None = None

    def read(self) -> dict[K, V]:
        if self._objects is None:
            self._objects = Informer(
                self.config,
                self.path,
                {},
                self.parse,
                settings=self.settings,
                metadata_only=self.metadata_only,
                page_size=_PAGE_SIZE,
            )
            # Waits, because the first round would not have the values.
            for _ in range(_SYNC_CHECKS):
                if self._objects.wait_synced(0.1) or self._objects.error:
                    break

        return dict(self._objects.items())

    def notes(self) -> Sequence[Note]:
        error = self._objects.error if self._objects else None
        if error is None:
            return ()
        return (Note(self.path, f"the {self.what} may be out of date: {error}"),)

    def close(self) -> None:
        if self._objects is not None:
            self._objects.close()


class OwnerWatch:
    """Watches the metadata of pods: their owners, and which of them savings leave out."""

    def __init__(self, config: ApiConfig, settings: ReflectorSettings | None = None) -> None:
        self._pods: ApiMap[PodName, PodOwnership] = ApiMap(
            config, PODS_PATH, parse_ownership, "owners of pods", settings
        )
        self.notes = self._pods.notes
        self.close = self._pods.close

    def read(self) -> dict[PodName, WorkloadOwner]:
        owners = {}
        for pod, ownership in self._pods.read().items():
            if ownership.owner is not None:
                owners[pod] = ownership.owner
        return owners

    def read_kept(self) -> frozenset[PodName]:
        pods = self._pods.read().items()
        return frozenset(pod for pod, ownership in pods if ownership.is_kept)
