"""Simulates the pods of a node: loads, the kubelet's list of pods, /proc and log directories.

Every eight GPUs have: a pod on two GPUs, a pod with two containers on two GPUs, two pods that share
one GPU by time-slicing, an idle pod, a busy pod, and a GPU without a pod.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Self
from uuid import UUID, uuid5

from podgpu.clock import Clock
from podgpu.labs.simulate.gpu import SimulatedGpu, SimulatedLoad
from podgpu.labs.simulate.models import MIB
from podgpu.labs.simulate.simulated_driver import SimulatedNvml
from podgpu.labs.simulate.simulated_kubelet import SimulatedKubelet, SimulatedPod
from podgpu.model import PodName

_GIB = 1024**3
_FIRST_PID = 4000
_NAMES = UUID("6f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a10")
_HOST_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container on one device: its allocation in the kubelet, and its load on the GPU."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str
    gpu: int
    gi_id: int | None = None
    duty: float = 0.0
    memory: int = 0
    user: str = ""  # set for a process outside Kubernetes: the Linux user that runs it
    job: str = ""  # Slurm job of the process

    @property
    def pod_name(self) -> PodName:
        return self.namespace, self.pod


def _list_processes() -> list[Tenant]:
    """Returns the processes on the first two GPUs of a node without Kubernetes."""
    make_process = partial(Tenant, namespace="", pod="", container="", resource="", device_id="")
    return [
        make_process(gpu=0, duty=0.85, memory=17 * _GIB, user="ada"),
        make_process(gpu=1, duty=0.6, memory=9 * _GIB, user="ben", job="4711"),
        make_process(gpu=1, duty=0.2, memory=4 * _GIB, user="cleo"),
    ]


def tenants(driver: SimulatedNvml, first: int = 0) -> list[Tenant]:
    """Returns the tenants of a node.

    `first`: position of the first GPU in `_PATTERN`. A different multiple of 8 for each node makes
    pod names unique.
    """
    result: list[Tenant] = []
    whole = [gpu for gpu in driver.gpus if not gpu.instances]
    for position, gpu in enumerate(whole, first):
        result += _on_gpu(position, gpu)

    for gpu in driver.gpus:
        # The sixth and later instances have no pod.
        for slot, instance in enumerate(gpu.instances[:5]):
            tenant = Tenant(
                namespace="notebooks",
                pod=f"jupyter-{first + gpu.number}-{slot}",
                container="notebook",
                resource=instance.resource,
                device_id=instance.uuid,
                gpu=gpu.number,
                gi_id=instance.gi_id,
                duty=0.15 * (slot + 1),
                memory=(slot + 1) * _GIB,
            )
            result.append(tenant)
    return result


class _Container(NamedTuple):
    namespace: str
    pod: str  # without the number at the end
    name: str
    duty: float
    memory_gib: int


_PATTERN: tuple[list[_Container], ...] = (
    [_Container("research", "llm-train", "trainer", 0.93, 61)],
    [_Container("research", "llm-train", "trainer", 0.93, 61)],
    [_Container("serving", "chat", "engine", 0.55, 40)],
    [_Container("serving", "chat", "reranker", 0.2, 12)],
    [
        _Container("batch", "embed", "worker", 0.35, 9),
        _Container("batch", "ocr", "worker", 0.15, 5),
    ],
    [_Container("notebooks", "jupyter-ada", "notebook", 0.0, 0)],
    [_Container("research", "diffusion", "trainer", 0.78, 33)],
    [],
)
"""The containers of each of eight GPUs."""
_QUIET = {
    (1, 2): [_Container("serving", "rank", "engine", 0.08, 12)],
    (1, 3): [_Container("serving", "chat", "reranker", 0.12, 12)],
    (2, 2): [_Container("serving", "chat", "engine", 0.3, 40)],
}
"""Instead: two services that could share a GPU, and one that needs less. By node and place."""


def _on_gpu(position: int, gpu: SimulatedGpu) -> Iterator[Tenant]:
    number, place = divmod(position, len(_PATTERN))
    containers = _QUIET.get((number, place), _PATTERN[place])
    for part, container in enumerate(containers):
        resource = "nvidia.com/gpu"
        device_id = gpu.uuid
        if len(containers) > 1:
            resource = "nvidia.com/gpu.shared"
            device_id = f"{gpu.uuid}::{part}"
        yield Tenant(
            container.namespace,
            f"{container.pod}-{number}",
            container.name,
            resource=resource,
            device_id=device_id,
            gpu=gpu.number,
            duty=container.duty,
            memory=container.memory_gib * _GIB,
        )


def place_loads(driver: SimulatedNvml, on: list[Tenant]) -> None:
    for pid, tenant in enumerate(on, _FIRST_PID):
        if tenant.duty:
            driver.place(_make_load(driver, tenant, pid))


def _make_load(driver: SimulatedNvml, tenant: Tenant, pid: int, sway: float = 0.0) -> SimulatedLoad:
    gpu = driver.gpus[tenant.gpu]
    room = gpu.model.memory // 2
    for instance in gpu.instances:
        if instance.gi_id == tenant.gi_id:
            room = instance.profile.memory_mib * MIB * 4 // 5

    return SimulatedLoad(
        gpu=tenant.gpu,
        pid=pid,
        duty=tenant.duty,
        gi_id=tenant.gi_id,
        memory=min(tenant.memory, room),
        phase=pid * 1.7,
        sway=sway,
        sway_period=300 + 30 * (pid % 37),
    )


def create_host_files(root: Path, of: list[Tenant]) -> SimulatedProc:
    """Creates /proc/<pid> of each process, and the kubelet's log directories, below `root`."""
    proc = SimulatedProc(root / "proc")
    for pid, tenant in enumerate(of, _FIRST_PID):
        create_files(root, proc, tenant, pid)
    return proc


