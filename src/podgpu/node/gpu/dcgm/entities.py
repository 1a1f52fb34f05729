"""Finds DCGM's entities, and watches and reads their fields.

Entities are GPUs, MIG instances, links, switches, CPUs and cores.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_double, c_int, c_int64, c_uint16, c_uint32
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.metrics.fields import Field, fields
from podgpu.metrics.values import Blank, scale_number, value_of, within_unit
from podgpu.model import Device, Value
from podgpu.node.agent.device_selection import Selection
from podgpu.node.gpu.dcgm import structs as s
from podgpu.node.gpu.dcgm.connection import DcgmConnection, Version, translate
from podgpu.node.gpu.dcgm.structs import EntityGroup

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Entity(NamedTuple):
    group: int
    id: int


# Layout

_NAME = 50
_UUID = 54
_MINOR = 55
_LOST_STATES = {
    4: "lost: reset it or reboot the node (see dmesg)",
    6: "disabled",
    7: "detached from the host engine",
}
_MIG_MODE = 2  # index of the MIG mode in `DeviceAttributes.settings`
_MAX_SWITCHES = 64
SWITCH_LINK = "SWITCH_LINK"


@dataclass(frozen=True, slots=True)
class DcgmEntity:
    # `Field.level` of its fields, or SWITCH_LINK. Links of switches and links of GPUs have
    # different fields.
    kind: str
    key: Entity
    # The GPU or MIG instance to which the entity belongs. None for switches and CPUs.
    device: Device | None = None
    labels: dict[str, str] = field(default_factory=dict)  # labels of a link, switch, CPU or core

    @property
    def number(self) -> int:
        """Number in `-s` or `-p`. The id of a link also contains its owner."""
        return int(self.labels.get("nvlink", self.key.id))


@dataclass(frozen=True, slots=True)
class NodeLayout:
    entities: tuple[DcgmEntity, ...] = ()  # a GPU is followed by its instances and active links
    unreachable: Mapping[int, str] = field(default_factory=dict)  # why, by GPU id

    @property
    def gpus(self) -> list[DcgmEntity]:
        return [entity for entity in self.entities if entity.kind == "GPU"]

    @property
    def others(self) -> list[DcgmEntity]:
        """Switches, links of switches, CPUs and cores."""
        return [entity for entity in self.entities if entity.device is None]

    def find_entities(self, uuid: str) -> list[DcgmEntity]:
        """Returns the GPU with this UUID, its instances and its links."""
        entities = []
        for entity in self.entities:
            if entity.device is not None and entity.device.uuid == uuid:
                entities.append(entity)
        return entities


class _Mig(NamedTuple):
    entity: Entity
    parent: Entity
    instance_id: int


class Outline(NamedTuple):
    """The part of the layout that is cheap to read. It is read every time, to detect changes."""

    states: Mapping[int, int]  # DCGM's status of each GPU, by GPU id
    migs: tuple[_Mig, ...]


def read_outline(connection: DcgmConnection) -> Outline:
    ids = (c_uint32 * s.MAX_GPUS)()
    count = c_int()
    connection.call("dcgmGetAllDevices", ids, byref(count))

    states = {}
    for gpu_id in ids[: count.value]:
        # Stays 0 (unknown) if the engine does not support the call.
        state = c_int()
        with suppress(Unsupported):
            connection.call("dcgmGetGpuStatus", gpu_id, byref(state))
        states[gpu_id] = state.value

    hierarchy = s.make_struct(s.MigHierarchy)
    with suppress(Unsupported):
        connection.call("dcgmGetGpuInstanceHierarchy", byref(hierarchy))

    migs = []
    for entry in hierarchy.entries[: hierarchy.count]:
        entity = Entity(entry.entity.group, entry.entity.id)
        parent = Entity(entry.parent.group, entry.parent.id)
        migs.append(_Mig(entity, parent, entry.nvmlInstanceId))
    return Outline(states, tuple(migs))


def read_layout(
    connection: DcgmConnection, outline: Outline, switches: Selection, cpus: Selection
) -> NodeLayout:
    """Reads all entities. GPUs that cannot be read become `unreachable`.

    `switches` and `cpus` select the entities to include. Their options are those of GPUs and
    instances: a GPU stands for a switch or CPU, an instance for a link or core.
    """
    ids = [Entity(EntityGroup.GPU, gpu_id) for gpu_id in outline.states]
    minors = read_live(connection, ids, fields()[_MINOR])
    gpu_links, switch_links = _read_links(connection)

    entities = []
    unreachable = {}
    for gpu_id, state in outline.states.items():
        try:
            device = _read_device(connection, gpu_id, state)
        except DriverGone:
            raise
        except SourceError as e:
            unreachable[gpu_id] = str(e)
            continue

        entity = Entity(EntityGroup.GPU, gpu_id)
        minor = minors.get(entity)
        instances = [mig for mig in outline.migs if mig.parent == entity]
        device = replace(
            device,
            minor=minor if isinstance(minor, int) else None,
            mig_enabled=device.mig_enabled or bool(instances),
        )
        entities.append(DcgmEntity("GPU", entity, device))
        entities += _read_instances(connection, device, instances, outline.migs)
        for link in gpu_links.get(gpu_id, ()):
            entities.append(_make_gpu_link(device, gpu_id, link))

    entities += _read_switches(connection, switches, switch_links)
    entities += _read_cpus(connection, cpus)
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

    # DCGM's codes for "no text" begin with <<<.
    if not device.uuid or device.uuid.startswith("<<<"):
        raise SourceError("no_data", f"DCGM lists GPU {gpu_id} but does not report its UUID")
    return device


def _read_instances(
    connection: DcgmConnection, gpu: Device, instances: Sequence[_Mig], migs: Sequence[_Mig]
) -> Iterator[DcgmEntity]:
    """Yields the GPU instances of a GPU, each with its compute instances.

    `migs`: the GPU and compute instances of all GPUs.
    """
    profiles = read_live(connection, [mig.entity for mig in instances], fields()[_NAME])
    for instance in sorted(instances, key=lambda mig: mig.instance_id):
        compute_instances = [mig.entity for mig in migs if mig.parent == instance.entity]
        values = read_live(connection, compute_instances, fields()[_UUID])
        uuids = [str(value) for value in values.values()]
        # Older engines return the UUID of the GPU, which is omitted.
        mig_uuids = [uuid for uuid in uuids if uuid.startswith("MIG-")]

        device = replace(
            gpu,
            gi_id=instance.instance_id,
            profile=str(profiles.get(instance.entity, "")),
            mig_uuids=tuple(mig_uuids),
        )
        yield DcgmEntity("GPU_I", instance.entity, device)
        for entity in compute_instances:
            yield DcgmEntity("GPU_CI", entity, device)


def _make_gpu_link(gpu: Device, gpu_id: int, link: int) -> DcgmEntity:
    """Creates the entity of a link. Its label numbers the links from 1, as in dcgm-exporter."""
    labels = {
        "nvlink": str(link + 1),
        "gpu": "" if gpu.index is None else str(gpu.index),
        "gpu_uuid": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": gpu.name,
        "model_name": gpu.model,
    }
    return DcgmEntity("LINK", _link(EntityGroup.GPU, gpu_id, link), gpu, labels)


def _link(owner: EntityGroup, owner_id: int, link: int) -> Entity:
    # dcgm_link_t of DCGM 4: one byte for the owner's kind, two for the link, one for the owner's id
    return Entity(EntityGroup.LINK, owner | (link << 8) | (owner_id << 24))


def _read_links(connection: DcgmConnection) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Returns active links by GPU, and by switch.

    Returns no links for DCGM 3, which identifies links differently.
    """
    status = s.make_struct(s.NvLinkStatus)
    if connection.major < 4 or not connection.try_call("dcgmGetNvLinkLinkStatus", byref(status)):
        return {}, {}

    gpus = status.gpus[: status.numGpus]
    switches = status.nvSwitches[: status.numNvSwitches]
    return _find_active_links(gpus), _find_active_links(switches)


