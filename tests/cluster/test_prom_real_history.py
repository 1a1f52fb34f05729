"""Real servers with a history written beforehand: the map, the figures and the rolling averages equal those by hand."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import pytest

from podgpu.cluster.prom.backend import PrometheusBackend, PrometheusPlace
from podgpu.cluster.reading import ClusterReading, NodeReading
from podgpu.cluster.settings import UsedMeans, ViewSettings
from podgpu.cluster.view import Memory, assemble
from podgpu.figures.device import DeviceFigures
from tests.cluster import prom_history as history
from tests.cluster.instants import both_ways
from tests.cluster.real_servers import needs, prometheus, victoria_metrics

WINDOW = 20
"""Instants."""
IDLE_AFTER = 600.0
SERVERS = {
    "prometheus": pytest.param("prometheus", marks=needs("prometheus", "promtool")),
    "victoria-metrics": pytest.param("victoria-metrics", marks=needs("victoria-metrics")),
}


@dataclass(frozen=True)
class Server:
    url: str
    start: float

    def read(self, place: dict[str, object] | None = None, **settings: object) -> tuple[ClusterReading, float]:
        """One round, and the time of it by the server's clock."""
        backend = PrometheusBackend(
            PrometheusPlace(self.url, **(place or {})),  # type: ignore[arg-type]
            ViewSettings(
                **{"interval": history.STEP, "window": WINDOW * history.STEP, "idle_after": IDLE_AFTER} | settings  # type: ignore[arg-type]
            ),
        )

        async def turn() -> None:
            await backend.turn()
            await backend.close()

        asyncio.run(turn())
        reading = backend.reading()
        assert [outcome.error for outcome in reading.outcomes] == [""], reading.outcomes
        assert backend.asked_at is not None
        return reading, backend.asked_at

    def number(self, at: float) -> int:
        """Of the last sample."""
        n = int((at - self.start) // history.STEP)
        assert n < history.FUTURE - 1, "the test takes longer than its data lasts"
        return n


@pytest.fixture(scope="module", params=SERVERS.values())
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with _serving(request.param) as found:
        yield found


@dataclass(frozen=True)
class Round:
    reading: ClusterReading
    at: float
    """By the server's clock."""
    n: int
    """Number of the last sample."""
    asked_between: tuple[float, float]
    """By this machine's monotonic clock."""


@pytest.fixture(scope="module")
def usual(server: Server) -> Round:
    """A round with the usual settings."""
    before = time.monotonic()
    reading, at = server.read()
    return Round(reading, at, server.number(at), (before, time.monotonic()))


@contextmanager
def _serving(name: str) -> Iterator[Server]:
    start = time.time() // history.STEP * history.STEP
    serving = prometheus if name == "prometheus" else victoria_metrics
    with tempfile.TemporaryDirectory(prefix="pg") as folder, serving(Path(folder), history.points(start)) as url:
        yield Server(url, start)


def devices(reading: ClusterReading) -> dict[tuple[str, str], DeviceFigures]:
    found = {device.key: device for node in reading.nodes for device in node.devices}
    assert len(found) == sum(len(node.devices) for node in reading.nodes), "a device is here twice"
    return found


def nodes(reading: ClusterReading) -> dict[str, NodeReading]:
    found = {node.node: node for node in reading.nodes}
    assert len(found) == len(reading.nodes), "a node is here twice"
    return found


@pytest.mark.parametrize("used_means", ["busy", "allocated", "processes"])
def test_rolling_averages(server: Server, used_means: str) -> None:
    reading, at = server.read(used_means=used_means)
    expected = history.averages(history.GPUS, server.number(at), WINDOW, used_means)
    assert reading.rolling == pytest.approx(expected)


@pytest.mark.parametrize("used_means", ["busy", "allocated", "processes"])
def test_rolling_averages_of_mig_instances(server: Server, used_means: str) -> None:
    reading, at = server.read(used_means=used_means, used_field="DCGM_FI_PROF_GR_ENGINE_ACTIVE")
    expected = history.averages(history.INSTANCES, server.number(at), WINDOW, used_means)
    assert reading.rolling == pytest.approx(expected)


def test_a_window_of_one_instant_is_the_instant(server: Server) -> None:
    reading, at = server.read(window=float(history.STEP))
    expected = history.averages(history.GPUS, server.number(at), 1, "busy")
    assert reading.rolling == pytest.approx(expected)


@pytest.mark.parametrize("used_field", ["DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"])
def test_an_instant_worked_out_here_is_the_servers(server: Server, used_field: str) -> None:
    """At any time: while a node is missing, while copies differ, and where a sample is a few seconds old."""
    used = [ViewSettings(used_means=means, used_field=used_field) for means in get_args(UsedMeans)]
    for before in (0, 1, 7, 11, 15, 16, 150, 160, 600):
        found = both_ways(server.url, server.start - before, *used)
        for settings, (here, asked) in zip(used, found, strict=True):
            assert here == pytest.approx(asked), (settings.used_means, before)
            assert here, "there is something to compare"


def test_every_gpu_once_on_its_node_with_its_holders(usual: Round) -> None:
    n = usual.n
    found = devices(usual.reading)
    for gpu in history.GPUS:
        device = found.pop((gpu.uuid, ""))
        assert (device.node, device.index, device.model) == (gpu.node, gpu.index, gpu.model)
        value = gpu.value(n)
        assert device.measured == (value if value <= 100 else None), "the newest copy's, and no sentinel"
        assert sorted((h.holder.namespace, h.holder.pod) for h in device.holders) == sorted(gpu.holders)
        assert sorted(h.processes for h in device.holders if h.processes is not None) == sorted(gpu.processes)
        if len(gpu.holders) > 1:
            assert [h.share for h in device.holders] == [0.5, 0.5]
    for gpu in history.INSTANCES:
        device = found.pop((gpu.uuid, gpu.instance))
        assert (device.node, device.profile, device.utilization) == (gpu.node, gpu.profile, gpu.value(n) / 100)
        assert [(h.holder.namespace, h.holder.pod) for h in device.holders] == list(gpu.holders)
    assert found.keys() == {("GPU-f0", "")}, "the GPU of the instances"


@pytest.mark.parametrize("used_means", ["busy", "allocated", "processes"])
def test_the_view_of_it(server: Server, used_means: UsedMeans) -> None:
    """The map, and used-GPU utilisation of this moment, in every scope."""
    settings = ViewSettings(used_means=used_means)
    reading, at = server.read(used_means=used_means)
    view = assemble(reading, Memory(), settings, time.monotonic(), time.time())
    assert {(row.node, row.gpu_id, row.gpu_model, row.namespace, row.pod_name) for row in view.rows} == {
        (gpu.node, gpu.uuid, gpu.model, *holder)
        for gpu in (*history.GPUS, *history.INSTANCES)
        for holder in gpu.holders
    }
    assert len(set(view.rows)) == len(view.rows)
    newest = [replace(gpu, copies=({},)) for gpu in history.GPUS]
    expected = history.averages(newest, server.number(at), 1, used_means)
    found = {scope: used.mean / 100 for scope, used in view.used.items() if scope.scope != "owner"}
    assert found == pytest.approx(expected)
    assert view.rolling == reading.rolling


def test_nodes_by_name_or_else_by_address(usual: Round) -> None:
    assert {node.node: node.named for node in usual.reading.nodes} == {
        **{"node-a": True, "node-b": True, "node-c": True, "node-d": True, "node-f": True},
        "10.0.0.5:9400": False,
    }
    assert nodes(usual.reading)["node-a"].target == "10.0.0.1:9400"


def test_age_and_clock_of_a_node(server: Server, usual: Round) -> None:
    node = nodes(usual.reading)["node-a"]
    before, after = usual.asked_between
    newest = server.start + usual.n * history.STEP
    newest += 5 if usual.at >= newest + 5 else 0
    assert before - 2 < node.read_at + (usual.at - newest) < after + 2, "so long before it was asked"
    assert node.taken_at == server.start + usual.n * history.STEP - 2
    assert node.skew_seconds is None


def test_namespace_counters_once(usual: Round) -> None:
    counters = [counters for node in usual.reading.nodes for counters in node.namespaces]
    seconds = 1000.0 + usual.n * history.STEP
    assert sorted(c[:3] for c in counters) == [(team, history.H100, seconds) for team in ("team-a", "team-b")]
    assert all(c.busy_seconds is None and c.energy_joules is None for c in counters)


def test_owners(usual: Round) -> None:
    assert usual.reading.owners == history.OWNERS


def test_idle_for_as_long_as_is_known(usual: Round) -> None:
    assert set(usual.reading.idle_for) == {("GPU-b1", "")}
    assert IDLE_AFTER <= usual.reading.idle_for["GPU-b1", ""] < IDLE_AFTER + IDLE_AFTER / 30 + 1


def test_a_gpu_younger_than_the_window_is_not_called_idle(server: Server) -> None:
    reading, _ = server.read(idle_after=(history.PAST + history.FUTURE) * float(history.STEP) + 600)
    assert reading.idle_for == {}


def test_match_narrows_everything(server: Server) -> None:
    reading, at = server.read({"match": 'job="dcgm"'})
    assert set(nodes(reading)) == {"node-b"}
    gpus = [gpu for gpu in history.GPUS if gpu.node == "node-b"]
    assert reading.rolling == pytest.approx(history.averages(gpus, server.number(at), WINDOW, "busy"))


def test_a_match_that_only_the_exporters_series_have(server: Server) -> None:
    """`up` has no Hostname; the exporter's pod is still nobody's holder."""
    reading, _ = server.read({"match": 'Hostname=~"node-(a|b)"'}, used_means="allocated")
    assert set(nodes(reading)) == {"node-a", "node-b"}
    assert not devices(reading)["GPU-a2", ""].holders
    assert not devices(reading)["GPU-b1", ""].holders
    assert reading.rolling is not None
    namespaces = {scope.namespace for scope in reading.rolling if scope.scope == "namespace"}
    assert namespaces == {"team-a", "team-b"}


def test_other_node_labels(server: Server) -> None:
    reading, _ = server.read({"node_labels": ("instance",)})
    assert {node.node: node.named for node in reading.nodes} == {f"10.0.0.{n}:9400": False for n in range(1, 7)}
    assert reading.rolling is not None
    assert {scope.node for scope in reading.rolling if scope.node} == {f"10.0.0.{n}:9400" for n in range(1, 6)}


def test_nothing_is_said_where_nothing_matches(server: Server) -> None:
    reading, _ = server.read({"match": 'cluster="elsewhere"'})
    assert (reading.nodes, reading.rolling) == ((), {})
    assert any("--match is right" in note for note in reading.notes)
