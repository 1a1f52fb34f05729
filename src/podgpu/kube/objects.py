"""Reduces Pods and EndpointSlices to small frozen records, because a store may hold 100,000 of them.

Parsers do not validate objects, because the API server does. If a parser raises an error such as KeyError, the
reflector skips the object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from sys import intern
from typing import Any, NamedTuple

from podgpu.errors import few_of
from podgpu.model import WorkloadOwner, group_by_key

KubeObject = dict[str, Any]  # a JSON object of the API
Pairs = tuple[tuple[str, str], ...]


PODS_PATH = "/api/v1/pods"
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Static pods have two uids. This annotation contains the kubelet's uid, which cgroups and logs also use."""
_HASH_LABEL = "pod-template-hash"


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    name: str
    requests: Pairs = ()  # extended resource and quantity; a limit overrides a request
    container_id: str = ""  # without the runtime's prefix; empty before the container is created
    finished: bool = False  # True for an init container that has succeeded
    claims: Pairs = ()  # ResourceClaim (DRA) and request; without a request, the container uses the whole claim

    def amount(self, resource: str) -> Fraction:
        """Returns the requested quantity of a resource, or 0 if there is no request."""
        try:
            return parse_quantity(dict(self.requests).get(resource, ""))
        except ValueError:
            return Fraction(0)


@dataclass(frozen=True, slots=True)
class PodRecord:
    namespace: str
    name: str
    uid: str  # the kubelet's uid; only static pods have another uid in the API server
    node: str = ""
    phase: str = ""
    labels: Pairs = ()
    annotations: Pairs = ()  # only those that `parse_pod` keeps
    init_containers: tuple[ContainerRecord, ...] = ()
    containers: tuple[ContainerRecord, ...] = ()
    api_uid: str = ""  # the API server's uid if it differs from `uid`, else empty

    @property
    def all_containers(self) -> tuple[ContainerRecord, ...]:
        return (*self.init_containers, *self.containers)

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def annotation(self, key: str) -> str:
        return dict(self.annotations).get(key, "")


def parse_pod(body: KubeObject, keeps_annotation: Callable[[str], bool] = lambda _: False) -> PodRecord | None:
    """Parses a Pod. Keeps the annotations that `keeps_annotation` accepts. Returns None if name or uid is missing."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    name, api_uid = metadata.get("name"), metadata.get("uid")
    if not name or not api_uid:
        return None
    annotations = metadata.get("annotations") or {}
    claims = _read_claims(spec, status)
    uid = annotations.get(_MIRROR_ANNOTATION) or api_uid
    return PodRecord(
        intern(metadata.get("namespace", "")),
        name,
        uid,
        intern(spec.get("nodeName", "")),
        intern(status.get("phase", "")),
        tuple(sorted((intern(key), intern(text)) for key, text in (metadata.get("labels") or {}).items())),
        tuple(sorted((intern(key), text) for key, text in annotations.items() if keeps_annotation(key))),
        tuple(_read_containers(spec.get("initContainers"), status.get("initContainerStatuses"), claims, are_init=True)),
        tuple(_read_containers(spec.get("containers"), status.get("containerStatuses"), claims)),
        api_uid if api_uid != uid else "",
    )


def _read_claims(spec: KubeObject, status: KubeObject) -> dict[str, list[tuple[str, str]]]:
    """Returns the ResourceClaims and requests that each container uses, by container."""
    entries = (*(spec.get("resourceClaims") or ()), *(status.get("resourceClaimStatuses") or ()))
    names = {entry["name"]: entry.get("resourceClaimName") for entry in entries}
    extended = status.get("extendedResourceClaimStatus") or {}  # resources such as nvidia.com/gpu, provided by DRA
    requests = [
        (container["name"], (names.get(claim["name"]) or "", claim.get("request") or ""))
        for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
        for claim in (container.get("resources") or {}).get("claims") or ()
    ]
    for entry in extended.get("requestMappings") or ():
        requests.append((entry["containerName"], (extended["resourceClaimName"], entry["requestName"])))
    return group_by_key(requests)


def _read_containers(
    containers: list[KubeObject] | None,
    statuses: list[KubeObject] | None,
    claims: Mapping[str, list[tuple[str, str]]],
    are_init: bool = False,
) -> Iterator[ContainerRecord]:
    """Yields containers in the order of the spec, because annotations refer to containers by position."""
    status_of = {status["name"]: status for status in statuses or ()}
    for container in containers or ():
        status = status_of.get(container["name"], {})
        resources = container.get("resources") or {}
        quantities = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        terminated = (status.get("state") or {}).get("terminated") or {}
        yield ContainerRecord(
            intern(container["name"]),
            tuple(sorted((intern(name), intern(str(text))) for name, text in quantities.items() if "/" in name)),
            status.get("containerID", "").rpartition("://")[2],
            are_init and terminated.get("exitCode") == 0,
            tuple(claims.get(container["name"], ())),
        )


def parse_owner(body: KubeObject) -> tuple[tuple[str, str], WorkloadOwner] | None:
    """Returns (namespace, name) of a Pod and the owner of the Pod. Returns None if there is no owner."""
    metadata = body["metadata"]
    controller = next((owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), None)
    if controller is None:
        return None
    kind, name = controller["kind"], controller["name"]
    template = (metadata.get("labels") or {}).get(_HASH_LABEL)
    if kind == "ReplicaSet" and template and name.removesuffix(f"-{template}") not in (name, ""):
        kind, name = "Deployment", name.removesuffix(f"-{template}")  # only Deployments set this label
    pod = intern(metadata.get("namespace", "")), metadata["name"]
    return pod, WorkloadOwner(intern(kind), intern(name))


NODES_PATH = "/api/v1/nodes"


def parse_node_labels(body: KubeObject) -> tuple[str, dict[str, str]]:
    """Returns the name of a Node and its labels. Needs only metadata."""
    return body["metadata"]["name"], body["metadata"].get("labels") or {}


_QUANTITY = re.compile(r"\+?([\d.]{1,40}(?:[eE][+-]?\d{1,2})?)([KMGTPE]i|[numkMGTPE])?", re.ASCII)
_UNITS = {
    **{unit: Fraction(10) ** power for unit, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)},
    **{f"{unit}i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def parse_quantity(text: str) -> Fraction:
    """Parses a Kubernetes quantity: `50`, `500m`, `8Gi`, `1e3`. Raises ValueError if it is negative or invalid."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!a} is not a quantity")
    return Fraction(match[1]) * _UNITS.get(match[2], Fraction(1))


