"""Allocation source `annotations`: reads what schedulers write to pods.

Supports koordinator, HAMi, Volcano, gpu-manager, KAI and Run:ai. These schedulers assign GPUs
without the kubelet, or assign other GPUs than the kubelet lists.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta, Struct, field

from podgpu.decode import find_decoder
from podgpu.errors import SourceError, one_line
from podgpu.kube.objects import (
    GPU_FRACTION,
    GPU_GROUP,
    GPU_MEMORY,
    ContainerRecord,
    PodRecord,
    parse_quantity,
)
from podgpu.model import (
    MIB,
    Allocation,
    Assignment,
    Device,
    PodName,
    Unmapped,
    VcudaRequest,
    Workload,
    parts_of,
)
from podgpu.node.holders import AllocationSource, Complete, complete_if_certain
from podgpu.node.holders.device_ids import (
    VCUDA_CORE,
    VCUDA_MEMORY,
    DeviceId,
    DeviceIndex,
    HeldId,
    map_held,
    parse_device_id,
)

if TYPE_CHECKING:
    from podgpu.kube.reflector import Informer

SOURCE = "annotations"
KOORDINATOR_DEVICES = "scheduling.koordinator.sh/device-allocated"
HAMI_DEVICES = "hami.io/vgpu-devices-allocated"
HAMI_MIG_DEVICES = "hami.io/vgpu-mig-allocations"
HAMI_1_DEVICES = "4pd.io/vgpu-ids-new"
VOLCANO_DEVICES = "volcano.sh/vgpu-ids-new"
GPU_MANAGER_ASSIGNED = "tencent.com/gpu-assigned"
GPU_MANAGER_CARDS = "tencent.com/predicate-gpu-idx-"
"""Prefix of an annotation name that ends with the number of the container."""
RESERVED_GPU = "run.ai/reserve_for_gpu_index"  # despite the name, its value is a UUID
CONTAINER = "gpu-fraction-container-name"

_ANNOTATIONS = {
    KOORDINATOR_DEVICES,
    HAMI_DEVICES,
    HAMI_MIG_DEVICES,
    HAMI_1_DEVICES,
    VOLCANO_DEVICES,
    GPU_MANAGER_ASSIGNED,
    RESERVED_GPU,
    GPU_FRACTION,
    GPU_MEMORY,
    CONTAINER,
}
GPU_RESOURCES = (
    "nvidia.com/gpu",
    "nvidia.com/mig-",
    "nvidia.com/vgpu",
    "koordinator.sh/gpu",
    "tencent.com/vcuda-",
    "volcano.sh/vgpu",
    "4pd.io/vgpu",
)
"""Prefixes of GPU resources."""


def is_read(annotation: str) -> bool:
    """Returns True if an allocation source reads the annotation."""
    return annotation in _ANNOTATIONS or annotation.startswith(GPU_MANAGER_CARDS)


# The source


class AnnotationsAllocation(AllocationSource):
    """Reads the annotations of watched pods. Never waits for the network."""

    name = SOURCE

    def __init__(self, pods: Informer[PodRecord]) -> None:
        self._pods = pods

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Uses the last known pods while the API server is unavailable.

        Raises SourceError if permission is missing, or if pods have never been read.
        """
        error = self._pods.error
        if error is not None and (error.reason == "forbidden" or not self._pods.synced):
            # A new error each time, because re-raising the old one would extend its traceback.
            raise SourceError(error.reason, str(error))
        if not self._pods.synced:
            raise SourceError(
                "not_synced",
                "pods have not been read from the API server yet; if this persists, check that it "
                "is reachable",
            )

        held = []
        malformed = []
        requests: list[VcudaRequest] = []
        for pod in self._pods.items():
            # Skips pods without a node, because schedulers annotate a pod before they bind it.
            if not pod.node or pod.is_finished:
                continue
            requests += _read_vcuda_requests(pod)
            try:
                held += read_grants(pod)
            except BadAnnotation as bad:
                whole_pod = Workload(pod.namespace, pod.name, uid=pod.uid)
                malformed.append(Unmapped(SOURCE, bad.reason, bad.key, bad.key, whole_pod))

        mapped = map_held(SOURCE, held, devices, parse=_parse_one_device)
        requests.sort(key=parts_of)
        return replace(mapped, unmapped=(*mapped.unmapped, *malformed), vcuda=tuple(requests))


