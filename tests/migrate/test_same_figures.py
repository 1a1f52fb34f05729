"""Tests on a real Prometheus that rewritten queries return the same values as the original ones."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.clock import Clock
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.fields import HOST_LABELS, NameSet
from podgpu.metrics.labels import Policy
from podgpu.metrics.parse import parse_text
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.tools.migrate.query_rewriter import renamed_labels, rewrite_query
from tests.deploy.grafana import as_sent, several
from tests.deploy.test_dashboards import NVIDIA_12239
from tests.fleet.real_servers import Point, needs, prometheus
from tests.nodes.clock import FakeClock
from tests.simulated import FaultyNvml

STEP, TURNS = 15.0, 41
GIB = 1024**3
MORE = [
    "DCGM_FI_DEV_GPU_UTIL > 50",
    "sum by (Hostname) (rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])) / 1000",
    "avg_over_time(DCGM_FI_DEV_GPU_UTIL[5m])",
    "quantile_over_time(0.5, DCGM_FI_DEV_FB_USED[5m])",
    "max_over_time(DCGM_FI_DEV_GPU_UTIL[5m:30s])",
    "stddev_over_time(DCGM_FI_DEV_GPU_UTIL[10m])",
    "DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE + DCGM_FI_DEV_FB_RESERVED)",
    "DCGM_FI_DEV_FB_USED offset 1m",
    "delta(DCGM_FI_DEV_FB_USED[5m])",
    "count by (Hostname) (DCGM_FI_DEV_GPU_UTIL > 10)",
    "topk(1, DCGM_FI_DEV_GPU_UTIL)",
    "DCGM_FI_DEV_POWER_USAGE and on (UUID) DCGM_FI_DEV_GPU_UTIL",
    'absent(DCGM_FI_DEV_GPU_UTIL{gpu="99"})',
    "DCGM_FI_DEV_MEM_CLOCK * 1e6 + DCGM_FI_DEV_SM_CLOCK",
    "max by (DCGM_FI_DRIVER_VERSION) (DCGM_FI_DEV_GPU_TEMP)",
    "changes(DCGM_FI_DEV_GPU_UTIL[10m])",
]


def expositions(names: NameSet) -> Iterator[Point]:
    """Yields samples of two GPUs with these metric names. The values are deterministic."""
    clock = FakeClock()
    driver = FaultyNvml("2xH100", clock=clock.monotonic, wall=clock.wall)
    agent = Agent(
        NvmlTelemetry(driver, "nvml", lambda: 2, clock.monotonic, clock.wall),
        settings=Settings(
            policy=Policy(
                counters=shipped_counters("default", names) or (),
                hostname="node-1",
                hostname_labels=HOST_LABELS[names],
            )
        ),
        clock=Clock(clock.monotonic, clock.wall),
    )
    driver.place(SimulatedLoad(0, 4000, duty=0.57, memory=9 * GIB))
    for turn in range(TURNS):
        if turn == TURNS // 2:
            driver.place(SimulatedLoad(1, 4001, duty=0.31, memory=5 * GIB))
        clock.advance(STEP)
        agent.read_telemetry()
        for family in parse_text(agent.published.fresh.plain.decode()):
            for sample in family.samples:
                yield Point(
                    sample.name,
                    {**sample.labels, "instance": "node-1:9400"},
                    sample.value,
                    clock.wall(),
                )
    agent.stop()


class Answers:
    def __init__(self, url: str, at: float) -> None:
        self._url = url
        self._at = at

    def ask(self, query: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Returns the values by labels. Renamed labels have their new names."""
        arguments = urllib.parse.urlencode({"query": query, "time": self._at})
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{arguments}", timeout=30) as answer:
            found = json.load(answer)["data"]
        assert found["resultType"] == "vector", query
        return {_key(one["metric"]): float(one["value"][1]) for one in found["result"]}


def _key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    new = {
        renamed_labels().get(name, name): value
        for name, value in labels.items()
        if name != "__name__"
    }
    return tuple(sorted(new.items()))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("prom")
    by_time = sorted(
        (*expositions("4.8"), *expositions("4.9")), key=lambda point: (point.name, point.at)
    )
    with prometheus(folder, _each_once(by_time)) as url:
        yield Answers(url, max(point.at for point in by_time))


def _each_once(points: list[Point]) -> Iterator[Point]:
    """Removes duplicates: some metrics have the same name in both versions."""
    seen: set[tuple[object, ...]] = set()
    for point in points:
        key = point.name, tuple(sorted(point.labels.items())), point.at
        if key not in seen:
            seen.add(key)
            yield point


def same(answers: Answers, old: str, new: str) -> None:
    expected, found = answers.ask(old), answers.ask(new)
    assert expected, f"nothing is returned by {old}"
    assert found.keys() == expected.keys(), new
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=2e-3, abs=1e-6), f"{old}\n{new}\n{key}"


@needs("prometheus", "promtool")
@pytest.mark.parametrize("query", NVIDIA_12239)
def test_nvidias_dashboard_rewritten_returns_the_same_figures(answers: Answers, query: str) -> None:
    picked = {"instance": several(["node-1:9400"]), "gpu": several(["0", "1"])}
    rewritten = rewrite_query(query)
    assert rewritten.unconverted == ()
    assert rewritten.text != query
    same(answers, as_sent(query, picked), as_sent(rewritten.text, picked))


@needs("prometheus", "promtool")
@pytest.mark.parametrize("query", MORE)
def test_rewritten_queries_return_the_same_figures(answers: Answers, query: str) -> None:
    rewritten = rewrite_query(query)
    assert rewritten.unconverted == ()
    same(answers, query, rewritten.text)


@needs("prometheus", "promtool")
def test_every_whole_per_cent_compares_exactly(tmp_path: Path) -> None:
    time = 1_700_000_000.0
    ratios = [
        Point("DCGM_FI_DEV_GPU_UTIL_RATIO", {"gpu": str(n)}, n / 100, time) for n in range(101)
    ]
    percents = [Point("DCGM_FI_DEV_GPU_UTIL", {"gpu": str(n)}, n, time) for n in range(101)]
    with prometheus(tmp_path, [*percents, *ratios]) as url:
        answers = Answers(url, time)
        for percent in range(101):
            for query in (
                f"DCGM_FI_DEV_GPU_UTIL > {percent}",
                f"{percent} == avg by (gpu) (DCGM_FI_DEV_GPU_UTIL)",
            ):
                assert answers.ask(rewrite_query(query).text).keys() == answers.ask(query).keys(), (
                    query
                )
        for query in (
            "DCGM_FI_DEV_GPU_UTIL % 10",
            'count_values("percent", DCGM_FI_DEV_GPU_UTIL)',
            "floor(DCGM_FI_DEV_GPU_UTIL)",
            "ceil(DCGM_FI_DEV_GPU_UTIL)",
            "round(DCGM_FI_DEV_GPU_UTIL, 2)",
            "sgn(DCGM_FI_DEV_GPU_UTIL - 57)",
        ):
            assert answers.ask(rewrite_query(query).text) == answers.ask(query), query
