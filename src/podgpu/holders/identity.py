"""Completes identities of workloads: namespace, pod, container, uid and container id.

Each source reports only some of these parts. The missing ones are found in the names of the kubelet's log files and, if
they are watched, in the pods of the API server. Contradictory parts are rejected.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from podgpu.errors import SourceError
from podgpu.files import SETTLED_NS, explain
from podgpu.model import WORKLOAD_PARTS, Workload, parts_of

if TYPE_CHECKING:
    from podgpu.kube.objects import PodRecord

PODS_DIR = "/var/log/pods"
CONTAINERS_DIR = "/var/log/containers"

K = TypeVar("K")
T = TypeVar("T")

# Names in Kubernetes contain no underscore, so underscores are separators.
_POD_DIRECTORY = re.compile(r"(?P<namespace>[a-z0-9-]+)_(?P<pod>[a-z0-9.-]+)_(?P<uid>[A-Za-z0-9-]+)", re.ASCII)
_CONTAINER_LOG = re.compile(
    r"(?P<pod>[a-z0-9.-]+)_(?P<namespace>[a-z0-9-]+)_(?P<container>[a-z0-9-]+)-(?P<container_id>[0-9a-f]{64})\.log",
    re.ASCII,
)


class Contradiction(SourceError):
    """Sources report contradictory parts of a workload."""

    def __init__(self, workload: Workload, detail: str) -> None:
        parts = ", ".join(f"{part} {getattr(workload, part)}" for part in WORKLOAD_PARTS if getattr(workload, part))
        super().__init__(
            "identity_conflict",
            f"two sources disagree about a workload ({parts}; but {detail}), so its devices have no holder",
        )


def parse_pod_directory(name: str) -> Workload | None:
    """Parses `<namespace>_<pod>_<uid>`, under /var/log/pods."""
    match = _POD_DIRECTORY.fullmatch(name)
    return None if match is None else Workload(**match.groupdict())


def parse_container_log(name: str) -> Workload | None:
    """Parses `<pod>_<namespace>_<container>-<id>.log`, in /var/log/containers.

    The kubelet truncates names to 255 bytes. Truncated names are ignored.
    """
    match = _CONTAINER_LOG.fullmatch(name)
    return None if match is None else Workload(**match.groupdict())


@dataclass
class Identities:
    """Known identities, used to complete workloads. Immutable."""

    pods: frozenset[Workload] = frozenset()
    """Namespace, pod and uid. A name can have two uids, because logs of a recreated pod stay for a while."""
    containers: frozenset[Workload] = frozenset()
    """Namespace, pod, container and container id. A name can have two ids after a restart."""
    api_pods: frozenset[Workload] = frozenset()  # current pods and containers of the API server
    problems: tuple[SourceError, ...] = field(default=(), compare=False)  # errors while reading
    api_uids: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Uid of a static pod on the node -> its uid in the API server."""

    def __post_init__(self) -> None:
        current = [pod for pod in self.api_pods if pod.container_id]
        current_ids = {container.container_id for container in current}
        others = [log for log in self.containers if log.container_id not in current_ids]
        pods = self.pods | self.api_pods
        self._by_container_id = _group((owner.container_id, owner) for owner in current + others)
        self._by_uid = _group((pod.uid, Workload(pod.namespace, pod.pod, uid=pod.uid)) for pod in pods)
        self._uids = _group(((pod.namespace, pod.pod), pod.uid) for pod in pods)
        self._current_uids = _group(((pod.namespace, pod.pod), pod.uid) for pod in self.api_pods)
        self._logged_ids = _group(
            ((log.namespace, log.pod, log.container), log.container_id) for log in self.containers
        )
        self._current_ids = _group(
            ((owner.namespace, owner.pod, owner.uid, owner.container), owner.container_id) for owner in current
        )

    def with_pods(self, records: Iterable[PodRecord]) -> Identities:
        """Adds the pods of the API server."""
        records = tuple(records)
        workloads = frozenset(workload for record in records for workload in _to_workloads(record))
        api_uids = {record.uid: record.api_uid for record in records if record.api_uid}
        return replace_fields(self, api_pods=self.api_pods | workloads, api_uids=api_uids)

    def complete(self, workload: Workload) -> Workload:
        """Adds the parts that are known for certain. Raises Contradiction."""
        while True:  # a part found in one step may be needed in another
            before = workload
            workload = _agree(workload, self._by_container_id.get(workload.container_id, frozenset()))
            workload = _agree(workload, self._by_uid.get(workload.uid, frozenset()))
            workload = self._add_uid(workload)
            workload = self._add_container_id(workload)
            if workload == before:
                return workload

    def _add_uid(self, workload: Workload) -> Workload:
        if workload.uid or not (workload.namespace and workload.pod):
            return workload
        name = workload.namespace, workload.pod
        uids = self._uids.get(name, frozenset())
        if len(uids) > 1 and not workload.container_id:  # a container id may belong to the old pod
            uids = self._current_uids.get(name, frozenset())
        return replace(workload, uid=_only(uids))

    def _add_container_id(self, workload: Workload) -> Workload:
        if workload.container_id or not (workload.namespace and workload.pod and workload.container):
            return workload
        name = workload.namespace, workload.pod
        logged = self._logged_ids.get((*name, workload.container), frozenset())
        current = self._current_ids.get((*name, workload.uid, workload.container), frozenset())
        if current:
            # If only other containers have a log, the API server's state is outdated.
            return replace(workload, container_id=_only(current) if current <= logged or not logged else "")
        if not self._uids.get(name, frozenset()) <= {workload.uid}:
            return workload  # the log may belong to another pod of that name
        fitting = frozenset(
            container_id
            for container_id in logged
            if any(_fits(workload, owner) for owner in self._by_container_id[container_id])
        )
        return replace(workload, container_id=_only(fitting))


