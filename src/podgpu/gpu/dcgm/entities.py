"""Finds DCGM's entities on a node: GPUs with MIG instances and links, NVSwitches, CPUs with their cores."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_uint32
from dataclasses import dataclass, field, replace

from podgpu.device_selection import Selection
from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.connection import DcgmConnection
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.gpu.dcgm.values import Entity, read_live
from podgpu.metrics.fields import fields
from podgpu.model import Device, OtherReading, Value

_log = logging.getLogger(__name__)
_NAME, _UUID, _MINOR = 50, 54, 55
_LOST_STATES = {
    s.EntityStatus.LOST: "lost: it needs a reset or the node a reboot (see dmesg)",
    s.EntityStatus.DISABLED: "disabled",
    s.EntityStatus.DETACHED: "detached from the host engine",
}
_MAX_SWITCHES = 64
SWITCH_LINK = "SWITCH_LINK"


@dataclass(frozen=True, slots=True)
class GpuEntities:
    """One physical GPU with its instances and links."""

    id: int
    device: Device
    instances: Mapping[Entity, Device] = field(default_factory=dict)
    compute_instances: Mapping[Entity, Device] = field(default_factory=dict)
    """With the device of their GPU instance."""
    links: tuple[int, ...] = ()
    """Numbers of the NVLinks that are up."""

    @property
    def entity(self) -> Entity:
        return Entity(EntityGroup.GPU, self.id)

    @property
    def link_entities(self) -> dict[Entity, int]:
        return {Entity(EntityGroup.LINK, s.make_link_id(EntityGroup.GPU, self.id, i)): i for i in self.links}

    @property
    def devices(self) -> dict[Entity, Device]:
        return {self.entity: self.device, **self.instances}

    def replace_devices(self, devices: Mapping[str, Device]) -> GpuEntities:
        """`devices`: by key."""
        return replace(
            self,
            device=devices[self.device.key],
            instances={e: devices[d.key] for e, d in self.instances.items()},
            compute_instances={e: devices[d.key] for e, d in self.compute_instances.items()},
        )

    def make_link_readings(self, values: Mapping[Entity, Mapping[int, Value]]) -> Iterator[OtherReading]:
        """Links are numbered from 1 as in dcgm-exporter, but a link that is down keeps its number."""
        labels = (
            ("gpu", str(self.device.index)),
            ("gpu_uuid", self.device.uuid),
            ("pci_bus_id", self.device.pci_bus_id),
            ("device", self.device.name),
            ("model_name", self.device.model),
        )
        for entity, link in self.link_entities.items():
            if values.get(entity):
                yield OtherReading("LINK", (("nvlink", str(link + 1)), *labels), values[entity])


@dataclass(frozen=True, slots=True)
class OtherEntity:
    """An entity that is not a GPU and belongs to no GPU."""

    kind: str
    """As in `Field.level`, or SWITCH_LINK: links of a switch have other fields than those of a GPU."""
    entity: Entity
    labels: tuple[tuple[str, str], ...]

    def make_reading(self, values: Mapping[int, Value]) -> OtherReading:
        return OtherReading("LINK" if self.kind == SWITCH_LINK else self.kind, self.labels, values)


@dataclass(frozen=True, slots=True)
class NodeLayout:
    gpus: Mapping[str, GpuEntities] = field(default_factory=dict)
    """By UUID."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    switches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Switch -> numbers of its links that are up."""
    cpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """CPU -> its cores."""

    @property
    def xid_entities(self) -> dict[Entity, str]:
        """Entities and device keys. DCGM reports XIDs on the GPU, the instance or the compute instance."""
        gpus = self.gpus.values()
        return {e: d.key for gpu in gpus for e, d in (*gpu.devices.items(), *gpu.compute_instances.items())}

    def select_others(self, switches: Selection, cpus: Selection) -> Iterator[OtherEntity]:
        """Applies `-s` and `-p`."""
        for switch, links in self.switches.items():
            name = ("nvswitch", f"nvswitch{switch}")
            if switches.shows("g", switch):
                yield OtherEntity("SWITCH", Entity(EntityGroup.SWITCH, switch), (name,))
            for link in links:
                if switches.shows("i", link):
                    entity = Entity(EntityGroup.LINK, s.make_link_id(EntityGroup.SWITCH, switch, link))
                    yield OtherEntity(SWITCH_LINK, entity, (("nvlink", str(link)), name))
        for cpu, cores in self.cpus.items():
            if cpus.shows("g", cpu):
                yield OtherEntity("CPU", Entity(EntityGroup.CPU, cpu), (("cpu", str(cpu)),))
            for core in cores:
                if cpus.shows("i", core):
                    labels = (("cpucore", str(core)), ("cpu", str(cpu)))
                    yield OtherEntity("CPU_CORE", Entity(EntityGroup.CPU_CORE, core), labels)


@dataclass(frozen=True, slots=True)
class _Mig:
    entity: Entity
    parent: Entity
    instance_id: int


@dataclass(frozen=True, slots=True)
class Outline:
    """Part of the layout that is cheap enough to read in every turn. Most changes show in it."""

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


