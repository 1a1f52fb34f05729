"""The pods that podgpu autoscale watches."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.clock import Clock
from podgpu.kube.config import ApiConfig
from podgpu.scale.pods import PodWatcher, parse_running_pod
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import HURRY, eventually


def pod_object(name: str, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            **{
                "name": name,
                "namespace": "serving",
                "labels": {"app": "inference", "pod-template-hash": "5d9"},
            },
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": "inference-5d9", "controller": True}
            ],
            **metadata,
        },
        "spec": {
            "nodeName": "n1",
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        },
        "status": {"phase": phase, "startTime": "2026-01-01T00:00:00Z"},
    }


def test_running_pods_have_owner_and_labels() -> None:
    with SimulatedApiServer() as server:
        server.put(
            "pods", pod_object("a"), pod_object("b", "Pending"), pod_object("c", "Succeeded")
        )
        server.put("pods", pod_object("going", deletionTimestamp="2026-01-01T00:00:00Z"))
        watcher = PodWatcher(ApiConfig(server.url, "the test"), HURRY)
        try:
            (seen,) = watcher.current().by_key.values()
            assert seen.owner == ("Deployment", "inference")
            assert (seen.name, seen.node, seen.requests_gpu, seen.started_at) == (
                "a",
                "n1",
                True,
                1767225600.0,
            )
            server.put("pods", pod_object("b"))
            eventually(lambda: len(watcher.current().by_key) == 2)
        finally:
            watcher.informer.close()


@pytest.mark.parametrize("annotation", ["gpu-fraction", "gpu-memory", "other"])
def test_pods_of_kai_scheduler_request_gpus_by_annotation(annotation: str) -> None:
    body = pod_object("a", uid="u", annotations={annotation: "1"}) | {
        "spec": {"containers": [{"name": "main"}]}
    }
    seen = parse_running_pod(body)
    assert seen is not None
    assert seen.requests_gpu == (annotation != "other")


@pytest.mark.fault(
    "the API server is away from podgpu autoscale for more than a minute",
    "the running pods are unknown: every metric is refused until it is back",
)
def test_the_list_of_pods_is_used_for_a_minute_without_the_api_server() -> None:
    seconds = [0.0]
    with SimulatedApiServer() as server:
        server.put("pods", pod_object("a"))
        watcher = PodWatcher(
            ApiConfig(server.url, "the test"), HURRY, Clock(monotonic=lambda: seconds[0])
        )
        try:
            assert watcher.informer.wait_synced(30)
            server.stop()
            eventually(lambda: watcher.informer.error)
            assert (len(watcher.current().by_key), watcher.current().trouble) == (1, "")
            seconds[0] = 60.0
            assert watcher.current().trouble == ""
            seconds[0] = 61.0
            assert (
                "the list of running pods could not be updated for 61 s"
                in watcher.current().trouble
            )
            server.start()
            eventually(lambda: watcher.current().by_key and not watcher.current().trouble)
        finally:
            watcher.informer.close()


def test_pods_are_unknown_until_the_api_server_lists_them() -> None:
    watcher = PodWatcher(ApiConfig("http://127.0.0.1:9", "the test"), HURRY)
    try:
        eventually(lambda: watcher.informer.error)
        assert "nothing listens there" in watcher.current().trouble
    finally:
        watcher.informer.close()
