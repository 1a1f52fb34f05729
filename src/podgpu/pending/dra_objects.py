"""Reduces ResourceClaims, DeviceClasses and ResourceSlices (DRA) to small records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    parse_node_selector,
    parse_taints,
    parse_tolerations,
)

DraDeviceId = tuple[str, str, str]
"""Driver, pool and name."""
Quantities = tuple[tuple[str, Fraction], ...]


class DeviceRequest(NamedTuple):
    """One request of a claim: `number` devices of a class that match all selectors."""

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
    device: DraDeviceId
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


@dataclass(frozen=True, slots=True)
class DraDevice:
    driver: str
    pool: str
    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)  # by `domain/name`
    capacity: Mapping[str, Fraction] = field(default_factory=dict)  # by `domain/name`
    is_shared: bool = False
    default_capacity: Quantities = ()  # what a claim takes that requests none
    counters: tuple[CounterUse, ...] = ()
    taints: tuple[Taint, ...] = ()
    node: str = ""  # empty if it can be used on the nodes that both selectors accept
    slice_selector: NodeSelector = ANY_NODE
    node_selector: NodeSelector = ANY_NODE

    @property
    def id(self) -> DraDeviceId:
        return self.driver, self.pool, self.name


@dataclass(frozen=True, slots=True)
class SliceRecord:
    name: str
    driver: str
    pool: str
    generation: int
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
        node_selector=parse_node_selector((allocation or {}).get("nodeSelector")),
        users=tuple(users),
    )


def _parse_result(result: KubeObject) -> AllocatedDevice:
    driver = intern(result["driver"])
    capacity = read_map(result, "consumedCapacity")
    return AllocatedDevice(
        device=(driver, intern(result["pool"]), intern(result["device"])),
        consumed=_parse_quantities(capacity, driver),
        is_shared=bool(result.get("shareID")),
    )


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
    """Yields the alternatives."""
    # v1beta1 has the fields of `exactly` in the request itself.
    exactly = body.get("exactly") or body
    for exact in read_list(body, "firstAvailable") or [exactly]:
        if exact.get("adminAccess"):
            continue

        tolerations = read_list(exact, "tolerations")
        capacity = read_map(read_map(exact, "capacity"), "requests")
        yield DeviceRequest(
            device_class=exact.get("deviceClassName") or "",
            selectors=_parse_expressions(exact),
            number=exact.get("count") or 1,
            wants_all=exact.get("allocationMode") == "All",
            tolerations=parse_tolerations(tolerations),
            capacity=_parse_quantities(capacity),
        )


def _parse_expressions(body: KubeObject) -> tuple[str, ...]:
    expressions = []
    for selector in read_list(body, "selectors"):
        cel = read_map(selector, "cel")
        expressions.append(cel.get("expression") or "")
    return tuple(expressions)


def parse_device_class(body: KubeObject) -> DeviceClassRecord:
    spec = read_map(body, "spec")
    resource = spec.get("extendedResourceName") or ""
    return DeviceClassRecord(body["metadata"]["name"], _parse_expressions(spec), resource)


def parse_slice_record(body: KubeObject) -> SliceRecord:
    spec = body["spec"]
    pool = spec["pool"]
    devices = [_parse_device(device, spec) for device in read_list(spec, "devices")]
    counter_sets = [_parse_counters(each, "name") for each in read_list(spec, "sharedCounters")]

    return SliceRecord(
        name=body["metadata"]["name"],
        driver=intern(spec["driver"]),
        pool=intern(pool["name"]),
        generation=pool.get("generation") or 0,
        devices=tuple(devices),
        counter_sets=tuple(counter_sets),
    )


def _parse_counters(body: KubeObject, name: str) -> CounterUse:
    counters = read_map(body, "counters")
    return CounterUse(body[name], _parse_quantities(counters))


def _parse_device(body: KubeObject, of_slice: KubeObject) -> DraDevice:
    """`of_slice`: the spec of its ResourceSlice."""
    device = body.get("basic") or body  # v1beta1 nests the fields
    driver = intern(of_slice["driver"])
    attributes = {}
    for name, value in read_map(device, "attributes").items():
        attributes[_qualify(name, driver)] = _read_attribute(value)

    capacity = read_map(device, "capacity")
    node = of_slice.get("nodeName") or device.get("nodeName") or ""
    counters = [_parse_counters(use, "counterSet") for use in read_list(device, "consumesCounters")]
    taints = read_list(device, "taints")

    return DraDevice(
        driver=driver,
        pool=intern(of_slice["pool"]["name"]),
        name=intern(body["name"]),
        attributes=attributes,
        capacity=dict(_parse_quantities(capacity, driver)),
        is_shared=bool(device.get("allowMultipleAllocations")),
        default_capacity=_parse_defaults(capacity, driver),
        counters=tuple(counters),
        taints=parse_taints(taints),
        node=intern(node),
        slice_selector=parse_node_selector(of_slice.get("nodeSelector")),
        node_selector=parse_node_selector(device.get("nodeSelector")),
    )


def _read_attribute(body: KubeObject) -> Any:
    """The body has one field, whose name is the type: `{"int": 3}`. Lists become tuples."""
    for value in body.values():
        return tuple(value) if isinstance(value, list) else value
    return None


def _parse_defaults(capacity: KubeObject, driver: str) -> Quantities:
    """Returns what a request without amounts takes: the default of the policy, or everything."""
    amounts = []
    for name, entry in sorted(capacity.items()):
        amount = read_map(entry, "requestPolicy").get("default")
        if amount is None:
            amount = entry["value"]
        name = _qualify(name, driver)
        amounts.append((name, parse_quantity(str(amount))))

    return tuple(amounts)


def _parse_quantities(amounts: Mapping[str, Any], domain: str = "") -> Quantities:
    """The amounts are quantities, or objects with a field `value`."""
    quantities = []
    for name, amount in sorted(amounts.items()):
        if isinstance(amount, dict):
            amount = amount["value"]
        name = _qualify(name, domain)
        quantities.append((name, parse_quantity(str(amount))))
    return tuple(quantities)


def _qualify(name: str, domain: str) -> str:
    """Adds the domain of the driver to a name without one."""
    if domain and "/" not in name:
        name = f"{domain}/{name}"
    return intern(name)


def newest_slices(slices: Iterable[SliceRecord]) -> list[SliceRecord]:
    """Returns the slices of the newest generation of each pool."""
    # Sorted, so that requests always take the same devices.
    by_name = sorted(slices, key=attrgetter("name"))
    generations: dict[tuple[str, str], int] = {}
    for each in by_name:
        pool = each.driver, each.pool
        generations[pool] = max(each.generation, generations.get(pool, 0))

    selected = []
    for each in by_name:
        if each.generation == generations[each.driver, each.pool]:
            selected.append(each)
    return selected
