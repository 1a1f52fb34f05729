"""Where the CPU time of one tick goes on 8 simulated GPUs. Informs only.

Every NVML call is timed in its own thread; render, encode and gzip are timed alone on the last tick's state. What a
whole tick takes beyond those is the rest: podgpu's reading (conversions, plans, snapshot), handing work to threads
and back, and the timers themselves, about 1 us for each of two in every call. Medians throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.figures import Figure
from bench.node import EIGHT_GPUS, TickClock, bench_agent, simulated_driver
from bench.rendering import turn_seconds
from bench.running import kubelet_of
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.encode import Body, encode
from podgpu.metrics.render import Policy, render_node, render_self
from podgpu.model import NodeState


class TimedNvml:
    """Another driver's functions, and the CPU seconds they took, in any thread."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._nvml, name)
        if not name.startswith("nvml") or not callable(found):
            return found
        timed = self._timed(found)
        self.__dict__[name] = timed
        return timed

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds.append(time.thread_time() - began)

        return call


@dataclass(frozen=True, slots=True)
class Ticks:
    """CPU seconds and NVML calls, medians of many ticks, and what the last one left."""

    whole: float
    driver: float
    calls: float
    state: NodeState
    policy: Policy


def measure(ticks: int = 300) -> list[Figure]:
    tick = run_ticks(ticks)
    state, policy = tick.state, tick.policy
    families = render_node(state, policy)
    exposition, stale_exposition = encode(families), encode(render_self(state))
    joining, encoding, zipping, stale = median_seconds(
        ticks,
        lambda: render_node(state, policy),
        lambda: encode(families),
        lambda: Body.of(exposition),
        lambda: Body.of(encode(render_self(state))),
    )
    rest = tick.whole - tick.driver - joining - encoding - zipping - stale
    return [
        Figure("one tick: CPU", tick.whole * 1e3, "ms"),
        Figure("  the simulated driver's own calls", tick.driver * 1e3, "ms"),
        Figure("  the rest: podgpu's reading, threads, timers", rest * 1e3, "ms"),
        Figure("  render", joining * 1e3, "ms"),
        Figure("  encode", encoding * 1e3, "ms"),
        Figure("  gzip", zipping * 1e3, "ms"),
        Figure("  the exposition of self-metrics", stale * 1e3, "ms"),
        Figure("NVML calls in a tick", tick.calls, ""),
        Figure("the exposition, plain", len(exposition) / 1024, "KiB"),
        Figure("the exposition of self-metrics, plain", len(stale_exposition) / 1024, "KiB"),
    ]


def run_ticks(count: int) -> Ticks:
    clock = TickClock()
    timed = TimedNvml(simulated_driver(EIGHT_GPUS, clock))
    whole, driver, calls = [], [], []
    with kubelet_of(EIGHT_GPUS) as socket:
        agent = bench_agent(timed, 8, [KubeletAllocation(socket)], clock)
        agent.read_telemetry()
        agent.read_allocation()
        for _ in range(count):
            clock.advance()
            timed.seconds.clear()
            began = time.process_time()
            agent.read_telemetry()
            whole.append(time.process_time() - began)
            driver.append(sum(timed.seconds))
            calls.append(len(timed.seconds))
        agent.stop()
    return Ticks(median(whole), median(driver), median(calls), agent.published.state, agent.settings.policy)


def median_seconds(turns: int, *calls: Callable[[], object]) -> list[float]:
    return [median(seconds) for seconds in turn_seconds(turns, *calls)]
