"""Keeps holders while a source does not answer, or does not list all of them after a restart.

A restarted kubelet lists no pods and reports no error, for a second or for as long as the API server is unavailable. A
holder is therefore kept for `GRACE_SECONDS`, or for as long as its container exists on the node.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from podgpu.errors import SourceError
from podgpu.holders.device_ids import sort_allocation
from podgpu.holders.merge import Complete
from podgpu.model import Allocation, Assignment, VcudaRequest, Workload, parts_of

GRACE_SECONDS = 60.0
"""How long a holder is kept after it was last listed, if it is unknown whether its container runs."""

IsAlive = Callable[[Workload], bool | None]
"""Returns True if the container runs, False if it is gone, None if unknown."""


def unknown_liveness(_workload: Workload) -> None:
    """Returns None. Used if neither processes nor logs are visible."""


@dataclass(slots=True)
class CachedHolder:
    listed_at: float
    source_instance: int
    identity: Workload  # the holder with its uid and container id, as known when it was last listed
    assignments: list[Assignment] = field(default_factory=list)
    vcuda: list[VcudaRequest] = field(default_factory=list)


class AllocationCache:
    """The last known holders of one source."""

    def __init__(self) -> None:
        self._answer: Allocation | None = None
        self._answered_at = float("-inf")
        self._holders: dict[Workload, CachedHolder] = {}
        self.needs_liveness = False  # True if `resolve` needs `is_alive`

    def update(self, answer: Allocation | None, now: float, complete: Complete) -> int:
        """Records the source's answer, or None if it did not answer.

        Removes holders that the same source instance listed earlier and no longer lists. If the source has just
        restarted, returns the number of holders that it does not list any more.
        """
        if answer is None:
            self.needs_liveness = bool(self._holders)
            return 0
        restarted = self._answer is not None and answer.source_instance != self._answer.source_instance
        listed = _group_by_holder(answer, now, complete)
        missing = self._find_missing(answer, listed)
        newly_missing = sum(holder.listed_at == self._answered_at for holder in missing.values()) if restarted else 0
        self._answer, self._answered_at = answer, now
        self._holders = listed | missing
        self.needs_liveness = bool(missing)
        return newly_missing

    def _find_missing(self, answer: Allocation, listed: Collection[Workload]) -> dict[Workload, CachedHolder]:
        """Finds holders that only an earlier source instance listed, and whose devices have no new holder."""
        earlier = {
            workload: holder
            for workload, holder in self._holders.items()
            if holder.source_instance != answer.source_instance
        }
        counts = Counter(_resource_key(item) for holder in earlier.values() for item in holder.assignments)
        reassigned = {key for item in answer.assignments if counts[key := _resource_key(item)] == 1}
        return {
            workload: holder
            for workload, holder in earlier.items()
            if workload not in listed and reassigned.isdisjoint(map(_resource_key, holder.assignments))
        }

    def resolve(self, now: float, is_alive: IsAlive) -> Allocation | None:
        """Returns the current allocation, or None if the source has not answered for too long."""
        is_recent = now - self._answered_at <= GRACE_SECONDS
        if not self.needs_liveness:
            return self._answer if is_recent else None
        self._holders = {
            workload: holder for workload, holder in self._holders.items() if self._is_kept(holder, now, is_alive)
        }
        if self._answer is None or not (self._holders or is_recent):
            return None
        assignments = (item for holder in self._holders.values() for item in holder.assignments)
        vcuda = tuple(item for holder in self._holders.values() for item in holder.vcuda)
        answer = self._answer if is_recent else Allocation()
        return replace(sort_allocation(assignments, answer.unmapped), vcuda=vcuda, offered=answer.offered)

    def _is_kept(self, holder: CachedHolder, now: float, is_alive: IsAlive) -> bool:
        if holder.listed_at == now:
            return True
        alive = is_alive(holder.identity)
        return now - holder.listed_at <= GRACE_SECONDS if alive is None else alive


def _group_by_holder(answer: Allocation, now: float, complete: Complete) -> dict[Workload, CachedHolder]:
    holders: dict[Workload, CachedHolder] = {}

    def find(workload: Workload) -> CachedHolder:
        if workload not in holders:
            identity = workload
            with suppress(SourceError):  # contradictory identities
                identity = complete(workload)
            holders[workload] = CachedHolder(now, answer.source_instance, identity)
        return holders[workload]

    for assignment in answer.assignments:
        find(assignment.holder).assignments.append(assignment)
    for request in answer.vcuda:
        find(Workload(*parts_of(request))).vcuda.append(request)
    return holders


def _resource_key(assignment: Assignment) -> tuple[str, ...]:
    """Returns device, replica and attributes. The attributes distinguish DRA claims on one device."""
    return assignment.device, assignment.replica, *(text for pair in assignment.attributes for text in pair)


_MAX_FILE_NAME = 255


class LivenessProbe:
    """Checks whether containers run, based on the node's processes and log files."""

    def __init__(
        self,
        pods_dir: str,
        containers_dir: str,
        read_containers: Callable[[], Collection[Workload] | None] = lambda: None,
    ) -> None:
        """`read_containers` returns the containers of all processes, or None if processes are not visible."""
        self._pods_dir = pods_dir
        self._containers_dir = containers_dir
        self._read_containers = read_containers

    def read(self) -> IsAlive:
        containers = self._read_containers() or ()
        uids = {workload.uid for workload in containers} - {""}
        container_ids = {workload.container_id for workload in containers} - {""}
        directories = [directory for directory in (self._pods_dir, self._containers_dir) if _has_entries(directory)]

        def is_alive(workload: Workload) -> bool | None:
            logs = [path for path in self._log_paths(workload) if os.path.dirname(path) in directories]
            # The kubelet removes a pod's logs some time after the pod.
            if not all(map(os.path.lexists, logs)):
                return False
            if not uids:  # processes are not visible
                return True if logs else None
            if workload.container_id in container_ids:
                return True
            if workload.uid and workload.uid not in uids:
                return False
            # With a known container id, the pod runs but this container does not: it has ended or will restart.
            return True if workload.uid and not workload.container_id else None

        return is_alive

    def _log_paths(self, workload: Workload) -> Iterator[str]:
        if workload.uid:
            yield os.path.join(self._pods_dir, f"{workload.namespace}_{workload.pod}_{workload.uid}")
        if workload.container_id:
            name = f"{workload.pod}_{workload.namespace}_{workload.container}-{workload.container_id}.log"
            if len(os.fsencode(name)) <= _MAX_FILE_NAME:  # the kubelet truncates longer names
                yield os.path.join(self._containers_dir, name)


def _has_entries(directory: str) -> bool:
    """Returns False for an empty directory: it cannot be the host's, which contains at least podgpu's own pod."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except (OSError, ValueError):
        return False
