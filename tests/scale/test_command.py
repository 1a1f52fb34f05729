"""`podgpu autoscale`: its options, and the process with an exporter, an API server and KEDA."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from podgpu.cli.main import run
from podgpu.scale import externalscaler_pb2 as pb
from tests.certificates import Certificates
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import eventually
from tests.net import read_if_ready, serving
from tests.scale.test_pods import pod_object

SCRAPE = ["--scrape", "http://127.0.0.1:9/metrics"]
CERTIFICATE = ["--api-cert-file", "/nowhere.crt", "--api-key-file", "/nowhere.key"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "podgpu autoscale needs a source: give exactly one of"),
        ([*SCRAPE, "--keda-address", ":9411"], "needs all of --keda-cert-file"),
        ([*SCRAPE, "--keda-cert-file", "/x"], "needs all of --keda-cert-file"),
        ([*SCRAPE, "--keda-client-name", "keda"], "needs all of --keda-cert-file"),
        ([*SCRAPE, "--keda-address", "none"], "there is nothing to serve"),
        ([*SCRAPE, "--api-address", ":6443"], "needs a certificate"),
        ([*SCRAPE, "--api-address", ":6443", "--api-cert-file", "/x"], "needs a certificate"),
        (
            [*SCRAPE, "--api-address", ":6443", "--api-service", "a/b", *CERTIFICATE],
            "needs a certificate",
        ),
        (
            [*SCRAPE, "--api-address", ":6443", "--api-service", "b", "--kubeconfig", "KUBECONFIG"],
            "must be NAMESPACE/NAME",
        ),
        (
            [*SCRAPE, "--api-address", ":6443", *CERTIFICATE, "--kubeconfig", "KUBECONFIG"],
            "/nowhere.crt",
        ),
        ([*SCRAPE, "--api-service", "a/b"], "have no effect if --api-address is none"),
        ([*SCRAPE, "--longest-window", "24h", "--interval", "1s"], "--longest-window"),
        ([*SCRAPE, "--kubeconfig", "/nowhere"], "/nowhere"),
        ([*SCRAPE, "--probe-address", "9410"], "must be HOST:PORT"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kubeconfig = written_kubeconfig(tmp_path, "http://127.0.0.1:9")
    assert (
        run(["autoscale", *(kubeconfig if word == "KUBECONFIG" else word for word in arguments)])
        == 2
    )
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


@contextmanager
def exporter(folder: Path, node: str = "n1", percent: int = 60) -> Iterator[ThreadingHTTPServer]:
    """Serves one GPU that is held by the pod `a`."""
    labels = (
        f'gpu="0",UUID="GPU-{node}",Hostname="{node}",namespace="serving",pod="a",container="main"'
    )
    folder.mkdir(exist_ok=True)
    (folder / "metrics").write_text(
        f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {percent}\n"
        f"podgpu_container_gpu_utilization_ratio{{{labels}}} {percent / 100}\n"
    )
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with serving(server := ThreadingHTTPServer(("127.0.0.1", 0), handler)):
        yield server


@pytest.mark.fault(
    "podgpu autoscale loses its exporters while KEDA polls",
    "calls end with an error that names the pods, none with 0; the process stays up",
)
def test_the_whole_process_answers_and_has_a_reason_when_the_exporter_is_gone(
    tmp_path: Path, certificates: Certificates
) -> None:
    """The pod's former node n0 still reports the pod, with 0 %."""
    with (
        SimulatedApiServer() as server,
        exporter(tmp_path / "n1") as scraped,
        exporter(tmp_path / "n0", "n0", 0) as old,
    ):
        server.put(
            "pods",
            pod_object("a"),
            pod_object("web") | {"spec": {"nodeName": "n0", "containers": []}},
        )
        proxy = {
            "requestheader-client-ca-file": certificates.text("ca.crt"),
            "requestheader-allowed-names": '["client"]',
        }
        metadata = {"name": "extension-apiserver-authentication", "namespace": "kube-system"}
        server.put("configmaps", {"metadata": metadata, "data": proxy})
        command = [sys.executable, "-m", "podgpu", "autoscale", "--interval", "250ms"]
        command += ["--api-address", "127.0.0.1:0", "--api-service", "podgpu/podgpu-autoscale"]
        command += [
            "--scrape",
            ",".join(f"http://127.0.0.1:{each.server_port}/metrics" for each in (scraped, old)),
        ]
        command += [
            "--kubeconfig",
            written_kubeconfig(tmp_path, server.url),
            "--probe-address",
            "127.0.0.1:0",
        ]
        command += [
            "--keda-address",
            "127.0.0.1:0",
            "--stale-after",
            "1s",
            "--longest-window",
            "1m",
        ]
        log = tmp_path / "log"
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=output) as process,
        ):
            try:
                eventually(
                    lambda: process.poll() is not None or "metrics API on" in log.read_text()
                )
                (keda,) = re.findall(
                    r"external scaler on grpc://(127\.0\.0\.1:\d+)", log.read_text()
                )
                (plain,) = re.findall(
                    r"own metrics on (http://127\.0\.0\.1:\d+)/metrics", log.read_text()
                )
                (api,) = re.findall(r"metrics API on (https://127\.0\.0\.1:\d+)", log.read_text())
                eventually(lambda: get_pod_values(api, certificates) == {"a": "60"})
                check_answers(keda, plain, scraped)
                assert process.poll() is None
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()
    assert (
        log.read_text().count(
            "the exporter on n0 reports the pod serving/a, but that pod runs on n1"
        )
        == 1
    )


def get_pod_values(api: str, certificates: Certificates) -> dict[str, str]:
    """Returns the values that the HPA would get, or nothing until there are values."""
    context = certificates.client("client")
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # podgpu created the certificate
    selector = "metricLabelSelector=window%3D1s"
    url = f"{api}/apis/custom.metrics.k8s.io/v1beta2/namespaces/serving/pods/*/gpu_utilization?{selector}"
    answer = read_if_ready(url, context)
    if answer is None:
        return {}
    items = json.loads(answer)["items"]
    return {item["describedObject"]["name"]: item["value"] for item in items}


def check_answers(keda: str, plain: str, scraped: ThreadingHTTPServer) -> None:
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

        eventually(lambda: outcome()[0] == 60)
        assert (
            b'podgpu_autoscale_requests_total{api="keda GetMetrics",code="OK"}'
            in urlopen(f"{plain}/metrics").read()
        )
        assert urlopen(f"{plain}/ready").read() == b"OK\n"
        scraped.shutdown()
        scraped.server_close()
        outcomes = [outcome()]
        eventually(lambda: outcomes.append(outcome()) or outcomes[-1][0] < 0)
        assert {value for value, _ in outcomes} <= {60, -1}
        assert "a on n1" in outcomes[-1][1]
        assert urlopen(f"{plain}/ready").read() == b"OK\n"
