"""Rendering against prometheus_client: the same families and samples, made beforehand on both sides, to text.

What is judged is `encode`, which finds label text already escaped: the join does that, once per device and holder,
and remembers it. `join + encode` stands beside it, with that memory warm as it is in every tick but the first.
CPU time of this thread, the least of many turns; they take turns so that all meet the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bench.figures import Figure
from bench.node import EIGHT_GPUS, TickClock, bench_agent, simulated_driver
from bench.running import kubelet_of
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.encode import Family, encode
from podgpu.metrics.render import Policy, render_node
from podgpu.model import NodeState

LEAST_TIMES_FASTER = 15


class ReadyMade:
    """A collector whose metrics exist already. `Metric` with `add_sample` leaves counters' names as they are."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._metrics = [_metric(family) for family in families if family.samples]

    def collect(self) -> list[Metric]:
        return self._metrics


def _metric(family: Family) -> Metric:
    metric = Metric(family.name, family.help, family.type)
    for sample in family.samples:
        metric.add_sample(family.name, dict(sample.labels.pairs), sample.value)
    return metric


def measure(turns: int = 150) -> list[Figure]:
    state, policy = eight_gpu_state()
    families = render_node(state, policy)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadyMade(families))
    _see_that_both_print_the_same(encode(families), generate_latest(registry))
    oracle, ours, joined = map(
        min,
        turn_seconds(
            turns,
            lambda: generate_latest(registry),
            lambda: encode(families),
            lambda: encode(render_node(state, policy)),
        ),
    )
    return [
        Figure("generate_latest over encode", oracle / ours, "x", at_least=LEAST_TIMES_FASTER),
        Figure("generate_latest over join + encode", oracle / joined, "x"),
        Figure("encode", ours * 1e6, "us"),
        Figure("join + encode", joined * 1e6, "us"),
        Figure("prometheus_client.generate_latest", oracle * 1e6, "us"),
        Figure("samples in the metrics", sum(len(f.samples) for f in families), ""),
    ]


def eight_gpu_state() -> tuple[NodeState, Policy]:
    clock = TickClock()
    with kubelet_of(EIGHT_GPUS) as socket:
        agent = bench_agent(simulated_driver(EIGHT_GPUS, clock), 8, [KubeletAllocation(socket)], clock)
        for _ in range(3):
            clock.advance()
            agent.read_telemetry()
        agent.read_allocation()
        agent.stop()
    allocation = agent.published.parts.allocation
    if len(allocation.assignments) != EIGHT_GPUS.pods:
        raise RuntimeError(f"the kubelet did not answer, so the figures would mean nothing: {allocation.sources}")
    return agent.published.state, agent.settings.policy


def _see_that_both_print_the_same(ours: bytes, theirs: bytes) -> None:
    """The same series with the same values, that is; dcgm-exporter's floats end after six decimals."""
    if _samples(ours) != _samples(theirs):
        raise RuntimeError("prometheus_client printed other samples: there is nothing to compare")


def _samples(exposition: bytes) -> list[tuple[str, list[tuple[str, str]], float]]:
    # Without the TYPE lines: they make the parser rename our counters as it would have named its own.
    lines = "".join(line for line in exposition.decode().splitlines(keepends=True) if not line.startswith("#"))
    parsed = (sample for family in text_string_to_metric_families(lines) for sample in family.samples)
    return sorted((s.name, sorted(s.labels.items()), round(s.value, 6)) for s in parsed)


def turn_seconds(turns: int, *calls: Callable[[], object]) -> list[list[float]]:
    """CPU seconds of each call in each turn."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(turns):
        for call, taken in zip(calls, seconds, strict=True):
            began = time.thread_time()
            call()
            taken.append(time.thread_time() - began)
    return seconds
