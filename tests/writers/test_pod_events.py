"""Events in a simulated API server, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from podgpu.clock import Clock
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import NodeState, Workload
from podgpu.writers.gpu_changes import GpuChange, Reason
from podgpu.writers.health_writer import View
from podgpu.writers.pod_events import EventWriter
from podgpu.writers.write_queue import WriteQueue
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock

RED = Workload("team", "red", "main", "uid-red")
GREEN = Workload("team", "green", "main", "uid-green")
STATE = NodeState(producer="podgpu", node="node-7")
RECORDS: dict[str, Any] = {}


def change(reason: Reason = Reason.XID, **members: Any) -> GpuChange:
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

    async def tell(self, *changes: GpuChange) -> None:
        for write in self.writer.update(View(STATE, RECORDS, changes)):
            self.queue.put(write)
        await self.queue.flush()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def exporter(server: SimulatedApiServer, clock: FakeClock) -> AsyncIterator[Exporter]:
    made = Exporter(server, clock)
    yield made
    await made.client.close()


def events(server: SimulatedApiServer) -> list[dict[str, Any]]:
    return sorted(server.objects("events"), key=lambda event: event["involvedObject"]["kind"])


async def test_events_of_the_node_and_the_pod(server: SimulatedApiServer, clock: FakeClock) -> None:
    exporter = Exporter(server, clock)
    await exporter.tell(change(times=2))
    on_node, on_pod = events(server)
    assert on_node["metadata"]["namespace"] == "default"
    # `kubectl describe node` finds Events by this UID.
    assert on_node["involvedObject"] == {
        "apiVersion": "v1", "kind": "Node", "name": "node-7", "uid": "node-7"
    }  # fmt: skip
    assert on_pod["metadata"]["namespace"] == "team"
    assert on_pod["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "red", "namespace": "team", "uid": "uid-red"
    }  # fmt: skip
    for event in (on_node, on_pod):
        assert event["reason"] == "GpuXid"
        assert event["message"] == "GPU 3: XID 48"
        assert event["type"] == "Warning"
        assert event["count"] == 2
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2023-11-14T22:30:00Z"
        assert event["source"] == {"component": "podgpu", "host": "node-7"}
        assert event["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "podgpu"}
    await exporter.client.close()
