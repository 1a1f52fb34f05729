"""Counters that change while podgpu runs: a good change is taken up, a bad one keeps the last good set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.agent.counter_feeds import counters_in_configmap, counters_in_file
from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.render import Policy
from podgpu.simulate.driver import SimulatedNvml

TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP,gauge,t\n"
POWER = "DCGM_FI_DEV_POWER_USAGE,gauge,p\nDCGM_FI_PROF_GR_ENGINE_ACTIVE,gauge,g\n"


class Node:
    def __init__(self, path: Path) -> None:
        self.time = 100.0
        driver = SimulatedNvml("1xH100", clock=lambda: self.time, wall=lambda: self.time, unrest=0)
        telemetry = NvmlTelemetry(driver, "simulated", lambda: 1, lambda: self.time, lambda: self.time)
        policy = Policy(parse_counters(TEMPERATURE, "test"), "h")
        clock = Clock(lambda: self.time, lambda: self.time)
        settings = Settings(interval=1.0, policy=policy)
        self.agent = Agent(telemetry, (), settings, clock, read_counters=counters_in_file(str(path)))

    def turn(self) -> str:
        self.time += 1
        self.agent.read_telemetry()
        return self.agent.published.fresh.plain.decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "counters.csv"
    path.write_text(TEMPERATURE)
    return path


@pytest.fixture
def node(path: Path) -> Iterator[Node]:
    node = Node(path)
    yield node
    node.agent.stop()


def test_a_changed_file_is_taken_up_without_an_empty_exposition(node: Node, path: Path) -> None:
    assert "DCGM_FI_DEV_GPU_TEMP" in node.turn()
    path.write_text(POWER)
    node.agent.read_counters()
    assert "DCGM_FI_DEV_GPU_TEMP" in node.agent.published.fresh.plain.decode(), "the old exposition stands"
    exposition = node.turn()
    assert "\nDCGM_FI_DEV_POWER_USAGE{" in exposition
    assert "\nDCGM_FI_PROF_GR_ENGINE_ACTIVE{" in exposition, "both readings that a ratio needs were taken"
    assert "DCGM_FI_DEV_GPU_TEMP" not in exposition


@pytest.mark.parametrize("bad", ["NOT_A_FIELD,gauge,x\n", "a,b\n", "", "\x00\xff"])
def test_a_bad_file_keeps_the_last_good_counters_and_says_why(node: Node, path: Path, bad: str) -> None:
    node.turn()
    path.write_bytes(bad.encode("latin-1"))
    node.agent.read_counters()
    exposition = node.turn()
    assert "DCGM_FI_DEV_GPU_TEMP{" in exposition
    assert 'podgpu_exporter_source_up{source="counters"} 0' in exposition
    assert 'podgpu_exporter_source_errors_total{source="counters",reason="malformed"} 1' in exposition
    path.write_text(POWER)
    node.agent.read_counters()
    assert 'podgpu_exporter_source_up{source="counters"} 1' in node.turn()


def test_a_file_that_went_away_is_no_reason_to_stop(node: Node, path: Path) -> None:
    path.unlink()
    node.agent.read_counters()
    assert 'reason="file_missing"} 1' in node.turn()


def test_the_counters_of_a_configmap() -> None:
    text: list[str | None] = [None]
    feed = counters_in_configmap("gpu:counters", lambda: text[0])
    with pytest.raises(SourceError, match="no ConfigMap gpu:counters") as caught:
        feed()
    assert caught.value.reason == "configmap_missing"
    text[0] = TEMPERATURE
    assert [c.name for c in feed()] == ["DCGM_FI_DEV_GPU_TEMP"]
    assert feed() is feed(), "parsed once"
    text[0] = "nonsense"
    with pytest.raises(SourceError, match="ConfigMap gpu:counters"):
        feed()
