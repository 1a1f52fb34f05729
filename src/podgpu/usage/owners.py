"""Finds the workload of each process on the GPUs.

A process is in a container, or certainly in none, or its container cannot be determined. The third case is kept apart:
without it, a working container would look idle.
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

Complete = Callable[[Workload], Workload]  # adds the known names of a container; raises SourceError if they disagree
NO_NAME = "no_pod_name"


@dataclass(frozen=True, slots=True)
class Owners:
    """Owners of processes by pid. A process that is neither in `workloads` nor in `untold` is in no pod."""

    workloads: Mapping[int, Workload] = field(default_factory=dict)
    untold: Mapping[int, str] = field(default_factory=dict)  # reason why the owner cannot be determined
    mps_servers: frozenset[int] = frozenset()
    nameless: Mapping[int, Workload] = field(default_factory=dict)  # containers whose pod is unknown


class ProcessOwners:
    def __init__(self, finder: ContainerFinder) -> None:
        self._finder = finder
        self._seen: Mapping[int, Whereabouts] = {}
        self._last = Owners()
        self._nameless: frozenset[Workload] = frozenset()

    def find(self, pids: Collection[int], complete: Complete, learn: Callable[[], Complete]) -> Owners:
        """Looks up the processes.

        `complete` uses the names that were last read, `learn` reads them again. It is called once for each new
        container without a name, because a short job would end before the next regular reading.
        """
        self._finder.forget_others(pids)
        self._seen = {pid: self._finder.find(pid) for pid in pids}
        places = {pid: self._correct(pid, place) for pid, place in self._seen.items()}
        inside = {pid: place.workload for pid, place in places.items() if place.sight == "found"}
        named, untold, nameless = _name(inside, complete)
        if not self._nameless.issuperset(nameless.values()):
            more, conflicts, nameless = _name(nameless, learn())
            named, untold = named | more, untold | conflicts
        self._nameless = frozenset(nameless.values())
        untold |= {pid: place.sight for pid, place in places.items() if place.sight in UNSEEN}
        untold |= {pid: NO_NAME for pid, place in nameless.items() if place.uid}  # without a UID it is not in a pod
        servers = frozenset(pid for pid, place in self._seen.items() if place.is_mps_server)
        self._last = Owners(named, untold, servers, nameless)
        return self._last

    def require_sight(self) -> None:
        """Raises SourceError if the last lookup found nothing at all. The message says what to do."""
        require_host_pid_namespace(self._finder.proc)
        require_sight(self._seen, self._finder.proc)
        if self._last.untold and not self._last.workloads and NO_NAME in self._last.untold.values():
            raise SourceError(
                NO_NAME,
                "podgpu cannot find out which pods the processes on the GPUs belong to: mount the host's /var/log"
                " read-only (only names of files are read; see --path-varlog), or give podgpu access to the API server",
            )

    def _correct(self, pid: int, seen: Whereabouts) -> Whereabouts:
        """Uses the previous owner if the process has just ended, or if the names of its pod were removed first."""
        before = self._last.workloads.get(pid)
        same = before is not None and before.container_id == seen.workload.container_id
        return Whereabouts("found", before) if before is not None and (same or seen.sight == "gone") else seen


def _name(
    places: Mapping[int, Workload], complete: Complete
) -> tuple[dict[int, Workload], dict[int, str], dict[int, Workload]]:
    """Returns workloads with a name, reasons of those whose names disagree, and workloads without a name."""
    named: dict[int, Workload] = {}
    conflicts: dict[int, str] = {}
    nameless: dict[int, Workload] = {}
    for pid, workload in places.items():
        try:
            known = complete(workload)
        except SourceError as e:
            conflicts[pid] = e.reason
        else:
            (named if known.pod else nameless)[pid] = known
    return named, conflicts, nameless
