"""Real servers with stored samples: documents, rolling means, idle times and owners equal those computed by hand."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podgpu.cluster.collect import ClusterReading, NodeReading
from podgpu.cluster.prometheus import PrometheusCollector
from podgpu.cluster.promql import PrometheusServer
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import build_cluster_state
from podgpu.model import DeviceState, MigInstance
from tests.cluster import prom_history as history
from tests.cluster.real_servers import needs, prometheus, victoria_metrics

WINDOW = 20  # instants
IDLE_AFTER = 600.0
FIELD = "DCGM_FI_DEV_MEM_COPY_UTIL"


@dataclass(frozen=True)
class Server:
    url: str
    start: float

    def read(self, options: dict[str, object] | None = None, **settings: Any) -> tuple[ClusterReading, int]:
        """Reads one round. Returns also the number of the last sample."""
        defaults = {"interval": float(history.STEP), "window": float(WINDOW * history.STEP), "idle_after": IDLE_AFTER}
        collector = PrometheusCollector(
            PrometheusServer(self.url, **(options or {})),  # type: ignore[arg-type]
            ViewSettings(**{**defaults, **settings}),
            keep_fields=frozenset({FIELD, "DCGM_FI_PROF_GR_ENGINE_ACTIVE"}),
        )

        async def run() -> None:
            await collector.run_round()
            await collector.close()

        asyncio.run(run())
        reading = collector.reading()
        assert [outcome.error for outcome in reading.outcomes] == [""], reading.outcomes
        last = int((time.time() - self.start) // history.STEP)
        assert last < history.FUTURE - 1, "the test takes longer than its data lasts"
        return reading, last

    def read_used(self, gpus: Any, options: dict[str, object] | None = None, **settings: Any) -> tuple[Any, Any]:
        """The means, and the expected ones. Repeated if the round and the clock are in different instants."""
        for _ in range(3):
            reading, last = self.read(options, **settings)
            now = time.monotonic()
            state = build_cluster_state(reading, None, ViewSettings(**settings), now, time.time())
            full = state.settings.full
            used = {scope: mean.mean / full for scope, mean in state.used.items() if scope.scope != "owner"}
            expected = history.averages(gpus, last, 1)
            if used == pytest.approx(expected):
                break
        return used, expected


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(prometheus, marks=needs("prometheus", "promtool"), id="prometheus"),
        pytest.param(victoria_metrics, marks=needs("victoria-metrics"), id="victoria-metrics"),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    start = time.time() // history.STEP * history.STEP
    serve: Callable[..., Any] = request.param
    with tempfile.TemporaryDirectory(prefix="pg") as folder, serve(Path(folder), history.points(start)) as url:
        yield Server(url, start)


def slots_of(reading: ClusterReading) -> dict[tuple[str, str], DeviceState | MigInstance]:
    slots: dict[tuple[str, str], DeviceState | MigInstance] = {}
    for device in (device for node in reading.nodes for device in node.state.devices):
        for slot in (device, *device.instances):
            key = device.uuid, "" if isinstance(slot, DeviceState) else str(slot.id)
            assert key not in slots, "a device is listed twice"
            slots[key] = slot
    return slots


def nodes_of(reading: ClusterReading) -> dict[str, NodeReading]:
    nodes = {node.state.node: node for node in reading.nodes}
    assert len(nodes) == len(reading.nodes), "a node is listed twice"
    return nodes


def test_means_over_gpus_in_use(server: Server) -> None:
    used, expected = server.read_used(history.GPUS)
    assert used == pytest.approx(expected)


def test_means_over_mig_instances_in_use(server: Server) -> None:
    used, expected = server.read_used(history.INSTANCES, used_field="DCGM_FI_PROF_GR_ENGINE_ACTIVE")
    assert used == pytest.approx(expected)


def test_every_gpu_once_with_its_holders(server: Server) -> None:
    reading, _ = server.read()
    slots = slots_of(reading)
    for gpu in history.GPUS:
        slot = slots.pop((gpu.uuid, ""))
        assert isinstance(slot, DeviceState)
        assert (slot.index, slot.model) == (gpu.index, gpu.model)
        assert sorted((h.namespace, h.pod) for h in slot.holders) == sorted(gpu.holders)
        processes = [h.usage.processes for h in slot.holders if h.usage and h.usage.processes is not None]
        assert sorted(processes) == sorted(gpu.processes)
        if len(gpu.holders) > 1:
            assert [h.share_ratio for h in slot.holders] == [0.5, 0.5]
    for gpu in history.INSTANCES:
        slot = slots.pop((gpu.uuid, gpu.instance))
        assert isinstance(slot, MigInstance)
        assert (slot.profile, [(h.namespace, h.pod) for h in slot.holders]) == (gpu.profile, list(gpu.holders))
    assert slots.keys() == {("GPU-f0", "")}, "the GPU of the instances"
    assert {device.uuid[4] for device in nodes_of(reading)["node-a"].state.devices} == {"a"}


def test_nodes_times_counters_and_owners(server: Server) -> None:
    before = time.monotonic()
    reading, _ = server.read()
    assert {node.state.node: node.named for node in reading.nodes} == {
        **{"node-a": True, "node-b": True, "node-c": True, "node-d": True, "node-f": True},
        "10.0.0.5:9400": False,
    }
    node = nodes_of(reading)["node-a"]
    assert node.target == "10.0.0.1:9400"
    assert before - history.STEP - 2 < node.read_at <= time.monotonic()
    assert node.skew_seconds == pytest.approx(-4.5, abs=3.5)
    usages = [usage for node in reading.nodes for usage in node.state.namespaces]
    assert sorted((u.namespace, u.model, u.busy_ns, u.energy_mj) for u in usages) == [
        (team, history.H100, None, None) for team in ("team-a", "team-b")
    ]
    assert all(usage.allocated_ns for usage in usages)
    assert reading.owners == history.OWNERS


def test_idle_devices(server: Server) -> None:
    reading, _ = server.read()
    assert set(reading.idle_for) == {("GPU-b1", "")}
    assert IDLE_AFTER <= reading.idle_for["GPU-b1", ""] < IDLE_AFTER + IDLE_AFTER / 30 + 5
    reading, _ = server.read(idle_after=(history.PAST + history.FUTURE) * float(history.STEP) + 600)
    assert reading.idle_for == {}, "there are no samples for so long"
    assert server.read(idle_after=None)[0].idle_for == {}


def test_match_applies_to_everything(server: Server) -> None:
    reading, _ = server.read({"match": 'job="dcgm"'})
    assert set(nodes_of(reading)) == {"node-b"}
    reading, _ = server.read({"match": 'cluster="elsewhere"'})
    assert reading.nodes == ()
    assert any("--match is right" in note for note in reading.notes)


def test_a_match_that_up_does_not_have(server: Server) -> None:
    """`up` has no Hostname. The exporter's pod must still not become a holder."""
    reading, _ = server.read({"match": 'Hostname=~"node-(a|b)"'})
    assert set(nodes_of(reading)) == {"node-a", "node-b"}
    slots = slots_of(reading)
    assert not slots["GPU-a2", ""].holders
    assert not slots["GPU-b1", ""].holders


def test_other_node_labels(server: Server) -> None:
    reading, _ = server.read({"node_labels": ("instance",)})
    assert {node.state.node: node.named for node in reading.nodes} == {f"10.0.0.{n}:9400": False for n in range(1, 7)}
