"""Finds the container of a process in /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from podgpu.errors import SourceError
from podgpu.model import Workload
from podgpu.usage.cgroup import parse_cgroup

CACHE_SECONDS = 30.0  # limited, because a process can be moved to another cgroup

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the first PID namespace has this inode on every Linux
_STARTED = 22  # number of the start time field in /proc/<pid>/stat (clock ticks since boot)
_MPS_SERVER = b"(nvidia-cuda-mps)"  # nvidia-cuda-mps-server, truncated to 15 characters by the kernel
_MAX_BYTES = 64 * 1024

LookupOutcome = Literal["found", "not_in_container", "gone", "not_permitted", "unreadable"]
FAILED_LOOKUPS: frozenset[LookupOutcome] = frozenset({"not_permitted", "unreadable"})  # the process exists


@dataclass(frozen=True, slots=True)
class ContainerLookup:
    """Result of one lookup. If a container was found, `workload` has its `uid` and `container_id`."""

    outcome: LookupOutcome
    workload: Workload = field(default_factory=Workload)
    is_mps_server: bool = False


@dataclass(frozen=True, slots=True)
class _CachedLookup:
    started: int
    read_at: float
    lookup: ContainerLookup


class ContainerFinder:
    """Finds the containers of processes and caches them. Not thread-safe. `proc` is the path of the host's /proc.

    Pids are reused, so a cached entry is valid only for a process with the same start time.
    """

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self.proc = proc
        self._clock = clock
        self._cache: dict[int, _CachedLookup] = {}

    def find_all(self, pids: Collection[int]) -> dict[int, ContainerLookup]:
        """Looks up these processes, and evicts all others from the cache."""
        self._cache = {pid: cached for pid, cached in self._cache.items() if pid in pids}
        return {pid: self.find(pid) for pid in pids}

    def find(self, pid: int) -> ContainerLookup:
        try:
            with _open_folder(f"{self.proc}/{pid}") as folder:
                return self._look_up(pid, folder)
        except (FileNotFoundError, ProcessLookupError):
            return ContainerLookup("gone")
        except PermissionError:
            return ContainerLookup("not_permitted")
        except (OSError, ValueError):
            return ContainerLookup("unreadable")

    def _look_up(self, pid: int, folder: int) -> ContainerLookup:
        stat, now = _read(folder, "stat"), self._clock()
        started, cached = parse_started(stat), self._cache.get(pid)
        if cached is not None and cached.started == started and now - cached.read_at < CACHE_SECONDS:
            return cached.lookup
        ref = parse_cgroup(_read(folder, "cgroup").decode(errors="replace"))
        is_mps_server = _MPS_SERVER in stat
        if ref is None:
            lookup = ContainerLookup("not_in_container", is_mps_server=is_mps_server)
        else:
            workload = Workload(uid=ref.uid, container_id=ref.container_id)
            lookup = ContainerLookup("found", workload, is_mps_server)
        self._cache[pid] = _CachedLookup(started, now, lookup)
        return lookup


def read_living(proc: str = "/proc") -> frozenset[Workload] | None:
    """Returns the containers (`uid` and `container_id`) of all processes, or None if a process cannot be read."""
    if not in_host_pid_namespace(proc):
        return None
    try:
        with os.scandir(proc) as entries:
            pids = [entry.name for entry in entries if entry.name.isdigit()]
        refs = {parse_cgroup(text) for pid in pids if (text := _read_cgroup(proc, pid))}
    except (OSError, ValueError):
        return None
    return frozenset(Workload(uid=ref.uid, container_id=ref.container_id) for ref in refs if ref is not None)


def _read_cgroup(proc: str, pid: str) -> str:
    """Returns an empty text for a process that has ended. Raises OSError for any other failure."""
    try:
        with _open_folder(f"{proc}/{pid}") as folder:
            return _read(folder, "cgroup").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parse_started(stat: bytes) -> int:
    """Returns the start time of a process from /proc/<pid>/stat. Raises ValueError for another format."""
    # The second field is the program's name in parentheses. It can contain spaces and parentheses.
    _, parenthesis, rest = stat.rpartition(b")")
    fields = rest.split()
    if not parenthesis or len(fields) <= _STARTED - 3:
        raise ValueError("not the stat file of a process")
    return int(fields[_STARTED - 3])


def in_host_pid_namespace(proc: str = "/proc") -> bool | None:
    """Returns None if unknown. In another PID namespace, the driver lists no processes."""
    try:
        return os.readlink(f"{proc}/self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return None


def require_host_pid_namespace(proc: str) -> None:
    """Raises SourceError in another PID namespace. NVML returns an empty list there instead of an error."""
    is_hosts = in_host_pid_namespace(proc)
    if is_hosts is None:
        raise SourceError(
            "pid_namespace_unknown",
            f"{proc}/self/ns/pid cannot be read, so processes on the GPUs cannot be found; mount the host's /proc",
        )
    if not is_hosts:
        raise SourceError(
            "not_host_pid_namespace",
            "processes on the GPUs are visible in the host's PID namespace only: set hostPID: true on the pod,"
            " or disable the features that need it; all other features work without it",
        )


def require_permission(lookups: Mapping[int, ContainerLookup], proc: str) -> None:
    """Raises SourceError if every lookup failed, which means that podgpu lacks permissions."""
    outcomes = {lookup.outcome for lookup in lookups.values()} - {"gone"}
    if outcomes and outcomes <= FAILED_LOOKUPS:
        raise SourceError(
            "not_permitted" if "not_permitted" in outcomes else "unreadable",
            f"{proc}/<pid>/cgroup cannot be read for any process on the GPUs: set securityContext.runAsUser: 0,"
            " and check that neither hidepid on /proc nor an AppArmor or SELinux profile forbids it",
        )


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """Opens /proc/<pid>. Reading its files fails after the process has ended, even if the pid is reused."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)
