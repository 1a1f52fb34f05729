"""This module finds what DCGM knows on a node: GPUs with MIG instances and links, NVSwitches, CPUs with their cores."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_uint32
from dataclasses import dataclass, field, replace

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.library import versioned
from podgpu.gpu.dcgm.session import DcgmSession
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.gpu.dcgm.values import Entity, read_live
from podgpu.metrics.fields import Field, fields
from podgpu.model import Device

_log = logging.getLogger(__name__)
_NAME, _UUID, _MINOR = 50, 54, 55
_GONE_STATES = {
    s.EntityStatus.LOST: "lost: it needs a reset or the node a reboot (see dmesg)",
    s.EntityStatus.DISABLED: "disabled",
    s.EntityStatus.DETACHED: "detached from the host engine",
}
_MOST_SWITCHES = 64


@dataclass(frozen=True, slots=True)
class GpuEntities:
    """One physical GPU with what is on it."""

    id: int
    device: Device
    instances: Mapping[Entity, Device] = field(default_factory=dict)
    compute_instances: Mapping[Entity, Device] = field(default_factory=dict)
    """With the device of the GPU instance they lie in."""
    links: tuple[int, ...] = ()
    """Numbers of its NVLinks that are up."""

    @property
    def entity(self) -> Entity:
        return Entity(EntityGroup.GPU, self.id)

    @property
    def link_entities(self) -> dict[Entity, int]:
        return {Entity(EntityGroup.LINK, s.link_id(EntityGroup.GPU, self.id, i)): i for i in self.links}

    @property
    def devices(self) -> dict[Entity, Device]:
        return {self.entity: self.device, **self.instances}

    def with_devices(self, known: Mapping[str, Device]) -> GpuEntities:
        """`known`: by key, the same devices with more about them."""
        return replace(
            self,
            device=known[self.device.key],
            instances={e: known[d.key] for e, d in self.instances.items()},
            compute_instances={e: known[d.key] for e, d in self.compute_instances.items()},
        )


@dataclass(frozen=True, slots=True)
class Layout:
    gpus: Mapping[str, GpuEntities] = field(default_factory=dict)
    """By UUID."""
    unreachable: Mapping[int, str] = field(default_factory=dict)
    switches: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Switch -> numbers of its links that are up."""
    cpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """CPU -> its cores."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What a change of layout shows in, cheap enough for every turn."""

    states: Mapping[int, int]
    """GPU id -> DCGM's status of it."""
    migs: tuple[_Mig, ...]


@dataclass(frozen=True, slots=True)
class _Mig:
    entity: Entity
    parent: Entity
    instance_id: int


def read_outline(session: DcgmSession) -> Outline:
    return Outline({gpu: _read_state(session, gpu) for gpu in _read_gpu_ids(session)}, _read_migs(session))


def _read_gpu_ids(session: DcgmSession) -> list[int]:
    ids, number = (c_uint32 * s.MAX_GPUS)(), c_int()
    session.call("dcgmGetAllDevices", ids, byref(number))
    return list(ids[: number.value])


def _read_state(session: DcgmSession, gpu: int) -> int:
    state = c_int()
    with suppress(Unsupported):
        session.call("dcgmGetGpuStatus", gpu, byref(state))
    return state.value


def _read_migs(session: DcgmSession) -> tuple[_Mig, ...]:
    hierarchy = versioned(s.MigHierarchy)
    try:
        session.call("dcgmGetGpuInstanceHierarchy", byref(hierarchy))
    except Unsupported:
        return ()
    return tuple(
        _Mig(Entity(e.entity.group, e.entity.id), Entity(e.parent.group, e.parent.id), e.nvmlInstanceId)
        for e in hierarchy.entries[: hierarchy.count]
    )


def read_layout(session: DcgmSession, outline: Outline) -> Layout:
    """Everything; a GPU that does not answer is told apart, the others stand."""
    ids = list(outline.states)
    minors = read_live(session, [Entity(EntityGroup.GPU, i) for i in ids], _field(_MINOR)) if ids else {}
    gpu_links, switch_links = _read_links(session)
    gpus: dict[str, GpuEntities] = {}
    unreachable: dict[int, str] = {}
    for gpu_id, state in outline.states.items():
        try:
            device = _read_device(session, gpu_id, state)
        except DriverGone:
            raise
        except SourceError as e:
            unreachable[gpu_id] = str(e)
            continue
        minor = minors.get(Entity(EntityGroup.GPU, gpu_id))
        device = replace(device, minor=minor if isinstance(minor, int) else None)
        gpus[device.uuid] = _with_instances(session, gpu_id, device, outline.migs, gpu_links.get(gpu_id, ()))
    switches = {switch: switch_links.get(switch, ()) for switch in _read_entities(session, EntityGroup.SWITCH)}
    return Layout(gpus, unreachable, switches, _read_cpus(session))


