"""Reduces ResourceClaims, DeviceClasses and ResourceSlices (DRA) to small records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from sys import intern
from typing import Any, NamedTuple

from podgpu.kube.objects import KubeObject, is_gpu_resource, parse_quantity, read_list, read_map
from podgpu.model import PodName
from podgpu.pending.selectors import (
    ANY_NODE,
    NodeSelector,
    Taint,
    Toleration,
    parse_selector,
    parse_taints,
    parse_tolerations,
)

_ALL = "All"
DeviceId = tuple[str, str, str]
"""Driver, pool and name."""
Quantities = tuple[tuple[str, Fraction], ...]


class DeviceRequest(NamedTuple):
    """One request of a claim: `number` devices of a class that match all selectors."""

    name: str
    device_class: str
    selectors: tuple[str, ...] = ()
    number: int = 1
    wants_all: bool = False
    tolerations: tuple[Toleration, ...] = ()
    capacity: Quantities = ()  # of devices that several claims can share


class ClaimSpec(NamedTuple):
    # Each request is a list of alternatives, in order of preference. Most have one.
    requests: tuple[tuple[DeviceRequest, ...], ...] = ()
    matched_attributes: tuple[str, ...] = ()  # must be the same for all devices of the claim
    has_other_constraints: bool = False


class AllocatedDevice(NamedTuple):
    device: DeviceId
    consumed: Quantities = ()  # of a shared device
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    namespace: str
    name: str
    spec: ClaimSpec
    is_allocated: bool = False
    devices: tuple[AllocatedDevice, ...] = ()
    node_selector: NodeSelector = ANY_NODE  # where the allocated devices can be used
    users: tuple[str, ...] = ()  # UIDs of pods

    @property
    def key(self) -> PodName:
        return self.namespace, self.name


class DeviceClassRecord(NamedTuple):
    name: str
    selectors: tuple[str, ...] = ()
    extended_resource: str = ""

    @property
    def is_for_gpus(self) -> bool:
        texts = (self.name, self.extended_resource, *self.selectors)
        return any(map(is_gpu_resource, texts))


class CounterUse(NamedTuple):
    """What a partition takes of its GPU: amounts of a counter set."""

    counter_set: str
    amounts: Quantities


class DraDevice(NamedTuple):
    name: str
    attributes: tuple[tuple[str, Any], ...] = ()  # `domain/name` and value
    capacity: Quantities = ()  # `domain/name` and amount
    is_shared: bool = False
    default_capacity: Quantities = ()  # what a claim takes that requests none
    counters: tuple[CounterUse, ...] = ()
    taints: tuple[Taint, ...] = ()
    node: str = ""  # set only if the devices of its slice belong to several nodes
    node_selector: NodeSelector = ANY_NODE


@dataclass(frozen=True, slots=True)
class SliceRecord:
    name: str
    driver: str
    pool: str
    generation: int
    node: str = ""
    node_selector: NodeSelector = ANY_NODE
    devices: tuple[DraDevice, ...] = ()
    counter_sets: tuple[CounterUse, ...] = ()  # the amounts that its GPUs have


def parse_claim(body: KubeObject) -> ClaimRecord:
    metadata = body["metadata"]
    status = read_map(body, "status")
    allocation = status.get("allocation")
    users = [entry["uid"] for entry in read_list(status, "reservedFor")]
    devices = []
    if allocation is not None:
        for result in read_list(read_map(allocation, "devices"), "results"):
            # adminAccess is for monitoring and takes nothing.
            if not result.get("adminAccess"):
                devices.append(_parse_result(result))

    return ClaimRecord(
        namespace=intern(metadata["namespace"]),
        name=metadata["name"],
        spec=parse_claim_spec(body["spec"]),
        is_allocated=allocation is not None,
        devices=tuple(devices),
        node_selector=parse_selector((allocation or {}).get("nodeSelector")),
        users=tuple(users),
    )


def _parse_result(result: KubeObject) -> AllocatedDevice:
    driver = intern(result["driver"])
    pool = intern(result["pool"])
    device = intern(result["device"])
    capacity = read_map(result, "consumedCapacity")
    consumed = _parse_quantities(capacity, driver)
    is_shared = bool(result.get("shareID"))
    return AllocatedDevice((driver, pool, device), consumed, is_shared=is_shared)


def parse_claim_spec(spec: KubeObject) -> ClaimSpec:
    devices = read_map(spec, "devices")
    requests = []
    for body in read_list(devices, "requests"):
        alternatives = tuple(_parse_request(body))
        # Empty for adminAccess, which takes no device.
        if alternatives:
            requests.append(alternatives)

    matched = []
    has_others = False
    for constraint in read_list(devices, "constraints"):
        attribute = constraint.get("matchAttribute")
        # A constraint on some of the requests only is not checked.
        if attribute and not constraint.get("requests"):
            matched.append(attribute)
        else:
            has_others = True

    return ClaimSpec(tuple(requests), tuple(matched), has_others)


def _parse_request(body: KubeObject) -> Iterator[DeviceRequest]:
    alternatives = read_list(body, "firstAvailable")
    for exact in alternatives or [body.get("exactly") or body]:
        if exact.get("adminAccess"):
            continue

        selectors = []
        for selector in read_list(exact, "selectors"):
            expression = read_map(selector, "cel").get("expression") or ""
            selectors.append(expression)

        tolerations = read_list(exact, "tolerations")
        capacity = read_map(read_map(exact, "capacity"), "requests")
        yield DeviceRequest(
            name=body["name"],
            device_class=exact.get("deviceClassName") or "",
            selectors=tuple(selectors),
            number=exact.get("count") or 1,
            wants_all=exact.get("allocationMode") == _ALL,
            tolerations=parse_tolerations(tolerations),
            capacity=_parse_quantities(capacity, ""),
        )


def parse_device_class(body: KubeObject) -> DeviceClassRecord:
    spec = read_map(body, "spec")
    selectors = []
    for selector in read_list(spec, "selectors"):
        selectors.append(read_map(selector, "cel").get("expression") or "")
    name = body["metadata"]["name"]
    return DeviceClassRecord(name, tuple(selectors), spec.get("extendedResourceName") or "")


def parse_slice_record(body: KubeObject) -> SliceRecord:
    spec = body["spec"]
    driver = intern(spec["driver"])
    pool = spec["pool"]
    devices = [_parse_device(device, driver) for device in read_list(spec, "devices")]
    counter_sets = []
    for counter_set in read_list(spec, "sharedCounters"):
        amounts = _parse_quantities(read_map(counter_set, "counters"), "")
        counter_sets.append(CounterUse(counter_set["name"], amounts))

    return SliceRecord(
        name=body["metadata"]["name"],
        driver=driver,
        pool=intern(pool["name"]),
        generation=pool.get("generation") or 0,
        node=intern(spec.get("nodeName") or ""),
        node_selector=parse_selector(spec.get("nodeSelector")),
        devices=tuple(devices),
        counter_sets=tuple(counter_sets),
    )


def _parse_device(body: KubeObject, driver: str) -> DraDevice:
    device = body.get("basic") or body  # v1beta1 nests the fields
    attributes = []
    for name, value in sorted(read_map(device, "attributes").items()):
        known = next(iter(value.values()), None)
        attributes.append((_qualify(name, driver), known))

    counters = []
    for use in read_list(device, "consumesCounters"):
        amounts = _parse_quantities(read_map(use, "counters"), "")
        counters.append(CounterUse(use["counterSet"], amounts))

    capacity = read_map(device, "capacity")
    taints = read_list(device, "taints")

    return DraDevice(
        name=intern(body["name"]),
        attributes=tuple(attributes),
        capacity=_parse_quantities(capacity, driver),
        is_shared=bool(device.get("allowMultipleAllocations")),
        default_capacity=_parse_defaults(capacity, driver),
        counters=tuple(counters),
        taints=parse_taints(taints),
        node=device.get("nodeName") or "",
        node_selector=parse_selector(device.get("nodeSelector")),
    )


def _parse_defaults(capacity: KubeObject, driver: str) -> Quantities:
    """Returns what a request without amounts takes: the default of the policy, or everything."""
    amounts = []
    for name, entry in sorted(capacity.items()):
        default = read_map(entry, "requestPolicy").get("default")
        amount = parse_quantity(str(default if default is not None else entry["value"]))
        amounts.append((_qualify(name, driver), amount))
    return tuple(amounts)


def _parse_quantities(amounts: Mapping[str, Any], domain: str) -> Quantities:
    parsed = []
    for name, entry in sorted(amounts.items()):
        value = entry["value"] if isinstance(entry, dict) else entry
        parsed.append((_qualify(name, domain), parse_quantity(str(value))))
    return tuple(parsed)


def _qualify(name: str, domain: str) -> str:
    """Adds the domain of the driver to a name without one."""
    if domain and "/" not in name:
        name = f"{domain}/{name}"
    return intern(name)


def newest_slices(slices: Iterable[SliceRecord]) -> list[SliceRecord]:
    """Returns the slices of the newest generation of each pool."""
    every = sorted(slices, key=attrgetter("name"))
    newest: dict[tuple[str, str], int] = {}
    for each in every:
        pool = each.driver, each.pool
        newest[pool] = max(each.generation, newest.get(pool, 0))

    selected = []
    for each in every:
        if each.generation == newest[each.driver, each.pool]:
            selected.append(each)

    return selected