def _group(pairs: Iterable[tuple[K, T]]) -> dict[K, frozenset[T]]:
    groups: dict[K, set[T]] = defaultdict(set)
    for key, value in pairs:
        groups[key].add(value)
    return {key: frozenset(values) for key, values in groups.items()}


def _only(values: frozenset[str]) -> str:
    return next(iter(values)) if len(values) == 1 else ""


def _agree(workload: Workload, candidates: frozenset[Workload]) -> Workload:
    """Adds the parts on which all matching identities agree. Raises Contradiction if none matches."""
    if not candidates:
        return workload
    matching = [owner for owner in candidates if _fits(workload, owner)]
    if not matching:
        other = min(candidates, key=parts_of)
        part = f"container id {other.container_id[:12]}" if other.container_id else f"uid {other.uid}"
        uid = f" ({other.uid})" if other.pod and other.uid else ""
        raise Contradiction(workload, f"{part} belongs to {other.text}{uid}")
    agreed = [_only(frozenset(texts)) for texts in zip(*map(parts_of, matching), strict=True)]
    return Workload(*(text or own for text, own in zip(agreed, parts_of(workload), strict=True)))


def _fits(workload: Workload, known: Workload) -> bool:
    pairs = zip(parts_of(workload), parts_of(known), strict=True)
    return all(part == known_part or not part or not known_part for part, known_part in pairs)


def _to_workloads(record: PodRecord) -> Iterable[Workload]:
    yield Workload(record.namespace, record.name, uid=record.uid)
    for container in (*record.init_containers, *record.containers):
        if container.container_id:
            yield Workload(record.namespace, record.name, container.name, record.uid, container.container_id)


class IdentityReader:
    """Reads the names of the kubelet's log files. Returns the same object until they change."""

    def __init__(
        self,
        pods_dir: str = PODS_DIR,
        containers_dir: str = CONTAINERS_DIR,
        clock: Callable[[], int] = time.time_ns,
        pods: Callable[[], tuple[PodRecord, ...]] = tuple,
    ) -> None:
        """`pods` returns the pods of the API server."""
        self._directories = ((pods_dir, parse_pod_directory), (containers_dir, parse_container_log))
        self._clock = clock
        self._read_records = pods
        self._cached: tuple[object, Identities] | None = None

    def read(self) -> Identities:
        """Returns the current identities. Directories that cannot be read are reported in `problems`."""
        now, records = self._clock(), self._read_records()
        states = tuple(_stat_directory(path) for path, _ in self._directories)
        if self._cached is not None and self._cached[0] == (states, records):
            return self._cached[1]
        problems: list[SourceError] = []
        pods, containers = (_read_names(path, parse, problems) for path, parse in self._directories)
        identities = Identities(pods, containers, problems=tuple(problems))
        identities = identities.with_pods(records) if records else identities
        # After a recent change, a second one may leave the time stamp unchanged.
        is_settled = all(state is None or now - state[-1] >= SETTLED_NS for state in states)
        self._cached = ((states, records), identities) if is_settled else None
        return identities


def _stat_directory(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read_names(path: str, parse: Callable[[str], Workload | None], problems: list[SourceError]) -> frozenset[Workload]:
    try:
        names = os.listdir(path)
    except (OSError, ValueError) as error:
        problems.append(explain(error, path))
        return frozenset()
    return frozenset(workload for workload in map(parse, names) if workload is not None)
