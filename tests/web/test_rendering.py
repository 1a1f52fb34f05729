"""Tests that the metrics text is rendered once, on the first request, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from podgpu.metrics.counters import CounterSpec, shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.model import Assignment, Device, HolderUsage, NodeState, Workload
from podgpu.node.agent.publish import Published
from tests.agent.documents import make_state
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node
from tests.web.server import Client, running

COUNTERS = shipped_counters("default") or ()
GPU = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200")


class WatchedCounters(tuple[CounterSpec, ...]):
    """Counters that record how often and in which threads they are rendered. They can block the
    rendering.
    """

    def __init__(self, _: Iterable[CounterSpec]) -> None:
        self.uses = 0
        self.threads: set[int] = set()
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __iter__(self) -> Iterator[CounterSpec]:
        self.uses += 1
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.go.wait(PATIENCE)
        return super().__iter__()


def node_with(pods: int) -> NodeState:
    workloads = [Workload("ns", f"pod-{n}", "main", f"u-{n}") for n in range(pods)]
    state = make_state(
        GPU,
        dict.fromkeys((c.field.id for c in COUNTERS), 1),
        [Assignment(GPU.key, w, "kubelet", str(n), 1 / pods) for n, w in enumerate(workloads)],
        {GPU.key: [(w, HolderUsage(0.5, n, 1, 1, 1, 1, 1, 1, n)) for n, w in enumerate(workloads)]},
    )
    return state


def uses_of_one_rendering() -> int:
    counters = WatchedCounters(COUNTERS)
    assert Published(lambda: node_with(3), Policy(counters), 0.0).fresh.plain
    return counters.uses


@contextmanager
def large_exposition(node: Node) -> Iterator[tuple[WatchedCounters, Client]]:
    """Serves the metrics of 500 GPUs. Rendering them blocks until the test sets `counters.go`."""
    counters = WatchedCounters(COUNTERS)
    counters.go.clear()
    node.agent.published = Published(
        lambda: node_with(500), Policy(counters), node.clock.monotonic()
    )
    with running(node.agent) as client:
        try:
            yield counters, client
        finally:
            counters.go.set()


class SlowDocument:
    """Builds a document, once `go` is set. Records the threads that build it."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self) -> NodeState:
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.go.wait(PATIENCE)
        return node_with(3)


@pytest.mark.parametrize("path", ["/livez", "/ready", "/metrics", "/api/v1/node", "/api/v1/view"])
def test_the_event_loop_does_not_wait_for_the_document(node: Node, path: str) -> None:
    node.take_turns()
    build = SlowDocument()
    with running(node.agent) as client, ThreadPoolExecutor(1) as threads:
        for known in ("/livez", "/ready", "/metrics", "/api/v1/node", "/api/v1/view"):
            assert client.ask(known).status == 200
        node.agent.published = Published(build, Policy(COUNTERS), node.clock.monotonic())
        slow = threads.submit(client.ask, path)
        try:
            assert build.entered.wait(PATIENCE)
            assert client.ask("/api/v1/nothing").status == 404
        finally:
            build.go.set()
        assert slow.result(PATIENCE).status == 200
    assert "server" not in build.threads


def test_many_clients_share_one_document(node: Node) -> None:
    node.take_turns()
    build = SlowDocument()
    paths = ["/livez", "/ready", "/metrics", "/api/v1/node", "/api/v1/view"]
    with running(node.agent) as client, ThreadPoolExecutor(25) as threads:
        node.agent.published = Published(build, Policy(COUNTERS), node.clock.monotonic())
        answers = [threads.submit(client.ask, path) for path in 5 * paths]
        assert build.entered.wait(PATIENCE)
        build.go.set()
        assert {answer.result(PATIENCE).status for answer in answers} == {200}
    assert len(build.threads) == 1


@pytest.mark.fault(
    "The metrics text is so long that it takes seconds to render",
    "It is rendered in a thread, once for all requests; probes are answered meanwhile",
)
def test_large_exposition_is_rendered_once_in_a_thread(node: Node) -> None:
    node.take_turns()
    with large_exposition(node) as (counters, client), ThreadPoolExecutor(10) as scrapers:
        expositions = [scrapers.submit(lambda: client.ask("/metrics").text) for _ in range(10)]
        assert counters.entered.wait(PATIENCE)
        assert client.ask("/health").status == 200
        counters.go.set()
        assert len({exposition.result(PATIENCE) for exposition in expositions}) == 1
    assert counters.uses == uses_of_one_rendering()
