"""The bill of short jobs on a simulated node, compared with the energy meters of the simulated
GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from uuid import NAMESPACE_DNS, uuid5

import pytest

from podgpu.labs.simulate.gpu import SimulatedLoad, split_busy
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Settings
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from tests.agent.simulated_node import SimulatedNode
from tests.simulated import FaultyNvml, FaultyProc, container_cgroup
from tests.simulated_kubelet import FaultyKubelet

JOBS = 200
SHORTEST, LONGEST = 5.0, 60.0
SLOTS_OF_GPU = (1, 1, 1, 1, 2, 2, 4, 4)
"""Time slices of each of the eight GPUs."""
NAMESPACES = ("research", "serving", "batch", "notebooks")
DUTIES = (0.0, 0.15, 0.4, 0.7, 1.0)
USAGE_EVERY, ALLOCATION_EVERY, TELEMETRY_EVERY = 1.0, 5.0, 30.0
USAGE_AT, ALLOCATION_AT = 0.13, 0.61
"""Times of the turns within a second, different from each other and from the driver's samples."""
TOLERANCE = 0.02
_GIB = 1024**3
_FIRST_PID = 10_000


@dataclass(frozen=True)
class Job:
    """A pod with one container on a GPU or a time slice. Its process starts after the pod and ends
    before it.
    """

    number: int
    namespace: str
    gpu: int
    slot: int
    slots: int
    begins: float
    ends: float
    process_begins: float
    process_ends: float
    duty: float

    @property
    def pod(self) -> str:
        return f"job-{self.number:03}"

    @property
    def pid(self) -> int:
        return _FIRST_PID + self.number

    @property
    def uid(self) -> str:
        return str(uuid5(NAMESPACE_DNS, self.pod))

    @property
    def container_id(self) -> str:
        return sha256(self.pod.encode()).hexdigest()


def schedule(random: Random) -> list[Job]:
    """Assigns each job to the slot that is free first, after a pause."""
    free = {
        (gpu, slot): random.uniform(0, 20)
        for gpu, slots in enumerate(SLOTS_OF_GPU)
        for slot in range(slots)
    }
    jobs = []
    for number in range(JOBS):
        gpu, slot = min(free, key=lambda place: free[place])
        begins = free[gpu, slot] + random.uniform(0, 10)
        ends = begins + random.uniform(SHORTEST, LONGEST)
        free[gpu, slot] = ends
        jobs.append(
            Job(
                number,
                random.choice(NAMESPACES),
                gpu,
                slot,
                SLOTS_OF_GPU[gpu],
                begins,
                ends,
                process_begins=begins + random.uniform(0.3, 2),
                process_ends=ends - random.uniform(0.1, 1),
                duty=random.choice(DUTIES),
            )
        )
    return jobs


class Truth:
    """The expected bill of each namespace, from the schedule and the meters of the simulated GPUs.

    Between two events, the energy of a GPU is divided by use, or by share if no process runs.
    """

    def __init__(self, driver: FaultyNvml, start: float) -> None:
        self._driver = driver
        self._at = start
        self.holders: dict[int, set[Job]] = {gpu.number: set() for gpu in driver.gpus}
        self._workers: dict[int, Job] = {}
        self.bill: defaultdict[tuple[str, str], float] = defaultdict(float)

    def work(self, job: Job) -> None:
        self._workers[job.pid] = job

    def advance(self, now: float) -> None:
        for gpu in self._driver.gpus:
            before = gpu.energy
            gpu.advance(now)
            self._charge(
                self.holders[gpu.number], gpu.running(), now - self._at, gpu.energy - before
            )
        self._at = now

    def _charge(
        self, holders: set[Job], loads: list[SimulatedLoad], seconds: float, joules: float
    ) -> None:
        busy = dict(
            zip((self._workers[load.pid] for load in loads), split_busy(loads, 0), strict=True)
        )
        whole = sum(busy.values())
        for job in holders:
            self.bill["allocated_seconds", job.namespace] += seconds / job.slots
            weight = busy.get(job, 0) / whole if whole else 1 / job.slots
            self.bill["energy_joules", job.namespace] += joules * weight
        for job, part in busy.items():
            self.bill["busy_seconds", job.namespace] += part * seconds


