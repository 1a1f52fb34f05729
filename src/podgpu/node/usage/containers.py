"""Uses /proc to find the container of a process.

On a node without Kubernetes, also finds the Slurm job and user. There are three results: the
process is in a container, it is outside any container, or this cannot be determined. The third case
is kept separate, because a busy container would otherwise look idle.
"""

from __future__ import annotations

import os
import pwd
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from podgpu.errors import SourceError
from podgpu.model import Workload, select_keys

RECENT_SECONDS = 300.0  # how long the owner of a process that has ended is kept
CACHE_SECONDS = 30.0  # lookups are then repeated, because a process can be moved to another cgroup

_HOST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO: the first PID namespace has this inode on every Linux."""
_STARTED = 22  # number of the start time field in /proc/<pid>/stat (clock ticks since boot)
_MPS_SERVER = b"(nvidia-cuda-mps)"
"""nvidia-cuda-mps-server, truncated to 15 characters by the kernel."""
_MAX_BYTES = 64 * 1024
_MAX_COMMAND = 64
_UID_LINE = re.compile(rb"^Uid:\s+(\d+)\s+(\d+)", re.MULTILINE)  # real and effective
# /system.slice/slurmstepd.scope/job_1/… or /slurm/uid_0/job_1/…
_SLURM_CGROUP = re.compile(r"slurm[^\n]*/job_(\d+)")
_SLURM_JOB = re.compile(rb"(?:\A|\0)SLURM_JOB_ID=(\d+)")
_SLURM_USER = re.compile(rb"(?:\A|\0)SLURM_JOB_USER=([\w.-]{1,64})")

NO_NAME = "no_pod_name"
UNKNOWN_USER = Workload(user="unknown")
LookupOutcome = Literal["found", "not_in_container", "gone", "not_permitted", "unreadable"]
# The process exists, but cannot be read.
FAILED_LOOKUPS: frozenset[LookupOutcome] = frozenset({"not_permitted", "unreadable"})


@dataclass(frozen=True, slots=True)
class ContainerLookup:
    """Result of one lookup.

    If a container was found, `workload` has its `uid` and `container_id`.
    """

    outcome: LookupOutcome
    workload: Workload = field(default_factory=Workload)
    is_mps_server: bool = False
    command: str = ""
    user_id: int | None = None  # effective user id


class _Cached(NamedTuple):
    started: int  # start time of the process
    looked_up_at: float
    lookup: ContainerLookup


@dataclass(eq=False)
class ContainerFinder:
    """Finds the containers of processes and caches them. Not thread-safe.

    `proc` is the path of the host's /proc. Pids are reused, so a cached entry is valid only for a
    process with the same start time. With `finds_users`, it also finds the job, user and command of
    processes outside pods.
    """

    proc: str = "/proc"
    clock: Callable[[], float] = time.monotonic
    finds_users: bool = False
    _cache: dict[int, _Cached] = field(default_factory=dict)  # by pid

    def find_all(self, pids: Collection[int]) -> dict[int, ContainerLookup]:
        """Looks up these processes, and evicts all others from the cache."""
        self._cache = select_keys(self._cache, pids)
        return {pid: self.find(pid) for pid in pids}

    def find(self, pid: int) -> ContainerLookup:
        try:
            return self._look_up(pid, f"{self.proc}/{pid}")
        except (FileNotFoundError, ProcessLookupError):
            return ContainerLookup("gone")
        except PermissionError:
            return ContainerLookup("not_permitted")
        except (OSError, ValueError, IndexError):
            return ContainerLookup("unreadable")

    def _look_up(self, pid: int, folder: str) -> ContainerLookup:
        stat = _read(f"{folder}/stat")
        now = self.clock()
        # The fields are counted from the last parenthesis on, because the program's name can
        # contain spaces. The name is field 2.
        _, _, after_name = stat.rpartition(b")")
        started = int(after_name.split()[_STARTED - 3])

        cached = self._cache.get(pid)
        if cached is not None and cached.started == started:
            age = now - cached.looked_up_at
            if age < CACHE_SECONDS:
                return cached.lookup

        cgroup = _read(f"{folder}/cgroup").decode(errors="replace")
        container = parse_cgroup(cgroup)
        outcome: LookupOutcome = "not_in_container" if container is None else "found"
        workload = container or Workload()
        command = ""
        is_in_pod = workload.uid != ""
        if self.finds_users and not is_in_pod:
            workload = _find_user(folder, cgroup, workload.container_id)
            command = _find_command(folder, stat)

        user_id = _read_user_id(folder)
        lookup = ContainerLookup(outcome, workload, _MPS_SERVER in stat, command, user_id)
        self._cache[pid] = _Cached(started, now, lookup)
        return lookup


def read_living(proc: str = "/proc") -> frozenset[Workload] | None:
    """Returns the containers (`uid` and `container_id`) of all processes.

    Returns None if a process cannot be read, or outside the host's PID namespace.
    """
    if not in_host_pid_namespace(proc):
        return None

    finder = ContainerFinder(proc)
    workloads = set()
    for name in os.listdir(proc):
        if name.isdigit():
            lookup = finder.find(int(name))
            if lookup.outcome in FAILED_LOOKUPS:
                return None
            if lookup.outcome == "found":
                workloads.add(lookup.workload)
    return frozenset(workloads)


def in_host_pid_namespace(proc: str = "/proc") -> bool:
    try:
        return os.readlink(f"{proc}/self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return False


def require_host_pid_namespace(proc: str) -> None:
    """Raises SourceError outside the host's PID namespace.

    NVML lists no processes there, and reports no error.
    """
    if not in_host_pid_namespace(proc):
        raise SourceError(
            "not_host_pid_namespace",
            "processes on the GPUs are visible in the host's PID namespace only: "
            "set hostPID: true on the pod, or disable the features that need it; "
            "all other features work without it",
        )


def require_permission(lookups: Mapping[int, ContainerLookup], proc: str) -> None:
    """Raises SourceError if every lookup failed, which means that podgpu lacks permissions."""
    outcomes = {lookup.outcome for lookup in lookups.values()} - {"gone"}
    if outcomes and outcomes <= FAILED_LOOKUPS:
        raise SourceError(
            "not_permitted" if "not_permitted" in outcomes else "unreadable",
            f"{proc}/<pid>/cgroup cannot be read for any process on the GPUs: "
            "set securityContext.runAsUser: 0, and check that neither hidepid on /proc "
            "nor an AppArmor or SELinux profile forbids it",
        )


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(_MAX_BYTES)


def _read_user_id(folder: str) -> int | None:
    """Returns the effective user id of a process, or None if it cannot be read."""
    with suppress(OSError):
        uid = _UID_LINE.search(_read(f"{folder}/status"))
        if uid is not None:
            return int(uid[2])
    return None


# Owners


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The owner of a process. A process with neither `workload` nor `problem` is not in a pod."""

    workload: Workload | None = None  # a container with its pod, a job or a user
    problem: str = ""  # why the owner cannot be determined
    container: Workload | None = None  # set if the pod of the container is unknown
    is_mps_server: bool = False
    command: str = ""  # only on a node without Kubernetes
    # True if the process does not exist, although the driver lists it
    has_ended: bool = field(default=False, compare=False)
    # True if it runs as another user. Without CAP_SYS_ADMIN, the driver then hides its pid.
    may_be_hidden: bool = field(default=True, compare=False)


