"""This module says who is taken to hold what while a source is silent, or was started anew and does not know everybody
yet.

A kubelet that restarts answers with no pods and no error: for a second, and for as long as the API server is away. So a
holder is not gone because a new kubelet does not name it. It is kept for `KEEP_SECONDS` after it was last named, for
longer while it is plainly there, and no longer once it is plainly gone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from podgpu.errors import SourceError
from podgpu.holders.holdings import in_order
from podgpu.holders.merge import Complete
from podgpu.model import Allocation, Assignment, VcudaRequest, Workload

KEEP_SECONDS = 60.0
"""How long a holder outlives the last word about it. While the kubelet is away it starts and ends no pods, and it asks
clients over its rate limit to go on with what they have; longer than this it is a guess, unless something shows it."""

Signs = Callable[[Workload], bool | None]
"""True: that container is plainly there. False: it is plainly gone. None: nothing tells."""


def no_signs(_workload: Workload) -> None:
    """Where nothing on the node can be looked at, only time tells."""


@dataclass(slots=True)
class _Held:
    """What one holder was last said to hold."""

    named_at: float
    assignments: list[Assignment]
    vcuda: list[VcudaRequest]
    known: Workload
    """With the uid and container id it had when it was last named: its files go when it goes."""


class HolderKeeper:
    """The last word about each holder of one source."""

    def __init__(self) -> None:
        self._answer: Allocation | None = None
        self._answered_at = float("-inf")
        self._named: dict[Workload, _Held] = {}
        """By the last answer."""
        self._unnamed: dict[Workload, _Held] = {}
        """By an earlier life of the source, and not by this one yet."""
        self._complete: Complete = lambda workload: workload
        """Who was who when the source last answered."""
        self.in_doubt = False
        """Whether it matters what the node shows of somebody."""
        self.forgotten = 0
        """How many a source that was just started anew does not name. Only in the turn in which it was met."""

    def hear(self, answer: Allocation | None, now: float) -> None:
        """What a turn brought; None is silence. Whom the same life named before, and does not any more, is gone."""
        if answer is None:
            self._identify(self._named)
        else:
            before, is_new = self._unnamed.keys(), self._answer is not None and answer.life != self._answer.life
            self._take(answer, now)
            self.forgotten = len(self._unnamed.keys() - before) if is_new else 0
        self.in_doubt = bool(self._unnamed or (answer is None and self._named))

    def _take(self, answer: Allocation, now: float) -> None:
        before = self._unnamed
        if self._answer is not None and answer.life != self._answer.life:
            self._identify(self._named)
            before = before | self._named
        self._named = _by_holder(answer, now)
        given_away = _had_alone(before.values()) & {_what(assignment) for assignment in answer.assignments}
        self._unnamed = {
            holder: of_holder
            for holder, of_holder in before.items()
            if holder not in self._named and given_away.isdisjoint(map(_what, of_holder.assignments))
        }
        self._answer, self._answered_at = answer, now

    def settle(self, now: float, complete: Complete, signs: Signs) -> Allocation | None:
        """Who holds what now; None when nothing was said for so long that nobody knows."""
        if not self.in_doubt:
            self._complete = complete
            return self._answer if now - self._answered_at <= KEEP_SECONDS else None
        if self._answered_at == now:
            self._complete = complete
        else:
            self._named = _who_stay(self._named, now, signs)
        self._unnamed = _who_stay(self._unnamed, now, signs)
        return self._united(now - self._answered_at <= KEEP_SECONDS)

    def _united(self, is_recent: bool) -> Allocation | None:
        held = [*self._named.values(), *self._unnamed.values()]
        if self._answer is None or not (held or is_recent):
            return None
        assignments = (item for holder in held for item in holder.assignments)
        united = in_order(assignments, self._answer.unmapped if is_recent else ())
        return replace(united, vcuda=tuple(item for holder in held for item in holder.vcuda), life=self._answer.life)

    def _identify(self, held: Mapping[Workload, _Held]) -> None:
        for holder, of_holder in held.items():
            with suppress(SourceError):  # its names contradict each other
                of_holder.known = self._complete(holder)


def _by_holder(answer: Allocation, now: float) -> dict[Workload, _Held]:
    held: dict[Workload, _Held] = {}

    def of(holder: Workload) -> _Held:
        return held.setdefault(holder, _Held(now, [], [], holder))

    for assignment in answer.assignments:
        of(assignment.holder).assignments.append(assignment)
    for request in answer.vcuda:
        of(request.holder).vcuda.append(request)
    return held


def _what(assignment: Assignment) -> tuple[str, ...]:
    """What is in somebody's hands. A device may be in many through claims (DRA), but those are not given on."""
    return (assignment.device, assignment.replica, *(text for pair in assignment.attributes for text in pair))


