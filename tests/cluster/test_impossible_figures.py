"""Expositions with numbers that nothing can have: no figure comes of them, and no round falls over."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from podgpu.cluster.publish import Publisher
from podgpu.cluster.reading import ClusterReading, NodeReading
from podgpu.cluster.scraping.exposition import ExpositionReader
from podgpu.cluster.settings import UsedMeans, ViewSettings
from tests.cluster.view_readings import gpu, holder, node, series, value, view_of

NODES = Path(__file__).parents[1] / "nodes"
EXPOSITIONS = {
    name: (NODES / name / "expected.prom").read_text() for name in ("shared", "usage-virtual-gpus", "usage-mig")
}
WALL = 1_700_000_000.0


def with_value(exposition: str, name: str, number: str) -> str:
    return re.sub(rf"^({name}\{{.*\}}) .*$", rf"\1 {number}", exposition, flags=re.MULTILINE)


def read(exposition: str) -> NodeReading:
    return ExpositionReader("http://h:9400/metrics", "h:9400").read(exposition.encode(), 0.0, WALL)


@pytest.mark.parametrize("number", ["1e308", "-1e308", "-5", "9223372036854775794", "1e-320"])
@pytest.mark.parametrize("scenario", EXPOSITIONS)
def test_no_number_makes_a_round_fall_over(scenario: str, number: str) -> None:
    names = sorted(set(re.findall(r"^([A-Za-z_:]+)\{", EXPOSITIONS[scenario], re.MULTILINE)))
    for name in [*names, "[A-Za-z_:]+"]:
        found = read(with_value(EXPOSITIONS[scenario], name, number))
        published = Publisher(ViewSettings()).publish(ClusterReading((found,)), 0.0, WALL, whole_round=True)
        assert json.loads(published.page().view.plain)["nodes"]
        assert b"inf" not in published.metrics.plain.lower().replace(b"_info", b"")


@pytest.mark.parametrize("number", ["-1", "1e308", "2147483632", "140737488355328", "9223372036854775794"])
def test_a_mark_for_no_value_is_none(number: str) -> None:
    exposition = EXPOSITIONS["shared"]
    for name in ("GPU_UTIL", "MEM_COPY_UTIL", "POWER_USAGE", "GPU_TEMP", "FB_USED"):
        exposition = with_value(exposition, f"DCGM_FI_DEV_{name}", number)
    device = read(exposition).devices[0]
    assert (device.utilization, device.measured, device.power_watts, device.temperature) == (None, None, None, None)


@pytest.mark.parametrize("number", ["1e308", "-1", "0"])
def test_a_clock_that_shows_nothing_is_none(number: str) -> None:
    exposition = re.sub(
        r"^(podgpu_exporter_snapshot_timestamp_seconds) .*$", rf"\1 {number}", EXPOSITIONS["shared"], flags=re.M
    )
    found = read(exposition)
    assert (found.taken_at, found.skew_seconds) == (None, None)


def test_a_little_more_than_everything_is_everything() -> None:
    view = view_of(node("n", gpu(0, measured=100.9), gpu(1, measured=100.0), gpu(2, measured=102.0)))
    assert value(view, "avg_GPU_utilization") == 100
    assert value(view, "podgpu_used_gpus", scope="cluster") == 2


@pytest.mark.parametrize("means", ["busy", "processes"])
def test_what_nobody_can_tell_is_not_counted_as_unused(means: UsedMeans) -> None:
    """dcgm-exporter's expositions tell of no processes, and some of no utilisation."""
    settings = ViewSettings(used_means=means)
    view = view_of(node("n", gpu(0, holder())), settings=settings)
    for name in ("podgpu_node_used_gpus", "podgpu_model_used_gpus", "podgpu_namespace_used_gpus"):
        assert series(view, name) == {}
    assert value(view, "podgpu_namespace_allocated_gpus", namespace="ml", model=gpu(0).model) == 1
    known = view_of(
        node("n", gpu(0, holder()), gpu(1, holder(processes=0), utilization=0.0, measured=0.0)), settings=settings
    )
    assert value(known, "podgpu_node_used_gpus", node="n", model=gpu(0).model) == 0
    assert value(known, "podgpu_namespace_used_gpus", namespace="ml", model=gpu(0).model) == 0
