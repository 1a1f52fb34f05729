"""Events from the stored samples of a real Prometheus and VictoriaMetrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.fleet.read.prometheus import PrometheusServer
from podgpu.past.events import Event, EventQuery
from tests.fleet.real_servers import Point, needs, prometheus, victoria_metrics
from tests.fleet.states import prometheus_past

HOUR = 3600
LOOK_BACK = 300  # Prometheus uses a sample for five minutes
SCRAPED = {"job": "podgpu", "instance": "10.0.0.1:9400"}
FIRST = {**SCRAPED, "Hostname": "node-a", "gpu": "0", "UUID": "GPU-first"}
SECOND = {**SCRAPED, "Hostname": "node-a", "gpu": "1", "UUID": "GPU-second"}
GONE = {"job": "podgpu", "instance": "10.0.0.2:9400", "Hostname": "node-b", "gpu": "0"}
AWAY = {"job": "podgpu", "instance": "10.0.0.3:9400", "Hostname": "node-c", "gpu": "0"}
GPUS_OF_GONE = [{**GONE, "UUID": "GPU-gone-0"}, {**GONE, "gpu": "1", "UUID": "GPU-gone-1"}]
BACK = {**AWAY, "UUID": "GPU-back"}
EXPORTER = {"namespace": "monitoring", "pod": "podgpu-x", "container": "exporter"}


def holder(pod: str) -> dict[str, str]:
    return {"namespace": "ml", "pod": pod, "container": "main", "source": "kubelet"}


def points(now: float) -> Iterator[Point]:
    """One sample a minute in the last two hours. `ago`: minutes."""
    for ago in range(120, -1, -1):
        at = now - 60 * ago
        yield Point("up", {**SCRAPED, **EXPORTER}, 1, at)
        # Prometheus adds the labels of the exporter's own pod.
        yield Point("DCGM_FI_DEV_GPU_UTIL", {**FIRST, **EXPORTER}, 5, at)
        yield Point("DCGM_FI_DEV_GPU_UTIL", SECOND, 5, at)
        yield Point("podgpu_allocation_info", {**SECOND, **holder("stays")}, 1, at)
        if 20 < ago <= 80:
            yield Point("podgpu_allocation_info", {**FIRST, **holder("train")}, 1, at)
        has_xid = 40 < ago <= 50
        yield Point("podgpu_device_health", {**FIRST, "condition": "xid"}, int(has_xid), at)
        if ago > 15:
            for gpu in GPUS_OF_GONE:
                yield Point("DCGM_FI_DEV_GPU_UTIL", gpu, 5, at)
                yield Point("podgpu_allocation_info", {**gpu, **holder("victim")}, 1, at)
                yield Point("podgpu_device_health", {**gpu, "condition": "thermal"}, 1, at)
        if not 30 < ago <= 50:
            yield Point("DCGM_FI_DEV_GPU_UTIL", BACK, 5, at)
            yield Point("podgpu_allocation_info", {**BACK, **holder("patient")}, 1, at)


class Reader:
    def __init__(self, url: str, now: float) -> None:
        self.now = now
        self._past = prometheus_past(PrometheusServer(url))

    def events(self, selector: str = "", value: str = "") -> list[Event]:
        query = EventQuery(90 * 60, selector, value, self.now)
        return asyncio.run(self._past.events(query)).events

    def texts(self, selector: str = "", value: str = "") -> set[str]:
        return {f"{event.kind}: {event.text}" for event in self.events(selector, value)}

    def marks(self, uuid: str) -> list[tuple[str, float, float | None]]:
        history = asyncio.run(self._past.gpu(uuid, "", HOUR))
        assert history is not None
        return [(mark.condition, mark.at, mark.until) for mark in history.marks]

    def marks_of_pod(self, pod: str) -> set[str]:
        history = asyncio.run(self._past.pod("ml", pod, HOUR))
        assert history is not None
        return {mark.condition for mark in history.marks}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(prometheus, marks=needs("prometheus", "promtool"), id="prometheus"),
        pytest.param(victoria_metrics, marks=needs("victoria-metrics"), id="victoria-metrics"),
    ],
)
def reader(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Reader]:
    serve: Callable[..., Any] = request.param
    now = time.time() // 15 * 15
    stored = sorted(
        points(now), key=lambda point: (point.name, sorted(point.labels.items()), point.at)
    )
    folder: Path = tmp_path_factory.mktemp("events")
    with serve(folder, stored) as url:
        yield Reader(url, now)


TRAIN = {
    "started: ml/train started on GPU 0 of node-a",
    "ended: ml/train ended on GPU 0 of node-a",
}
XID = {
    "xid: GPU 0 of node-a: it reported an XID",
    "recovered: GPU 0 of node-a: it had reported an XID error",
}
NODE_B = {"node_gone: node-b, 2 GPUs: its node does not answer"}
NODE_C = {
    "node_gone: GPU 0 of node-c: its node does not answer",
    "recovered: GPU 0 of node-c: its node did not answer",
}


def test_pods_conditions_and_nodes_that_came_and_went(reader: Reader) -> None:
    """Neither pods and conditions of a node that is gone have ended, nor those that came back."""
    assert reader.texts() == TRAIN | XID | NODE_B | NODE_C


def test_when_it_happened(reader: Reader) -> None:
    ago = {}
    seconds = {}
    for event in reader.events():
        ago[event.kind, event.node] = reader.now - event.at
        seconds[event.kind, event.node] = event.seconds
    assert ago["started", "node-a"] == pytest.approx(80 * 60, abs=30)
    assert ago["ended", "node-a"] == pytest.approx(20 * 60, abs=LOOK_BACK + 60)
    assert seconds["ended", "node-a"] == pytest.approx(HOUR, abs=LOOK_BACK + 60)
    assert ago["xid", "node-a"] == pytest.approx(50 * 60, abs=30)
    assert ago["node_gone", "node-b"] == pytest.approx(15 * 60, abs=LOOK_BACK + 60)
    assert seconds["recovered", "node-c"] == pytest.approx(20 * 60, abs=LOOK_BACK + 60)


def test_events_of_a_gpu_a_node_and_a_pod(reader: Reader) -> None:
    assert reader.texts("gpu", "GPU-first") == TRAIN | XID
    assert reader.texts("gpu", "GPU-second") == set()
    assert reader.texts("node", "node-b") == NODE_B
    assert reader.texts("pod", "ml/train") == TRAIN | XID
    assert reader.texts("pod", "ml/victim") == NODE_B
    assert reader.texts("pod", "ml/stays") == set()
    assert reader.texts("pod", "ml/nobody") == set()


def test_charts_mark_a_node_that_is_gone(reader: Reader) -> None:
    marks = reader.marks("GPU-gone-0")
    assert ("node_gone", None) in [(condition, until) for condition, _, until in marks]
    assert "node_gone" not in {condition for condition, _, _ in reader.marks("GPU-first")}
    assert "node_gone" in reader.marks_of_pod("victim")
    assert "node_gone" not in reader.marks_of_pod("train")
