"""Reads all allocation sources, each in its own worker, and merges the results.

Holders are kept while a source does not answer, or does not list all of them after a restart. A restarted kubelet lists
no pods and reports no error, for a second or for as long as the API server is unavailable. A holder is therefore kept
for `GRACE_SECONDS`, or for as long as its container exists on the node.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import TypeVar

from msgspec import structs

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.holders import AllocationSource
from podgpu.holders.annotations import replace_reservations
from podgpu.holders.device_ids import sort_allocation
from podgpu.holders.identity import Identities
from podgpu.holders.merge import Complete, merge
from podgpu.model import Allocation, Assignment, Device, SourceStatus, VcudaRequest, Workload, parts_of
from podgpu.workers import ErrorCounts, Result, Workers

_log = logging.getLogger("podgpu")
W = TypeVar("W", bound=Workload)
GRACE_SECONDS = 60.0
"""How long a holder is kept after it was last listed, if it is unknown whether its container runs."""
DEADLINE = 5.0  # seconds per reading; a slower source is not called again until it answers, and its late answer is used


@dataclass(frozen=True)
class HolderSources:
    """Allocation sources in order of precedence, and functions that read identities and running containers."""

    sources: Sequence[AllocationSource] = ()
    read_identities: Callable[[], Identities] = Identities
    read_containers: Callable[[], Collection[Workload] | None] = lambda: None  # None if processes are not visible


@dataclass(frozen=True, slots=True)
class AllocationResult:
    """The merged allocation, and the status of the sources."""

    allocation: Allocation = field(default_factory=Allocation)
    sources: tuple[SourceStatus, ...] = ()
    api_uids: Mapping[str, str] = field(default_factory=dict)  # static pods: kubelet's UID -> API server's UID
    at: float | None = None  # Unix time

    def with_api_uid(self, workload: W) -> W:
        """Replaces the UID of a static pod by that of the API server, if known."""
        uid = self.api_uids.get(workload.uid)
        return workload if uid is None else structs.replace(workload, uid=uid)


_resource_key = attrgetter("device", "replica", "attributes")  # attributes distinguish DRA claims on one device
IsAlive = Callable[[Workload], bool | None]
"""Returns whether a container runs, or None if unknown."""


@dataclass(slots=True)
class CachedHolder:
    listed_at: float
    source_instance: int
    identity: Workload  # the holder with its uid and container id, as known when it was last listed
    items: list[Assignment | VcudaRequest] = field(default_factory=list)

    @property
    def assignments(self) -> list[Assignment]:
        return [item for item in self.items if isinstance(item, Assignment)]

    def is_kept(self, now: float, is_alive: IsAlive) -> bool:
        if self.listed_at == now:
            return True
        alive = is_alive(self.identity)
        return now - self.listed_at <= GRACE_SECONDS if alive is None else alive


class AllocationCache:
    """The last known holders of one source."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._answer: Allocation | None = None
        self._answered_at = float("-inf")
        self._holders: dict[Workload, CachedHolder] = {}

    def update(self, answer: Allocation | None, now: float, complete: Complete, is_alive: IsAlive) -> Allocation | None:
        """Returns the current allocation, or None if the source has not answered for too long.

        `answer` is None if the source did not answer. Holders that the same source instance listed earlier and no
        longer lists are removed at once.
        """
        if answer is not None:
            listed = _group_by_holder(answer, now, complete)
            missing = self._find_missing(answer, listed)
            count = sum(holder.listed_at == self._answered_at for holder in missing.values())
            if count:
                _log.info(
                    "%s restarted and no longer lists %d GPU containers; keeping them for %.0f s, or longer while their"
                    " processes or logs exist",
                    *(self._name, count, GRACE_SECONDS),
                )
            self._answer, self._answered_at = answer, now
            self._holders = listed | missing
            if not missing:
                return answer
        self._holders = {name: holder for name, holder in self._holders.items() if holder.is_kept(now, is_alive)}
        is_recent = now - self._answered_at <= GRACE_SECONDS
        if self._answer is None or not (self._holders or is_recent):
            return None
        assignments = (item for holder in self._holders.values() for item in holder.assignments)
        items = (item for holder in self._holders.values() for item in holder.items)
        vcuda = tuple(item for item in items if isinstance(item, VcudaRequest))
        last = self._answer if is_recent else Allocation()
        return replace(sort_allocation(assignments, last.unmapped), vcuda=vcuda, offered=last.offered)

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


