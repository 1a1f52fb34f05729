"""ContainerFinder says which container a pid runs in, now: it reads /proc, and remembers what it read for as long as
the process lives.

A pid is only a number that is given again: with the moment it started, it is one process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from podgpu.errors import SourceError
from podgpu.model import Workload
from podgpu.usage.cgroup import parse_cgroup

MOST_REMEMBERED = 4096
"""Processes. More than run on the GPUs of any node; past it the one remembered longest is asked about again."""
MOST_LOOKED_AT = 50_000
"""Processes in all. Reading the cgroups of a thousand takes about 20 ms."""
FRESH_SECONDS = 30.0
"""A living process can be moved to another cgroup: after this long it is looked up again."""

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the first PID namespace has this inode on every Linux
_STARTED = 22  # field of /proc/<pid>/stat: clock ticks from boot to the process's start
_LONGEST = 64 * 1024
_NOBODY = Workload()

Sight = Literal["found", "not_in_container", "gone", "not_permitted", "unreadable"]
UNSEEN: frozenset[Sight] = frozenset({"not_permitted", "unreadable"})
"""It is there, and what container it is in cannot be told."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What could be seen of one process."""

    sight: Sight
    workload: Workload = _NOBODY
    """The container (`uid` and `container_id`) when it was found."""


@dataclass(frozen=True, slots=True)
class _Known:
    started: int
    read_at: float
    whereabouts: Whereabouts


class ContainerFinder:
    """Any thread may ask. `proc` is where the host's /proc is."""

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self.proc = proc
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    @property
    def remembered(self) -> int:
        return len(self._known)

    def find(self, pid: int) -> Whereabouts:
        """A process that ends while it is read is gone; one that took over its pid is never taken for it."""
        try:
            with _open_folder(f"{self.proc}/{pid}") as folder:
                return self._look(pid, folder)
        except (FileNotFoundError, ProcessLookupError):
            return Whereabouts("gone")
        except PermissionError:
            return Whereabouts("not_permitted")
        except (OSError, ValueError):
            return Whereabouts("unreadable")

    def forget_others(self, pids: Collection[int]) -> None:
        """Drop what is known of all processes but these."""
        with self._lock:
            for pid in self._known.keys() - set(pids):
                del self._known[pid]

    def _look(self, pid: int, folder: int) -> Whereabouts:
        started, now = parse_started(_read(folder, "stat")), self._clock()
        known = self._known.get(pid)
        if known is not None and known.started == started and now - known.read_at < FRESH_SECONDS:
            return known.whereabouts
        whereabouts = locate(_read(folder, "cgroup").decode(errors="replace"))
        self._remember(pid, _Known(started, now, whereabouts))
        return whereabouts

    def _remember(self, pid: int, known: _Known) -> None:
        with self._lock:
            self._known.pop(pid, None)  # so that it goes to the end of the line
            self._known[pid] = known
            if len(self._known) > MOST_REMEMBERED:
                del self._known[next(iter(self._known))]


def locate(cgroup: str) -> Whereabouts:
    """Where a process with this cgroup file is."""
    ref = parse_cgroup(cgroup)
    if ref is None:
        return Whereabouts("not_in_container")
    return Whereabouts("found", Workload(uid=ref.uid, container_id=ref.container_id))


def read_living(proc: str = "/proc") -> frozenset[Workload] | None:
    """The container (`uid` and `container_id`) of every process there is; None where not all of them can be seen."""
    if not in_host_pid_namespace(proc):
        return None
    try:
        with os.scandir(proc) as entries:
            pids = [entry.name for entry in entries if entry.name.isdigit()]
        found = {parse_cgroup(text) for pid in pids[:MOST_LOOKED_AT] if (text := _read_cgroup(proc, pid))}
    except (OSError, ValueError):
        return None
    if len(pids) > MOST_LOOKED_AT:
        return None
    return frozenset(Workload(uid=place.uid, container_id=place.container_id) for place in found if place is not None)


def _read_cgroup(proc: str, pid: str) -> str:
    """Empty for a process that ended meanwhile. Any other failure is raised: who is not seen may still be there."""
    try:
        with _open_folder(f"{proc}/{pid}") as folder:
            return _read(folder, "cgroup").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parse_started(stat: bytes) -> int:
    """When the process started, from /proc/<pid>/stat. Raises ValueError for anything else."""
    # The second field is the program's name in parentheses, and may itself have spaces and parentheses.
    _, parenthesis, rest = stat.rpartition(b")")
    fields = rest.split()
    if not parenthesis or len(fields) <= _STARTED - 3:
        raise ValueError("not a process's stat")
    return int(fields[_STARTED - 3])


def in_host_pid_namespace(proc: str = "/proc") -> bool | None:
    """False means that the driver shows no processes, whatever runs. None: it cannot be told."""
    try:
        return os.readlink(f"{proc}/self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return None


def require_host_pid_namespace(proc: str) -> None:
    """Elsewhere NVML answers with an empty list and no error, which is not the same as nobody. Raises SourceError."""
    is_hosts = in_host_pid_namespace(proc)
    if is_hosts is None:
        raise SourceError(
            "pid_namespace_unknown",
            f"{proc}/self/ns/pid cannot be read, so processes on the GPUs cannot be found: mount /proc",
        )
    if not is_hosts:
        raise SourceError(
            "not_host_pid_namespace",
            "processes on the GPUs are seen from the host's PID namespace only: set hostPID: true on the pod,"
            " or leave out what needs them; all else works without",
        )


def require_sight(seen: Mapping[int, Whereabouts], proc: str) -> None:
    """That not one process can be looked up is a fault of this pod's, not of some process. Raises SourceError."""
    sights = {place.sight for place in seen.values()} - {"gone"}
    if sights and sights <= UNSEEN:
        raise SourceError(
            "not_permitted" if "not_permitted" in sights else "unreadable",
            f"{proc}/<pid>/cgroup cannot be read of any process on the GPUs: set securityContext.runAsUser: 0,"
            " and see that neither hidepid on /proc nor an AppArmor or SELinux profile forbids it",
        )


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    """An open /proc/<pid> stays that process's: once it ended, reading in it fails, whoever has the pid then."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str) -> bytes:
    file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(file, _LONGEST)
    finally:
        os.close(file)
