"""Two processes of `podgpu exporter --write` on one node, and a simulated API server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.writers.health_writer import INTERVAL
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import wait_until
from tests.nodes.node import kubeconfig
from tests.process import NO_LOGS, podgpu

GPU = "GPU-11111111-2222-3333-4444-555555555555"
LABELS = f'gpu="0",UUID="{GPU}",modelName="H100"'
FIELDS = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_ROW_REMAP_FAILURE")


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        running.put("nodes", {"metadata": {"name": "node-1"}, "status": {}})
        yield running


class Files:
    """What the exporters read of the node."""

    def __init__(self, folder: Path, server: SimulatedApiServer) -> None:
        self._metrics = folder / "dcgm.prom"
        self.set_failure(0)
        podlist = folder / "podlist.json"
        holder = {"name": "train-0", "namespace": "team", "container": "main", "gpu_list": [GPU]}
        podlist.write_text(json.dumps([holder | {"uid": "uid-train-0"}]))
        config = folder / "kubeconfig"
        config.write_text(kubeconfig(server.url))
        self.arguments = (
            *("exporter", "-k", "--write", "events,condition", "--kubeconfig", str(config)),
            *("--telemetry", f"exporter:{self._metrics}", "-c", "200ms", *NO_LOGS),
            *("--allocation", f"podlist:{podlist}", "--allocation-interval", "200ms"),
            *("--pod-resources-kubelet-socket", str(folder / "kubelet.sock")),
        )

    def set_failure(self, value: int) -> None:
        lines = [f"{name}{{{LABELS}}} {value}\n" for name in FIELDS]
        temporary = self._metrics.with_suffix(".new")
        temporary.write_text("".join(lines))
        temporary.replace(self._metrics)


def condition(server: SimulatedApiServer) -> dict[str, Any]:
    [node] = server.objects("nodes")
    found: dict[str, Any] = next(iter(node["status"].get("conditions", [])), {})
    return found


def events(server: SimulatedApiServer) -> list[tuple[str, str, int]]:
    return sorted(
        (event["reason"], event["involvedObject"]["kind"], event["count"])
        for event in server.objects("events")
    )


def test_one_writes_and_the_other_takes_over(tmp_path: Path, server: SimulatedApiServer) -> None:
    files = Files(tmp_path, server)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with podgpu(files.arguments, folders[0]) as first:
        wait_until(lambda: condition(server).get("status") == "False", "the GPU is healthy")
        with podgpu(files.arguments, folders[1]) as second:
            files.set_failure(1)
            broken = [("GpuUnhealthy", "Node", 1), ("GpuUnhealthy", "Pod", 1)]
            wait_until(lambda: events(server) == broken, "Events")
            wait_until(lambda: condition(server)["status"] == "True", "the condition")
            assert condition(server)["reason"] == "GpuRowRemapFailure"
            page = second.client.ask("/metrics")
            assert page.status == 200

            # The second one has compared the failure, too.
            time.sleep(3 * INTERVAL)
            assert events(server) == broken
            first.stop()
            files.set_failure(0)
            healthy = [("GpuRecovered", "Node", 1), ("GpuRecovered", "Pod", 1), *broken]
            wait_until(lambda: events(server) == healthy, "the second exporter writes")
            wait_until(lambda: condition(server)["status"] == "False", "the condition")
            second.stop()
    pod = next(one for one in server.objects("events") if one["metadata"]["namespace"] == "team")
    assert pod["involvedObject"]["uid"] == "uid-train-0"
    assert f"GPU 0 ({GPU})" in pod["message"]
