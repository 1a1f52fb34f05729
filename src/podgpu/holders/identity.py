"""This module says who is who on this node, from the names of its log files: uids, pod names and container ids, without
the API server.

No source knows all parts of a workload. What is known for sure is filled in here; nothing is guessed, and parts that
contradict each other are refused. Reads names in two directories, and no file.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import structs

from podgpu.errors import SourceError
from podgpu.files import SETTLED_NS, explain
from podgpu.model import WORKLOAD_PARTS, Workload, parts_of

if TYPE_CHECKING:
    from podgpu.kube.objects import PodRecord

PODS_DIR = "/var/log/pods"
CONTAINERS_DIR = "/var/log/containers"
MOST_ENTRIES = 50_000
MOST_COMPLETED = 10_000

K = TypeVar("K")
T = TypeVar("T")

# Kubernetes' names are lower-case letters, digits, dashes and (of pods) dots: an underscore can only be a separator.
_POD_DIRECTORY = re.compile(r"(?P<namespace>[a-z0-9-]+)_(?P<pod>[a-z0-9.-]+)_(?P<uid>[A-Za-z0-9-]+)", re.ASCII)
_CONTAINER_LOG = re.compile(
    r"(?P<pod>[a-z0-9.-]+)_(?P<namespace>[a-z0-9-]+)_(?P<container>[a-z0-9-]+)-(?P<container_id>[0-9a-f]{64})\.log",
    re.ASCII,
)


class Contradiction(SourceError):
    """Parts of a workload that cannot belong together."""

    def __init__(self, workload: Workload, what: str) -> None:
        parts = ", ".join(f"{part} {getattr(workload, part)}" for part in WORKLOAD_PARTS if getattr(workload, part))
        super().__init__("identity_conflict", f"two sources disagree ({parts}; but {what}), so it has no holder")


def parse_pod_directory(name: str) -> Workload | None:
    """`<namespace>_<pod>_<uid>`, under /var/log/pods. A static pod's uid is a hash without dashes."""
    match = _POD_DIRECTORY.fullmatch(name)
    return None if match is None else Workload(**match.groupdict())


def parse_container_log(name: str) -> Workload | None:
    """`<pod>_<namespace>_<container>-<id>.log`, in /var/log/containers.

    The kubelet cuts names at 255 bytes, and the id with them: such a name says nothing.
    """
    match = _CONTAINER_LOG.fullmatch(name)
    return None if match is None else Workload(**match.groupdict())


# What is known


