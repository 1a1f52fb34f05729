"""StageNode is a simulated node on which things happen: pods come and end, GPUs break, its exporter dies.

Everything below it is as on any simulated node: a driver, a real gRPC kubelet, files as on a host.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet
from podgpu.simulate.node import Tenant, clear_one, furnish_one, load_of, pid_of, pods, tenants
from podgpu.simulate.proc import SimulatedProc

_SWAY = {"research": 0.08, "serving": 0.7, "batch": 0.9, "notebooks": 0.8}
"""Namespace -> how far its loads swing: a training is steady, a service has users."""
_OWNERS = {
    "llm-train": "Job",
    "diffusion": "Job",
    "chat": "Deployment",
    "embed": "Deployment",
    "ocr": "Deployment",
    "jupyter-ada": "Notebook",
    "jupyter": "StatefulSet",
}
"""What a pod's name begins with -> what made it."""


class StageNode:
    """Entered, its kubelet answers."""

    def __init__(
        self,
        name: str,
        gpus: str,
        root: Path,
        *,
        first: int = 0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`first`: where in the pattern of tenants it begins. `root`: a directory for what is on the host."""
        self.name = name
        self.driver = SimulatedNvml(gpus, seed=seed, node=name, clock=clock, wall=wall)
        self.root = root
        self.answers = True
        """False: whoever asks its exporter gets no answer."""
        self._proc = SimulatedProc(root / "proc")
        self._numbers = itertools.count()
        self._residents: dict[Tenant, int] = {}
        """With their pids."""
        self.kubelet = SimulatedKubelet(str(root / "kubelet.sock"))
        self._open = ExitStack()
        self.move_in(*tenants(self.driver, first))

    def __enter__(self) -> Self:
        self._open.enter_context(self.kubelet)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def tenants(self) -> list[Tenant]:
        return list(self._residents)

    @property
    def gpus(self) -> int:
        return len(self.driver.machine.gpus)

    # Pods

    def move_in(self, *found: Tenant) -> None:
        for tenant in found:
            number = next(self._numbers)
            pid = self._residents[tenant] = pid_of(number)
            furnish_one(self.root, self._proc, tenant, pid)
            self._start(tenant, pid)
        self.kubelet.pods = tuple(pods(self._residents))

    def move_out(self, namespace: str, pod: str) -> list[Tenant]:
        """The pod ends; who it was."""
        leaving = [tenant for tenant in self._residents if (tenant.namespace, tenant.pod) == (namespace, pod)]
        for tenant in leaving:
            pid = self._residents.pop(tenant)
            if tenant.duty:
                self.driver.remove(pid)
            clear_one(self.root, self._proc, tenant, pid)
        self.kubelet.pods = tuple(pods(self._residents))
        return leaving

    def _start(self, tenant: Tenant, pid: int) -> None:
        if tenant.duty:
            sway = _SWAY.get(tenant.namespace, 0.0)
            self.driver.place(load_of(tenant, self.driver, pid, phase=pid * 1.7, sway=sway))

    # What breaks

    def lose(self, gpu: int) -> None:
        self.driver.faults.lose(gpu)

    def find_again(self, gpu: int) -> None:
        self.driver.faults.recover(gpu)

    def raise_xid(self, gpu: int, xid: int) -> None:
        self.driver.faults.raise_xid(gpu, xid)

    def reset(self, gpu: int) -> None:
        """The GPU, and whoever worked on it works on: its processes were started anew."""
        self.driver.faults.reset(gpu)
        for tenant, pid in self._residents.items():
            if tenant.gpu == gpu:
                self._start(tenant, pid)


def owner_of(pod: str) -> tuple[str, str] | None:
    """Kind and name of what made a pod, by its name."""
    for begins, kind in _OWNERS.items():
        if pod.startswith(f"{begins}-"):
            return (kind, pod if kind == "Job" else begins)
    return None
