"""Reads all allocation sources in parallel and merges the results.

Sources have an order of precedence. The first source that lists a workload determines the
workload's devices. Later sources can add identity, share and labels. Assignments that contradict
the first source are rejected and counted.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError, one_line
from podgpu.metrics.fields import table_rows
from podgpu.model import (
    Allocation,
    Assignment,
    Device,
    PodName,
    SourceStatus,
    Unmapped,
    VcudaRequest,
    Workload,
    WorkloadKey,
    group_by,
    parts_of,
)
from podgpu.node.holders import KUBELET, AllocationSource, Complete, complete_if_certain
from podgpu.node.holders.annotations import replace_reservations
from podgpu.node.holders.device_ids import parse_device_id, sort_allocation
from podgpu.node.holders.identity import Identities
from podgpu.node.holders.kubernetes_health import find_kubernetes_health
from podgpu.workers import ErrorCounts, Result, Workers

_log = logging.getLogger("podgpu")
# How long a holder is kept after it was last listed, if it is unknown whether its container runs.
GRACE_SECONDS = 60.0
# Seconds per reading. The late answer of a slower source is used in the next reading.
DEADLINE = 5.0
# Sources that report usage, not allocations. They are used only for devices without any other
# holder.
LAST_RESORT = frozenset({"processes"})
# Maps a source that may be outdated to a more current source. If both answer, the former only adds
# details.
LAGGING = {"checkpoint": KUBELET}
# Sources that may list pods that have ended, for example because its writer was turned off.
OUTDATED = frozenset({"podlist"})


@dataclass(frozen=True)
class HolderSources:
    """Allocation sources in order of precedence, and what is needed to identify their holders."""

    sources: Sequence[AllocationSource] = ()
    read_identities: Callable[[], Identities] = Identities
    # Returns the running containers, or None if processes are not visible.
    read_containers: Callable[[], Collection[Workload] | None] = tuple


# Attributes distinguish the DRA claims on a device.
_resource_key = attrgetter("device", "replica", "attributes")
IsAlive = Callable[[Workload], bool | None]  # returns whether a container runs, or None if unknown


@dataclass(slots=True)
class CachedHolder:
    listed_at: float
    source_instance: int
    # Includes the UID and container id that were known when the source last listed the holder.
    identity: Workload
    assignments: Sequence[Assignment]
    vcuda: Sequence[VcudaRequest]

    def is_kept(self, now: float, is_alive: IsAlive) -> bool:
        if self.listed_at == now:
            return True
        alive = is_alive(self.identity)
        if alive is None:
            return now - self.listed_at <= GRACE_SECONDS
        return alive


class AllocationCache:
    """Caches the holders of one source while the source does not answer or has just restarted.

    A restarted kubelet at first returns an empty list without an error. Holders are cached while
    their containers run. If it is unknown whether a container runs, its holder is cached for
    `GRACE_SECONDS`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._answer = Allocation()
        self._answered_at = float("-inf")
        self._holders: dict[Workload, CachedHolder] = {}

    def update(
        self, answer: Allocation | None, now: float, complete: Complete, is_alive: IsAlive
    ) -> Allocation | None:
        """Returns the current allocation, or None if the source has not answered for too long.

        `answer`: None if the source did not answer. Holders that the source no longer lists are
        removed at once, or kept for a while if the source has restarted.
        """
        if answer is not None:
            listed = _group_by_holder(answer, now, complete)
            missing = self._find_missing(answer, listed)
            self._log_missing(missing.values())
            self._answer = answer
            self._answered_at = now
            self._holders = listed | missing
            # The usual case: the answer is complete.
            if not missing:
                return answer

        # The source did not answer, or has restarted and lists less than before.
        kept = {}
        assignments: list[Assignment] = []
        vcuda: list[VcudaRequest] = []
        for workload, holder in self._holders.items():
            if holder.is_kept(now, is_alive):
                kept[workload] = holder
                assignments += holder.assignments
                vcuda += holder.vcuda
        self._holders = kept

        is_recent = now - self._answered_at <= GRACE_SECONDS
        if not kept and not is_recent:
            return None
        # Holders stay as long as their containers run. Everything else becomes unknown earlier.
        last = self._answer if is_recent else Allocation()
        allocation = sort_allocation(assignments, last.unmapped)
        return replace(allocation, vcuda=tuple(vcuda), offered=last.offered)

    def _log_missing(self, missing: Iterable[CachedHolder]) -> None:
        """Logs the holders that the last answer still listed."""
        count = sum(holder.listed_at == self._answered_at for holder in missing)
        if count:
            _log.info(
                "%s restarted and no longer lists %d GPU containers; keeping them for %.0f s, "
                "or longer while their processes or logs exist",
                self._name,
                count,
                GRACE_SECONDS,
            )

    def _find_missing(
        self, answer: Allocation, listed: Collection[Workload]
    ) -> dict[Workload, CachedHolder]:
        """Returns holders that the source no longer lists since its restart.

        Omits holders whose devices have a new holder.
        """
        earlier = {}
        holder_counts: Counter[tuple[object, ...]] = Counter()
        for workload, holder in self._holders.items():
            if holder.source_instance != answer.source_instance:
                earlier[workload] = holder
                holder_counts.update(map(_resource_key, holder.assignments))

        # If several held a device, the listed holder may be one of them.
        keys_now = map(_resource_key, answer.assignments)
        reassigned = {key for key in keys_now if holder_counts[key] == 1}

        missing = {}
        for workload, holder in earlier.items():
            keys = map(_resource_key, holder.assignments)
            if workload not in listed and reassigned.isdisjoint(keys):
                missing[workload] = holder
        return missing


