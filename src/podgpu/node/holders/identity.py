"""Completes the identity of workloads: namespace, pod, container, UID and container id.

Each allocation source reports only some of these fields. The other fields come from the names of
the kubelet's log files and, if podgpu watches pods, from the API server. Identities that contradict
each other are rejected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from podgpu.errors import SourceError
from podgpu.files import explain_read_error
from podgpu.model import Workload, group_by_key, parts_of

if TYPE_CHECKING:
    from podgpu.kube.objects import PodRecord

K = TypeVar("K")
T = TypeVar("T")

_MAX_FILE_NAME = 255  # the kubelet truncates longer names
# Kubernetes names contain no underscores, so the kubelet uses underscores as separators.
_POD_DIRECTORY = re.compile(
    r"(?P<namespace>[a-z0-9-]+)_(?P<pod>[a-z0-9.-]+)_(?P<uid>[A-Za-z0-9-]+)", re.ASCII
)
_CONTAINER_LOG = re.compile(
    r"(?P<pod>[a-z0-9.-]+)_(?P<namespace>[a-z0-9-]+)_(?P<container>[a-z0-9-]+)-(?P<container_id>[0-9a-f]{64})\.log",
    re.ASCII,
)


def parse_log_name(name: str) -> Workload | None:
    """Parses the name of a directory in /var/log/pods or of a file in /var/log/containers.
    Returns None if the name has another form, for example because the kubelet truncated it."""
    match = _POD_DIRECTORY.fullmatch(name) or _CONTAINER_LOG.fullmatch(name)
    return None if match is None else Workload(**match.groupdict())


@dataclass
class Identities:
    """The known pods and containers. Immutable."""

    logged: frozenset[Workload] = frozenset()
    """Pods and containers from the names of log files. A pod can occur with two UIDs, because the
    logs of a replaced pod are kept for a while. A container can occur with two ids after a restart.
    """
    pods: tuple[PodRecord, ...] = ()  # from the API server; empty if pods are not watched
    problems: tuple[SourceError, ...] = ()  # errors that occurred while reading
    current: frozenset[Workload] = frozenset()  # pods and containers that the API server lists

    def __post_init__(self) -> None:
        self.current |= {workload for record in self.pods for workload in _to_workloads(record)}
        self._completed: dict[
            Workload, Workload
        ] = {}  # cache, because `complete` is called every second
        self.api_uids = {record.uid: record.api_uid for record in self.pods if record.api_uid}
        """UID of a static pod -> UID of its mirror pod in the API server."""
        current = [owner for owner in self.current if owner.container_id]
        current_ids = {owner.container_id for owner in current}
        logs = [log for log in self.logged if log.container_id]
        others = [log for log in logs if log.container_id not in current_ids]
        pods = [pod for pod in self.logged | self.current if pod.uid]
        self._by_container_id = _group((owner.container_id, owner) for owner in current + others)
        self._by_uid = _group(
            (pod.uid, Workload(pod.namespace, pod.pod, uid=pod.uid)) for pod in pods
        )
        self._uids = _group(((pod.namespace, pod.pod), pod.uid) for pod in pods)
        self._current_uids = _group(((pod.namespace, pod.pod), pod.uid) for pod in self.current)
        self._logged_ids = _group(
            ((log.namespace, log.pod, log.container), log.container_id) for log in logs
        )
        self._current_ids = _group(
            ((owner.namespace, owner.pod, owner.uid, owner.container), owner.container_id)
            for owner in current
        )

    def complete(self, workload: Workload) -> Workload:
        """Adds the missing fields that are certain. Raises SourceError if fields contradict each
        other.
        """
        if workload not in self._completed:
            self._completed[workload] = self._complete(workload)
        return self._completed[workload]

    def _complete(self, workload: Workload) -> Workload:
        while True:  # repeats, because a step may need a field that a later step adds
            before = workload
            workload = _agree(
                workload, self._by_container_id.get(workload.container_id, frozenset())
            )
            workload = _agree(workload, self._by_uid.get(workload.uid, frozenset()))
            workload = self._add_uid(workload)
            workload = self._add_container_id(workload)
            if workload == before:
                return workload

    def is_alive(self, workload: Workload, containers: Collection[Workload]) -> bool | None:
        """Returns whether the container runs, or None if this is unknown.

        `containers`: UIDs and container ids of all running containers. Empty if processes are not
        visible.
        """
        logs = self._find_logs(workload)
        if not self.logged.issuperset(
            logs
        ):  # the kubelet removes logs only after the pod has ended
            return False
        uids = {container.uid for container in containers} - {""}
        if not uids:
            return True if logs else None
        if workload.container_id and any(
            workload.container_id == container.container_id for container in containers
        ):
            return True
        if workload.uid and workload.uid not in uids:
            return False
        # The pod runs, but no container with this id. It is unknown whether the container will be
        # restarted.
        return True if workload.uid and not workload.container_id else None

    def _find_logs(self, workload: Workload) -> list[Workload]:
        """Returns the logs that must exist while the container runs. Empty if the log directories
        cannot be read.
        """
        namespace, pod, container, uid, container_id = parts_of(workload)[:5]
        names = f"{namespace}_{pod}_{uid}", f"{pod}_{namespace}_{container}-{container_id}.log"
        logs = [parse_log_name(name) for name in names if len(name) <= _MAX_FILE_NAME]
        has_pods, has_containers = (
            any(map(attrgetter(part), self.logged)) for part in ("uid", "container_id")
        )
        return [
            log for log in logs if log is not None and (has_pods if log.uid else has_containers)
        ]

    def _add_uid(self, workload: Workload) -> Workload:
        if workload.uid or not (workload.namespace and workload.pod):
            return workload
        name = workload.namespace, workload.pod
        uids = self._uids.get(name, frozenset())
        if (
            len(uids) > 1 and not workload.container_id
        ):  # a known container id may be from the old pod
            uids = self._current_uids.get(name, frozenset())
        return replace(workload, uid=_only(uids))

    def _add_container_id(self, workload: Workload) -> Workload:
        if workload.container_id or not (
            workload.namespace and workload.pod and workload.container
        ):
            return workload
        name = workload.namespace, workload.pod
        logged = self._logged_ids.get((*name, workload.container), frozenset())
        current = self._current_ids.get((*name, workload.uid, workload.container), frozenset())
        if current:
            # If logs exist, but not for this container id, the API server's state is outdated.
            return replace(
                workload, container_id=_only(current) if current <= logged or not logged else ""
            )
        if not self._uids.get(name, frozenset()) <= {workload.uid}:
            return workload  # the log may belong to an older pod of the same name
        fitting = frozenset(
            container_id
            for container_id in logged
            if any(_fits(workload, owner) for owner in self._by_container_id[container_id])
        )
        return replace(workload, container_id=_only(fitting))


def _group(pairs: Iterable[tuple[K, T]]) -> dict[K, frozenset[T]]:
    return {key: frozenset(values) for key, values in group_by_key(pairs).items()}


def _only(values: frozenset[str]) -> str:
    return next(iter(values)) if len(values) == 1 else ""


def _agree(workload: Workload, candidates: frozenset[Workload]) -> Workload:
    """Adds the fields on which all matching candidates agree. Raises SourceError if no candidate
    matches.
    """
    if not candidates:
        return workload
    matching = [owner for owner in candidates if _fits(workload, owner)]
    if not matching:
        raise SourceError(
            "identity_conflict",
            f"the names, uid and container id of {workload.text} contradict each other",
        )
    agreed = [_only(frozenset(texts)) for texts in zip(*map(parts_of, matching), strict=True)]
    return Workload(*(text or own for text, own in zip(agreed, parts_of(workload), strict=True)))


def _fits(workload: Workload, known: Workload) -> bool:
    pairs = zip(parts_of(workload), parts_of(known), strict=True)
    return all(part == known_part or not part or not known_part for part, known_part in pairs)


def _to_workloads(record: PodRecord) -> Iterable[Workload]:
    yield Workload(record.namespace, record.name, uid=record.uid)
    for container in record.all_containers:
        if container.container_id:
            yield Workload(
                record.namespace, record.name, container.name, record.uid, container.container_id
            )


@dataclass(frozen=True, slots=True)
class IdentityReader:
    pods_dir: str  # usually /var/log/pods
    containers_dir: str  # usually /var/log/containers
    read_pods: Callable[[], tuple[PodRecord, ...]] = tuple  # returns the pods from the API server

    def read(self) -> Identities:
        """Returns the current identities. `problems` contains an error for each directory that
        cannot be read.
        """
        names: list[str] = []
        problems: list[SourceError] = []
        for path in (self.pods_dir, self.containers_dir):
            try:
                names += os.listdir(path)
            except (OSError, ValueError) as error:
                problems.append(explain_read_error(error, path))
        logged = frozenset(
            workload for workload in map(parse_log_name, names) if workload is not None
        )
        return Identities(logged, self.read_pods(), tuple(problems))
