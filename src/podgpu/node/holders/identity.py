"""Completes the identity of workloads: namespace, pod, container, UID and container id.

Each allocation source reports only some of these fields. The other fields come from the names of
the kubelet's log files and, if podgpu watches pods, from the API server. Identities that contradict
each other are rejected.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Set
from dataclasses import dataclass

from msgspec.structs import replace

from podgpu.errors import SourceError
from podgpu.files import explain_read_error
from podgpu.kube.objects import PodRecord
from podgpu.model import WORKLOAD_PARTS, Workload, parts_of

_IdsByName = dict[tuple[str, ...], set[str]]
_WorkloadsById = dict[str, set[Workload]]
_MAX_FILE_NAME = 255  # the kubelet truncates longer names
# Kubernetes names contain no underscores, so the kubelet uses underscores as separators.
_POD_DIRECTORY = re.compile(
    r"(?P<namespace>[a-z0-9-]+)_(?P<pod>[a-z0-9.-]+)_(?P<uid>[A-Za-z0-9-]+)", re.ASCII
)
_CONTAINER_LOG = re.compile(
    r"(?P<pod>[a-z0-9.-]+)_(?P<namespace>[a-z0-9-]+)_(?P<container>[a-z0-9-]+)"
    r"-(?P<container_id>[0-9a-f]{64})\.log",
    re.ASCII,
)


def parse_log_name(name: str) -> Workload | None:
    """Parses the name of a directory in /var/log/pods or of a file in /var/log/containers.

    Returns None if the name has another form, for example because the kubelet truncated it.
    """
    match = _POD_DIRECTORY.fullmatch(name) or _CONTAINER_LOG.fullmatch(name)
    if match is None:
        return None
    return Workload(**match.groupdict())


@dataclass
class Identities:
    """The known pods and containers. Immutable."""

    # Pods and containers from the names of log files. A pod can occur with two UIDs, because the
    # logs of a replaced pod are kept for a while. A container can occur with two ids after a
    # restart.
    logged: frozenset[Workload] = frozenset()
    pods: tuple[PodRecord, ...] = ()  # from the API server; empty if pods are not watched
    problems: tuple[SourceError, ...] = ()  # errors that occurred while reading
    current: frozenset[Workload] = frozenset()  # pods and containers that the API server lists

    def __post_init__(self) -> None:
        self.current = self.current.union(*map(_to_workloads, self.pods))

        # UID of a static pod -> UID of its mirror pod in the API server
        self.api_uids = {record.uid: record.api_uid for record in self.pods if record.api_uid}

        # False if /var/log/pods cannot be read
        self._has_pod_logs = any(log.uid for log in self.logged)

        # A cache, because `complete` is called every second.
        self._completed: dict[Workload, Workload] = {}

        self._index_uids()
        self._index_containers()

    def _index_uids(self) -> None:
        self._by_uid: _WorkloadsById = defaultdict(set)
        self._uids: _IdsByName = defaultdict(set)

        for known in self.logged | self.current:
            uid = known.uid
            if uid:
                pod = Workload(known.namespace, known.pod, uid=uid)
                self._by_uid[uid].add(pod)
                self._uids[known.namespace, known.pod].add(uid)

    def _index_containers(self) -> None:
        self._by_container_id: _WorkloadsById = defaultdict(set)
        # UIDs by namespace and pod
        self._current_uids: _IdsByName = defaultdict(set)
        # Container ids by namespace, pod, container and UID
        self._current_ids: _IdsByName = defaultdict(set)

        for owner in self.current:
            self._current_uids[owner.namespace, owner.pod].add(owner.uid)
            if owner.container_id:
                self._by_container_id[owner.container_id].add(owner)
                name = owner.namespace, owner.pod, owner.container, owner.uid
                self._current_ids[name].add(owner.container_id)

        # Container ids by namespace, pod and container. The name of a log has no UID.
        self._logged_ids: _IdsByName = defaultdict(set)
        # The logs only add containers that the API server does not know.
        from_api_server = set(self._by_container_id)
        for log in self.logged:
            if log.container_id:
                self._logged_ids[log.namespace, log.pod, log.container].add(log.container_id)
                if log.container_id not in from_api_server:
                    self._by_container_id[log.container_id].add(log)

    def complete(self, workload: Workload) -> Workload:
        """Adds the missing fields that are certain.

        Raises SourceError if fields contradict each other.
        """
        if workload not in self._completed:
            self._completed[workload] = self._complete(workload)
        return self._completed[workload]

    def _complete(self, workload: Workload) -> Workload:
        # Repeats, because a step may need a field that a later step adds.
        while True:
            before = workload
            workload = _agree(workload, self._by_container_id.get(workload.container_id, set()))
            workload = _agree(workload, self._by_uid.get(workload.uid, set()))
            workload = self._add_uid(workload)
            workload = self._add_container_id(workload)
            if workload == before:
                return workload

    def is_alive(self, workload: Workload, containers: Collection[Workload]) -> bool | None:
        """Returns whether the container runs, or None if this is unknown.

        `containers`: UIDs and container ids of all running containers. Empty if processes are not
        visible.
        """
        # The kubelet removes logs only after the pod has ended.
        logs = self._find_logs(workload)
        if not self._is_known(workload) or not self.logged.issuperset(logs):
            return False

        uids = {container.uid for container in containers} - {""}
        if not uids:
            return True if logs else None

        container_ids = {container.container_id for container in containers} - {""}
        if workload.container_id in container_ids:
            return True
        if not workload.uid:
            return None
        if workload.uid not in uids:
            return False
        # The pod runs, but no container with this id. It is unknown whether the container will be
        # restarted.
        if workload.container_id:
            return None
        return True

    def _is_known(self, workload: Workload) -> bool:
        """Returns False if the pod has neither a log directory nor a record in the API server."""
        if not self._has_pod_logs:
            return True
        if workload.uid:
            return workload.uid in self._by_uid
        return not workload.pod or workload.pod_name in self._uids

    def _find_logs(self, workload: Workload) -> list[Workload]:
        """Returns the logs that must exist while the container runs.

        Omits logs in directories that cannot be read.
        """
        pod_log = f"{workload.namespace}_{workload.pod}_{workload.uid}"
        container = f"{workload.pod}_{workload.namespace}_{workload.container}"
        container_log = f"{container}-{workload.container_id}.log"

        names = []
        if self._has_pod_logs:
            names.append(pod_log)
        if self._logged_ids:
            names.append(container_log)

        logs = []
        for name in names:
            log = parse_log_name(name)
            if log is not None and len(name) <= _MAX_FILE_NAME:
                logs.append(log)
        return logs

    def _add_uid(self, workload: Workload) -> Workload:
        if workload.uid or not (workload.namespace and workload.pod):
            return workload

        uids = self._uids.get(workload.pod_name, set())
        # A known container id may be from the old pod.
        if len(uids) > 1 and not workload.container_id:
            uids = self._current_uids.get(workload.pod_name, set())
        return replace(workload, uid=_only(uids))

    def _add_container_id(self, workload: Workload) -> Workload:
        name = workload.namespace, workload.pod, workload.container
        if workload.container_id or not all(name):
            return workload

        ids = self._logged_ids.get(name, set())
        current = self._current_ids.get((*name, workload.uid))
        if current is not None:
            # If logs exist, but not for this container id, the API server's state is outdated.
            if ids and not current <= ids:
                return workload
            return replace(workload, container_id=_only(current))

        # If the pod has another UID, the log may belong to an older pod of the same name.
        if not self._uids.get(workload.pod_name, set()) <= {workload.uid}:
            return workload
        fitting = set()
        for container_id in ids:
            if any(_fits(workload, owner) for owner in self._by_container_id[container_id]):
                fitting.add(container_id)
        return replace(workload, container_id=_only(fitting))


def _only(texts: Set[str]) -> str:
    """Returns the only text. Empty if there are none or several."""
    if len(texts) != 1:
        return ""
    [text] = texts
    return text


def _agree(workload: Workload, candidates: Set[Workload]) -> Workload:
    """Adds the fields on which all matching candidates agree.

    Raises SourceError if there are candidates, but none matches.
    """
    if not candidates:
        return workload

    matching = [owner for owner in candidates if _fits(workload, owner)]
    if not matching:
        raise SourceError(
            "identity_conflict",
            f"the names, uid and container id of {workload.text} contradict each other",
        )

    agreed = {}
    for part in WORKLOAD_PARTS:
        text = _only({getattr(owner, part) for owner in matching})
        if text:
            agreed[part] = text

    return replace(workload, **agreed)


def _fits(workload: Workload, known: Workload) -> bool:
    """Returns True if no part that both have differs."""
    for part, known_part in zip(parts_of(workload), parts_of(known), strict=True):
        if part and known_part and part != known_part:
            return False
    return True


def _to_workloads(record: PodRecord) -> Iterator[Workload]:
    yield Workload(record.namespace, record.name, uid=record.uid)
    for container in record.all_containers:
        if container.container_id:
            yield record.workload(container)


@dataclass(frozen=True, slots=True)
class IdentityReader:
    pods_dir: str  # usually /var/log/pods
    containers_dir: str  # usually /var/log/containers
    read_pods: Callable[[], tuple[PodRecord, ...]] = tuple  # returns the pods from the API server

    def read(self) -> Identities:
        """Returns the current identities.

        `problems` contains an error for each directory that cannot be read.
        """
        names = []
        problems = []
        for path in (self.pods_dir, self.containers_dir):
            try:
                names += os.listdir(path)
            except (OSError, ValueError) as error:
                problems.append(explain_read_error(error, path))

        logs = map(parse_log_name, names)
        logged = frozenset(log for log in logs if log is not None)
        return Identities(logged, self.read_pods(), tuple(problems))
