"""Finds the workload of each process on the GPUs.

A process is in a container, outside any container, or its container cannot be determined. The last case is separate,
because a busy container would otherwise look idle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from podgpu.errors import SourceError
from podgpu.model import Workload
from podgpu.usage.containers import (
    FAILED_LOOKUPS,
    ContainerFinder,
    ContainerLookup,
    require_host_pid_namespace,
    require_permission,
)

NO_NAME = "no_pod_name"
UNKNOWN_USER = Workload(user="unknown")


@dataclass(frozen=True, slots=True)
class Owners:
    """Owners of processes by pid. A process that is neither in `workloads` nor in `unknown` is not in a pod."""

    workloads: Mapping[int, Workload] = field(default_factory=dict)
    unknown: Mapping[int, str] = field(default_factory=dict)  # reason, if the owner cannot be determined
    mps_servers: frozenset[int] = frozenset()
    nameless: Mapping[int, Workload] = field(default_factory=dict)  # containers whose pod is unknown
    commands: Mapping[int, str] = field(default_factory=dict)  # only on a node without Kubernetes


class NameSource(Protocol):
    def complete(self, workload: Workload) -> Workload:
        """Adds the names of pod and container from the last reading. Raises SourceError if sources disagree."""

    def read_identities(self) -> None:
        """Reads the names again."""


class ProcessOwners:
    def __init__(self, finder: ContainerFinder, names: NameSource) -> None:
        self._finder = finder
        self._names = names
        self._lookups: Mapping[int, ContainerLookup] = {}
        self._last = Owners()
        self._nameless: frozenset[Workload] = frozenset()

    def find(self, pids: Collection[int]) -> Owners:
        before, self._lookups = self._lookups, self._finder.find_all(pids)
        lookups = {pid: self._correct(pid, lookup) for pid, lookup in self._lookups.items()}
        users = {pid: lookup.workload for pid, lookup in lookups.items() if lookup.workload.user}
        if self._finder.finds_users:
            # /proc with hidepid=invisible hides running processes of other users.
            hidden = {pid for pid, one in lookups.items() if one.outcome == "gone" and before.get(pid) == one}
            failed = {pid for pid, one in lookups.items() if one.outcome in FAILED_LOOKUPS}
            users |= dict.fromkeys(hidden | failed, UNKNOWN_USER)
        inside = {pid: one.workload for pid, one in lookups.items() if one.outcome == "found" and pid not in users}
        named, unknown, nameless = self._name(inside)
        if not self._nameless.issuperset(nameless.values()):  # a short job could end before the next regular reading
            self._names.read_identities()
            more, conflicts, nameless = self._name(nameless)
            named, unknown = named | more, unknown | conflicts
        self._nameless = frozenset(nameless.values())
        unknown |= {pid: lookup.outcome for pid, lookup in lookups.items() if lookup.outcome in FAILED_LOOKUPS}
        unknown |= {pid: NO_NAME for pid, workload in nameless.items() if workload.uid}  # no UID: not in a pod
        servers = frozenset(pid for pid, lookup in self._lookups.items() if lookup.is_mps_server)
        commands = {pid: lookup.command for pid, lookup in self._lookups.items() if lookup.command}
        self._last = Owners(named | users, unknown, servers, nameless, commands)
        return self._last

    def require_permission(self) -> None:
        """Raises SourceError, with advice, if no process of the last lookup could be attributed."""
        require_host_pid_namespace(self._finder.proc)
        require_permission(self._lookups, self._finder.proc)
        if self._last.unknown and not self._last.workloads and NO_NAME in self._last.unknown.values():
            raise SourceError(
                NO_NAME,
                "podgpu cannot determine the pods of the processes on the GPUs: mount the host's /var/log read-only"
                " (podgpu reads only file names; see --path-varlog), or give podgpu access to the API server",
            )

    def _correct(self, pid: int, lookup: ContainerLookup) -> ContainerLookup:
        """Returns the previous owner if the process has just ended, or if its pod's names were already removed."""
        before = self._last.workloads.get(pid)
        same = before is not None and before.container_id == lookup.workload.container_id != ""
        return ContainerLookup("found", before) if before is not None and (same or lookup.outcome == "gone") else lookup

    def _name(
        self, workloads: Mapping[int, Workload]
    ) -> tuple[dict[int, Workload], dict[int, str], dict[int, Workload]]:
        """Returns, by pid: workloads with a name, errors of conflicting names, and workloads without a name."""
        named: dict[int, Workload] = {}
        conflicts: dict[int, str] = {}
        nameless: dict[int, Workload] = {}
        for pid, workload in workloads.items():
            try:
                completed = self._names.complete(workload)
            except SourceError as e:
                conflicts[pid] = e.reason
            else:
                (named if completed.pod else nameless)[pid] = completed
        return named, conflicts, nameless