@dataclass(frozen=True, slots=True)
class Identities:
    """Workloads whose parts are known to belong together."""

    pods: frozenset[Workload] = frozenset()
    """Namespace, pod and uid. There may be two of one name: logs of a pod that was made anew stay for a while."""
    containers: frozenset[Workload] = frozenset()
    """Namespace, pod, container and container id. There may be two of one name: a container that was restarted."""
    stated: frozenset[Workload] = frozenset()
    """What the API server says: the pods that are, with or without a container and its present id."""
    problems: tuple[SourceError, ...] = field(default=(), compare=False)
    """Why something is not known that could be."""
    api_uids: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The uid by which the node goes for a static pod -> the API server's, by which people do."""
    _index: _Index = field(init=False, compare=False, repr=False)
    _completed: dict[Workload, Workload] = field(init=False, compare=False, repr=False, default_factory=dict)
    """The same few ask at every reading, and nothing that is known changes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", _Index.of(self.pods, self.containers, self.stated))

    def with_pods(self, records: Iterable[PodRecord]) -> Identities:
        """These, and what the API server says."""
        pods = tuple(records)
        workloads = frozenset(workload for record in pods for workload in _stated(record))
        api_uids = {record.uid: record.api_uid for record in pods if record.api_uid}
        return replace(self, stated=self.stated | workloads, api_uids=api_uids)

    def complete(self, workload: Workload) -> Workload:
        """The workload with every part that is known for sure. Raises Contradiction; changes no part it has."""
        known = self._completed.get(workload)
        if known is None:
            known = self._completed[workload] = self._complete(workload)
            if len(self._completed) > MOST_COMPLETED:
                self._completed.clear()
        return known

    def _complete(self, workload: Workload) -> Workload:
        while True:
            before = workload
            for step in (self._by_container_id, self._by_uid, self._find_uid, self._find_container_id):
                workload = step(workload)
            if workload is before:  # a part found by one step may be what another needs
                return workload

    def _by_container_id(self, workload: Workload) -> Workload:
        return _agree(workload, self._index.owners.get(workload.container_id, frozenset()))

    def _by_uid(self, workload: Workload) -> Workload:
        return _agree(workload, self._index.names.get(workload.uid, frozenset()))

    def _find_uid(self, workload: Workload) -> Workload:
        if workload.uid or not (workload.namespace and workload.pod):
            return workload
        name = workload.namespace, workload.pod
        uids = self._index.uids.get(name, frozenset())
        if len(uids) > 1 and not workload.container_id:
            # Whose container it is would not be said by knowing which pod lives: the id may be the old pod's.
            uids = self._index.living.get(name, frozenset())
        return _with(workload, uid=_only(uids))

    def _find_container_id(self, workload: Workload) -> Workload:
        if workload.container_id or not (workload.namespace and workload.pod and workload.container):
            return workload
        name = workload.namespace, workload.pod
        logged = self._index.logged.get((*name, workload.container), frozenset())
        stated = self._index.present.get((*name, workload.uid, workload.container), frozenset())
        if stated:
            # One that has no log while others have one is of yesterday.
            return _with(workload, container_id=_only(stated if stated <= logged or not logged else frozenset()))
        if not self._index.uids.get(name, frozenset()) <= {workload.uid}:
            return workload  # the log may be of another pod of that name
        fitting = frozenset(
            container_id
            for container_id in logged
            if any(_fits(workload, owner) for owner in self._index.owners[container_id])
        )
        return _with(workload, container_id=_only(fitting))


@dataclass(frozen=True, slots=True)
class _Index:
    owners: Mapping[str, frozenset[Workload]]
    """Container id -> whose it is."""
    names: Mapping[str, frozenset[Workload]]
    """Uid -> which pod's it is."""
    uids: Mapping[tuple[str, str], frozenset[str]]
    living: Mapping[tuple[str, str], frozenset[str]]
    logged: Mapping[tuple[str, str, str], frozenset[str]]
    present: Mapping[tuple[str, str, str, str], frozenset[str]]
    """Namespace, pod, uid and container -> container id, as the API server has it."""

    @classmethod
    def of(cls, pods: frozenset[Workload], containers: frozenset[Workload], stated: frozenset[Workload]) -> _Index:
        # A log of a container that the API server tells of as well says less: no uid.
        stated_ids = {workload.container_id for workload in stated}
        owned = [workload for workload in containers if workload.container_id not in stated_ids] + [
            workload for workload in stated if workload.container_id
        ]
        return cls(
            owners=_group((workload.container_id, workload) for workload in owned),
            names=_group(
                (workload.uid, Workload(workload.namespace, workload.pod, uid=workload.uid))
                for workload in pods | stated
            ),
            uids=_group(((workload.namespace, workload.pod), workload.uid) for workload in pods | stated),
            living=_group(((workload.namespace, workload.pod), workload.uid) for workload in stated),
            logged=_group(
                ((workload.namespace, workload.pod, workload.container), workload.container_id)
                for workload in containers
            ),
            present=_group(
                ((workload.namespace, workload.pod, workload.uid, workload.container), workload.container_id)
                for workload in stated
                if workload.container_id
            ),
        )


def _group(pairs: Iterable[tuple[K, T]]) -> dict[K, frozenset[T]]:
    groups: dict[K, set[T]] = defaultdict(set)
    for key, value in pairs:
        groups[key].add(value)
    return {key: frozenset(values) for key, values in groups.items()}


def _only(values: frozenset[str]) -> str:
    return next(iter(values)) if len(values) == 1 else ""


def _agree(workload: Workload, known: frozenset[Workload]) -> Workload:
    """The parts in which all that may be meant are the same."""
    if not known:
        return workload
    meant = [owner for owner in known if _fits(workload, owner)]
    if not meant:
        other = min(known, key=parts_of)
        what = f"container id {other.container_id[:12]}" if other.container_id else f"uid {other.uid}"
        uid = f" ({other.uid})" if other.pod and other.uid else ""
        raise Contradiction(workload, f"{what} is known to be of {other.text}{uid}")
    first, *others = map(parts_of, meant)
    sure = first if not others else [_only(frozenset(texts)) for texts in zip(first, *others, strict=True)]
    parts = tuple(text or had for text, had in zip(sure, parts_of(workload), strict=True))
    return workload if parts == parts_of(workload) else Workload(*parts)