def create_files(root: Path, proc: SimulatedProc, tenant: Tenant, pid: int) -> None:
    if tenant.user:
        job = f"SLURM_JOB_ID={tenant.job}\0" if tenant.job else ""
        proc.add(pid, "0::/user.slice\n", environment=f"SLURM_JOB_USER={tenant.user}\0{job}")
        return

    if tenant.duty:
        pod_slice = f"kubepods-burstable-pod{_uid(tenant).replace('-', '_')}.slice"
        scope = f"cri-containerd-{_container_id(tenant)}.scope"
        proc.add(pid, f"0::/kubepods.slice/kubepods-burstable.slice/{pod_slice}/{scope}\n")

    pod, container = _log_paths(root, tenant)
    pod.mkdir(parents=True, exist_ok=True)
    container.parent.mkdir(exist_ok=True)
    container.touch()


def _log_paths(root: Path, tenant: Tenant) -> tuple[Path, Path]:
    """Returns the pod's directory and the container's file."""
    folder = f"{tenant.namespace}_{tenant.pod}_{_uid(tenant)}"
    pod = root / "pods" / folder

    name = f"{tenant.pod}_{tenant.namespace}_{tenant.container}"
    log = f"{name}-{_container_id(tenant)}.log"
    return pod, root / "containers" / log


def _uid(tenant: Tenant) -> str:
    return str(uuid5(_NAMES, f"{tenant.namespace}/{tenant.pod}"))


def _container_id(tenant: Tenant) -> str:
    name = f"{tenant.namespace}/{tenant.pod}/{tenant.container}"
    return sha256(name.encode()).hexdigest()


def pods(of: Iterable[Tenant]) -> list[SimulatedPod]:
    """Returns each pod once, with its containers and device ids, as the kubelet lists them."""
    held: defaultdict[PodName, dict[str, dict[str, list[str]]]] = defaultdict(dict)
    for tenant in of:
        if tenant.pod:
            containers = held[tenant.pod_name]
            resources = containers.setdefault(tenant.container, {})
            ids = resources.setdefault(tenant.resource, [])
            ids.append(tenant.device_id)

    return [SimulatedPod(*name, containers) for name, containers in held.items()]


