"""The same savings from a real Prometheus and VictoriaMetrics as from SQLite."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.fleet.read.prometheus import PrometheusServer
from podgpu.fleet.round import Cluster
from podgpu.past.record import SqlitePast
from podgpu.past.recorder import HistoryRecorder
from podgpu.past.savings import SavingsAnswer, SavingsQuery
from tests.fleet.real_servers import needs, prometheus, victoria_metrics
from tests.fleet.states import prometheus_past
from tests.past.savings_world import PRICES, points, record

HOURS = 34.0  # the memory peak of the pod `wide` is before the range
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
