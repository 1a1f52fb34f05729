"""This module says who was given which GPU, as schedulers note it in the pods' annotations. The API server is watched
elsewhere.

For schedulers that hand out GPUs past the kubelet (koordinator), or other ones than it was told (HAMi, gpu-manager).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from podgpu.errors import SourceError
from podgpu.holders import vcuda
from podgpu.holders.annotation_formats import GPU_RESOURCES, BadAnnotation, Grant, asks_for_gpu, read_grants
from podgpu.holders.device_ids import DeviceId, DeviceIndex
from podgpu.holders.holdings import in_order, parse_id
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.model import Allocation, Assignment, Device, Unmapped, VcudaRequest, Workload

SOURCE = "annotations"

_log = logging.getLogger(__name__)

Pods = tuple[PodRecord, ...]


class PodFeed(Protocol):
    """The pods, as a watcher of the API server has them."""

    def items(self) -> Pods:
        """The same tuple until something changes."""
        ...

    @property
    def synced(self) -> bool: ...

    @property
    def error(self) -> SourceError | None: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A grant in the hands of one container."""

    holder: Workload
    device: str | int
    key: str
    share: float | None


class AnnotationsAllocation:
    """Reads what the watcher holds; never waits for the network. Who made the watcher closes it."""

    name = SOURCE

    def __init__(self, pods: Callable[[], PodFeed], node: str = "") -> None:
        """With `node`, pods of other nodes are passed over: a minor number says nothing of whose it is."""
        self._pods = pods
        self._node = node
        self._read: dict[str, _Reading] = {}

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Once read in full, the last pods stand: an API server that is away takes nothing from anybody.

        One that forbids to watch them is not away: what was listed would stand for ever.
        """
        feed = self._pods()
        error = feed.error
        if not feed.synced or (error is not None and error.reason == "forbidden"):
            raise _not_read(error)
        return self._map(feed.items(), devices)

    def close(self) -> None:
        """Nothing is open here."""

    def _map(self, pods: Pods, devices: Sequence[Device]) -> Allocation:
        holding = [pod for pod in pods if self._may_hold(pod)]
        self._read = {pod.uid: self._reading_of(pod) for pod in holding}
        requests = (request for reading in self._read.values() for request in reading.requests)
        return replace(_map_readings(self._read.values(), devices), vcuda=vcuda.in_order(requests))

    def _may_hold(self, pod: PodRecord) -> bool:
        # Schedulers annotate before they bind: a pod without a node holds nothing yet.
        return bool(pod.node) and pod.node == (self._node or pod.node) and not pod.is_finished

    def _reading_of(self, pod: PodRecord) -> _Reading:
        """A pod that is as it was is not read again; a bad annotation is told of once."""
        before = self._read.get(pod.uid)
        if before is not None and before.pod is pod:
            return before
        new = _read_pod(pod)
        if new.bad is not None and (before is None or str(before.bad) != str(new.bad)):
            _log.warning("%s", new.bad)
        return new


@dataclass(frozen=True, slots=True)
class _Reading:
    pod: PodRecord
    requests: tuple[VcudaRequest, ...]
    held: tuple[Held, ...] = ()
    bad: BadAnnotation | None = None


def _not_read(error: SourceError | None) -> SourceError:
    if error is not None:
        return SourceError(error.reason, str(error))
    return SourceError(
        "not_synced",
        "the pods have not been read from the API server yet; if this lasts, see that it can be reached",
    )


def _read_pod(pod: PodRecord) -> _Reading:
    requests = tuple(requested_vcuda(pod))
    try:
        return _Reading(pod, requests, tuple(held_by_containers(pod, read_grants(pod))))
    except BadAnnotation as error:
        return _Reading(pod, requests, bad=error)


def requested_vcuda(pod: PodRecord) -> Iterator[VcudaRequest]:
    """What its containers ask gpu-manager for. That is in the spec, whatever the annotations say."""
    for container in (*pod.init_containers, *pod.containers):
        cores, blocks = int(container.amount(vcuda.CORE)), int(container.amount(vcuda.MEMORY))
        if (cores or blocks) and not container.finished:
            yield VcudaRequest(_workload(pod, container), cores, blocks)


def held_by_containers(pod: PodRecord, grants: Sequence[Grant]) -> Iterator[Held]:
    """Who holds what was granted. An init container that is done holds nothing."""
    every = {container.name: container for container in (*pod.init_containers, *pod.containers)}
    for grant in grants:
        if grant.container is None:
            yield from _held_together(pod, grant)
        elif not every[grant.container].finished:
            yield Held(_workload(pod, every[grant.container]), grant.device, grant.key, grant.share)


def _held_together(pod: PodRecord, grant: Grant) -> Iterator[Held]:
    """Given to the pod: held by the containers that ask for GPUs, each by its part of what they ask for together.

    Where nobody is known to ask, the first container holds it, as in the answers of koordinator's own proxy.
    """
    asking = [
        container
        for container in (*pod.init_containers, *pod.containers)
        if asks_for_gpu(container) and not container.finished
    ]
    holders = asking or list(pod.containers[:1]) or [ContainerRecord("")]
    for container, part in zip(holders, _parts(holders), strict=True):
        share = None if grant.share is None else grant.share * part
        yield Held(_workload(pod, container), grant.device, grant.key, share)


def _parts(containers: Sequence[ContainerRecord]) -> list[float]:
    """In proportion to a resource that all of them ask for; in equal parts if there is none."""
    for resource, _ in containers[0].requests:
        amounts = [container.amount(resource) for container in containers]
        if resource.startswith(GPU_RESOURCES) and all(amounts):
            return [float(amount / sum(amounts)) for amount in amounts]
    return [1 / len(containers)] * len(containers)


def _workload(pod: PodRecord, container: ContainerRecord) -> Workload:
    return Workload(pod.namespace, pod.name, container.name, pod.uid, container.container_id)


def _map_readings(readings: Iterable[_Reading], devices: Sequence[Device]) -> Allocation:
    """Who holds which of the devices; a holder holds a device once, however many parts of it were given."""
    index = DeviceIndex(devices)
    held: dict[tuple[str, Workload], Assignment] = {}
    unmapped: set[Unmapped] = set()
    for reading in readings:
        if reading.bad is not None:
            whole_pod = Workload(reading.pod.namespace, reading.pod.name, uid=reading.pod.uid)
            unmapped.add(Unmapped(SOURCE, reading.bad.reason, reading.bad.key, reading.bad.key, whole_pod))
        for grant in reading.held:
            found, reason = _find(index, grant.device)
            if found is None:
                unmapped.add(Unmapped(SOURCE, reason, _device_text(grant.device), grant.key, grant.holder))
                continue
            known = held.get((found.key, grant.holder))
            share = grant.share if known is None else _sum(known.share, grant.share)
            held[found.key, grant.holder] = Assignment(found.key, grant.holder, SOURCE, share=share)
    return in_order(held.values(), unmapped)


def _find(index: DeviceIndex, device: str | int) -> tuple[Device | None, str]:
    device_id = DeviceId(minor=device) if isinstance(device, int) else parse_id(device)
    if device_id is None or device_id.everything or device_id.integrated:
        return None, "unrecognised_id"
    return next(iter(index.find(device_id)), None), "unknown_device"


def _device_text(device: str | int) -> str:
    return f"nvidia{device}" if isinstance(device, int) else device


def _sum(share: float | None, other: float | None) -> float | None:
    return None if share is None or other is None else min(1.0, share + other)