def _find_active_links(owners: Sequence[Any]) -> dict[int, list[int]]:
    active = {}
    for owner in owners:
        states = enumerate(owner.linkState)
        links = [link for link, state in states if state == s.LINK_UP]
        active[owner.entityId] = links
    return active


def _read_switches(
    connection: DcgmConnection, selection: Selection, links: Mapping[int, Sequence[int]]
) -> Iterator[DcgmEntity]:
    """Yields the selected switches and links, see `read_layout`. `links`: by switch."""
    ids = (c_uint32 * _MAX_SWITCHES)()
    count = c_int(_MAX_SWITCHES)
    if not connection.try_call(
        "dcgmGetEntityGroupEntities", EntityGroup.SWITCH, ids, byref(count), 0
    ):
        return

    for switch in ids[: count.value]:
        name = {"nvswitch": f"nvswitch{switch}"}
        if selection.shows_gpu(switch):
            yield DcgmEntity("SWITCH", Entity(EntityGroup.SWITCH, switch), labels=name)
        if not selection.includes_parts_of(switch):
            continue
        for link in links.get(switch, ()):
            if selection.shows_instance(link):
                entity = _link(EntityGroup.SWITCH, switch, link)
                yield DcgmEntity(SWITCH_LINK, entity, labels={"nvlink": str(link)} | name)


