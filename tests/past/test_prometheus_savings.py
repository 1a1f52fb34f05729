"""The same savings from a real Prometheus and VictoriaMetrics as from SQLite."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer
from podgpu.fleet.readings import Collector, FleetCounts, FleetShare
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.prometheus.prometheus_past import PrometheusPast
from podgpu.past.savings.savings import SavingsAnswer, SavingsQuery
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.fleet.real_servers import Point, needs, prometheus, victoria_metrics
from tests.fleet.states import prometheus_past
from tests.past.savings_world import MODEL, OWNERS, PRICES, SETTINGS, points, record

RULES = Path(__file__).parents[2] / "deploy/helm/podgpu/files/rules/podgpu-savings.yaml"
HOURS = 34.0  # the memory peak of the pod `wide` is before the range
LATER = 600  # seconds: the servers need a while to start
QUERY = SavingsQuery(seconds=24 * 3600)


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[Cluster, HistoryRecorder]]:
    cluster, recorder = record(HOURS)
    yield cluster, recorder
    recorder.stop()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(prometheus, marks=needs("prometheus", "promtool"), id="prometheus"),
        pytest.param(victoria_metrics, marks=needs("victoria-metrics"), id="victoria-metrics"),
    ],
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    end = time.time() // 300 * 300
    with (
        tempfile.TemporaryDirectory() as folder,
        request.param(Path(folder), list(points(end, HOURS))) as server,
    ):
        yield server


def test_the_engine_recommends_the_same(
    url: str, recorded: tuple[Cluster, HistoryRecorder]
) -> None:
    cluster, recorder = recorded
    state = cluster.published.state
    stored = asyncio.run(SqlitePast(recorder, lambda: state).savings(QUERY))
    past = prometheus_past(PrometheusServer(url), state, PRICES)
    found = asyncio.run(past.savings(QUERY))

    assert found.source == "counters"
    assert _figures(found) == _figures(stored)
    for line, other in zip(_sorted(found), _sorted(stored), strict=True):
        for pod, same in zip(line.pods, other.pods, strict=True):
            assert pod.busy == pytest.approx(same.busy, abs=0.01)
            assert pod.peak_busy == pytest.approx(same.peak_busy, abs=0.01)
            assert pod.wait == pytest.approx(same.wait, abs=0.002)
            assert pod.worst_slowdown == pytest.approx(same.worst_slowdown, abs=0.01)
            assert pod.slowdown == pytest.approx(same.slowdown, abs=0.01)
            assert pod.peak_memory_bytes == same.peak_memory_bytes
        if other.cost is None:
            assert line.cost is None
        else:
            assert line.cost == pytest.approx(other.cost, rel=0.03)
    for one, same_pod in zip(found.shared, stored.shared, strict=True):
        assert one.predicted_wait == pytest.approx(same_pod.predicted_wait, abs=0.002)
        assert one.measured_wait == pytest.approx(same_pod.measured_wait, abs=0.002)


def _sorted(answer: SavingsAnswer) -> list[Any]:
    for line in answer.advice:
        line.pods.sort(key=lambda pod: pod.pod)
    return sorted(answer.advice, key=lambda line: (line.kind, line.pods[0].pod))


def _figures(answer: SavingsAnswer) -> dict[str, Any]:
    lines = []
    for line in _sorted(answer):
        lines.append((line.kind, line.target, [pod.pod for pod in line.pods], line.saved))
    return {
        "lines": lines,
        "left_out": answer.left_out,
        "totals": answer.totals,
        "shared": [one.pod for one in answer.shared],
    }


# Too many GPUs to read each of them


def test_the_recording_rules_recommend_the_same(
    url: str, recorded: tuple[Cluster, HistoryRecorder], request: pytest.FixtureRequest
) -> None:
    """In a large cluster, podgpu reads what the rules stored, and only the quietest pods."""
    cluster, recorder = recorded
    state = cluster.published.state
    stored = asyncio.run(SqlitePast(recorder, lambda: state).savings(QUERY))
    end = time.time() // 300 * 300
    more = asyncio.run(_record_rules(url, end))
    later = end + LATER
    now = [point for at in range(round(end), round(later) + 1, 60) for point in _now(at)]
    start = request.node.callspec.params["url"]
    with (
        tempfile.TemporaryDirectory() as folder,
        start(Path(folder), [*points(later, HOURS + LATER / 3600), *now, *more]) as server,
    ):
        shares = [FleetShare("", "ml", MODEL, 14.0, 0.0)]
        counts = FleetCounts(16, 0, None, shares, {("", MODEL): 16.0})
        large = Cluster(_read_nothing, dataclasses.replace(SETTINGS, stale_after=1e6))
        large.published = PublishedState(dataclasses.replace(state, nodes=(), totals_only=counts))
        past = PrometheusPast(PrometheusServer(server), large, lambda: (PRICES, ()))
        found = asyncio.run(past.savings(QUERY))

    kinds = ("stop", "shrink", "share")
    expected = [line for line in _figures(stored)["lines"] if line[0] in kinds]
    assert _figures(found)["lines"] == expected
    assert found.left_out == stored.left_out
    assert found.totals.before == stored.totals.before
    assert found.totals.saved == stored.totals.saved


def _read_nothing() -> Collector:
    raise NotImplementedError


def _now(end: float) -> Iterator[Point]:
    """What only the state of now needs."""
    for node, names in (("node-a", "a"), ("node-b", "b")):
        for index in range(8):
            labels = {"job": "podgpu", "instance": node, "Hostname": node, "gpu": str(index)}
            gpu = labels | {"UUID": f"GPU-{names}{index}", "modelName": MODEL}
            yield Point("DCGM_FI_DEV_GPU_TEMP", gpu, 40, end)
            yield Point("DCGM_FI_DEV_FB_USED", gpu, 1024, end)
            yield Point("DCGM_FI_DEV_FB_FREE", gpu, 79 * 1024, end)
    kept = {"namespace": "ml", "pod": "kept", "annotation_podgpu_io_savings": "false"}
    yield Point("kube_pod_annotations", kept, 1, end)
    for (namespace, pod), owner in OWNERS.items():
        labels = {"namespace": namespace, "pod": pod, "owner_is_controller": "true"}
        owned = labels | {"owner_kind": owner.kind, "owner_name": owner.name}
        yield Point("kube_pod_owner", owned, 1, end)


async def _record_rules(url: str, end: float) -> list[Point]:
    """Evaluates the shipped rules over the past."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    steps, hours = (group["rules"] for group in groups)
    start = end - HOURS * 3600
    found: list[Point] = []
    most: dict[tuple[tuple[str, str], ...], dict[float, float]] = defaultdict(dict)
    async with aclosing(PrometheusClient(PrometheusServer(url))) as client:
        for labels, line in await client.query_range(steps[0]["expr"], start + 300, end, 300):
            for at, value in line:
                found.append(Point(steps[0]["record"], labels, value, at))
                hour = -(-at // 3600) * 3600
                peaks = most[tuple(labels.items())]
                peaks[hour] = max(value / 300, peaks.get(hour, -1.0))
        for rule in hours[1:]:
            # As at the end of each hour.
            for labels, line in await client.query_range(rule["expr"], start, end, 3600):
                of = labels | rule["labels"]
                found += [Point(rule["record"], of, value, at) for at, value in line]
    for key, peaks in most.items():
        for at, value in peaks.items():
            if at <= end:
                found.append(Point(hours[0]["record"], dict(key), 1 - value, at))
    return found