def _read_vcuda_requests(pod: PodRecord) -> Iterator[VcudaRequest]:
    for container in pod.all_containers:
        cores = int(container.amount(VCUDA_CORE))
        blocks = int(container.amount(VCUDA_MEMORY))
        if (cores or blocks) and not container.finished:
            holder = pod.workload(container)
            yield VcudaRequest.for_holder(holder, cores, blocks)


# Formats: one function per scheduler. Each returns the device ids that the containers of a pod
# hold.


class BadAnnotation(SourceError):
    """A malformed annotation. Its pod gets no devices; other pods are not affected."""

    def __init__(self, pod: PodRecord, key: str, error: str) -> None:
        problem = (
            f"cannot parse the annotation {key} of pod {pod.namespace}/{pod.name} ({error[:253]}): "
            "its GPUs have no holder until the annotation is corrected"
        )
        super().__init__("bad_annotation", one_line(problem))
        self.key = key


def read_grants(pod: PodRecord) -> list[HeldId]:
    """Returns the device ids that the pod's containers hold, in the first matching format.

    Raises BadAnnotation if an annotation is malformed.
    """
    for key, read in FORMATS.items():
        try:
            grants = read(pod)
        except (ValueError, RecursionError) as error:
            raise BadAnnotation(pod, key, str(error)) from error
        if grants:
            return grants
    return []


def _hold(
    pod: PodRecord, container: ContainerRecord, device: str | int, key: str, share: float | None
) -> HeldId:
    """Creates a `HeldId`. `device`: a device id, or the number N of /dev/nvidiaN."""
    text = f"nvidia{device}" if isinstance(device, int) else device
    return HeldId(pod.workload(container), key, text, share)


def _parse_one_device(text: str) -> DeviceId | None:
    """Rejects `all` and `tegra`, because schedulers assign single devices."""
    device_id = parse_device_id(text)
    if device_id is None or device_id.everything:
        return None
    return device_id


def _share(percent: Fraction | int) -> float | None:
    """Converts a percentage to a fraction.

    Returns None for 0, which means no limit, and for values above 100.
    """
    if 0 < percent <= 100:
        return float(Fraction(percent) / 100)
    return None


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ValueError(f"{what} {text[:40]!a} is not a number")
    return int(text)


class _KoordinatorGpu(Struct):
    minor: Annotated[int, Meta(ge=0, lt=1_000_000)] | None = None
    id: str | None = None  # absent in older versions
    resources: dict[str, str | int | float | None] | None = None

    @property
    def share(self) -> float | None:
        resources = self.resources or {}
        for name in ("koordinator.sh/gpu-core", "koordinator.sh/gpu-memory-ratio"):
            share = _share(parse_quantity(str(resources.get(name) or 0)))
            if share is not None:
                return share
        return None


class _KoordinatorDevices(Struct):
    gpu: list[_KoordinatorGpu] | None = None


def koordinator_grants(pod: PodRecord) -> list[HeldId]:
    """Splits the pod's devices among the containers that request GPUs.

    If there are none, the first container gets all devices, as in koordinator's own proxy.
    """
    text = pod.annotation(KOORDINATOR_DEVICES)
    if not text:
        return []
    parts = _divide(_find_koordinator_holders(pod))

    grants = []
    gpus = find_decoder(_KoordinatorDevices).decode(text).gpu or ()
    for number, gpu in enumerate(gpus, 1):
        device = gpu.id or gpu.minor
        if device is None:
            raise ValueError(f"gpu entry {number} has neither an id nor a minor number")
        gpu_share = gpu.share
        for holder, part in parts:
            share = None if gpu_share is None else gpu_share * part
            grants.append(_hold(pod, holder, device, KOORDINATOR_DEVICES, share))
    return grants


def _find_koordinator_holders(pod: PodRecord) -> Sequence[ContainerRecord]:
    requesting = []
    for container in pod.all_containers:
        if _requests_gpu(container) and not container.finished:
            requesting.append(container)
    return requesting or pod.containers[:1] or [ContainerRecord("")]


def _divide(containers: Sequence[ContainerRecord]) -> list[tuple[ContainerRecord, float]]:
    """Returns the part of each container.

    If all request the same GPU resource, parts are proportional to the requests.
    """
    for resource, _ in containers[0].requests:
        if not resource.startswith(GPU_RESOURCES):
            continue

        amounts = [(container, container.amount(resource)) for container in containers]
        if all(amount for _, amount in amounts):
            total = sum(amount for _, amount in amounts)
            return [(container, float(amount / total)) for container, amount in amounts]
    return [(container, 1 / len(containers)) for container in containers]


def _requests_gpu(container: ContainerRecord) -> bool:
    for resource, _ in container.requests:
        if resource.startswith(GPU_RESOURCES) and container.amount(resource):
            return True
    return False


