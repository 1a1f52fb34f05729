"""This module says who is on a device in one turn: those who hold it, and those whose processes run there. Pure.

An account goes by names, as the series it becomes do, so there is one of them at a time. A pod made anew has the old
one's names and another uid: what is left of the old one then is charged to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from msgspec.structs import astuple, replace

from podgpu.model import Assignment, Who, Workload

_FINEST_SHARE = 10**6
"""Parts of a device; HAMi and gpu-manager give hundredths, time slices one of a few."""


@lru_cache(maxsize=1024)
def exact_share(share: float | None) -> Fraction | None:
    """None where nobody knows it, or where it is no part of a device."""
    if share is None or not 0 <= share <= 1:
        return None
    return Fraction(share).limit_denominator(_FINEST_SHARE)


@dataclass(frozen=True, slots=True)
class Holding:
    """One holder of one device."""

    workload: Workload
    share: Fraction | None


def holdings_of(assignments: Iterable[Assignment]) -> dict[str, dict[Who, Holding]]:
    """By device. Of two by one holder, which no merged allocation has, the larger share counts."""
    held: dict[str, dict[Who, Holding]] = {}
    for assignment in assignments:
        if who := assignment.holder.who:
            holding = Holding(assignment.holder, exact_share(assignment.share))
            holders = held.setdefault(assignment.device, {})
            holders[who] = max(holding, holders[who], key=_rank) if who in holders else holding
    return held


def _rank(holding: Holding) -> tuple[Fraction, tuple[str, ...]]:
    return Fraction(-1) if holding.share is None else holding.share, astuple(holding.workload)


@dataclass(frozen=True, slots=True)
class Presence:
    """Who is there, and who of them is charged for which process."""

    workloads: Mapping[Who, Workload]
    payers: Mapping[int, Who]


def presence_of(
    holders: Mapping[Who, Holding], users: Mapping[int, Workload], known: Mapping[Who, Workload]
) -> Presence:
    """From the holders, the containers of the processes by pid, and who was there a turn ago."""
    names = {pid: who for pid, workload in users.items() if (who := workload.who)}
    using: dict[Who, set[Workload]] = {}
    for pid, who in names.items():
        using.setdefault(who, set()).add(users[pid])
    workloads = {
        who: _identify(holders.get(who), using.get(who, set()), known.get(who)) for who in holders.keys() | using.keys()
    }
    payers = {pid: who for pid, who in names.items() if not differ(users[pid], workloads[who])}
    return Presence(workloads, payers)


def differ(one: Workload, other: Workload) -> bool:
    """Whether two of one name are two pods. A uid nobody knows may be any."""
    return bool(one.uid and other.uid and one.uid != other.uid)


def _identify(holding: Holding | None, users: set[Workload], known: Workload | None) -> Workload:
    """The holder's word, else that of its processes: the pod that was there already, as long as it is."""
    words = [] if holding is None else [holding.workload]
    words += sorted(users, key=lambda user: _closeness(user, known)) if len(users) > 1 else users
    words += [] if known is None else [known]
    uid = next((word.uid for word in words if word.uid), "")
    return words[0] if words[0].uid == uid else replace(words[0], uid=uid)


def _closeness(user: Workload, known: Workload | None) -> tuple[bool, bool, tuple[str, ...]]:
    return known is None or user.uid != known.uid, not user.uid, astuple(user)
