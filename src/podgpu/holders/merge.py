"""This module makes one answer of several sources: who holds which device. Pure.

Sources come in order of precedence. The first that names a workload says what that workload holds; later ones may
complete it (identity, share, labels) but not contradict it: what they add is refused and counted, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from podgpu.errors import SourceError
from podgpu.holders.source import LAGGING, LAST_RESORT
from podgpu.holders.vcuda import merge_vcuda
from podgpu.model import Allocation, Assignment, Unmapped, Who, Workload, parts_of

Complete = Callable[[Workload], Workload]
"""Fills in the parts of an identity that are known for sure; raises SourceError when they disagree."""


@dataclass(slots=True)
class _Settled:
    """What is taken to be true of one workload so far."""

    source: str
    """The most trusted that names it."""
    holder: Workload
    holds: dict[str, list[Assignment]]
    """Device -> what the sources say of it, the most trusted first; `holder` above is who holds it."""

    def takes(self, claim: Assignment) -> bool:
        """False: it contradicts what the more trusted source said."""
        known = self.holds.get(claim.device)
        if known is not None:
            known.append(claim)
        elif claim.source == self.source:
            self.holds[claim.device] = [claim]
        else:
            return False
        return True


def merge(readings: Mapping[str, Allocation], complete: Complete = lambda workload: workload) -> Allocation:
    """One allocation from the sources' own (by name, the most trusted first)."""
    settled: dict[Who, _Settled] = {}
    refused: list[Unmapped] = []
    for source, reading in sorted(readings.items(), key=lambda item: item[0] in LAST_RESORT):
        lags = LAGGING.get(source) in readings
        for claims in _by_holder(reading.assignments):
            try:
                holder = complete(claims[0].holder)
            except SourceError as error:
                refused += (_refuse(claim, claim.holder, error.reason) for claim in claims)
            else:
                refused += _settle(settled, holder, claims, lags)
    unmapped = [unmapped_id for reading in readings.values() for unmapped_id in reading.unmapped]
    vcuda, nobodys = merge_vcuda(readings, complete)
    return Allocation(_held(settled.values()), tuple(unmapped + refused + nobodys), vcuda)


def _by_holder(assignments: Iterable[Assignment]) -> Iterable[list[Assignment]]:
    """By object, not by value: a source has one Workload for all that it holds, and hashing one is dear."""
    groups: dict[int, list[Assignment]] = {}
    for assignment in assignments:
        groups.setdefault(id(assignment.holder), []).append(assignment)
    return groups.values()


def _settle(
    settled: dict[Who, _Settled], holder: Workload, claims: Sequence[Assignment], lags: bool
) -> Iterator[Unmapped]:
    """Takes one holder's claims in; gives back those that contradict what a more trusted source said.

    `lags`: where they do, or tell of somebody new, they are out of date and not worth a word.
    """
    who, source = holder.who, claims[0].source
    known = settled.get(who)
    if known is None:
        if not lags:
            settled[who] = _Settled(source, holder, {claim.device: [claim] for claim in claims})
        return
    if known.holder.uid and holder.uid and known.holder.uid != holder.uid:
        # A pod of the same name that came in the other's place: what is said of the one is not true of the other.
        reason, left = "identity_conflict", claims
    else:
        known.holder = _unite(known.holder, holder)
        reason, left = "contradicted", [claim for claim in claims if not known.takes(claim)]
    if not lags and source not in LAST_RESORT:
        yield from (_refuse(claim, holder, reason) for claim in left)


def _unite(trusted: Workload, other: Workload) -> Workload:
    """The trusted one, with what only the other knows."""
    if trusted == other:
        return trusted
    return Workload(
        trusted.namespace or other.namespace,
        trusted.pod or other.pod,
        trusted.container or other.container,
        trusted.uid or other.uid,
        trusted.container_id or other.container_id,
        trusted.job or other.job,
    )


def _held(settled: Iterable[_Settled]) -> tuple[Assignment, ...]:
    """Every assignment that stands, in its holder's full name and with its share, by device and name.

    Who is merely seen at work counts as a holder only where nobody is known to hold the device.
    """
    by_name = sorted(settled, key=lambda workload: parts_of(workload.holder))
    given = {device for workload in by_name if workload.source not in LAST_RESORT for device in workload.holds}
    for workload in by_name:
        if workload.source in LAST_RESORT:
            workload.holds = {device: claims for device, claims in workload.holds.items() if device not in given}
    holders = Counter(device for workload in by_name for device in workload.holds)
    held = [_combine(claims, workload.holder, holders) for workload in by_name for claims in workload.holds.values()]
    return tuple(sorted(held, key=attrgetter("device")))


def _combine(claims: Sequence[Assignment], holder: Workload, holders: Mapping[str, int]) -> Assignment:
    """The most trusted one, with what only the others know."""
    trusted = claims[0]
    share, replica, attributes = trusted.share, trusted.replica, trusted.attributes
    for claim in claims[1:]:
        share = claim.share if share is None else share
        replica = replica or claim.replica
        if claim.attributes:
            attributes = tuple(sorted({**dict(claim.attributes), **dict(attributes)}.items()))
    if share is None and trusted.source not in LAST_RESORT and not replica and holders[trusted.device] == 1:
        share = 1.0  # a sole holder has it all; of a replica nobody knows how many there are
    return Assignment(trusted.device, holder, trusted.source, replica, share, attributes)


def _refuse(assignment: Assignment, holder: Workload, reason: str) -> Unmapped:
    return Unmapped(assignment.source, reason, assignment.device, "", holder)
