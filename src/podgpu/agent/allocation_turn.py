"""One turn of allocation: every source that knows holders, each in its own worker, merged into one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from podgpu.agent.isolate import Isolation, Result
from podgpu.allocation.merge import Complete, merge
from podgpu.allocation.source import AllocationSource
from podgpu.model import Allocation, Device, Outcome

KEEP_SECONDS = 60.0
"""How long a mapping outlives its source. While the kubelet is away it starts and ends no pods, and it asks clients
over its rate limit to go on with what they have; longer than this the mapping is a guess and is withdrawn."""

Identities = Callable[[], Complete]
"""Reads who is who on this node now."""


@dataclass(frozen=True, slots=True)
class AllocationPart:
    """What a turn brought: the allocation half of a snapshot."""

    allocation: Allocation = field(default_factory=Allocation)
    outcomes: tuple[Outcome, ...] = ()


class AllocationTurn:
    def __init__(
        self,
        sources: Sequence[AllocationSource],
        identities: Identities | None,
        isolation: Isolation,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self._sources = sources
        """In order of precedence."""
        self._identities = identities
        self._isolation = isolation
        self._deadline = deadline
        self._clock = clock
        self._last_good: dict[str, tuple[float, Allocation]] = {}
        self.complete: Complete = lambda workload: workload
        """Who is who, as last read."""
        self.errors: Counter[tuple[str, str]] = Counter()

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    def collect(self, devices: Sequence[Device]) -> AllocationPart:
        jobs = {s.name: partial(s.assignments, devices) for s in self._sources}
        results = self._isolation.run(jobs, self._deadline)
        self.identify()
        outcomes = tuple(self._outcome(name, result) for name, result in results.items())
        kept = {name: self._keep(name, result) for name, result in results.items()}
        merged = merge({n: a for n, a in kept.items() if a is not None}, self.complete)
        return AllocationPart(merged if devices else _without_unknown(merged), outcomes)

    def identify(self) -> Complete:
        """Who is who, read after the holders so that a container just started is known; else as it was last known.

        Another thread may ask too: of two at once one gets what was last known.
        """
        if self._identities is not None:
            result = self._isolation.run({"identities": self._identities}, self._deadline)["identities"]
            self.complete = result.value or self.complete
        return self.complete

    def _keep(self, name: str, result: Result[Allocation]) -> Allocation | None:
        now = self._clock()
        if result.value is not None:
            self._last_good[name] = (now, result.value)
        at, allocation = self._last_good.get(name, (float("-inf"), Allocation()))
        return allocation if now - at <= KEEP_SECONDS else None

    def _outcome(self, source: str, result: Result[Allocation]) -> Outcome:
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
