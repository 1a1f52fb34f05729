"""This module maps the ids in somebody's hands: which of them concern GPUs, which device each names, and how much of it
that is. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from math import fsum
from operator import attrgetter
from typing import NamedTuple, TypeVar

from podgpu.holders.device_ids import DeviceId, DeviceIndex, Shared, parse_device_id
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload, parts_of

T = TypeVar("T")

parse_id = lru_cache(maxsize=4096)(parse_device_id)
"""The same few ids come at every reading: 2 to 6 ms of a turn on a full node (`python -m bench allocation`)."""


class HeldId(NamedTuple):
    """One id in somebody's hands, as a source says it; `device_id` is None when it cannot be read."""

    holder: Workload
    resource: str
    text: str
    device_id: DeviceId | None


Replicas = Mapping[Shared, int]
"""How many replicas there are of each shared device."""


def map_held(
    source: str, held: Iterable[HeldId], devices: Sequence[Device], replicas: Replicas | None = None
) -> Allocation:
    """Who holds which of the devices: each a device once, however many ids of it are listed in any order.

    `replicas` is None for sources that do not say how much of a device its holder was given.
    """
    index = DeviceIndex(devices)
    ids_of: dict[Workload, dict[str, tuple[Device, set[DeviceId]]]] = {}
    unmapped: set[Unmapped] = set()
    for holder, resource, text, device_id in held:
        found = () if device_id is None else index.find(device_id)
        if device_id is None or not found:
            reason = "unrecognised_id" if device_id is None else "unknown_device"
            unmapped.add(Unmapped(source, reason, text, resource, holder))
            continue
        for device in found:
            ids_of.setdefault(holder, {}).setdefault(device.key, (device, set()))[1].add(device_id)
    assignments = (
        Assignment(key, holder, source, _first_replica(ids), share_of(replicas, device, ids))
        for holder, of_holder in ids_of.items()
        for key, (device, ids) in of_holder.items()
    )
    return in_order(assignments, unmapped)


def _first_replica(held: Set[DeviceId]) -> str:
    if len(held) == 1:
        return next(iter(held)).replica
    # Shorter first: replicas are numbers, and 9 comes before 10.
    return min((device_id.replica for device_id in held), key=lambda replica: (len(replica), replica))


def in_order(assignments: Iterable[Assignment], unmapped: Iterable[Unmapped]) -> Allocation:
    """The same whatever order they were found in."""
    return Allocation(by_device_and_name(assignments), _unmapped_in_order(unmapped))


def _unmapped_in_order(unmapped: Iterable[Unmapped]) -> tuple[Unmapped, ...]:
    def place(entry: Unmapped) -> tuple[str, ...]:
        return entry.device_id, *parts_of(entry.holder), entry.resource, entry.reason

    return tuple(sorted(unmapped, key=place))


def by_device_and_name(assignments: Iterable[Assignment]) -> tuple[Assignment, ...]:
    """Two sorts by one key each: cheaper by half than one by a key that has to be made for every assignment."""
    named = sorted(assignments, key=lambda assignment: parts_of(assignment.holder))
    return tuple(sorted(named, key=attrgetter("device")))


def concerns_gpus(one: HeldId, resource_names: frozenset[str]) -> bool:
    """A GPU resource, or an id that names a GPU whatever its resource is called.

    `all` and `tegra` name one only under a GPU resource: elsewhere they are some other plugin's word.
    """
    if one.resource.startswith("nvidia.com/") or one.resource in resource_names:
        return True
    device_id = one.device_id
    return device_id is not None and not (device_id.everything or device_id.integrated)


def share_of(replicas: Replicas | None, device: Device, held: Set[DeviceId]) -> float | None:
    """Replicas held of those there are; a device held whole is 1. None where it cannot be told."""
    if replicas is None:
        return None
    if len(device.mig_uuids) > 1 and any(_is_compute_instance(device_id) for device_id in held):
        return None  # one of several in the GPU instance: the id does not say how large it is
    if len(held) == 1:
        return _share_of_one(replicas, *held)
    of_each: dict[Shared, int] = {}
    for device_id in held:
        if not device_id.replica:
            return 1.0
        of_each[device_id.shared] = of_each.get(device_id.shared, 0) + 1
    parts = [count / replicas[shared] for shared, count in of_each.items() if shared in replicas]
    # One that is not in there: its plugin is gone, and its count with it.
    return min(1.0, fsum(parts)) if len(parts) == len(of_each) else None


def _share_of_one(replicas: Replicas, held: DeviceId) -> float | None:
    if not held.replica:
        return 1.0
    count = replicas.get(held.shared)
    return None if count is None else 1 / count


def _is_compute_instance(device_id: DeviceId) -> bool:
    return device_id.mig_uuid is not None or device_id.ci_id is not None


def count_replicas(held: Iterable[HeldId], known: Mapping[Shared, Set[str]]) -> dict[Shared, int]:
    """Those in somebody's hands count too, known or not, so that shares add up to 1 at most."""
    more: dict[Shared, set[str]] = defaultdict(set)
    for _, _, _, device_id in held:
        if device_id is not None and (replica := device_id.replica):
            numbers = known.get(device_id[:-1])
            if numbers and replica not in numbers:
                more[device_id.shared].add(replica)
    return {shared: len(numbers) + len(more.get(shared, ())) for shared, numbers in known.items() if numbers}


def replicas_of(registered: Iterable[str]) -> Mapping[Shared, frozenset[str]]:
    """The replicas of each shared device, from the ids a device plugin registered."""
    replicas: dict[Shared, set[str]] = defaultdict(set)
    for device_id in map(parse_id, registered):
        if device_id is not None and device_id.replica:
            replicas[device_id.shared].add(device_id.replica)
    return {shared: frozenset(numbers) for shared, numbers in replicas.items()}


class KnownReplicas:
    """The replicas of shared devices, as last told; of one that is held, all that were ever told meanwhile.

    The kubelet tells of healthy ones only, and of none while their device plugin is away: a part of a device would
    grow, though nobody was given more.
    """

    def __init__(self) -> None:
        self._told: dict[Shared, frozenset[str]] = {}
        self._held: frozenset[Shared] = frozenset()

    def of(self, held: Iterable[HeldId]) -> Mapping[Shared, frozenset[str]]:
        """Of every shared device that is held; empty where they were never told."""
        return {device: self._told.get(device, frozenset()) for device in _shared_in(held)}

    def learn(self, registered: Iterable[str], held: Iterable[HeldId]) -> None:
        """A device is still held for the time until the next count: a kubelet started anew forgets whom it gave it."""
        told, held_now = replicas_of(registered), _shared_in(held)
        kept = {device: self._told.get(device, frozenset()) for device in held_now | self._held}
        devices = kept.keys() | told.keys()
        self._told = {device: kept.get(device, frozenset()) | told.get(device, frozenset()) for device in devices}
        self._held = held_now


def _shared_in(held: Iterable[HeldId]) -> frozenset[Shared]:
    return frozenset(
        held_id.device_id.shared for held_id in held if held_id.device_id is not None and held_id.device_id.replica
    )
