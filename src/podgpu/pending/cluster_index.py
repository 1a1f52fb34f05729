"""Indexes of the API server's objects: nodes with their pods, devices, and what is free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from podgpu.kube.objects import is_gpu_resource
from podgpu.model import group_by
from podgpu.pending.cluster_objects import MILLI, POD_SLOTS, BoundPod, NodeRecord, PendingPod
from podgpu.pending.device_supply import Devices
from podgpu.pending.dra_objects import ClaimRecord, DeviceClassRecord
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.quotas import HeldWorkload, Quotas


@dataclass
class Usage:
    """What pods have of one node."""

    amounts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    groups: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def of(cls, node: NodeRecord, pods: Iterable[BoundPod]) -> Usage:
        usage = cls()
        for pod in pods:
            usage.add(node, pod)
        return usage

    def add(self, node: NodeRecord, pod: BoundPod) -> None:
        self.add_amounts(pod.amounts)
        if pod.share is not None:
            for group in pod.groups:
                self.groups[group] += pod.share.on(node)

    def add_amounts(self, amounts: Iterable[tuple[str, int]]) -> None:
        self.amounts[POD_SLOTS] += MILLI
        for name, milli in amounts:
            self.amounts[name] += milli

    def copy(self) -> Usage:
        other = Usage()
        other.amounts.update(self.amounts)
        other.groups.update(self.groups)
        return other


class CandidateNode(NamedTuple):
    """A node with its pods."""

    node: NodeRecord
    pods: Sequence[BoundPod]
    usage: Usage


class ClusterIndex:
    """The objects with their indexes."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.classes = {each.name: each for each in objects.classes}
        self.claims = {claim.key: claim for claim in objects.claims}
        self.devices = Devices(objects.slices, self.classes, objects.claims)
        self.extended = _find_extended(objects.classes)
        self.candidates = _list_candidates(objects)
        self.quotas = Quotas(objects.quotas, objects.local_queues, objects.workloads)

        self.offered: set[str] = set()  # resources
        for node in objects.nodes:
            self.offered.update(node.allocatable)

        preempting = [pod for pod in objects.pending if pod.is_preempting]
        self.nominated = group_by(preempting, lambda pod: pod.nominated_node)

        self.claims_of: dict[str, list[ClaimRecord]] = defaultdict(list)
        for claim in objects.claims:
            for user in claim.users:
                self.claims_of[user].append(claim)

    def find_workload(self, pod: PendingPod) -> HeldWorkload | None:
        """Returns the pod's Kueue Workload, if that still waits for its quota."""
        return self.quotas.find_workload(pod.namespace, pod.workload, (pod.uid, pod.owner_uid))

    def find_classes(self, pod: PendingPod) -> Iterator[str]:
        """Yields the device classes that the claims of a pod name."""
        for named in pod.claims:
            claim = self.claims.get((pod.namespace, named.claim))
            if claim is not None:
                for alternatives in claim.spec.requests:
                    yield from (request.device_class for request in alternatives)


def _list_candidates(objects: ClusterObjects) -> list[CandidateNode]:
    """Returns all nodes by name."""
    pods = group_by(objects.bound, lambda pod: pod.node)
    candidates = []
    for node in sorted(objects.nodes, key=attrgetter("name")):
        here = pods.get(node.name, [])
        usage = Usage.of(node, here)
        candidates.append(CandidateNode(node, here, usage))
    return candidates


def _find_extended(classes: Iterable[DeviceClassRecord]) -> dict[str, str]:
    """Returns the classes whose devices satisfy requests for an extended resource."""
    extended = {}
    for each in classes:
        extended[f"deviceclass.resource.kubernetes.io/{each.name}"] = each.name
        if each.extended_resource:
            extended[each.extended_resource] = each.name
    return extended


# Free GPUs


class FreeGpus(NamedTuple):
    """The GPUs of one resource and model on nodes that accept new pods."""

    resource: str
    model: str
    total: float
    free: float
    largest: float  # free on one node
    nodes: int
    closed: float = 0.0  # free on nodes that are cordoned or not ready


class _Offer(NamedTuple):
    """What one node has of a resource."""

    total: float
    free: float
    is_open: bool  # the node accepts new pods


def list_free(cluster: ClusterIndex) -> list[FreeGpus]:
    """Returns what nodes offer, by resource and model."""
    offers: dict[tuple[str, str], list[_Offer]] = defaultdict(list)
    for candidate in cluster.candidates:
        model = candidate.node.model
        for resource, offer in _list_offers(cluster, candidate):
            offers[resource, model].append(offer)

    rows = []
    for (resource, model), of_nodes in sorted(offers.items()):
        rows.append(_make_free(resource, model, of_nodes))

    return rows


def _list_offers(cluster: ClusterIndex, candidate: CandidateNode) -> Iterator[tuple[str, _Offer]]:
    node = candidate.node
    is_ready = not any(taint.is_not_ready for taint in node.taints)
    is_open = is_ready and not node.is_cordoned
    for name, total in node.allocatable.items():
        if total and is_gpu_resource(name):
            used = candidate.usage.amounts[name]
            free = max(0, total - used)
            yield name, _Offer(total / MILLI, free / MILLI, is_open)

    devices = count_devices(cluster, node)
    for driver, (total_devices, free_devices) in devices.items():
        yield driver, _Offer(total_devices, free_devices, is_open)


def _make_free(resource: str, model: str, offers: Sequence[_Offer]) -> FreeGpus:
    opened = [offer for offer in offers if offer.is_open]
    closed = [offer for offer in offers if not offer.is_open]

    return FreeGpus(
        resource=resource,
        model=model,
        total=sum(offer.total for offer in opened),
        free=sum(offer.free for offer in opened),
        largest=max((offer.free for offer in opened), default=0.0),
        nodes=len(opened),
        closed=sum(offer.free for offer in closed),
    )


def count_devices(cluster: ClusterIndex, node: NodeRecord) -> dict[str, tuple[float, float]]:
    """Returns all and free devices of each driver. Without drivers that are not for GPUs."""
    devices = cluster.devices.list_on(node.name, node.labels)
    drivers = {device.driver for device in devices}
    counts = {}
    for driver in filter(is_gpu_resource, drivers):
        counts[driver] = cluster.devices.count(driver, node.name, node.labels)
    return counts
