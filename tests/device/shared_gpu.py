"""Runs loads and exporters on a shared GPU, and reads their metrics. The scripts in this folder use
it.

Each load is a process in a cgroup with the usual name of a container. The usual files in /var/log
also exist. Needs root, cgroup v2 and PyTorch, but no container runtime.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pynvml

from podgpu.labs.simulate.simulated_kubelet import SimulatedKubelet, SimulatedPod
from podgpu.node.gpu.nvml.switch_attribution import RECORD
from podgpu.node.gpu.nvml.switch_log import ContextSwitchLog, check_driver

METHODS = ("samples", "switches", "exact")
PORTS = {method: 9480 + number for number, method in enumerate(METHODS)}
BUSY = "podgpu_container_gpu_busy_seconds_total"
MEMORY = "podgpu_container_gpu_memory_used_bytes"
_CGROUPS = Path("/sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice")
_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LOAD = Path(__file__).with_name("recorded_load.py")

Burst = tuple[float, float]
"""Milliseconds of work, and the period in milliseconds."""


@dataclass
class Tenant:
    """A pod with one container `main`, which runs the load."""

    pod: str
    log: Path
    command: Sequence[str]
    user: int | None = None
    namespace: str = "shared"
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        uid = str(uuid.uuid5(uuid.NAMESPACE_DNS, self.pod))
        container_id = sha256(self.pod.encode()).hexdigest()
        Path(f"/var/log/pods/{self.namespace}_{self.pod}_{uid}/main").mkdir(
            parents=True, exist_ok=True
        )
        logs = Path("/var/log/containers")
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{self.pod}_{self.namespace}_main-{container_id}.log").touch()
        self.process = subprocess.Popen(
            self.command, user=self.user, env=os.environ | {"HOME": "/tmp"}
        )
        pod_slice = _CGROUPS / f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        scope = pod_slice / f"cri-containerd-{container_id}.scope"
        scope.mkdir(parents=True, exist_ok=True)
        (scope / "cgroup.procs").write_text(str(self.process.pid))

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def worked(self, since: float, until: float) -> float:
        """Returns the seconds of work that the load recorded between two times."""
        return self._read_log(1, since, until)

    def waited(self, since: float, until: float) -> float:
        """Returns the seconds of waiting that the load recorded between two times."""
        return self._read_log(2, since, until)

    def _read_log(self, column: int, since: float, until: float) -> float:
        lines = [
            line.split() for line in self.log.read_text().splitlines() if not line.startswith("#")
        ]
        points = [(float(line[0]), float(line[column])) for line in lines if len(line) == 3]

        def total(moment: float) -> float:
            before = max((point for point in points if point[0] <= moment), default=(moment, 0.0))
            after = min((point for point in points if point[0] > moment), default=before)
            part = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
            return before[1] + part * (after[1] - before[1])

        return total(until) - total(since)


class SharedGpu:
    """The first GPU of the machine. `wrong` lists the failed checks."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o777)
        pynvml.nvmlInit()
        self.folder = folder
        self.gpu: Any = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.wrong: list[str] = []

    def check(self, what: str, holds: bool) -> None:
        print(f"{'ok   ' if holds else 'WRONG'} {what}", flush=True)
        if not holds:
            self.wrong.append(what)

    def report(self) -> int:
        """Prints the result and returns the exit code."""
        print("WRONG: " + "; ".join(self.wrong) if self.wrong else "all within limits")
        return 1 if self.wrong else 0

    @contextmanager
    def loads(
        self, bursts: Sequence[Burst], *options: str, user: int | None = None
    ) -> Iterator[list[Tenant]]:
        """Runs one load per burst. `user` is the user id of the last load."""
        go = self.folder / f"go-{time.monotonic_ns()}"
        tenants = []
        for number, (busy, period) in enumerate(bursts):
            log = self.folder / f"{go.name}-{number}.log"
            log.touch()
            log.chmod(0o666)
            command = [
                sys.executable,
                str(_LOAD),
                str(busy),
                str(period),
                str(log),
                str(go),
                *options,
            ]
            last = number == len(bursts) - 1
            tenants.append(Tenant(f"load-{go.name}-{number}", log, command, user if last else None))
        try:
            for tenant in tenants:
                tenant.start()
            wait_for(
                lambda: all(tenant.log.stat().st_size for tenant in tenants),
                90,
                "the loads to calibrate",
            )
            go.touch()
            time.sleep(1.0)
            yield tenants
        finally:
            for tenant in tenants:
                tenant.kill()

    @contextmanager
    def exporters(
        self,
        tenants: Sequence[Tenant],
        methods: Sequence[str],
        *options: str,
        wrapper: Sequence[str] = (),
    ) -> Iterator[dict[str, int]]:
        """Runs one exporter per method. Yields their pids."""
        with self.kubelet(tenants) as socket:
            running = {}
            for method in methods:
                given = ["-k", "-a", f"127.0.0.1:{PORTS[method]}", "--usage-from", method]
                given += ["--pod-resources-kubelet-socket", socket, *options]
                running[method] = subprocess.Popen(
                    [*wrapper, sys.executable, "-m", "podgpu", "exporter", *given]
                )
            try:
                for method in methods:
                    wait_for(partial(has_memory, method), 30, f"the exporter ({method})")
                yield {method: process.pid for method, process in running.items()}
            finally:
                for process in running.values():
                    process.terminate()
                for process in running.values():
                    process.wait(20)

    def record_switches(self, seconds: float) -> tuple[bytes, float]:
        """Reads the context-switch log. Returns its records and their number per second."""
        check_driver(pynvml.nvmlSystemGetDriverVersion())
        records, began = bytearray(), time.monotonic()
        with closing(ContextSwitchLog(pynvml.nvmlDeviceGetPciInfo(self.gpu).busId, 0)) as log:
            while time.monotonic() < began + seconds:
                time.sleep(0.5)
                records += log.drain()
        return bytes(records), len(records) / RECORD.size / (time.monotonic() - began)

    @contextmanager
    def kubelet(self, tenants: Sequence[Tenant]) -> Iterator[str]:
        """Lists a time slice of the GPU for each tenant. Yields the path of the socket."""
        gpu = pynvml.nvmlDeviceGetUUID(self.gpu)
        pods = [
            SimulatedPod(
                tenant.namespace,
                tenant.pod,
                {"main": {"nvidia.com/gpu.shared": [f"{gpu}::{number}"]}},
            )
            for number, tenant in enumerate(tenants)
        ]
        with SimulatedKubelet(f"{self.folder}/{time.monotonic_ns()}.sock", pods) as kubelet:
            yield kubelet.socket


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        if time.monotonic() > until:
            sys.exit(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


def has_memory(method: str) -> bool:
    return MEMORY in exposition(method)


def exposition(method: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[method]}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def series(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            yield dict(_PAIR.findall(line)), float(line.rsplit(" ", 1)[1])


def value(text: str, name: str, pod: str = "") -> float:
    return sum(
        number for labels, number in series(text, name) if not pod or labels.get("pod") == pod
    )


def method_of(text: str) -> str:
    return ",".join(labels["method"] for labels, _ in series(text, "podgpu_device_usage_method"))


def cpu_seconds(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # the CPU clock of all threads of the process


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
        / 1024
    )
