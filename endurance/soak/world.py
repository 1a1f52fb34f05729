"""The simulated node: pods, processes and MIG layouts change; kubelet, driver and GPUs fail and
recover.

Every change is made both in the simulation (driver, kubelet, /proc, log names) and in `Truth`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from uuid import NAMESPACE_DNS, uuid5

from endurance.soak.calls import Calls
from endurance.soak.truth import HeldDevice, SoakClock, Truth
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from tests.simulated import FaultyNvml, FaultyProc, Hang, cgroup_text, container_cgroup
from tests.simulated_kubelet import RATE_LIMITED, FaultyKubelet

GPUS = "2xT4,2xH100,1xA100"
SHARED, SLICES = 1, 4
"""The GPU that is time-sliced, and the number of slices."""
MIG_GPUS = (3, 4)
"""GPUs whose MIG layout changes."""
LAYOUTS: dict[int, tuple[tuple[str, ...] | None, ...]] = {
    3: (None, ("3g.40gb", "2g.20gb", "1g.10gb"), ("1g.10gb",) * 7, ("7g.80gb",)),
    4: (None, ("1g.5gb",) * 3, ("3g.20gb", "3g.20gb")),
}
NAMESPACES = ("research", "serving", "batch", "notebooks", "ci")
_HANGING = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetMemoryInfo")
_GIB = 1024**3


@dataclass(frozen=True)
class Place:
    """A device that a pod can hold."""

    gpu: int
    uuid: str
    gi_id: int | None = None
    mig_uuid: str = ""
    slice: int | None = None

    @property
    def device_id(self) -> str:
        return self.mig_uuid or (self.uuid if self.slice is None else f"{self.uuid}::{self.slice}")

    @property
    def resource(self) -> str:
        if self.mig_uuid:
            return "nvidia.com/mig-1g.10gb"
        return "nvidia.com/gpu" if self.slice is None else "nvidia.com/gpu.shared"


@dataclass
class Pod:
    number: int
    namespace: str
    place: Place
    pid: int = 0
    """0 if the pod has no process."""

    @property
    def name(self) -> str:
        return f"job-{self.number}"

    @property
    def uid(self) -> str:
        return str(uuid5(NAMESPACE_DNS, self.name))

    @property
    def container_id(self) -> str:
        return sha256(self.name.encode()).hexdigest()

    @property
    def holding(self) -> HeldDevice:
        gi_id = "" if self.place.gi_id is None else str(self.place.gi_id)
        return HeldDevice(self.place.uuid, gi_id, self.namespace, self.name)

    @property
    def logs(self) -> tuple[str, str]:
        names = f"{self.name}_{self.namespace}_main-{self.container_id}.log"
        return f"pods/{self.namespace}_{self.name}_{self.uid}", f"containers/{names}"


class World:
    def __init__(self, folder: Path, clock: SoakClock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.truth = Truth(clock)
        self.driver = FaultyNvml(GPUS, clock=clock.monotonic, wall=clock.wall)
        self.kubelet = FaultyKubelet(str(folder / "kubelet.sock"))
        self.proc = FaultyProc(folder / "proc")
        self.log = folder / "log"
        for name in ("pods", "containers"):
            (self.log / name).mkdir(parents=True)
        self.pods: dict[Place, Pod] = {}
        self.count = {"pods": 0, "processes": 0, "layouts": 0, "faults": 0}
        self._hangs: dict[int, Hang] = {}
        self.calls = Calls(
            lambda: {thread for hang in self._hangs.values() for thread in hang.threads.copy()}
        )
        self._foreign_pids: list[int] = []
        self._next_pid = 5000
        self._update_kubelet()

    @property
    def numbers(self) -> list[int]:
        return [gpu.number for gpu in self.driver.gpus]

    def uuid_of(self, number: int) -> str:
        return self.driver.gpu(number).uuid

    # Pods and processes

    def places(self) -> list[Place]:
        found = []
        for gpu in self.driver.gpus:
            if gpu.number == SHARED:
                found += [Place(gpu.number, gpu.uuid, slice=n) for n in range(SLICES)]
            elif gpu.mig_enabled:
                found += [
                    Place(gpu.number, gpu.uuid, instance.gi_id, instance.uuid)
                    for instance in gpu.instances
                ]
            else:
                found.append(Place(gpu.number, gpu.uuid))
        return found

    def start_pod(self) -> None:
        free = [place for place in self.places() if place not in self.pods]
        if not free:
            return
        self.count["pods"] += 1
        pod = Pod(self.count["pods"], self.random.choice(NAMESPACES), self.random.choice(free))
        self.pods[pod.place] = pod
        (self.log / pod.logs[0]).mkdir()
        (self.log / pod.logs[1]).touch()
        self.truth.hold(pod.holding, None if pod.place.slice is None else 1 / SLICES)
        self._update_kubelet()

    def end_pod(self, pod: Pod | None = None) -> None:
        if pod is None and self.pods:
            pod = self.random.choice(list(self.pods.values()))
        if pod is None:
            return
        self.end_process(pod)
        del self.pods[pod.place]
        (self.log / pod.logs[0]).rmdir()
        (self.log / pod.logs[1]).unlink()
        self.truth.release(pod.holding)
        self._update_kubelet()

    def start_process(self) -> None:
        """Starts a process of a pod that has none, or sometimes one outside of pods."""
        idle = [
            pod for pod in self.pods.values() if not pod.pid and not self._is_lost(pod.place.gpu)
        ]
        if self.random.random() < 0.1 and len(self._foreign_pids) < 3:
            pid = self._place(0, None)
            self.proc.add(pid, cgroup_text("/system.slice/gpu-burn.service"))
            self._foreign_pids.append(pid)
        elif idle:
            pod = self.random.choice(idle)
            pod.pid = self._place(pod.place.gpu, pod.place.gi_id)
            self.proc.add(pod.pid, container_cgroup(pod.uid, pod.container_id))

    def end_process(self, pod: Pod | None = None) -> None:
        working = [busy for busy in self.pods.values() if busy.pid]
        if pod is None and self._foreign_pids and self.random.random() < 0.3:
            pid = self._foreign_pids.pop()
            self._remove(pid)
            return
        pod = pod or (self.random.choice(working) if working else None)
        if pod is not None and pod.pid:
            self._remove(pod.pid)
            pod.pid = 0

    def _place(self, gpu: int, gi_id: int | None) -> int:
        self._next_pid += 1
        self.count["processes"] += 1
        duty = self.random.choice((0.1, 0.4, 0.8, 1.0))
        self.driver.place(SimulatedLoad(gpu, self._next_pid, duty, gi_id, memory=_GIB // 2))
        return self._next_pid

    def _remove(self, pid: int) -> None:
        self.proc.remove(pid)
        if any(load.pid == pid for gpu in self.driver.gpus for load in gpu.running()):
            self.driver.remove(pid)

    def _update_kubelet(self) -> None:
        self.kubelet.allocatable = {
            "nvidia.com/gpu.shared": [f"{self.uuid_of(SHARED)}::{n}" for n in range(SLICES)]
        }
        self.kubelet.pods = tuple(
            SimulatedPod(pod.namespace, pod.name, {"main": {place.resource: [place.device_id]}})
            for place, pod in self.pods.items()
        )

    # MIG layouts

    def relayout(self) -> None:
        number = self.random.choice(MIG_GPUS)
        if number in self._hangs or self._is_lost(number):
            return
        self._clear(number)
        self.count["layouts"] += 1
        self.driver.faults.relayout(number, self.random.choice(LAYOUTS[number]))
        self.truth.gpu_broken_until[number] = self.clock.monotonic()
        self.truth.resets.add(self.uuid_of(number))

    def _clear(self, number: int) -> None:
        """Ends everything on a GPU before its MIG layout changes or it is reset."""
        for pod in [pod for place, pod in self.pods.items() if place.gpu == number]:
            self.end_pod(pod)
        for pid in [load.pid for load in self.driver.gpu(number).running()]:
            self._foreign_pids.remove(pid)
            self._remove(pid)

    # Faults

    def break_kubelet(self) -> None:
        self.count["faults"] += 1
        self.truth.kubelet_broken_until = float("inf")
        match self.random.randrange(4):
            case 0:
                self.kubelet.refusal = RATE_LIMITED
            case 1:
                self.kubelet.refusal = ("UNAVAILABLE", "restarting")
            case 2:
                self.kubelet.raw_answer = b"\xff" * 20
            case 3:
                self.kubelet.restart()

    def repair_kubelet(self) -> None:
        self.kubelet.refusal = self.kubelet.raw_answer = None
        self.truth.kubelet_broken_until = self.clock.monotonic()

    @property
    def is_kubelet_broken(self) -> bool:
        return self.truth.kubelet_broken_until > self.clock.monotonic()

    def break_gpu(self) -> None:
        number = self.random.choice(self.numbers)
        if number in self._hangs or self._is_lost(number):
            return
        self.count["faults"] += 1
        self.truth.gpu_broken_until[number] = float("inf")
        if self.random.random() < 0.3:
            self._hangs[number] = self.driver.faults.hang(self.random.choice(_HANGING), number)
            self.truth.hung_until = float("inf")
        else:
            is_listed = self.random.random() < 0.5
            self.driver.faults.lose(number, enumerated=is_listed)
            if not is_listed:
                self.truth.unlisted.add(number)

    def repair_gpus(self) -> None:
        for number in self.numbers:
            if self._is_lost(number):
                self.driver.faults.recover(number)
            if self.truth.gpu_broken_until.get(number, 0.0) > self.clock.monotonic():
                self.truth.gpu_broken_until[number] = self.clock.monotonic()
        self.driver.faults.release_all()
        if self._hangs:
            self.truth.hung_until = self.clock.monotonic()
        self._hangs.clear()

    def reset_gpu(self) -> None:
        number = self.random.choice(self.numbers)
        if number in self._hangs or self._is_lost(number):
            return
        self._clear(number)
        self.count["faults"] += 1
        self.driver.faults.reset(number)
        self.truth.gpu_broken_until[number] = self.clock.monotonic()
        self.truth.resets.add(self.uuid_of(number))

    def reload_driver(self) -> None:
        """Does nothing while a call hangs, because the kernel does not unload a module in use."""
        if self._hangs:
            return
        self.count["faults"] += 1
        self.driver.faults.reload_driver()
        for number in self.numbers:
            if self.truth.gpu_broken_until.get(number, 0.0) <= self.clock.monotonic():
                self.truth.gpu_broken_until[number] = self.clock.monotonic()

    def xid_storm(self) -> None:
        self.count["faults"] += 1
        for _ in range(50):
            self.driver.faults.raise_xid(
                self.random.choice(self.numbers), self.random.choice((13, 31, 43, 79))
            )

    def _is_lost(self, number: int) -> bool:
        return self.driver.gpu(number).lost

    @property
    def is_calm(self) -> bool:
        """Returns True if no fault was active for a while."""
        wells = [self.truth.gpu_healthy_for(number) for number in self.numbers]
        return min(*wells, self.truth.kubelet_healthy_for()) > 90.0
