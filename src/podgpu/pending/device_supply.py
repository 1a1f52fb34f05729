"""Finds out whether the devices (DRA) of a node suffice for the claims of a pod.

Allocates devices in the way of the scheduler, but simpler: each request takes the first devices
that match, and requests with few candidates come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from podgpu.pending.cel import UnknownExpression, matches
from podgpu.pending.cluster_objects import NodeRecord
from podgpu.pending.dra_objects import (
    AllocatedDevice,
    ClaimRecord,
    ClaimSpec,
    CounterUse,
    DeviceClassRecord,
    DeviceRequest,
    DraDevice,
    DraDeviceId,
    SliceRecord,
    newest_slices,
)
from podgpu.pending.selectors import list_untolerated

_MAX_TRIES = 64  # values of a matched attribute
_CounterKey = tuple[str, str, str, str]
"""Driver, pool, counter set and counter."""
_NONE = Fraction(0)


class Supply(NamedTuple):
    """What a node has for a pod, in GPUs or in units of a resource."""

    needed: float
    total: float  # on the node, whoever holds it
    free: float
    fits_empty: bool  # it would suffice if the node were empty
    fits: bool
    is_unknown: bool = False  # a selector is not supported


Taken = Mapping[DraDeviceId, Sequence[AllocatedDevice]]
"""What claims have of each device. A shared device may have several."""


class _Choice(NamedTuple):
    """A request, and the devices that it may have."""

    request: DeviceRequest
    devices: list[DraDevice]


class Devices:
    """All devices of ResourceSlices, and what claims have of them."""

    def __init__(
        self,
        slices: Iterable[SliceRecord],
        classes: Mapping[str, DeviceClassRecord],
        claims: Iterable[ClaimRecord],
    ) -> None:
        self.classes = classes
        self._by_node: dict[str, list[DraDevice]] = defaultdict(list)
        self._elsewhere: list[DraDevice] = []  # for several nodes
        self._counters: dict[_CounterKey, Fraction] = {}  # what the pools have
        self._by_id: dict[DraDeviceId, DraDevice] = {}
        # By device, device class and selectors. None if a selector is not supported.
        self._matches: dict[tuple[DraDeviceId, str, tuple[str, ...]], bool | None] = {}
        for each in newest_slices(slices):
            self._add_slice(each)

        self.taken: dict[DraDeviceId, list[AllocatedDevice]] = defaultdict(list)
        for claim in claims:
            for held in claim.devices:
                self.taken[held.device].append(held)

    def _add_slice(self, each: SliceRecord) -> None:
        counters = _list_counters(each.driver, each.pool, each.counter_sets)
        self._counters.update(counters)
        for device in each.devices:
            self._by_id[device.id] = device
            if device.node:
                self._by_node[device.node].append(device)
            else:
                self._elsewhere.append(device)

    def list_on(self, node: NodeRecord) -> list[DraDevice]:
        """Returns the devices that pods on the node can use."""
        devices = list(self._by_node.get(node.name, ()))
        for device in self._elsewhere:
            is_offered = device.slice_selector.accepts(node.labels)
            if is_offered and device.node_selector.accepts(node.labels):
                devices.append(device)
        return devices

    def supply(self, specs: Sequence[ClaimSpec], node: NodeRecord, taken: Taken) -> Supply:
        """`taken`: what claims have now."""
        devices = self.list_on(node)
        taken_here = _select_taken(taken, devices)
        is_unknown = False
        needed = 0
        choices = []
        for spec in specs:
            is_unknown = is_unknown or spec.has_other_constraints
            for alternatives in spec.requests:
                preferred = alternatives[0]
                matching = self._find_matching(preferred, devices)
                if matching is None:
                    is_unknown = True
                    matching = []

                needed += len(matching) if preferred.wants_all else preferred.number
                choices.append(_Choice(preferred, matching))

        # All devices of a node are at least one: without any, the request is not satisfied.
        needed = max(1, needed)
        fits = self._fits(specs, devices, taken_here)
        # These may be the devices that an unsupported selector selects.
        if not fits and self._has_unknown(specs, devices):
            return Supply(needed, 0, 0, fits_empty=False, fits=False, is_unknown=True)

        return Supply(
            needed=needed,
            total=self._count(choices, ()),
            free=self._count(choices, taken_here),
            fits_empty=self._fits(specs, devices, ()),
            fits=fits,
            is_unknown=is_unknown,
        )

    def _has_unknown(self, specs: Iterable[ClaimSpec], devices: Sequence[DraDevice]) -> bool:
        for spec in specs:
            for alternatives in spec.requests:
                for request in alternatives:
                    if self._find_matching(request, devices) is None:
                        return True
        return False

    def count(self, driver: str, node: NodeRecord) -> tuple[float, float]:
        """Returns how many devices of a driver a node has, and how many are free."""
        devices = [device for device in self.list_on(node) if device.driver == driver]
        taken = _select_taken(self.taken, devices)
        anything = DeviceRequest(device_class="")
        choices = [_Choice(anything, devices)]
        return self._count(choices, ()), self._count(choices, taken)

    def _count(self, choices: Iterable[_Choice], taken: Sequence[AllocatedDevice]) -> int:
        """Returns how many devices can be had at the same time. Partitions exclude each other."""
        room = _Room(self._counters, self._by_id, taken)
        counted: set[DraDeviceId] = set()
        for request, devices in choices:
            for device in devices:
                if device.id not in counted and room.take_one(request, device):
                    counted.add(device.id)
        return len(counted)

    def _find_matching(
        self, request: DeviceRequest, devices: Iterable[DraDevice]
    ) -> list[DraDevice] | None:
        """Returns the devices that a request may have. None if this is unknown."""
        matching = []
        for device in devices:
            is_match = self._is_match(request, device)
            if is_match is None:
                return None
            if is_match and not list_untolerated(device.taints, request.tolerations):
                matching.append(device)

        return matching

    def _is_match(self, request: DeviceRequest, device: DraDevice) -> bool | None:
        """Returns None if this is unknown, because a selector is not supported."""
        key = device.id, request.device_class, request.selectors
        if key not in self._matches:
            self._matches[key] = self._compute_match(request, device)
        return self._matches[key]

    def _compute_match(self, request: DeviceRequest, device: DraDevice) -> bool | None:
        device_class = self.classes.get(request.device_class)
        if device_class is None:
            return False

        is_unknown = False
        for expression in (*device_class.selectors, *request.selectors):
            try:
                if not matches(expression, device):
                    return False
            except UnknownExpression:
                is_unknown = True

        return None if is_unknown else True

    def _fits(
        self,
        specs: Sequence[ClaimSpec],
        devices: Sequence[DraDevice],
        taken: Sequence[AllocatedDevice],
    ) -> bool:
        room = _Room(self._counters, self._by_id, taken)
        for spec in specs:
            left = self._allocate(spec, devices, room)
            if left is None:
                return False
            room = left
        return True

    def _allocate(self, spec: ClaimSpec, devices: Sequence[DraDevice], room: _Room) -> _Room | None:
        """Returns what a claim leaves of the room. None if the devices do not suffice."""
        groups: Sequence[Sequence[DraDevice]] = [devices]
        if spec.matched_attributes:
            groups = _group_by_attributes(spec.matched_attributes, devices)

        for group in groups:
            left = self._allocate_of(group, spec, room)
            if left is not None:
                return left
        return None

    def _allocate_of(
        self, devices: Sequence[DraDevice], spec: ClaimSpec, room: _Room
    ) -> _Room | None:
        requests = []
        for alternatives in spec.requests:
            requests.append(self._list_choices(alternatives, devices))

        # Requests with few candidates come first: others leave them nothing otherwise.
        requests.sort(key=lambda choices: min(len(choice.devices) for choice in choices))
        for choices in requests:
            left = room.take_first(choices)
            if left is None:
                return None
            room = left
        return room

    def _list_choices(
        self, alternatives: Iterable[DeviceRequest], devices: Sequence[DraDevice]
    ) -> list[_Choice]:
        choices = []
        for request in alternatives:
            # A device that may match counts as one that does not. See `supply`.
            matching = self._find_matching(request, devices) or []
            choices.append(_Choice(request, matching))
        return choices


def _select_taken(taken: Taken, devices: Iterable[DraDevice]) -> list[AllocatedDevice]:
    selected: list[AllocatedDevice] = []
    for device in devices:
        selected += taken.get(device.id, ())
    return selected


def _group_by_attributes(
    names: Sequence[str], devices: Iterable[DraDevice]
) -> Sequence[Sequence[DraDevice]]:
    groups: dict[tuple[object, ...], list[DraDevice]] = defaultdict(list)
    for device in devices:
        values = tuple(map(device.attributes.get, names))
        if None not in values:
            groups[values].append(device)

    return list(groups.values())[:_MAX_TRIES]


def _list_counters(
    driver: str, pool: str, uses: Iterable[CounterUse]
) -> Iterator[tuple[_CounterKey, Fraction]]:
    for use in uses:
        for name, amount in use.amounts:
            yield (driver, pool, use.counter_set, name), amount


class _Room:
    """What is left of the devices of a node."""

    def __init__(
        self,
        counters: Mapping[_CounterKey, Fraction],
        by_id: Mapping[DraDeviceId, DraDevice],
        taken: Iterable[AllocatedDevice],
    ) -> None:
        self._counters = counters  # what the pools have
        self._used_counters: dict[_CounterKey, Fraction] = defaultdict(Fraction)
        self._whole: set[DraDeviceId] = set()  # devices that are taken and not shared
        self._consumed: dict[tuple[DraDeviceId, str], Fraction] = defaultdict(Fraction)
        for each in taken:
            if each.is_shared:
                self._consume(each.device, each.consumed)
                continue

            self._whole.add(each.device)
            device = by_id.get(each.device)
            if device is not None:
                self._use_counters(device)

    def take_first(self, choices: Iterable[_Choice]) -> _Room | None:
        """Returns what the first alternative leaves for which the devices suffice."""
        for choice in choices:
            left = self._copy()
            if left._take(choice):
                return left
        return None

    def _copy(self) -> _Room:
        copy = _Room(self._counters, {}, ())
        copy._used_counters = self._used_counters.copy()
        copy._whole = self._whole.copy()
        copy._consumed = self._consumed.copy()
        return copy

    def _take(self, choice: _Choice) -> bool:
        """Takes the devices of a request. If it returns False, some of them may be taken."""
        request = choice.request
        missing = len(choice.devices) if request.wants_all else request.number
        # All devices of a node without any are not enough.
        if not missing:
            return False

        for device in choice.devices:
            if not missing:
                break
            if self.take_one(request, device):
                missing -= 1
            elif request.wants_all:
                return False

        return not missing

    def take_one(self, request: DeviceRequest, device: DraDevice) -> bool:
        if device.id in self._whole or not self._has_counters(device):
            return False

        if not device.is_shared:
            self._whole.add(device.id)
            self._use_counters(device)
            return True

        amounts = _find_amounts(request, device)
        for name, amount in amounts:
            if self._consumed[device.id, name] + amount > device.capacity.get(name, _NONE):
                return False

        self._consume(device.id, amounts)
        return True

    def _has_counters(self, device: DraDevice) -> bool:
        for key, amount in _list_counters(device.driver, device.pool, device.counters):
            if self._used_counters[key] + amount > self._counters.get(key, _NONE):
                return False
        return True

    def _use_counters(self, device: DraDevice) -> None:
        for key, amount in _list_counters(device.driver, device.pool, device.counters):
            self._used_counters[key] += amount

    def _consume(self, device: DraDeviceId, amounts: Iterable[tuple[str, Fraction]]) -> None:
        for name, amount in amounts:
            self._consumed[device, name] += amount


def _find_amounts(request: DeviceRequest, device: DraDevice) -> list[tuple[str, Fraction]]:
    """Returns what the request takes of each capacity. Names may lack the driver's domain."""
    wanted = dict(request.capacity)
    amounts = []
    for name, default in device.default_capacity:
        _, _, name_without_domain = name.rpartition("/")
        amount = default
        if name in wanted:
            amount = wanted[name]
        elif name_without_domain in wanted:
            amount = wanted[name_without_domain]
        amounts.append((name, amount))
    return amounts
