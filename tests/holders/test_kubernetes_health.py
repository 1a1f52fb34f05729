"""What pods' `allocatedResourcesStatus` says about devices, for each form of device id."""

from __future__ import annotations

import pytest

from podgpu.kube.objects import ContainerRecord, PodRecord, ResourceHealth
from podgpu.model import Assignment, KubernetesHealth, Workload
from podgpu.node.holders.kubernetes_health import find_kubernetes_health
from tests.holders.devices import gpu

GPUS = [gpu(number) for number in range(11)]
KEYS = [device.key for device in GPUS]
WHOLE = "nvidia.com/gpu"
CDI = "k8s.gpu.nvidia.com/claim=2b0c5e9a-1f9f-4a77-9ffb-3b2d5a1c7e11-gpu-{}"


def pod(*health: ResourceHealth, phase: str = "Running", name: str = "train") -> PodRecord:
    container = ContainerRecord("main", container_id="c1", health=health)
    return PodRecord("ml", name, f"uid-{name}", "n1", phase, containers=(container,))


def claimed(number: int) -> Assignment:
    """GPU `number` is held through a claim."""
    attributes = (("dra_claim_name", "two"), ("dra_device_name", f"gpu-{number}"))
    return Assignment(
        KEYS[number], Workload("ml", "train", "main"), "kubelet", attributes=attributes
    )


@pytest.mark.parametrize("text", [KEYS[3], KEYS[3].upper().replace("GPU-", "GPU-"), "nvidia3"])
def test_ids_of_device_plugins(text: str) -> None:
    found = find_kubernetes_health(
        [pod(ResourceHealth(WHOLE, text, "Unhealthy"))], [KEYS[0]], [], GPUS
    )
    assert found == {
        KEYS[0]: KubernetesHealth("Healthy"),
        KEYS[3]: KubernetesHealth("Unhealthy"),
    }


def test_the_status_of_a_pod_counts_more_than_the_list_of_the_kubelet() -> None:
    shared = [
        pod(ResourceHealth(WHOLE, f"{KEYS[1]}::{n}", health), name=f"p{n}")
        for n, health in enumerate(("Healthy", "Unhealthy", "Healthy"))
    ]
    found = find_kubernetes_health(shared, KEYS[:2], [], GPUS)
    assert found[KEYS[1]].health == "Unhealthy"


def test_a_finished_pod_and_an_unknown_health_say_nothing() -> None:
    pods = [
        pod(ResourceHealth(WHOLE, KEYS[1], "Unhealthy"), phase="Failed"),
        pod(ResourceHealth(WHOLE, KEYS[2], "Unknown"), ResourceHealth("x", "eth0", "Unhealthy")),
    ]
    assert find_kubernetes_health(pods, ["GPU-gone"], [], GPUS) == {}


def test_devices_of_claims_are_found_by_their_name() -> None:
    """GPU 1 is not GPU 10."""
    health = [
        ResourceHealth("claim:two/gpus", CDI.format(1), "Unhealthy", "XID 79"),
        ResourceHealth("claim:two/gpus", "gpu.nvidia.com/n1/gpu-10", "Healthy"),
        ResourceHealth("claim:two/gpus", CDI.format(2), "Unknown"),
        ResourceHealth("example.com/nic", "nic-of-gpu-3", "Unhealthy"),
    ]
    held = [claimed(number) for number in (1, 2, 3, 10)]
    found = find_kubernetes_health([pod(*health)], [], held, GPUS)
    assert found == {
        KEYS[1]: KubernetesHealth("Unhealthy", "XID 79"),
        KEYS[10]: KubernetesHealth("Healthy"),
    }
