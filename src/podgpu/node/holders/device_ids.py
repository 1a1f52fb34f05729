"""Parses device ids of device plugins, maps them to devices, and computes each holder's share."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from podgpu.known import sum_all
from podgpu.model import (
    Allocation,
    Assignment,
    Device,
    Unmapped,
    VcudaRequest,
    Workload,
    parts_of,
)

VCUDA_CORE = "tencent.com/vcuda-core"
VCUDA_MEMORY = "tencent.com/vcuda-memory"


class DeviceId(NamedTuple):
    """A parsed device id. Fields that the id does not contain are None, False or empty."""

    gpu_uuid: str | None = None
    mig_uuid: str | None = None
    # N of /dev/nvidiaN. Can differ from the driver's index, which is in PCI order.
    minor: int | None = None
    gi_id: int | None = None
    ci_id: int | None = None
    # True if the id stands for all GPUs of the node: `all` on WSL, `tegra` on Tegra boards.
    everything: bool = False
    replica: str = ""  # time slice, MPS client or vGPU of a shared device

    @property
    def without_replica(self) -> DeviceId:
        """The same for all replicas of a shared device."""
        return self._replace(replica="")


_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# Rejects leading zeros, because smarter-device-manager names its copies of /dev/nvidia0 "nvidia00",
# "nvidia01".
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"

_NVIDIA_PLUGIN = re.compile(
    rf"(?P<gpu>GPU-{_UUID})"
    rf"|(?P<mig>MIG-{_UUID})"
    rf"|MIG-(?P<parent>GPU-{_UUID})/(?P<gi>{_NUMBER})/(?P<ci>{_NUMBER})",
    re.IGNORECASE | re.ASCII,
)
_GKE_PLUGIN = re.compile(
    rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gi>{_NUMBER}))?(?:/vgpu(?P<vgpu>{_NUMBER}))?", re.ASCII
)
# The number of bytes is that of a memory block, 256 MiB.
_VCUDA_ID = re.compile(
    r"tencent\.com/vcuda-(?:(?P<core>core)|(?P<memory>memory-268435456))-[0-9]+", re.ASCII
)
_MINOR = re.compile(_NUMBER, re.ASCII)


def parse_device_id(text: str) -> DeviceId | None:
    """Parses a device id.

    Returns None for ids that do not identify a GPU, such as `tencent.com/vcuda-core-3`.
    """
    name, _, replica = text.partition("::")
    if name in ("all", "tegra"):
        return DeviceId(everything=True, replica=replica)

    match = _NVIDIA_PLUGIN.fullmatch(name)
    if match is not None:
        return DeviceId(
            gpu_uuid=match["gpu"] or match["parent"],
            mig_uuid=match["mig"],
            gi_id=_number(match["gi"]),
            ci_id=_number(match["ci"]),
            replica=replica,
        )

    match = _GKE_PLUGIN.fullmatch(text)
    if match is not None:
        return DeviceId(
            minor=int(match["minor"]), gi_id=_number(match["gi"]), replica=match["vgpu"] or ""
        )
    return None


def parse_id_or_minor(text: str) -> DeviceId | None:
    """Like `parse_device_id`, but also accepts a plain minor, which koordinator's hook writes."""
    if _MINOR.fullmatch(text):
        return DeviceId(minor=int(text))
    return parse_device_id(text)


def _number(digits: str | None) -> int | None:
    if digits is None:
        return None
    return int(digits)


class DeviceIndex:
    def __init__(self, devices: Sequence[Device]) -> None:
        self._whole = tuple(device for device in devices if not device.is_instance)

        self._by_uuid: dict[tuple[str, int | None], Device] = {}
        self._by_mig_uuid: dict[str, Device] = {}
        self._uuid_by_minor: dict[int | None, str] = {}
        for device in devices:
            key = device.uuid.lower(), device.gi_id
            self._by_uuid[key] = device
            for uuid in device.mig_uuids:
                self._by_mig_uuid[uuid.lower()] = device
            # If two devices have the same minor number, uses the first. The second is a lost GPU.
            if device.minor is not None:
                self._uuid_by_minor.setdefault(device.minor, device.uuid)

    def find(self, device_id: DeviceId) -> tuple[Device, ...]:
        """Returns the devices that the id identifies, or an empty tuple. Ignores the replica."""
        if device_id.everything:
            return self._whole
        device: Device | None
        if device_id.mig_uuid is not None:
            device = self._by_mig_uuid.get(device_id.mig_uuid.lower())
        else:
            uuid = device_id.gpu_uuid or self._uuid_by_minor.get(device_id.minor) or ""
            device = self._by_uuid.get((uuid.lower(), device_id.gi_id))
        if device is None:
            return ()
        return (device,)


class HeldId(NamedTuple):
    """A device id that a workload holds, as the source reports it."""

    holder: Workload
    resource: str
    text: str
    share: float | None = None  # fraction of the device, if the source reports it

    def to_unmapped(self, source: str, reason: str) -> Unmapped:
        return Unmapped(source, reason, self.text, self.resource, self.holder)


def is_gpu(held: HeldId, resource_names: frozenset[str]) -> bool:
    """Returns True for a GPU resource, and for an id that identifies a GPU.

    The ids `all` and `tegra` are accepted only in a GPU resource.
    """
    if held.resource.startswith("nvidia.com/") or held.resource in resource_names:
        return True

    device_id = parse_device_id(held.text)
    return device_id is not None and not device_id.everything


