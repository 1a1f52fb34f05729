"""Allocation source `checkpoint`: the kubelet's device checkpoint file.

It contains pod uids and the number of replicas of shared GPUs, but no names. It can be outdated: a finished pod stays
in it until the kubelet next allocates a device. The kubelet replaces the file by rename, so the checksum is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct, field

from podgpu.decode import decode_json
from podgpu.files import ReadOnChange
from podgpu.holders import AllocationSource
from podgpu.holders.device_ids import (
    HeldId,
    SharedDevice,
    group_replicas,
    is_gpu,
    map_held,
    parse_device_id,
)
from podgpu.model import Allocation, Device, Workload

SOURCE = "checkpoint"
NAME = "device-plugins/kubelet_internal_checkpoint"
"""Relative to the kubelet's root directory."""
MAX_BYTES = 16 * 1024 * 1024


class _PodDevices(Struct):
    uid: Annotated[str, Meta(min_length=1)] = field(name="PodUID")
    container: str = field(name="ContainerName")
    resource: str = field(name="ResourceName")
    device_ids: dict[str, list[str] | None] | list[str] | None = field(name="DeviceIDs", default=None)
    """A mapping by NUMA node since Kubernetes 1.20; a list in older versions."""

    def held_ids(self) -> Iterator[HeldId]:
        holder = Workload(container=self.container, uid=self.uid)
        lists = self.device_ids.values() if isinstance(self.device_ids, dict) else [self.device_ids]
        for text in (text for ids in lists for text in ids or ()):
            yield HeldId(holder, self.resource, text, parse_device_id(text))


class _DeviceData(Struct):
    entries: list[_PodDevices] | None = field(name="PodDeviceEntries", default=None)
    registered: dict[str, list[str] | None] | None = field(name="RegisteredDevices", default=None)


class _DeviceFile(Struct):
    data: _DeviceData = field(name="Data")


class CheckpointAllocation(AllocationSource):
    name = SOURCE

    def __init__(self, path: str, resource_names: frozenset[str] = frozenset()) -> None:
        self.path = os.path.abspath(path)
        self._file = ReadOnChange(partial(parse_checkpoint, resource_names=resource_names), MAX_BYTES)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        held, registered = self._file.read(self.path)
        return map_held(SOURCE, held, devices, registered)


def parse_checkpoint(
    content: bytes, path: str = "the checkpoint", resource_names: frozenset[str] = frozenset()
) -> tuple[list[HeldId], Mapping[SharedDevice, Set[str]]]:
    """Returns the held ids of GPUs, and the registered replicas of shared GPUs. Raises SourceError."""
    data = decode_json(content, path, _DeviceFile).data
    held = [held for entry in data.entries or () for held in entry.held_ids() if is_gpu(held, resource_names)]
    registered = (text for ids in (data.registered or {}).values() for text in ids or ())
    return held, group_replicas(registered)