def _field(field_id: int) -> Field:
    return fields()[field_id]


def _read_device(session: DcgmSession, gpu_id: int, state: int) -> Device:
    if state in _GONE_STATES:
        raise DeviceLost(f"GPU {gpu_id} is {_GONE_STATES[s.EntityStatus(state)]}")
    attributes = versioned(s.DeviceAttributes)
    session.call("dcgmGetDeviceAttributes", gpu_id, byref(attributes))
    known = attributes.identifiers
    device = Device(
        index=gpu_id,
        uuid=known.uuid.decode("utf-8", "replace"),
        pci_bus_id=known.pciBusId.decode("utf-8", "replace"),
        model=known.deviceName.decode("utf-8", "replace"),
        mig_enabled=attributes.mig_enabled,
    )
    if not device.uuid or device.uuid.startswith("<<<"):
        raise SourceError("no_data", f"DCGM lists GPU {gpu_id} but does not know its UUID")
    return device


def _with_instances(
    session: DcgmSession, gpu_id: int, gpu: Device, migs: Sequence[_Mig], links: tuple[int, ...]
) -> GpuEntities:
    mine = [m for m in migs if m.entity.group == EntityGroup.GPU_I and m.parent == (EntityGroup.GPU, gpu_id)]
    parents = {m.entity for m in mine}
    compute = [m for m in migs if m.entity.group == EntityGroup.GPU_CI and m.parent in parents]
    if not mine:
        return GpuEntities(gpu_id, gpu, links=links)
    gpu = replace(gpu, mig_enabled=True)
    profiles = read_live(session, [m.entity for m in mine], _field(_NAME))
    uuids = read_live(session, [m.entity for m in compute], _field(_UUID)) if compute else {}
    instances = {
        m.entity: replace(
            gpu,
            gi_id=m.instance_id,
            profile=str(profiles.get(m.entity, "")),
            mig_uuids=tuple(_mig_uuid(uuids.get(c.entity)) for c in compute if c.parent == m.entity),
        )
        for m in sorted(mine, key=lambda m: m.instance_id)
    }
    instances = {e: replace(d, mig_uuids=tuple(filter(None, d.mig_uuids))) for e, d in instances.items()}
    return GpuEntities(gpu_id, gpu, instances, {c.entity: instances[c.parent] for c in compute}, links)


def _mig_uuid(value: object) -> str:
    """On an older engine a compute instance answers with its GPU's UUID, which is no name for it."""
    return value if isinstance(value, str) and value.startswith("MIG-") else ""


def _read_entities(session: DcgmSession, group: EntityGroup) -> list[int]:
    ids, number = (c_uint32 * _MOST_SWITCHES)(), c_int(_MOST_SWITCHES)
    try:
        session.call("dcgmGetEntityGroupEntities", group, ids, byref(number), 0)
    except DriverGone:
        raise
    except SourceError:  # a node without the module for them
        return []
    return list(ids[: number.value])


def _read_links(session: DcgmSession) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Links that are up, by GPU and by switch. DCGM 3 names link entities in another way, and is not asked."""
    if session.library.major < 4:
        return {}, {}
    status = versioned(s.NvLinkStatus)
    try:
        session.call("dcgmGetNvLinkLinkStatus", byref(status))
    except DriverGone:
        raise
    except SourceError as e:
        _log.debug("no NVLink states: %s", e)
        return {}, {}
    gpus = {g.entityId: _up(g.linkState) for g in status.gpus[: status.numGpus]}
    return gpus, {w.entityId: _up(w.linkState) for w in status.nvSwitches[: status.numNvSwitches]}


def _up(states: Sequence[int]) -> tuple[int, ...]:
    return tuple(number for number, state in enumerate(states) if state == s.LINK_UP)


def _read_cpus(session: DcgmSession) -> dict[int, tuple[int, ...]]:
    hierarchy = versioned(s.CpuHierarchy)
    try:
        session.call("dcgmGetCpuHierarchy", byref(hierarchy))
    except DriverGone:
        raise
    except SourceError:  # only Grace has it
        return {}
    return {cpu.cpuId: _cores(cpu.cores.bitmask) for cpu in hierarchy.cpus[: hierarchy.numCpus]}


def _cores(bitmask: Sequence[int]) -> tuple[int, ...]:
    return tuple(64 * n + bit for n, word in enumerate(bitmask) for bit in range(64) if word >> bit & 1)