NOT_IN_POD = ProcessOwner()


class _Early(NamedTuple):
    looked_up_at: float
    lookup: ContainerLookup


class _Recent(NamedTuple):
    seen_at: float
    owner: ProcessOwner


@dataclass(eq=False)
class ProcessOwners:
    """Finds the owners of processes. Remembers those of processes that have just ended."""

    _finder: ContainerFinder
    _complete: Callable[[Workload], Workload]
    """Adds the names of pod and container. Raises SourceError if sources disagree."""
    _read_identities: Callable[[], None]  # refreshes the names that `_complete` uses
    # The results of the last call of `find`, by pid.
    _lookups: dict[int, ContainerLookup] = field(default_factory=dict)
    _last: Mapping[int, ProcessOwner] = field(default_factory=dict)
    _early: dict[int, _Early] = field(default_factory=dict)  # by pid, see `find_early`
    _early_lock: threading.Lock = field(default_factory=threading.Lock)
    # By pid. Includes processes that have ended, because a process that causes an XID ends.
    _recent: dict[int, _Recent] = field(default_factory=dict)

    def find_early(self, pids: Collection[int]) -> Collection[int]:
        """Looks up processes that may end before the next call of `find`.

        Returns the pids of those that exist. Thread-safe.
        """
        # Another cache, because the finder is not thread-safe.
        finder = replace(self._finder, _cache={})
        lookups = finder.find_all(pids)
        now = self._finder.clock()
        existing = [pid for pid, lookup in lookups.items() if lookup.outcome != "gone"]

        with self._early_lock:
            for pid in existing:
                self._early[pid] = _Early(now, lookups[pid])
        return existing

    def find(self, pids: Collection[int]) -> Mapping[int, ProcessOwner]:
        before = self._lookups
        self._lookups = self._finder.find_all(pids)
        self._use_early_lookups()
        owners = self._find_owners(pids, before)

        new_containers = _list_containers(owners) - _list_containers(self._last)
        # The names are read at once, before a short job ends.
        if new_containers:
            self._read_identities()
            owners = self._find_owners(pids, before)

        self._last = owners
        self._keep_recent(owners)
        return owners

    def _keep_recent(self, owners: Mapping[int, ProcessOwner]) -> None:
        now = self._finder.clock()
        oldest = now - RECENT_SECONDS
        for pid, recent in list(self._recent.items()):
            if recent.seen_at <= oldest:
                del self._recent[pid]

        for pid, owner in owners.items():
            # Without an owner, an earlier one may be known.
            if owner.workload or self._lookups[pid].outcome != "gone":
                self._recent[pid] = _Recent(now, owner)

    def recall(self, pid: int) -> ProcessOwner | None:
        """Returns the owner of a process that may have ended. None if it is unknown."""
        with self._early_lock:
            early = self._early.get(pid)
        if early is not None:
            return self._find_early_owner(early.lookup)

        recent = self._recent.get(pid)
        if recent is None:
            return None
        return recent.owner

    def _find_early_owner(self, lookup: ContainerLookup) -> ProcessOwner:
        if lookup.outcome in FAILED_LOOKUPS:
            return ProcessOwner(problem=lookup.outcome)
        # Outside a container, the process may belong to a Slurm job or a user.
        if lookup.outcome != "found" and not lookup.workload.user:
            return NOT_IN_POD

        owner = self._make_owner(lookup.workload)
        # An owner has a container only while its pod is unknown. It may be new, so read the names.
        if owner.container:
            self._read_identities()
            owner = self._make_owner(lookup.workload)
        return replace(owner, command=lookup.command)

    def _use_early_lookups(self) -> None:
        """Uses the early lookups of processes that have ended since."""
        oldest = self._finder.clock() - CACHE_SECONDS
        with self._early_lock:
            for pid, early in list(self._early.items()):
                if early.looked_up_at <= oldest:
                    del self._early[pid]
                    continue

                lookup = self._lookups.get(pid)
                if lookup is not None and lookup.outcome == "gone":
                    self._lookups[pid] = early.lookup

    def _find_owners(
        self, pids: Iterable[int], before: Mapping[int, ContainerLookup]
    ) -> dict[int, ProcessOwner]:
        return {pid: self._find_owner(pid, before.get(pid)) for pid in pids}

    def _find_owner(self, pid: int, lookup_before: ContainerLookup | None) -> ProcessOwner:
        lookup = self._lookups[pid]
        before = self._last.get(pid, NOT_IN_POD).workload
        container_id = lookup.workload.container_id

        if lookup.outcome in FAILED_LOOKUPS:
            user = UNKNOWN_USER if self._finder.finds_users else None
            owner = ProcessOwner(user, lookup.outcome)
        elif lookup.outcome == "gone":
            # Processes that both lookups did not find may run, but be hidden.
            was_gone = lookup == lookup_before
            owner = self._find_ended_owner(before, was_gone)
        elif before and container_id and container_id == before.container_id:
            # Keeps the names of the container, which may no longer be listed.
            owner = self._make_owner(before)
        elif lookup.outcome == "found" or lookup.workload.user:
            owner = self._make_owner(lookup.workload)
        else:
            owner = NOT_IN_POD

        return replace(
            owner,
            is_mps_server=lookup.is_mps_server,
            command=lookup.command,
            # On a plain node, /proc may hide the processes of other users.
            has_ended=lookup.outcome == "gone" and not self._finder.finds_users,
            may_be_hidden=lookup.user_id != os.geteuid(),
        )

    def _find_ended_owner(self, before: Workload | None, was_gone: bool) -> ProcessOwner:
        """`before`: the last known owner. `was_gone`: the last lookup did not find it either."""
        if before:
            return self._make_owner(before)
        if was_gone and self._finder.finds_users:
            # With hidepid=invisible, /proc hides processes of other users, so they seem to be gone
            # while they run.
            return ProcessOwner(UNKNOWN_USER)
        return NOT_IN_POD

    def _make_owner(self, workload: Workload) -> ProcessOwner:
        if workload.user:
            return ProcessOwner(workload)
        try:
            workload = self._complete(workload)
        except SourceError as e:
            return ProcessOwner(problem=e.reason)
        if workload.pod:
            return ProcessOwner(workload)
        # A UID means a pod.
        problem = NO_NAME if workload.uid else ""
        return ProcessOwner(problem=problem, container=workload)

    def read_program(self, pid: int) -> str:
        """Returns the name of a process, without arguments. Empty if it does not exist."""
        with suppress(OSError):
            name = _read(f"{self._finder.proc}/{pid}/comm")
            return name.decode(errors="replace").strip()[:_MAX_COMMAND]
        return ""

    def require_permission(self) -> None:
        """Raises SourceError if the last lookup found the owner of no process.

        The message says what to change.
        """
        require_host_pid_namespace(self._finder.proc)
        require_permission(self._lookups, self._finder.proc)

        owners = self._last.values()
        has_owner = any(owner.workload for owner in owners)
        if not has_owner and any(owner.problem == NO_NAME for owner in owners):
            raise SourceError(
                NO_NAME,
                "podgpu cannot determine the pods of the processes on the GPUs: "
                "mount the host's /var/log read-only (podgpu reads only file names; "
                "see --path-varlog), or give podgpu access to the API server",
            )


