"""This module says who was given which device, as the kubelet notes it in its device checkpoint. Reads; never writes.

It knows what the pod-resources API does not: pod uids, and how many replicas there are of a shared GPU. It does not
know names. It can be behind: a pod that ended stays until the kubelet next hands out a device, and an init container
stays beside the container that took over its GPU. Its checksum is of Go's way to print the structure, which changes
with it: the kubelet replaces the file whole, by rename, so it is not verified here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from podgpu.files import ReadOnChange
from podgpu.holders.holdings import (
    HeldId,
    Replicas,
    concerns_gpus,
    count_replicas,
    map_held,
    parse_id,
    replicas_of,
)
from podgpu.json_shape import as_list, as_object, as_text, parse_json
from podgpu.model import Allocation, Device, Workload

SOURCE = "checkpoint"
NAME = "device-plugins/kubelet_internal_checkpoint"
"""In the kubelet's own directory."""
DEFAULT_PATH = f"/var/lib/kubelet/{NAME}"
MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Checkpoint:
    held: tuple[HeldId, ...]
    replicas: Replicas


class CheckpointAllocation:
    """Reads the kubelet's checkpoint. The same resources and ids count as for the kubelet's socket."""

    name = SOURCE

    def __init__(self, path: str | None = None, resource_names: frozenset[str] = frozenset()) -> None:
        self.path = os.path.abspath(path or DEFAULT_PATH)
        self.resource_names = resource_names
        self._file = ReadOnChange(partial(parse_checkpoint, resource_names=resource_names), MOST_BYTES)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """The file as it is now, mapped onto the devices given."""
        return map_checkpoint(self._file.read(self.path), devices)

    def close(self) -> None:
        """Nothing stays open between readings."""


def parse_checkpoint(
    content: bytes, path: str = "the checkpoint", resource_names: frozenset[str] = frozenset()
) -> Checkpoint:
    """Who holds which ids, and how many replicas there are, from the file's bytes."""
    return parse_json(content, path, lambda value: _checkpoint(value, resource_names))


def map_checkpoint(checkpoint: Checkpoint, devices: Sequence[Device]) -> Allocation:
    """Who holds which of the devices, and how much of each."""
    return map_held(SOURCE, checkpoint.held, devices, checkpoint.replicas)


def _checkpoint(value: object, resource_names: frozenset[str]) -> Checkpoint:
    content = as_object(as_object(value, "the whole").get("Data"), "Data")
    entries = as_list(content.get("PodDeviceEntries"), "PodDeviceEntries")
    everything = (held for number, entry in enumerate(entries, 1) for held in _entry(entry, f"entry {number}"))
    held = tuple(held for held in everything if concerns_gpus(held, resource_names))
    return Checkpoint(held, count_replicas(held, replicas_of(_registered(content.get("RegisteredDevices")))))


def _entry(value: object, where: str) -> Iterator[HeldId]:
    entry = as_object(value, where)
    uid, container, resource = (
        as_text(entry.get(key), f"{where}: {key}") for key in ("PodUID", "ContainerName", "ResourceName")
    )
    if not uid:
        raise ValueError(f"{where}: PodUID is empty")
    # A static pod's uid is a hash without dashes: kept as it is, as its cgroup has it.
    holder = Workload(container=container, uid=uid)
    for text in _device_ids(entry.get("DeviceIDs"), f"{where}: DeviceIDs"):
        yield HeldId(holder, resource, text, parse_id(text))


def _device_ids(value: object, where: str) -> Iterator[str]:
    """By NUMA node since Kubernetes 1.20, a plain list before."""
    lists = value.values() if isinstance(value, dict) else [value]
    place = f"{where}: an id"
    for ids in lists:
        for text in as_list(ids, where):
            yield as_text(text, place)


def _registered(value: object) -> Iterator[str]:
    if value is None:
        return
    for resource, ids in as_object(value, "RegisteredDevices").items():
        for text in as_list(ids, f"RegisteredDevices: {resource!a}"):
            yield as_text(text, "RegisteredDevices: an id")