class _Slice(NamedTuple):
    device: str
    share: float | None


_ContainerSlices = list[_Slice | None]
"""Devices of one container. None: not a GPU, or a MIG instance that does not exist yet."""


class _HamiMigDevice(Struct):
    container: Annotated[int, Meta(ge=0)] = field(name="containerIndex")
    device: Annotated[int, Meta(ge=0)] = field(name="deviceIndex")
    gpu_uuid: str | None = field(name="gpuUUID", default=None)
    mig_uuid: str | None = field(name="migUUID", default=None)


def _read_positional(pod: PodRecord, key: str) -> list[HeldId]:
    """Reads an annotation of HAMi or Volcano.

    It lists the devices of each container, in the order of the containers. Volcano omits containers
    that request no GPU. HAMi since 2.9 lists the init containers first.
    """
    text = pod.annotation(key)
    if not text:
        return []

    slots = _parse_slots(text)
    if key == HAMI_DEVICES:
        for mig in _read_mig_devices(pod):
            _replace_by_mig(slots, mig)

    grants = []
    containers = _choose_order(slots, _list_orders(pod, key))
    # The annotation may list fewer containers, and empty ones beyond the pod's containers.
    for container, slot in zip(containers, slots, strict=False):
        if container.finished:
            continue
        for part in slot:
            if part is not None:
                grants.append(_hold(pod, container, part.device, key, part.share))
    return grants


def _parse_slots(text: str) -> list[_ContainerSlices]:
    """Parses `DEVICE:DEVICE:;DEVICE:;`. A semicolon ends a container, a colon a device."""
    slots = []
    for devices in text.strip().removesuffix(";").split(";"):
        slots.append([_parse_slice(device) for device in devices.split(":") if device])
    return slots


def _read_mig_devices(pod: PodRecord) -> list[_HamiMigDevice]:
    text = pod.annotation(HAMI_MIG_DEVICES)
    if text in ("", "null"):
        return []
    return find_decoder(list[_HamiMigDevice]).decode(text)


def _list_orders(pod: PodRecord, key: str) -> list[tuple[ContainerRecord, ...]]:
    """Returns the orders in which the annotation may list the containers, the likeliest first."""
    requesting = tuple(filter(_requests_gpu, pod.containers))
    if key == HAMI_DEVICES:
        all_requesting = tuple(filter(_requests_gpu, pod.all_containers))
        return [pod.all_containers, pod.containers, all_requesting]
    if key == VOLCANO_DEVICES:
        return [requesting, pod.containers]
    return [pod.containers, requesting]


def _parse_slice(text: str) -> _Slice | None:
    """Returns None for a text that names no NVIDIA GPU. Raises ValueError."""
    fields = text.split(",")
    if len(fields) < 4:
        raise ValueError(f"{text[:80]!a} must be an id, a type, a memory size and a percentage")
    device, kind, memory, percentage = fields[:4]
    _number(memory, "memory size")
    cores = _number(percentage, "percentage")

    # Some versions write `,,0,0` for a container without devices. HAMi 1 also lists cards of other
    # vendors.
    is_of_other_vendor = kind != "" and "NVIDIA" not in kind.upper()
    if not device or is_of_other_vendor:
        return None
    return _Slice(device, _share(cores))


def _choose_order(
    slots: Sequence[_ContainerSlices], orders: Sequence[Sequence[ContainerRecord]]
) -> Sequence[ContainerRecord]:
    """Returns the containers in the order in which the annotation lists them.

    The order depends on the version, and HAMi 2.10 omits some containers by mistake (HAMi#2899,
    HAMi#3079). An order is right if exactly the containers that request a GPU get one. If no order
    is right, because the cluster uses other resource names, returns an order as long as the
    annotation, or else the longest order.
    """
    filled = [number for number, slot in enumerate(slots) if any(slot)]
    # An order needs at least this many containers.
    needed = max(filled, default=-1) + 1
    for order in orders:
        if needed > len(order):
            continue
        requesting = {container.name for container in order if _requests_gpu(container)}
        receiving = {order[number].name for number in filled}
        if receiving == requesting:
            return order

    as_long = [order for order in orders if len(order) == len(slots)]
    fallback = as_long[0] if as_long else max(orders, key=len)
    if needed > len(fallback):
        raise ValueError(
            f"the annotation assigns devices to container number {needed}, but the pod has "
            f"{len(fallback)} containers"
        )
    return fallback


