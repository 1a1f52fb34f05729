"""The commands `podgpu cluster` and `podgpu demo`: rejected options, and a successful start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from podgpu.cli.main import run
from podgpu.web.app import parse_address
from tests.fleet.real_servers import needs, prometheus
from tests.nodes.clock import PATIENCE, wait_until
from tests.process import CLUSTER, PODGPU, podgpu
from tests.web.server import Client


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "needs a source: give exactly one of --prometheus HOST:9090, --scrape HOST:9400,… or"),
        (
            ["--scrape", "http://a", "--prometheus", "http://b"],
            "--prometheus and --scrape cannot be combined",
        ),
        (
            ["--scrape", "htp://a"],
            "--scrape 'htp://a': not the URL of an HTTP server; write HOST:PORT",
        ),
        (["--scrape", ","], "--scrape names no exporter"),
        (
            ["--prometheus", "nowhere"],
            "--prometheus 'nowhere': not the URL of an HTTP server; write HOST:PORT",
        ),
        (["--prometheus", "http://b", "--node-label", " , "], "--node-label is empty"),
        (
            ["--prometheus", "http://b", "--prometheus-username", "me"],
            "password-file must be set together",
        ),
        (
            ["--prometheus", "http://b", "--prometheus-tenant", "a\nb"],
            "must not contain line breaks",
        ),
        (["--scrape", "http://a", "--match", 'a="b"'], "--match is used only with --prometheus"),
        (
            ["--prometheus", "http://b", "--exporter-username", "a"],
            "is used only with --scrape or --discover-kubernetes",
        ),
        (
            ["--scrape", "http://a", "--used-field", "DCGM_FI_DEV_MEM_COPY_UTL"],
            "is it DCGM_FI_DEV_MEM_COPY_UTIL?",
        ),
        (
            ["--scrape", "http://a", "--used-field", "DCGM_FI_DEV_POWER_USAGE"],
            "is not a utilisation",
        ),
        (["--scrape", "http://a", "--window", "24h", "--interval", "1s"], "has more than"),
        (["--scrape", "http://a", "--prices", "/nowhere"], "--prices: /nowhere does not exist"),
        (["--scrape", "http://a", "-a", "9401"], "must be HOST:PORT"),
        (["--scrape", "http://a", "--auth-user-header", "X-User"], "need --auth kubernetes"),
        (
            ["--scrape", "http://a", "--auth", "kubernetes", "--auth-groups-header", "X-Groups"],
            "needs --auth-user-header",
        ),
        (
            ["--scrape", "http://a", "--auth", "kubernetes", "--auth-user-header", "X-User"],
            "everybody who reaches podgpu could claim to be any user",
        ),
        (
            ["--scrape", "http://a", "--auth", "kubernetes", "--kubeconfig", "/nowhere"],
            "--auth kubernetes cannot read the kubeconfig /nowhere",
        ),
        (["--discover-kubernetes", "app=podgpu", "--kubeconfig", "/nowhere"], "/nowhere"),
        (["--scrape", "http://a", "--owners", "api", "--kubeconfig", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cluster", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_prices_need_no_api_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # in a pod without a token
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    arguments = [
        "--scrape",
        "localhost:1",
        "--owners",
        "none",
        "--prices",
        "example",
        "--address",
        "192.0.2.1:9401",
    ]
    assert run(["cluster", *arguments]) == 1
    assert "192.0.2.1:9401" in capsys.readouterr().err, "the options are valid, but not the address"


class Demo(NamedTuple):
    """Host and port of the URLs that the demo prints."""

    exporter: str
    cluster: str


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """Runs one demo for all tests. Checks its exit code."""
    command = [*PODGPU, "demo", "--calm", "-a", "127.0.0.1:0", "--cluster-address", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            cluster = _url(process, "the cluster")  # printed first
            yield Demo(_url(process, "node-1"), cluster)
        finally:
            process.send_signal(signal.SIGINT)  # SIGKILL would leave its folders behind
        assert process.wait(PATIENCE) == 0


def test_the_port_of_the_exporter_is_not_taken_twice(demo: Demo) -> None:
    result = _run("cluster", "-a", demo.cluster, "--scrape", "http://127.0.0.1:1")
    assert result.returncode == 1
    assert "cannot listen on" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_demo_has_four_nodes_and_top_shows_them(demo: Demo) -> None:
    names = {"node-1", "node-2", "node-3", "workstation-1"}
    view = _wait_for_nodes(Client(parse_address(demo.cluster)), 4)
    top = _run("top", "--cluster", demo.cluster, "--once", "--interval", "100ms")
    assert view["simulated"] is True
    assert {node["name"] for node in view["nodes"]} == names
    assert any("instances" in gpu for node in view["nodes"] for gpu in node["gpus"])
    assert top.returncode == 0, top.stderr
    assert top.stdout.startswith("NODE ")
    assert names <= {line.split()[0] for line in top.stdout.splitlines()}


def test_cluster_over_exporters_one_of_them_dead(demo: Demo, tmp_path: Path) -> None:
    arguments = (*CLUSTER, "--scrape", f"{demo.exporter},http://127.0.0.1:1")
    with podgpu(arguments, tmp_path) as cluster:
        view = _wait_for_nodes(cluster.client, 1)
        cluster.stop()
    assert any("nothing listens there" in note for note in view["notes"])
    assert (view["simulated"], [node["simulated"] for node in view["nodes"]]) == (True, [True])


@needs("prometheus", "promtool")
def test_the_map_by_way_of_prometheus_is_the_one_by_scraping(tmp_path: Path, demo: Demo) -> None:
    scraping = Client(parse_address(demo.cluster))
    _wait_for_nodes(scraping, 4)
    exporters = re.findall(
        r'target_up\{target="http://(\S+)/metrics"\} 1', scraping.ask("/metrics").text
    )
    jobs = {"job_name": "gpus", "honor_labels": True, "static_configs": [{"targets": exporters}]}
    configuration = json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [jobs]})
    with (
        prometheus(tmp_path, configuration=configuration) as server,
        podgpu((*CLUSTER, "--prometheus", server), tmp_path) as cluster,
    ):
        wanted = _lines(scraping)
        wait_until(lambda: _lines(cluster.client) == wanted, "both have the same map")
        view = _wait_for_nodes(cluster.client, 4)
    assert (view["simulated"], [node["simulated"] for node in view["nodes"]]) == (True, [True] * 4)
    assert len(exporters) == 4
    assert any(line.startswith("pod_and_gpu_map_info{") for line in wanted)
    assert 'podgpu_node_gpus{node="node-3",model="NVIDIA H200"} 4' in wanted


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PODGPU, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def _url(process: subprocess.Popen[str], name: str) -> str:
    """Returns host and port of the URL on the line that begins with this name."""
    assert process.stdout is not None
    for line in process.stdout:
        assert "WARNING" not in line, "the demo starts without warnings"
        if line.strip().startswith(name) and (found := re.search(r"http://(\S+?)/\s", line)):
            return found[1]
    raise AssertionError("the demo ended without a word about it")


def _wait_for_nodes(client: Client, number: int) -> dict[str, Any]:
    view: dict[str, Any] = {}

    def has_nodes() -> bool:
        view.update(json.loads(client.ask("/api/v1/view").body))
        return len(view["nodes"]) >= number

    wait_until(has_nodes, f"{number} nodes are read")
    return view


def _lines(client: Client) -> list[str]:
    """Returns the series that do not change while the same pods run. The plain node is left out."""
    steady = (
        "pod_and_gpu_map_info{",
        "podgpu_node_gpus{",
        "podgpu_node_allocated_gpus{",
        "podgpu_node_free_gpus{",
    )
    lines = client.ask("/metrics").text.splitlines()
    return [line for line in lines if line.startswith(steady) and "workstation-1" not in line]