class SimulatedProc:
    """A directory with the content of /proc in the host's PID namespace."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._starts = itertools.count(5_000, 7)
        namespaces = root / "self" / "ns"
        namespaces.mkdir(parents=True)
        os.symlink(_HOST_PID_NAMESPACE, namespaces / "pid")

    def add(self, pid: int, cgroup: str, name: str = "python3", environment: str = "") -> None:
        """Adds a process. `cgroup` is the text of its cgroup file.

        With `environment`, adds a user without a name.
        """
        folder = self.root / str(pid)
        folder.mkdir()
        before_start = "1 " * 18
        after_start = " 0" * 30

        # The kernel cuts the name to 15 characters.
        stat = f"{pid} ({name[:15]}) S {before_start}{next(self._starts)}{after_start}\n"
        (folder / "stat").write_text(stat)
        (folder / "cgroup").write_text(cgroup)
        if environment:
            (folder / "status").write_text("Uid:\t4000000000\t4000000000\n")
            (folder / "environ").write_text(environment)

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


_SWAY = {"research": 0.08, "serving": 0.7, "batch": 0.9, "notebooks": 0.8}
"""Namespace -> `SimulatedLoad.sway` of its pods.

The load of training is steady, the load of services varies.
"""


@dataclass(eq=False)
class DemoNode:
    """A node of the demo: simulated driver, simulated kubelet and files of the host.

    Pods can be added and removed.
    """

    name: str
    gpus: str
    clock: Clock
    first: int = 0  # see `tenants`
    is_plain: bool = False  # without Kubernetes
    answers: bool = True  # False while the node's exporter does not answer

    def __post_init__(self) -> None:
        self.driver = SimulatedNvml(
            self.gpus, node=self.name, clock=self.clock.monotonic, wall=self.clock.wall
        )

        self._folder = TemporaryDirectory(prefix="podgpu-demo-")
        self.root = Path(self._folder.name)  # for the files of the host
        self._proc = SimulatedProc(self.root / "proc")
        self._next_pid = itertools.count(_FIRST_PID + self.first)
        self._pids: dict[Tenant, int] = {}

        self.kubelet = SimulatedKubelet(str(self.root / "kubelet.sock"))
        present = _list_processes() if self.is_plain else tenants(self.driver, self.first)
        self.add_tenants(*present)

    def __enter__(self) -> Self:
        self.kubelet.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kubelet.stop()
        self._folder.cleanup()

    @property
    def tenants(self) -> list[Tenant]:
        return list(self._pids)

    def load_of(self, tenant: Tenant) -> SimulatedLoad:
        """Returns the load of a tenant. The tenant need not be present."""
        pid = self._pids.get(tenant, _FIRST_PID)
        load = _make_load(self.driver, tenant, pid, _SWAY.get(tenant.namespace, 0.0))
        # One job hardly uses the tensor cores.
        if tenant.pod.startswith("diffusion-"):
            return replace(load, tensor=0.05)
        return load

    def add_tenants(self, *new: Tenant) -> None:
        for tenant in new:
            pid = next(self._next_pid)
            self._pids[tenant] = pid
            create_files(self.root, self._proc, tenant, pid)
            if tenant.duty:
                self.driver.place(self.load_of(tenant))

        self.kubelet.pods = tuple(pods(self._pids))

    def remove_pod(self, namespace: str, pod: str) -> None:
        for tenant in self.tenants:
            if tenant.pod_name != (namespace, pod):
                continue
            pid = self._pids.pop(tenant)
            if tenant.duty:
                self.driver.remove(pid)
                self._proc.remove(pid)
            folder, log = _log_paths(self.root, tenant)
            log.unlink(missing_ok=True)
            # The folder may be removed already, with another container of this pod.
            with suppress(OSError):
                folder.rmdir()
        self.kubelet.pods = tuple(pods(self._pids))

    def reset(self, gpu: int) -> None:
        """Resets a GPU and restarts its processes."""
        self.driver.reset(gpu)
        for tenant in self._pids:
            if tenant.gpu == gpu and tenant.duty:
                self.driver.place(self.load_of(tenant))