def _had_alone(held: Iterable[_Held]) -> Set[tuple[str, ...]]:
    """What only one had: if somebody else has it now, it was given on. koordinator's GPUs can be in many hands."""
    hands = Counter(_what(assignment) for holder in held for assignment in holder.assignments)
    return {what for what, count in hands.items() if count == 1}


def _who_stay(held: Mapping[Workload, _Held], now: float, signs: Signs) -> dict[Workload, _Held]:
    return {holder: of_holder for holder, of_holder in held.items() if _stays(of_holder, now, signs)}


def _stays(held: _Held, now: float, signs: Signs) -> bool:
    sign = signs(held.known)
    return sign if sign is not None else now - held.named_at <= KEEP_SECONDS


# What the node shows


class SignsOfLife:
    """Looks for containers among the processes of the node and the names of its log files."""

    def __init__(
        self, pods_dir: str, containers_dir: str, living: Callable[[], Collection[Workload] | None] = lambda: None
    ) -> None:
        """`living`: uid and container id of every process's container; None where they cannot be seen."""
        self._pods_dir = pods_dir
        self._containers_dir = containers_dir
        self._living = living

    def read(self) -> Signs:
        living = self._living()
        logs = [directory for directory in (self._pods_dir, self._containers_dir) if _has_names(directory)]
        uids, ids = ({getattr(workload, part) for workload in living or ()} - {""} for part in ("uid", "container_id"))
        if not uids:  # not even podgpu's own pod can be seen
            return lambda workload: self._by_logs(workload, logs)

        def sign(workload: Workload) -> bool | None:
            seen = _by_processes(workload, uids, ids)
            # Logs outlast the container: beside processes they can only tell that it is gone.
            return seen if seen is not None or self._by_logs(workload, logs) is not False else False

        return sign

    def _by_logs(self, workload: Workload, directories: Collection[str]) -> bool | None:
        """The kubelet removes a pod's logs some time after the pod, and never before.

        A name of a log that is longer than a file's name can be is cut, and tells nothing.
        """
        expected = [
            os.path.join(folder, name)
            for folder, name in self._log_names(workload)
            if folder in directories and len(os.fsencode(name)) <= _LONGEST_NAME
        ]
        return all(map(os.path.lexists, expected)) if expected else None

    def _log_names(self, workload: Workload) -> Iterator[tuple[str, str]]:
        if workload.uid:
            yield self._pods_dir, f"{workload.namespace}_{workload.pod}_{workload.uid}"
        if workload.container_id:
            name = f"{workload.pod}_{workload.namespace}_{workload.container}-{workload.container_id}.log"
            yield self._containers_dir, name


_LONGEST_NAME = 255


def _has_names(directory: str) -> bool:
    """One without any is not the host's: podgpu's own pod would be in there."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except (OSError, ValueError):
        return False


def _by_processes(workload: Workload, uids: Set[str], container_ids: Set[str]) -> bool | None:
    """A pod without any process is no more: one of them keeps its namespaces open for as long as it is there."""
    if workload.container_id in container_ids:
        return True
    if not workload.uid:
        return None
    if workload.uid not in uids:
        return False
    # Where the id is known, the pod is there without this container: it ended, or will be started again.
    return None if workload.container_id else True
