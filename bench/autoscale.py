"""What autoscalers cost `podgpu autoscale`: one question about 5,000 pods; 100 HPAs and 100 ScaledObjects that poll.

A process of its own holds ten minutes of rounds of 625 nodes of 8 GPUs, a pod on each, of 100 Deployments. The HPAs ask
for each pod of a Deployment over HTTP, the ScaledObjects for the metric and whether it is active over gRPC, as KEDA
does every 15 s; judged is the process's CPU time. TLS and the API server's reviews are not in it.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import grpc

from bench.autoscale_process import WORKLOADS
from bench.figures import Figure
from bench.running import cpu_seconds_of, memory_of
from podgpu.autoscale import externalscaler_pb2 as pb

PODS = 5000
MOST_QUERY_MS = 50
MOST_CORE_PERCENT = 5.0
MOST_MIB = 100
POLLING_SECONDS = 15.0
_PATH = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/serving"
_ROOT = Path(__file__).parents[1]


def measure(pods: int = PODS, queries: int = 20, polls: int = 4) -> list[Figure]:
    command = [sys.executable, "-m", "bench.autoscale_process", str(pods)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        started = json.loads(process.stdout.readline())
        pid = process.pid
        connection = http.client.HTTPConnection("127.0.0.1", started["http"], timeout=30)
        each = [
            _cost(pid, connection, f"{_PATH}/pods/*/gpu_utilization?labelSelector=all%3Dpods", pods)
            for _ in range(queries)
        ]
        one = [_cost(pid, connection, f"{_PATH}/metrics/gpu_utilization", 1) for _ in range(queries)]
        cost = [_poll(pid, connection, started["grpc"]) for _ in range(polls)]
        rss = memory_of(pid).rss
        connection.close()
        process.stdin.close()
    return [
        Figure(f"each of {pods} pods, by label", median(each), "ms", MOST_QUERY_MS),
        Figure(f"the mean over {pods} pods", median(one), "ms", MOST_QUERY_MS),
        Figure(
            "100 HPAs and 100 ScaledObjects", 100 * median(cost) / POLLING_SECONDS, "% of a core", MOST_CORE_PERCENT
        ),
        Figure("resident memory", rss, "MiB", MOST_MIB),
        Figure("a round taken in", 1000 * started["take_seconds"], "ms"),
    ]


def _cost(pid: int, connection: http.client.HTTPConnection, path: str, items: int) -> float:
    """Milliseconds of the process's CPU time: what an answer takes on a machine that has nothing else to do."""
    began = cpu_seconds_of(pid)
    connection.request("GET", path)
    body = connection.getresponse().read()
    took = 1000 * (cpu_seconds_of(pid) - began)
    found = json.loads(body)["items"]
    assert len(found) == items, f"{len(found)} of {items} items"
    return took


def _poll(pid: int, connection: http.client.HTTPConnection, port: int) -> float:
    """CPU seconds of what all of them ask in one polling interval."""
    began = cpu_seconds_of(pid)
    for number in range(WORKLOADS):
        connection.request("GET", f"{_PATH}/pods/*/gpu_utilization?labelSelector=app%3Dinference-{number}")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        get_metrics = _call(channel, "GetMetrics", pb.GetMetricsRequest, pb.GetMetricsResponse)
        is_active = _call(channel, "IsActive", pb.ScaledObjectRef, pb.IsActiveResponse)
        for number in range(WORKLOADS):
            metadata = {"owner": f"Deployment/inference-{number}", "target": "60", "window": "5m"}
            scaled = pb.ScaledObjectRef(name="x", namespace="serving", scalerMetadata=metadata)
            get_metrics(pb.GetMetricsRequest(scaledObjectRef=scaled))
            is_active(scaled)
    return cpu_seconds_of(pid) - began


def _call(channel: grpc.Channel, method: str, request: type, answer: type) -> grpc.UnaryUnaryMultiCallable:
    path = f"/externalscaler.ExternalScaler/{method}"
    return channel.unary_unary(path, request.SerializeToString, answer.FromString)
