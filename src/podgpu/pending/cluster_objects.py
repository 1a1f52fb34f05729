"""Reduces Pods and Nodes to what decides where a pod fits.

Amounts are integers in thousandths, so that sums are exact: 1000 is one GPU, one core or one byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from podgpu.kube.objects import (
    GPU_FRACTION,
    GPU_FRACTION_COUNT,
    GPU_GROUP,
    GPU_MEMORY,
    KubeObject,
    find_controller,
    is_gpu_resource,
    parse_owner,
    parse_quantity,
    read_list,
    read_map,
)
from podgpu.model import PodName, WorkloadOwner
from podgpu.pending.selectors import (
    NAME_FIELD,
    NodeSelector,
    Taint,
    Toleration,
    parse_pod_selectors,
    parse_taints,
    parse_tolerations,
)

MILLI = 1000
POD_SLOTS = "pods"
MODEL_LABEL = "nvidia.com/gpu.product"
_MEMORY_LABEL = "nvidia.com/gpu.memory"  # MiB
DEFAULT_SCHEDULER = "default-scheduler"
_MAX_MESSAGE = 600
ResourceAmounts = tuple[tuple[str, int], ...]
"""Resource and thousandths of its unit."""


@lru_cache(maxsize=8192)
def parse_milli(text: str) -> int:
    """Rounds up, as the scheduler does."""
    return math.ceil(parse_quantity(text) * MILLI)


# Nodes


@dataclass(frozen=True, slots=True)
class NodeRecord:
    name: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    allocatable: Mapping[str, int] = field(default_factory=dict, hash=False)
    capacity: Mapping[str, int] = field(default_factory=dict, hash=False)
    taints: tuple[Taint, ...] = ()
    is_cordoned: bool = False

    @property
    def model(self) -> str:
        return self.labels.get(MODEL_LABEL, "")

    @property
    def gpu_memory_mib(self) -> int:
        """Memory of one GPU as KAI computes with it: rounded down to a multiple of 100 MiB."""
        text = self.labels.get(_MEMORY_LABEL, "")
        if not text.isascii() or not text.isdecimal():
            return 0
        return int(text) // 100 * 100

    def count_unhealthy(self, resource: str) -> float:
        """Returns how many devices a device plugin reports as unhealthy.

        Only for resources of device plugins. Of CPU and memory, this is what is reserved for the
        system.
        """
        unusable = self.capacity.get(resource, 0) - self.allocatable.get(resource, 0)
        return max(0, unusable) / MILLI


def parse_node(body: KubeObject) -> NodeRecord:
    metadata = body["metadata"]
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    name = intern(metadata["name"])

    return NodeRecord(
        name=name,
        labels={**read_map(metadata, "labels"), NAME_FIELD: name},
        allocatable=_parse_amounts(read_map(status, "allocatable")),
        capacity=_parse_amounts(read_map(status, "capacity")),
        taints=parse_taints(read_list(spec, "taints")),
        is_cordoned=bool(spec.get("unschedulable")),
    )


def _parse_amounts(quantities: Mapping[str, object]) -> dict[str, int]:
    return {intern(name): parse_milli(str(text)) for name, text in quantities.items()}


# Pods


class GpuShare(NamedTuple):
    """A fraction of a GPU that a pod requests by annotations (KAI Scheduler, Run:ai)."""

    fraction: float = 0.0
    memory_mib: int = 0
    devices: int = 1

    def on(self, node: NodeRecord) -> float:
        """Returns the fraction of each GPU. Infinite if the size of the GPU is unknown."""
        if self.fraction:
            return self.fraction
        whole = node.gpu_memory_mib
        if not whole:
            return math.inf
        percent = math.ceil(100 * self.memory_mib / whole)
        return percent / 100


class PodClaim(NamedTuple):
    """`claim` is empty until the claim has been created from the template."""

    claim: str
    template: str = ""


@dataclass(frozen=True, slots=True)
class PodNeeds:
    """What a pod needs. Equal for the pods of one job, so that it is explained once."""

    amounts: ResourceAmounts = ()
    share: GpuShare | None = None
    selectors: tuple[NodeSelector, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    priority: int = 0
    never_preempts: bool = False
    scheduler: str = DEFAULT_SCHEDULER
    # Constraints that podgpu does not check: keys of `reasons.UNCHECKED`.
    unchecked: tuple[str, ...] = ()

    @property
    def gpu_amounts(self) -> ResourceAmounts:
        return tuple(pair for pair in self.amounts if is_gpu_resource(pair[0]))

    @property
    def other_amounts(self) -> ResourceAmounts:
        return tuple(pair for pair in self.amounts if not is_gpu_resource(pair[0]))


@dataclass(frozen=True, slots=True)
class PendingPod:
    namespace: str
    name: str
    uid: str
    created: float  # Unix time
    needs: PodNeeds = PodNeeds()
    owner: WorkloadOwner | None = None
    owner_uid: str = ""
    claims: tuple[PodClaim, ...] = ()
    gates: tuple[str, ...] = ()
    nominated_node: str = ""
    is_seen: bool = False  # a scheduler has written the pod's condition PodScheduled
    message: str = ""  # of this condition
    node: str = ""  # set if it is bound and has not started
    waiting: tuple[str, ...] = ()  # reasons why containers of a bound pod have not started
    workload: str = ""  # name of its Kueue Workload, if a label has it
    kai_queue: str = ""
    # Set if it stands for pods that may not exist yet: their Workload, Job, ReplicaSet or
    # StatefulSet.
    kind: str = ""
    count: int = 1  # number of these pods

    @property
    def key(self) -> PodName:
        return self.namespace, self.name

    @property
    def is_preempting(self) -> bool:
        """Returns True if pods are being ended on a node to make room for it."""
        return bool(self.nominated_node) and not self.node


@dataclass(frozen=True, slots=True)
class BoundPod:
    """A pod that has resources of a node."""

    namespace: str
    name: str
    uid: str
    node: str
    amounts: ResourceAmounts = ()
    priority: int = 0
    is_ending: bool = False
    share: GpuShare | None = None
    groups: tuple[str, ...] = ()  # of GPUs that it shares (KAI)

    @property
    def key(self) -> PodName:
        return self.namespace, self.name


class PodState(NamedTuple):
    """A pod that is not finished. A pod that is bound and has not started is in both fields."""

    pending: PendingPod | None
    bound: BoundPod | None


def parse_pod_state(body: KubeObject) -> PodState | None:
    """Returns None for finished pods."""
    metadata = body["metadata"]
    spec = read_map(body, "spec")
    status = read_map(body, "status")
    if status.get("phase") in ("Succeeded", "Failed"):
        return None

    node = intern(spec.get("nodeName") or "")
    needs = parse_needs(metadata, spec)
    bound = None
    if node:
        bound = BoundPod(
            namespace=intern(metadata["namespace"]),
            name=metadata["name"],
            uid=metadata["uid"],
            node=node,
            amounts=needs.amounts,
            priority=needs.priority,
            is_ending=bool(metadata.get("deletionTimestamp")),
            share=needs.share,
            groups=_parse_groups(read_map(metadata, "labels")),
        )

    pending = None
    if status.get("phase") == "Pending" and not metadata.get("deletionTimestamp"):
        pending = _parse_pending(metadata, spec, status, needs)

    return PodState(pending, bound)


def _parse_pending(
    metadata: KubeObject, spec: KubeObject, status: KubeObject, needs: PodNeeds
) -> PendingPod:
    scheduled: KubeObject = {}
    for condition in read_list(status, "conditions"):
        if condition.get("type") == "PodScheduled":
            scheduled = condition

    gates = [gate["name"] for gate in read_list(spec, "schedulingGates")]
    waiting = sorted(_list_waiting(status))
    labels = read_map(metadata, "labels")
    controller = find_controller(metadata)

    return replace(
        make_pod(metadata, needs, scheduled.get("message") or ""),
        owner_uid=controller["uid"] if controller else "",
        claims=tuple(_parse_claims(spec, status)),
        gates=tuple(gates),
        nominated_node=intern(status.get("nominatedNodeName") or ""),
        is_seen=bool(scheduled),
        node=intern(spec.get("nodeName") or ""),
        waiting=tuple(waiting),
        workload=labels.get("kueue.x-k8s.io/pod-group-name", ""),
        kai_queue=labels.get("kai.scheduler/queue") or labels.get("runai/queue", ""),
    )


def make_pod(metadata: KubeObject, needs: PodNeeds, message: str) -> PendingPod:
    """Returns a pod, or an object that stands for pods, with what its metadata say."""
    owner = None
    owned = parse_owner({"metadata": metadata})
    if owned is not None:
        _, owner = owned

    return PendingPod(
        namespace=intern(metadata["namespace"]),
        name=metadata["name"],
        uid=metadata["uid"],
        created=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
        needs=needs,
        owner=owner,
        message=" ".join(message.split())[:_MAX_MESSAGE],
    )


def _list_waiting(status: KubeObject) -> set[str]:
    reasons = set()
    for kind in ("initContainerStatuses", "containerStatuses"):
        for each in read_list(status, kind):
            reason = read_map(read_map(each, "state"), "waiting").get("reason")
            if reason:
                reasons.add(intern(reason))
    return reasons


def _parse_claims(spec: KubeObject, status: KubeObject) -> Iterator[PodClaim]:
    created = {}
    for entry in read_list(status, "resourceClaimStatuses"):
        created[entry["name"]] = entry.get("resourceClaimName") or ""

    for entry in read_list(spec, "resourceClaims"):
        template = entry.get("resourceClaimTemplateName") or ""
        claim = entry.get("resourceClaimName") or created.get(entry["name"])
        # None: it has not been created yet. Empty: the pod needs no claim.
        if claim == "":
            continue
        yield PodClaim(claim or "", template)


# What a pod needs


def parse_needs(metadata: KubeObject, spec: KubeObject) -> PodNeeds:
    amounts = _sum_requests(spec)
    tolerations = read_list(spec, "tolerations")
    annotations = read_map(metadata, "annotations")
    scheduler = spec.get("schedulerName") or DEFAULT_SCHEDULER

    return PodNeeds(
        amounts=tuple(sorted(amounts.items())),
        share=_parse_share(annotations),
        selectors=parse_pod_selectors(spec),
        tolerations=parse_tolerations(tolerations),
        priority=spec.get("priority") or 0,
        never_preempts=spec.get("preemptionPolicy") == "Never",
        scheduler=intern(scheduler),
        unchecked=tuple(dict.fromkeys(_list_unchecked(spec))),
    )


def _sum_requests(spec: KubeObject) -> dict[str, int]:
    """Returns what the scheduler reserves: containers together, or an init container if larger."""
    total: dict[str, int] = {}
    for container in read_list(spec, "containers"):
        _add(total, _read_requests(container))

    sidecars: dict[str, int] = {}
    largest: dict[str, int] = {}
    for container in read_list(spec, "initContainers"):
        requests = _read_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, requests)
            continue

        # It runs beside the sidecars that were started before it.
        _add(requests, sidecars)
        for name, milli in requests.items():
            largest[name] = max(milli, largest.get(name, 0))

    _add(total, sidecars)
    for name, milli in largest.items():
        total[name] = max(milli, total.get(name, 0))

    # Requests of the pod as a whole replace those of its containers.
    total |= _read_requests(spec)
    _add(total, _parse_amounts(read_map(spec, "overhead")))
    return {name: milli for name, milli in total.items() if milli}


def _read_requests(container: KubeObject) -> dict[str, int]:
    resources = read_map(container, "resources")
    return _parse_amounts(read_map(resources, "limits") | read_map(resources, "requests"))


def _add(total: dict[str, int], amounts: Mapping[str, int]) -> None:
    for name, milli in amounts.items():
        total[name] = total.get(name, 0) + milli


def _parse_share(annotations: Mapping[str, str]) -> GpuShare | None:
    try:
        fraction = float(parse_quantity(annotations.get(GPU_FRACTION, "0")))
        memory = int(annotations.get(GPU_MEMORY, "0"))
        devices = int(annotations.get(GPU_FRACTION_COUNT, "1"))
    except ValueError:
        return None

    if fraction <= 0 and memory <= 0:
        return None

    return GpuShare(fraction, max(0, memory), max(1, devices))


def _parse_groups(labels: Mapping[str, str]) -> tuple[str, ...]:
    groups = set()
    for label, group in labels.items():
        if label.partition("/")[0] == GPU_GROUP:
            groups.add(group)
    return tuple(sorted(groups))


def _list_unchecked(spec: KubeObject) -> Iterator[str]:
    """Yields keys of `reasons.UNCHECKED`, with repetitions."""
    affinity = read_map(spec, "affinity")
    for kind in ("podAffinity", "podAntiAffinity"):
        if read_list(read_map(affinity, kind), "requiredDuringSchedulingIgnoredDuringExecution"):
            yield "pod_affinity"

    for constraint in read_list(spec, "topologySpreadConstraints"):
        if constraint.get("whenUnsatisfiable") != "ScheduleAnyway":
            yield "topology_spread"

    for volume in read_list(spec, "volumes"):
        if "persistentVolumeClaim" in volume or "ephemeral" in volume:
            yield "volumes"

    for container in read_list(spec, "containers"):
        for port in read_list(container, "ports"):
            if port.get("hostPort"):
                yield "host_ports"

    # Since Kubernetes 1.36; in 1.35, the field was workloadRef.
    if spec.get("schedulingGroup") or spec.get("workloadRef"):
        yield "gang"
