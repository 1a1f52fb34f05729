"""Events in a simulated API server, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import pytest

from podgpu.clock import Clock
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import NodeState, Workload
from podgpu.writers.gpu_changes import ChangeReason, GpuChange
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.pod_events import EventWriter
from podgpu.writers.write_queue import WriteQueue
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock

RED = Workload("team", "red", "main", "uid-red")
GREEN = Workload("team", "green", "main", "uid-green")
STATE = NodeState(producer="podgpu", node="node-7")
RECORDS: dict[str, Any] = {}


def change(reason: ChangeReason = ChangeReason.XID, **members: Any) -> GpuChange:
    members = {"pods": (RED,), "message": "GPU 3: XID 48"} | members
    return GpuChange(reason, "GPU-1", **members)


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        yield running


class Exporter:
    """The Event writer of an exporter, with its own connection."""

    def __init__(self, server: SimulatedApiServer, clock: FakeClock) -> None:
        self.client = ApiClient(ApiConfig(server.url, "the test"), deadline=2.0)
        self.queue = WriteQueue(clock.monotonic, lambda limit: limit)
        times = Clock(clock.monotonic, clock.wall)
        self.writer = EventWriter(self.client, "node-7", times)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def tell(self, *changes: GpuChange) -> None:
        for write in self.writer.update(NodeUpdate(STATE, RECORDS, changes)):
            self.queue.put(write)
        await self.queue.flush()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def events(server: SimulatedApiServer) -> list[dict[str, Any]]:
    return sorted(server.objects("events"), key=lambda event: event["involvedObject"]["kind"])


async def test_events_of_the_node_and_the_pod(server: SimulatedApiServer, clock: FakeClock) -> None:
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(times=2))
    on_node, on_pod = events(server)
    assert on_node["metadata"]["namespace"] == "default"
    # `kubectl describe node` finds Events by this UID.
    node = {"apiVersion": "v1", "kind": "Node", "name": "node-7", "uid": "node-7"}
    assert on_node["involvedObject"] == node
    assert on_pod["metadata"]["namespace"] == "team"
    pod = {"apiVersion": "v1", "kind": "Pod", "name": "red", "namespace": "team", "uid": "uid-red"}
    assert on_pod["involvedObject"] == pod
    for event in (on_node, on_pod):
        assert event["reason"] == "GpuXid"
        assert event["message"] == "GPU 3: XID 48"
        assert event["type"] == "Warning"
        assert event["count"] == 2
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2023-11-14T22:30:00Z"
        assert event["source"] == {"component": "podgpu", "host": "node-7"}
        assert event["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "podgpu"}


async def test_at_most_one_write_per_ten_minutes(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    async with Exporter(server, clock) as exporter:
        for second in range(3601):
            found = [change(pods=(), message=f"at {second}")] if second < 1800 else []
            await exporter.tell(*found)
            clock.advance(1.0)
    assert [write.method for write in server.writes] == ["POST", "PATCH", "PATCH", "PATCH"]
    [event] = events(server)
    assert event["count"] == 1800
    assert event["message"] == "at 1799"
    assert event["firstTimestamp"] == "2023-11-14T22:30:00Z"
    assert event["lastTimestamp"] == "2023-11-14T22:59:59Z"


async def test_each_gpu_reason_and_object_has_its_event(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    async with Exporter(server, clock) as exporter:
        await exporter.tell(
            change(pods=(RED, GREEN)),
            change(ChangeReason.LOST, pods=()),
            change(pods=())._replace(gpu="GPU-2"),
        )
    names = [(each["involvedObject"]["name"], each["reason"]) for each in events(server)]
    assert sorted(names) == [
        ("green", "GpuXid"),
        ("node-7", "GpuLost"),
        ("node-7", "GpuXid"),
        ("node-7", "GpuXid"),
        ("red", "GpuXid"),
    ]


async def test_containers_of_a_pod_share_its_event(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    other = Workload("team", "red", "sidecar", "uid-red")
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(pods=(RED, other), concerns_node=False))
    [event] = events(server)
    assert event["count"] == 1


async def test_an_expired_event_is_created_again(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(pods=()))
        [event] = events(server)
        server.remove("events", event["metadata"]["name"], "default")
        clock.advance(700.0)
        await exporter.tell(change(pods=()))
        assert events(server)[0]["count"] == 2
        # After a quiet hour, the API server has deleted the Event, and a new series begins.
        server.remove("events", event["metadata"]["name"], "default")
        clock.advance(3700.0)
        await exporter.tell(change(pods=()))
    assert events(server)[0]["count"] == 1


async def test_a_restart_repeats_nothing(server: SimulatedApiServer, clock: FakeClock) -> None:
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(ChangeReason.LOST, pods=(), times=3))
    before = events(server)
    clock.advance(60.0)
    async with Exporter(server, clock) as restarted:
        await restarted.tell(change(ChangeReason.LOST, pods=(), is_new=False))
        assert events(server) == before
        # The next one is counted with those before the restart, at the earliest after 10 minutes.
        await restarted.tell(change(ChangeReason.LOST, pods=()))
        assert events(server) == before
        clock.advance(541.0)
        await restarted.tell()
    [event] = events(server)
    assert event["count"] == 4
    assert event["firstTimestamp"] == before[0]["firstTimestamp"]
    assert event["lastTimestamp"] == "2023-11-14T22:31:00Z"


async def test_a_change_after_a_restart_is_counted_at_once(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    """The last write is more than ten minutes old."""
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(pods=(), times=3))
    clock.advance(700.0)
    async with Exporter(server, clock) as restarted:
        await restarted.tell(change(pods=(), times=2))
        [event] = events(server)
        assert event["count"] == 5
        assert event["firstTimestamp"] == "2023-11-14T22:30:00Z"
        assert event["lastTimestamp"] == "2023-11-14T22:41:40Z"
        await restarted.tell(change(pods=()))
        assert events(server)[0]["count"] == 5


async def test_a_present_problem_without_an_event_is_written(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(ChangeReason.LOST, pods=(), is_new=False))
    [event] = events(server)
    assert event["count"] == 1


@pytest.mark.parametrize("status", [403, 409, 410, 429, 500])
async def test_a_refused_event_is_written_later(
    server: SimulatedApiServer, clock: FakeClock, status: int
) -> None:
    async with Exporter(server, clock) as exporter:
        server.write_failures = [status, status]
        await exporter.tell(change(pods=()))
        if status != 409:  # an Event with this name exists
            problem = exporter.queue.problems["events"]
            assert "the test lets this write fail" in problem
        for _ in range(10):
            clock.advance(1.0)
            await exporter.tell()
        assert exporter.queue.problems == {}
    [event] = events(server)
    assert event["count"] == 1
    assert event["firstTimestamp"] == "2023-11-14T22:30:00Z"


async def test_an_event_that_could_not_be_written_for_an_hour_is_dropped(
    server: SimulatedApiServer, clock: FakeClock
) -> None:
    async with Exporter(server, clock) as exporter:
        server.refusal = (403, "namespace team is being terminated")
        for _ in range(61):
            await exporter.tell(*([change()] if clock.monotonic() == 1000.0 else []))
            assert "namespace team is being terminated" in exporter.queue.problems["events"]
            clock.advance(60.0)
        server.refusal = None
        clock.advance(600.0)
        await exporter.tell()
        await exporter.tell()
        assert len(exporter.queue) == 0
    assert events(server) == []


async def test_long_messages_are_cut(server: SimulatedApiServer, clock: FakeClock) -> None:
    async with Exporter(server, clock) as exporter:
        await exporter.tell(change(pods=(), message="x" * 5000))
    [event] = events(server)
    assert len(event["message"]) == 1024
