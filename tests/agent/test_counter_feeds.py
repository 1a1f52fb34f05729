"""Counters that change while podgpu runs: a good change is taken up, a bad one keeps the last good set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.agent.counters import counters_in_configmap, counters_in_file
from podgpu.agent.loop import Settings
from podgpu.errors import SourceError
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.labels import Policy
from tests.agent.simulated_node import SimulatedNode as Node

TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP,gauge,t\n"
POWER = "DCGM_FI_DEV_POWER_USAGE,gauge,p\nDCGM_FI_PROF_GR_ENGINE_ACTIVE,gauge,g\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "counters.csv"
    path.write_text(TEMPERATURE)
    return path


@pytest.fixture
def node(path: Path) -> Iterator[Node]:
    settings = Settings(interval=1.0, policy=Policy(parse_counters(TEMPERATURE, "test"), "h"))
    node = Node("1xH100", settings, read_counters=counters_in_file(str(path)))
    yield node
    node.stop()


@pytest.mark.parametrize("bad", [b"NOT_A_FIELD,gauge,x\n", b"", b"\x00\xff", None])
def test_a_bad_file_keeps_the_last_good_counters(node: Node, path: Path, bad: bytes | None) -> None:
    node.turn()
    if bad is None:
        path.unlink()
    else:
        path.write_bytes(bad)
    node.agent.read_counters()
    exposition = node.turn()
    assert "DCGM_FI_DEV_GPU_TEMP{" in exposition
    assert 'podgpu_exporter_source_up{source="counters"} 0' in exposition
    reason = "file_missing" if bad is None else "malformed"
    assert f'podgpu_exporter_source_errors_total{{source="counters",reason="{reason}"}} 1' in exposition
    path.write_text(POWER)
    node.agent.read_counters()
    assert 'podgpu_exporter_source_up{source="counters"} 1' in node.turn()


def test_the_counters_of_a_configmap() -> None:
    text: list[str | None] = [None]
    feed = counters_in_configmap("gpu:counters", lambda: text[0])
    with pytest.raises(SourceError, match="no ConfigMap gpu:counters") as caught:
        feed()
    assert caught.value.reason == "configmap_missing"
    text[0] = TEMPERATURE
    assert [c.name for c in feed()] == ["DCGM_FI_DEV_GPU_TEMP"]
    text[0] = "nonsense"
    with pytest.raises(SourceError, match="ConfigMap gpu:counters"):
        feed()
