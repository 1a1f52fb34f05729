"""Tests with a real Prometheus that the shipped rules restore the pod labels.

The exporter runs with `--dcgm-holder-labels=false`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podgpu.metrics.parse import ParsedSample, parse_text
from tests.fleet.real_servers import needs
from tests.metrics.test_opencost import ask, scraped
from tests.nodes.clock import wait_until
from tests.nodes.node import Description, node_of, read_description
from tests.web.server import running

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "helm" / "podgpu" / "files" / "rules" / "podgpu-holders.yaml"
RECORDED = {
    "podgpu:holder_gpu_util:percent": "DCGM_FI_DEV_GPU_UTIL",
    "podgpu:holder_gpu_power:watts": "DCGM_FI_DEV_POWER_USAGE",
    "podgpu:holder_gpu_tensor_active:ratio": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
}
KEY = ("UUID", "GPU_I_ID", "modelName", "namespace", "pod", "container")
OFF = "--dcgm-holder-labels=false"


def scenario(name: str, *arguments: str) -> Description:
    described = read_description(ROOT / "tests" / "nodes" / name)
    return replace(described, arguments=[*described.arguments, *arguments])


def samples(text: str) -> list[ParsedSample]:
    return [sample for family in parse_text(text) for sample in family.samples]


def read_metrics(folder: Path, described: Description) -> list[ParsedSample]:
    folder.mkdir()
    with node_of(described, folder) as node:
        node.take_turns()
        with running(node.agent) as client:
            return samples(client.ask("/metrics").text)


@pytest.mark.parametrize("name", ["mig", "shared", "hpc"])
def test_holders_are_only_in_podgpu_s_series(folder: Path, name: str) -> None:
    with_labels = read_metrics(folder / "on", scenario(name))
    without = read_metrics(folder / "off", scenario(name, OFF))
    holder = {"namespace", "pod", "container", "hpc_job"}
    assert any(
        holder & sample.labels.keys() for sample in with_labels if sample.name.startswith("DCGM_")
    )
    assert not any(
        holder & sample.labels.keys() for sample in without if sample.name.startswith("DCGM_")
    )
    for name in ("podgpu_allocation_info", "podgpu_container_gpu_processes"):
        assert [s.labels for s in without if s.name == name] == [
            s.labels for s in with_labels if s.name == name
        ]


@needs("prometheus")
@pytest.mark.parametrize("name", ["mig", "shared"])
def test_the_rules_restore_the_labels(folder: Path, name: str) -> None:
    expected = {
        (record, tuple(sample.labels.get(label, "") for label in KEY)): sample.value
        for sample in read_metrics(folder / "on", scenario(name))
        for record, field in RECORDED.items()
        if sample.name == field and "pod" in sample.labels
    }
    assert expected
    (folder / "off").mkdir()
    with node_of(scenario(name, OFF), folder / "off") as node:
        node.take_turns()
        with (
            running(node.agent) as client,
            scraped(folder, client, f"rule_files: ['{RULES}'], ") as server,
        ):
            query = f'{{__name__=~"{"|".join(RECORDED)}"}}'
            wait_until(lambda: len(ask(server, query)) >= len(expected), "the rules have run")
            recorded = ask(server, query)
    assert {
        (labels["__name__"], tuple(labels.get(label, "") for label in KEY)): value
        for labels, value in recorded
    } == expected
