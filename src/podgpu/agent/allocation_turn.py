"""AllocationTurn asks every source that knows holders, each in its own worker, and merges them into one answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from msgspec import structs

from podgpu.errors import few_of
from podgpu.holders import AllocationSource
from podgpu.holders.cache import GRACE_SECONDS, AllocationCache, IsAlive, unknown_liveness
from podgpu.holders.identity import Identities
from podgpu.holders.merge import Complete, merge
from podgpu.model import Allocation, Assignment, ContainerUsage, Device, Outcome, VcudaRequest
from podgpu.workers import Result, Workers

_log = logging.getLogger("podgpu")
DEADLINE = 5.0
"""How long a turn waits for its sources, whatever the interval of the figures is. One that takes longer is not asked
again meanwhile: its answer is taken when it comes."""

_HOLDERS = "allocation"
MOST_HOLDERS = 1024
"""Of one device. 20,000 make a text of 40 MB that takes 4 s to build: all figures would be too old to be served."""

T = TypeVar("T", Assignment, ContainerUsage, VcudaRequest)

ReadIdentities = Callable[[], Identities]
"""Reads who is who on this node now."""
ReadLiveness = Callable[[], IsAlive]
"""Reads which containers run on the node."""


@dataclass(frozen=True, slots=True)
class AllocationPart:
    """What a turn brought: the allocation half of a snapshot."""

    allocation: Allocation = field(default_factory=Allocation)
    outcomes: tuple[Outcome, ...] = ()
    offered: frozenset[str] = frozenset()
    """UUIDs of the GPUs that are given away here, in anybody's hands or not."""


class AllocationTurn:
    def __init__(
        self,
        sources: Sequence[AllocationSource],
        identities: ReadIdentities | None,
        isolation: Workers,
        deadline: float,
        clock: Callable[[], float],
        liveness: ReadLiveness | None = None,
        late: Callable[[], object] = lambda: None,
    ) -> None:
        """`late` is called from another thread when an answer came after its turn was over: the next one takes it."""
        self._sources = sources
        """In order of precedence."""
        self._identities = identities
        self._isolation = isolation
        self._deadline = deadline
        self._clock = clock
        self._liveness = liveness
        self._late = late
        self._caches = {source.name: AllocationCache() for source in sources}
        self._known = Identities()
        """Who is who, as last read."""
        self._names_result: Result[Identities] | None = None
        self._names_outcome: tuple[Outcome, ...] = ()
        self.errors: Counter[tuple[str, str]] = Counter()

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    @property
    def complete(self) -> Complete:
        """Fills in who is who, as last read."""
        return self._known.complete

    def collect(self, devices: Sequence[Device]) -> AllocationPart:
        jobs = {s.name: partial(s.assignments, devices) for s in self._sources}
        results = self._isolation.run(jobs, self._deadline, self._late)
        self._identify_and_say()
        outcomes = tuple(self._outcome(name, result) for name, result in results.items())
        merged = merge(self._settle(results), self.complete)
        offered = frozenset(uuid for result in results.values() if result.value for uuid in result.value.offered)
        return AllocationPart(merged if devices else _without_unknown(merged), outcomes + self._names_outcome, offered)

    def identify(self) -> Complete:
        """Who is who, read after the holders so that a container just started is known; else as it was last known.

        Another thread may ask too: of two at once one gets what was last known.
        """
        self._read_identities()
        return self.complete

    def show(self, named: Iterable[T]) -> tuple[T, ...]:
        """With the uids that people know: of a static pod the API server's, where that is asked. Everything on the
        node, processes and logs, goes by the one the kubelet gave it."""
        uids = self._known.api_uids
        if not uids:
            return tuple(named)
        return tuple(
            replace(entry, holder=structs.replace(entry.holder, uid=uids.get(entry.holder.uid, entry.holder.uid)))
            for entry in named
        )

    def _read_identities(self) -> None:
        if self._identities is None:
            return
        result = self._isolation.run({"identities": self._identities}, self._deadline)["identities"]
        if result.value is not None:
            self._known = result.value
        if getattr(result.error, "reason", "") != "hung":  # else another thread waits for it, and will know
            self._names_result = result

    def _identify_and_say(self) -> None:
        """Names that cannot be read are said: without them `pod_uid` is missing, and nothing else looks wrong."""
        self._read_identities()
        if self._names_result is None:
            return
        problem = next((error for error in self._known.problems if error.reason != "file_missing"), None)
        result = replace(self._names_result, error=self._names_result.error or problem)
        if result.error is not None or self._names_outcome:  # what never failed is no source to speak of
            self._names_outcome = (self._outcome("identities", result),)

    def _settle(self, results: dict[str, Result[Allocation]]) -> dict[str, Allocation]:
        now = self._clock()
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
        return self._isolation.run({"liveness": self._liveness}, self._deadline)["liveness"].value or unknown_liveness

    def _outcome(self, source: str, result: Result[Allocation] | Result[Identities]) -> Outcome:
        if result.error is None:
            return Outcome(source, result.seconds)
        reason = getattr(result.error, "reason", "error")
        self.errors[source, reason] += 1
        return Outcome(source, result.seconds, reason, str(result.error))

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _without_unknown(allocation: Allocation) -> Allocation:
    """While no device is known at all (no driver yet), that an id names none says nothing about the id."""
    return replace(allocation, unmapped=tuple(u for u in allocation.unmapped if u.reason != "unknown_device"))


def without_crowds(part: AllocationPart) -> tuple[AllocationPart, Counter[tuple[str, str]]]:
    """The part with as many holders of each device as an exposition can name, and how many were left out."""
    held: Counter[str] = Counter()
    kept: list[Assignment] = []
    for assignment in part.allocation.assignments:
        held[assignment.device] += 1
        if held[assignment.device] <= MOST_HOLDERS:
            kept.append(assignment)
    left_out = len(part.allocation.assignments) - len(kept)
    if not left_out:
        return part, Counter()
    crowded = few_of(f"{device} ({number})" for device, number in held.items() if number > MOST_HOLDERS)
    message = f"more holders than podgpu names ({MOST_HOLDERS} of one device), the others are left out: {crowded}"
    reason = "too_many_holders"
    return replace(
        part,
        allocation=replace(part.allocation, assignments=tuple(kept)),
        outcomes=(*part.outcomes, Outcome(_HOLDERS, 0.0, reason, message)),
    ), Counter({(_HOLDERS, reason): left_out})
