"""Reads all allocation sources, each in its own worker, and merges the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from msgspec import structs

from podgpu.clock import Clock
from podgpu.holders import AllocationSource
from podgpu.holders.cache import GRACE_SECONDS, AllocationCache, IsAlive, unknown_liveness
from podgpu.holders.identity import Identities
from podgpu.holders.merge import merge
from podgpu.holders.reservations import replace_reservations
from podgpu.model import Allocation, Device, SourceStatus, Workload
from podgpu.workers import ErrorCounts, Result, Workers

_log = logging.getLogger("podgpu")
W = TypeVar("W", bound=Workload)
DEADLINE = 5.0  # seconds per reading; a slower source is not called again until it answers, and its late answer is used


@dataclass(frozen=True)
class HolderSources:
    """Allocation sources in order of precedence, and functions that read identities and liveness of containers.

    Liveness is read while a source does not answer or has just restarted.
    """

    sources: Sequence[AllocationSource] = ()
    read_identities: Callable[[], Identities] = Identities
    read_liveness: Callable[[], IsAlive] = lambda: unknown_liveness


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


class AllocationReader:
    def __init__(
        self,
        holders: HolderSources,
        workers: Workers,
        errors: ErrorCounts,
        clock: Clock,
        on_late: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_late` is called in another thread if a source answers after its deadline. The next reading uses it."""
        self.sources = holders.sources
        self._holders = holders
        self._workers = workers
        self._errors = errors
        self._clock = clock
        self._on_late = on_late
        self._caches = {source.name: AllocationCache() for source in self.sources}
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
        now = self._clock.monotonic()
        for name, result in results.items():
            missing = self._caches[name].update(result.value, now, self.complete)
            if missing:
                _log.info(
                    "%s restarted and no longer lists %d GPU containers; keeping them for %.0f s, or longer while their"
                    " processes or logs exist",
                    *(name, missing, GRACE_SECONDS),
                )
        is_alive: IsAlive = unknown_liveness
        if any(cache.needs_liveness for cache in self._caches.values()):
            is_alive = (
                self._workers.run({"liveness": self._holders.read_liveness}, DEADLINE)["liveness"].value or is_alive
            )
        resolved = {name: self._caches[name].resolve(now, is_alive) for name in results}
        return {name: allocation for name, allocation in resolved.items() if allocation is not None}

    def close(self) -> None:
        for source in self.sources:
            source.close()