def _list_containers(owners: Mapping[int, ProcessOwner]) -> set[Workload]:
    """Returns the containers whose pods are unknown."""
    containers = set()
    for owner in owners.values():
        if owner.container:
            containers.add(owner.container)
    return containers


# Users


def _find_user(folder: str, cgroup: str, container_id: str) -> Workload:
    """Returns the Slurm job and the user of a process.

    Reads the process's environment if permitted.
    """
    environment = b""
    uid = _UID_LINE.search(_read(f"{folder}/status"))
    with suppress(OSError):
        environment = _read(f"{folder}/environ")

    job = ""
    if in_cgroup := _SLURM_CGROUP.search(cgroup):
        job = in_cgroup[1]
    elif variable := _SLURM_JOB.search(environment):
        job = variable[1].decode()

    user = _find_user_name(int(uid[1])) if uid else "unknown"
    job_user = _SLURM_USER.search(environment)
    # If only a UID was found, podgpu is in a container that does not know the users of the host.
    if job_user and user.isdigit():
        user = job_user[1].decode(errors="replace")
    # All containers of a job are one workload.
    if job:
        container_id = ""
    return Workload(container_id=container_id, job=job, user=user)


@lru_cache(maxsize=1024)
def _find_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _find_command(folder: str, stat: bytes) -> str:
    """Returns the program's name.

    Arguments are cut off, because some programs write them into argv[0].
    """
    # Without a command line, the kernel's short name: 1234 (name) S …
    _, _, name_and_more = stat.partition(b"(")
    name, _, _ = name_and_more.rpartition(b")")

    with suppress(OSError):
        program, _, _ = _read(f"{folder}/cmdline").partition(b"\0")
        words = program.split()
        if words:
            name = os.path.basename(words[0])
    return name.decode(errors="replace")[:_MAX_COMMAND]


