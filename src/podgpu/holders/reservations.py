"""Replaces the reservation pods of KAI Scheduler and Run:ai by the pods that share their GPUs.

A pod with a fraction of a GPU requests no device. The scheduler reserves a whole GPU with a pod of its own, and the
kubelet lists only that pod. All pods that share the GPU have the name of the same group in their labels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil

from podgpu.errors import SourceError
from podgpu.holders.device_ids import DeviceIndex, parse_device_id
from podgpu.holders.merge import Complete
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

SOURCE = "annotations"
RESERVED_GPU = "run.ai/reserve_for_gpu_index"  # contains the UUID, despite its name
FRACTION = "gpu-fraction"
MEMORY = "gpu-memory"  # MiB
CONTAINER = "gpu-fraction-container-name"
ANNOTATIONS = frozenset({RESERVED_GPU, FRACTION, MEMORY, CONTAINER})
_GROUP = "runai-gpu-group"
"""Label with the group. A pod on several GPUs has a label `runai-gpu-group/<group>` for each of them."""
_NAME_PREFIXES = ("gpu-reservation-", "runai-reservation-gpu-")
_CONTAINERS = ("resource-reservation", "runai-reservation")
_SCALING_NAMESPACES = ("kai-scale-adjust", "runai-scale-adjust")
"""Pods in these namespaces request whole GPUs only to make an autoscaler add nodes."""
_MEMORY_MIB = re.compile(r"[1-9][0-9]{0,9}")
_MIB = 2**20


def replace_reservations(
    readings: Mapping[str, Allocation],
    pods: Sequence[PodRecord],
    devices: Sequence[Device],
    complete: Complete = lambda workload: workload,
) -> dict[str, Allocation]:
    """Removes reservation pods from the readings of all sources, and adds the pods of their groups.

    Without the API server's `pods` the groups are unknown. The GPU is then reported as unmapped (`reserved`).
    """
    reserved: dict[PodRecord, set[str]] = defaultdict(set)
    records = {(pod.namespace, pod.name): pod for pod in pods}
    replaced: dict[str, Allocation] = {SOURCE: Allocation()} if pods and SOURCE not in readings else {}
    for source, reading in readings.items():
        kept: list[Assignment] = []
        unknown: list[Unmapped] = []
        for assignment in reading.assignments:
            holder = assignment.holder
            with suppress(SourceError):  # contradictory identities
                holder = complete(holder)
            pod = records.get((holder.namespace, holder.pod))
            if pod is not None and _is_reservation(pod):
                reserved[pod].add(assignment.device)
            elif pod is None and holder.pod.startswith(_NAME_PREFIXES) and holder.container in _CONTAINERS:
                unknown.append(Unmapped(source, "reserved", assignment.device, "", holder))
            elif holder.namespace not in _SCALING_NAMESPACES:
                kept.append(assignment)
        replaced[source] = replace(reading, assignments=tuple(kept), unmapped=(*reading.unmapped, *unknown))
    if pods:
        groups = _find_groups(pods, reserved, DeviceIndex(devices))
        members, unmapped = _find_members(pods, groups, {device.key: device for device in devices})
        reading = replaced[SOURCE]
        replaced[SOURCE] = replace(
            reading, assignments=(*members, *reading.assignments), unmapped=(*reading.unmapped, *unmapped)
        )
    return replaced


def _is_reservation(pod: PodRecord) -> bool:
    has_container = any(container.name in _CONTAINERS for container in pod.containers)
    return bool(_read_groups(pod)) and (has_container or bool(pod.annotation(RESERVED_GPU)))


def _read_groups(pod: PodRecord) -> set[str]:
    return {group for label, group in pod.labels if label == _GROUP or label.startswith(f"{_GROUP}/")}


def _find_groups(
    pods: Sequence[PodRecord], reserved: Mapping[PodRecord, set[str]], index: DeviceIndex
) -> dict[str, set[str]]:
    """Returns the devices of each group, from the assignments of its reservation pod, else from its annotation."""
    groups: dict[str, set[str]] = defaultdict(set)
    for pod in pods:
        if not _is_reservation(pod) or pod.is_finished:
            continue
        held = reserved.get(pod)
        if not held:
            device_id = parse_device_id(pod.annotation(RESERVED_GPU))
            held = {device.key for device in index.find(device_id)} if device_id else set()
        for group in _read_groups(pod):
            groups[group] |= held
    return groups


def _find_members(
    pods: Sequence[PodRecord], groups: Mapping[str, set[str]], devices: Mapping[str, Device]
) -> tuple[list[Assignment], list[Unmapped]]:
    members: list[Assignment] = []
    unmapped: list[Unmapped] = []
    for pod in pods:
        container = _find_container(pod)
        if _is_reservation(pod) or pod.is_finished or not pod.node or container is None:
            continue
        holder = Workload(pod.namespace, pod.name, container.name, pod.uid, container.container_id)
        for group in sorted(_read_groups(pod)):
            held = groups.get(group, set())
            if len(held) == 1:
                (key,) = held
                share = _compute_share(pod, devices.get(key))
                members.append(Assignment(key, holder, SOURCE, share=share, is_shared=True))
            else:  # two reservation pods for one group are a fault of KAI before 0.16
                unmapped.append(Unmapped(SOURCE, "unknown_group", group, _GROUP, holder))
    return members, unmapped


def _find_container(pod: PodRecord) -> ContainerRecord | None:
    """Returns the container that has the GPU, or None if it is an init container that has finished."""
    name = pod.annotation(CONTAINER)
    named = [container for container in pod.all_containers if container.name == name]
    container = next(iter(named or pod.containers), None)
    return None if container is None or container.finished else container


def _compute_share(pod: PodRecord, device: Device | None) -> float | None:
    """Returns the fraction of each GPU that the pod holds. Computes it from memory as KAI does."""
    with suppress(ValueError):
        fraction = float(pod.annotation(FRACTION))
        return fraction if 0 < fraction <= 1 else None
    memory = pod.annotation(MEMORY)
    total = int(device.memory_bytes or 0) // _MIB // 100 * 100 if device is not None else 0
    if not _MEMORY_MIB.fullmatch(memory) or not total:
        return None
    return min(1.0, ceil(100 * int(memory) / total) / 100)


def find_reserved(allocation: Allocation) -> frozenset[str]:
    """Returns the reserved devices of a merged allocation whose holders are unknown."""
    held = {assignment.device for assignment in allocation.assignments}
    return frozenset(entry.device_id for entry in allocation.unmapped if entry.reason == "reserved") - held
