"""Reduces Pods to small frozen records, because a store may hold 100,000 of them.

Parsers do not validate objects, because the API server does. If a parser raises an error such as
KeyError, the reflector skips the object.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from sys import intern
from typing import Any, NamedTuple

from podgpu.model import (
    Pairs,
    PodName,
    Workload,
    WorkloadOwner,
)

KubeObject = dict[str, Any]  # a JSON object of the API


def read_map(body: KubeObject, key: str) -> KubeObject:
    """Returns an empty dict if the field is absent or null, which have the same meaning."""
    return body.get(key) or {}


def read_list(body: KubeObject, key: str) -> list[Any]:
    """Returns an empty list if the field is absent or null, which have the same meaning."""
    return body.get(key) or []


PODS_PATH = "/api/v1/pods"
_GPU_WORDS = ("gpu", "mig-", "cuda")  # substrings of GPU resource names, such as nvidia.com/gpu
# KAI Scheduler and Run:ai: a pod that uses a fraction of a GPU requests it by annotations only.
GPU_FRACTION = "gpu-fraction"
GPU_MEMORY = "gpu-memory"  # MiB
GPU_FRACTION_COUNT = "gpu-fraction-num-devices"
GPU_GROUP = "runai-gpu-group"
"""Label with the group name. A pod on several GPUs has one label `runai-gpu-group/<group>` per GPU.
"""
# Static pods have two uids. This annotation contains the kubelet's uid, which cgroups and logs also
# use.
_MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
_SAVINGS = "podgpu.io/savings"  # annotation; "false" if savings leave out the pod
_HASH_LABEL = "pod-template-hash"
# Kind of a pod's controller, label of the pod, and kind of the object that the label names.
_OPERATOR_LABELS = (
    ("StatefulSet", "leaderworkerset.sigs.k8s.io/name", "LeaderWorkerSet"),
    ("Job", "jobset.sigs.k8s.io/jobset-name", "JobSet"),
)
_TRAINING_LABEL = "training.kubeflow.org/job-name"
_TRAINING_OPERATOR = "training.kubeflow.org/operator-name"
# value of _TRAINING_OPERATOR -> kind of the object that _TRAINING_LABEL names
_TRAINING_KINDS = {
    "jaxjob-controller": "JAXJob",
    "mpijob-controller": "MPIJob",
    "mpi-operator": "MPIJob",
    "paddlejob-controller": "PaddleJob",
    "pytorchjob-controller": "PyTorchJob",
    "tfjob-controller": "TFJob",
    "xgboostjob-controller": "XGBoostJob",
}


def is_gpu_resource(name: str) -> bool:
    """Also accepts the name of a device class (DRA)."""
    text = name.lower()
    return any(word in text for word in _GPU_WORDS)


class ResourceHealth(NamedTuple):
    """What the kubelet says about one device of a container (`allocatedResourcesStatus`)."""

    resource: str  # such as nvidia.com/gpu, or claim:NAME/REQUEST (DRA)
    device_id: str  # of the device plugin; with DRA, a CDI name
    health: str  # Healthy, Unhealthy or Unknown
    message: str = ""  # only from DRA drivers


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    name: str
    requests: Pairs = ()  # extended resource and quantity; a limit overrides a request
    container_id: str = ""  # without the runtime's prefix; empty before the container is created
    finished: bool = False  # True for an init container that has succeeded
    # ResourceClaim (DRA) and request; without a request, the container uses the whole claim
    claims: Pairs = ()
    health: tuple[ResourceHealth, ...] = ()

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

    def workload(self, container: ContainerRecord) -> Workload:
        return Workload(self.namespace, self.name, container.name, self.uid, container.container_id)


def parse_pod(
    body: KubeObject, keeps_annotation: Callable[[str], bool] = lambda _: False
) -> PodRecord | None:
    """Parses a Pod. Keeps the annotations that `keeps_annotation` accepts.

    Returns None if name or uid is missing.
    """
    metadata = body["metadata"]
    name = metadata.get("name")
    api_uid = metadata.get("uid")
    if not name or not api_uid:
        return None

    spec = read_map(body, "spec")
    status = read_map(body, "status")
    labels = read_map(metadata, "labels")
    annotations = read_map(metadata, "annotations")
    kept = {key: text for key, text in annotations.items() if keeps_annotation(key)}
    uid = annotations.get(_MIRROR_ANNOTATION) or api_uid

    claims = _read_claims(spec, status)
    init_containers = _read_containers(
        read_list(spec, "initContainers"),
        read_list(status, "initContainerStatuses"),
        claims,
        are_init=True,
    )
    containers = _read_containers(
        read_list(spec, "containers"),
        read_list(status, "containerStatuses"),
        claims,
        are_init=False,
    )

    return PodRecord(
        namespace=intern(metadata.get("namespace", "")),
        name=name,
        uid=uid,
        node=intern(spec.get("nodeName", "")),
        phase=intern(status.get("phase", "")),
        labels=_sort_pairs(labels),
        annotations=_sort_pairs(kept),
        init_containers=tuple(init_containers),
        containers=tuple(containers),
        api_uid="" if api_uid == uid else api_uid,
    )


def _sort_pairs(values: Mapping[str, Any]) -> Pairs:
    """Interns the texts, because many objects have the same ones."""
    return tuple((intern(key), intern(str(value))) for key, value in sorted(values.items()))


def _read_claims(spec: KubeObject, status: KubeObject) -> dict[str, list[tuple[str, str]]]:
    """Returns the ResourceClaims and requests that each container uses, by container."""
    # ResourceClaim by the pod's name for it. The status has those made of templates.
    names: dict[str, str | None] = {}
    for entry in read_list(spec, "resourceClaims") + read_list(status, "resourceClaimStatuses"):
        names[entry["name"]] = entry.get("resourceClaimName")

    claims: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for container in read_list(spec, "initContainers") + read_list(spec, "containers"):
        resources = read_map(container, "resources")
        for claim in read_list(resources, "claims"):
            name = names.get(claim["name"]) or ""
            request = claim.get("request") or ""
            claims[container["name"]].append((name, request))

    # Resources such as nvidia.com/gpu, provided by DRA.
    extended = read_map(status, "extendedResourceClaimStatus")
    for mapping in read_list(extended, "requestMappings"):
        used = extended["resourceClaimName"], mapping["requestName"]
        claims[mapping["containerName"]].append(used)

    return claims


def _read_containers(
    containers: list[KubeObject],
    statuses: list[KubeObject],
    claims: Mapping[str, list[tuple[str, str]]],
    are_init: bool,
) -> Iterator[ContainerRecord]:
    """Yields containers in the order of the spec.

    Annotations refer to containers by position.
    """
    status_of = {status["name"]: status for status in statuses}
    for container in containers:
        name = container["name"]
        status = status_of.get(name, {})
        terminated = read_map(read_map(status, "state"), "terminated")
        _, _, container_id = status.get("containerID", "").rpartition("://")

        resources = read_map(container, "resources")
        quantities = read_map(resources, "requests") | read_map(resources, "limits")
        extended = {key: text for key, text in quantities.items() if "/" in key}
        yield ContainerRecord(
            name=intern(name),
            requests=_sort_pairs(extended),
            container_id=container_id,
            finished=are_init and terminated.get("exitCode") == 0,
            claims=tuple(claims.get(name, ())),
            health=tuple(_read_health(status)),
        )


def _read_health(status: KubeObject) -> Iterator[ResourceHealth]:
    for resource in read_list(status, "allocatedResourcesStatus"):
        for device in read_list(resource, "resources"):
            yield ResourceHealth(
                intern(resource["name"]),
                device["resourceID"],
                intern(device.get("health") or ""),
                device.get("message") or "",
            )


def find_controller(metadata: KubeObject) -> KubeObject | None:
    """Returns the reference to the owner that manages the object. Other owners only delete it."""
    for owner in read_list(metadata, "ownerReferences"):
        if owner.get("controller"):
            controller: KubeObject = owner
            return controller
    return None


def parse_owner(body: KubeObject) -> tuple[PodName, WorkloadOwner] | None:
    """Returns (namespace, name) of a Pod and the owner of the Pod, at the top of the owner chain.

    Returns None if there is no owner.
    """
    metadata = body["metadata"]
    controller = find_controller(metadata)
    if controller is None:
        return None

    labels = read_map(metadata, "labels")
    kind, name = _find_top_owner(controller["kind"], controller["name"], labels)
    pod = intern(metadata.get("namespace", "")), metadata["name"]
    return pod, WorkloadOwner(intern(kind), intern(name))


class PodOwnership(NamedTuple):
    owner: WorkloadOwner | None
    is_kept: bool  # savings leave it out


def parse_ownership(body: KubeObject) -> tuple[PodName, PodOwnership] | None:
    """Returns None for a pod without an owner and without the annotation for savings."""
    metadata = body["metadata"]
    owned = parse_owner(body)
    is_kept = read_map(metadata, "annotations").get(_SAVINGS) == "false"
    if owned is None and not is_kept:
        return None
    if owned is None:
        pod = intern(metadata.get("namespace", "")), metadata["name"]
        return pod, PodOwnership(None, is_kept)

    pod, owner = owned
    return pod, PodOwnership(owner, is_kept)


def _find_top_owner(kind: str, name: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """Follows the owner chain from the controller of a pod, by the labels of operators.

    A label counts only on a pod whose controller is of the kind that the operator creates, because
    users may set labels.
    """
    # Only Deployments set this label. They add its value to the names of their ReplicaSets.
    template = labels.get(_HASH_LABEL)
    if kind == "ReplicaSet" and template:
        deployment = name.removesuffix(f"-{template}")
        if deployment and deployment != name:
            return "Deployment", deployment

    for created, label, owner_kind in _OPERATOR_LABELS:
        if kind == created and labels.get(label):
            return owner_kind, labels[label]

    trained = labels.get(_TRAINING_LABEL)
    training_kind = _TRAINING_KINDS.get(labels.get(_TRAINING_OPERATOR, ""))
    if kind == "Job" and trained and training_kind:
        return training_kind, trained

    return kind, name


class ContainerPort(NamedTuple):
    container: str
    name: str
    number: int


class PodEndpoint(NamedTuple):
    """Where the metrics of a pod's containers may be read."""

    ip: str
    ports: tuple[ContainerPort, ...] = ()
    # From the annotations of Prometheus or KServe. 0 and empty if there are none.
    metrics_port: int = 0
    metrics_path: str = ""
    is_refused: bool = False  # the annotation says that the pod must not be scraped


