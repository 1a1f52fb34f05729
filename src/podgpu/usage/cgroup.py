"""This module says which container a process is in, from the text of its /proc/<pid>/cgroup. Pure.

The text is the same question answered in many dialects: cgroup v1 and v2, the kubelet's cgroupfs and systemd drivers,
five runtimes, containers in containers, and paths seen from inside another cgroup namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PREFERRED = ("memory", "cpu", "cpuacct", "pids", "name=systemd")
"""cgroup v1, the most reliable first: no runtime does without limiting memory, and any may leave the others out."""
_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD = re.compile(rf"(?:\A|-)pod({_UID})\Z")
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_DELETED = " (deleted)"  # what the kernel adds to the path of a cgroup that is no more
_RUNTIMES = {
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "crio",
    "docker": "docker",
    "libpod": "podman",
}
"""What systemd's scopes are called by, and by whom."""
_MONITOR = "conmon"
"""crio-conmon-<id> and libpod-conmon-<id> hold the process that watches a container, not the container."""


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container as its cgroup names it. Empty is what the path does not tell."""

    container_id: str
    uid: str = ""
    """Of the pod: 8-4-4-4-12, or the hash the kubelet gives a static pod. Empty outside Kubernetes."""
    runtime: str = ""
    """containerd, crio, docker or podman; empty where the path is only the id, as cgroupfs has it."""


def parse_cgroup(text: str) -> ContainerRef | None:
    """The outermost Kubernetes container the process is in, else the outermost container, else None."""
    outside: ContainerRef | None = None
    for path in _paths(text):
        ref = _parse_path(path)
        if ref is not None and ref.uid:
            return ref
        outside = outside or ref
    return outside


def _paths(text: str) -> list[str]:
    """The paths of all hierarchies, the most reliable first. A line is `number:controllers:path`."""
    # Not splitlines(): the kernel escapes line feeds in names, but no other character that would end a line there.
    lines = [parts for line in text.split("\n") if len(parts := line.split(":", 2)) == 3]
    return [path for _number, _controllers, path in sorted(lines, key=lambda parts: _rank(parts[1]))]


def _rank(controllers: str) -> int:
    """v2 has no controllers in its line, and no other line to be chosen before unless v1 is there too."""
    known = [_PREFERRED.index(name) for name in controllers.split(",") if name in _PREFERRED]
    return min(known, default=len(_PREFERRED))


def _parse_path(path: str) -> ContainerRef | None:
    uid = parent = ""
    outside: ContainerRef | None = None
    for name in _names(path):
        if not uid and (pod := _POD.search(name.removesuffix(".slice"))):
            uid = pod[1].replace("_", "-")
        elif (ref := _parse_container(name, uid, parent)) is not None:
            if uid:
                return ref
            outside = outside or ref
        parent = name
    return outside


def _names(path: str) -> Iterator[str]:
    """The path's parts. `..`, from a reader in another cgroup namespace, is just a name that means nothing here."""
    for name in path.removesuffix(_DELETED).split("/"):
        # containerd told systemd's way, runc told the other: it makes `slice:prefix:id` one directory.
        slice_, colon, scope = name.partition(":")
        yield slice_
        if colon:
            yield scope.replace(":", "-")


def _parse_container(name: str, uid: str, parent: str) -> ContainerRef | None:
    prefix, _, container_id = name.removesuffix(".scope").rpartition("-")
    if not _CONTAINER_ID.fullmatch(container_id) or prefix.endswith(_MONITOR):
        return None
    if not prefix:
        return ContainerRef(container_id, uid, _RUNTIMES.get(parent, ""))
    if prefix not in _RUNTIMES and not uid:
        return None  # outside a pod, a name and a hash may be anything
    return ContainerRef(container_id, uid, _RUNTIMES.get(prefix, prefix))
