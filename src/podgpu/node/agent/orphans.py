"""Finds processes that hold memory of a GPU, although no workload that may use the GPU exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from podgpu.model import Allocation, DeviceUsage, Orphan, ProcessUsage
from podgpu.node.holders import KUBELET
from podgpu.node.usage.containers import NOT_IN_POD, ProcessOwner

# A process may need some time to exit, and the kubelet to list a new pod.
ORPHAN_SECONDS = 60.0
_MAX_ORPHANS = 64  # per device

_Key = tuple[str, int]  # device key and pid


@dataclass(eq=False)
class OrphanWatch:
    """Not thread-safe."""

    _read_program: Callable[[int], str]
    _since: dict[_Key, float] = field(default_factory=dict)  # Unix times

    def find(
        self,
        usages: Iterable[DeviceUsage],
        owners: Mapping[int, ProcessOwner],
        allocation: Allocation,
        now: float,
    ) -> dict[str, tuple[Orphan, ...]]:
        """Returns the orphans by device key. `now`: Unix time."""
        allocated = {assignment.device for assignment in allocation.assignments}
        allocated |= allocation.reserved
        has_kubelet = any(each.name == KUBELET and each.up for each in allocation.sources)
        pods = allocation.listed_pods if has_kubelet else None
        # If an allocation cannot be mapped, no GPU is known to be free.
        knows_free = has_kubelet and not allocation.unmapped

        since: dict[_Key, float] = {}
        orphans: dict[str, list[Orphan]] = {}
        for usage in usages:
            for process in usage.processes or ():
                owner = owners.get(process.pid, NOT_IN_POD)
                is_free = knows_free and process.device not in allocated
                if not process.memory or not _is_orphan(owner, pods, is_free):
                    continue

                key = process.device, process.pid
                since[key] = min(now, self._since.get(key, now))
                if now - since[key] >= ORPHAN_SECONDS:
                    orphan = self._make_orphan(process, owner, since[key])
                    orphans.setdefault(process.device, []).append(orphan)

        self._since = since
        return {device: tuple(found[:_MAX_ORPHANS]) for device, found in orphans.items()}

    def _make_orphan(self, process: ProcessUsage, owner: ProcessOwner, since: float) -> Orphan:
        return Orphan(
            pid=process.pid,
            memory_used_bytes=process.memory or 0,
            since=since,
            program=self._read_program(process.pid),
            is_gone=owner.has_ended,
            former=owner.workload,
        )


def _is_orphan(owner: ProcessOwner, pods: frozenset[tuple[str, str]] | None, is_free: bool) -> bool:
    """`pods`: all pods of the node, or None if they are unknown. `is_free`: no workload holds the
    GPU.
    """
    if owner.problem or owner.is_mps_server:
        return False
    if owner.has_ended:
        return True

    workload = owner.workload
    if workload is None:
        # a process of the host, or of a container outside Kubernetes
        return is_free
    # A kubelet that lists no pod has just started.
    if not pods or not workload.pod:
        return False
    return workload.pod_name not in pods
