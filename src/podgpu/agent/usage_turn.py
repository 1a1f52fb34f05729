"""UsageTurn asks what each GPU's processes did since the last turn, and charges it to the containers they belong to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.gpu.source import Telemetry, TellsQuiet, UsageFlaws
from podgpu.model import Assignment, ContainerUsage, Device, DeviceUsage, Outcome, Usage, physical
from podgpu.usage.containers import ContainerFinder
from podgpu.usage.ledger import MOST_NAMESPACES, Ledger
from podgpu.usage.owners import Complete, Owners, ProcessOwners
from podgpu.workers import Result, Workers

K = TypeVar("K")
_log = logging.getLogger(__name__)
SOURCE = "usage"
SWITCHES = "switches"
FORGOTTEN = "namespace_forgotten"
_NS = 1_000_000_000

Results = Mapping[str, Result[tuple[tuple[DeviceUsage, ...], UsageFlaws]]]


@dataclass(frozen=True, slots=True)
class UsagePart:
    """What a turn brought: the usage part of a snapshot."""

    usage: Usage = field(default_factory=Usage)
    outcomes: tuple[Outcome, ...] = ()
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(source, reason) -> how often since the start, as of this turn."""


@dataclass(frozen=True, slots=True)
class _Scene:
    """Who was where in a turn."""

    gpus: frozenset[str]
    assignments: tuple[Assignment, ...]
    pids: frozenset[int]