def _group_by_holder(
    answer: Allocation, now: float, complete: Complete
) -> dict[Workload, CachedHolder]:
    assignments = group_by(answer.assignments, lambda item: item.holder)
    vcuda = group_by(answer.vcuda, lambda request: Workload(*parts_of(request)))
    holders: dict[Workload, CachedHolder] = {}
    for workload in (*assignments, *vcuda):
        holders[workload] = CachedHolder(
            listed_at=now,
            source_instance=answer.source_instance,
            identity=complete_if_certain(complete, workload),
            assignments=assignments.get(workload, ()),
            vcuda=vcuda.get(workload, ()),
        )
    return holders


@dataclass(eq=False)
class AllocationReader:
    _holders: HolderSources
    _workers: Workers
    _errors: ErrorCounts
    _clock: Clock
    # Called in the source's worker after a late answer.
    _on_late: Callable[[], object] = lambda: None
    _identities: Identities = field(default_factory=Identities)
    _identities_result: Result[Identities] | None = None
    _identities_status: tuple[SourceStatus, ...] = ()

    def __post_init__(self) -> None:
        self.sources = self._holders.sources
        self._caches = {source.name: AllocationCache(source.name) for source in self.sources}
        # When the kubelet last listed a pod of the sources that may be outdated.
        self._listed_at: dict[PodName, float] = {}

    def complete(self, workload: Workload) -> Workload:
        """Adds names and ids from the last reading.

        Raises SourceError if they contradict each other.
        """
        return self._identities.complete(workload)

    def read_identities(self) -> None:
        """Refreshes the identities.

        Thread-safe: while one thread reads, calls from other threads do nothing.
        """
        jobs = {"identities": self._holders.read_identities}
        result = self._workers.run(jobs, DEADLINE)["identities"]
        if result.value is not None:
            self._identities = result.value

        # "hung" only means that another thread is already reading.
        if getattr(result.error, "reason", "") != "hung":
            self._identities_result = result

    def read(self, devices: Sequence[Device]) -> Allocation:
        jobs = {source.name: partial(source.assignments, devices) for source in self.sources}
        results = self._workers.run(jobs, DEADLINE, self._on_late)
        at = self._clock.wall()
        self.read_identities()
        statuses = [self._errors.record(name, result) for name, result in results.items()]
        statuses += self._check_identities()

        kubelet = _find_kubelet_answer(results)
        readings = self._resolve(results, kubelet.listed_pods)
        readings = replace_reservations(readings, self._identities.pods, devices, self.complete)
        merged = merge(readings, self.complete)
        unmapped = merged.unmapped
        if not devices:
            # Every id would be reported as unknown.
            unmapped = tuple(entry for entry in unmapped if entry.reason != "unknown_device")

        kubernetes_health = find_kubernetes_health(
            self._identities.pods, kubelet.offered, merged.assignments, devices
        )
        return replace(
            merged,
            unmapped=unmapped,
            listed_pods=kubelet.listed_pods,
            sources=tuple(statuses),
            api_uids=self._identities.api_uids,
            kubernetes_health=kubernetes_health,
            at=at,
        )

    def _check_identities(self) -> tuple[SourceStatus, ...]:
        """Returns the status of reading identities. Empty if reading has never failed."""
        result = self._identities_result
        if result is None:
            return self._identities_status

        error = result.error
        for problem in self._identities.problems:
            # A node may lack the directories.
            if error is None and problem.reason != "file_missing":
                error = problem
        if error is not None or self._identities_status:
            result = replace(result, error=error)
            self._identities_status = (self._errors.record("identities", result),)
        return self._identities_status

    def _resolve(
        self, results: Mapping[str, Result[Allocation]], listed_pods: Collection[PodName]
    ) -> dict[str, Allocation]:
        """`listed_pods`: those that the kubelet lists."""

        @cache  # reads at most once, and only if a holder is no longer listed
        def read_containers() -> Collection[Workload]:
            jobs = {"containers": self._holders.read_containers}
            return self._workers.run(jobs, DEADLINE)["containers"].value or ()

        def is_alive(workload: Workload) -> bool | None:
            return self._identities.is_alive(workload, read_containers())

        now = self._clock.monotonic()
        resolved = {}
        for name, result in results.items():
            allocation = self._caches[name].update(result.value, now, self.complete, is_alive)
            if allocation is not None:
                resolved[name] = allocation

        unlisted = self._find_unlisted(resolved, listed_pods, now)

        def has_ended(workload: Workload) -> bool:
            alive = self._identities.is_alive(workload, ())
            if alive is None:
                # Reads all processes, so it comes last.
                alive = is_alive(workload)
            if alive is None:
                alive = workload.pod_name not in unlisted
            return not alive

        return reject_ended(resolved, self.complete, has_ended)

    def _find_unlisted(
        self, readings: Mapping[str, Allocation], listed: Collection[PodName], now: float
    ) -> set[PodName]:
        """Returns the pods that the kubelet has not listed for a while.

        A restarted kubelet does not list all of its pods yet. Remembers when it last listed each.
        """
        listed_at = {}
        for name in OUTDATED & readings.keys():
            for assignment in readings[name].assignments:
                pod = assignment.holder.pod_name
                if pod in listed or not listed:
                    # An empty list is no evidence that the pod has ended.
                    listed_at[pod] = now
                else:
                    listed_at[pod] = self._listed_at.get(pod, now)

        self._listed_at = listed_at
        return {pod for pod, at in listed_at.items() if now - at > GRACE_SECONDS}


