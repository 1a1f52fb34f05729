"""Finds processes that hold memory of a GPU, although no workload that may use the GPU exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from podgpu.model import Allocation, DeviceUsage, Orphan, ProcessUsage
from podgpu.node.holders import kubelet_answers
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
        """Returns the orphans by device key, from a while after they were first seen.

        `now`: Unix time.
        """
        # Replaces `_since`, so that processes that are no orphans any more are dropped.
        since: dict[_Key, float] = {}
        orphans: dict[str, list[Orphan]] = {}
        for process in _list_processes(usages):
            owner = owners.get(process.pid, NOT_IN_POD)
            if not process.memory or not _is_orphan(process, owner, allocation):
                continue

            key = process.device, process.pid
            # The wall clock may have been set back.
            since[key] = min(now, self._since.get(key, now))
            if now - since[key] >= ORPHAN_SECONDS:
                orphan = Orphan(
                    pid=process.pid,
                    memory_used_bytes=process.memory,
                    since=since[key],
                    program=self._read_program(process.pid),
                    is_gone=owner.has_ended,
                    former=owner.workload,
                )
                orphans.setdefault(process.device, []).append(orphan)

        self._since = since
        return {device: tuple(listed[:_MAX_ORPHANS]) for device, listed in orphans.items()}


def _list_processes(usages: Iterable[DeviceUsage]) -> Iterator[ProcessUsage]:
    for usage in usages:
        yield from usage.processes or ()


def _is_orphan(process: ProcessUsage, owner: ProcessOwner, allocation: Allocation) -> bool:
    if owner.problem or owner.is_mps_server:
        return False
    if owner.has_ended:
        return True
    if not kubelet_answers(allocation):
        # All pods and allocations are unknown.
        return False

    workload = owner.workload
    if workload is None:
        # a process of the host, or of a container outside Kubernetes
        return _is_free(process.device, allocation)
    # A kubelet that lists no pod has just started.
    if not allocation.listed_pods or not workload.pod:
        return False
    return workload.pod_name not in allocation.listed_pods


def _is_free(device: str, allocation: Allocation) -> bool:
    """Returns True if it is certain that no workload holds the device."""
    # A holder that cannot be mapped may hold it.
    if allocation.unmapped:
        return False
    return all(assignment.device != device for assignment in allocation.assignments)
