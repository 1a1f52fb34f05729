"""Several sources, one answer: who holds which device. Pure.

Sources come in order of precedence. The first that names a workload says what that workload holds; later ones may
complete it (identity, share, labels) but not contradict it: what they add is refused and counted, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from podgpu.allocation.holdings import by_device_and_name
from podgpu.allocation.source import LAGGING, LAST_RESORT
from podgpu.allocation.vcuda import merge_vcuda
from podgpu.errors import SourceError
from podgpu.model import Allocation, Assignment, Unmapped, Workload

Who = tuple[str, ...]
Complete = Callable[[Workload], Workload]
"""Fills in the parts of an identity that are known for sure; raises SourceError when they disagree."""


@dataclass(slots=True)
class _Settled:
    """What is taken to be true of one workload so far."""

    source: str
    """The most trusted that names it."""
    holder: Workload
    holds: dict[str, Assignment]
    """By device. Their own `holder` is as their source had it: `holder` above is who it is."""

    def takes(self, claim: Assignment) -> bool:
        """False: it contradicts what the more trusted source said."""
        trusted = self.holds.get(claim.device)
        if trusted is None:
            if claim.source != self.source:
                return False
            self.holds[claim.device] = claim
        elif claim.attributes or trusted.share is None or not trusted.replica:
            self.holds[claim.device] = _combine(trusted, claim)
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
                refused += (_refuse(one, one.holder, error.reason) for one in claims)
            else:
                refused += _settle(settled, holder, claims, lags)
    unmapped = [one for reading in readings.values() for one in reading.unmapped]
    vcuda, nobodys = merge_vcuda(readings, complete, _who)
    return Allocation(by_device_and_name(_held(settled.values())), tuple(unmapped + refused + nobodys), vcuda)


def _by_holder(assignments: Iterable[Assignment]) -> Iterable[list[Assignment]]:
    """By object, not by value: a source has one Workload for all that it holds, and hashing one is dear."""
    groups: dict[int, list[Assignment]] = {}
    for one in assignments:
        groups.setdefault(id(one.holder), []).append(one)
    return groups.values()


def _settle(
    settled: dict[Who, _Settled], holder: Workload, claims: Sequence[Assignment], lags: bool
) -> Iterator[Unmapped]:
    """Takes one holder's claims in; gives back those that contradict what a more trusted source said.

    `lags`: where they do, or tell of somebody new, they are out of date and not worth a word.
    """
    who, source = _who(holder), claims[0].source
    known = settled.get(who)
    if known is None:
        if not lags:
            settled[who] = _Settled(source, holder, {one.device: one for one in claims})
        return
    if known.holder.uid and holder.uid and known.holder.uid != holder.uid:
        # A pod of the same name that came in the other's place: what is said of the one is not true of the other.
        reason, left = "identity_conflict", claims
    else:
        known.holder = _unite(known.holder, holder)
        reason, left = "contradicted", [one for one in claims if not known.takes(one)]
    if not lags and source not in LAST_RESORT:
        yield from (_refuse(one, holder, reason) for one in left)


def _who(workload: Workload) -> Who:
    """What two sources must agree on to mean the same workload."""
    if workload.job:
        return ("job", workload.job)
    if workload.pod:
        return (workload.namespace, workload.pod, workload.container)
    return ("uid", workload.uid, workload.container or workload.container_id)


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


def _combine(trusted: Assignment, other: Assignment) -> Assignment:
    share = trusted.share if trusted.share is not None else other.share
    replica = trusted.replica or other.replica
    attributes = trusted.attributes
    if other.attributes:
        attributes = tuple(sorted({**dict(other.attributes), **dict(trusted.attributes)}.items()))
    if (share, replica, attributes) == (trusted.share, trusted.replica, trusted.attributes):
        return trusted
    return Assignment(trusted.device, trusted.holder, trusted.source, replica, share, attributes)


def _held(settled: Iterable[_Settled]) -> Iterator[Assignment]:
    """Every assignment that stands, in its holder's full name and with its share.

    Who is merely seen at work counts as a holder only where nobody is known to hold the device.
    """
    every = [(one, by.holder) for by in settled for one in by.holds.values()]
    given = {one.device for one, _ in every if one.source not in LAST_RESORT}
    held = [pair for pair in every if pair[0].source not in LAST_RESORT or pair[0].device not in given]
    holders = Counter(one.device for one, _ in held)
    for one, holder in held:
        share = one.share if one.share is not None else _share(one, holders[one.device])
        if holder is one.holder and share == one.share:
            yield one
        else:
            yield Assignment(one.device, holder, one.source, one.replica, share, one.attributes)


def _share(assignment: Assignment, holders: int) -> float | None:
    """A replica whose siblings nobody counted is one of as many as hold the device; a sole holder has it all."""
    if assignment.source in LAST_RESORT:
        return None
    if assignment.replica:
        return 1 / holders
    return 1.0 if holders == 1 else None


def _refuse(assignment: Assignment, holder: Workload, reason: str) -> Unmapped:
    return Unmapped(assignment.source, reason, assignment.device, "", holder)