def _find_kubelet_answer(results: Mapping[str, Result[Allocation]]) -> Allocation:
    """Empty if the kubelet does not answer now: its earlier answer may be outdated."""
    kubelet = results.get(KUBELET)
    if kubelet is None or kubelet.value is None:
        return Allocation()
    return kubelet.value


def reject_ended(
    readings: Mapping[str, Allocation], complete: Complete, has_ended: Callable[[Workload], bool]
) -> dict[str, Allocation]:
    """Rejects the holders of outdated sources whose pods have ended."""
    current = dict(readings)
    for name in OUTDATED & readings.keys():
        reading = readings[name]
        kept = []
        unmapped = list(reading.unmapped)
        for assignment in reading.assignments:
            holder = complete_if_certain(complete, assignment.holder)
            if has_ended(holder):
                unmapped += _reject_all([assignment], holder, "ended")
            else:
                kept.append(assignment)
        current[name] = replace(reading, assignments=tuple(kept), unmapped=tuple(unmapped))
    return current


# Precedence of sources

_Claims = list[Assignment]
"""Assignments of one workload, highest precedence first. Only the first has the merged identity."""


def merge(
    readings: Mapping[str, Allocation], complete: Complete = lambda workload: workload
) -> Allocation:
    """Merges the allocations of several sources.

    `readings`: by source name, highest precedence first.
    """
    merged: dict[WorkloadKey, _Claims] = {}
    rejected = []
    # Sources of last resort come last. The others keep their order.
    for source in sorted(readings, key=lambda source: source in LAST_RESORT):
        may_be_outdated = LAGGING.get(source) in readings
        rejected += _add_reading(merged, readings[source], complete, may_be_outdated)

    unmapped: list[Unmapped] = []
    offered: set[str] = set()
    for reading in readings.values():
        unmapped += reading.unmapped
        offered |= reading.offered

    assignments = _combine_all(merged.values())
    vcuda = _merge_vcuda(readings, complete)
    return Allocation(assignments, tuple(unmapped + rejected), vcuda, frozenset(offered))


