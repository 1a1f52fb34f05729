"""One turn of allocation: every source that knows holders, each in its own worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from podgpu.agent.isolate import Isolation, Result
from podgpu.allocation.source import Allocation, AllocationSource
from podgpu.model import Assignment, Device, Outcome, Unmapped

KEEP_SECONDS = 60.0
"""How long a mapping outlives its source. While the kubelet is away it starts and ends no pods, and it asks clients
over its rate limit to go on with what they have; longer than this the mapping is a guess and is withdrawn."""


@dataclass(frozen=True, slots=True)
class AllocationPart:
    assignments: tuple[Assignment, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


class AllocationTurn:
    def __init__(
        self,
        sources: Sequence[AllocationSource],
        isolation: Isolation,
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self._sources = sources
        self._isolation = isolation
        self._deadline = deadline
        self._clock = clock
        self._last_good: dict[str, tuple[float, Allocation]] = {}
        self.errors: Counter[tuple[str, str]] = Counter()

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    def collect(self, devices: Sequence[Device]) -> AllocationPart:
        jobs = {s.name: partial(s.assignments, devices) for s in self._sources}
        results = self._isolation.run(jobs, self._deadline)
        outcomes = tuple(self._outcome(name, result) for name, result in results.items())
        kept = [self._keep(name, result) for name, result in results.items()]
        return AllocationPart(
            tuple(a for allocation in kept for a in allocation.assignments),
            tuple(u for allocation in kept for u in allocation.unmapped),
            outcomes,
        )

    def _keep(self, name: str, result: Result[Allocation]) -> Allocation:
        now = self._clock()
        if result.value is not None:
            self._last_good[name] = (now, result.value)
        at, allocation = self._last_good.get(name, (now, Allocation()))
        return allocation if now - at <= KEEP_SECONDS else Allocation()

    def _outcome(self, source: str, result: Result[Allocation]) -> Outcome:
        if result.error is None:
            return Outcome(source, result.seconds)
        reason = getattr(result.error, "reason", "error")
        self.errors[source, reason] += 1
        return Outcome(source, result.seconds, reason, str(result.error))

    def close(self) -> None:
        for source in self._sources:
            source.close()