def read_layout(connection: DcgmConnection, outline: Outline) -> NodeLayout:
    """A GPU that does not answer is listed as unreachable; the others are read."""
    ids = list(outline.states)
    minors = read_live(connection, [Entity(EntityGroup.GPU, i) for i in ids], fields()[_MINOR]) if ids else {}
    gpu_links, switch_links = _read_links(connection)
    gpus: dict[str, GpuEntities] = {}
    unreachable: dict[int, str] = {}
    for gpu_id, state in outline.states.items():
        try:
            device = _read_device(connection, gpu_id, state)
        except DriverGone:
            raise
        except SourceError as e:
            unreachable[gpu_id] = str(e)
            continue
        minor = minors.get(Entity(EntityGroup.GPU, gpu_id))
        device = replace(device, minor=minor if isinstance(minor, int) else None)
        gpus[device.uuid] = _read_instances(connection, gpu_id, device, outline.migs, gpu_links.get(gpu_id, ()))
    switches = {switch: switch_links.get(switch, ()) for switch in _read_switches(connection)}
    return NodeLayout(gpus, unreachable, switches, _read_cpus(connection))


def _read_device(connection: DcgmConnection, gpu_id: int, state: int) -> Device:
    if state in _LOST_STATES:
        raise DeviceLost(f"GPU {gpu_id} is {_LOST_STATES[s.EntityStatus(state)]}")
    attributes = s.make_struct(s.DeviceAttributes)
    connection.call("dcgmGetDeviceAttributes", gpu_id, byref(attributes))
    identifiers = attributes.identifiers
    device = Device(
        index=gpu_id,
        uuid=identifiers.uuid.decode("utf-8", "replace"),
        pci_bus_id=identifiers.pciBusId.decode("utf-8", "replace"),
        model=identifiers.deviceName.decode("utf-8", "replace"),
        mig_enabled=attributes.mig_enabled,
    )
    if not device.uuid or device.uuid.startswith("<<<"):
        raise SourceError("no_data", f"DCGM lists GPU {gpu_id} but does not report its UUID")
    return device


def _read_instances(
    connection: DcgmConnection, gpu_id: int, gpu: Device, migs: Sequence[_Mig], links: tuple[int, ...]
) -> GpuEntities:
    own = [m for m in migs if m.entity.group == EntityGroup.GPU_I and m.parent == (EntityGroup.GPU, gpu_id)]
    if not own:
        return GpuEntities(gpu_id, gpu, links=links)
    parents = {m.entity for m in own}
    compute = [m for m in migs if m.entity.group == EntityGroup.GPU_CI and m.parent in parents]
    gpu = replace(gpu, mig_enabled=True)
    profiles = read_live(connection, [m.entity for m in own], fields()[_NAME])
    uuids = read_live(connection, [m.entity for m in compute], fields()[_UUID]) if compute else {}
    instances = {
        m.entity: replace(
            gpu,
            gi_id=m.instance_id,
            profile=str(profiles.get(m.entity, "")),
            # With an older engine a compute instance has the UUID of its GPU.
            mig_uuids=tuple(
                uuid
                for c in compute
                if c.parent == m.entity and (uuid := str(uuids.get(c.entity, ""))).startswith("MIG-")
            ),
        )
        for m in sorted(own, key=lambda m: m.instance_id)
    }
    return GpuEntities(gpu_id, gpu, instances, {c.entity: instances[c.parent] for c in compute}, links)


def _read_optional(connection: DcgmConnection, function: str, *arguments: object) -> bool:
    """Returns False if the call fails: most nodes have no module for switches, links or CPUs."""
    try:
        connection.call(function, *arguments)
    except DriverGone:
        raise
    except SourceError as e:
        _log.debug("%s", e)
        return False
    return True


def _read_switches(connection: DcgmConnection) -> list[int]:
    ids, count = (c_uint32 * _MAX_SWITCHES)(), c_int(_MAX_SWITCHES)
    found = _read_optional(connection, "dcgmGetEntityGroupEntities", EntityGroup.SWITCH, ids, byref(count), 0)
    return list(ids[: count.value]) if found else []


def _read_links(connection: DcgmConnection) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Returns links that are up by GPU and by switch. Not with DCGM 3, which has other ids for links."""
    status = s.make_struct(s.NvLinkStatus)
    if connection.library.major < 4 or not _read_optional(connection, "dcgmGetNvLinkLinkStatus", byref(status)):
        return {}, {}
    gpus = {g.entityId: _find_up(g.linkState) for g in status.gpus[: status.numGpus]}
    return gpus, {w.entityId: _find_up(w.linkState) for w in status.nvSwitches[: status.numNvSwitches]}


def _find_up(states: Sequence[int]) -> tuple[int, ...]:
    return tuple(number for number, state in enumerate(states) if state == s.LINK_UP)


def _read_cpus(connection: DcgmConnection) -> dict[int, tuple[int, ...]]:
    hierarchy = s.make_struct(s.CpuHierarchy)
    if not _read_optional(connection, "dcgmGetCpuHierarchy", byref(hierarchy)):
        return {}
    return {cpu.cpuId: _parse_cores(cpu.cores.bitmask) for cpu in hierarchy.cpus[: hierarchy.numCpus]}


def _parse_cores(bitmask: Sequence[int]) -> tuple[int, ...]:
    return tuple(64 * n + bit for n, word in enumerate(bitmask) for bit in range(64) if word >> bit & 1)
