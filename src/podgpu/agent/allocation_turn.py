"""One turn of the allocation loop: reads all allocation sources, each in its own worker, and merges the results."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import structs

from podgpu.clock import Clock
from podgpu.holders import AllocationSource
from podgpu.holders.cache import GRACE_SECONDS, AllocationCache, IsAlive, unknown_liveness
from podgpu.holders.identity import Identities
from podgpu.holders.merge import Complete, merge
from podgpu.holders.reservations import find_reserved, replace_reservations
from podgpu.model import Allocation, Assignment, Device, SourceStatus, Unmapped, VcudaRequest
from podgpu.workers import Result, Workers

_log = logging.getLogger("podgpu")
DEADLINE = 5.0  # seconds per turn; a slower source is not called again until it answers, and its late answer is used

ReadIdentities = Callable[[], Identities]
ReadLiveness = Callable[[], IsAlive]


@dataclass(frozen=True, slots=True)
class AllocationPart:
    """Result of an allocation turn."""

    assignments: tuple[Assignment, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    vcuda: tuple[VcudaRequest, ...] = ()
    offered: frozenset[str] = frozenset()  # UUIDs of allocatable GPUs, held or not
    reserved: frozenset[str] = frozenset()  # keys of devices that a scheduler reserved for unknown pods
    api_uids: Mapping[str, str] = field(default_factory=dict)  # static pods: kubelet's UID -> API server's UID
    sources: tuple[SourceStatus, ...] = ()
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)  # counts since start, by source and reason
    at: float | None = None  # Unix time


def replace_uids(assignments: Iterable[Assignment], api_uids: Mapping[str, str]) -> tuple[Assignment, ...]:
    """Replaces the UIDs of static pods by those of the API server, where known."""
    return tuple(
        replace(a, holder=structs.replace(a.holder, uid=api_uids[a.holder.uid])) if a.holder.uid in api_uids else a
        for a in assignments
    )


class AllocationTurn:
    def __init__(
        self,
        sources: Sequence[AllocationSource],
        identities: ReadIdentities | None,
        workers: Workers,
        deadline: float,
        clock: Clock,
        liveness: ReadLiveness | None = None,
        late: Callable[[], object] = lambda: None,
    ) -> None:
        """`sources` are in order of precedence.

        `late` is called in another thread if a source answers after the turn has ended. The next turn uses the answer.
        """
        self._sources = sources
        self._identities = identities
        self._workers = workers
        self._deadline = deadline
        self._clock = clock
        self._liveness = liveness
        self._late = late
        self._caches = {source.name: AllocationCache() for source in sources}
        self._last_identities = Identities()
        self._names_result: Result[Identities] | None = None
        self._names_status: tuple[SourceStatus, ...] = ()
        self._errors: Counter[tuple[str, str]] = Counter()

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    @property
    def complete(self) -> Complete:
        """Returns a function that adds the names and UIDs of the last reading to a workload."""
        return self._last_identities.complete

    def collect(self, devices: Sequence[Device]) -> AllocationPart:
        jobs = {s.name: partial(s.assignments, devices) for s in self._sources}
        results = self._workers.run(jobs, self._deadline, self._late)
        at = self._clock.wall()
        names_status = self._check_identities()
        statuses = [self._status(name, result) for name, result in results.items()]
        readings = replace_reservations(self._resolve(results), self._last_identities.pods, devices, self.complete)
        merged = merge(readings, self.complete)
        return AllocationPart(
            tuple(merged.assignments),
            # Without a driver no device is known, so every id would be reported as unknown.
            tuple(u for u in merged.unmapped if devices or u.reason != "unknown_device"),
            merged.vcuda,
            frozenset(uuid for result in results.values() if result.value for uuid in result.value.offered),
            find_reserved(merged),
            self._last_identities.api_uids,
            (*statuses, *names_status),
            dict(self._errors),
            at,
        )

    def identify(self) -> Complete:
        """Reads the identities again, because a container has just started.

        Thread-safe. Of two concurrent calls, only one reads; the other returns the previous result.
        """
        self._read_identities()
        return self.complete

    def _read_identities(self) -> None:
        if self._identities is None:
            return
        result = self._workers.run({"identities": self._identities}, self._deadline)["identities"]
        if result.value is not None:
            self._last_identities = result.value
        if getattr(result.error, "reason", "") != "hung":  # "hung": another thread waits for the same call
            self._names_result = result

    def _check_identities(self) -> tuple[SourceStatus, ...]:
        """Reads the identities. Returns their status only if a reading has failed since the start."""
        self._read_identities()
        if self._names_result is not None:
            problem = next((error for error in self._last_identities.problems if error.reason != "file_missing"), None)
            result = replace(self._names_result, error=self._names_result.error or problem)
            if result.error is not None or self._names_status:
                self._names_status = (self._status("identities", result),)
        return self._names_status

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
        needs_liveness = any(cache.needs_liveness for cache in self._caches.values())
        is_alive = self._read_liveness() if needs_liveness else unknown_liveness
        resolved = {name: self._caches[name].resolve(now, is_alive) for name in results}
        return {name: allocation for name, allocation in resolved.items() if allocation is not None}

    def _read_liveness(self) -> IsAlive:
        if self._liveness is None:
            return unknown_liveness
        return self._workers.run({"liveness": self._liveness}, self._deadline)["liveness"].value or unknown_liveness

    def _status(self, source: str, result: Result[Allocation] | Result[Identities]) -> SourceStatus:
        if result.error is None:
            return SourceStatus(source, True, result.seconds)
        reason = getattr(result.error, "reason", "error")
        self._errors[source, reason] += 1
        return SourceStatus(source, False, result.seconds, reason, str(result.error))

    def close(self) -> None:
        for source in self._sources:
            source.close()
