"""Finds DCGM's entities on a node: GPUs with their MIG instances and links, NVSwitches, and CPUs with their cores."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_uint32
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from podgpu.device_selection import Selection
from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.connection import DcgmConnection
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.gpu.dcgm.values import Entity, read_live
from podgpu.metrics.fields import fields
from podgpu.model import Device

_log = logging.getLogger(__name__)
_NAME, _UUID, _MINOR = 50, 54, 55
_LOST_STATES = {
    4: "lost: reset it or reboot the node (see dmesg)",
    6: "disabled",
    7: "detached from the host engine",
}
_MIG_MODE = 2
"""Index of the MIG mode in `DeviceAttributes.settings`."""
_MAX_SWITCHES = 64
SWITCH_LINK = "SWITCH_LINK"


@dataclass(frozen=True, slots=True)
class DcgmEntity:
    kind: str
    """A value of `Field.level`, or SWITCH_LINK, because links of switches and links of GPUs have different fields."""
    entity: Entity
    device: Device | None = None
    """The GPU or GPU instance that the entity belongs to. For a link, the GPU."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of a link, switch, CPU or core."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    entities: tuple[DcgmEntity, ...] = ()
    """Each GPU is followed by its instances and its active links."""
    unreachable: Mapping[int, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[DcgmEntity]:
        return [e for e in self.entities if e.kind == "GPU"]

    @property
    def others(self) -> list[DcgmEntity]:
        """Switches, links of switches, CPUs and cores."""
        return [e for e in self.entities if e.device is None]


class _Mig(NamedTuple):
    entity: Entity
    parent: Entity
    instance_id: int


class Outline(NamedTuple):
    """The part of the layout that is cheap to read. It is read in every turn to detect changes."""

    states: Mapping[int, int]
    """GPU id -> DCGM's status."""
    migs: tuple[_Mig, ...]


def read_outline(connection: DcgmConnection) -> Outline:
    ids, count = (c_uint32 * s.MAX_GPUS)(), c_int()
    connection.call("dcgmGetAllDevices", ids, byref(count))
    states = {}
    for gpu_id in ids[: count.value]:
        state = c_int()
        with suppress(Unsupported):
            connection.call("dcgmGetGpuStatus", gpu_id, byref(state))
        states[gpu_id] = state.value
    hierarchy = s.make_struct(s.MigHierarchy)
    with suppress(Unsupported):
        connection.call("dcgmGetGpuInstanceHierarchy", byref(hierarchy))
    migs = (
        _Mig(Entity(e.entity.group, e.entity.id), Entity(e.parent.group, e.parent.id), e.nvmlInstanceId)
        for e in hierarchy.entries[: hierarchy.count]
    )
    return Outline(states, tuple(migs))


def read_layout(connection: DcgmConnection, outline: Outline, switches: Selection, cpus: Selection) -> NodeLayout:
    """Reads all entities. A GPU that does not answer is listed as unreachable.

    `switches` and `cpus`: selections of the options `-s` and `-p`.
    """
    ids = [Entity(EntityGroup.GPU, gpu_id) for gpu_id in outline.states]
    minors = read_live(connection, ids, fields()[_MINOR])
    gpu_links, switch_links = _read_links(connection)
    entities: list[DcgmEntity] = []
    unreachable: dict[int, str] = {}
    for entity, state in zip(ids, outline.states.values(), strict=True):
        try:
            device = _read_device(connection, entity.id, state)
        except DriverGone:
            raise
        except SourceError as e:
            unreachable[entity.id] = str(e)
            continue
        minor = minors.get(entity)
        migs = [m for m in outline.migs if m.parent == entity]
        device = replace(
            device,
            minor=minor if isinstance(minor, int) else None,
            mig_enabled=device.mig_enabled or bool(migs),
        )
        entities.append(DcgmEntity("GPU", entity, device))
        entities += _read_instances(connection, device, migs, outline.migs)
        entities += [_make_gpu_link(device, entity.id, link) for link in gpu_links.get(entity.id, ())]
    entities += [*_read_switches(connection, switches, switch_links), *_read_cpus(connection, cpus)]
    return NodeLayout(tuple(entities), unreachable)


def _read_device(connection: DcgmConnection, gpu_id: int, state: int) -> Device:
    if state in _LOST_STATES:
        raise DeviceLost(f"GPU {gpu_id} is {_LOST_STATES[state]}")
    attributes = s.make_struct(s.DeviceAttributes)
    connection.call("dcgmGetDeviceAttributes", gpu_id, byref(attributes))
    identifiers = attributes.identifiers
    device = Device(
        index=gpu_id,
        uuid=identifiers.uuid.decode("utf-8", "replace"),
        pci_bus_id=identifiers.pciBusId.decode("utf-8", "replace"),
        model=identifiers.deviceName.decode("utf-8", "replace"),
        mig_enabled=attributes.settings[_MIG_MODE] == 1,
    )
    if not device.uuid or device.uuid.startswith("<<<"):
        raise SourceError("no_data", f"DCGM lists GPU {gpu_id} but does not report its UUID")
    return device


def _read_instances(
    connection: DcgmConnection, gpu: Device, instances: Sequence[_Mig], migs: Sequence[_Mig]
) -> Iterator[DcgmEntity]:
    """Yields the GPU instances, each with its compute instances."""
    profiles = read_live(connection, [m.entity for m in instances], fields()[_NAME])
    for instance in sorted(instances, key=lambda m: m.instance_id):
        compute = [m.entity for m in migs if m.parent == instance.entity]
        uuids = read_live(connection, compute, fields()[_UUID]).values()
        device = replace(
            gpu,
            gi_id=instance.instance_id,
            profile=str(profiles.get(instance.entity, "")),
            # Older engines return the UUID of the GPU instead.
            mig_uuids=tuple(str(uuid) for uuid in uuids if str(uuid).startswith("MIG-")),
        )
        yield DcgmEntity("GPU_I", instance.entity, device)
        yield from (DcgmEntity("GPU_CI", entity, device) for entity in compute)


def _make_gpu_link(gpu: Device, gpu_id: int, link: int) -> DcgmEntity:
    """Numbers the links from 1 like dcgm-exporter. Also counts links that are down, so that numbers do not change."""
    labels = (
        ("nvlink", str(link + 1)),
        ("gpu", gpu.number),
        ("gpu_uuid", gpu.uuid),
        ("pci_bus_id", gpu.pci_bus_id),
        ("device", gpu.name),
        ("model_name", gpu.model),
    )
    return DcgmEntity("LINK", _link(EntityGroup.GPU, gpu_id, link), gpu, labels)


def _link(owner: EntityGroup, owner_id: int, link: int) -> Entity:
    return Entity(EntityGroup.LINK, s.make_link_id(owner, owner_id, link))


def _read_optional(connection: DcgmConnection, function: str, *arguments: object) -> bool:
    """Makes a call. Returns False if it fails, because most nodes do not support switches, links or CPUs."""
    try:
        connection.call(function, *arguments)
    except DriverGone:
        raise
    except SourceError as e:
        _log.debug("%s", e)
        return False
    return True


def _read_links(connection: DcgmConnection) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Returns the links that are up, by GPU and by switch. Returns none with DCGM 3, which uses other ids for links."""
    status = s.make_struct(s.NvLinkStatus)
    if connection.major < 4 or not _read_optional(connection, "dcgmGetNvLinkLinkStatus", byref(status)):
        return {}, {}
    gpus, switches = (
        {owner.entityId: [link for link, state in enumerate(owner.linkState) if state == s.LINK_UP] for owner in owners}
        for owners in (status.gpus[: status.numGpus], status.nvSwitches[: status.numNvSwitches])
    )
    return gpus, switches


def _read_switches(
    connection: DcgmConnection, selection: Selection, links: Mapping[int, Sequence[int]]
) -> Iterator[DcgmEntity]:
    ids, count = (c_uint32 * _MAX_SWITCHES)(), c_int(_MAX_SWITCHES)
    if not _read_optional(connection, "dcgmGetEntityGroupEntities", EntityGroup.SWITCH, ids, byref(count), 0):
        return
    for switch in ids[: count.value]:
        name = ("nvswitch", f"nvswitch{switch}")
        if selection.shows_gpu(switch):
            yield DcgmEntity("SWITCH", Entity(EntityGroup.SWITCH, switch), labels=(name,))
        for link in links.get(switch, ()):
            if selection.shows_instance(link):
                entity = _link(EntityGroup.SWITCH, switch, link)
                yield DcgmEntity(SWITCH_LINK, entity, labels=(("nvlink", str(link)), name))


def _read_cpus(connection: DcgmConnection, selection: Selection) -> Iterator[DcgmEntity]:
    hierarchy = s.make_struct(s.CpuHierarchy)
    if not _read_optional(connection, "dcgmGetCpuHierarchy", byref(hierarchy)):
        return
    for cpu in hierarchy.cpus[: hierarchy.numCpus]:
        name = ("cpu", str(cpu.cpuId))
        if selection.shows_gpu(cpu.cpuId):
            yield DcgmEntity("CPU", Entity(EntityGroup.CPU, cpu.cpuId), labels=(name,))
        cores = (64 * n + bit for n, word in enumerate(cpu.cores.bitmask) for bit in range(64) if word >> bit & 1)
        for core in cores:
            if selection.shows_instance(core):
                entity = Entity(EntityGroup.CPU_CORE, core)
                yield DcgmEntity("CPU_CORE", entity, labels=(("cpucore", str(core)), name))
