"""What autoscalers cost `podgpu autoscale`: one question about 5,000 pods; 100 HPAs and 100 ScaledObjects that poll.

A process of its own holds ten minutes of rounds of 625 nodes of 8 GPUs, a pod on each, of 100 Deployments. The HPAs ask
for each pod of a Deployment as the API server's front proxy passes it on: TLS 1.3 with its certificate, ten connections
made anew, and for each a SubjectAccessReview, which a double answers from here. The ScaledObjects ask over gRPC with
client certificates, each twice for the metric and whether it is active: KEDA's operator does, and once more for KEDA's
own HPA. Judged is the process's CPU time.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import grpc

from bench.autoscale_process import WORKLOADS, namespace_of
from bench.figures import Figure
from bench.running import cpu_seconds_of, memory_of
from podgpu.autoscale import externalscaler_pb2 as pb
from tests.autoscale.api_double import ApiDouble
from tests.autoscale.authorities import Authorities, make_authorities

PODS = 5000
MOST_QUERY_MS = 50
MOST_CORE_PERCENT = 5.0
MOST_MIB = 100
POLLING_SECONDS = 15.0
_CONNECTIONS = 10
_PATH = "/apis/custom.metrics.k8s.io/v1beta2/namespaces"
_ROOT = Path(__file__).parents[1]


def measure(pods: int = PODS, queries: int = 20, polls: int = 4) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, _reviewer() as api:
        authorities = make_authorities(Path(folder))
        with _running(pods, 1, authorities, api) as asked:
            path = f"{_PATH}/{namespace_of(0, 1)}"
            each = [asked.cost(f"{path}/pods/*/gpu_utilization?labelSelector=all%3Dpods", pods) for _ in range(queries)]
            mean = [asked.cost(f"{path}/metrics/gpu_utilization", 1) for _ in range(queries)]
        with _running(pods, WORKLOADS, authorities, api) as asked:
            costs = [asked.poll(turn) for turn in range(polls)]
            rss, take_seconds = memory_of(asked.pid).rss, asked.take_seconds
    return [
        Figure(f"each of {pods} pods, by label", median(each), "ms", MOST_QUERY_MS),
        Figure(f"the mean over {pods} pods", median(mean), "ms", MOST_QUERY_MS),
        Figure(
            "100 HPAs and 100 ScaledObjects", 100 * median(costs) / POLLING_SECONDS, "% of a core", MOST_CORE_PERCENT
        ),
        Figure("resident memory", rss, "MiB", MOST_MIB),
        Figure("a round taken in", 1000 * take_seconds, "ms"),
    ]


@contextmanager
def _reviewer() -> Iterator[ApiDouble]:
    """Answers reviews, on a thread of this process."""
    double, loop, stop = ApiDouble(), asyncio.new_event_loop(), threading.Event()
    is_running = threading.Event()

    async def run() -> None:
        async with double.running():
            is_running.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert is_running.wait(30), "the double does not start"
        yield double
    finally:
        stop.set()
        thread.join()
        loop.close()


@contextmanager
def _running(pods: int, namespaces: int, authorities: Authorities, api: ApiDouble) -> Iterator[_Asked]:
    command = [sys.executable, "-m", "bench.autoscale_process", str(pods), str(namespaces)]
    command += [str(authorities.folder), api.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        ports = json.loads(process.stdout.readline())
        yield _Asked(process.pid, ports["https"], ports["grpc"], ports["take_seconds"], authorities, api)
        process.stdin.close()


class _Asked(NamedTuple):
    """The process that is measured."""

    pid: int
    https: int
    grpc: int
    take_seconds: float
    authorities: Authorities
    api: ApiDouble

    def cost(self, path: str, items: int) -> float:
        """Milliseconds of the process's CPU time: what an answer takes on a machine that has nothing else to do."""
        self.api.allowed = {("hpa", "pods"), ("hpa", "metrics")}
        connection = self._front_proxy()
        _get(connection, path, "hpa")  # the handshake, and the review
        began = cpu_seconds_of(self.pid)
        body = _get(connection, path, "hpa")
        took = 1000 * (cpu_seconds_of(self.pid) - began)
        connection.close()
        found = json.loads(body)["items"]
        assert len(found) == items, f"{len(found)} of {items} items"
        return took

    def poll(self, turn: int) -> float:
        """CPU seconds of what all of them ask in one polling interval. Each turn has a user of its own: what was
        allowed in the last one is forgotten after ten seconds of the fifteen."""
        user, reviewed = f"hpa-{turn}", len(self.api.reviews)
        self.api.allowed = {(user, "pods")}
        began = cpu_seconds_of(self.pid)
        for first in range(_CONNECTIONS):
            connection = self._front_proxy()
            for number in range(first, WORKLOADS, _CONNECTIONS):
                selector = f"labelSelector=app%3Dinference-{number}"
                namespace = namespace_of(number, WORKLOADS)
                _get(connection, f"{_PATH}/{namespace}/pods/*/gpu_utilization?{selector}", user)
            connection.close()
        self._poll_as_keda()
        took = cpu_seconds_of(self.pid) - began
        assert len(self.api.reviews) - reviewed == WORKLOADS, "a review for every HPA"
        return took

    def _front_proxy(self) -> http.client.HTTPSConnection:
        tls = self.authorities.client("aggregator")
        return http.client.HTTPSConnection("127.0.0.1", self.https, timeout=30, context=tls)

    def _poll_as_keda(self) -> None:
        files = [self.authorities.read(name) for name in ("serving.crt", "alice.key", "alice.crt")]
        with grpc.secure_channel(f"127.0.0.1:{self.grpc}", grpc.ssl_channel_credentials(*files)) as channel:
            get_metrics = _call(channel, "GetMetrics", pb.GetMetricsRequest, pb.GetMetricsResponse)
            is_active = _call(channel, "IsActive", pb.ScaledObjectRef, pb.IsActiveResponse)
            for number in (*range(WORKLOADS), *range(WORKLOADS)):
                metadata = {"owner": f"Deployment/inference-{number}", "target": "60", "window": "5m"}
                namespace = namespace_of(number, WORKLOADS)
                scaled = pb.ScaledObjectRef(name="x", namespace=namespace, scalerMetadata=metadata)
                get_metrics(pb.GetMetricsRequest(scaledObjectRef=scaled))
                is_active(scaled)


def _get(connection: http.client.HTTPSConnection, path: str, user: str) -> bytes:
    headers = {"X-Remote-User": user, "X-Remote-Group": "system:authenticated"}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, body
    return body


def _call(channel: grpc.Channel, method: str, request: type, answer: type) -> grpc.UnaryUnaryMultiCallable:
    path = f"/externalscaler.ExternalScaler/{method}"
    return channel.unary_unary(path, request.SerializeToString, answer.FromString)