def _fits(workload: Workload, known: Workload) -> bool:
    pairs = zip(parts_of(workload), parts_of(known), strict=True)
    return all(part == known_part or not part or not known_part for part, known_part in pairs)


def _with(workload: Workload, uid: str = "", container_id: str = "") -> Workload:
    """The workload with one part more, or as it was."""
    if not uid and not container_id:
        return workload
    return structs.replace(workload, uid=workload.uid or uid, container_id=workload.container_id or container_id)


def _stated(record: PodRecord) -> Iterable[Workload]:
    yield Workload(record.namespace, record.name, uid=record.uid)
    for container in (*record.init_containers, *record.containers):
        if container.container_id:
            yield Workload(record.namespace, record.name, container.name, record.uid, container.container_id)


# Reading names


class IdentityReader:
    """Lists a directory again only after its names changed; the same object comes back while nothing did."""

    def __init__(
        self,
        pods_dir: str = PODS_DIR,
        containers_dir: str = CONTAINERS_DIR,
        clock: Callable[[], int] = time.time_ns,
        pods: Callable[[], tuple[PodRecord, ...]] = tuple,
        most: int = MOST_ENTRIES,
    ) -> None:
        """`pods`: what the API server says, the same tuple until something changes. `most`: entries of a directory."""
        self._pods = _Directory(pods_dir, parse_pod_directory, clock, most)
        self._containers = _Directory(containers_dir, parse_container_log, clock, most)
        self._records = pods
        self._names = Identities()
        self._last: tuple[Identities, tuple[PodRecord, ...]] = self._names, ()
        self._known = self._names

    def read(self) -> Identities:
        """What is known now. A directory that cannot be read is one of no names, and a problem."""
        now = self._read_names(), self._records()
        if any(new is not old for new, old in zip(now, self._last, strict=True)):
            names, records = self._last = now
            self._known = names.with_pods(records) if records else names
        return self._known

    def _read_names(self) -> Identities:
        parts = self._pods.read(), self._containers.read()
        problems = tuple(part for part in parts if isinstance(part, SourceError))
        pods, containers = (frozenset[Workload]() if isinstance(part, SourceError) else part for part in parts)
        last = self._names
        if (pods, containers, _sentences(problems)) != (last.pods, last.containers, _sentences(last.problems)):
            self._names = Identities(pods, containers, problems=problems)
        return self._names


def _sentences(problems: Iterable[SourceError]) -> list[str]:
    return [str(problem) for problem in problems]


class _Directory(Generic[T]):
    def __init__(self, path: str, parse: Callable[[str], T | None], clock: Callable[[], int], most: int) -> None:
        self._path = path
        self._parse = parse
        self._clock = clock
        self._most = most
        self._kept: tuple[tuple[int, ...], frozenset[T]] | None = None

    def read(self) -> frozenset[T] | SourceError:
        try:
            now, found = self._clock(), os.stat(self._path)
            identity = found.st_dev, found.st_ino, found.st_mtime_ns
            if self._kept is not None and self._kept[0] == identity:
                return self._kept[1]
            names = list_names(self._path, self._most)
        except (OSError, ValueError) as error:
            return explain(error, self._path)
        except SourceError as error:
            return error
        parsed = frozenset(parsed_name for parsed_name in map(self._parse, names) if parsed_name is not None)
        # A change just now may hide another within the same tick of the kernel's clock.
        self._kept = (identity, parsed) if now - found.st_mtime_ns >= SETTLED_NS else None
        return parsed


def list_names(directory: str, most: int) -> list[str]:
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, most + 1)]
    if len(names) > most:
        # With some names left out, "the only one of that name" would not be true.
        raise SourceError(
            "too_large",
            f"{directory} has more than {most} entries, and none are used: uids and container ids are missing"
            " unless the API server gives them; find out why the kubelet removes none",
        )
    return names
