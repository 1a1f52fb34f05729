"""Finds the container of a process in /proc and, on a node without Kubernetes, its Slurm job and user."""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from podgpu.errors import SourceError
from podgpu.model import Workload

CACHE_SECONDS = 30.0  # limited, because a process can be moved to another cgroup

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the first PID namespace has this inode on every Linux
_STARTED = 22  # number of the start time field in /proc/<pid>/stat (clock ticks since boot)
_MPS_SERVER = b"(nvidia-cuda-mps)"  # nvidia-cuda-mps-server, truncated to 15 characters by the kernel
_MAX_BYTES = 64 * 1024
_MAX_COMMAND = 64
_UID_LINE = re.compile(rb"^Uid:\s+(\d+)", re.MULTILINE)
_SLURM_CGROUP = re.compile(r"slurm[^\n]*/job_(\d+)")  # /system.slice/slurmstepd.scope/job_1/…, /slurm/uid_0/job_1/…
_SLURM_JOB = re.compile(rb"(?:\A|\0)SLURM_JOB_ID=(\d+)")
_SLURM_USER = re.compile(rb"(?:\A|\0)SLURM_JOB_USER=([\w.-]{1,64})")

LookupOutcome = Literal["found", "not_in_container", "gone", "not_permitted", "unreadable"]
FAILED_LOOKUPS: frozenset[LookupOutcome] = frozenset({"not_permitted", "unreadable"})  # the process exists


@dataclass(frozen=True, slots=True)
class ContainerLookup:
    """Result of one lookup. If a container was found, `workload` has its `uid` and `container_id`."""

    outcome: LookupOutcome
    workload: Workload = field(default_factory=Workload)
    is_mps_server: bool = False
    command: str = ""


@dataclass(frozen=True, slots=True)
class _CachedLookup:
    started: int
    read_at: float
    lookup: ContainerLookup


class ContainerFinder:
    """Finds the containers of processes and caches them. Not thread-safe. `proc` is the path of the host's /proc.

    Pids are reused, so a cached entry is valid only for a process with the same start time. With `finds_users`, the
    job, user and command of processes outside pods are found too.
    """

    def __init__(
        self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic, finds_users: bool = False
    ) -> None:
        self.proc = proc
        self.finds_users = finds_users
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
        cgroup = _read(folder, "cgroup").decode(errors="replace")
        container = parse_cgroup(cgroup)
        outcome: LookupOutcome = "not_in_container" if container is None else "found"
        workload, command = container or Workload(), ""
        if self.finds_users and not workload.uid:
            workload, command = _find_user(folder, cgroup, workload.container_id), _find_command(folder, stat)
        lookup = ContainerLookup(outcome, workload, _MPS_SERVER in stat, command)
        self._cache[pid] = _CachedLookup(started, now, lookup)
        return lookup


def read_living(proc: str = "/proc") -> frozenset[Workload] | None:
    """Returns the containers (`uid` and `container_id`) of all processes, or None if a process cannot be read."""
    if not in_host_pid_namespace(proc):
        return None
    try:
        with os.scandir(proc) as entries:
            pids = [entry.name for entry in entries if entry.name.isdigit()]
        containers = {parse_cgroup(text) for pid in pids if (text := _read_cgroup(proc, pid))}
    except (OSError, ValueError):
        return None
    return frozenset(container for container in containers if container is not None)


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


# -- users ---------------------------------------------------------------------------------------------------------


def _find_user(folder: int, cgroup: str, container_id: str) -> Workload:
    """Returns the Slurm job and the user of a process. The environment is readable for its user and root only."""
    environment, uid = b"", _UID_LINE.search(_read(folder, "status"))
    with suppress(OSError):
        environment = _read(folder, "environ")
    job = _SLURM_CGROUP.search(cgroup)
    variable, job_user = _SLURM_JOB.search(environment), _SLURM_USER.search(environment)
    number = job[1] if job else variable[1].decode() if variable else ""
    user = _find_user_name(int(uid[1])) if uid else "unknown"
    if job_user and user.isdigit():  # podgpu in a container does not know the users of the host
        user = job_user[1].decode(errors="replace")
    return Workload(container_id="" if number else container_id, job=number, user=user)


@lru_cache(maxsize=1024)
def _find_user_name(uid: int) -> str:
    """Returns the number of a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _find_command(folder: int, stat: bytes) -> str:
    """Returns the name of the program, never its arguments. Some programs write those into argv[0]."""
    words: list[bytes] = []
    with suppress(OSError):
        words = _read(folder, "cmdline").partition(b"\0")[0].split()
    name = os.path.basename(words[0]) if words else stat.partition(b"(")[2].rpartition(b")")[0]
    return name.decode(errors="replace")[:_MAX_COMMAND]


# -- cgroups -------------------------------------------------------------------------------------------------------
# Formats differ between cgroup v1 and v2, the kubelet's cgroupfs and systemd drivers, five runtimes, nested containers,
# and readers in another cgroup namespace.

_PREFERRED = ("memory", "cpu", "cpuacct", "pids", "name=systemd")  # cgroup v1 controllers, most reliable first
_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"  # a pod's UID, or the hash of a static pod
_POD = re.compile(rf"(?:\A|-)pod({_UID})\Z")
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_DELETED = " (deleted)"  # added by the kernel to the path of a removed cgroup
_SCOPE_PREFIXES = {"cri-containerd", "nerdctl", "crio", "docker", "libpod"}
_MONITOR = "conmon"  # crio-conmon-<id> and libpod-conmon-<id> contain the container's monitor, not the container


def parse_cgroup(text: str) -> Workload | None:
    """Parses /proc/<pid>/cgroup. Returns `uid` and `container_id`, or None outside containers.

    Of nested containers, returns the outermost one of Kubernetes, else the outermost one.
    """
    # splitlines() would also split at other characters. The kernel escapes only line feeds.
    lines = [parts for line in text.split("\n") if len(parts := line.split(":", 2)) == 3]
    containers = [_parse_path(path) for _number, _controllers, path in sorted(lines, key=lambda line: _rank(line[1]))]
    found = [container for container in containers if container is not None]
    return next((container for container in found if container.uid), found[0] if found else None)


def _rank(controllers: str) -> int:
    ranks = [_PREFERRED.index(name) for name in controllers.split(",") if name in _PREFERRED]
    return min(ranks, default=len(_PREFERRED))


def _parse_path(path: str) -> Workload | None:
    uid = ""
    outside: Workload | None = None
    for name in _names(path):
        if not uid and (pod := _POD.search(name.removesuffix(".slice"))):
            uid = pod[1].replace("_", "-")
        elif container_id := _parse_container_id(name, uid):
            if uid:
                return Workload(uid=uid, container_id=container_id)
            outside = outside or Workload(container_id=container_id)
    return outside


def _names(path: str) -> Iterator[str]:
    for name in path.removesuffix(_DELETED).split("/"):
        # If containerd uses systemd cgroups and runc does not, runc creates one directory named `slice:prefix:id`.
        slice_, colon, scope = name.partition(":")
        yield slice_
        if colon:
            yield scope.replace(":", "-")


def _parse_container_id(name: str, uid: str) -> str:
    prefix, _, container_id = name.removesuffix(".scope").rpartition("-")
    if not _CONTAINER_ID.fullmatch(container_id) or prefix.endswith(_MONITOR):
        return ""
    # Outside a pod, a name that ends with a hash need not be a container.
    return container_id if uid or not prefix or prefix in _SCOPE_PREFIXES else ""