class Node(SimulatedNode):
    """Eight simulated GPUs, a gRPC kubelet, /proc and log directories; jobs start and end."""

    def __init__(self, root: Path) -> None:
        self.proc = FaultyProc(root / "proc")
        self.pods, self.containers = root / "pods", root / "containers"
        self.pods.mkdir()
        self.containers.mkdir()
        self.kubelet = FaultyKubelet(str(root / "kubelet.sock"))
        super().__init__(
            "8xH100",
            Settings(
                interval=TELEMETRY_EVERY,
                allocation_interval=ALLOCATION_EVERY,
                usage_interval=USAGE_EVERY,
                policy=Policy(hostname="node-1"),
            ),
            sources=[KubeletAllocation(self.kubelet.socket, clock=self.monotonic)],
            proc=self.proc,
            identities=IdentityReader(str(self.pods), str(self.containers)).read,
        )
        self.truth = Truth(self.driver, self.time)
        ids = [
            self._id(gpu, slot) for gpu, slots in enumerate(SLOTS_OF_GPU) for slot in range(slots)
        ]
        self.kubelet.allocatable = {"nvidia.com/gpu": ids}

    def _id(self, gpu: int, slot: int) -> str:
        uuid = self.driver.gpus[gpu].uuid
        return uuid if SLOTS_OF_GPU[gpu] == 1 else f"{uuid}::{slot}"

    def job_events(self, job: Job) -> Iterator[tuple[float, Callable[[], None]]]:
        yield job.begins, lambda: self._begin(job)
        if job.duty:
            yield job.process_begins, lambda: self._begin_process(job)
            yield job.process_ends, lambda: self._end_process(job)
        yield job.ends, lambda: self._end(job)

    def _begin(self, job: Job) -> None:
        self.truth.holders[job.gpu].add(job)
        (self.pods / f"{job.namespace}_{job.pod}_{job.uid}").mkdir()
        (self.containers / f"{job.pod}_{job.namespace}_main-{job.container_id}.log").touch()
        self._update_kubelet()

    def _end(self, job: Job) -> None:
        self.truth.holders[job.gpu].remove(job)
        (self.pods / f"{job.namespace}_{job.pod}_{job.uid}").rmdir()
        (self.containers / f"{job.pod}_{job.namespace}_main-{job.container_id}.log").unlink()
        self._update_kubelet()

    def _update_kubelet(self) -> None:
        held = [job for jobs in self.truth.holders.values() for job in jobs]
        self.kubelet.pods = tuple(
            SimulatedPod(
                job.namespace, job.pod, {"main": {"nvidia.com/gpu": [self._id(job.gpu, job.slot)]}}
            )
            for job in held
        )

    def _begin_process(self, job: Job) -> None:
        self.truth.work(job)
        self.proc.add(job.pid, container_cgroup(job.uid, job.container_id))
        self.driver.place(SimulatedLoad(job.gpu, job.pid, duty=job.duty, memory=_GIB))

    def _end_process(self, job: Job) -> None:
        self.driver.remove(job.pid)
        self.proc.remove(job.pid)

    def turn_events(self, until: float) -> Iterator[tuple[float, Callable[[], None]]]:
        for second in range(int(until)):
            if second % TELEMETRY_EVERY == 0:
                yield float(second), self.agent.read_telemetry
            if second % ALLOCATION_EVERY == 0:
                yield second + ALLOCATION_AT, self.agent.read_allocation
            yield second + USAGE_AT, self.agent.read_usage

    def run(self, jobs: list[Job], until: float) -> None:  # type: ignore[override]
        events = [event for job in jobs for event in self.job_events(job)] + list(
            self.turn_events(until)
        )
        start = self.time
        for at, run in sorted(events, key=lambda event: event[0]):
            self.truth.advance(start + at)
            self.time = start + at
            run()


def test_namespaces_are_billed_for_short_jobs(folder: Path) -> None:
    jobs = schedule(Random(4711))
    until = max(job.ends for job in jobs) + 2 * ALLOCATION_EVERY
    node = Node(folder)
    with node.kubelet:
        node.run(jobs, until)
        state = node.agent.published.state
    billed: defaultdict[tuple[str, str], float] = defaultdict(float)
    for usage in state.namespaces:
        billed["allocated_seconds", usage.namespace] += (usage.allocated_ns or 0) / 1e9
        billed["busy_seconds", usage.namespace] += (usage.busy_ns or 0) / 1e9
        billed["energy_joules", usage.namespace] += (usage.energy_mj or 0) / 1e3
    assert billed == {
        key: pytest.approx(amount, rel=TOLERANCE) for key, amount in node.truth.bill.items()
    }
    devices = [gpu.usage for gpu in state.devices if gpu.usage is not None]
    for figure in ("busy_ns", "energy_mj"):
        charged = sum(getattr(usage, figure) or 0 for usage in state.namespaces)
        rest = sum(getattr(usage, f"unattributed_{figure}") for usage in devices)
        assert charged + rest == sum(getattr(usage, figure) for usage in devices)
