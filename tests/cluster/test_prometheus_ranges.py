"""GPU-hours, energy and cost in a range, from the counters in a real Prometheus and VictoriaMetrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podgpu.cluster.prices import Price, Prices
from podgpu.cluster.prometheus_ranges import PrometheusRanges
from podgpu.cluster.promql import PrometheusServer
from podgpu.cluster.ranges import RangeAnswer, RangeQuery, RangeRow, describe_row
from podgpu.errors import SourceError
from podgpu.model import WorkloadOwner
from tests.cluster.prometheus_double import Asked, Reply, error, running_double
from tests.cluster.real_servers import Point, needs, prometheus, victoria_metrics
from tests.cluster.states import state_of
from tests.cluster.test_prometheus_live import Serving

HOUR, STEP = 3600, 15
MODEL = {"modelName": "H100"}
HELD = {"UUID": "GPU-0", **MODEL, "namespace": "ml", "pod": "train", "container": "main"}
ENDED = {"UUID": "GPU-1", **MODEL, "namespace": "ml", "pod": "ended", "container": "main"}
SHARED = {"UUID": "GPU-1", **MODEL, "namespace": "web", "pod": "half", "container": "main"}
SLICE = {**MODEL, "UUID": "GPU-2", "GPU_I_ID": "1", "GPU_I_PROFILE": "1g.10gb"}
MIG = {**SLICE, "namespace": "web", "pod": "slice", "container": "main"}
PRICES = Prices("EUR", {"H100": Price(10.0)})
END = time.time() // STEP * STEP - 2 * STEP
START = END - 4 * HOUR


def points() -> Iterator[Point]:
    """Four hours. The exporter restarts after two, at another address; one pod ends after one; the last GPU is free."""
    for number in range(4 * HOUR // STEP + 1):
        seconds = number * STEP
        at, restarted = START + seconds, seconds >= 2 * HOUR
        since = seconds - 2 * HOUR if restarted else seconds
        instance = {"job": "podgpu", "instance": "10.0.0.2:9400" if restarted else "10.0.0.1:9400"}
        held = [(HELD, 1.0, 0.25, 100.0, 0.0), (MIG, 1.0, 0.5, 50.0, 0.0)]
        if seconds <= HOUR:
            held.append((ENDED, 1.0, 0.0, 40.0, 1.0))
        else:
            held.append((SHARED, 0.5, 0.0, 40.0, 1.0))
            since_shared = since if restarted else seconds - HOUR
        for labels, share, busy, watts, idle in held:
            age = since_shared if labels is SHARED else since
            for replica in ({"replica": "a"}, {"replica": "b"}):
                name = {**instance, **replica, **labels}
                yield Point("podgpu_container_gpu_allocated_seconds_total", name, share * age, at)
                yield Point("podgpu_container_gpu_busy_seconds_total", name, busy * age, at)
                yield Point("podgpu_container_gpu_idle_seconds_total", name, idle * age, at)
                yield Point("podgpu_container_gpu_energy_joules_total", name, watts * age, at)
                yield Point("podgpu_container_gpu_wait_seconds_total", name, 0.1 * age, at)
                yield Point("podgpu_allocation_share_ratio", name, share, at)
        for gpu in range(4):
            yield Point("DCGM_FI_DEV_GPU_TEMP", {**instance, "UUID": f"GPU-{gpu}", **MODEL}, 40, at)
        free = {**instance, "UUID": "GPU-3", **MODEL}
        yield Point("podgpu_device_unattributed_energy_joules_total", free, 60.0 * since, at)
        if seconds <= HOUR:
            pod = {"namespace": "ml", "pod": "ended", "owner_kind": "Job", "owner_name": "batch"}
            yield Point("kube_pod_owner", {**pod, "owner_is_controller": "true"}, 1, at)
            yield Point("kube_pod_labels", {"namespace": "ml", "pod": "ended", "label_team": "nlp"}, 1, at)


def ask(url: str, by: str = "pod", start: float = START, end: float = END) -> RangeAnswer:
    ranges = PrometheusRanges(PrometheusServer(url), lambda: state_of(prices=PRICES))
    return asyncio.run(ranges.range(RangeQuery(by, start=start, end=end)))


def rows_of(answer: RangeAnswer) -> dict[str, RangeRow]:
    return {describe_row(row): row for row in answer.rows}


@pytest.mark.parametrize(
    "serving",
    [
        pytest.param(prometheus, marks=needs("prometheus", "promtool")),
        pytest.param(victoria_metrics, marks=needs("victoria-metrics")),
    ],
)
def test_hours_and_cost_with_a_restart_and_an_ended_pod(serving: Serving, tmp_path: Path) -> None:
    with serving(tmp_path, points()) as url:
        answer, again = ask(url), ask(url)
        by_owner, by_team = rows_of(ask(url, "owner")), rows_of(ask(url, "label:team"))
        early = ask(url, start=START - 4 * HOUR)
        unlabelled = ask(url, "label:app.kubernetes.io/name", start=END - HOUR)
    assert msgspec.json.encode(answer) == msgspec.json.encode(again), "two processes give the same answer"
    rows = rows_of(answer)

    def figures(name: str) -> list[float | None]:
        row = rows[name]
        return [row.gpu_hours, row.used_hours, row.idle_hours, row.energy_kwh, row.cost, row.wasted]

    assert figures("ml/train") == pytest.approx([4.0, 1.0, 0.0, 0.4, 40.0, 0.0], rel=0.01)
    assert figures("ml/ended") == pytest.approx([1.0, 0.0, 1.0, 0.04, 10.0, 10.0], rel=0.01)
    assert figures("web/half") == pytest.approx([1.5, 0.0, 1.5, 0.12, 15.0, 15.0], rel=0.01)
    assert figures("web/slice") == pytest.approx([4 / 7, 2 / 7, 0.0, 0.2, 40 / 7, 0.0], rel=0.01)
    free = 16 - 4 - 1 - 1.5 - 4 / 7
    assert figures("unallocated") == pytest.approx([free, 0.0, 0.0, 0.24, free * 10, 0.0], rel=0.01)
    assert answer.totals.gpu_hours == pytest.approx(16.0, rel=0.005), "the GPUs' own hours"
    assert answer.totals.cost == pytest.approx(160.0, rel=0.005)
    assert rows["ml/train"].mean_use == pytest.approx(0.25, rel=0.01)
    assert rows["ml/train"].waited_hours == pytest.approx(0.4, rel=0.01)
    assert by_owner["ml/Job/batch"].owner == WorkloadOwner("Job", "batch")
    assert by_team["nlp"].gpu_hours == rows["ml/ended"].gpu_hours
    assert any("no GPU metrics at" in note for note in early.notes)
    assert early.totals.gpu_hours == pytest.approx(16.0, rel=0.005)
    assert any("no pod has the label" in note for note in unlabelled.notes)


def test_a_failing_query_is_named_and_the_rest_is_shown() -> None:
    def misbehave(asked: Asked) -> Reply | None:
        is_large = "busy" in asked.query or "count_over_time" in asked.query
        return error(422, "query processing would load too many samples") if is_large else None

    with running_double() as double:
        double.put("podgpu_container_gpu_allocated_seconds_total", 7200, **HELD)
        double.misbehave = misbehave
        found = ask(double.url, start=double.now - 4 * HOUR, end=double.now)
    assert any("missing: used hours" in note and "too many samples" in note for note in found.notes)
    assert any("missing: hours of unallocated GPUs" in note for note in found.notes)
    (row,) = found.rows
    assert (row.pod, row.gpu_hours, row.unknown_hours, row.cost) == ("train", 2.0, 2.0, 20.0)
    with pytest.raises(SourceError):
        ask("http://127.0.0.1:9")
