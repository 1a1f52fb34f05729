"""Nodes and events of `podgpu demo`. In each cycle a job ends, GPUs and an exporter fail, and everything recovers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet
from podgpu.simulate.node import SimulatedProc, Tenant, create_files, make_load, make_pid, pods, remove_files, tenants

_SWAY = {"research": 0.08, "serving": 0.7, "batch": 0.9, "notebooks": 0.8}
"""Namespace -> relative variation of its loads. Training is steady, services vary."""
_OWNERS = {
    "llm-train": "Job",
    "diffusion": "Job",
    "chat": "Deployment",
    "embed": "Deployment",
    "ocr": "Deployment",
    "jupyter-ada": "Notebook",
    "jupyter": "StatefulSet",
}
"""Prefix of a pod's name -> kind of its owner."""
CYCLE_SECONDS = 150.0
XID = 48  # a double-bit memory error, after which the GPU must be reset
_JOB = ("research", "llm-train-2")
_JOB_NODE, _LOST_NODE, _LOST_GPU = 2, 1, 3


class StageNode:
    """A simulated node with a driver, a gRPC kubelet and the files of a host. Pods and GPUs change while it runs."""

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
        """`first`: position of the first GPU in the pattern of tenants. `root`: directory for the host's files."""
        self.name = name
        self.driver = SimulatedNvml(gpus, seed=seed, node=name, clock=clock, wall=wall)
        self.root = root
        self.answers = True  # False while the node's exporter does not answer
        self._proc = SimulatedProc(root / "proc")
        self._numbers = itertools.count()
        self._pids: dict[Tenant, int] = {}
        self.kubelet = SimulatedKubelet(str(root / "kubelet.sock"))
        self.move_in(*tenants(self.driver, first))

    def __enter__(self) -> Self:
        self.kubelet.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kubelet.stop()

    @property
    def tenants(self) -> list[Tenant]:
        return list(self._pids)

    @property
    def gpus(self) -> int:
        return len(self.driver.gpus)

    def move_in(self, *new: Tenant) -> None:
        for tenant in new:
            pid = self._pids[tenant] = make_pid(next(self._numbers))
            create_files(self.root, self._proc, tenant, pid)
            self._start(tenant, pid)
        self.kubelet.pods = tuple(pods(self._pids))

    def move_out(self, namespace: str, pod: str) -> list[Tenant]:
        """Ends a pod and returns its containers."""
        leaving = [tenant for tenant in self._pids if (tenant.namespace, tenant.pod) == (namespace, pod)]
        for tenant in leaving:
            pid = self._pids.pop(tenant)
            if tenant.duty:
                self.driver.remove(pid)
            remove_files(self.root, self._proc, tenant, pid)
        self.kubelet.pods = tuple(pods(self._pids))
        return leaving

    def _start(self, tenant: Tenant, pid: int) -> None:
        if tenant.duty:
            sway = _SWAY.get(tenant.namespace, 0.0)
            self.driver.place(make_load(tenant, self.driver, pid, phase=pid * 1.7, sway=sway))

    def reset(self, gpu: int) -> None:
        """Resets the GPU and restarts its processes."""
        self.driver.reset(gpu)
        for tenant, pid in self._pids.items():
            if tenant.gpu == gpu:
                self._start(tenant, pid)


def find_pod_owner(pod: str) -> tuple[str, str] | None:
    """Returns kind and name of a pod's owner, None if the pod has none."""
    for prefix, kind in _OWNERS.items():
        if pod.startswith(f"{prefix}-"):
            return (kind, pod if kind == "Job" else prefix)
    return None


@dataclass(frozen=True, slots=True)
class Act:
    at: float  # seconds since the start of the cycle
    message: str
    do: Callable[[], object]


def acts(nodes: Sequence[StageNode]) -> list[Act]:
    """Returns the events of the demo's three nodes. All faults exist at the same time between 30 and 90 seconds."""
    first, lost, last = nodes[0], nodes[_LOST_NODE], nodes[_JOB_NODE]
    ill, job = min(6, first.gpus - 1), _Job(last)
    return [
        Act(10.0, f"{last.name}: a training job ends", job.end),
        Act(15.0, f"{first.name}: GPU {ill} reports XID {XID}", lambda: first.driver.raise_xid(ill, XID)),
        Act(20.0, f"{lost.name}: GPU {_LOST_GPU} falls off the bus", lambda: lost.driver.lose(_LOST_GPU)),
        Act(30.0, f"{last.name}: the exporter stops answering", lambda: setattr(last, "answers", False)),
        Act(90.0, f"{last.name}: the exporter answers again", lambda: setattr(last, "answers", True)),
        Act(95.0, f"{last.name}: the next training job begins", job.begin),
        Act(105.0, f"{lost.name}: GPU {_LOST_GPU} answers again", lambda: lost.driver.recover(_LOST_GPU)),
        Act(115.0, f"{first.name}: GPU {ill} is reset", lambda: first.reset(ill)),
    ]


class _Job:
    """A training job that ends and is later replaced by another one on the same GPUs."""

    def __init__(self, node: StageNode) -> None:
        self._node = node
        self._name = _JOB
        self._tenants = [tenant for tenant in node.tenants if (tenant.namespace, tenant.pod) == _JOB]
        self._numbers = itertools.count(int(_JOB[1].rpartition("-")[2]) + 1)

    def end(self) -> None:
        self._node.move_out(*self._name)

    def begin(self) -> None:
        namespace, before = self._name
        self._name = namespace, f"{before.rpartition('-')[0]}-{next(self._numbers)}"
        self._node.move_in(*(replace(tenant, pod=self._name[1]) for tenant in self._tenants))


class Play:
    """Executes acts at their times, cycle after cycle."""

    def __init__(self, script: Sequence[Act], cycle: float = CYCLE_SECONDS) -> None:
        self._due = self._schedule(sorted(script, key=lambda act: act.at), cycle)
        self._next = next(self._due, None)

    @staticmethod
    def _schedule(script: Sequence[Act], cycle: float) -> Iterator[tuple[float, Act]]:
        for number in itertools.count() if script else ():
            for act in script:
                yield number * cycle + act.at, act

    @property
    def next_at(self) -> float:
        """Seconds from the start to the next act; infinite without acts."""
        return math.inf if self._next is None else self._next[0]

    def run_due(self, now: float) -> list[Act]:
        """Executes and returns the acts that are due. `now`: seconds since the start."""
        done = []
        while self._next is not None and self._next[0] <= now:
            act = self._next[1]
            act.do()
            done.append(act)
            self._next = next(self._due, None)
        return done
