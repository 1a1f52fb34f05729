"""Several sources, one answer: who holds which device. Pure.

Sources come in order of precedence. The first that names a workload says what that workload holds; later ones may
complete it (identity, share, labels) but not contradict it: what they add is refused and counted, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace

from podgpu.allocation.source import LAGGING, LAST_RESORT
from podgpu.errors import SourceError
from podgpu.model import Allocation, Assignment, Unmapped, Workload

Who = tuple[str, ...]
Complete = Callable[[Workload], Workload]
"""Fills in the parts of an identity that are known for sure; raises SourceError when they disagree."""


def merge(readings: Mapping[str, Allocation], complete: Complete = lambda workload: workload) -> Allocation:
    """One allocation from the sources' own (by name, the most trusted first)."""
    settled: dict[Who, dict[str, Assignment]] = {}
    refused: list[Unmapped] = []
    for source, reading in sorted(readings.items(), key=lambda item: item[0] in LAST_RESORT):
        claims: dict[Who, list[Assignment]] = {}
        for assignment in reading.assignments:
            try:
                known = replace(assignment, holder=complete(assignment.holder))
            except SourceError as e:
                refused.append(_refuse(assignment, e.reason))
            else:
                claims.setdefault(_who(known.holder), []).append(known)
        if LAGGING.get(source) in readings:
            claims = {who: [a for a in claimed if a.device in settled.get(who, {})] for who, claimed in claims.items()}
        refused += _settle(settled, claims)
    held = [a for by_device in settled.values() for a in by_device.values()]
    unmapped = [u for reading in readings.values() for u in reading.unmapped]
    return Allocation(_in_order(_with_shares(_without_needless(held))), tuple(unmapped + refused))


def _settle(settled: dict[Who, dict[str, Assignment]], claims: dict[Who, list[Assignment]]) -> list[Unmapped]:
    """Takes one source's claims in; returns those that contradict what a more trusted source said."""
    refused = []
    for who, assignments in claims.items():
        known = settled.get(who)
        if known is None:
            settled[who] = {a.device: a for a in assignments}
            continue
        for assignment in assignments:
            if assignment.device in known:
                known[assignment.device] = _combine(known[assignment.device], assignment)
            elif assignment.source not in LAST_RESORT:
                refused.append(_refuse(assignment, "contradicted"))
    return refused


def _who(workload: Workload) -> Who:
    """What two sources must agree on to mean the same workload."""
    if workload.job:
        return ("job", workload.job)
    if workload.pod:
        return (workload.namespace, workload.pod, workload.container)
    return ("uid", workload.uid, workload.container or workload.container_id)


def _combine(trusted: Assignment, other: Assignment) -> Assignment:
    """The trusted one, with what only the other knows."""
    parts = {f.name: getattr(trusted.holder, f.name) or getattr(other.holder, f.name) for f in fields(trusted.holder)}
    return replace(
        trusted,
        holder=Workload(**parts),
        replica=trusted.replica or other.replica,
        share=trusted.share if trusted.share is not None else other.share,
        attributes=tuple(sorted({**dict(other.attributes), **dict(trusted.attributes)}.items())),
    )


def _without_needless(held: Iterable[Assignment]) -> list[Assignment]:
    """Who is merely seen at work counts as a holder only where nobody is known to hold the device."""
    held = list(held)
    given = {a.device for a in held if a.source not in LAST_RESORT}
    return [a for a in held if a.source not in LAST_RESORT or a.device not in given]


def _with_shares(held: Sequence[Assignment]) -> list[Assignment]:
    """A replica whose siblings nobody counted is one of as many as hold the device; a sole holder has it all."""
    holders = Counter(a.device for a in held)
    return [a if a.share is not None else replace(a, share=_share(a, holders[a.device])) for a in held]


def _share(assignment: Assignment, holders: int) -> float | None:
    if assignment.source in LAST_RESORT:
        return None
    if assignment.replica:
        return 1 / holders
    return 1.0 if holders == 1 else None


def _refuse(assignment: Assignment, reason: str) -> Unmapped:
    return Unmapped(assignment.source, reason, assignment.device, "", assignment.holder)


def _in_order(held: Iterable[Assignment]) -> tuple[Assignment, ...]:
    return tuple(
        sorted(held, key=lambda a: (a.device, a.holder.namespace, a.holder.pod, a.holder.container, a.holder.job))
    )