def _replace_by_mig(slots: list[_ContainerSlices], mig: _HamiMigDevice) -> None:
    """Replaces a GPU by the MIG instance that HAMi creates on it.

    Replaces it by None until the instance exists.
    """
    whole = None
    with suppress(IndexError):
        whole = slots[mig.container][mig.device]
    if whole is None or (mig.gpu_uuid and mig.gpu_uuid.lower() != whole.device.lower()):
        raise ValueError(
            f"{HAMI_MIG_DEVICES} names another GPU for device {mig.device} of container "
            f"{mig.container}"
        )

    # The share is 1, because HAMi creates each instance for one container.
    instance = _Slice(mig.mig_uuid, 1.0) if mig.mig_uuid else None
    slots[mig.container][mig.device] = instance


def gpu_manager_grants(pod: PodRecord) -> list[HeldId]:
    """Reads one annotation per container.

    Ignores these annotations until the scheduler sets gpu-assigned to true.
    """
    if pod.annotation(GPU_MANAGER_ASSIGNED) != "true":
        return []

    grants = []
    for key, text in pod.annotations:
        if not key.startswith(GPU_MANAGER_CARDS) or not text:
            continue
        number = _number(key.removeprefix(GPU_MANAGER_CARDS), "container")
        if number >= len(pod.containers):
            raise ValueError(f"there is no container {number}: the pod has {len(pod.containers)}")
        container = pod.containers[number]
        cards = {_number(card.strip(), "card") for card in text.split(",")}

        # A request below 100 cores is a fraction of one card. A larger request is for whole cards.
        cores = container.amount(VCUDA_CORE)
        share = None
        if cores >= 100:
            share = 1.0
        elif len(cards) == 1:
            share = _share(cores)

        for card in sorted(cards):
            grants.append(_hold(pod, container, card, key, share))
    return grants


FORMATS: Mapping[str, Callable[[PodRecord], list[HeldId]]] = {
    KOORDINATOR_DEVICES: koordinator_grants,
    HAMI_DEVICES: partial(_read_positional, key=HAMI_DEVICES),
    HAMI_1_DEVICES: partial(_read_positional, key=HAMI_1_DEVICES),
    VOLCANO_DEVICES: partial(_read_positional, key=VOLCANO_DEVICES),
    GPU_MANAGER_CARDS: gpu_manager_grants,
}
"""Name of the annotation -> function that reads it."""


# Reservation pods of KAI Scheduler and Run:ai. A pod that uses a fraction of a GPU does not request
# a device. Instead, the scheduler creates a reservation pod that requests the whole GPU. The
# kubelet lists only the reservation pod. All pods that share the GPU have the same group name in
# their labels.

_SCALING_NAMESPACES = ("kai-scale-adjust", "runai-scale-adjust")
"""Namespaces of pods that request whole GPUs only to make an autoscaler add nodes."""
_MEMORY_MIB = re.compile(r"[1-9][0-9]{0,9}")


def replace_reservations(
    readings: Mapping[str, Allocation],
    pods: Sequence[PodRecord],
    devices: Sequence[Device],
    complete: Complete,
) -> dict[str, Allocation]:
    """Replaces each reservation pod by the pods of its group, in the readings of all sources.

    If `pods` is empty, the groups are unknown, and the GPU is reported as unmapped (`reserved`). A
    holder that another source reports for this GPU has an unknown fraction.
    """
    records = {(pod.namespace, pod.name): pod for pod in pods}
    reservations = _Reservations(records, complete)
    removed: dict[str, Allocation] = {}
    # The members of groups are added to this source, also if it is not used or has failed.
    if pods and SOURCE not in readings:
        removed[SOURCE] = Allocation()
    for source, reading in readings.items():
        removed[source] = reservations.remove_from(source, reading)

    # All readings must have been searched before.
    replaced = {}
    for source, reading in removed.items():
        replaced[source] = _mark_shared(reading, reservations.unknown_devices)

    if pods:
        members = _find_members(pods, reservations.devices, devices)
        reading = replaced[SOURCE]
        replaced[SOURCE] = replace(
            reading,
            assignments=members.assignments + reading.assignments,
            unmapped=reading.unmapped + members.unmapped,
        )
    return replaced


