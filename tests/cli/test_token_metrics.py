"""`podgpu cluster --token-metrics pods`: from the pods' engines to the bill."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.model import DeviceState, Holder, HolderUsage, NodeState, encode_node
from tests.kube.api_server import SimulatedApiServer
from tests.net import QuietHandler, serving
from tests.nodes.clock import wait_until
from tests.nodes.node import kubeconfig
from tests.process import CLUSTER, podgpu

START = time.time()


class _Server(QuietHandler, BaseHTTPRequestHandler):
    """An exporter and an engine: counters are those of the seconds since the start."""

    def do_GET(self) -> None:
        seconds = time.time() - START
        if self.path == "/api/v1/node":
            self.send(_node(seconds), "application/json")
        elif self.path == "/metrics":
            tokens = round(1000 * seconds)
            text = f'vllm:generation_tokens_total{{model_name="llama"}} {tokens}\n'
            self.send(text.encode(), "text/plain")
        else:
            self.send_error(404)

    def send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _node(seconds: float) -> bytes:
    nanoseconds = round(seconds * 1e9)
    usage = HolderUsage(
        utilization_ratio=1.0,
        allocated_ns=nanoseconds,
        busy_ns=nanoseconds,
        idle_ns=0,
        energy_mj=round(seconds * 500_000),
    )
    holder = Holder("ml", "chat", "main", source="kubelet", usage=usage)
    gpu = DeviceState(
        uuid="GPU-0",
        index=0,
        model="NVIDIA H100 80GB HBM3",
        utilization_ratio=1.0,
        holders=(holder,),
    )
    state = NodeState(
        producer="podgpu", node="n1", exporter_id="a", taken_at=time.time(), devices=(gpu,)
    )
    return encode_node(state)


def _pod(port: int) -> dict[str, Any]:
    container = {"name": "main", "ports": [{"containerPort": port, "name": "http"}]}
    return {
        "metadata": {"name": "chat", "namespace": "ml"},
        "spec": {"containers": [container]},
        "status": {"podIP": "127.0.0.1"},
    }


@contextmanager
def _cluster(folder: Path) -> Iterator[Any]:
    with serving(_Server) as port, SimulatedApiServer() as api_server:
        api_server.put("pods", _pod(port))
        config = folder / "kubeconfig"
        config.write_text(kubeconfig(api_server.url), encoding="utf-8")
        arguments = ["--scrape", f"127.0.0.1:{port}", "--prices", "example"]
        arguments += ["--token-metrics", "pods", "--kubeconfig", str(config), "--export-tokens"]
        with podgpu([*CLUSTER, *arguments], folder) as process:
            yield process.client


def test_tokens_reach_the_page_and_the_bill(tmp_path: Path) -> None:
    with _cluster(tmp_path) as client:

        def read_row() -> dict[str, Any]:
            rows = json.loads(client.ask("/api/v1/range?range=1h&by=model").body)["rows"]
            return next((row for row in rows if row.get("generated_tokens")), {})

        # The first seconds are those before the engine was found.
        wait_until(lambda: read_row().get("generated_tokens", 0) > 8000)
        row = read_row()
        assert (row["namespace"], row["model"]) == ("ml", "llama")
        assert row["tokens"]["cost_per_million"]["total"] > 0
        assert row["tokens"]["per_used_gpu_second"] == pytest.approx(1000, rel=0.5)
        assert row["tokens"]["joules_per_token"] == pytest.approx(0.5, rel=0.5)
        pod = json.loads(client.ask("/api/v1/pods/ml/chat").body)
        (holder,) = pod["nodes"][0]["gpus"][0]["holders"]
        assert (holder["engine"]["engine"], holder["engine"]["model"]) == ("vllm", "llama")

        labels = 'namespace="ml",pod="chat",container="main"'
        exported = client.ask("/metrics").text
        counted = f'podgpu_container_llm_tokens_total{{kind="generation",{labels}}} '
        [count] = [line for line in exported.splitlines() if line.startswith(counted)]
        assert float(count.rsplit(" ")[-1]) >= row["generated_tokens"] > 0
        assert f'podgpu_container_llm_tokens_total{{kind="prompt",{labels}}} 0' in exported


def test_tokens_are_exported_only_if_podgpu_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("--scrape", "--prometheus"):
        assert run(["cluster", source, "http://b", "--export-tokens"]) == 2
        assert "--export-tokens needs --token-metrics pods" in capsys.readouterr().err


def test_tokens_are_read_from_pods_or_from_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cluster", "--prometheus", "http://b", "--token-metrics", "pods"]
    assert run(arguments) == 2
    assert "--token-metrics pods cannot be combined with --prometheus" in capsys.readouterr().err


def test_an_api_server_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cluster", "--scrape", "http://a", "--owners", "none", "--token-metrics", "pods"]
    assert run([*arguments, "--kubeconfig", "/nowhere"]) == 2
    assert "--token-metrics pods cannot read the kubeconfig" in capsys.readouterr().err
