"""The nodes everything is measured on: simulated GPUs under load, the pods that hold them, and the exporter's agent.

The simulated driver's UUIDs come from its seed, so the process that plays the kubelet and the one that plays the
exporter make the same node apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders import AllocationSource
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.render import Policy
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedPod
from podgpu.simulate.workload import SimulatedLoad


@dataclass(frozen=True, slots=True)
class NodeShape:
    gpus: str
    pods: int
    """Each of the first holds one GPU or MIG instance, as far as those go; the others hold none."""


EIGHT_GPUS = NodeShape("8xH100", 8)
LARGEST = NodeShape("16xH100/7x1g.10gb", 250)
"""What `design.md` promises for one node: 16 GPUs, 112 MIG slices, 250 pods."""


class TickClock:
    """Stands still but for `advance`: one second to the physics, the rates and the windows, at any speed.

    Durations within a tick read 0 in the metrics for that reason; that makes it some hundred bytes shorter.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self) -> None:
        self._now += 1.0


def simulated_driver(shape: NodeShape, clock: TickClock) -> SimulatedNvml:
    driver = SimulatedNvml(shape.gpus, clock=clock, wall=clock)
    for number, (gpu, gi_id, _) in enumerate(_places(driver)):
        duty = (number % 10) / 10
        driver.place(SimulatedLoad(gpu=gpu, gi_id=gi_id, pid=4000 + number, duty=duty, phase=number * 0.013))
    return driver


def pods(shape: NodeShape, node: str = "") -> list[SimulatedPod]:
    """What the kubelet of that node lists: every pod, those without a GPU too."""
    places = _places(SimulatedNvml(shape.gpus, node=node))
    return [_pod(number, places[number] if number < len(places) else None) for number in range(shape.pods)]


def _pod(number: int, place: tuple[int, int | None, str] | None) -> SimulatedPod:
    name = f"trainer-{number:03}-7d9c5b7f4-x2x9k"
    if place is None:
        return SimulatedPod("web", name, {"server": {}})
    resource = "nvidia.com/gpu" if place[1] is None else "nvidia.com/mig-1g.10gb"
    return SimulatedPod("research", name, {"trainer": {resource: [place[2]]}})


def _places(driver: SimulatedNvml) -> list[tuple[int, int | None, str]]:
    """(GPU number, GPU instance, id the kubelet knows it by) of everything a pod can be given."""
    found: list[tuple[int, int | None, str]] = []
    for gpu in driver.gpus:
        found += [(gpu.number, i.gi_id, i.uuid) for i in gpu.instances] or [(gpu.number, None, gpu.uuid)]
    return found


def bench_agent(nvml: Any, gpus: int, allocation: list[AllocationSource], clock: TickClock) -> Agent:
    """The exporter's own agent with the dcp counters, which are the default ones and the profiling fields."""
    telemetry = NvmlTelemetry(nvml, "simulated", count_expected=lambda: gpus, clock=clock, wall=clock)
    policy = Policy(counters=shipped_counters("dcp") or (), hostname="simulated-node")
    return Agent(telemetry, allocation, Settings(policy=policy), Clock(clock, clock))
