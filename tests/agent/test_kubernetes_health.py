"""Kubernetes and podgpu disagree about the health of a GPU: over real HTTP, in JSON and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from podgpu.kube.objects import parse_pod
from tests.agent.gpu_bench import NAMES, GpuBench, bench_of, holder
from tests.agent.test_health import broken, gpu, known, view

HEALTHY, UNHEALTHY = "kubernetes_healthy", "kubernetes_unhealthy"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as made:
        yield made


def pod_body(number: int, device: str, health: str, **more: Any) -> dict[str, Any]:
    """The pod on a GPU, as the API server returns it."""
    of = holder(number)
    entry = {"resourceID": device, "health": health, **more}
    status = {
        "name": of.container,
        "containerID": f"containerd://{of.container_id}",
        "allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": [entry]}],
    }
    return {
        "metadata": {"namespace": of.namespace, "name": of.pod, "uid": of.uid},
        "spec": {"nodeName": "h", "containers": [{"name": of.container}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


def set_status(bench: GpuBench, number: int, health: str, **more: Any) -> None:
    record = parse_pod(pod_body(number, bench.uuid(number), health, **more))
    assert record is not None
    bench.names = replace(NAMES, pods=(record,))
    bench.turn()


@pytest.mark.fault(
    "A GPU is broken, but Kubernetes calls it healthy and gives it to new pods",
    "Condition `kubernetes_healthy` on the page, in the JSON and metrics, and an alert",
)
def test_a_broken_gpu_that_the_kubelet_gives_to_new_pods(bench: GpuBench) -> None:
    bench.offer(0, 1)
    bench.turn()
    assert gpu(bench, 1)["kubernetes_health"] == "Healthy"
    assert known(bench, 1, HEALTHY), "they agree"

    bench.driver.advise(1, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    bench.turns(120)
    assert broken(bench, 1) == ["recovery_action"], "the device plugin has two minutes to notice it"
    bench.turns(10)
    assert broken(bench, 1) == ["recovery_action", HEALTHY]
    assert "may give it to new pods" in gpu(bench, 1)["conditions"][1]["says"]
    assert broken(bench, 0) == []

    bench.offer(0)
    bench.turn()
    assert broken(bench, 1) == ["recovery_action"]
    assert not known(bench, 1, HEALTHY), "a GPU that is not offered need not be unhealthy"
    bench.offer(0, 1)
    bench.turns(130)
    bench.driver.reset(1)
    bench.turns(30)
    assert broken(bench, 1) == []


def test_a_gpu_that_kubernetes_calls_unhealthy_without_a_reason(bench: GpuBench) -> None:
    bench.offer(0, 1, 2)
    set_status(bench, 2, "Unhealthy", message="XID 79")
    assert gpu(bench, 2)["kubernetes_health"] == "Unhealthy"
    bench.turns(130)
    assert broken(bench, 2) == [UNHEALTHY]
    [condition] = gpu(bench, 2)["conditions"]
    assert condition["says"].startswith("Kubernetes calls it unhealthy (XID 79)")
    assert broken(bench, 0) == []
    assert totals(bench) == (0, 1), "podgpu finds no problem"

    bench.driver.advise(2, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    bench.turns(130)
    assert broken(bench, 2) == ["recovery_action"], "now they agree"
    assert totals(bench) == (1, 0)
    bench.driver.reset(2)
    set_status(bench, 2, "Healthy")
    bench.turns(30)
    assert broken(bench, 2) == []


def totals(bench: GpuBench) -> tuple[int, int]:
    """Returns how many GPUs are broken, and how many only Kubernetes calls unhealthy."""
    found = view(bench)["totals"]
    return found["broken"], found.get("kubernetes_unhealthy", 0)


def test_nothing_is_reported_if_kubernetes_does_not_know(bench: GpuBench) -> None:
    set_status(bench, 2, "Unknown")
    bench.driver.advise(2, pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)
    bench.turns(130)
    assert broken(bench, 2) == ["recovery_action"]
    assert "kubernetes_health" not in gpu(bench, 2)
    assert not known(bench, 2, HEALTHY)


def test_a_driver_that_does_not_answer_says_nothing_about_the_gpus(bench: GpuBench) -> None:
    bench.offer(0, 1, 2, 3)
    set_status(bench, 2, "Unhealthy")
    assert bench.agent.release(600.0)
    bench.turns(130)
    assert broken(bench, 2) == []
    assert not known(bench, 2, UNHEALTHY)


def test_an_unhealthy_instance_of_a_healthy_gpu(tmp_path: Path) -> None:
    with bench_of(tmp_path, "1xH100/2x1g.10gb") as bench:
        instance = bench.driver.gpu(0).instances[0]
        record = parse_pod(pod_body(0, instance.uuid, "Unhealthy"))
        assert record is not None
        bench.names = replace(NAMES, pods=(record,))
        bench.turns(130)
        assert broken(bench, 0) == [UNHEALTHY]
        found = {each["id"]: each.get("kubernetes_health") for each in gpu(bench, 0)["instances"]}
        assert sorted(map(str, found.values())) == ["None", "Unhealthy"]