SERVICE_LABEL = "kubernetes.io/service-name"
"""Kubernetes sets this label on EndpointSlices. The value is the name of the Service."""
METRICS_PORT = "metrics"  # name of the port to scrape; if a Service has only one port, the port may have any name


class EndpointSliceRecord(NamedTuple):
    """The endpoints of a Service. Endpoints that are not ready are included: failing exporters are still scraped."""

    service: tuple[str, str]  # namespace and name
    urls: tuple[tuple[str, str], ...] = ()  # the pod's uid (may be empty) and the URL
    problem: str = ""  # message if the Service has no port for metrics


def collection_path(api: str, kind: str, namespace: str = "") -> str:
    return f"{api}/namespaces/{namespace}/{kind}" if namespace else f"{api}/{kind}"


def parse_endpoint_slice(body: KubeObject, https: bool = False) -> EndpointSliceRecord:
    """Parses an EndpointSlice. With `https`, all URLs use https; otherwise only those of ports declared as https."""
    metadata = body["metadata"]
    service = metadata["namespace"], (metadata.get("labels") or {}).get(SERVICE_LABEL) or metadata["name"]
    ports = [port for port in body.get("ports") or () if port.get("port") and port.get("protocol") in (None, "TCP")]
    chosen = next((port for port in ports if port.get("name") == METRICS_PORT), ports[0] if len(ports) == 1 else None)
    if chosen is None:
        existing = few_of(f"{port.get('name') or 'unnamed'} ({port['port']})" for port in ports)
        problem = f"the Service {'/'.join(service)} has no port named {METRICS_PORT}; it has {existing}: rename a port"
        return EndpointSliceRecord(service, problem=problem if body.get("endpoints") else "")
    is_https = https or "https" in f"{chosen.get('appProtocol')} {chosen.get('name')}".lower()
    urls = []
    for endpoint in body.get("endpoints") or ():
        address = endpoint["addresses"][0]
        host = f"[{address}]" if ":" in address else address
        url = f"{'https' if is_https else 'http'}://{host}:{chosen['port']}/metrics"
        urls.append(((endpoint.get("targetRef") or {}).get("uid", ""), url))
    return EndpointSliceRecord(service, tuple(urls))


def merge_urls(slices: Iterable[EndpointSliceRecord]) -> tuple[str, ...]:
    """Returns one URL per pod, sorted. If a pod has an IPv4 and an IPv6 address, uses the IPv4 address."""
    urls: dict[str, str] = {}
    every = [each for record in slices for each in record.urls]
    for uid, url in sorted(every, key=lambda each: ("[" in each[1], each[1])):
        urls.setdefault(uid or url, url)
    return tuple(dict.fromkeys(urls.values()))
