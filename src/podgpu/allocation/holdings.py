"""Ids in somebody's hands: which of them concern GPUs, which device each names, and how much of it that is. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import fsum
from typing import Generic, NamedTuple, TypeVar

from podgpu.device_ids import DeviceId, DeviceIndex, parse_device_id
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload

T = TypeVar("T")
Shared = tuple[object, ...]
"""What the ids of all replicas of one device have in common."""

parse_id = lru_cache(maxsize=4096)(parse_device_id)
"""The same few ids come at every reading."""


class HeldId(NamedTuple):
    """One id in somebody's hands, as a source says it; `device_id` is None when it cannot be read."""

    holder: Workload
    resource: str
    text: str
    device_id: DeviceId | None


ShareOf = Callable[[Device, frozenset[DeviceId]], float | None]


def share_unknown(device: Device, held: frozenset[DeviceId]) -> None:
    """Of sources that do not say how much of the device its holder was given."""


def map_held(
    source: str, held: Iterable[HeldId], devices: Sequence[Device], share_of: ShareOf = share_unknown
) -> Allocation:
    """Who holds which of the devices. A holder holds a device once, however many ids of it are listed in any order."""
    index = DeviceIndex(devices)
    by_key = {device.key: device for device in devices}
    ids: dict[tuple[str, Workload], set[DeviceId]] = {}
    unmapped: set[Unmapped] = set()
    for one in held:
        if one.device_id is None:
            unmapped.add(Unmapped(source, "unrecognised_id", one.text, one.resource, one.holder))
            continue
        found = index.find(one.device_id)
        if not found:
            unmapped.add(Unmapped(source, "unknown_device", one.text, one.resource, one.holder))
        for device in found:
            ids.setdefault((device.key, one.holder), set()).add(one.device_id)
    return in_order(
        (
            Assignment(key, holder, source, _first_replica(held_ids), share_of(by_key[key], frozenset(held_ids)))
            for (key, holder), held_ids in ids.items()
        ),
        unmapped,
    )


def _first_replica(held: Iterable[DeviceId]) -> str:
    # Shorter first: replicas are numbers, and 9 comes before 10.
    return min((one.replica for one in held), key=lambda replica: (len(replica), replica))


def in_order(assignments: Iterable[Assignment], unmapped: Iterable[Unmapped]) -> Allocation:
    """The same whatever order they were found in."""
    return Allocation(
        tuple(sorted(assignments, key=lambda one: (one.device, *_names(one.holder)))),
        tuple(sorted(unmapped, key=lambda one: (one.device_id, *_names(one.holder), one.resource, one.reason))),
    )


def _names(holder: Workload) -> tuple[str, ...]:
    return holder.namespace, holder.pod, holder.container, holder.uid, holder.job


class LastMapping(Generic[T]):
    """Maps an unchanged reading onto unchanged devices once, not at every reading."""

    def __init__(self, mapping: Callable[[T, Sequence[Device]], Allocation]) -> None:
        self._mapping = mapping
        self._last: tuple[T, tuple[Device, ...], Allocation] | None = None

    def of(self, parsed: T, devices: Sequence[Device]) -> Allocation:
        node = tuple(devices)
        if self._last is not None and self._last[0] is parsed and self._last[1] == node:
            return self._last[2]
        allocation = self._mapping(parsed, node)
        self._last = parsed, node, allocation
        return allocation


def concerns_gpus(one: HeldId, resource_names: frozenset[str]) -> bool:
    """A GPU resource, or an id that names a GPU whatever its resource is called.

    `all` and `tegra` name one only under a GPU resource: elsewhere they are some other plugin's word.
    """
    if one.resource in resource_names or one.resource.startswith("nvidia.com/"):
        return True
    device_id = one.device_id
    return device_id is not None and not (device_id.everything or device_id.integrated)


def share_of(replicas: Mapping[Shared, int], device: Device, held: frozenset[DeviceId]) -> float | None:
    """Replicas held of those there are; a device held whole is 1. None where it cannot be told."""
    if len(device.mig_uuids) > 1 and any(_is_compute_instance(one) for one in held):
        return None  # one of several in the GPU instance: the id does not say how large it is
    if any(not one.replica for one in held):
        return 1.0
    of_each = Counter(_shared(one) for one in held)
    if any(shared not in replicas for shared in of_each):
        return None  # its plugin is gone, and its count with it
    return min(1.0, fsum(count / replicas[shared] for shared, count in of_each.items()))


def _is_compute_instance(device_id: DeviceId) -> bool:
    return device_id.mig_uuid is not None or device_id.ci_id is not None


def _shared(one: DeviceId) -> Shared:
    return one.gpu_uuid, one.mig_uuid, one.minor, one.gi_id, one.ci_id, one.everything, one.integrated


def count_replicas(held: Iterable[HeldId], registered: Iterable[str]) -> dict[Shared, int]:
    """Registered are the healthy ones. Those in somebody's hands count too, so that shares add up to 1 at most."""
    replicas: dict[Shared, set[str]] = defaultdict(set)
    for device_id in map(parse_id, registered):
        if device_id is not None and device_id.replica:
            replicas[_shared(device_id)].add(device_id.replica)
    for device_id in {one.device_id for one in held}:
        if device_id is not None and device_id.replica and (known := replicas.get(_shared(device_id))):
            known.add(device_id.replica)
    return {shared: len(numbers) for shared, numbers in replicas.items()}
