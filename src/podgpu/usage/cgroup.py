"""Parses /proc/<pid>/cgroup to find the container of a process.

Formats differ between cgroup v1 and v2, the kubelet's cgroupfs and systemd drivers, five runtimes, nested containers,
and readers in another cgroup namespace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PREFERRED = ("memory", "cpu", "cpuacct", "pids", "name=systemd")  # cgroup v1 controllers, most reliable first
_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_POD = re.compile(rf"(?:\A|-)pod({_UID})\Z")
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_DELETED = " (deleted)"  # added by the kernel to the path of a removed cgroup
_RUNTIMES = {
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "crio",
    "docker": "docker",
    "libpod": "podman",
}
"""Prefixes of systemd scopes."""
_MONITOR = "conmon"  # crio-conmon-<id> and libpod-conmon-<id> contain the container's monitor, not the container


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container identified by its cgroup path."""

    container_id: str
    uid: str = ""  # pod UID (8-4-4-4-12), or the hash of a static pod; empty outside Kubernetes
    runtime: str = ""  # containerd, crio, docker or podman; empty if the path does not name it


def parse_cgroup(text: str) -> ContainerRef | None:
    """Returns the outermost Kubernetes container, else the outermost container, else None."""
    outside: ContainerRef | None = None
    for path in _paths(text):
        ref = _parse_path(path)
        if ref is not None and ref.uid:
            return ref
        outside = outside or ref
    return outside


def _paths(text: str) -> list[str]:
    """Returns the paths of all hierarchies, the most reliable first. A line is `number:controllers:path`."""
    # splitlines() would also split at other characters. The kernel escapes only line feeds.
    lines = [parts for line in text.split("\n") if len(parts := line.split(":", 2)) == 3]
    return [path for _number, _controllers, path in sorted(lines, key=lambda parts: _rank(parts[1]))]


def _rank(controllers: str) -> int:
    ranks = [_PREFERRED.index(name) for name in controllers.split(",") if name in _PREFERRED]
    return min(ranks, default=len(_PREFERRED))


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
    for name in path.removesuffix(_DELETED).split("/"):
        # If containerd uses systemd cgroups and runc does not, runc creates one directory named `slice:prefix:id`.
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
        return None  # outside a pod, a name that ends with a hash need not be a container
    return ContainerRef(container_id, uid, _RUNTIMES.get(prefix, prefix))