def map_held(
    source: str,
    held: Iterable[HeldId],
    devices: Sequence[Device],
    registered: Mapping[DeviceId, Set[str]] | None = None,
    parse: Callable[[str], DeviceId | None] = parse_device_id,
) -> Allocation:
    """Maps ids to devices. Creates one assignment per holder and device.

    `registered`: the replicas of each shared device, from which shares are computed. If None, the
    shares in `held` are added up. `parse`: returns None for an id that the source does not use.
    """
    index = DeviceIndex(devices)
    ids = []
    held_devices: dict[tuple[str, Workload], list[_HeldDevice]] = defaultdict(list)
    unmapped = set()
    for entry in held:
        device_id = parse(entry.text)
        if device_id is None:
            unmapped.add(entry.to_unmapped(source, "unrecognised_id"))
            continue

        ids.append(device_id)
        found = index.find(device_id)
        if not found:
            unmapped.add(entry.to_unmapped(source, "unknown_device"))
        for device in found:
            held_device = _HeldDevice(device, device_id, entry.share)
            held_devices[device.key, entry.holder].append(held_device)

    if registered is not None:
        registered = _add_held(registered, ids)

    assignments = []
    for (key, holder), own in held_devices.items():
        if registered is not None:
            share = _compute_share(registered, own)
        else:
            share = add_shares(held_device.share for held_device in own)
        replica = _find_first_replica(own)
        assignments.append(Assignment(key, holder, source, replica, share))
    return sort_allocation(assignments, unmapped)


class _HeldDevice(NamedTuple):
    device: Device
    device_id: DeviceId
    share: float | None


def _find_first_replica(held: Iterable[_HeldDevice]) -> str:
    """Compares lengths first, because replicas are numbers and 9 must come before 10."""
    replicas = [held_device.device_id.replica for held_device in held]
    return min(replicas, key=lambda replica: (len(replica), replica))


def add_shares(shares: Iterable[float | None]) -> float | None:
    """Adds shares, up to 1. Returns None if one of them is unknown."""
    total = sum_all(shares)
    if total is None:
        return None
    return min(1.0, total)


def _compute_share(
    replicas: Mapping[DeviceId, Set[str]], held: Sequence[_HeldDevice]
) -> float | None:
    """Returns held replicas divided by all replicas, or 1 for a whole device.

    Returns None if the share is unknown.
    """
    ids = {held_device.device_id for held_device in held}
    device = held[0].device
    is_compute_instance = any(each.mig_uuid or each.ci_id is not None for each in ids)
    if is_compute_instance and len(device.mig_uuids) > 1:
        # The device has several compute instances of unknown sizes.
        return None
    if not all(device_id.replica for device_id in ids):
        return 1.0

    counts = Counter(device_id.without_replica for device_id in ids)
    if not counts.keys() <= replicas.keys():
        return None
    return add_shares(count / len(replicas[shared]) for shared, count in counts.items())


def sort_allocation(assignments: Iterable[Assignment], unmapped: Iterable[Unmapped]) -> Allocation:
    """Builds a sorted Allocation, because sources report in random order."""

    def assignment_key(entry: Assignment) -> tuple[str, tuple[str, ...]]:
        return entry.device, parts_of(entry.holder)

    def unmapped_key(entry: Unmapped) -> tuple[str, ...]:
        return entry.device_id, *parts_of(entry.holder), entry.resource, entry.reason

    sorted_assignments = sorted(assignments, key=assignment_key)
    sorted_unmapped = sorted(unmapped, key=unmapped_key)
    return Allocation(tuple(sorted_assignments), tuple(sorted_unmapped))


# Replicas of shared devices


def group_replicas(registered: Iterable[str]) -> dict[DeviceId, set[str]]:
    """Returns the replicas of each shared device, by its id without a replica.

    `registered`: ids that a device plugin registered.
    """
    replicas: dict[DeviceId, set[str]] = defaultdict(set)
    for text in registered:
        device_id = parse_device_id(text)
        if device_id is not None and device_id.replica:
            replicas[device_id.without_replica].add(device_id.replica)
    return dict(replicas)


def _add_held(
    registered: Mapping[DeviceId, Set[str]], held: Iterable[DeviceId]
) -> dict[DeviceId, set[str]]:
    """Adds held replicas that are not registered, so that shares add up to at most 1."""
    replicas = {shared: set(numbers) for shared, numbers in registered.items()}
    for device_id in held:
        if device_id.replica and device_id.without_replica in replicas:
            replicas[device_id.without_replica].add(device_id.replica)
    return replicas


# gpu-manager: an id stands for a hundredth of a card or for 256 MiB of memory. It does not identify
# the card.


def count_vcuda(held: Iterable[HeldId]) -> tuple[VcudaRequest, ...]:
    """Counts the vcuda ids of each container.

    An id that is listed for several NUMA nodes is counted once.
    """
    ids: dict[Workload, set[str]] = defaultdict(set)
    for entry in held:
        if entry.resource in (VCUDA_CORE, VCUDA_MEMORY):
            ids[entry.holder].add(entry.text)

    requests = []
    for holder, texts in ids.items():
        kinds: Counter[str | None] = Counter()
        for text in texts:
            match = _VCUDA_ID.fullmatch(text)
            if match is not None:
                kinds[match.lastgroup] += 1
        if kinds:
            request = VcudaRequest.for_holder(holder, kinds["core"], kinds["memory"])
            requests.append(request)
    return tuple(sorted(requests, key=parts_of))
