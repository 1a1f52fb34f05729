"""Usage: CPU of one usage turn with 8 GPUs and 64 containers, and of its driver calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.figures import Figure, cpu_seconds
from bench.node import GPUS, simulated_node
from podgpu.labs.simulate.simulated_driver import SimulatedNvml
from podgpu.labs.simulate.simulated_node import Tenant

MAX_MS = 10
SLICES = 8
_GIB = 1024**3


class TimedNvml:
    """Forwards calls to a driver and sums their CPU time over all threads."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(function):
            return function
        self.__dict__[name] = timed = self._timed(function)
        return timed

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds.append(time.thread_time() - started)

        return call


def shared_gpus(driver: SimulatedNvml) -> list[Tenant]:
    """Places eight containers in time slices on every GPU."""
    uuids = [gpu.uuid for gpu in driver.gpus]
    return [
        Tenant(
            "batch",
            f"job-{gpu}-{n}",
            "main",
            "nvidia.com/gpu.shared",
            f"{uuid}::{n}",
            gpu,
            duty=0.1,
            memory=_GIB,
        )
        for gpu, uuid in enumerate(uuids)
        for n in range(SLICES)
    ]


def measure(turns: int = 200) -> list[Figure]:
    timed: list[TimedNvml] = []

    def wrap(driver: SimulatedNvml) -> TimedNvml:
        timed.append(TimedNvml(driver))
        return timed[0]

    with simulated_node(shared_gpus, wrap) as node:
        whole, calls = [], []
        for _ in range(turns):
            timed[0].seconds.clear()
            node.clock.advance()
            whole.append(cpu_seconds(node.agent.read_usage))
            calls.append(sum(timed[0].seconds))
        holders = [holder for gpu in node.agent.published.state.devices for holder in gpu.holders]
    active = sum(holder.usage is not None and bool(holder.usage.processes) for holder in holders)
    if active != GPUS * SLICES:
        raise RuntimeError(f"{active} of {GPUS * SLICES} containers have usage")
    own = min(turn - driver for turn, driver in zip(whole, calls, strict=True))
    return [
        Figure(
            f"usage turn, {active} containers, without the driver: CPU",
            own * 1e3,
            "ms",
            at_most=MAX_MS,
        ),
        Figure("  calls of the simulated driver", min(calls) * 1e3, "ms"),
    ]
