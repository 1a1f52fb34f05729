"""Finds what Kubernetes thinks about the health of each GPU.

The kubelet writes the health of allocated devices into the status of their pods. It also lists the
devices that it gives to new pods, which are healthy. It reports no other unhealthy devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from podgpu.kube.objects import ContainerRecord, PodRecord, ResourceHealth
from podgpu.model import HEALTHY, UNHEALTHY, Assignment, Device, KubernetesHealth, WorkloadKey
from podgpu.node.holders.device_ids import DeviceIndex, parse_device_id

_CLAIM = "claim:"  # resources of DRA begin with this prefix
_DEVICE_NAME = "dra_device_name"
_DeviceStatus = tuple[str, KubernetesHealth]  # the first part is a device key


def find_kubernetes_health(
    pods: Iterable[PodRecord],
    offered: Iterable[str],
    assignments: Sequence[Assignment],
    devices: Sequence[Device],
) -> dict[str, KubernetesHealth]:
    """Returns the health by device key. Omits devices about which Kubernetes says nothing.

    `offered`: UUIDs of the GPUs that the kubelet gives to new pods.
    """
    present = {device.key for device in devices}
    by_offer = {uuid: KubernetesHealth(HEALTHY) for uuid in offered if uuid in present}

    by_status: dict[str, KubernetesHealth] = {}
    for key, health in _read_statuses(pods, assignments, devices):
        earlier = by_status.get(key)
        # Containers that share a device may be reported one after the other.
        if earlier is None or health.health == UNHEALTHY:
            by_status[key] = health

    # A status is about the very device of a container.
    return by_offer | by_status


def _read_statuses(
    pods: Iterable[PodRecord], assignments: Sequence[Assignment], devices: Sequence[Device]
) -> Iterator[_DeviceStatus]:
    index = DeviceIndex(devices)
    # By container: name of each claimed device, by device key.
    claimed: defaultdict[WorkloadKey, dict[str, str]] = defaultdict(dict)
    for assignment in assignments:
        name = dict(assignment.attributes).get(_DEVICE_NAME)
        if name:
            claimed[assignment.holder.key][assignment.device] = name

    for pod in pods:
        if pod.is_finished:
            continue
        for container in pod.all_containers:
            names = claimed[pod.workload(container).key]
            yield from _read_container(container, index, names)


def _read_container(
    container: ContainerRecord, index: DeviceIndex, names: Mapping[str, str]
) -> Iterator[_DeviceStatus]:
    """`names`: name of each claimed device in its ResourceSlice, by device key."""
    for entry in container.health:
        # Kubernetes may not know the health.
        if entry.health not in (HEALTHY, UNHEALTHY):
            continue
        health = KubernetesHealth(entry.health, entry.message)
        for key in _find_devices(entry, index, names):
            yield key, health


def _find_devices(entry: ResourceHealth, index: DeviceIndex, names: Mapping[str, str]) -> list[str]:
    """Returns the keys of the devices that a status is about."""
    if entry.resource.startswith(_CLAIM):
        # The id ends with the name of the device.
        return [key for key, name in names.items() if _ends_with_name(entry.device_id, name)]

    device_id = parse_device_id(entry.device_id)
    if device_id is None:
        return []
    return [device.key for device in index.find(device_id)]


def _ends_with_name(device_id: str, name: str) -> bool:
    return device_id.endswith((f"-{name}", f"/{name}", f"={name}"))
