"""Pending pods with a planted cause, as objects of the API server.

`test_explain.py` explains them without a scheduler, `test_real_scheduler.py` with a real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
DRIVER = "gpu.nvidia.com"
CLASS = "gpu.nvidia.com"
WAITING = "waiting"
H100 = "NVIDIA-H100-80GB-HBM3"
H200 = "NVIDIA-H200"


@dataclass(frozen=True)
class Situation:
    name: str
    objects: list[Object]
    key: str  # of our first reason
    resource: str = ""  # of this reason
    # Part of the scheduler's message. Empty if it says nothing.
    scheduler: str = ""
    also: tuple[str, ...] = ()  # keys of other reasons
    unlisted: tuple[str, ...] = field(default=())  # keys that would blame the wrong thing


# Builders


def node(
    name: str,
    gpus: int = 8,
    model: str = H100,
    cpu: str = "64",
    memory: str = "512Gi",
    pods: str = "110",
    **more: Any,
) -> Object:
    """`more`: taints, unschedulable, labels, resources."""
    amounts = {"cpu": cpu, "memory": memory, "pods": pods, "ephemeral-storage": "1Ti"}
    if gpus:
        amounts[GPU] = str(gpus)
    amounts |= more.get("resources", {})
    labels = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": model}
    spec: Object = {}
    if "taints" in more:
        spec["taints"] = more["taints"]
    if more.get("unschedulable"):
        spec["unschedulable"] = True
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels | more.get("labels", {})},
        "spec": spec,
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def pod(
    name: str = WAITING,
    gpus: int = 1,
    on: str = "",
    cpu: str = "1",
    memory: str = "1Gi",
    resource: str = GPU,
    namespace: str = "ml",
    **spec: Any,
) -> Object:
    """`on`: the node that already runs it."""
    limits = {"cpu": cpu, "memory": memory}
    if gpus:
        limits[resource] = str(gpus)
    resources: Object = {"requests": dict(limits), "limits": dict(limits)}
    claims = spec.pop("claims", None)
    if claims:
        resources["claims"] = [{"name": each["name"]} for each in claims]
        spec["resourceClaims"] = claims
    container = {"name": "main", "image": "registry/none", "resources": resources}
    if on:
        spec["nodeName"] = on
    status = {"phase": "Running" if on else "Pending"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 600,
            "automountServiceAccountToken": False,
            **spec,
        },
        "status": status,
    }


def device_class(name: str = CLASS, expression: str = f"device.driver == '{DRIVER}'") -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }


def resource_slice(on: str, gpus: int, memory: str = "80Gi", model: str = H100) -> Object:
    devices = []
    for index in range(gpus):
        devices.append(
            {
                "name": f"gpu-{index}",
                "attributes": {
                    "type": {"string": "gpu"},
                    "productName": {"string": model},
                    "uuid": {"string": f"GPU-{on}-{index}"},
                },
                "capacity": {"memory": {"value": memory}},
            }
        )
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{on}-gpus"},
        "spec": {
            "driver": DRIVER,
            "nodeName": on,
            "pool": {"name": on, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def claim(
    name: str, count: int = 1, on: str = "", devices: tuple[int, ...] = (), **exactly: Any
) -> Object:
    """`devices`: the numbers of the GPUs of the node `on` that it has."""
    exact = {"deviceClassName": CLASS, "allocationMode": "ExactCount", "count": count} | exactly
    body: Object = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": exact}]}},
    }
    if on:
        results = []
        for index in devices:
            device = f"gpu-{index}"
            results.append({"request": "gpus", "driver": DRIVER, "pool": on, "device": device})
        fields = [{"key": "metadata.name", "operator": "In", "values": [on]}]
        selector = {"nodeSelectorTerms": [{"matchFields": fields}]}
        body["status"] = {"allocation": {"devices": {"results": results}, "nodeSelector": selector}}
    return body


def uses(name: str) -> list[Object]:
    return [{"name": "gpus", "resourceClaimName": name}]


def priority_class(name: str, value: int) -> Object:
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }


# Situations

_TRAIN_TAINT = [{"key": "gpu", "value": "train", "effect": "NoSchedule"}]
_NOT_READY = [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]


def _require(*expressions: Object) -> Object:
    terms = [{"matchExpressions": list(expressions)}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


TWENTY = [
    Situation(
        "all GPUs are in use",
        [node("a", gpus=2), pod("old-1", on="a"), pod("old-2", on="a"), pod()],
        "in_use",
        GPU,
        "Insufficient nvidia.com/gpu",
    ),
    Situation(
        "free GPUs are spread over nodes",
        [
            *(node(name, gpus=8) for name in "abc"),
            *(pod(f"old-{name}", gpus=6, on=name) for name in "abc"),
            pod(gpus=4),
        ],
        "fragmented",
        GPU,
        "Insufficient nvidia.com/gpu",
        unlisted=("too_large",),
    ),
    Situation(
        "no node is so large",
        [node("a"), node("b", gpus=4), pod(gpus=16)],
        "too_large",
        GPU,
        "Insufficient nvidia.com/gpu",
        unlisted=("in_use", "fragmented"),
    ),
    Situation(
        "no node has this model",
        [node("a"), pod(nodeSelector={"nvidia.com/gpu.product": H200})],
        "selector",
        scheduler="didn't match Pod's node affinity/selector",
        unlisted=("in_use",),
    ),
    Situation(
        "node affinity excludes the free node, and the other one is full",
        [
            node("a", labels={"gpu.memory": "80"}),
            node("b", gpus=1, labels={"gpu.memory": "141"}),
            pod("old", on="b"),
            pod(affinity=_require({"key": "gpu.memory", "operator": "Gt", "values": ["100"]})),
        ],
        "in_use",
        GPU,
        "didn't match Pod's node affinity/selector",
        also=("selector",),
    ),
    Situation(
        "the nodes with free GPUs have a taint",
        [node("a", taints=_TRAIN_TAINT), pod()],
        "taint",
        scheduler="untolerated taint",
        unlisted=("in_use",),
    ),
    Situation(
        "the node with free GPUs is cordoned",
        [node("a", unschedulable=True), node("b", gpus=0), pod()],
        "cordoned",
        scheduler="unschedulable",
        unlisted=("in_use", "taint"),
    ),
    Situation(
        "the node is not ready",
        [node("a", taints=_NOT_READY), pod()],
        "not_ready",
        scheduler="untolerated taint",
        unlisted=("in_use", "taint"),
    ),
    Situation(
        "GPUs are free, and CPU is not",
        [node("a", cpu="16"), pod("old", gpus=1, cpu="14", on="a"), pod(cpu="4")],
        "other_in_use",
        "cpu",
        "Insufficient cpu",
        unlisted=("in_use",),
    ),
    Situation(
        "more memory than any node has",
        [node("a", memory="64Gi"), pod(memory="100Gi")],
        "other_too_large",
        "memory",
        "Insufficient memory",
        unlisted=("in_use",),
    ),
    Situation(
        "the node has its maximum of pods",
        [node("a", pods="1"), pod("old", gpus=0, on="a"), pod()],
        "other_in_use",
        "pods",
        "Too many pods",
        unlisted=("in_use",),
    ),
    Situation(
        "no node has such MIG instances",
        [node("a"), pod(resource="nvidia.com/mig-3g.40gb")],
        "not_offered",
        "nvidia.com/mig-3g.40gb",
        "Insufficient nvidia.com/mig-3g.40gb",
        unlisted=("in_use",),
    ),
    Situation(
        "MIG instances of this size are in use, others are free",
        [
            node(
                "a",
                gpus=0,
                resources={"nvidia.com/mig-1g.10gb": "4", "nvidia.com/mig-3g.40gb": "1"},
            ),
            pod("old", on="a", resource="nvidia.com/mig-3g.40gb"),
            pod(resource="nvidia.com/mig-3g.40gb"),
        ],
        "in_use",
        "nvidia.com/mig-3g.40gb",
        "Insufficient nvidia.com/mig-3g.40gb",
    ),
    Situation(
        "a scheduling gate",
        [node("a"), pod(schedulingGates=[{"name": "example.com/quota"}])],
        "gated",
        scheduler="Scheduling is blocked due to non-empty scheduling gates",
    ),
    Situation(
        "the claim does not exist",
        [
            node("a", gpus=0),
            device_class(),
            resource_slice("a", 2),
            pod(gpus=0, claims=uses("none")),
        ],
        # The scheduler does not look at it before the claim exists, and writes no message.
        "claim_missing",
    ),
    Situation(
        "the device class does not exist",
        [
            node("a", gpus=0),
            device_class(),
            resource_slice("a", 2),
            claim("wrong", deviceClassName="gpu.example.com"),
            pod(gpus=0, claims=uses("wrong")),
        ],
        "class_missing",
        scheduler="gpu.example.com",
    ),
    Situation(
        "claims have all devices",
        [
            node("a", gpus=0),
            device_class(),
            resource_slice("a", 2),
            claim("held", count=2, on="a", devices=(0, 1)),
            claim("more"),
            pod(gpus=0, claims=uses("more")),
        ],
        "in_use",
        CLASS,
        "cannot allocate all claims",
    ),
    Situation(
        "no device matches the claim",
        [
            node("a", gpus=0),
            device_class(),
            resource_slice("a", 2, memory="80Gi"),
            claim(
                "large",
                selectors=[
                    {
                        "cel": {
                            "expression": f"device.capacity['{DRIVER}'].memory"
                            ".compareTo(quantity('140Gi')) >= 0"
                        }
                    }
                ],
            ),
            pod(gpus=0, claims=uses("large")),
        ],
        "no_device",
        CLASS,
        "cannot allocate all claims",
        unlisted=("in_use",),
    ),
    Situation(
        "pods of a lower priority are ending to make room",
        [
            node("a", gpus=1),
            priority_class("high", 1000),
            pod("old", on="a"),
            pod(priorityClassName="high"),
        ],
        "preempting",
        scheduler="Insufficient nvidia.com/gpu",
    ),
    Situation(
        "it may not preempt",
        [
            node("a", gpus=1),
            priority_class("high", 1000) | {"preemptionPolicy": "Never"},
            pod("old", on="a"),
            pod(priorityClassName="high"),
        ],
        "in_use",
        GPU,
        "Insufficient nvidia.com/gpu",
        also=("never_preempts",),
    ),
]
"""The cause of each is planted. The real scheduler's message agrees with it."""

_VOLUME = [{"name": "data", "persistentVolumeClaim": {"claimName": "none"}}]
_ALONE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {"matchLabels": {"app": "solo"}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }
}
_SOLO = pod("old", gpus=0, on="a")
_SOLO["metadata"]["labels"] = {"app": "solo"}

NOT_GPUS = [
    Situation(
        "a volume is missing",
        [node("a"), pod(volumes=_VOLUME)],
        "unchecked",
        scheduler='persistentvolumeclaim "none" not found',
        unlisted=("in_use", "too_large"),
    ),
    Situation(
        "another pod must not run beside it",
        [node("a"), _SOLO, pod(affinity=_ALONE)],
        "unchecked",
        scheduler="didn't match pod anti-affinity rules",
        unlisted=("in_use", "too_large"),
    ),
    Situation(
        "a pod without GPUs lacks CPU",
        [node("a", cpu="2"), pod(gpus=0, cpu="8")],
        "no_gpu",
        scheduler="Insufficient cpu",
        unlisted=("in_use",),
    ),
    Situation(
        "a scheduler that does not run",
        [node("a"), pod(schedulerName="nobody")],
        "unseen",
        unlisted=("in_use",),
    ),
]
"""Pods that wait for another reason than GPUs."""
