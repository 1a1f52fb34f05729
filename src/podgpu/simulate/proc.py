"""Writes a /proc of simulated processes into a directory, with the files that podgpu reads."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Literal

HOST_PID_NAMESPACE = "pid:[4026531836]"
OTHER_PID_NAMESPACE = "pid:[4026532881]"

Driver = Literal["systemd", "cgroupfs"]
Qos = Literal["guaranteed", "burstable", "besteffort"]
Runtime = Literal["containerd", "crio", "docker"]

_SCOPES: dict[Runtime, str] = {"containerd": "cri-containerd", "crio": "crio", "docker": "docker"}
_V1_HIERARCHIES = ("cpuset", "cpu,cpuacct", "blkio", "memory", "devices", "freezer", "pids", "name=systemd")
_FIRST_START = 5_000
_FIELDS_AFTER_START = 30


class SimulatedProc:
    """Use `root` as /proc. `pid_namespace`: namespace of the reader."""

    def __init__(self, root: Path, pid_namespace: str = HOST_PID_NAMESPACE) -> None:
        self.root = root
        self._starts = itertools.count(_FIRST_START, 7)
        namespaces = root / "self" / "ns"
        namespaces.mkdir(parents=True)
        os.symlink(pid_namespace, namespaces / "pid")

    def add(self, pid: int, cgroup: str, name: str = "python3") -> None:
        """Starts a process. `cgroup`: text of its cgroup file, see `container_cgroup`."""
        folder = self.root / str(pid)
        folder.mkdir()
        # Written last, because readers open it first.
        (folder / "stat").write_text(stat_line(pid, name, next(self._starts)))
        (folder / "cgroup").write_text(cgroup)

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))

    def reuse(self, pid: int, cgroup: str, name: str = "python3") -> None:
        """Ends the process and starts another one with its pid."""
        self.remove(pid)
        self.add(pid, cgroup, name)

    def move(self, pid: int, cgroup: str) -> None:
        (self.root / str(pid) / "cgroup").write_text(cgroup)

    def forbid(self, pid: int) -> None:
        (self.root / str(pid) / "cgroup").chmod(0)


def stat_line(pid: int, name: str, started: int) -> str:
    """Returns the text of /proc/<pid>/stat. The kernel keeps 15 characters of the name."""
    before_start = " ".join(["1"] * 18)
    after_start = " ".join(["0"] * _FIELDS_AFTER_START)
    return f"{pid} ({name[:15]}) S {before_start} {started} {after_start}\n"


def container_cgroup(
    uid: str,
    container_id: str,
    *,
    version: Literal[1, 2] = 2,
    driver: Driver = "systemd",
    qos: Qos = "burstable",
    runtime: Runtime = "containerd",
) -> str:
    """Returns the cgroup file of a process in a pod's container."""
    make = _systemd_path if driver == "systemd" else _cgroupfs_path
    return cgroup_text(make(uid, container_id, qos, runtime), version)


def cgroup_text(path: str, version: Literal[1, 2] = 2) -> str:
    if version == 2:
        return f"0::{path}\n"
    numbered = enumerate(_V1_HIERARCHIES, 1)
    return "".join(f"{number}:{controllers}:{path}\n" for number, controllers in reversed(list(numbered)))


def _systemd_path(uid: str, container_id: str, qos: Qos, runtime: Runtime) -> str:
    top = "kubepods" if qos == "guaranteed" else f"kubepods-{qos}"
    middle = "" if qos == "guaranteed" else f"/{top}.slice"
    pod = f"{top}-pod{uid.replace('-', '_')}.slice"
    return f"/kubepods.slice{middle}/{pod}/{_SCOPES[runtime]}-{container_id}.scope"


def _cgroupfs_path(uid: str, container_id: str, qos: Qos, runtime: Runtime) -> str:
    middle = "" if qos == "guaranteed" else f"/{qos}"
    name = f"crio-{container_id}" if runtime == "crio" else container_id
    return f"/kubepods{middle}/pod{uid}/{name}"