def _group_by_holder(answer: Allocation, now: float, complete: Complete) -> dict[Workload, CachedHolder]:
    holders: dict[Workload, CachedHolder] = {}
    items: tuple[Assignment | VcudaRequest, ...] = (*answer.assignments, *answer.vcuda)
    for item in items:
        workload = item.holder if isinstance(item, Assignment) else Workload(*parts_of(item))
        if workload not in holders:
            identity = workload
            with suppress(SourceError):  # contradictory identities
                identity = complete(workload)
            holders[workload] = CachedHolder(now, answer.source_instance, identity)
        holders[workload].items.append(item)
    return holders


class AllocationReader:
    def __init__(
        self,
        holders: HolderSources,
        workers: Workers,
        errors: ErrorCounts,
        clock: Clock,
        on_late: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_late` is called in another thread if a source answers late. The next reading uses that answer."""
        self.sources = holders.sources
        self._holders = holders
        self._workers = workers
        self._errors = errors
        self._clock = clock
        self._on_late = on_late
        self._caches = {source.name: AllocationCache(source.name) for source in self.sources}
        self._identities = Identities()
        self._identities_result: Result[Identities] | None = None
        self._identities_status: tuple[SourceStatus, ...] = ()

    def complete(self, workload: Workload) -> Workload:
        """Adds the names and UIDs of the last reading. Raises SourceError if they contradict each other."""
        return self._identities.complete(workload)

    def read_identities(self) -> None:
        """Reads names and UIDs again. Thread-safe: of two concurrent calls, only one reads."""
        result = self._workers.run({"identities": self._holders.read_identities}, DEADLINE)["identities"]
        if result.value is not None:
            self._identities = result.value
        if getattr(result.error, "reason", "") != "hung":  # "hung" only means that another thread is already reading
            self._identities_result = result

    def read(self, devices: Sequence[Device]) -> AllocationResult:
        jobs = {source.name: partial(source.assignments, devices) for source in self.sources}
        results = self._workers.run(jobs, DEADLINE, self._on_late)
        at = self._clock.wall()
        self.read_identities()
        statuses = [self._errors.make_status(name, result) for name, result in results.items()]
        readings = replace_reservations(self._resolve(results), self._identities.pods, devices, self.complete)
        merged = merge(readings, self.complete)
        if not devices:  # without devices, every id would be reported as unknown
            merged = replace(merged, unmapped=tuple(u for u in merged.unmapped if u.reason != "unknown_device"))
        return AllocationResult(merged, (*statuses, *self._check_identities()), self._identities.api_uids, at)

    def _check_identities(self) -> tuple[SourceStatus, ...]:
        """Returns the status of the identities only if a reading has failed since the start."""
        if self._identities_result is not None:
            problem = next((error for error in self._identities.problems if error.reason != "file_missing"), None)
            result = replace(self._identities_result, error=self._identities_result.error or problem)
            if result.error is not None or self._identities_status:
                self._identities_status = (self._errors.make_status("identities", result),)
        return self._identities_status

    def _resolve(self, results: dict[str, Result[Allocation]]) -> dict[str, Allocation]:
        @cache  # read at most once per turn, and only if a holder is missing
        def read_containers() -> Collection[Workload]:
            return self._workers.run({"containers": self._holders.read_containers}, DEADLINE)["containers"].value or ()

        def is_alive(workload: Workload) -> bool | None:
            return self._identities.is_alive(workload, read_containers())

        now = self._clock.monotonic()
        resolved = {
            name: self._caches[name].update(result.value, now, self.complete, is_alive)
            for name, result in results.items()
        }
        return {name: allocation for name, allocation in resolved.items() if allocation is not None}