def _read_cpus(connection: DcgmConnection, selection: Selection) -> Iterator[DcgmEntity]:
    """Yields the selected CPUs and cores, see `read_layout`."""
    hierarchy = s.make_struct(s.CpuHierarchy)
    if not connection.try_call("dcgmGetCpuHierarchy", byref(hierarchy)):
        return

    for cpu in hierarchy.cpus[: hierarchy.numCpus]:
        name = {"cpu": str(cpu.cpuId)}
        if selection.shows_gpu(cpu.cpuId):
            yield DcgmEntity("CPU", Entity(EntityGroup.CPU, cpu.cpuId), labels=name)
        if not selection.includes_parts_of(cpu.cpuId):
            continue

        mask = int.from_bytes(bytes(cpu.cores.bitmask), "little")
        for core in range(mask.bit_length()):
            is_present = mask >> core & 1
            if is_present and selection.shows_instance(core):
                entity = Entity(EntityGroup.CPU_CORE, core)
                yield DcgmEntity("CPU_CORE", entity, labels={"cpucore": str(core)} | name)


# Values

_MAX_VALUES = 1024  # maximum number of values per call, because each value needs 4 KiB of memory
_NOT_YET_READ = {"no_data", "not_watched"}
_KEEP_SECONDS = 600.0  # how long the engine keeps samples, as in dcgm-exporter
_STALE_INTERVALS = 3  # a value is stale if its timestamp has not changed for so many intervals
_NOT_CAUSED_BY_A_FIELD = {"timeout", "max_limit", "insufficient_resources", "version_mismatch"}
_FIRST_FIELD_OF_4_7 = 1613
# A code for `blank` is followed by the codes for `not found`, `not supported` and `not permitted`.
# The larger 64-bit numbers are reserved.
_BLANK_VALUES: set[object] = set(range(s.INT64_BLANK + 4, 1 << 63))
_UNSUPPORTED_VALUES: set[object] = {b"<<<NOT_SUPPORTED>>>"}
for _blank in (s.INT64_BLANK, s.INT32_BLANK, s.DOUBLE_BLANK):
    _BLANK_VALUES |= {_blank, _blank + 1}
    _UNSUPPORTED_VALUES |= {_blank + 2, _blank + 3}


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass(slots=True)
class LatestValues:
    values: dict[Entity, dict[int, Value]]  # by entity and field id
    unsupported: list[tuple[Entity, int]] = field(default_factory=list)  # entity and field id
    dropped: list[int] = field(default_factory=list)  # ids of fields with invalid values
    errors: list[str] = field(default_factory=list)


class LastChange(NamedTuple):
    """When a value of the engine last changed its timestamp."""

    timestamp: int  # of the engine
    noticed_at: float  # monotonic time


LastChanges = dict[tuple[Entity, int], LastChange]  # by entity and field id


