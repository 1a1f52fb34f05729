"""Sends OTLP to receivers of other projects: Prometheus 3, VictoriaMetrics and VictoriaLogs.

Debian's versions have no OTLP. PODGPU_RECEIVERS is a folder with the binaries `prometheus3`,
`victoria3` and `victoria-logs`, for example built from the repositories that vendor their modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from podgpu.clock import Clock
from podgpu.http_client import HttpClient
from podgpu.metrics.otlp import PushedNode
from podgpu.web.push import OtlpPusher, PushSettings, Receiver
from tests.net import free_port, lines_of, read_if_ready
from tests.nodes.clock import PATIENCE, wait_until
from tests.nodes.node import Node, node_of, read_description

FOLDER = Path(os.environ.get("PODGPU_RECEIVERS", ""))
NODES = Path(__file__).parents[1] / "nodes"
pytestmark = pytest.mark.skipif(
    "PODGPU_RECEIVERS" not in os.environ,
    reason="needs PODGPU_RECEIVERS, a folder with prometheus3, victoria3 and victoria-logs",
)


class Program(NamedTuple):
    binary: str
    arguments: tuple[str, ...]  # {port} and {folder} are replaced
    health: str
    path: str  # of the receiver


PROMETHEUS = Program(
    "prometheus3",
    (
        "--config.file={folder}/prometheus.yml",
        "--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=20y",
        "--web.listen-address=127.0.0.1:{port}",
        "--web.enable-otlp-receiver",
    ),
    "/-/ready",
    "api/v1/otlp/v1/metrics",
)
VICTORIA_METRICS = Program(
    "victoria3",
    (
        "-storageDataPath={folder}/data",
        "-retentionPeriod=20y",
        "-httpListenAddr=127.0.0.1:{port}",
        "-opentelemetry.usePrometheusNaming=true",
    ),
    "/health",
    "opentelemetry/v1/metrics",
)
VICTORIA_LOGS = Program(
    "victoria-logs",
    (
        "-storageDataPath={folder}/data",
        "-retentionPeriod=20y",
        "-httpListenAddr=127.0.0.1:{port}",
    ),
    "/health",
    "insert/opentelemetry/v1/logs",
)


@contextmanager
def running(program: Program, folder: Path) -> Iterator[str]:
    """Yields the URL."""
    port = free_port()
    (folder / "prometheus.yml").write_text("scrape_configs: []\n")
    arguments = [one.format(port=port, folder=folder) for one in program.arguments]
    command = [str(FOLDER / program.binary), *arguments]
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(lambda: read(url + program.health) is not None, "the receiver is ready")
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE)


def read(url: str, **query: str) -> bytes | None:
    return read_if_ready(f"{url}?{urllib.parse.urlencode(query)}")


@contextmanager
def pushing(node: Node, program: Program, url: str) -> Iterator[OtlpPusher]:
    receiver = Receiver(HttpClient(url, timeout=PATIENCE), program.path)
    is_logs = program is VICTORIA_LOGS
    metrics, logs = (None, receiver) if is_logs else (receiver, None)
    clock = Clock(node.clock.monotonic, node.clock.wall)
    nodes = [PushedNode(node.agent.published.state)]
    pusher = OtlpPusher(PushSettings(metrics, logs), lambda: nodes, clock)
    yield pusher
    assert pusher.warnings() == []


@pytest.fixture
def node(folder: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    with node_of(read_description(NODES / request.param), folder) as built:
        built.take_turns()
        yield built


@pytest.mark.parametrize("node", ["usage-time-sliced", "usage-mig"], indirect=True)
@pytest.mark.parametrize("program", [PROMETHEUS, VICTORIA_METRICS], ids=lambda one: one.binary)
def test_metrics_have_the_names_and_values_of_a_scrape(
    node: Node, program: Program, tmp_path: Path
) -> None:
    text = node.agent.published.fresh.plain.decode()
    at = str(node.clock.wall() + 1)
    with running(program, tmp_path) as url, pushing(node, program, url) as pusher:
        pusher.update()
        for figure in ("busy_seconds_total", "energy_joules_total", "utilization_ratio"):
            name = f"podgpu_container_gpu_{figure}"
            expected = {labels["pod"]: value for labels, value in lines_of(text, name)}
            wait_until(lambda name=name: query(url, name, at), name)  # type: ignore[misc]
            assert query(url, name, at) == pytest.approx(expected)


def query(url: str, name: str, at: str) -> dict[str, float]:
    """Returns the values by pod."""
    body = read(f"{url}/api/v1/query", query=name, time=at)
    assert body is not None
    rows: list[Any] = json.loads(body)["data"]["result"]
    return {row["metric"]["k8s_pod_name"]: float(row["value"][1]) for row in rows}


@pytest.mark.parametrize("node", ["faulty"], indirect=True)
def test_events_arrive(node: Node, tmp_path: Path) -> None:
    clock = node.clock
    with running(VICTORIA_LOGS, tmp_path) as url:
        clock.advance(-100.0)  # the start of the pusher is before the faults
        with pushing(node, VICTORIA_LOGS, url) as pusher:
            clock.advance(100.0)
            pusher.update()
            path = f"{url}/select/logsql/query"
            wait_until(lambda: len(list_lines(path)) == 3, "three events")
            lines = list_lines(path)
    assert sorted(line.get("error.type", "lost") for line in lines) == ["lost", "xid_31", "xid_79"]
    assert {line["host.name"] for line in lines} == {"node-1"}


def list_lines(path: str) -> list[dict[str, str]]:
    body = read(path, query="*", start="2020-01-01T00:00:00Z", end="2030-01-01T00:00:00Z") or b""
    return [json.loads(line) for line in body.splitlines()]