# Cgroups
# The format depends on the cgroup version, the kubelet's cgroup driver, the runtime, and the
# reader's cgroup namespace. If containerd uses systemd cgroups and runc does not, runc creates one
# directory named `slice:prefix:id`. The cgroups crio-conmon-<id> and libpod-conmon-<id> contain
# only the container's monitor.

# a pod's UID, or the hash of a static pod
_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# the kernel adds (deleted) if the cgroup was removed
_ID = r"([0-9a-f]{64})(?:\.scope)?(?=/|\n|\Z| \(deleted\))"
_IN_POD = re.compile(rf"[/-]pod({_UID})(?:\.slice)?(?=[/:])[^\n]*?[/:-](?<!conmon-){_ID}")
_OUTSIDE_PODS = re.compile(rf"/(?:(?:cri-containerd|nerdctl|crio|docker|libpod)-)?{_ID}")


def parse_cgroup(text: str) -> Workload | None:
    """Parses /proc/<pid>/cgroup. Returns `uid` and `container_id`, or None outside containers.

    If containers are nested, returns the outermost one with a pod's UID, or else the outermost one.
    """
    if pod := _IN_POD.search(text):
        return Workload(uid=pod[1].replace("_", "-"), container_id=pod[2])

    container = _OUTSIDE_PODS.search(text)
    if not container:
        return None
    return Workload(container_id=container[1])