class UsageTurn:
    def __init__(
        self,
        telemetry: Telemetry,
        finder: ContainerFinder,
        isolation: Workers,
        deadline: float,
        clock: Clock,
        patience: float = 0.0,
        leeway: float = 0.0,
    ) -> None:
        """`patience`: for how many seconds nothing need be told while nobody comes or goes; a turn that is due within
        `leeway` is due now."""
        self._telemetry = telemetry
        self._quiet = telemetry if isinstance(telemetry, TellsQuiet) else None
        self._processes = ProcessOwners(finder)
        self._isolation = isolation
        self._deadline = deadline
        self._clock = clock
        self._patience = patience
        self._leeway = leeway
        self._ledger = Ledger()
        self._statement = Usage()
        self._first_at: float | None = None
        self._charged_at: float | None = None
        self._scene: _Scene | None = None
        """Of the last turn; None where it could not see everything."""
        self._is_steady = False
        """The turn before saw the same."""
        self._gpus: frozenset[str] = frozenset()
        self._shared: frozenset[str] = frozenset()
        """Keys of the devices that several containers ran on in the last turn."""
        self._lacking: frozenset[tuple[str, str, str]] = frozenset()
        """(worker, part, reason word) of what the GPUs cannot give."""
        self._errors: Counter[tuple[str, str]] = Counter()

    def collect(
        self,
        devices: Sequence[Device],
        assignments: Sequence[Assignment],
        complete: Complete,
        learn: Callable[[], Complete],
        sick: Collection[str] = (),
    ) -> UsagePart:
        """`complete` has the names as last read; `learn` reads them anew, for a container that has none.

        `sick` are UUIDs of GPUs that are known not to answer: it need not be said again that their use is not known.
        """
        gpus = _gpus_of(devices)
        self._forget(gpus)
        began, began_at = self._clock.monotonic(), self._clock.wall()
        results = self._isolation.run({_worker(g): partial(self._read, g) for g in gpus}, self._deadline)
        usages = [u for result in results.values() if result.value is not None for u in result.value[0]]
        self._count(results)
        owners = self._find_owners(usages, complete, learn)
        self._settle(_Scene(frozenset(g.uuid for g in gpus), tuple(assignments), _pids_of(usages)), results, owners)
        self._shared = frozenset(usage.device.key for usage in usages if _is_shared(usage, owners))
        elapsed = 0 if self._charged_at is None else round((began - self._charged_at) * _NS)
        self._charged_at = began
        self._first_at = began if self._first_at is None else self._first_at
        self._ledger.charge(usages, assignments, owners.workloads.get, elapsed, owners.untold)
        pending = {u.device.uuid for u in usages if u.energy_mj is None and u.energy_estimate_nj is not None}
        self._statement = with_power_parts(self._statement, self._ledger.statement(), pending)
        self._count_forgotten()
        failed = {g.uuid: error for g in gpus if (error := results[_worker(g)].error) is not None}
        outcome = self._outcome(
            self._clock.monotonic() - began, owners, {g: e for g, e in failed.items() if g not in sick}
        )
        outcomes = (outcome, *_switches_outcome(results))
        return UsagePart(replace(self._statement, at=began_at), outcomes, dict(self._errors))

    def can_wait(self, devices: Sequence[Device], assignments: Sequence[Assignment]) -> bool:
        """Whether a turn now would say nothing that the next one does not: it is not long since the last, the same
        people are on the same GPUs, and what each of them does the driver sums up meanwhile."""
        gpus, scene = _gpus_of(devices), self._scene
        if self._quiet is None or self._patience <= 0:
            return False
        if scene is None or not self._is_steady or self._charged_at is None:
            return False
        if scene.gpus != {g.uuid for g in gpus} or scene.assignments != tuple(assignments):
            return False
        if self._stretch_of(self._clock.monotonic()) != self._stretch_of(self._charged_at):
            return False
        results = self._isolation.run({_worker(g): partial(self._quiet.is_quiet, g) for g in gpus}, self._deadline)
        return all(result.value is True for result in results.values())

    def _stretch_of(self, moment: float) -> int:
        """There is a turn in each of these, which begin in step with the first turn and not with the last: whoever
        scrapes every 15 s finds counters of the same age each time, so that rates of them are right."""
        return int((moment - (self._first_at or 0.0) + self._leeway) / self._patience)

    def _settle(self, scene: _Scene, results: Results, owners: Owners) -> None:
        """Rates and joules need a turn after the first in which somebody was there."""
        clear = not owners.untold and all(r.value is not None and not r.value[1].errors for r in results.values())
        self._is_steady = clear and scene == self._scene
        self._scene = scene if clear else None

    def _read(self, gpu: Device) -> tuple[tuple[DeviceUsage, ...], UsageFlaws]:
        return self._telemetry.usage(gpu, self._shared), self._telemetry.usage_flaws(gpu)

    def _forget(self, gpus: Sequence[Device]) -> None:
        now = frozenset(g.uuid for g in gpus)
        gone = self._gpus - now
        if gone:
            self._ledger.forget_devices(gone)
            self._isolation.forget(f"usage-{uuid}" for uuid in gone)
        self._gpus = now

    def _count(self, results: Results) -> None:
        for result in results.values():
            if isinstance(result.error, SourceError):
                self._errors[SOURCE, result.error.reason] += 1
            elif result.value is not None:
                flaws = result.value[1]
                self._errors.update((SOURCE, reason) for reason in flaws.errors)
                self._errors.update((SOURCE, "bad_value") for _ in flaws.dropped)
                self._errors.update((SWITCHES, reason) for reason in flaws.doubts)
        self._count_lacking(results)

    def _count_lacking(self, results: Results) -> None:
        """What a GPU cannot give, once: when that is found out."""
        answers = {worker: result.value[1] for worker, result in results.items() if result.value is not None}
        kept = {lack for lack in self._lacking if lack[0] in results.keys() - answers.keys()}
        lacking = kept | {(worker, *lack) for worker, flaws in answers.items() for lack in flaws.lacks}
        self._errors.update((SOURCE, reason) for _, _, reason in lacking - self._lacking)
        self._lacking = frozenset(lacking)

    def _find_owners(self, usages: Sequence[DeviceUsage], complete: Complete, learn: Callable[[], Complete]) -> Owners:
        owners = self._processes.find(set(_pids_of(usages)), complete, learn)
        self._errors.update((SOURCE, reason) for reason in owners.untold.values())
        return owners

    def _count_forgotten(self) -> None:
        forgotten = self._ledger.namespaces_forgotten
        if forgotten and not self._errors[SOURCE, FORGOTTEN]:
            _log.warning(
                "usage: there are more than %d namespaces; what those used that hold no GPU any more is forgotten, the"
                " longest unchanged first: see who makes so many (counted as %s)",
                MOST_NAMESPACES,
                FORGOTTEN,
            )
        if forgotten:
            self._errors[SOURCE, FORGOTTEN] = forgotten

    def _outcome(self, seconds: float, owners: Owners, failed: Mapping[str, Exception]) -> Outcome:
        """Outside the host's PID namespace the driver shows no processes: said, and not taken for idleness."""
        try:
            self._processes.require_sight()
        except SourceError as e:
            if e.reason not in owners.untold.values():  # those are counted already, process by process
                self._errors[SOURCE, e.reason] += 1
            return Outcome(SOURCE, seconds, e.reason, str(e))
        for uuid, error in failed.items():
            others = f" (and of {len(failed) - 1} more)" if len(failed) > 1 else ""
            message = f"what its containers use of {uuid}{others} is not known and left out: {error}"
            return Outcome(SOURCE, seconds, getattr(error, "reason", "error"), message)
        return Outcome(SOURCE, seconds)


