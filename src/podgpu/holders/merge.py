"""Merges the allocations of several sources, and explains the assignments that cannot be used.

Sources are in order of precedence. The first source that lists a workload decides which devices it holds. Later sources
can add identity, share and labels; assignments that contradict the first source are rejected and counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from msgspec import structs

from podgpu.errors import SourceError, one_line
from podgpu.holders.device_ids import parse_device_id, sort_vcuda
from podgpu.metrics.fields import table_rows
from podgpu.model import WORKLOAD_PARTS, Allocation, Assignment, Unmapped, VcudaRequest, Workload, WorkloadKey, parts_of

LAST_RESORT = frozenset({"processes"})
"""Sources that report usage, not allocations. They are used only for devices without any other holder."""
LAGGING = {"checkpoint": "kubelet"}
"""Sources that are updated later than another one. If that one answers, they add details, but no holders or devices."""

Complete = Callable[[Workload], Workload]
"""Fills in the known parts of an identity. Raises SourceError if they contradict each other."""


_Claims = list[Assignment]
"""Assignments of one workload, highest precedence first. The first one has the merged identity."""


def merge(readings: Mapping[str, Allocation], complete: Complete = lambda workload: workload) -> Allocation:
    """Merges allocations by source name, highest precedence first."""
    merged: dict[WorkloadKey, _Claims] = {}
    rejected: list[Unmapped] = []
    for source, reading in sorted(readings.items(), key=lambda item: item[0] in LAST_RESORT):
        lags = LAGGING.get(source) in readings
        claims_by_holder: dict[Workload, list[Assignment]] = defaultdict(list)
        for claim in reading.assignments:
            claims_by_holder[claim.holder].append(claim)
        for holder, claims in claims_by_holder.items():
            try:
                completed = complete(holder)
            except SourceError as error:
                rejected += (_reject(claim, holder, error.reason) for claim in claims)
            else:
                rejected += _add_claims(merged, completed, claims, lags)
    unmapped = [entry for reading in readings.values() for entry in reading.unmapped]
    vcuda = _merge_vcuda(readings, complete)
    offered = frozenset(uuid for reading in readings.values() for uuid in reading.offered)
    return Allocation(_combine_all(merged.values()), tuple(unmapped + rejected), vcuda, offered)


def _add_claims(
    merged: dict[WorkloadKey, _Claims], holder: Workload, claims: Sequence[Assignment], lags: bool
) -> Iterator[Unmapped]:
    """Adds the claims of a holder and yields the rejected ones. Rejected claims of a lagging source are outdated, so
    they are dropped without a report."""
    known = merged.get(holder.key)
    if known is None:
        if not lags:
            merged[holder.key] = [replace(claim, holder=holder) for claim in claims]
        return
    first = known[0]
    if first.holder.uid and holder.uid and first.holder.uid != holder.uid:
        reason, rejected = "identity_conflict", list(claims)  # two pods with the same name
    else:
        missing = {part: getattr(holder, part) for part in WORKLOAD_PARTS if not getattr(first.holder, part)}
        known[0] = replace(first, holder=structs.replace(first.holder, **missing))
        devices = {claim.device for claim in known}
        accepted = [claim for claim in claims if claim.source == first.source or claim.device in devices]
        reason, rejected = "contradicted", [claim for claim in claims if claim not in accepted]
        known += accepted
    if not lags and claims[0].source not in LAST_RESORT:
        yield from (_reject(claim, holder, reason) for claim in rejected)


def _combine_all(merged: Iterable[_Claims]) -> tuple[Assignment, ...]:
    merged = sorted(merged, key=lambda claims: parts_of(claims[0].holder))
    allocated = {claim.device for claims in merged for claim in claims if claims[0].source not in LAST_RESORT}
    held: dict[tuple[str, Workload], _Claims] = defaultdict(list)
    for claims in merged:
        for claim in claims:
            if claims[0].source not in LAST_RESORT or claim.device not in allocated:
                held[claim.device, claims[0].holder].append(claim)
    counts = Counter(device for device, _ in held)
    combined = (_combine(claims, holder, counts[device] == 1) for (device, holder), claims in held.items())
    return tuple(sorted(combined, key=lambda assignment: assignment.device))


def _combine(claims: Sequence[Assignment], holder: Workload, is_sole_holder: bool) -> Assignment:
    """Returns the first claim, completed by the others."""
    trusted = claims[0]
    share = next((claim.share for claim in claims if claim.share is not None), None)
    replica = next((claim.replica for claim in claims if claim.replica), "")
    attributes = {name: value for claim in reversed(claims) for name, value in claim.attributes}
    is_shared = bool(replica) or trusted.source in LAST_RESORT or any(claim.is_shared for claim in claims)
    if share is None and is_sole_holder and not is_shared:
        share = 1.0
    return Assignment(trusted.device, holder, trusted.source, replica, share, tuple(sorted(attributes.items())))


def _reject(assignment: Assignment, holder: Workload, reason: str) -> Unmapped:
    return Unmapped(assignment.source, reason, assignment.device, "", holder)


def _merge_vcuda(readings: Mapping[str, Allocation], complete: Complete) -> tuple[VcudaRequest, ...]:
    """Keeps one request per workload, from the source with the highest precedence."""
    merged: dict[WorkloadKey, VcudaRequest] = {}
    for source, reading in readings.items():
        if LAGGING.get(source) in readings:
            continue
        for request in reading.vcuda:
            with suppress(SourceError):  # contradictory identities
                holder = complete(Workload(*parts_of(request)))
                completed = VcudaRequest.for_holder(holder, request.cores, request.memory_blocks)
                merged.setdefault(holder.key, completed)
    return sort_vcuda(merged.values())


# Texts about unmapped assignments, for the exporter's log and `podgpu doctor`


class Explanation(NamedTuple):
    reason: str
    advice: str
    harmless: bool = False


@cache
def explanations() -> Mapping[tuple[str, str], Explanation]:
    """Returns the explanations by source and reason. The source is empty if the explanation is for all sources."""
    return {
        (row["source"], row["reason"]): Explanation(row["says"], row["do"], bool(row["harmless"]))
        for row in table_rows("unmapped.csv")
    }


def explain(unmapped: Unmapped) -> Explanation:
    return (
        explanations().get((unmapped.source, unmapped.reason))
        or explanations().get(("", unmapped.reason))
        or Explanation(f"it cannot be used ({unmapped.reason})", "check the exporter's log")
    )


def describe(unmapped: Unmapped) -> str:
    """Describes the assignment on one line, such as `ns/pod/main holds nvidia.com/gpu GPU-…`."""
    holder, device_id = unmapped.holder.text, unmapped.device_id
    if unmapped.source == "hpc":
        return one_line(f"{holder} is in the job file {device_id}" if holder else f"job file {device_id}")
    if unmapped.reason == "bad_annotation":
        return one_line(f"{holder} has the annotation {device_id}")
    verb = "uses" if unmapped.source == "processes" else "holds"
    resource = "" if unmapped.resource in (unmapped.source, "pid") else unmapped.resource
    return one_line(" ".join(filter(None, (holder or "a process", verb, resource, device_id))))


def find_lost_gpus(offered: Iterable[str], unmapped: Iterable[Unmapped], some_lost: bool) -> set[str]:
    """Returns UUIDs of GPUs that must exist: those offered by the kubelet and, if the driver lists fewer GPUs than the
    bus, those that are held. Otherwise, a held id may belong to a GPU that was replaced."""
    uuids = set(offered)
    if some_lost:
        ids = (
            parse_device_id(entry.device_id)
            for entry in unmapped
            if entry.reason == "unknown_device" and entry.source == "kubelet"
        )
        uuids |= {device_id.gpu_uuid for device_id in ids if device_id is not None and device_id.gpu_uuid}
    return uuids
