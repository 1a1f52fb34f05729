"""The pods of `podgpu demo` that wait for GPUs, and the objects of an API server for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from podgpu.fleet.round import Cluster
from podgpu.labs.simulate.simulated_node import DemoNode
from podgpu.model import WorkloadOwner, group_by
from podgpu.pending.cluster_objects import (
    MILLI,
    MODEL_LABEL,
    POD_SLOTS,
    BoundPod,
    NodeRecord,
    PendingPod,
    PodNeeds,
    PodState,
    ResourceAmounts,
)
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.queue import QueueSnapshot
from podgpu.pending.queue_watch import make_snapshot
from podgpu.pending.selectors import NAME_FIELD, NodeSelector, Requirement

_GIB = 1024**3
_GPU = "nvidia.com/gpu"
_SHARED_GPU = "nvidia.com/gpu.shared"
_SLICES = 2  # of a shared GPU
_HELD = {"cpu": 16, "memory": 64 * _GIB}  # by each pod of the demo
_NODE = {"cpu": 128, "memory": 1024 * _GIB, POD_SLOTS: 110}


class _Waiting(NamedTuple):
    namespace: str
    name: str
    owner: WorkloadOwner
    minutes: float  # since the start of the demo
    model: str
    amounts: ResourceAmounts
    lacks: str = _GPU  # what the scheduler says of the nodes with the model


def _request(gpus: int, cpu: int, memory_gib: int) -> ResourceAmounts:
    amounts = {_GPU: gpus, "cpu": cpu, "memory": memory_gib * _GIB}
    return tuple((name, amount * MILLI) for name, amount in sorted(amounts.items()))


def _list_waiting() -> Iterator[_Waiting]:
    """Yields pods for which the GPUs in use, CPU, and the size of nodes do not suffice."""
    tune = WorkloadOwner("Job", "finetune-9")

    yield _Waiting("research", "finetune-9", tune, 130, "H100", _request(2, 16, 64))
    nightly = WorkloadOwner("Job", "nightly")
    for number in range(3):
        name = f"nightly-{number}"
        yield _Waiting("batch", name, nightly, 45 - number, "H100", _request(1, 48, 96), "cpu")

    large = WorkloadOwner("PyTorchJob", "evaluate")
    yield _Waiting("research", "evaluate-0", large, 12, "H200", _request(8, 32, 256))


class DemoQueue:
    def __init__(self, nodes: Sequence[DemoNode], cluster: Cluster) -> None:
        self._nodes = [node for node in nodes if not node.is_plain]
        self._cluster = cluster
        self._started = time.time()

    def read(self) -> QueueSnapshot:
        return make_snapshot(self._make_objects(), self._cluster.published.state, time.time())

    def _make_objects(self) -> ClusterObjects:
        states = []
        for node in self._nodes:
            for pod in _list_bound(node):
                states.append(PodState(None, pod))

        for waiting in _list_waiting():
            states.append(PodState(self._make_pending(waiting), None))
        return ClusterObjects(pods=states, nodes=[_make_node(node) for node in self._nodes])

    def _make_pending(self, waiting: _Waiting) -> PendingPod:
        models = {_find_model(node) for node in self._nodes}
        wanted = sorted(model for model in models if waiting.model in model)
        # The user may have chosen a first node without this model.
        if not wanted:
            wanted = [f"NVIDIA-{waiting.model}"]
        requirement = Requirement(MODEL_LABEL, "In", tuple(wanted))
        selector = NodeSelector(((requirement,),), is_set=True)
        needs = PodNeeds(amounts=waiting.amounts, selectors=(selector,))

        return PendingPod(
            namespace=waiting.namespace,
            name=waiting.name,
            uid=f"{waiting.namespace}/{waiting.name}",
            created=self._started - 60 * waiting.minutes,
            needs=needs,
            owner=waiting.owner,
            is_seen=True,
            message=self._describe_nodes(wanted, waiting.lacks),
        )

    def _describe_nodes(self, models: Sequence[str], lacks: str) -> str:
        """Returns what the scheduler would say of a pod that needs one of these models."""
        nodes = len(self._nodes)
        fitting = sum(_find_model(node) in models for node in self._nodes)
        rest = nodes - fitting
        others = f"{rest} node(s) didn't match Pod's node affinity/selector"
        return f"0/{nodes} nodes are available: {fitting} Insufficient {lacks}, {others}."


def _find_model(node: DemoNode) -> str:
    """Returns the value of the label that GPU feature discovery sets."""
    return node.driver.gpus[0].model.name.replace(" ", "-")


def _make_node(node: DemoNode) -> NodeRecord:
    shared = {tenant.gpu for tenant in node.tenants if tenant.resource == _SHARED_GPU}
    amounts = Counter(_NODE)
    for gpu in node.driver.gpus:
        if gpu.instances:
            amounts.update(instance.resource for instance in gpu.instances)
        elif gpu.number in shared:
            amounts[_SHARED_GPU] += _SLICES
        else:
            amounts[_GPU] += 1

    allocatable = {name: amount * MILLI for name, amount in amounts.items()}
    labels = {MODEL_LABEL: _find_model(node), NAME_FIELD: node.name}
    return NodeRecord(node.name, labels, allocatable, allocatable)


def _list_bound(node: DemoNode) -> Iterator[BoundPod]:
    pods = group_by(node.tenants, lambda tenant: tenant.pod_name)
    for (namespace, name), tenants in pods.items():
        amounts = Counter(_HELD)
        amounts.update(tenant.resource for tenant in tenants)
        in_milli = [(resource, amount * MILLI) for resource, amount in amounts.items()]

        yield BoundPod(
            namespace=namespace,
            name=name,
            uid=f"{namespace}/{name}",
            node=node.name,
            amounts=tuple(in_milli),
        )