_SCRAPE_ANNOTATIONS = ("prometheus.kserve.io", "prometheus.io")
_METRICS_PATH = re.compile(r"/[!-~]{0,200}")


def _list_ports(body: KubeObject) -> Iterator[ContainerPort]:
    """Yields the TCP ports that the containers of a Pod declare."""
    for container in read_list(read_map(body, "spec"), "containers"):
        for port in read_list(container, "ports"):
            if port.get("protocol") in (None, "TCP"):
                name = intern(port.get("name") or "")
                yield ContainerPort(intern(container["name"]), name, port["containerPort"])


def parse_endpoint(body: KubeObject) -> tuple[PodName, PodEndpoint] | None:
    """Returns (namespace, name) of a Pod and its endpoint. Returns None if it has no address."""
    metadata = body["metadata"]
    ip = read_map(body, "status").get("podIP")
    if not ip:
        return None

    annotations = read_map(metadata, "annotations")
    metrics_port = 0
    metrics_path = ""
    for prefix in _SCRAPE_ANNOTATIONS:
        port_text = annotations.get(f"{prefix}/port", "")
        path = annotations.get(f"{prefix}/path", "")
        if re.fullmatch(r"[0-9]{1,5}", port_text) and not metrics_port:
            metrics_port = int(port_text)
        if _METRICS_PATH.fullmatch(path) and not metrics_path:
            metrics_path = path

    endpoint = PodEndpoint(
        ip=ip,
        ports=tuple(_list_ports(body)),
        metrics_port=metrics_port,
        metrics_path=metrics_path,
        is_refused=annotations.get("prometheus.io/scrape", "").lower() == "false",
    )
    return (intern(metadata.get("namespace", "")), metadata["name"]), endpoint


NODES_PATH = "/api/v1/nodes"


def parse_node_labels(body: KubeObject) -> tuple[str, dict[str, str]]:
    """Returns the name of a Node and its labels. Needs only metadata."""
    return body["metadata"]["name"], read_map(body["metadata"], "labels")


_QUANTITY = re.compile(r"\+?([\d.]{1,40}(?:[eE][+-]?\d{1,2})?)([KMGTPE]i|[numkMGTPE])?", re.ASCII)
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_UNITS = {unit: Fraction(10) ** power for unit, power in _POWERS.items()}
_UNITS |= {f"{unit}i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)}


def parse_quantity(text: str) -> Fraction:
    """Parses a Kubernetes quantity: `50`, `500m`, `8Gi`, `1e3`.

    Raises ValueError if it is negative or invalid.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!a} is not a quantity")
    return Fraction(match[1]) * _UNITS.get(match[2], Fraction(1))
