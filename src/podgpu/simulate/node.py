"""Simulates the pods of a node: loads on the GPUs, the pods that the kubelet lists, /proc and log directories.

A pattern repeats every eight GPUs: a pod on two GPUs, a pod with two containers on two GPUs, two pods that share one
GPU by time-slicing, an idle pod, a busy pod, and a GPU without a pod.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID, uuid5

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.gpu import SimulatedLoad
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

_GIB = 1024**3
_FIRST_PID = 4000
_SWAY_SECONDS, _SWAYS_APART = 30, 37
"""The periods of varying loads are 30 to 66 s."""
_NAMES = UUID("6f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a10")

_HOST_PID_NAMESPACE = "pid:[4026531836]"
_FIRST_START = 5_000
_FIELDS_AFTER_START = 30


# Tenants


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container on one device: its allocation (kubelet) and its load (driver)."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str
    gpu: int
    gi_id: int | None = None
    duty: float = 0.0
    memory: int = 0


def tenants(driver: SimulatedNvml, first: int = 0) -> list[Tenant]:
    """Returns the tenants of a node.

    `first`: position of the first GPU in the pattern. Nodes with different multiples of 8 have different pod names.
    """
    result: list[Tenant] = []
    whole = [g for g in driver.gpus if not g.instances]
    for position, gpu in enumerate(whole, first):
        result += _on_gpu(position, gpu.number, gpu.uuid)
    for gpu in driver.gpus:
        for slot, instance in enumerate(gpu.instances):
            if slot < 5:  # the remaining instances stay free
                result.append(
                    Tenant(
                        "notebooks",
                        f"jupyter-{first + gpu.number}-{slot}",
                        "notebook",
                        f"nvidia.com/mig-{instance.profile.name.replace('+', '.')}",
                        instance.uuid,
                        gpu.number,
                        instance.gi_id,
                        duty=0.15 * (slot + 1),
                        memory=(slot + 1) * _GIB,
                    )
                )
    return result


def _on_gpu(position: int, gpu: int, uuid: str) -> Iterator[Tenant]:
    round_, place = divmod(position, 8)
    whole = "nvidia.com/gpu"
    if place < 2:
        yield Tenant("research", f"llm-train-{round_}", "trainer", whole, uuid, gpu, duty=0.93, memory=61 * _GIB)
    elif place == 2:
        yield Tenant("serving", f"chat-{round_}", "engine", whole, uuid, gpu, duty=0.55, memory=40 * _GIB)
    elif place == 3:
        yield Tenant("serving", f"chat-{round_}", "reranker", whole, uuid, gpu, duty=0.2, memory=12 * _GIB)
    elif place == 4:
        shared = "nvidia.com/gpu.shared"
        yield Tenant("batch", f"embed-{round_}", "worker", shared, f"{uuid}::0", gpu, duty=0.35, memory=9 * _GIB)
        yield Tenant("batch", f"ocr-{round_}", "worker", shared, f"{uuid}::1", gpu, duty=0.15, memory=5 * _GIB)
    elif place == 5:
        yield Tenant("notebooks", f"jupyter-ada-{round_}", "notebook", whole, uuid, gpu)
    elif place == 6:
        yield Tenant("research", f"diffusion-{round_}", "trainer", whole, uuid, gpu, duty=0.78, memory=33 * _GIB)


def place_loads(driver: SimulatedNvml, on: list[Tenant]) -> None:
    for number, tenant in enumerate(on):
        if tenant.duty:
            driver.place(make_load(tenant, driver, make_pid(number), phase=number * 0.013))


def make_load(tenant: Tenant, driver: SimulatedNvml, pid: int, phase: float = 0.0, sway: float = 0.0) -> SimulatedLoad:
    gpu = driver.gpus[tenant.gpu]
    room = gpu.model.memory // 2 if tenant.gi_id is None else gpu.find_room(tenant.gi_id) * 9 // 10
    return SimulatedLoad(
        gpu=tenant.gpu,
        pid=pid,
        duty=tenant.duty,
        gi_id=tenant.gi_id,
        memory=min(tenant.memory, room),
        phase=phase,
        sway=sway,
        sway_period=_SWAY_SECONDS + pid % _SWAYS_APART,
    )


def furnish(root: Path, of: list[Tenant]) -> None:
    """Creates the host's files: /proc/<pid> of each process, and the kubelet's log directories."""
    proc = SimulatedProc(root / "proc")
    for number, tenant in enumerate(of):
        create_files(root, proc, tenant, make_pid(number))


def create_files(root: Path, proc: SimulatedProc, tenant: Tenant, pid: int) -> None:
    if tenant.duty:
        pod_slice = f"kubepods-burstable-pod{_uid(tenant).replace('-', '_')}.slice"
        scope = f"cri-containerd-{_container_id(tenant)}.scope"
        proc.add(pid, f"0::/kubepods.slice/kubepods-burstable.slice/{pod_slice}/{scope}\n")
    pod, container = _log_paths(root, tenant)
    pod.mkdir(parents=True, exist_ok=True)
    container.parent.mkdir(exist_ok=True)
    container.touch()


def remove_files(root: Path, proc: SimulatedProc, tenant: Tenant, pid: int) -> None:
    if tenant.duty:
        proc.remove(pid)
    pod, container = _log_paths(root, tenant)
    container.unlink(missing_ok=True)
    with suppress(OSError):  # already removed, together with another container of the pod
        pod.rmdir()


def _log_paths(root: Path, tenant: Tenant) -> tuple[Path, Path]:
    log = f"{tenant.pod}_{tenant.namespace}_{tenant.container}-{_container_id(tenant)}.log"
    return root / "pods" / f"{tenant.namespace}_{tenant.pod}_{_uid(tenant)}", root / "containers" / log


def make_pid(number: int) -> int:
    return _FIRST_PID + number


def _uid(tenant: Tenant) -> str:
    return str(uuid5(_NAMES, f"{tenant.namespace}/{tenant.pod}"))


def _container_id(tenant: Tenant) -> str:
    return sha256(f"{tenant.namespace}/{tenant.pod}/{tenant.container}".encode()).hexdigest()


def pods(of: Iterable[Tenant]) -> list[SimulatedPod]:
    """Lists each pod once, with all containers and device ids, as the kubelet does."""
    held: dict[tuple[str, str], dict[str, dict[str, list[str]]]] = {}
    for tenant in of:
        containers = held.setdefault((tenant.namespace, tenant.pod), {})
        containers.setdefault(tenant.container, {}).setdefault(tenant.resource, []).append(tenant.device_id)
    return [SimulatedPod(namespace, name, containers) for (namespace, name), containers in held.items()]


# /proc


class SimulatedProc:
    """A directory like /proc, read by a process in the host's PID namespace."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._starts = itertools.count(_FIRST_START, 7)
        namespaces = root / "self" / "ns"
        namespaces.mkdir(parents=True)
        os.symlink(_HOST_PID_NAMESPACE, namespaces / "pid")

    def add(self, pid: int, cgroup: str, name: str = "python3") -> None:
        """Adds a process. `cgroup`: text of its cgroup file."""
        folder = self.root / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(stat_line(pid, name, next(self._starts)))
        (folder / "cgroup").write_text(cgroup)

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


def stat_line(pid: int, name: str, started: int) -> str:
    """Returns the text of /proc/<pid>/stat. The kernel cuts the name to 15 characters."""
    before_start = " ".join(["1"] * 18)
    after_start = " ".join(["0"] * _FIELDS_AFTER_START)
    return f"{pid} ({name[:15]}) S {before_start} {started} {after_start}\n"


# A whole node

_SWAY = {"research": 0.08, "serving": 0.7, "batch": 0.9, "notebooks": 0.8}
"""Namespace -> relative variation of its loads. Training is steady, services vary."""


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
