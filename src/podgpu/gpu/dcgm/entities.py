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
    4: "lost: it needs a reset or the node a reboot (see dmesg)",
    6: "disabled",
    7: "detached from the host engine",
}
_MIG_MODE = 2
"""Index of the MIG mode in `DeviceAttributes.settings`."""
_MAX_SWITCHES = 64
SWITCH_LINK = "SWITCH_LINK"


@dataclass(frozen=True, slots=True)
class OtherEntity:
    """A link, switch, CPU or core."""

    kind: str
    """A value of `Field.level`, or SWITCH_LINK, because links of a switch have other fields than links of a GPU."""
    entity: Entity
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GpuEntities:
    """One physical GPU with its instances and links."""

    id: int
    device: Device
    instances: Mapping[Entity, Device] = field(default_factory=dict)
    compute_instances: Mapping[Entity, Device] = field(default_factory=dict)
    """Compute instance -> device of its GPU instance."""
    links: tuple[OtherEntity, ...] = ()
    """NVLinks that are up."""

    @property
    def entity(self) -> Entity:
        return Entity(EntityGroup.GPU, self.id)

    @property
    def devices(self) -> dict[Entity, Device]:
        return {self.entity: self.device, **self.instances}


@dataclass(frozen=True, slots=True)
class NodeLayout:
    gpus: Mapping[str, GpuEntities] = field(default_factory=dict)
    """UUID -> GPU."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    others: tuple[OtherEntity, ...] = ()

    @property
    def xid_entities(self) -> dict[Entity, str]:
        """Entity -> device key. DCGM reports an XID for the GPU, the GPU instance or the compute instance."""
        gpus = self.gpus.values()
        return {e: d.key for gpu in gpus for e, d in (*gpu.devices.items(), *gpu.compute_instances.items())}


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
    minors = read_live(connection, ids, fields()[_MINOR]) if ids else {}
    gpu_links, switch_links = _read_links(connection)
    gpus: dict[str, GpuEntities] = {}
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
        device = replace(device, minor=minor if isinstance(minor, int) else None)
        links = tuple(_make_link(device, entity.id, link) for link in gpu_links.get(entity.id, ()))
        gpus[device.uuid] = _read_instances(connection, GpuEntities(entity.id, device, links=links), outline.migs)
    others = (*_read_switches(connection, switches, switch_links), *_read_cpus(connection, cpus))
    return NodeLayout(gpus, unreachable, others)


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


def _read_instances(connection: DcgmConnection, gpu: GpuEntities, migs: Sequence[_Mig]) -> GpuEntities:
    own = [m for m in migs if m.entity.group == EntityGroup.GPU_I and m.parent == gpu.entity]
    if not own:
        return gpu
    parents = {m.entity for m in own}
    compute = [m for m in migs if m.entity.group == EntityGroup.GPU_CI and m.parent in parents]
    device = replace(gpu.device, mig_enabled=True)
    profiles = read_live(connection, [m.entity for m in own], fields()[_NAME])
    uuids = read_live(connection, [m.entity for m in compute], fields()[_UUID]) if compute else {}
    mig_uuids: dict[Entity, tuple[str, ...]] = {}
    for c in compute:
        uuid = str(uuids.get(c.entity, ""))
        if uuid.startswith("MIG-"):  # older engines return the UUID of the GPU instead
            mig_uuids[c.parent] = (*mig_uuids.get(c.parent, ()), uuid)
    instances = {
        m.entity: replace(
            device,
            gi_id=m.instance_id,
            profile=str(profiles.get(m.entity, "")),
            mig_uuids=mig_uuids.get(m.entity, ()),
        )
        for m in sorted(own, key=lambda m: m.instance_id)
    }
    compute_instances = {c.entity: instances[c.parent] for c in compute}
    return replace(gpu, device=device, instances=instances, compute_instances=compute_instances)


def _read_optional(connection: DcgmConnection, function: str, *arguments: object) -> bool:
    """Makes a call and returns False if it fails. Most nodes do not support switches, links or CPUs."""
    try:
        connection.call(function, *arguments)
    except DriverGone:
        raise
    except SourceError as e:
        _log.debug("%s", e)
        return False
    return True


def _link(owner: EntityGroup, owner_id: int, link: int) -> Entity:
    return Entity(EntityGroup.LINK, s.make_link_id(owner, owner_id, link))


def _make_link(gpu: Device, gpu_id: int, link: int) -> OtherEntity:
    """Numbers the links from 1 like dcgm-exporter, but counts links that are down, so that numbers do not change."""
    labels = (
        ("nvlink", str(link + 1)),
        ("gpu", str(gpu.index)),
        ("gpu_uuid", gpu.uuid),
        ("pci_bus_id", gpu.pci_bus_id),
        ("device", gpu.name),
        ("model_name", gpu.model),
    )
    return OtherEntity("LINK", _link(EntityGroup.GPU, gpu_id, link), labels)


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
) -> Iterator[OtherEntity]:
    ids, count = (c_uint32 * _MAX_SWITCHES)(), c_int(_MAX_SWITCHES)
    if not _read_optional(connection, "dcgmGetEntityGroupEntities", EntityGroup.SWITCH, ids, byref(count), 0):
        return
    for switch in ids[: count.value]:
        name = ("nvswitch", f"nvswitch{switch}")
        if selection.shows_gpu(switch):
            yield OtherEntity("SWITCH", Entity(EntityGroup.SWITCH, switch), (name,))
        for link in links.get(switch, ()):
            if selection.shows_instance(link):
                yield OtherEntity(SWITCH_LINK, _link(EntityGroup.SWITCH, switch, link), (("nvlink", str(link)), name))


def _read_cpus(connection: DcgmConnection, selection: Selection) -> Iterator[OtherEntity]:
    hierarchy = s.make_struct(s.CpuHierarchy)
    if not _read_optional(connection, "dcgmGetCpuHierarchy", byref(hierarchy)):
        return
    for cpu in hierarchy.cpus[: hierarchy.numCpus]:
        name = ("cpu", str(cpu.cpuId))
        if selection.shows_gpu(cpu.cpuId):
            yield OtherEntity("CPU", Entity(EntityGroup.CPU, cpu.cpuId), (name,))
        cores = (64 * n + bit for n, word in enumerate(cpu.cores.bitmask) for bit in range(64) if word >> bit & 1)
        for core in cores:
            if selection.shows_instance(core):
                yield OtherEntity("CPU_CORE", Entity(EntityGroup.CPU_CORE, core), (("cpucore", str(core)), name))
