"""Runs OpenCost's queries on a real Prometheus that scrapes a shared GPU.

The exporter runs with `--kubernetes-virtual-gpus`.
"""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleet.real_servers import needs, prometheus
from tests.nodes.clock import wait_until
from tests.nodes.node import node_of, read_description
from tests.web.server import Client, running

CONTAINER = "container, pod, namespace, uid, cluster_id"
USAGE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
QUERIES = {
    "usage average": f'avg(avg_over_time({USAGE}{{container!=""}}[1h])) by ({CONTAINER})',
    "usage max": f'max(max_over_time({USAGE}{{container!=""}}[1h])) by ({CONTAINER})',
    "device": 'avg(avg_over_time(DCGM_FI_DEV_DEC_UTIL{container!=""}[1h])) by '
    f"({CONTAINER}, device, modelName, UUID)",
}
"""Copied from opencost/opencost, modules/prometheus-source/pkg/prom/metricsquerier.go."""
FIELDS = (USAGE, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_GPU_TEMP")


def ask(server: str, query: str) -> list[tuple[dict[str, str], float]]:
    with urllib.request.urlopen(
        f"{server}/api/v1/query?query={urllib.parse.quote(query)}", timeout=30
    ) as answer:
        found = json.load(answer)["data"]["result"]
    return [(one["metric"], float(one["value"][1])) for one in found]


@contextmanager
def scraped(folder: Path, client: Client, more: str = "") -> Iterator[str]:
    """Runs a Prometheus that scrapes every second. `more` is added to its configuration."""
    target = f"{client.address.host}:{client.address.port}"
    job = f"{{job_name: podgpu, honor_labels: true, static_configs: [{{targets: ['{target}']}}]}}"
    timing = "global: {scrape_interval: 1s, evaluation_interval: 1s}"
    with prometheus(folder, configuration=f"{{{timing}, {more}scrape_configs: [{job}]}}") as server:
        yield server


@needs("prometheus")
def test_usage_per_container_of_a_shared_gpu(folder: Path) -> None:
    """Two containers use 50 and 20 % of a time-sliced GPU.

    There are also an idle notebook and a host process.
    """
    scenario = read_description(Path(__file__).parents[1] / "nodes" / "usage-virtual-gpus")
    rows = "".join(f"{name}, gauge, x\n" for name in FIELDS)
    with node_of(replace(scenario, files={"counters.csv": rows}), folder) as node:
        node.take_turns()
        with running(node.agent) as client, scraped(folder, client) as server:
            wait_until(lambda: bool(ask(server, USAGE)), "Prometheus has scraped the exporter")
            answers = {what: ask(server, query) for what, query in QUERIES.items()}
            ratios = ask(server, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
            temperatures = ask(server, 'DCGM_FI_DEV_GPU_TEMP{container!=""}')
            device = ask(server, f'{USAGE}{{container=""}}')
    for what in ("usage average", "usage max"):
        assert {labels["container"]: value for labels, value in answers[what]} == {
            "main": pytest.approx(0.5, abs=0.02),
            "sidecar": pytest.approx(0.2, abs=0.02),
            "notebook": 0,
        }, what
    assert {
        (labels["pod"], labels["container"], labels["device"]) for labels, _ in answers["device"]
    } == {
        ("train", "main", "nvidia0"),
        ("train", "sidecar", "nvidia0"),
        ("ada", "notebook", "nvidia0"),
    }
    assert [(labels.get("container"), value > 0) for labels, value in ratios] == [(None, True)]
    assert len(temperatures) == 3
    assert [value for _, value in device] == [pytest.approx(0.8, abs=0.02)]
