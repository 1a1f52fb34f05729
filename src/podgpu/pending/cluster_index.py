"""Indexes of the API server's objects: nodes with their pods, devices, and what is free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import msgspec

from podgpu.kube.objects import is_gpu_resource
from podgpu.model import group_by
from podgpu.pending.cluster_objects import (
    MILLI,
    POD_SLOTS,
    BoundPod,
    NodeRecord,
    PendingPod,
    ResourceAmounts,
)
from podgpu.pending.device_supply import Devices, Supply
from podgpu.pending.dra_objects import ClaimRecord, DeviceClassRecord
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.quotas import HeldWorkload, Quotas


class CandidateNode:
    """A node, its pods, and what they use of it."""

    def __init__(self, node: NodeRecord, pods: Sequence[BoundPod]) -> None:
        self.node = node
        self.pods = pods
        self.used: dict[str, int] = defaultdict(int)  # thousandths, by resource
        # Fractions of GPUs. KAI gives each GPU that pods share the name of a group.
        self.used_groups: dict[str, float] = defaultdict(float)
        for pod in pods:
            self.reserve(pod.amounts)
            if pod.share is not None:
                for group in pod.groups:
                    self.used_groups[group] += pod.share.on(node)

    def reserve(self, amounts: ResourceAmounts) -> None:
        """Adds what one more pod would have. Each pod takes a pod slot, too."""
        self.used[POD_SLOTS] += MILLI
        for name, milli in amounts:
            self.used[name] += milli

    def measure(self, resource: str, needed: int = 0) -> Supply:
        """Returns what the node has of a resource. `needed`: in thousandths."""
        total = self.node.allocatable.get(resource, 0)
        free = total - self.used[resource]
        return Supply(
            needed=needed / MILLI,
            total=total / MILLI,
            free=max(0, free) / MILLI,
            fits_empty=needed <= total,
            fits=needed <= free,
        )


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

        self.claims_of: dict[str, list[ClaimRecord]] = defaultdict(list)  # by UID of a pod
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
            if claim is None:
                continue
            for alternatives in claim.spec.requests:
                for request in alternatives:
                    yield request.device_class


def _list_candidates(objects: ClusterObjects) -> list[CandidateNode]:
    """Returns all nodes by name."""
    pods = group_by(objects.bound, lambda pod: pod.node)
    candidates = []
    for node in sorted(objects.nodes, key=attrgetter("name")):
        candidates.append(CandidateNode(node, pods.get(node.name, [])))
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


class FreeGpus(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The GPUs of one resource and model on nodes that accept new pods."""

    resource: str
    model: str = ""
    total: float
    free: float
    largest: float  # free on one node
    nodes: int
    closed: float = 0.0  # free on nodes that are cordoned or not ready


def list_free(cluster: ClusterIndex) -> list[FreeGpus]:
    """Returns what nodes offer, by resource and model."""
    rows: dict[tuple[str, str], FreeGpus] = {}
    for candidate in cluster.candidates:
        node = candidate.node
        for resource, total, free in _list_offers(cluster, candidate):
            key = resource, node.model
            if key not in rows:
                rows[key] = FreeGpus(
                    resource=resource, model=node.model, total=0.0, free=0.0, largest=0.0, nodes=0
                )

            row = rows[key]
            if node.is_cordoned or any(taint.is_not_ready for taint in node.taints):
                row.closed += free
                continue

            row.total += total
            row.free += free
            row.largest = max(row.largest, free)
            row.nodes += 1

    return [rows[key] for key in sorted(rows)]


def _list_offers(
    cluster: ClusterIndex, candidate: CandidateNode
) -> Iterator[tuple[str, float, float]]:
    """Yields each resource, and how many GPUs of it a node has in total and free."""
    for name in candidate.node.allocatable:
        supply = candidate.measure(name)
        if supply.total and is_gpu_resource(name):
            yield name, supply.total, supply.free

    for driver in list_drivers(cluster, candidate.node):
        total, free = cluster.devices.count(driver, candidate.node)
        yield driver, total, free


def list_drivers(cluster: ClusterIndex, node: NodeRecord) -> set[str]:
    """Returns the drivers of the GPUs of a node (DRA)."""
    drivers = {device.driver for device in cluster.devices.list_on(node)}
    return set(filter(is_gpu_resource, drivers))
