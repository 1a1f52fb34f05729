"""This module says whose process a pid is: the container it runs in, with its names. Reads /proc through a
`ContainerFinder`.

There are three answers: a container, surely none, and that it cannot be told. Taking the third for the second would
make a container at work look idle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from podgpu.errors import SourceError
from podgpu.model import Workload
from podgpu.usage.containers import (
    UNSEEN,
    ContainerFinder,
    Whereabouts,
    require_host_pid_namespace,
    require_sight,
)

Complete = Callable[[Workload], Workload]
"""Fills in the names that are known of a container; raises SourceError when they disagree."""
NO_NAME = "no_pod_name"


@dataclass(frozen=True, slots=True)
class Owners:
    """Of the processes asked about. A process in neither part is surely in no pod's container."""

    workloads: Mapping[int, Workload] = field(default_factory=dict)
    untold: Mapping[int, str] = field(default_factory=dict)
    """Pid -> why it cannot be told whose it is, as a reason word."""


class ProcessOwners:
    """Look after look. Of a pod met for the first time without a name, `learn` is asked once."""

    def __init__(self, finder: ContainerFinder) -> None:
        self._finder = finder
        self._seen: Mapping[int, Whereabouts] = {}
        self._last = Owners()
        self._nameless: frozenset[Workload] = frozenset()

    def find(self, pids: Collection[int], complete: Complete, learn: Callable[[], Complete]) -> Owners:
        """`complete` knows the names as last read, `learn` reads them anew: a job of a few seconds would otherwise be
        over before its name is read.
        """
        self._finder.forget_others(pids)
        self._seen = {pid: self._finder.find(pid) for pid in pids}
        found = {pid: self._whereabouts(pid, place) for pid, place in self._seen.items()}
        inside = {pid: place.workload for pid, place in found.items() if place.sight == "found"}
        named, untold, nameless = _name(inside, complete)
        if not self._nameless.issuperset(nameless.values()):
            more, conflicts, nameless = _name(nameless, learn())
            named, untold = named | more, untold | conflicts
        self._nameless = frozenset(nameless.values())
        untold |= {pid: place.sight for pid, place in found.items() if place.sight in UNSEEN}
        untold |= {pid: NO_NAME for pid, place in nameless.items() if place.uid}  # without one it is no pod's container
        self._last = Owners(named, untold)
        return self._last

    def require_sight(self) -> None:
        """Raises SourceError when the last look could tell nothing at all, and says what to do about it."""
        require_host_pid_namespace(self._finder.proc)
        require_sight(self._seen, self._finder.proc)
        if self._last.untold and not self._last.workloads and NO_NAME in self._last.untold.values():
            raise SourceError(
                NO_NAME,
                "podgpu cannot find out which pods the processes on the GPUs belong to: mount the host's /var/log"
                " read-only (names of files only are read; see --path-varlog), or give podgpu access to the API server",
            )

    def _whereabouts(self, pid: int, seen: Whereabouts) -> Whereabouts:
        """The driver listed it a moment ago: one that ended since, or whose pod's files went first, is as it was."""
        before = self._last.workloads.get(pid)
        same = before is not None and before.container_id == seen.workload.container_id
        return Whereabouts("found", before) if before is not None and (same or seen.sight == "gone") else seen


def _name(
    found: Mapping[int, Workload], complete: Complete
) -> tuple[dict[int, Workload], dict[int, str], dict[int, Workload]]:
    """Those with a name, those whose names disagree with the reason word, and those without a name."""
    named: dict[int, Workload] = {}
    conflicts: dict[int, str] = {}
    nameless: dict[int, Workload] = {}
    for pid, workload in found.items():
        try:
            known = complete(workload)
        except SourceError as e:
            conflicts[pid] = e.reason
        else:
            (named if known.pod else nameless)[pid] = known
    return named, conflicts, nameless
