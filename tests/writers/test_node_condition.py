"""The Node condition in a simulated API server, and its removal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.clock import Clock
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import NodeState
from podgpu.writers.gpu_changes import GpuRecord
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.node_condition import NodeConditionWriter
from podgpu.writers.write_queue import WriteQueue
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock
from tests.nodes.node import kubeconfig

READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
LOST = GpuRecord("GPU 3", {"lost": "the driver no longer lists it: reset it"})
FAILED = GpuRecord("GPU 5", {"row_remap_failure": "remapping failed: replace it", "ecc": "errors"})
HEALTHY = GpuRecord("GPU 0")


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        running.put(
            "nodes", {"metadata": {"name": "node-7"}, "status": {"conditions": [dict(READY)]}}
        )
        yield running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Exporter:
    def __init__(self, server: SimulatedApiServer, clock: FakeClock) -> None:
        self._server = server
        self._clock = clock
        self.queue = WriteQueue(clock.monotonic, lambda limit: limit)
        self._loop = asyncio.new_event_loop()
        self._client = ApiClient(ApiConfig(server.url, "the test"))
        times = Clock(clock.monotonic, clock.wall)
        self._writer = NodeConditionWriter(self._client, "node-7", times)

    def see(self, stale: bool = False, after: float = 2.0, **records: GpuRecord) -> dict[str, Any]:
        """Writes, and returns the condition."""
        self._clock.advance(after)
        expected = 8 if "expected" in records else None
        lost = 1 if "unidentified" in records else None
        shown = {name: one for name, one in records.items() if name.startswith("GPU")}
        state = NodeState(producer="podgpu", gpus_expected=expected, gpus_lost=lost)
        for write in self._writer.update(NodeUpdate(state, shown, (), stale)):
            self.queue.put(write)
        self._loop.run_until_complete(self.queue.flush())
        return condition(self._server)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


def condition(server: SimulatedApiServer) -> dict[str, Any]:
    [node] = server.objects("nodes")
    conditions = {each["type"]: each for each in node["status"]["conditions"]}
    assert conditions["Ready"] == READY
    return conditions.get("GpuUnhealthy", {})


@pytest.fixture
def exporter(server: SimulatedApiServer, clock: FakeClock) -> Iterator[Exporter]:
    made = Exporter(server, clock)
    yield made
    made.close()


def test_healthy_broken_and_healthy_again(exporter: Exporter) -> None:
    assert exporter.see(GPU_a=HEALTHY) == {
        "type": "GpuUnhealthy",
        "status": "False",
        "reason": "NoGpuProblem",
        "message": "podgpu knows no problem of the node's GPU",
        "lastHeartbeatTime": "2023-11-14T22:30:02Z",
        "lastTransitionTime": "2023-11-14T22:30:02Z",
    }
    broken = exporter.see(GPU_a=HEALTHY, GPU_b=LOST)
    assert broken["status"] == "True"
    assert broken["reason"] == "GpuLost"
    assert broken["message"] == "GPU 3 (GPU_b): the driver no longer lists it: reset it"
    assert broken["lastTransitionTime"] == "2023-11-14T22:30:04Z"

    worse = exporter.see(GPU_a=HEALTHY, GPU_b=LOST, GPU_c=FAILED)
    assert worse["reason"] == "GpuLost"
    assert "GPU 5 (GPU_c): remapping failed: replace it" in worse["message"]
    assert worse["lastTransitionTime"] == "2023-11-14T22:30:04Z"
    assert worse["lastHeartbeatTime"] == "2023-11-14T22:30:06Z"
    assert exporter.see(GPU_c=FAILED)["reason"] == "GpuRowRemapFailure"
    assert exporter.see(GPU_a=HEALTHY, GPU_b=HEALTHY)["status"] == "False"


def test_the_message_names_few_problems(exporter: Exporter) -> None:
    found = exporter.see(GPU_a=LOST, GPU_b=LOST, GPU_c=FAILED)
    assert found["message"].count("; ") == 3
    assert found["message"].endswith("; and 1 more")
    assert "more" not in exporter.see(GPU_b=LOST, GPU_c=FAILED)["message"]
    healthy = exporter.see(GPU_a=HEALTHY, GPU_b=HEALTHY)
    assert healthy["message"] == "podgpu knows no problem of the node's 2 GPUs"


def test_the_message_begins_with_the_problem_of_the_reason(exporter: Exporter) -> None:
    found = exporter.see(GPU_a=FAILED, GPU_b=LOST)
    assert found["reason"] == "GpuLost"
    assert found["message"].startswith("GPU 3 (GPU_b): the driver no longer lists it")
    many = exporter.see(GPU_a=FAILED, GPU_b=FAILED, GPU_c=FAILED, GPU_d=LOST)
    assert many["message"].startswith("GPU 3 (GPU_d): the driver no longer lists it")


def test_is_written_on_changes_and_every_five_minutes(
    exporter: Exporter, server: SimulatedApiServer
) -> None:
    for _ in range(900):
        exporter.see(GPU_a=HEALTHY)
    assert len(server.writes) == 6
    assert all(write.path == "/api/v1/nodes/node-7/status" for write in server.writes)


def test_unknown(exporter: Exporter) -> None:
    stale = exporter.see(GPU_a=LOST, stale=True)
    assert (stale["status"], stale["reason"]) == ("Unknown", "GpuStateUnknown")
    unread = exporter.see(expected=HEALTHY)
    assert (unread["status"], unread["reason"]) == ("Unknown", "GpuStateUnknown")
    assert "the node has 8 GPUs, but podgpu cannot read any" in unread["message"]


def test_a_gpu_that_cannot_be_identified(exporter: Exporter) -> None:
    found = exporter.see(GPU_a=HEALTHY, unidentified=HEALTHY)
    assert (found["status"], found["reason"]) == ("True", "GpuLost")
    assert found["message"].startswith("1 GPU on the PCI bus cannot be identified")
    assert exporter.see(GPU_a=LOST, unidentified=HEALTHY)["message"].startswith("GPU 3")


def test_a_restart_keeps_the_time_of_the_transition(
    exporter: Exporter, server: SimulatedApiServer, clock: FakeClock
) -> None:
    before = exporter.see(GPU_b=LOST)
    restarted = Exporter(server, clock)
    after = restarted.see(GPU_b=LOST, after=500.0)
    assert after["lastTransitionTime"] == before["lastTransitionTime"]
    assert after["lastHeartbeatTime"] > before["lastHeartbeatTime"]
    third = Exporter(server, clock)
    assert (
        third.see(GPU_b=HEALTHY, after=500.0)["lastTransitionTime"] > before["lastTransitionTime"]
    )
    restarted.close()
    third.close()


@pytest.mark.parametrize("status", [403, 409, 429])
def test_a_refused_write_is_repeated(
    exporter: Exporter, server: SimulatedApiServer, status: int
) -> None:
    server.write_failures = [status]
    assert exporter.see(GPU_b=LOST) == {}
    assert list(exporter.queue.problems) == ["condition"]
    # The newest state is written, not the one that was refused.
    assert exporter.see(GPU_b=HEALTHY)["status"] == "False"
    assert exporter.queue.problems == {}


def test_a_node_that_is_created_again(exporter: Exporter, server: SimulatedApiServer) -> None:
    before = exporter.see(GPU_b=LOST)
    server.remove("nodes", "node-7")
    server.put("nodes", {"metadata": {"name": "node-8"}, "status": {"conditions": [dict(READY)]}})
    exporter.see(GPU_b=LOST, after=400.0)
    assert "not found" in exporter.queue.problems["condition"]
    server.remove("nodes", "node-8")
    server.put("nodes", {"metadata": {"name": "node-7"}, "status": {"conditions": [dict(READY)]}})
    after = exporter.see(GPU_b=LOST, after=400.0)
    assert after["status"] == "True"
    assert after["lastTransitionTime"] > before["lastTransitionTime"]


def withdraw(server: SimulatedApiServer, folder: Path) -> int:
    path = folder / "kubeconfig"
    path.write_text(kubeconfig(server.url), encoding="utf-8")
    return run(["withdraw", "--kubeconfig", str(path)])


def test_withdraw_leaves_nothing(
    exporter: Exporter,
    server: SimulatedApiServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exporter.see(GPU_b=LOST)
    ours = {"app.kubernetes.io/managed-by": "podgpu"}
    for namespace in ("default", "team"):
        server.put(
            "events",
            {"metadata": {"name": "ours", "namespace": namespace, "labels": ours}},
            {"metadata": {"name": "other", "namespace": namespace}},
        )
    assert withdraw(server, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "GpuUnhealthy of 1 Node, 0 DeviceTaintRules and 2 Events" in shown
    assert condition(server) == {}
    assert [one["metadata"]["name"] for one in server.objects("events")] == ["other", "other"]
    # Nothing is left to do.
    writes = len(server.writes)
    assert withdraw(server, tmp_path) == 0
    assert len(server.writes) == writes


def test_withdraw_says_what_is_not_allowed(
    server: SimulatedApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refusal = (403, "nodes is forbidden")
    assert withdraw(server, tmp_path) == 1
    assert "not everything could be removed" in capsys.readouterr().err
