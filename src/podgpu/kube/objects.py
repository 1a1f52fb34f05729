"""Reduces Pods and EndpointSlices to small frozen records, because a store may hold 100,000 of
them.

Parsers do not validate objects, because the API server does. If a parser raises an error such as
KeyError, the reflector skips the object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from sys import intern
from typing import Any

from podgpu.model import WorkloadOwner, group_by_key

KubeObject = dict[str, Any]  # a JSON object of the API
Pairs = tuple[tuple[str, str], ...]


PODS_PATH = "/api/v1/pods"
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Static pods have two uids. This annotation contains the kubelet's uid, which cgroups and logs
also use.
"""
_HASH_LABEL = "pod-template-hash"


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    name: str
    requests: Pairs = ()  # extended resource and quantity; a limit overrides a request
    container_id: str = ""  # without the runtime's prefix; empty before the container is created
    finished: bool = False  # True for an init container that has succeeded
    # ResourceClaim (DRA) and request; without a request, the container uses the whole claim
    claims: Pairs = ()

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


def parse_pod(
    body: KubeObject, keeps_annotation: Callable[[str], bool] = lambda _: False
) -> PodRecord | None:
    """Parses a Pod. Keeps the annotations that `keeps_annotation` accepts. Returns None if name or
    uid is missing.
    """
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
        tuple(
            sorted(
                (intern(key), intern(text)) for key, text in (metadata.get("labels") or {}).items()
            )
        ),
        tuple(
            sorted(
                (intern(key), text) for key, text in annotations.items() if keeps_annotation(key)
            )
        ),
        tuple(
            _read_containers(
                spec.get("initContainers"),
                status.get("initContainerStatuses"),
                claims,
                are_init=True,
            )
        ),
        tuple(_read_containers(spec.get("containers"), status.get("containerStatuses"), claims)),
        api_uid if api_uid != uid else "",
    )


def _read_claims(spec: KubeObject, status: KubeObject) -> dict[str, list[tuple[str, str]]]:
    """Returns the ResourceClaims and requests that each container uses, by container."""
    entries = (*(spec.get("resourceClaims") or ()), *(status.get("resourceClaimStatuses") or ()))
    names = {entry["name"]: entry.get("resourceClaimName") for entry in entries}
    extended = (
        status.get("extendedResourceClaimStatus") or {}
    )  # resources such as nvidia.com/gpu, provided by DRA
    requests = [
        (container["name"], (names.get(claim["name"]) or "", claim.get("request") or ""))
        for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
        for claim in (container.get("resources") or {}).get("claims") or ()
    ]
    for entry in extended.get("requestMappings") or ():
        requests.append(
            (entry["containerName"], (extended["resourceClaimName"], entry["requestName"]))
        )
    return group_by_key(requests)


def _read_containers(
    containers: list[KubeObject] | None,
    statuses: list[KubeObject] | None,
    claims: Mapping[str, list[tuple[str, str]]],
    are_init: bool = False,
) -> Iterator[ContainerRecord]:
    """Yields containers in the order of the spec, because annotations refer to containers by
    position.
    """
    status_of = {status["name"]: status for status in statuses or ()}
    for container in containers or ():
        status = status_of.get(container["name"], {})
        resources = container.get("resources") or {}
        quantities = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        terminated = (status.get("state") or {}).get("terminated") or {}
        yield ContainerRecord(
            intern(container["name"]),
            tuple(
                sorted(
                    (intern(name), intern(str(text)))
                    for name, text in quantities.items()
                    if "/" in name
                )
            ),
            status.get("containerID", "").rpartition("://")[2],
            are_init and terminated.get("exitCode") == 0,
            tuple(claims.get(container["name"], ())),
        )


def parse_owner(body: KubeObject) -> tuple[tuple[str, str], WorkloadOwner] | None:
    """Returns (namespace, name) of a Pod and the owner of the Pod. Returns None if there is no
    owner.
    """
    metadata = body["metadata"]
    controller = next(
        (owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), None
    )
    if controller is None:
        return None
    kind, name = controller["kind"], controller["name"]
    template = (metadata.get("labels") or {}).get(_HASH_LABEL)
    if kind == "ReplicaSet" and template and name.removesuffix(f"-{template}") not in (name, ""):
        kind, name = (
            "Deployment",
            name.removesuffix(f"-{template}"),
        )  # only Deployments set this label
    pod = intern(metadata.get("namespace", "")), metadata["name"]
    return pod, WorkloadOwner(intern(kind), intern(name))


NODES_PATH = "/api/v1/nodes"


def parse_node_labels(body: KubeObject) -> tuple[str, dict[str, str]]:
    """Returns the name of a Node and its labels. Needs only metadata."""
    return body["metadata"]["name"], body["metadata"].get("labels") or {}


_QUANTITY = re.compile(r"\+?([\d.]{1,40}(?:[eE][+-]?\d{1,2})?)([KMGTPE]i|[numkMGTPE])?", re.ASCII)
_UNITS = {
    **{
        unit: Fraction(10) ** power
        for unit, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
    },
    **{f"{unit}i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def parse_quantity(text: str) -> Fraction:
    """Parses a Kubernetes quantity: `50`, `500m`, `8Gi`, `1e3`. Raises ValueError if it is negative
    or invalid.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!a} is not a quantity")
    return Fraction(match[1]) * _UNITS.get(match[2], Fraction(1))
