"""What watching costs as the node grows: GPUs, MIG instances, pods, fields. CPU of a telemetry turn, and of the text.

The turn includes the simulated driver's own time. Texts are rendered anew from the last snapshot, with a series for
each holder (`--kubernetes-virtual-gpus`) and without; label text is remembered as in every tick but the first. What is
judged is that a series costs nowhere more than twice what one of the smallest node does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.figures import Figure
from bench.node import NodeShape, TickClock, simulated_driver
from podgpu.agent.loop import Agent, Settings
from podgpu.agent.publish import Published
from podgpu.agent.usage_turn import UsagePart
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.metrics.counters import Counter, parse_counters, shipped_counters
from podgpu.metrics.fields import fields
from podgpu.metrics.render import Policy
from podgpu.model import Allocation, Assignment, Device, HolderUsage, Workload
from podgpu.usage.ledger import UsageSnapshot

SHAPES = (
    NodeShape("1xH100", 1),
    NodeShape("1xH100", 3),
    NodeShape("8xH100", 8),
    NodeShape("16xH100", 250),
    NodeShape("8xH100/7x1g.10gb", 56),
)
MOST_TIMES_DEARER = 2.0
MANY_FIELDS = 300


@dataclass
class Pods:
    """So many, spread over the devices one after the other."""

    number: int
    name = "kubelet"

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        places = [d for d in devices if d.is_instance] or list(devices)
        share = min(1.0, len(places) / self.number)
        return Allocation(
            tuple(
                Assignment(places[n % len(places)].key, _workload(n), "kubelet", str(n // len(places)), share)
                for n in range(self.number if places else 0)
            )
        )

    def close(self) -> None:
        pass


def _workload(number: int) -> Workload:
    return Workload(f"team-{number % 7}", f"trainer-{number:03}-7d9c5b7f4-x2x9k", "main", f"uid-{number}")


def measure(ticks: int = 15) -> list[Figure]:
    found: list[Figure] = []
    for counters in (shipped_counters("dcp") or (), many_counters()):
        dear = [cost_of(shape, counters, ticks) for shape in SHAPES]
        found += [figure for figures, _ in dear for figure in figures]
        smallest, *others = (each for _, each in dear)
        name = f"{len(counters)} fields: the dearest series over one of the smallest node"
        found.append(Figure(name, max(others) / smallest, "x", at_most=MOST_TIMES_DEARER))
    return found


def many_counters() -> tuple[Counter, ...]:
    """Numbers, first those that NVML gives."""
    numbers = sorted(
        (field for field in fields().values() if field.type in ("int", "float")), key=lambda f: f.recipe is None
    )
    lines = (f"{field.name}, gauge, as the catalogue has it\n" for field in numbers[:MANY_FIELDS])
    return parse_counters("".join(lines), "bench")


def cost_of(shape: NodeShape, counters: tuple[Counter, ...], ticks: int) -> tuple[list[Figure], float]:
    """The figures, and CPU seconds of rendering for each series with virtual GPUs."""
    clock = TickClock()
    driver = simulated_driver(shape, clock)
    number = len(driver.gpus)
    telemetry = NvmlTelemetry(driver, "simulated", count_expected=lambda: number, clock=clock, wall=clock)
    policy = Policy(counters=counters, hostname="simulated-node")
    agent = Agent(telemetry, [Pods(shape.pods)], Settings(policy=policy), Clock(clock, clock))
    try:
        turns = []
        for _ in range(ticks):
            clock.advance()
            began = time.process_time()
            agent.read_telemetry()
            turns.append(time.process_time() - began)
        agent.read_allocation()
        parts, usage = agent.published.parts, HolderUsage(0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.1)
        holders: dict[str, list[tuple[Workload, HolderUsage]]] = {}
        for assignment in parts.allocation.assignments:
            holders.setdefault(assignment.device, []).append((assignment.holder, usage))
        parts = replace(parts, usage=UsagePart(UsageSnapshot(holders)))
    finally:
        driver.faults.unload_driver()  # so that stopping does not wait for the XID watch
        agent.stop()
    where = f"{shape.gpus}, {shape.pods} pods, {len(counters)} fields"
    plain, series = rendering(Published(parts, policy, 0.0), policy, ticks)
    virtual_policy = replace(policy, virtual_gpus=True)
    virtual, more = rendering(Published(parts, virtual_policy, 0.0), virtual_policy, ticks)
    return [
        Figure(f"{where}: turn", median(turns) * 1e3, "ms"),
        Figure(f"  the exposition, {series} series", plain * 1e3, "ms"),
        Figure(f"  the exposition with virtual GPUs, {more} series", virtual * 1e3, "ms"),
    ], virtual / more


def rendering(published: Published, policy: Policy, times: int) -> tuple[float, int]:
    """The least CPU seconds of one rendering, gzip and all, and how many series it has."""
    seconds = []
    for _ in range(times):
        began = time.thread_time()
        exposition = Published(published.parts, policy, 0.0).fresh.plain
        seconds.append(time.thread_time() - began)
    return min(seconds), sum(not line.startswith(b"#") for line in exposition.splitlines())