class _Reservations:
    """The reservation pods in all readings."""

    def __init__(self, records: Mapping[PodName, PodRecord], complete: Complete) -> None:
        self._records = records
        self._complete = complete
        self.devices: dict[PodRecord, set[str]] = defaultdict(set)  # of each reservation pod
        self.unknown_devices: set[str] = set()  # of reservations whose group is unknown

    def remove_from(self, source: str, reading: Allocation) -> Allocation:
        """Returns the reading without reservation pods. Adds their devices to the reservations."""
        kept = []
        unmapped = list(reading.unmapped)
        for assignment in reading.assignments:
            holder = complete_if_certain(self._complete, assignment.holder)
            pod = self._records.get(holder.pod_name)
            if pod is not None and _is_reservation(pod):
                self.devices[pod].add(assignment.device)
            elif pod is None and holder.is_reservation:
                # Only its name shows that it is a reservation. Its group is unknown.
                unmapped.append(Unmapped(source, "reserved", assignment.device, "", holder))
                self.unknown_devices.add(assignment.device)
            elif holder.namespace not in _SCALING_NAMESPACES:
                kept.append(assignment)
        return replace(reading, assignments=tuple(kept), unmapped=tuple(unmapped))


def _mark_shared(reading: Allocation, devices: set[str]) -> Allocation:
    assignments = []
    for assignment in reading.assignments:
        if assignment.device in devices:
            assignment = replace(assignment, is_shared=True)
        assignments.append(assignment)
    return replace(reading, assignments=tuple(assignments))


def _is_reservation(pod: PodRecord) -> bool:
    if not _read_groups(pod):
        return False
    if pod.annotation(RESERVED_GPU):
        return True
    return any(pod.workload(container).is_reservation for container in pod.containers)


def _read_groups(pod: PodRecord) -> set[str]:
    return {group for label, group in pod.labels if label.partition("/")[0] == GPU_GROUP}


def _find_groups(
    pods: Sequence[PodRecord], reserved: Mapping[PodRecord, set[str]], index: DeviceIndex
) -> dict[str, set[str]]:
    """Returns the devices of each group.

    These are the devices that its reservation pod holds, or else those in the pod's annotation.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for pod in pods:
        if not _is_reservation(pod) or pod.is_finished:
            continue

        held = reserved.get(pod, set())
        device_id = parse_device_id(pod.annotation(RESERVED_GPU))
        if not held and device_id is not None:
            held = {device.key for device in index.find(device_id)}

        for group in _read_groups(pod):
            groups[group] |= held
    return groups


def _find_members(
    pods: Sequence[PodRecord], reserved: Mapping[PodRecord, set[str]], devices: Sequence[Device]
) -> Allocation:
    """Returns what the pods of the groups hold."""
    groups = _find_groups(pods, reserved, DeviceIndex(devices))
    by_key = {device.key: device for device in devices}
    members = []
    unmapped = []
    for pod in pods:
        container = _find_container(pod)
        if _is_reservation(pod) or pod.is_finished or not pod.node or container is None:
            continue

        holder = pod.workload(container)
        for group in sorted(_read_groups(pod)):
            held = groups.get(group, set())
            if len(held) != 1:
                # A bug of KAI before 0.16 can create two reservation pods for one group.
                unmapped.append(Unmapped(SOURCE, "unknown_group", group, GPU_GROUP, holder))
                continue
            (key,) = held
            share = _compute_share(pod, by_key.get(key))
            members.append(Assignment(key, holder, SOURCE, share=share, is_shared=True))
    return Allocation(tuple(members), tuple(unmapped))


def _find_container(pod: PodRecord) -> ContainerRecord | None:
    """Returns the container that uses the GPU, or None if that container has finished."""
    name = pod.annotation(CONTAINER)
    named = [container for container in pod.all_containers if container.name == name]
    containers = named or pod.containers
    if not containers or containers[0].finished:
        return None
    return containers[0]


def _compute_share(pod: PodRecord, device: Device | None) -> float | None:
    """Returns the fraction of the GPU that the pod holds. None if it is unknown."""
    # Without this annotation, the text is empty and no number.
    with suppress(ValueError):
        fraction = float(pod.annotation(GPU_FRACTION))
        if 0 < fraction <= 1:
            return fraction
        return None

    memory = pod.annotation(GPU_MEMORY)
    if device is None or not _MEMORY_MIB.fullmatch(memory):
        return None

    # As KAI Scheduler computes it: memory in steps of 100 MiB, and the share in whole percents.
    total = int(device.memory_bytes or 0) // MIB // 100 * 100
    if not total:
        return None
    return min(1.0, ceil(100 * int(memory) / total) / 100)


def find_reserved(allocation: Allocation) -> frozenset[str]:
    """Returns the keys of reserved devices whose holders are unknown."""
    held = {assignment.device for assignment in allocation.assignments}
    return frozenset(allocation.reserved - held)
