"""This module says who was given which device, as the kubelet says on its pod-resources socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol

from podgpu.holders.device_ids import Shared
from podgpu.holders.holdings import (
    HeldId,
    KnownReplicas,
    concerns_gpus,
    count_replicas,
    in_order,
    map_held,
    parse_id,
    replicas_of,
)
from podgpu.holders.pod_resources import PodResourcesClient
from podgpu.holders.vcuda import count_vcuda
from podgpu.model import Allocation, Device, Workload

SOURCE = "kubelet"
_REPLICAS_SECONDS = 60.0
"""How long the number of replicas is taken as known: it changes with the device plugin's configuration."""
DEADLINE = 30.0
"""For one answer. Longer than anybody waits for it: a late one is taken when it comes."""

_OFFERED_DEADLINE = 1.0
"""For what is only good to know: who holds what waits for it meanwhile."""


class Claims(Protocol):
    """Knows which devices the claims (DRA) in a decoded List answer are."""

    def held(self, response: Any, devices: Sequence[Device]) -> Allocation: ...


class KubeletAllocation:
    """One List call a reading; once a minute, and when a replica is new, one for everything that can be given away."""

    name = SOURCE

    def __init__(
        self,
        socket: str,
        resource_names: frozenset[str] = frozenset(),
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
    ) -> None:
        """Without `claims`, what containers hold through DRA is passed over."""
        self.client = PodResourcesClient(socket, deadline)
        self.resource_names = resource_names
        self.claims = claims
        self._clock = clock
        self._replicas = KnownReplicas()
        self._counted_at = float("-inf")
        self._offered: frozenset[str] = frozenset()
        self._offered_at = float("-inf")

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        response = self.client.list()
        mapped = self.map(response, devices)
        if self._clock() - self._offered_at >= _REPLICAS_SECONDS:
            self._allocatable(_OFFERED_DEADLINE)
        return replace(mapped, life=self.client.life, offered=self._offered)

    def map(self, response: Any, devices: Sequence[Device]) -> Allocation:
        """Who holds which of the devices, from a decoded List answer."""
        everything = list(_held_ids(response))
        held = gpu_ids(everything, self.resource_names)
        mapped = map_held(SOURCE, held, devices, count_replicas(held, self._count_replicas(held)))
        by_id = replace(mapped, vcuda=count_vcuda(everything))
        return by_id if self.claims is None else _unite(by_id, self.claims.held(response, devices))

    def _count_replicas(self, held: Iterable[HeldId]) -> Mapping[Shared, Set[str]]:
        """Counted again once a minute, and at every reading while one in somebody's hands was never counted."""
        known, now = self._replicas.of(held), self._clock()
        is_due = now - self._counted_at >= _REPLICAS_SECONDS
        if known and (is_due or not all(known.values())):
            self._counted_at = now
            self._replicas.learn(self._allocatable(), held)
            known = self._replicas.of(held)
        return known

    def _allocatable(self, deadline: float | None = None) -> tuple[str, ...]:
        ids = self.client.allocatable_ids(deadline)
        named = (parse_id(text) for text in ids)
        self._offered = frozenset(device_id.gpu_uuid for device_id in named if device_id and device_id.gpu_uuid)
        self._offered_at = self._clock()
        return ids

    def close(self) -> None:
        """Drop the connection. A later reading would make a new one."""
        self.client.close()


def parse_assignments(
    response: Any,
    devices: Sequence[Device],
    resource_names: frozenset[str] = frozenset(),
    allocatable: Iterable[str] = (),
) -> Allocation:
    """Who holds which of the devices, from a decoded List answer and the ids of GetAllocatableResources.

    The kubelet's order is that of a Go map, a new one each time: nothing here depends on it.
    """
    everything = list(_held_ids(response))
    held = gpu_ids(everything, resource_names)
    mapped = map_held(SOURCE, held, devices, count_replicas(held, replicas_of(allocatable)))
    return replace(mapped, vcuda=count_vcuda(everything))


def gpu_ids(held: Iterable[HeldId], resource_names: frozenset[str]) -> list[HeldId]:
    return [held_id for held_id in held if concerns_gpus(held_id, resource_names)]


def _held_ids(response: Any) -> Iterator[HeldId]:
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for entry in container.devices:
                resource = entry.resource_name
                for text in entry.device_ids:
                    yield HeldId(holder, resource, text, parse_id(text))


def _unite(by_id: Allocation, by_claim: Allocation) -> Allocation:
    """One assignment per holder and device: the kubelet can list a GPU both ways (its gate DRAExtendedResource)."""
    held = {(assignment.device, assignment.holder): assignment for assignment in by_claim.assignments}
    for assignment in by_id.assignments:
        claimed = held.get((assignment.device, assignment.holder))
        held[assignment.device, assignment.holder] = (
            assignment if claimed is None else replace(assignment, attributes=claimed.attributes)
        )
    return replace(in_order(held.values(), {*by_id.unmapped, *by_claim.unmapped}), vcuda=by_id.vcuda)
