"""Texts are made when somebody asks for one, once for all who ask meanwhile; their cost grows with the series alone."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from podgpu.agent.publish import Published
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.render import Policy, join
from podgpu.metrics.text import encode
from podgpu.model import Assignment, ContainerUsage, Device, Reading, Snapshot, Usage, Value, Workload
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node
from tests.web.server import Client, running

COUNTERS = shipped_counters("default") or ()
GPU = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200")
POLICY = Policy(counters=COUNTERS)
VIRTUAL = replace(POLICY, virtual_gpus=True)


class Watched(dict[int, Value]):
    """A GPU's values that know how often they were looked at, and by which threads, and can hold up who looks."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((c.field.id for c in COUNTERS), 1))
        self.looks = 0
        self.threads: set[int] = set()
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()

    def get(self, key: int, default: Value | None = None) -> Value | None:  # type: ignore[override]
        self.looks += 1
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.go.wait(PATIENCE)
        return super().get(key, default)


def node_with(pods: int, values: dict[int, Value]) -> Snapshot:
    who = [Workload("ns", f"pod-{n}", "main", f"u-{n}") for n in range(pods)]
    return Snapshot(
        1.0,
        devices=(GPU,),
        readings=(Reading(GPU, values),),
        assignments=tuple(Assignment(GPU.key, w, "kubelet", str(n), 1 / pods) for n, w in enumerate(who)),
        usage=Usage(tuple(ContainerUsage(GPU.key, w, 0.5, n, 1, 1, 1, 1, n) for n, w in enumerate(who))),
    )


def looks_of_one_rendering(pods: int) -> int:
    values = Watched()
    assert Published(node_with(pods, values), POLICY, 0.0).fresh.plain
    return values.looks


def test_nothing_is_rendered_before_it_is_asked_for_and_nothing_twice() -> None:
    values = Watched()
    published = Published(node_with(3, values), POLICY, 0.0)
    assert values.looks == 0
    with ThreadPoolExecutor(8) as threads:
        expositions = {id(exposition) for exposition in threads.map(lambda _: published.fresh, range(50))}
    assert len(expositions) == 1
    assert values.looks == looks_of_one_rendering(3)
    assert len(values.threads) == 1


def test_families_stand_beside_the_exposition_for_whoever_writes_another_format() -> None:
    published = Published(node_with(3, Watched()), POLICY, 0.0)
    assert encode((*published.figures, *published.own)) == published.fresh.plain
    assert encode(published.own) == published.stale.plain
    assert published.figures is published.figures


@contextmanager
def large_exposition(node: Node) -> Iterator[tuple[Watched, Client]]:
    """One that takes long to render, and has just been begun."""
    values = Watched()
    values.go.clear()
    node.agent.published = Published(node_with(500, values), POLICY, node.clock.monotonic())
    with running(node.agent) as client:
        try:
            yield values, client
        finally:
            values.go.set()


@pytest.mark.fault(
    "The exposition is so long that it takes seconds to render",
    "it is rendered beside the event loop, once for everybody who asks; probes are answered meanwhile",
)
def test_a_long_exposition_is_rendered_once_and_keeps_nobody_else_waiting(node: Node) -> None:
    node.take_turns()
    with large_exposition(node) as (values, client), ThreadPoolExecutor(10) as scrapers:
        expositions = [scrapers.submit(lambda: client.ask("/metrics").text) for _ in range(10)]
        assert values.entered.wait(PATIENCE)
        assert client.ask("/health").status == 200
        values.go.set()
        assert len({exposition.result(PATIENCE) for exposition in expositions}) == 1
    assert values.looks == looks_of_one_rendering(500)


def test_an_exposition_that_is_too_old_when_it_is_done_is_not_served(node: Node) -> None:
    node.take_turns()
    with large_exposition(node) as (values, client), ThreadPoolExecutor(1) as scraper:
        exposition = scraper.submit(lambda: client.ask("/metrics").text)
        assert values.entered.wait(PATIENCE)
        node.clock.advance(node.agent.settings.stale_after + 1)
        values.go.set()
        text = exposition.result(PATIENCE)
    assert "DCGM_FI" not in text
    assert "podgpu_" in text


def test_an_old_body_is_never_served_as_a_new_one(node: Node) -> None:
    with running(node.agent) as client:
        for pods in (1, 2, 300, 3):
            node.agent.published = Published(node_with(pods, Watched()), POLICY, node.clock.monotonic())
            assert client.ask("/metrics").text.count("podgpu_container_gpu_processes{") == pods


def test_what_changed_is_logged_though_nobody_asks_for_the_exposition(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.driver.faults.unsupported("nvmlDeviceGetTemperature")
    node.take_turns()
    assert any("GPU_TEMP: GPU-" in line and "does not provide it" in line for line in caplog.messages)
    assert node.agent.published.exposition_if_made("fresh") is None


def work_of(policy: Policy, pods: int) -> int:
    """Function calls, Python's own and C's, that one exposition takes."""
    snapshot, calls = node_with(pods, dict.fromkeys((c.field.id for c in COUNTERS), 1)), 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        encode(join(snapshot, policy))
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("policy", [POLICY, VIRTUAL], ids=["plain", "virtual GPUs"])
def test_twice_the_pods_are_twice_the_work(policy: Policy) -> None:
    small, big = (work_of(replace(policy), pods) for pods in (250, 500))
    assert big < 2.1 * small
