"""Containers as a node has them, without a runtime: a process in a cgroup named as the kubelet and containerd name it,
and its names under /var/log. For scripts that run by hand as root on a machine with cgroup v2."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice")


@dataclass
class Tenant:
    """One pod with one container, `main`."""

    namespace: str
    pod: str
    command: Sequence[str] = ()
    """What runs in it; nothing for a pod that only holds its GPU."""
    user: int | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def uid(self) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_DNS, self.pod))

    @property
    def container_id(self) -> str:
        return sha256(self.pod.encode()).hexdigest()

    @property
    def scope(self) -> Path:
        slice_name = f"kubepods-burstable-pod{self.uid.replace('-', '_')}.slice"
        return CGROUPS / slice_name / f"cri-containerd-{self.container_id}.scope"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else -1

    def start(self) -> None:
        Path(f"/var/log/pods/{self.namespace}_{self.pod}_{self.uid}/main").mkdir(parents=True, exist_ok=True)
        logs = Path("/var/log/containers")
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{self.pod}_{self.namespace}_main-{self.container_id}.log").touch()
        if self.command:
            environment = os.environ | {"HOME": "/tmp"}
            self.process = subprocess.Popen(self.command, user=self.user, env=environment)
            self.scope.mkdir(parents=True, exist_ok=True)
            (self.scope / "cgroup.procs").write_text(str(self.process.pid))

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024
