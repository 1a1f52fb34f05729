"""Tests the paths of `podgpu cluster`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from podgpu.fleet.readings import ClusterReading, TargetOutcome
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.metrics.parse import parse_text
from podgpu.past.books.record import cluster_recorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.cluster_app import cluster_application
from tests.fleet.states import gpu, holder, node
from tests.fleet.test_loop import Script, Time, tell
from tests.web.server import Client, running

HOSTILE = 'a"b\\c\nd<script>alert(1)</script>'


def reading(read_at: float = 100.0) -> ClusterReading:
    held = gpu(0, holder(HOSTILE, "team", utilization_ratio=0.5), uuid="GPU-1", busy=0.5, used=40.0)
    return ClusterReading((node("n-1", held, read_at=read_at),))


@contextmanager
def serving(of: ClusterReading, time: Time | None = None) -> Iterator[tuple[Client, Cluster]]:
    cluster = Cluster(Script, ViewSettings(), clock=(time or Time()).clock)
    asyncio.run(cluster.round(Script(tell(of))))
    recorder = cluster_recorder(cluster)
    past = SqlitePast(recorder, lambda: cluster.published.state)
    app: Any = partial(cluster_application, past=past)
    with running(cluster, app=app) as client:  # type: ignore[arg-type]
        yield client, cluster
    recorder.stop()


def test_metrics_with_special_characters() -> None:
    with serving(reading()) as (client, _):
        answer = client.ask("/metrics")
    families = {family.name: family for family in parse_text(answer.text)}
    (row,) = families["pod_and_gpu_map_info"].samples
    assert row.labels["pod_name"] == HOSTILE
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert families["avg_GPU_utilization"].samples[0].value == 40.0


def test_metrics_by_node() -> None:
    with serving(reading()) as (client, _):
        assert "# TYPE n_1_info gauge" in client.ask("/metrics/nodes").text


def test_page_and_view() -> None:
    with serving(reading()) as (client, _):
        page, view = client.ask("/"), client.ask("/api/v1/view")
        pod = client.ask("/api/v1/pods/team/nobody")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert json.loads(view.text)["nodes"][0]["gpus"][0]["holders"][0]["pod"] == HOSTILE
    assert pod.status == 404


@pytest.mark.fault(
    "No exporter answers",
    "The cluster view stays ready, so that its Service still serves the page with the reasons",
)
def test_probes() -> None:
    failed = TargetOutcome(
        "http://n-1/metrics", 1.0, "timeout", "http://n-1/metrics: no whole answer within 5 s"
    )
    time = Time()
    with serving(reading(), time) as (client, cluster):
        assert (client.ask("/ready").status, client.ask("/health").text) == (200, "OK\n")
        for seconds in (60, 3600):
            time.now += seconds
            gone = ClusterReading(reading().nodes, (failed,))
            asyncio.run(cluster.round(Script(tell(gone))))
            live = client.ask("/livez")
            assert (live.status, client.ask("/ready").status) == (200, 200)
            assert "no whole answer within 5 s" in live.text
            assert "no whole answer within 5 s" in client.ask("/api/v1/view").text
        time.now += cluster.late_after + 1
        assert client.ask("/ready").status == 503
    unread: Any = Cluster(Script, ViewSettings(), clock=Time().clock)
    app: Any = cluster_application
    with running(unread, app=app) as client:
        assert client.ask("/ready").status == 503, "not ready before the first reading"


def test_stopped_loop_serves_self_metrics_only() -> None:
    time = Time()
    with serving(reading(), time) as (client, cluster):
        time.now += cluster.late_after + 1
        answer, nodes, live = (
            client.ask("/metrics"),
            client.ask("/metrics/nodes"),
            client.ask("/livez"),
        )
    assert "pod_and_gpu_map_info" not in answer.text
    assert "podgpu_cluster_round_timestamp_seconds" in answer.text
    assert nodes.body == b""
    assert live.status == 503