@dataclass(slots=True)
class FieldWatch:
    """Makes the engine read fields periodically.

    The engine removes the watch when the connection is closed.
    """

    _connection: DcgmConnection
    _entities: Sequence[Entity]
    _fields: Sequence[Field]
    _interval: float
    _clock: Callable[[], float]
    _changes: LastChanges  # shared by all watches
    groups: list[s.Handle] = field(default_factory=list)  # handles of DCGM's groups of entities
    field_groups: list[s.Handle] = field(default_factory=list)
    rejected: set[int] = field(default_factory=set)  # ids of the fields that the engine rejected
    # By id of a field to read: the wanted fields that are computed from it.
    _computed_from: dict[int, list[Field]] = field(default_factory=dict)

    def start(self) -> None:
        """Starts the watch. Adds fields that the engine rejects to `rejected`.

        Raises SourceError for other errors.
        """
        for wanted in self._fields:
            source = _find_source(wanted, self._connection.version)
            self._computed_from.setdefault(source.id, []).append(wanted)

        chunks = _chunks(self._entities, s.MAX_ENTITIES)
        self.groups = [self._create_group(entities) for entities in chunks]
        for ids in _chunks(list(self._computed_from), s.MAX_FIELDS):
            self._watch_fields(ids)

    def stop(self) -> None:
        for field_group in self.field_groups:
            self._remove(field_group)

        for group in self.groups:
            with suppress(SourceError):
                self._connection.call("dcgmGroupDestroy", group)
        self.groups = []
        self.field_groups = []

    def read(self, entities: Sequence[Entity], latest: LatestValues) -> None:
        """Reads the entities' values from the engine's cache and adds them to `latest`.

        Raises DeviceLost if a GPU is lost, and SourceError if the call fails.
        """
        watched = []
        for field_id, computed in self._computed_from.items():
            if field_id not in self.rejected:
                watched.append(field_id)
                continue
            for wanted in computed:
                latest.unsupported += [(entity, wanted.id) for entity in entities]

        for raw in _read_raw(self._connection, entities, watched):
            entity = Entity(raw.entityGroupId, raw.entityId)
            if entity in latest.values:
                for wanted in self._computed_from.get(raw.fieldId, ()):
                    self._accept(latest, entity, wanted, raw)

    def _accept(self, latest: LatestValues, entity: Entity, wanted: Field, raw: Any) -> None:
        try:
            value = decode(fields()[raw.fieldId], raw)
        except Blank:
            latest.dropped.append(wanted.id)
        except Unsupported:
            latest.unsupported.append((entity, wanted.id))
        except SourceError as e:
            # A lost instance does not make the whole reading fail.
            if isinstance(e, DeviceLost) and entity.group == EntityGroup.GPU:
                raise
            if e.reason not in _NOT_YET_READ:
                latest.errors.append(e.reason)
        else:
            # A field with a constant value keeps its first timestamp, so it cannot be stale.
            if not wanted.once and not self._is_fresh(entity, raw):
                latest.errors.append("stale_data")
                return
            if raw.fieldId != wanted.id and not isinstance(value, str):
                value = scale_number(wanted, value, wanted.factor)
            latest.values[entity][wanted.id] = value

    def _is_fresh(self, entity: Entity, raw: Any) -> bool:
        """Remembers when a value got a new timestamp. Returns False if that was too long ago."""
        key = entity, raw.fieldId
        now = self._clock()
        last = self._changes.get(key)
        if last is None or last.timestamp != raw.ts:
            self._changes[key] = LastChange(raw.ts, now)
            return True

        age = now - last.noticed_at
        return age < _STALE_INTERVALS * self._interval

    def _create_group(self, entities: Sequence[Entity]) -> s.Handle:
        group = s.Handle()
        self._connection.call("dcgmGroupCreate", s.GROUP_EMPTY, _make_name(), byref(group))
        for entity in entities:
            # This fails if the entity no longer exists.
            self._connection.try_call("dcgmGroupAddEntity", group, *entity)
        return group

    def _watch_fields(self, ids: Sequence[int]) -> None:
        """Watches these fields.

        If the engine rejects them, finds the unsupported fields by bisection.
        """
        field_group = s.Handle()
        interval_us = c_int64(round(self._interval * 1_000_000))
        keep_seconds = c_double(_KEEP_SECONDS)

        try:
            numbers = (c_uint16 * len(ids))(*ids)
            self._connection.call(
                "dcgmFieldGroupCreate", len(ids), numbers, _make_name(), byref(field_group)
            )
            for group in self.groups:
                self._connection.call(
                    "dcgmWatchFields", group, field_group, interval_us, keep_seconds, 0
                )
            self.field_groups.append(field_group)
        except (DriverGone, DeviceLost):
            raise
        except SourceError as e:
            self._remove(field_group)
            if e.reason in _NOT_CAUSED_BY_A_FIELD:
                raise
            if len(ids) == 1:
                self.rejected.add(ids[0])
                return
            middle = len(ids) // 2
            self._watch_fields(ids[:middle])
            self._watch_fields(ids[middle:])

    def _remove(self, field_group: s.Handle) -> None:
        for group in self.groups:
            with suppress(SourceError):
                self._connection.call("dcgmUnwatchFields", group, field_group)
        with suppress(SourceError):
            self._connection.call("dcgmFieldGroupDestroy", field_group)