def patience(usage_interval: float, interval: float) -> float:
    """Seconds from one turn to the next while nobody comes or goes: two to five usage intervals, as many as fit into
    one telemetry interval and into 5 s; 0 where not even two do, and every turn is taken. NVIDIA's driver keeps the
    last 72 samples of who ran, some 14 s of them, so that none is lost by waiting."""
    turns = min(5, max(2, int(interval / usage_interval)), int(5.0 / usage_interval + 1e-9))
    return turns * usage_interval if turns >= 2 else 0.0


def _gpus_of(devices: Iterable[Device]) -> list[Device]:
    return [d for d in devices if not d.is_instance]


def _pids_of(usages: Iterable[DeviceUsage]) -> frozenset[int]:
    """Of those that are listed, and of those that ran."""
    listed = {process.pid for usage in usages for process in usage.processes or ()}
    return frozenset(listed.union(*(usage.process_busy_ns or () for usage in usages)))


def _is_shared(usage: DeviceUsage, owners: Owners) -> bool:
    """Whether processes of two containers run there; one of which nobody knows whose it is may be another's."""
    pids = {process.pid for process in usage.processes or () if process.device == usage.device.key}
    return len({owners.workloads.get(pid, pid) for pid in pids}) > 1


def _switches_outcome(results: Results) -> list[Outcome]:
    """Of the context switches, where they are read at all: in order unless a shared GPU has to do without."""
    flaws = [result.value[1] for result in results.values() if result.value is not None]
    if not any(flaw.follows_switches for flaw in flaws):
        return []
    fallback = next((flaw for flaw in flaws if flaw.fallback), None)
    if fallback is None:
        return [Outcome(SWITCHES, 0.0)]
    return [Outcome(SWITCHES, 0.0, fallback.doubts[0] if fallback.doubts else "in_doubt", fallback.fallback)]


def with_power_parts(before: Usage, now: Usage, energy_pending: Collection[str] = ()) -> Usage:
    """The statement, with each container's part of the energy that its GPU used since the one before.

    On GPUs whose energy is told only in a later turn (`energy_pending`) it is still the part of what was told last.
    """
    used = _energy_since({t.device: t.energy_mj for t in before.devices}, {t.device: t.energy_mj for t in now.devices})
    earlier = {(c.device, c.holder): c for c in before.containers}
    own = _energy_since(
        {who: c.energy_mj for who, c in earlier.items()}, {(c.device, c.holder): c.energy_mj for c in now.containers}
    )

    def part(usage: ContainerUsage) -> float | None:
        who, gpu = (usage.device, usage.holder), physical(usage.device)
        if gpu in energy_pending:
            return earlier[who].power_part if who in earlier else None
        return _ratio(own.get(who), used.get(gpu))

    return replace(now, containers=tuple(replace(c, power_part=part(c)) for c in now.containers))


def _energy_since(before: Mapping[K, int | None], now: Mapping[K, int | None]) -> dict[K, int]:
    pairs = ((key, before.get(key), value) for key, value in now.items())
    return {key: value - (then or 0) for key, then, value in pairs if value is not None}


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _worker(gpu: Device) -> str:
    return f"usage-{gpu.uuid}"
