"""`podgpu autoscale`: its options, its watchers, and the whole process between an exporter, an API server and KEDA."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from podgpu.autoscale import externalscaler_pb2 as pb
from podgpu.autoscale.pods import NodeWatcher, PodWatcher
from podgpu.cli.main import run
from podgpu.clock import Clock
from podgpu.kube.config import ApiConfig
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import HURRY, eventually

SCRAPE = ["--scrape", "http://127.0.0.1:9/metrics"]
CERTIFICATE = ["--api-cert-file", "/nowhere.crt", "--api-key-file", "/nowhere.key"]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "podgpu autoscale needs somewhere to read from: give exactly one of"),
        ([*SCRAPE, "--keda-address", ":9411"], "can be reached by other machines"),
        ([*SCRAPE, "--keda-address", "0.0.0.0:9411", "--keda-namespaces", "a"], "can be reached by other machines"),
        ([*SCRAPE, "--keda-cert-file", "/x"], "need all of --keda-cert-file"),
        ([*SCRAPE, "--keda-client-name", "keda"], "need all of --keda-cert-file"),
        ([*SCRAPE, "--keda-address", "none"], "there is nothing to serve"),
        ([*SCRAPE, "--api-address", ":6443"], "needs a certificate"),
        ([*SCRAPE, "--api-address", ":6443", "--api-cert-file", "/x"], "alone is not enough"),
        ([*SCRAPE, "--api-address", ":6443", "--api-service", "a/b", *CERTIFICATE], "keep one"),
        (
            [*SCRAPE, "--api-address", ":6443", "--api-service", "b", "--kubeconfig", "KUBECONFIG"],
            "write NAMESPACE/NAME",
        ),
        ([*SCRAPE, "--api-address", ":6443", *CERTIFICATE, "--kubeconfig", "KUBECONFIG"], "/nowhere.crt"),
        ([*SCRAPE, "--api-service", "a/b"], "needs --api-address"),
        ([*SCRAPE, "--longest-window", "24h", "--interval", "1s"], "--longest-window"),
        ([*SCRAPE, "--kubeconfig", "/nowhere"], "/nowhere"),
        ([*SCRAPE, "--probe-address", "9410"], "not an address"),
        (["--unregister"], "--api-service"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kubeconfig = written_kubeconfig(tmp_path, "http://127.0.0.1:9")
    assert run(["autoscale", *(kubeconfig if word == "KUBECONFIG" else word for word in arguments)]) == 2
    text = capsys.readouterr().err
    assert complaint in text
    assert text.splitlines()[-1].startswith("podgpu: ")


def written_kubeconfig(folder: Path, url: str) -> str:
    path = folder / "kubeconfig"
    path.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        f"clusters: [{{name: c, cluster: {{server: '{url}'}}}}]\n"
        "users: [{name: c, user: {}}]\ncontexts: [{name: c, context: {cluster: c, user: c}}]\n"
    )
    return str(path)


# The watchers


def pod_object(name: str, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            **{"name": name, "namespace": "serving", "labels": {"app": "inference", "pod-template-hash": "5d9"}},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "inference-5d9", "controller": True}],
            **metadata,
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
        "status": {"phase": phase, "startTime": "2026-01-01T00:00:00Z"},
    }


def test_running_pods_have_owner_and_labels() -> None:
    with SimulatedApiServer() as server:
        server.put("pods", pod_object("a"), pod_object("b", "Pending"), pod_object("c", "Succeeded"))
        server.put("pods", pod_object("going", deletionTimestamp="2026-01-01T00:00:00Z"))
        watcher = PodWatcher(ApiConfig(server.url, "the test"), HURRY)
        nodes = NodeWatcher(ApiConfig(server.url, "the test"), HURRY)
        try:
            assert watcher.wait_synced(30)
            (seen,) = watcher.current().by_owner["serving", "Deployment", "inference"]
            assert (seen.name, seen.node, seen.requests_gpu, seen.started_at) == ("a", "n1", True, 1767225600.0)
            server.put("pods", pod_object("b"))
            eventually(lambda: len(watcher.current().by_key) == 2)
            server.put("nodes", {"metadata": {"name": "n1", "labels": {"zone": "a"}}})
            eventually(lambda: nodes.current() == {"n1": (("zone", "a"),)})
        finally:
            watcher.close()
            nodes.close()


def test_pods_are_unknown_until_the_api_server_lists_them() -> None:
    watcher = PodWatcher(ApiConfig("http://127.0.0.1:9", "the test"), HURRY)
    try:
        eventually(lambda: watcher.error)
        assert "nothing listens there" in watcher.current().trouble
    finally:
        watcher.close()


@pytest.mark.fault(
    "the API server is away from podgpu autoscale for more than a minute",
    "the running pods are unknown: every metric is refused until it is back",
)
def test_the_list_of_pods_is_used_for_a_minute_without_the_api_server() -> None:
    seconds = [0.0]
    with SimulatedApiServer() as server:
        server.put("pods", pod_object("a"))
        watcher = PodWatcher(ApiConfig(server.url, "the test"), HURRY, Clock(monotonic=lambda: seconds[0]))
        try:
            assert watcher.wait_synced(30)
            server.stop()
            eventually(lambda: watcher.error)
            assert (len(watcher.current().by_key), watcher.current().trouble) == (1, "")
            seconds[0] = 60.0
            assert watcher.current().trouble == ""
            seconds[0] = 61.0
            assert "the running pods have not been known for 61 s" in watcher.current().trouble
            server.start()
            eventually(lambda: watcher.current().by_key and not watcher.current().trouble)
        finally:
            watcher.close()


# The whole process


class Exporter:
    """Reports one GPU, held by the pod `a`."""

    def __init__(self) -> None:
        self.utilization = 0.6
        exporter = self

        class Exposition(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                labels = 'gpu="0",UUID="GPU-0",Hostname="n1",namespace="serving",pod="a",container="main"'
                text = f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {100 * exporter.utilization:.0f}\n"
                text += f"podgpu_container_gpu_utilization_ratio{{{labels}}} {exporter.utilization}\n"
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_words: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Exposition)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.fault(
    "podgpu autoscale loses its exporters while KEDA polls",
    "calls end with an error that names the pods, none with 0; the process stays up",
)
def test_the_whole_process_answers_keda_and_has_a_reason_when_the_exporter_is_gone(tmp_path: Path) -> None:
    exporter = Exporter()
    with SimulatedApiServer() as server:
        server.put("pods", pod_object("a"))
        command = [sys.executable, "-m", "podgpu", "autoscale", "--scrape", exporter.url, "--interval", "250ms"]
        command += ["--kubeconfig", written_kubeconfig(tmp_path, server.url), "--probe-address", "127.0.0.1:0"]
        command += [
            "--keda-address",
            "127.0.0.1:0",
            "--keda-namespaces",
            "serving",
            "--stale-after",
            "1s",
            "--longest-window",
            "1m",
        ]
        log = tmp_path / "log"
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                eventually(lambda: process.poll() is not None or "probes and own metrics" in log.read_text(), 30)
                (keda,) = re.findall(r"external scaler on grpc://(127\.0\.0\.1:\d+)", log.read_text())
                (plain,) = re.findall(r"own metrics on (http://127\.0\.0\.1:\d+)/metrics", log.read_text())
                check_answers(keda, plain, exporter)
                assert process.poll() is None
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()


def check_answers(keda: str, plain: str, exporter: Exporter) -> None:
    metadata = {"owner": "Deployment/inference", "target": "50", "window": "1s"}
    scaled = pb.ScaledObjectRef(name="x", namespace="serving", scalerMetadata=metadata)
    with grpc.insecure_channel(keda) as channel:
        get_metrics = channel.unary_unary(
            "/externalscaler.ExternalScaler/GetMetrics",
            pb.GetMetricsRequest.SerializeToString,
            pb.GetMetricsResponse.FromString,
        )

        def outcome() -> tuple[float, str]:
            try:
                answer = get_metrics(pb.GetMetricsRequest(scaledObjectRef=scaled), timeout=30)
            except grpc.RpcError as error:
                return -1.0, error.details()
            return round(answer.metricValues[0].metricValueFloat), ""

        eventually(lambda: outcome()[0] == 60, 20)
        assert b'podgpu_autoscale_requests_total{api="keda GetMetrics",code="OK"}' in urlopen(f"{plain}/metrics").read()
        assert urlopen(f"{plain}/ready").read() == b"OK\n"
        exporter.close()
        outcomes: list[tuple[float, str]] = []

        def is_refused() -> bool:
            outcomes.append(outcome())
            return outcomes[-1][0] < 0

        eventually(is_refused, 20)
        assert {value for value, _ in outcomes} <= {60, -1}
        assert "a on n1" in outcomes[-1][1]
        assert urlopen(f"{plain}/ready").read() == b"OK\n"
