"""What watching asks of the driver, and what that would cost on an H200: each call's CPU there, times how often it is
made here, by a simulated minute of one GPU that three pods share. And our own CPU for each second of that minute.

The costs are of one H200 with driver 580 (`tests/device/watching.py --profile`); the wait for XIDs runs in real time
and is reckoned. What is judged is therefore the number of calls, weighed; only a real GPU can tell what it takes there.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from bench.figures import Figure
from bench.node import TickClock
from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders.identity import IdentityReader
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.render import Policy
from podgpu.model import Allocation, Assignment, Device, Workload
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.proc import SimulatedProc, container_cgroup
from podgpu.simulate.workload import SimulatedLoad
from podgpu.usage.containers import ContainerFinder

H200_MS: Mapping[str, float] = {
    "nvmlDeviceGetTotalEnergyConsumption": 4.4,
    "nvmlDeviceGetProcessUtilization": 1.9,
    "nvmlDeviceGetSamples": 1.8,
    "nvmlGpmMetricsGet": 1.5,
    "nvmlGpmSampleGet": 0.35,
    "nvmlDeviceGetMigMode": 0.4,
    "nvmlDeviceGetComputeRunningProcesses_v3": 0.4,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": 0.2,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 0.2,
    "nvmlDeviceGetPcieReplayCounter": 0.2,
    "nvmlDeviceGetGridLicensableFeatures": 0.13,
    "nvmlDeviceGetMemoryInfo": 0.01,
}
"""CPU of one call; of all others `CHEAP_MS`."""
H200_FIELD_MS: Mapping[int, float] = {75: 0.65, 270: 0.75, 271: 0.5}
"""Of field values: of the sums of throttled time the first one asked for, and the two that are read one by one."""
CHEAP_MS = 0.004
XID_WAIT_MS, XID_WAITS_A_SECOND = 0.17, 2.5
MINUTE = 60
DEFAULT, QUICK, VIRTUAL = "default intervals", "one tick a second", "the same, virtual GPUs"
MOST_DRIVER_MS = {DEFAULT: 7.0, QUICK: 13.0, VIRTUAL: 13.0}
MOST_OWN_MS = {DEFAULT: 1.0, QUICK: 3.0, VIRTUAL: 3.5}
INTERVALS = {DEFAULT: 30.0, QUICK: 1.0, VIRTUAL: 1.0}
_GIB = 1024**3


class CostedNvml:
    """Another driver's functions, and what their calls would cost, by name; from any thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.milliseconds: Counter[str] = Counter()
        self.own_seconds = 0.0
        """What the simulated driver itself took, which is not podgpu's."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(found) or isinstance(found, type):
            return found
        counted = self._counted(name, found)
        self.__dict__[name] = counted
        return counted

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments)
            finally:
                took = time.thread_time() - began
                if "EventSetWait" not in name:
                    self._count(name, arguments, took)

        return call

    def _count(self, name: str, arguments: Sequence[Any], took: float) -> None:
        dear = 0.0
        if name == "nvmlDeviceGetFieldValues":
            dear = sum(H200_FIELD_MS.get(number, 0.0) for number, _ in arguments[1])
        with self._lock:
            self.calls[name] += 1
            self.milliseconds[name] += H200_MS.get(name, CHEAP_MS) + dear
            self.own_seconds += took


@dataclass
class Holders:
    """Three pods, each with a third of the GPU."""

    workloads: Sequence[Workload]
    name = "kubelet"

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        return Allocation(
            tuple(
                Assignment(device.key, workload, "kubelet", str(number), 1 / len(self.workloads))
                for device in devices
                for number, workload in enumerate(self.workloads)
            )
        )

    def close(self) -> None:
        pass


@contextmanager
def shared_gpu(interval: float, virtual: bool = False) -> Iterator[tuple[Agent, CostedNvml, TickClock]]:
    """One H200 that three pods hold; two of them work."""
    clock = TickClock()
    driver = SimulatedNvml("1xH200", clock=clock, wall=clock)
    costed = CostedNvml(driver)
    workloads = [_workload(f"pod-{number}") for number in range(3)]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        proc = SimulatedProc(root / "proc")
        for workload in workloads:  # as the kubelet names its directories and files of logs
            log = f"{workload.pod}_{workload.namespace}_{workload.container}-{workload.container_id}.log"
            for path in (f"pods/{workload.namespace}_{workload.pod}_{workload.uid}", f"containers/{log}"):
                (root / path).mkdir(parents=True)
        for number, duty in enumerate((0.5, 0.25)):
            cgroup = container_cgroup(workloads[number].uid, workloads[number].container_id)
            proc.add(4000 + number, cgroup)
            driver.place(SimulatedLoad(0, 4000 + number, duty=duty, memory=_GIB, phase=number * 0.013))
        names = IdentityReader(str(root / "pods"), str(root / "containers"))
        policy = Policy(counters=shipped_counters("dcp") or (), hostname="simulated-node", virtual_gpus=virtual)
        agent = Agent(
            NvmlTelemetry(costed, "simulated", lambda: 1, clock, clock),
            [Holders(workloads)],
            Settings(interval=interval, policy=policy),
            Clock(clock, clock),
            identities=names.read,
            containers=ContainerFinder(str(root / "proc"), clock),
        )
        try:
            yield agent, costed, clock
        finally:
            driver.faults.unload_driver()  # so that stopping does not wait for the XID watch
            agent.stop()


def _workload(pod: str) -> Workload:
    return Workload("team", pod, "main", str(uuid5(NAMESPACE_DNS, pod)), f"{pod:0<64}".encode().hex()[:64])


def seconds_of(agent: Agent, clock: TickClock, seconds: Iterable[int], scrape_every: int) -> float:
    """So many seconds of all cadences, scraped now and then; CPU seconds of this process."""
    began = time.process_time()
    usage_interval = round(agent.settings.usage_interval)
    for second in seconds:
        clock.advance()
        agent.read_telemetry(only_due=True)
        if second % round(agent.settings.allocation_interval) == 0:
            agent.read_allocation()
        if second % usage_interval == 0:
            agent.read_usage()
        if second % scrape_every == 0:
            _ = agent.published.fresh.zipped
    return time.process_time() - began


def measure(minutes: int = 10) -> list[Figure]:
    found: list[Figure] = []
    for name, interval in INTERVALS.items():
        with shared_gpu(interval, name == VIRTUAL) as (agent, costed, clock):
            scrape_every = 1 if interval == 1.0 else 15
            seconds_of(agent, clock, range(10), scrape_every)
            costed.calls.clear()
            costed.milliseconds.clear()
            costed.own_seconds = 0.0
            seconds = minutes * MINUTE
            spent = seconds_of(agent, clock, range(seconds), scrape_every)
            found += _figures(name, costed, seconds, spent)
    return found


def _figures(name: str, costed: CostedNvml, seconds: int, spent: float) -> Iterator[Figure]:
    waits = XID_WAIT_MS * XID_WAITS_A_SECOND
    in_driver = costed.milliseconds.total() / seconds + waits
    yield Figure(f"{name}: driver, as on an H200", in_driver, "ms/s", at_most=MOST_DRIVER_MS[name])
    for function, milliseconds in costed.milliseconds.most_common(8):
        yield Figure(f"  {name}: {function.removeprefix('nvmlDevice')}", milliseconds / seconds, "ms/s")
    yield Figure(f"  {name}: waiting for XIDs (reckoned)", waits, "ms/s")
    yield Figure(f"  {name}: calls", costed.calls.total() / seconds, "/s")
    own = 1e3 * (spent - costed.own_seconds) / seconds
    yield Figure(f"{name}: our own CPU", own, "ms/s", at_most=MOST_OWN_MS[name])