def _add_reading(
    merged: dict[WorkloadKey, _Claims],
    reading: Allocation,
    complete: Complete,
    may_be_outdated: bool,
) -> list[Unmapped]:
    """Adds the assignments of one source, and returns the rejected ones."""
    rejected = []
    by_holder = group_by(reading.assignments, lambda claim: claim.holder)
    for holder, claims in by_holder.items():
        try:
            completed = complete(holder)
        except SourceError as error:
            rejected += _reject_all(claims, holder, error.reason)
            continue
        rejected += _add_claims(merged, completed, claims, may_be_outdated)
    return rejected


def _add_claims(
    merged: dict[WorkloadKey, _Claims],
    holder: Workload,
    claims: Sequence[Assignment],
    may_be_outdated: bool,
) -> list[Unmapped]:
    """Adds the claims of a holder and returns the rejected claims.

    Claims that may be outdated only add details to a known holder. Then none counts as rejected.
    """
    known = merged.get(holder.key)
    if known is None:
        if not may_be_outdated:
            merged[holder.key] = [replace(claim, holder=holder) for claim in claims]
        return []

    rejected = _add_to_known(known, holder, claims)
    # Sources of last resort report usage, which contradicts no allocation.
    if may_be_outdated or claims[0].source in LAST_RESORT:
        return []
    return rejected


def _add_to_known(known: _Claims, holder: Workload, claims: Sequence[Assignment]) -> list[Unmapped]:
    """Adds the claims of a holder to its known claims, and returns the rejected claims."""
    first = known[0]
    if first.holder.uid and holder.uid and first.holder.uid != holder.uid:
        # Two pods have the same name.
        return _reject_all(claims, holder, "identity_conflict")

    pairs = zip(parts_of(first.holder), parts_of(holder), strict=True)
    parts = [own or other for own, other in pairs]
    known[0] = replace(first, holder=Workload(*parts))

    devices = {claim.device for claim in known}
    contradicting = []
    for claim in claims:
        if claim.source == first.source or claim.device in devices:
            known.append(claim)
        else:
            contradicting.append(claim)
    return _reject_all(contradicting, holder, "contradicted")


def _combine_all(merged: Iterable[_Claims]) -> tuple[Assignment, ...]:
    """Returns one assignment per device and holder, sorted by both."""
    by_holder = sorted(merged, key=lambda claims: parts_of(claims[0].holder))
    allocated: set[str] = set()
    for claims in by_holder:
        if claims[0].source not in LAST_RESORT:
            allocated.update(claim.device for claim in claims)

    held: dict[tuple[str, Workload], _Claims] = defaultdict(list)
    for claims in by_holder:
        first = claims[0]
        for claim in claims:
            # The processes of a container do not make it a holder of what others have allocated.
            if first.source not in LAST_RESORT or claim.device not in allocated:
                held[claim.device, first.holder].append(claim)

    counts = Counter(device for device, _ in held)
    combined = []
    for (device, holder), claims in held.items():
        combined.append(_combine(claims, holder, is_sole_holder=counts[device] == 1))
    combined.sort(key=attrgetter("device"))
    return tuple(combined)


