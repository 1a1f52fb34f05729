"""From a fault of a simulated GPU to objects in a simulated API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.clock import Clock
from podgpu.errors import texts_of
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import Assignment, Condition, DeviceState, NodeState, Workload
from podgpu.node.agent.agent import Settings
from podgpu.writers.health_writer import HealthWriter, NodeUpdate, WriterSession
from podgpu.writers.node_lock import NodeLock
from podgpu.writers.open_writers import make_session_opener
from podgpu.writers.write_option import parse_write
from tests.agent.simulated_node import SimulatedNode
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import wait_until
from tests.simulated import stop_after_test

POD = Workload("team", "train-0", "main", "uid-train-0")


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        yield running


@pytest.fixture
def node() -> SimulatedNode:
    node = SimulatedNode("2xH100", Settings(node_name="node-7", interval=1.0))
    node.holders.now = [Assignment(node.uuid(0), POD, "kubelet")]
    node.turn()
    node.turn()
    return node


@pytest.fixture
def start(
    server: SimulatedApiServer, node: SimulatedNode, tmp_path: Path
) -> Callable[..., HealthWriter]:
    """Starts a writer in its thread, as an exporter of the node does."""

    def start(
        write: str = "events", directory: Path = tmp_path, url: str = server.url
    ) -> HealthWriter:
        def read() -> tuple[Any, bool]:
            published = node.agent.published
            return published.state, node.agent.is_fresh(published)

        config = ApiConfig(url, "the test")
        opener = make_session_opener(parse_write(write), config, "node-7", node.agent.clock)
        lock = NodeLock(str(directory))
        writer = HealthWriter(read, opener, lock, 1800.0, node.agent.clock, interval=0.02)
        stop_after_test.append(writer.stop)
        writer.start(lambda: None)
        return writer

    return start


def reasons(server: SimulatedApiServer) -> list[tuple[str, str, int]]:
    """Returns object, reason and count of each Event."""
    return sorted(
        (each["involvedObject"]["name"], each["reason"], each["count"])
        for each in server.objects("events")
    )


def test_xid_and_lost_gpu(
    server: SimulatedApiServer, node: SimulatedNode, start: Callable[..., HealthWriter]
) -> None:
    start()
    node.driver.raise_xid(0, 48)
    expected = [("node-7", "GpuXid", 1), ("train-0", "GpuXid", 1)]
    wait_until(lambda: node.turn(0.1) and reasons(server) == expected, "Events of the XID")

    node.faults.lose(0)
    expected = [("node-7", "GpuLost", 1), *expected[:1], ("train-0", "GpuLost", 1), *expected[1:]]
    wait_until(lambda: node.turn(0.1) and reasons(server) == expected, "Events of the lost GPU")
    lost = [each for each in server.objects("events") if each["reason"] == "GpuLost"]
    assert all(node.uuid(0) in each["message"] for each in lost)


def test_a_second_exporter_writes_only_after_the_first_has_ended(
    server: SimulatedApiServer, node: SimulatedNode, start: Callable[..., HealthWriter]
) -> None:
    first = start()
    node.faults.lose(0)
    expected = [("node-7", "GpuLost", 1), ("train-0", "GpuLost", 1)]
    wait_until(lambda: node.turn(0.1) and reasons(server) == expected, "Events of the lost GPU")
    second = start()
    for _ in range(20):
        node.turn(0.1)
        asyncio.run(asyncio.sleep(0.01))
    assert reasons(server) == expected
    writes = len(server.writes)

    first.stop()
    node.driver.raise_xid(1, 48)
    expected = sorted([*expected, ("node-7", "GpuXid", 1)])
    wait_until(lambda: node.turn(0.1) and reasons(server) == expected, "Event of the second")
    # It has not repeated what the first one wrote.
    assert len(server.writes) == writes + 1
    second.stop()


def test_readings_do_not_wait_for_the_api_server(
    server: SimulatedApiServer, node: SimulatedNode, start: Callable[..., HealthWriter]
) -> None:
    writer = start()
    server.hang()
    node.faults.lose(0)
    wait_until(lambda: node.turn(0.1) and len(writer.queue) == 2, "two Events wait")
    for _ in range(20):
        assert "podgpu_device_health" in node.turn(0.1)
    server.resume()
    wait_until(lambda: len(reasons(server)) == 2, "the Events are written")


def test_without_an_api_server_the_page_says_so(
    node: SimulatedNode, start: Callable[..., HealthWriter]
) -> None:
    writer = start(url="http://127.0.0.1:1")
    node.faults.lose(0)
    wait_until(lambda: node.turn(0.1) and writer.warnings(), "a warning")
    [warning] = writer.warnings()
    assert warning.text.startswith("--write events: no answer from http://127.0.0.1:1")


def test_without_the_directory_of_the_lock_nothing_is_written(
    server: SimulatedApiServer,
    node: SimulatedNode,
    start: Callable[..., HealthWriter],
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = start(directory=Path("/nonexistent"))
    node.faults.lose(0)
    wait_until(lambda: node.turn(0.1) and writer.warnings(), "a warning")
    asyncio.run(writer.update([]))
    asyncio.run(writer.update([]))
    assert caplog.text.count("cannot open /nonexistent") == 1
    assert texts_of(writer.warnings()) == [
        "--write: nothing is written, because podgpu cannot open /nonexistent: "
        "No such file or directory",
    ]
    assert server.writes == []


def test_the_condition_is_unknown_while_the_driver_does_not_answer(
    server: SimulatedApiServer, tmp_path: Path
) -> None:
    server.put("nodes", {"metadata": {"name": "node-7"}, "status": {}})
    node = SimulatedNode("2xH100", Settings(node_name="node-7", interval=1.0))
    config = ApiConfig(server.url, "the test")
    opener = make_session_opener(parse_write("condition"), config, "node-7", node.agent.clock)

    def read() -> tuple[Any, bool]:
        published = node.agent.published
        return published.state, node.agent.is_fresh(published)

    lock = NodeLock(str(tmp_path))
    writer = HealthWriter(read, opener, lock, 1800.0, node.agent.clock, interval=0.02)
    stop_after_test.append(writer.stop)
    writer.start(lambda: None)

    def status() -> str:
        [item] = server.objects("nodes")
        conditions = item["status"].get("conditions") or [{"status": ""}]
        return str(conditions[0]["status"])

    time.sleep(0.3)
    # The first reading may still be under way.
    assert status() == ""
    node.time += 61.0
    wait_until(lambda: status() == "Unknown", "the state is unknown")
    wait_until(lambda: node.turn(1.0) and status() == "False", "the GPUs are healthy")
    node.time += 61.0
    wait_until(lambda: status() == "Unknown", "the readings are too old")


class Recorder:
    """A writer that writes nothing, and keeps what it was given."""

    def __init__(self, failures: int = 0) -> None:
        self.updates: list[NodeUpdate] = []
        self.failures = failures

    def update(self, update: NodeUpdate) -> list[Any]:
        self.updates.append(update)
        if len(self.updates) <= self.failures:
            raise ValueError("a bug")
        return []


def test_only_fresh_documents_with_pods_are_compared(tmp_path: Path) -> None:
    """Before that, nothing is known for a minute. Then the state is unknown."""
    healthy = DeviceState(uuid="GPU-1", index=0, healthy=("lost",))
    lost = DeviceState(uuid="GPU-1", index=0, conditions=(Condition("lost"),))
    with_pods = NodeState(producer="podgpu", node="n1", devices=(healthy,), holders_at=1.0)
    broken = replace(with_pods, devices=(lost,))
    without_pods = replace(broken, holders_at=None)

    now = 1000.0
    document: tuple[NodeState, bool] | None = None
    recorder = Recorder()
    clock = Clock(monotonic=lambda: now, wall=lambda: now)
    writer = HealthWriter(
        lambda: document,
        lambda: WriterSession([], ApiClient(ApiConfig("", ""))),
        NodeLock(str(tmp_path)),
        1800.0,
        clock,
    )

    def update(seconds: float) -> list[NodeUpdate]:
        nonlocal now
        now += seconds
        recorder.updates.clear()
        asyncio.run(writer.update([recorder]))
        return recorder.updates

    assert update(1.0) == [], "there is no document"
    document = without_pods, True
    assert update(58.9) == []
    [unknown] = update(0.1)
    assert unknown.is_stale
    assert (unknown.records, unknown.changes) == ({}, [])

    document = with_pods, True
    [known] = update(1.0)
    assert not known.is_stale
    assert known.records["GPU-1"].problems == {}

    document = broken, False
    [old] = update(1.0)
    assert old.is_stale
    assert (old.records, old.changes) == (known.records, [])

    document = broken, True
    [change] = update(1.0)[0].changes
    assert change.reason == "GpuLost"
    assert update(1.0)[0].changes == [], "the same document"
    writer.stop()


def test_a_bug_in_a_writer_does_not_end_the_thread(
    node: SimulatedNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(failures=2)
    config = ApiConfig("http://127.0.0.1:1", "the test")
    writer = HealthWriter(
        lambda: (node.agent.published.state, True),
        lambda: WriterSession([recorder], ApiClient(config)),
        NodeLock(str(tmp_path)),
        1800.0,
        interval=0.01,
    )
    writer.start(lambda: None)
    wait_until(lambda: len(recorder.updates) >= 4, "updates after the bug")
    writer.stop()
    assert caplog.text.count("unexpected error while writing health") == 2
    assert NodeLock(str(tmp_path)).acquire(), "the thread has ended and released the lock"