def _make_name() -> bytes:
    return f"podgpu-{uuid.uuid4().hex[:16]}".encode()


def _find_source(wanted: Field, version: Version) -> Field:
    """Returns the field to read.

    If this version of DCGM lacks `wanted`, returns the older field in another unit. DCGM 4.6.1
    added the fields 1600 to 1612. DCGM 4.7 added the fields from 1613 on.
    """
    first_version = (4, 7) if wanted.id >= _FIRST_FIELD_OF_4_7 else (4, 6, 1)
    if wanted.legacy is None or version >= first_version:
        return wanted
    return fields()[wanted.legacy]


def read_live(
    connection: DcgmConnection, entities: Sequence[Entity], wanted: Field
) -> dict[Entity, Value]:
    """Reads one field directly from the driver. Omits entities without a value."""
    values = {}
    try:
        for raw in _read_raw(connection, entities, [wanted.id], flags=s.LIVE):
            with suppress(Blank, SourceError):
                values[Entity(raw.entityGroupId, raw.entityId)] = decode(wanted, raw)
    except DriverGone:
        raise
    except SourceError as e:
        _log.debug("%s: %s", wanted.name, e)
    return values


def _read_raw(
    connection: DcgmConnection, entities: Sequence[Entity], field_ids: Sequence[int], flags: int = 0
) -> Iterator[Any]:
    for ids in _chunks(field_ids, s.MAX_FIELDS):
        numbers = (c_uint16 * len(ids))(*ids)
        max_entities = min(s.MAX_ENTITIES, _MAX_VALUES // len(ids))
        for chunk in _chunks(entities, max_entities):
            pairs = (s.EntityPair * len(chunk))(*chunk)
            count = len(chunk) * len(ids)
            values = (s.FieldValueV2 * count)()
            connection.call(
                "dcgmEntitiesGetLatestValues", pairs, len(chunk), numbers, len(ids), flags, values
            )
            yield from values


def decode(wanted: Field, raw: Any) -> Value:
    """Converts a value from libdcgm.

    Raises Blank if it is empty, and Unsupported or SourceError if DCGM failed.
    """
    if raw.status:
        raise translate(raw.status, wanted.name)
    value: Any
    match raw.fieldType:
        case s.FieldType.INT | s.FieldType.TIME:
            value = raw.value.i64
        case s.FieldType.DOUBLE:
            value = raw.value.dbl
        case s.FieldType.STRING:
            value = raw.value.str
        case _:
            raise Blank(f"type {raw.fieldType}")

    if value in _UNSUPPORTED_VALUES:
        raise Unsupported(f"{wanted.name}: not supported or not permitted")
    is_code = isinstance(value, bytes) and value.startswith(b"<<<")
    if is_code or value in _BLANK_VALUES:
        raise Blank(repr(value))
    # `value_of` would reject a large counter as blank.
    if isinstance(value, float) and s.DOUBLE_BLANK < value < math.inf:
        return within_unit(wanted, value)
    return value_of(wanted, value, is_converted=True)