def _combine(claims: Sequence[Assignment], holder: Workload, is_sole_holder: bool) -> Assignment:
    """Returns the first claim. Fields that it lacks are taken from the other claims."""
    share = None
    replica = ""
    attributes: dict[str, str] = {}
    is_shared = False
    for claim in reversed(claims):
        if claim.share is not None:
            share = claim.share
        replica = claim.replica or replica
        attributes |= claim.attributes
        is_shared |= claim.is_shared

    trusted = claims[0]
    is_certain = is_sole_holder and trusted.source not in LAST_RESORT
    # The only holder of a device that is not shared holds all of it.
    if share is None and is_certain and not replica and not is_shared:
        share = 1.0
    labels = tuple(sorted(attributes.items()))
    return Assignment(trusted.device, holder, trusted.source, replica, share, labels)


def _reject_all(claims: Iterable[Assignment], holder: Workload, reason: str) -> list[Unmapped]:
    return [Unmapped(claim.source, reason, claim.device, "", holder) for claim in claims]


def _merge_vcuda(
    readings: Mapping[str, Allocation], complete: Complete
) -> tuple[VcudaRequest, ...]:
    """Returns one request per workload, from the source with the highest precedence."""
    merged: dict[WorkloadKey, VcudaRequest] = {}
    for source, reading in readings.items():
        if LAGGING.get(source) in readings:
            continue
        for request in reading.vcuda:
            with suppress(SourceError):  # identities that contradict each other
                holder = complete(Workload(*parts_of(request)))
                completed = VcudaRequest.for_holder(holder, request.cores, request.memory_blocks)
                merged.setdefault(holder.key, completed)
    return tuple(sorted(merged.values(), key=parts_of))


# Texts about unmapped assignments, for the exporter's log and `podgpu doctor`


class UnmappedAdvice(NamedTuple):
    reason: str
    advice: str
    harmless: bool = False


@cache
def explanations() -> Mapping[tuple[str, str], UnmappedAdvice]:
    """Returns the explanations by source and reason. An empty source stands for all sources."""
    explanations = {}
    for row in table_rows("unmapped.csv"):
        key = row["source"], row["reason"]
        explanations[key] = UnmappedAdvice(row["says"], row["do"], bool(row["harmless"]))
    return explanations


def explain(unmapped: Unmapped) -> UnmappedAdvice:
    return (
        explanations().get((unmapped.source, unmapped.reason))
        or explanations().get(("", unmapped.reason))
        or UnmappedAdvice(f"it cannot be used ({unmapped.reason})", "check the exporter's log")
    )


def describe(unmapped: Unmapped) -> str:
    """Describes an unmapped assignment on one line: `ns/pod/main holds nvidia.com/gpu GPU-…`."""
    holder = unmapped.holder.text
    device_id = unmapped.device_id

    if unmapped.source == "hpc":
        text = f"job file {device_id}"
        return one_line(f"{holder} is in the {text}" if holder else text)

    if unmapped.reason == "bad_annotation":
        return one_line(f"{holder} has the annotation {device_id}")

    verb = "uses" if unmapped.source == "processes" else "holds"
    resource = unmapped.resource
    # Some sources know no resource. They report their own name, or what the id is.
    if resource in (unmapped.source, "pid"):
        resource = ""

    words = (holder or "a process", verb, resource, device_id)
    return one_line(" ".join(filter(None, words)))


def find_existing_gpus(
    offered: Iterable[str], unmapped: Iterable[Unmapped], some_lost: bool
) -> set[str]:
    """Returns UUIDs of GPUs that must exist.

    These are the GPUs that the kubelet offers and, with `some_lost`, GPUs that pods hold.
    `some_lost`: the driver lists fewer GPUs than the PCI bus. If it is False, a held GPU may have
    been replaced.
    """
    uuids = set(offered)
    for entry in unmapped:
        if some_lost and entry.reason == "unknown_device" and entry.source == KUBELET:
            device_id = parse_device_id(entry.device_id)
            if device_id is not None and device_id.gpu_uuid:
                uuids.add(device_id.gpu_uuid)
    return uuids
