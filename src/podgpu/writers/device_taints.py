"""Writes a DeviceTaintRule for each DRA device of a broken GPU, and deletes it afterwards.

With the effect `None`, a rule only informs. With `NoSchedule`, Kubernetes allocates the device to
no new pod. podgpu never writes `NoExecute`, because it would evict pods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import KubeObject, read_list, read_map
from podgpu.metrics.conditions import XID
from podgpu.model import NodeState
from podgpu.node.holders.dra import NVIDIA_DRIVER, parse_slice
from podgpu.writers.gpu_changes import GpuRecord
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.pod_events import LABELS, select_labels
from podgpu.writers.write_option import TAINTS
from podgpu.writers.write_queue import Write

Effect = Literal["None", "NoSchedule"]
KEY = "podgpu.dev/unhealthy"
_NODE_LABEL = "podgpu.dev/node"
_GPU_ANNOTATION = "podgpu.dev/gpu"
_GROUP = "/apis/resource.k8s.io"
VERSIONS = ("v1", "v1beta2")
"""API versions of DeviceTaintRule in Kubernetes 1.37 and 1.36."""
RESYNC_SECONDS = 600.0
"""While a GPU is broken, its rules are compared again, because others may have changed them."""
_MAX_LABEL = 63
_MAX_NAME = 253


class DraDeviceRef(NamedTuple):
    pool: str
    name: str

    @property
    def rule_name(self) -> str:
        """The same for each exporter. Names of devices have no dot, so it is unambiguous."""
        name = f"podgpu-{self.pool}.{self.name}"
        # The name of a pool may be a path, that of a rule may not.
        if "/" in self.pool or len(name) > _MAX_NAME:
            return f"podgpu-{_hash(self.pool)}.{self.name}"
        return name


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class _Wanted:
    """The state of the GPUs that the rules must express."""

    taints: Mapping[str, str]  # UUID of a broken GPU -> value of its taint
    gpus: Mapping[str, str]  # UUID of a device of a broken GPU, such as a MIG device -> that GPU
    intact: frozenset[str]  # UUIDs of GPUs that are not broken: they have no taints


class TaintWriter:
    def __init__(self, client: ApiClient, node: str, effect: Effect, clock: Clock) -> None:
        self._client = client
        self._node = node
        self._labels = {**LABELS, _NODE_LABEL: label_of(node)}
        self._effect = effect
        self._clock = clock
        self._parts: dict[str, frozenset[str]] = {}  # UUIDs of the devices of each GPU
        self._done: _Wanted | None = None
        self._done_at = 0.0  # monotonic
        self._version = VERSIONS[0]

    def update(self, update: NodeUpdate) -> list[Write]:
        """Returns a write if taints must change, and from time to time while a GPU is broken."""
        if update.is_stale:
            return []

        self._update_parts(update.state)
        broken = {uuid: record for uuid, record in update.records.items() if record.problems}
        gpus = {}
        for uuid in broken:
            for part in self._parts.get(uuid, frozenset((uuid,))):
                gpus[part] = uuid

        taints = {uuid: make_taint_value(record) for uuid, record in broken.items()}
        # Includes GPUs that `podgpu forget` removed from the records.
        intact = frozenset(self._parts) - broken.keys()
        wanted = _Wanted(taints, gpus, intact)

        seconds = self._clock.monotonic() - self._done_at
        is_due = bool(broken) and seconds >= RESYNC_SECONDS
        if wanted == self._done and not is_due:
            return []

        return [Write(TAINTS, "rules", partial(self._reconcile, wanted))]

    def _update_parts(self, state: NodeState) -> None:
        for gpu in state.devices:
            # A GPU that is lost has no MIG devices any more, so its known ones stay.
            is_lost = gpu.fields is None and not gpu.instances
            if is_lost and gpu.uuid in self._parts:
                continue

            parts = {gpu.uuid}
            for instance in gpu.instances:
                parts.update(instance.uuids)
            self._parts[gpu.uuid] = frozenset(parts)

    async def _reconcile(self, wanted: _Wanted) -> None:
        present = await self._list_rules()
        desired = await self._make_rules(wanted)
        for name, rule in desired.items():
            if name not in present:
                await self._client.create(self._path, rule)
            elif not _has_taint_of(present[name], rule):
                changes = {"spec": {"taint": rule["spec"]["taint"]}}
                await self._client.patch(f"{self._path}/{name}", changes)

        for name, rule in present.items():
            gpu = read_map(rule["metadata"], "annotations").get(_GPU_ANNOTATION)
            if name not in desired and gpu in wanted.intact:
                await delete_if_present(self._client, f"{self._path}/{name}")

        self._done = wanted
        self._done_at = self._clock.monotonic()

    async def _make_rules(self, wanted: _Wanted) -> dict[str, KubeObject]:
        """Returns the rules that taint the devices of broken GPUs, by name."""
        if not wanted.taints:
            return {}

        rules: dict[str, KubeObject] = {}
        owner = await self._read_owner()
        for uuid, device in await self._list_devices():
            gpu = wanted.gpus.get(uuid)
            if gpu is not None:
                value = wanted.taints[gpu]
                rules[device.rule_name] = self._make_rule(device, gpu, value, owner)

        return rules

    @property
    def _path(self) -> str:
        return rules_path(self._version)

    async def _list_rules(self) -> dict[str, KubeObject]:
        """Returns the rules of this node that podgpu has written, by name."""
        self._version, rules = await list_rules(self._client, select_labels(self._labels))
        return {rule["metadata"]["name"]: rule for rule in rules}

    async def _list_devices(self) -> list[tuple[str, DraDeviceRef]]:
        """Returns the UUID and the name of each DRA device of this node."""
        selector = f"spec.driver={NVIDIA_DRIVER},spec.nodeName={self._node}"
        path = f"{_GROUP}/v1/resourceslices"
        devices = []
        answer = await self._client.get(path, {"fieldSelector": selector})
        for item in read_list(answer, "items"):
            pool_slice = parse_slice(item)
            for device in pool_slice.devices:
                if device.uuid:
                    devices.append((device.uuid, DraDeviceRef(pool_slice.pool, device.name)))

        return devices

    async def _read_owner(self) -> KubeObject:
        """Returns the reference to the Node. Kubernetes deletes the rules together with it."""
        node = await self._client.get(f"/api/v1/nodes/{self._node}")
        uid = node["metadata"]["uid"]
        return {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": uid}

    def _make_rule(
        self, device: DraDeviceRef, gpu: str, value: str, owner: KubeObject
    ) -> KubeObject:
        selector = {"driver": NVIDIA_DRIVER, "pool": device.pool, "device": device.name}
        return {
            "apiVersion": f"resource.k8s.io/{self._version}",
            "kind": "DeviceTaintRule",
            "metadata": {
                "name": device.rule_name,
                "labels": self._labels,
                "annotations": {_GPU_ANNOTATION: gpu},
                "ownerReferences": [owner],
            },
            "spec": {
                "deviceSelector": selector,
                "taint": {"key": KEY, "value": value, "effect": self._effect},
            },
        }


def make_taint_value(record: GpuRecord) -> str:
    """Returns the worst problem as a label value, such as `xid-79` or `row-remap-failure`."""
    worst = next(iter(record.problems))
    value = worst.replace("_", "-")
    detail = record.details.get(worst, "")
    if worst == XID and detail:
        value += f"-{detail.replace(',', '-')}"

    # A label value must not end with a dash, also if it is cut.
    return value[:_MAX_LABEL].rstrip("-")


def label_of(node: str) -> str:
    """Returns the node's name, or its hash if it is too long for a label."""
    return node if len(node) <= _MAX_LABEL else _hash(node)


def rules_path(version: str) -> str:
    return f"{_GROUP}/{version}/devicetaintrules"


def _has_taint_of(present: KubeObject, desired: KubeObject) -> bool:
    """Compares the taints of two rules, without the time that the server adds."""
    taint: Mapping[str, str] = present["spec"]["taint"]
    desired_taint: Mapping[str, str] = desired["spec"]["taint"]
    return desired_taint.items() <= taint.items()


async def list_rules(client: ApiClient, selector: str) -> tuple[str, Iterable[KubeObject]]:
    """Returns the API version, and the rules with these labels.

    Raises SourceError `not_found` if the API server has no DeviceTaintRules.
    """
    for version in VERSIONS:
        try:
            answer = await client.get(rules_path(version), {"labelSelector": selector})
        except SourceError as error:
            if error.reason != "not_found":
                raise
        else:
            return version, read_list(answer, "items")

    raise SourceError(
        "not_found",
        "the API server has no DeviceTaintRules: they need Kubernetes 1.37, or 1.36 with the "
        "feature gate DRADeviceTaintRules",
    )


async def delete_if_present(client: ApiClient, path: str) -> None:
    try:
        await client.delete(path)
    except SourceError as error:
        if error.reason != "not_found":
            raise
