"""All objects of the API server that explain why pods are pending."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from podgpu.known import select_known
from podgpu.pending.cluster_objects import BoundPod, NodeRecord, PendingPod, PodState
from podgpu.pending.dra_objects import ClaimRecord, DeviceClassRecord, SliceRecord
from podgpu.pending.quotas import HeldWorkload, LocalQueue, QuotaHolder


@dataclass(frozen=True, slots=True)
class ClusterObjects:
    """A snapshot of the objects that explain why pods are pending."""

    pods: Sequence[PodState] = ()
    nodes: Sequence[NodeRecord] = ()
    claims: Sequence[ClaimRecord] = ()
    classes: Sequence[DeviceClassRecord] = ()
    slices: Sequence[SliceRecord] = ()
    quotas: Sequence[QuotaHolder] = ()
    local_queues: Sequence[LocalQueue] = ()
    workloads: Sequence[HeldWorkload] = ()

    @property
    def pending(self) -> Iterable[PendingPod]:
        return select_known(state.pending for state in self.pods)

    @property
    def bound(self) -> Iterable[BoundPod]:
        return select_known(state.bound for state in self.pods)
