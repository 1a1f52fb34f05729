"""Finds out whether the devices (DRA) of a node suffice for the claims of a pod.

Allocates devices in the way of the scheduler, but simpler: each request takes the first devices
that match, and requests with few candidates come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from podgpu.pending.cel import CelDevice, UnknownExpression, matches
from podgpu.pending.dra_objects import (
    AllocatedDevice,
    ClaimRecord,
    ClaimSpec,
    CounterUse,
    DeviceClassRecord,
    DeviceId,
    DeviceRequest,
    DraDevice,
    SliceRecord,
    newest_slices,
)
from podgpu.pending.selectors import NAME_FIELD, NodeSelector, list_untolerated

_MAX_TRIES = 64  # alternatives of requests, and values of a matched attribute
_Amounts = dict[tuple[str, str, str, str], Fraction]
"""Amount of a counter, by driver, pool, counter set and counter."""


class Supply(NamedTuple):
    """What a node has for a pod, in GPUs or in units of a resource."""

    needed: float
    total: float  # on the node, whoever holds it
    free: float
    fits_empty: bool  # it would suffice if the node were empty
    fits: bool
    is_unknown: bool = False  # a selector is not supported


Taken = Mapping[DeviceId, Sequence[AllocatedDevice]]
"""What claims have of each device. A shared device may have several."""


def index_taken(claims: Iterable[ClaimRecord]) -> dict[DeviceId, list[AllocatedDevice]]:
    taken: dict[DeviceId, list[AllocatedDevice]] = defaultdict(list)
    for claim in claims:
        for each in claim.devices:
            taken[each.device].append(each)
    return taken


class _Candidate(NamedTuple):
    id: DeviceId
    device: DraDevice

    @property
    def driver(self) -> str:
        return self.id[0]


_Alternatives = list[tuple[DeviceRequest, list[_Candidate]]]
"""One of these requests has to be satisfied. With the devices that each may have."""


class Devices:
    """All devices of ResourceSlices, and what claims have of them."""

    def __init__(
        self,
        slices: Iterable[SliceRecord],
        classes: Mapping[str, DeviceClassRecord],
        claims: Iterable[ClaimRecord],
    ) -> None:
        self.classes = classes
        self._by_node: dict[str, list[_Candidate]] = defaultdict(list)
        self._elsewhere: list[tuple[SliceRecord, _Candidate]] = []  # for several nodes
        self._counters: _Amounts = {}
        self._device_of: dict[DeviceId, DraDevice] = {}
        self._matches: dict[tuple[DeviceId, str, tuple[str, ...]], bool | None] = {}
        for each in newest_slices(slices):
            self._add_slice(each)

        self.taken = index_taken(claims)

    def _add_slice(self, each: SliceRecord) -> None:
        for counter_set in each.counter_sets:
            for name, amount in counter_set.amounts:
                self._counters[each.driver, each.pool, counter_set.counter_set, name] = amount

        for device in each.devices:
            candidate = _Candidate((each.driver, each.pool, device.name), device)
            self._device_of[candidate.id] = device
            node = each.node or device.node
            if node:
                self._by_node[node].append(candidate)
            else:
                self._elsewhere.append((each, candidate))

    def list_on(self, node: str, labels: Mapping[str, str]) -> list[_Candidate]:
        """Returns the devices that pods on the node can use."""
        devices = list(self._by_node.get(node, ()))
        named = {**labels, NAME_FIELD: node}
        for each, candidate in self._elsewhere:
            device_selector: NodeSelector = candidate.device.node_selector
            if each.node_selector.accepts(named) and device_selector.accepts(named):
                devices.append(candidate)
        return devices

    def supply(
        self,
        specs: Sequence[ClaimSpec],
        node: str,
        labels: Mapping[str, str],
        taken: Taken,
    ) -> Supply:
        """`taken`: what claims have now."""
        devices = self.list_on(node, labels)
        taken_here = _select_taken(taken, devices)
        is_unknown = False
        needed = 0
        matching: list[tuple[DeviceRequest, _Candidate]] = []
        for spec in specs:
            is_unknown = is_unknown or spec.has_other_constraints
            for alternatives in spec.requests:
                first = alternatives[0]
                found = self._find(first, devices)
                if found is None:
                    is_unknown = True
                    found = []

                needed += len(found) if first.wants_all else first.number
                for candidate in found:
                    matching.append((first, candidate))

        return Supply(
            needed=max(1, needed) if specs else 0,
            total=self._count(matching, ()),
            free=self._count(matching, taken_here),
            fits_empty=self._fits(specs, devices, ()),
            fits=self._fits(specs, devices, taken_here),
            is_unknown=is_unknown,
        )

    def count(self, driver: str, node: str, labels: Mapping[str, str]) -> tuple[float, float]:
        """Returns how many devices of a driver a node has, and how many are free."""
        anything = DeviceRequest("", "")
        devices = []
        matching = []
        for candidate in self.list_on(node, labels):
            if candidate.driver == driver:
                devices.append(candidate)
                matching.append((anything, candidate))

        total = self._count(matching, ())
        free = self._count(matching, _select_taken(self.taken, devices))
        return total, free

    def _count(
        self,
        matching: Iterable[tuple[DeviceRequest, _Candidate]],
        taken: Sequence[AllocatedDevice],
    ) -> int:
        """Returns how many devices can be had at the same time. Partitions exclude each other."""
        room = _Room(self._counters, self._device_of, taken)
        counted: set[DeviceId] = set()
        for request, candidate in matching:
            if candidate.id not in counted and room.take_one(request, candidate):
                counted.add(candidate.id)
        return len(counted)

    def _find(
        self, request: DeviceRequest, devices: Iterable[_Candidate]
    ) -> list[_Candidate] | None:
        """Returns the devices that a request may have. None if this is unknown."""
        found = []
        for candidate in devices:
            is_match = self._is_match(request, candidate)
            if is_match is None:
                return None
            if not is_match:
                continue
            untolerated = list_untolerated(candidate.device.taints, request.tolerations)
            if not untolerated:
                found.append(candidate)

        return found

    def _is_match(self, request: DeviceRequest, candidate: _Candidate) -> bool | None:
        key = candidate.id, request.device_class, request.selectors
        if key not in self._matches:
            self._matches[key] = self._compute_match(request, candidate)
        return self._matches[key]

    def _compute_match(self, request: DeviceRequest, candidate: _Candidate) -> bool | None:
        device_class = self.classes.get(request.device_class)
        if device_class is None:
            return False

        device = candidate.device
        shown = CelDevice(
            candidate.id[0], dict(device.attributes), dict(device.capacity), device.is_shared
        )
        is_unknown = False
        for expression in (*device_class.selectors, *request.selectors):
            try:
                if not matches(expression, shown):
                    return False
            except UnknownExpression:
                is_unknown = True

        return None if is_unknown else True

    def _fits(
        self,
        specs: Sequence[ClaimSpec],
        devices: Sequence[_Candidate],
        taken: Sequence[AllocatedDevice],
    ) -> bool:
        room = _Room(self._counters, self._device_of, taken)
        for spec in specs:
            allowed: Iterable[Sequence[_Candidate]] = [devices]
            if spec.matched_attributes:
                allowed = _group_by_attributes(spec.matched_attributes, devices)
            if not any(self._allocate(spec, group, room) for group in allowed):
                return False

        return True

    def _allocate(self, spec: ClaimSpec, devices: Sequence[_Candidate], room: _Room) -> bool:
        """Takes the devices of a claim from `room`. If they do not suffice, takes nothing."""
        trial = room.copy()
        found = [self._find_alternatives(request, devices) for request in spec.requests]
        found.sort(key=_count_candidates)
        for alternatives in found:
            if not any(trial.take(request, choice) for request, choice in alternatives):
                return False

        room.become(trial)
        return True

    def _find_alternatives(
        self, alternatives: Sequence[DeviceRequest], devices: Sequence[_Candidate]
    ) -> _Alternatives:
        found = []
        for request in alternatives:
            candidates = self._find(request, devices) or []
            found.append((request, candidates))
        return found


def _count_candidates(alternatives: _Alternatives) -> int:
    """Returns the number of devices of the alternative with fewest."""
    return min(len(candidates) for _, candidates in alternatives)


def _select_taken(taken: Taken, devices: Iterable[_Candidate]) -> list[AllocatedDevice]:
    selected: list[AllocatedDevice] = []
    for candidate in devices:
        selected += taken.get(candidate.id, ())
    return selected


def _group_by_attributes(
    names: Sequence[str], devices: Iterable[_Candidate]
) -> list[list[_Candidate]]:
    groups: dict[tuple[object, ...], list[_Candidate]] = defaultdict(list)
    for candidate in devices:
        attributes = dict(candidate.device.attributes)
        values = tuple(attributes.get(name) for name in names)
        if None not in values:
            groups[values].append(candidate)

    tried = list(groups.values())
    return tried[:_MAX_TRIES]


class _Room:
    """What is left of the devices of a node."""

    def __init__(
        self,
        counters: _Amounts,
        device_of: Mapping[DeviceId, DraDevice],
        taken: Iterable[AllocatedDevice],
    ) -> None:
        self._counters = counters  # amounts that the pools have
        self._used_counters: _Amounts = {}
        self._whole: set[DeviceId] = set()
        self._consumed: dict[tuple[DeviceId, str], Fraction] = {}
        for each in taken:
            if each.is_shared:
                self._consume(each.device, each.consumed)
                continue
            self._whole.add(each.device)
            device = device_of.get(each.device)
            if device is not None:
                self._use_counters(each.device, device.counters)

    def copy(self) -> _Room:
        other = _Room(self._counters, {}, ())
        other.become(self)
        return other

    def become(self, other: _Room) -> None:
        self._used_counters = dict(other._used_counters)
        self._whole = set(other._whole)
        self._consumed = dict(other._consumed)

    def take(self, request: DeviceRequest, candidates: Sequence[_Candidate]) -> bool:
        wanted = len(candidates) if request.wants_all else request.number
        if not wanted or len(candidates) < wanted:
            return False

        for candidate in candidates:
            if not wanted:
                break
            if self.take_one(request, candidate):
                wanted -= 1
            elif request.wants_all:
                return False

        return not wanted

    def take_one(self, request: DeviceRequest, candidate: _Candidate) -> bool:
        device = candidate.device
        if candidate.id in self._whole or not self._has_counters(candidate):
            return False

        if not device.is_shared:
            self._whole.add(candidate.id)
            self._use_counters(candidate.id, device.counters)
            return True

        none = Fraction(0)
        capacities = dict(device.capacity)
        amounts = _find_amounts(request, device)
        for name, amount in amounts:
            consumed = self._consumed.get((candidate.id, name), none)
            if consumed + amount > capacities.get(name, none):
                return False

        self._consume(candidate.id, amounts)
        return True

    def _has_counters(self, candidate: _Candidate) -> bool:
        driver, pool, _ = candidate.id
        for use in candidate.device.counters:
            for name, amount in use.amounts:
                key = driver, pool, use.counter_set, name
                used = self._used_counters.get(key, Fraction(0))
                if used + amount > self._counters.get(key, Fraction(0)):
                    return False

        return True

    def _use_counters(self, device: DeviceId, uses: Iterable[CounterUse]) -> None:
        driver, pool, _ = device
        for use in uses:
            for name, amount in use.amounts:
                key = driver, pool, use.counter_set, name
                used = self._used_counters.get(key, Fraction(0))
                self._used_counters[key] = used + amount

    def _consume(self, device: DeviceId, amounts: Iterable[tuple[str, Fraction]]) -> None:
        for name, amount in amounts:
            consumed = self._consumed.get((device, name), Fraction(0))
            self._consumed[device, name] = consumed + amount


def _find_amounts(request: DeviceRequest, device: DraDevice) -> list[tuple[str, Fraction]]:
    """Returns what the request takes of each capacity. Names may lack the driver's domain."""
    wanted = dict(request.capacity)
    amounts = []
    for name, default in device.default_capacity:
        _, _, plain = name.rpartition("/")
        amount = wanted.get(plain, default)
        amounts.append((name, wanted.get(name, amount)))
    return amounts
