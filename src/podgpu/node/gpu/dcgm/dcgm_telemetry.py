"""Reads GPU values from DCGM: from an engine inside this process, or from a running host engine.

The engine reads the GPUs periodically, and podgpu reads the engine's latest values. Processes and
usage come from the local driver, if there is one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from podgpu.errors import DeviceLost, SourceError, few_of
from podgpu.known import select_known
from podgpu.metrics.dcgm import health_labels
from podgpu.metrics.fields import (
    DEVICE_LEVELS,
    HEALTH,
    HEALTH_FIELD,
    P2P_FIELD,
    XID_FIELD,
    Field,
    Recorded,
    by_name,
    fields,
)
from podgpu.model import (
    Detail,
    Device,
    EntityState,
    ErrorEvent,
    FieldValues,
    GpuReading,
    Inventory,
    group_by_key,
)
from podgpu.node.agent.device_selection import Selection
from podgpu.node.gpu.dcgm import structs as s
from podgpu.node.gpu.dcgm.connection import DcgmConnection, EngineAddress, Version
from podgpu.node.gpu.dcgm.entities import (
    SWITCH_LINK,
    DcgmEntity,
    Entity,
    FieldWatch,
    LastChanges,
    LatestValues,
    NodeLayout,
    Outline,
    read_layout,
    read_outline,
)
from podgpu.node.gpu.dcgm.structs import EntityGroup
from podgpu.node.gpu.source import (
    CompanionDriver,
    ErrorEvents,
    FieldGroup,
    Telemetry,
    list_peer_state,
)

_log = logging.getLogger(__name__)
_LAYOUT_SECONDS = 60.0
"""Interval at which the whole layout is read.

Some changes, such as a new link, are not visible in the outline.
"""
_CLOSE_WAIT = 2.0  # seconds until a lost connection is closed; a call in it may hang
_XID_KINDS = ("GPU", "GPU_I", "GPU_CI")
"""Kinds of entities with XIDs.

Each kind has its own watch, because an engine may reject some kinds.
"""

_CPU_UTILIZATION = range(1100, 1105)
"""Fields with a value for each core, and a mean for the whole CPU."""

# DCGM's codes for the result and the systems of a health check.
_PASS = 0
_HEALTH_CHECKS = {
    0x1: "PCIE",
    0x2: "NVLINK",
    0x4: "PMU",
    0x8: "MCU",
    0x10: "MEM",
    0x20: "SM",
    0x40: "INFOROM",
    0x80: "THERMAL",
    0x100: "POWER",
    0x200: "DRIVER",
    s.HEALTH_ALL: "ALL",
}
# Each reading starts this much before the last XID, because samples may arrive out of order.
_OVERLAP_US = 60_000_000

Details = Mapping[int, Sequence[Detail]]  # details by GPU id
_Incidents = dict[tuple[int, int], tuple[int, int]]
"""By GPU id and health check: health (larger is worse) and error code of the worst incident."""


@dataclass(frozen=True)
class DcgmSettings:
    # Address of the host engine. None for an engine inside this process.
    address: EngineAddress | None = None
    interval: float = 30.0
    log_level: str = ""  # if empty, DCGM logs nothing
    switches: Selection = field(default_factory=Selection)
    cpus: Selection = field(default_factory=Selection)
    library: str = ""  # path of libdcgm; if empty, the newest libdcgm of this machine is used


class DcgmTelemetry:
    name = "dcgm"

    def __init__(
        self,
        settings: DcgmSettings,
        driver: Telemetry | None = None,
        count_expected: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does not connect to DCGM.

        `driver`: NVML on the same machine, which provides processes and usage. `count_expected`:
        function that returns the number of GPUs on the PCI bus, or None if it is unknown.
        """
        self._settings = settings
        self._connection = DcgmConnection(settings.address, settings.library, settings.log_level)

        self._companion = CompanionDriver(driver)
        self.processes = self._companion.processes
        self.usage = self._companion.usage
        self._count_expected = count_expected
        self._clock = clock
        self.expected: int | None = None

        # None if the layout must be read, because podgpu has just connected.
        self._outline: Outline | None = None
        self._layout = NodeLayout()
        self._layout_read_at = float("-inf")
        self._groups: tuple[FieldGroup, ...] = ()
        self._is_scheduled = False

        self._watches = _Watches(self._connection, settings.interval, clock)
        self._xids = _XidReader(self._connection)
        # Health checks and NVLink peers of all GPUs, by field id. None if DCGM does not report
        # them.
        self._details: dict[int, Details | None] = {}

    @property
    def versions(self) -> tuple[Version, Version]:
        """Version of the library and version of the engine."""
        return self._connection.library_version, self._connection.engine_version

    def schedule(self, groups: Sequence[FieldGroup]) -> None:
        self._groups = tuple(groups)
        self._is_scheduled = True

    def _find_group(self, fields: Sequence[Field]) -> FieldGroup:
        """Returns the group of these fields.

        If `schedule` was never called, as by `podgpu doctor`, creates a group and uses only that
        one.
        """
        for group in self._groups:
            # Readers pass the tuple of a group, so its fields need not be compared.
            if group.fields is fields:
                return group

        group = FieldGroup(tuple(fields), self._settings.interval)
        # If groups are scheduled, they have just changed. Nothing watches the earlier fields.
        if not self._is_scheduled:
            self._groups = (group,)
        return group

    def inventory(self) -> Inventory:
        if self._connection.lost and not self._close(_CLOSE_WAIT):
            raise SourceError(
                "connection_lost",
                "the connection to DCGM was lost and cannot be closed, because a call hangs",
            )

        if not self._connection.is_open:
            self._connection.open()
            self._outline = None

        with self._connection.hold():
            self._follow_layout()
            self._read_health()

        self._companion.update()
        layout = self._layout
        devices = [gpu.device for gpu in layout.gpus if gpu.device is not None]
        completed = tuple(map(self._companion.complete, devices))
        return Inventory(completed, dict(layout.unreachable))

    def _follow_layout(self) -> None:
        outline = read_outline(self._connection)
        now = self._clock()
        if outline == self._outline and now - self._layout_read_at < _LAYOUT_SECONDS:
            return

        layout = read_layout(
            self._connection, outline, self._settings.switches, self._settings.cpus
        )
        if outline != self._outline:
            _log.info(
                "dcgm: %d GPUs, %d of them unreachable",
                len(outline.states),
                len(layout.unreachable),
            )
            _warn_about_missing(layout, self._settings)

        self.expected = self._count_expected()
        self._outline = outline
        self._layout = layout
        self._layout_read_at = now

    def _read_health(self) -> None:
        """Reads XIDs, health checks and NVLink peers of all GPUs.

        Does nothing before the first call of `read`, because the fields are not known yet.
        """
        watches = self._watches
        with watches.lock:
            layout = watches.layout
            if layout is None:
                return
            self._xids.read(watches.list_xid_watches(), layout)
            ids = [gpu.key.id for gpu in layout.gpus]

            details: dict[int, Details | None] = {}
            if watches.includes(HEALTH_FIELD):
                details[HEALTH_FIELD] = check_health(self._connection, watches.gpu_groups, ids)
            if watches.includes(P2P_FIELD):
                details[P2P_FIELD] = read_p2p(self._connection, ids)
            self._details = details

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuReading:
        with self._connection.hold():
            entities = self._layout.find_entities(gpu.uuid)
            if not entities:
                raise DeviceLost(f"{gpu.text} is no longer listed by DCGM")
            # Compute instances have XIDs, but no fields.
            readable = [entity for entity in entities if entity.kind != "GPU_CI"]
            reading = self._read_entities(readable, fields)

        details: list[Detail] = []
        unsupported = list(reading.unsupported)
        for field_id, by_gpu in self._details.items():
            if by_gpu is None:
                unsupported.append((gpu.uuid, field_id))
            else:
                gpu_id = entities[0].key.id
                details += by_gpu.get(gpu_id, ())

        links_up = sum(entity.kind == "LINK" for entity in entities)
        return replace(
            reading,
            details=tuple(details),
            unsupported=tuple(unsupported),
            reports_errors=self._watches.reports_xids,
            # The layout has only active links. A GPU without NVLink has none, either.
            links_up=links_up or None,
        )

    def read_others(self, fields: Sequence[Field]) -> GpuReading:
        with self._connection.hold():
            return self._read_entities(self._layout.others, fields)

    def _read_entities(self, entities: Sequence[DcgmEntity], fields: Sequence[Field]) -> GpuReading:
        group = self._find_group(fields)
        self._update_watches()
        latest = LatestValues({entity.key: {} for entity in entities})
        by_kind = group_by_key((entity.kind, entity.key) for entity in entities)
        for kind, of_kind in by_kind.items():
            watch = self._watches.find(kind, group)
            if watch is not None:
                watch.read(of_kind, latest)

        keys = {}
        readings: dict[Device, FieldValues] = {}
        others = []
        for entity in entities:
            values = latest.values[entity.key]
            if entity.device is not None and entity.kind != "LINK":
                device = self._companion.complete(entity.device)
                keys[entity.key] = device.key
                readings[device] = values
            elif values:
                # Metrics do not distinguish the two kinds of links.
                kind = "LINK" if entity.kind == SWITCH_LINK else entity.kind
                others.append(EntityState(kind, entity.labels, by_name(values)))

        unsupported = set()
        for without_value, field_id in latest.unsupported:
            if without_value in keys:
                unsupported.add((keys[without_value], field_id))
        # Removes duplicates, but keeps the order.
        errors = dict.fromkeys(latest.errors)

        return GpuReading(
            readings,
            unsupported=tuple(sorted(unsupported)),
            dropped=tuple(latest.dropped),
            errors=tuple(errors),
            entities=tuple(others),
        )

    def _update_watches(self) -> None:
        with self._watches.lock:
            layout = self._layout
            if self._watches.update(layout, self._groups):
                # The first call skips old XIDs, so that later calls report only new XIDs.
                self._xids.read(self._watches.list_xid_watches(), layout)

    def error_events(self) -> Sequence[ErrorEvent]:
        self._companion.discard_error_events()
        return self._xids.events.drain()

    def release(self, wait: float) -> bool:
        closed = self._close(wait / 2)
        if not closed:
            _log.warning("DCGM cannot be closed, because a call into it has not returned")

        return self._companion.release(wait / 2) and closed

    def _close(self, wait: float) -> bool:
        """Returns False if a call does not return in time, so the connection stays open."""
        if not self._connection.close(wait, self._watches.stop):
            return False
        with self._watches.lock:
            # `close` does not stop the watches if the connection was lost.
            self._watches.clear()
            self._details = {}
        return True


# Watches


class _Watches:
    """One `FieldWatch` for each kind of entity and each field group.

    Callers must hold `lock`, except for `find` and `reports_xids`.
    """

    def __init__(
        self, connection: DcgmConnection, interval: float, clock: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._xid_group = FieldGroup((fields()[XID_FIELD],), interval)
        self.lock = threading.Lock()
        self._changes: LastChanges = {}  # kept if the connection is reopened

        # The entities and fields that are watched. None if nothing is watched.
        self.layout: NodeLayout | None = None
        self._groups: tuple[FieldGroup, ...] = ()
        self._watches: dict[tuple[str, FieldGroup], FieldWatch] = {}  # by kind and group

    def find(self, kind: str, group: FieldGroup) -> FieldWatch | None:
        return self._watches.get((kind, group))

    @property
    def reports_xids(self) -> bool:
        watch = self.find("GPU", self._xid_group)
        return watch is not None and not watch.rejected

    @property
    def gpu_groups(self) -> list[s.Handle]:
        """Handles of DCGM's groups that contain all GPUs."""
        watch = self.find("GPU", self._xid_group)
        if watch is None:
            return []
        return watch.groups

    def list_xid_watches(self) -> list[FieldWatch]:
        watches = [self.find(kind, self._xid_group) for kind in _XID_KINDS]
        return select_known(watches)

    def includes(self, field_id: int) -> bool:
        wanted = fields()[field_id]
        return any(wanted in group.fields for group in self._groups)

    def update(self, layout: NodeLayout, groups: tuple[FieldGroup, ...]) -> bool:
        """Watches these entities and fields. Returns False if they are already watched."""
        if layout == self.layout and groups == self._groups:
            return False

        self.stop()
        self._watches = self._make_watches(layout, groups)
        try:
            for watch in self._watches.values():
                watch.start()
        except SourceError:
            self.stop()
            raise

        self._groups = groups
        # Waits until the engine has read all fields once.
        self._connection.call("dcgmUpdateAllFields", 1)
        # A health check returns nothing before dcgmHealthSet.
        if self.includes(HEALTH_FIELD):
            for gpus in self.gpu_groups:
                self._connection.try_call("dcgmHealthSet", gpus, s.HEALTH_ALL)
        self.layout = layout
        return True

    def stop(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        self.clear()

    def clear(self) -> None:
        """Drops the watches without stopping them."""
        self.layout = None
        self._groups = ()
        self._watches = {}

    def _make_watches(
        self, layout: NodeLayout, groups: Sequence[FieldGroup]
    ) -> dict[tuple[str, FieldGroup], FieldWatch]:
        watches = {}
        by_kind = group_by_key((entity.kind, entity.key) for entity in layout.entities)
        for kind, entities in by_kind.items():
            selected = {group: _select_fields(group.fields, kind) for group in groups}
            if kind in _XID_KINDS:
                selected[self._xid_group] = self._xid_group.fields

            for group, of_kind in selected.items():
                if of_kind:
                    watches[kind, group] = FieldWatch(
                        self._connection,
                        entities,
                        of_kind,
                        group.interval,
                        self._clock,
                        self._changes,
                    )
        return watches


def _warn_about_missing(layout: NodeLayout, settings: DcgmSettings) -> None:
    """Logs the numbers in `-s` and `-p` that no device of the node has."""
    numbers = group_by_key((entity.kind, entity.number) for entity in layout.others)
    selected = (
        ("-s", "NVSwitch", "SWITCH", settings.switches.gpus),
        ("-s", "active NVLink of a selected NVSwitch", SWITCH_LINK, settings.switches.instances),
        ("-p", "CPU", "CPU", settings.cpus.gpus),
        ("-p", "core of a selected CPU", "CPU_CORE", settings.cpus.instances),
    )
    for option, name, kind, wanted in selected:
        existing = numbers.get(kind, ())
        missing = [number for number in wanted or () if number not in existing]
        if missing:
            _log.warning("%s: this node has no %s %s", option, name, few_of(missing))


def _select_fields(fields: Sequence[Field], kind: str) -> tuple[Field, ...]:
    """Returns the fields that DCGM provides for this kind of entity."""
    selected = []
    for wanted in fields:
        if not isinstance(wanted.recipe, Recorded) and _has_field(kind, wanted):
            selected.append(wanted)
    return tuple(selected)


def _has_field(kind: str, wanted: Field) -> bool:
    if kind == "GPU":
        return wanted.level in DEVICE_LEVELS
    if kind == "GPU_I":
        return wanted.per_instance
    if kind == "GPU_CI":
        return False
    if kind == "CPU" and wanted.id in _CPU_UTILIZATION:
        return True
    # DCGM's names tell links of switches from links of GPUs. The level is the same.
    if wanted.level == "LINK":
        link_kind = SWITCH_LINK if "NVSWITCH" in wanted.name else "LINK"
        return kind == link_kind
    return wanted.level == kind


# XIDs


@dataclass(slots=True)
class _XidReader:
    """Reads XIDs from the samples that the engine has kept since the last reading."""

    _connection: DcgmConnection
    events: ErrorEvents = field(default_factory=ErrorEvents)
    _last: dict[Entity, int] = field(default_factory=dict)  # time of the last XID in microseconds
    _is_first: bool = True

    def read(self, watches: Sequence[FieldWatch], layout: NodeLayout) -> None:
        """Adds the XIDs since the last call to `events`. The first call only skips old XIDs."""
        keys = {}
        for entity in layout.entities:
            if entity.device is not None and entity.kind in _XID_KINDS:
                keys[entity.key] = entity.device.key

        for timestamp, source, xid in sorted(self._read_samples(watches)):
            if timestamp <= self._last.get(source, 0):
                continue
            self._last[source] = timestamp
            if source in keys and not self._is_first:
                seconds = timestamp / 1_000_000
                self.events.add(ErrorEvent(keys[source], xid, seconds))

        # Without a GPU, there is no watch, so old XIDs were not skipped yet.
        if watches:
            self._is_first = False

    def _read_samples(self, watches: Iterable[FieldWatch]) -> list[tuple[int, Entity, int]]:
        """Returns time in microseconds, entity and XID since the last call, and some older ones."""
        samples: list[tuple[int, Entity, int]] = []

        def add_values(group: int, entity_id: int, values: Any, count: int, _user: object) -> int:
            for value in values[:count]:
                xid = value.value.i64
                if value.status == 0 and 0 < xid < s.INT32_BLANK:
                    samples.append((value.ts, Entity(group, entity_id), xid))
            return 0

        callback = s.OnValues(add_values)
        last = max(self._last.values(), default=0)
        since = c_int64(max(last - _OVERLAP_US, 0))

        for watch in watches:
            for groups in product(watch.groups, watch.field_groups):
                # The engine also returns the time of the next reading, which is not used.
                self._connection.call(
                    "dcgmGetValuesSince_v2", *groups, since, byref(c_int64()), callback, None
                )
        return samples


# Health


def check_health(
    connection: DcgmConnection, groups: Sequence[s.Handle], gpu_ids: Sequence[int]
) -> Details | None:
    """Returns the result of each health check for each GPU.

    If a check has several incidents, returns the worst. Returns None if DCGM cannot check.
    """
    worst: _Incidents = {}
    kind = s.HealthResponseV5 if connection.major >= 4 else s.HealthResponseV4
    for group in groups:
        response = s.make_struct(kind)
        if not connection.try_call("dcgmHealthCheck", group, byref(response)):
            return None

        for incident in response.incidents[: response.incidentCount]:
            entity = incident.entity
            if entity.group != EntityGroup.GPU or incident.system not in _HEALTH_CHECKS:
                continue
            key = entity.id, incident.system
            result = incident.health, incident.code
            worst[key] = max(result, worst.get(key, result))

    return {gpu_id: _make_health_details(gpu_id, worst) for gpu_id in gpu_ids}


def _make_health_details(gpu_id: int, worst: _Incidents) -> list[Detail]:
    """Returns the health details of one GPU, one for each check."""
    details: list[Detail] = []
    for system, name in _HEALTH_CHECKS.items():
        health, code = worst.get((gpu_id, system), (_PASS, 0))
        details.append((HEALTH, health_labels(name, code), health))
    return details


def read_p2p(connection: DcgmConnection, gpu_ids: Sequence[int]) -> Details | None:
    """Returns the state of the NVLink connection between each GPU and its peers.

    Returns None if DCGM does not know it.
    """
    status = s.make_struct(s.NvLinkP2PStatus)
    if not connection.try_call("dcgmGetNvLinkP2PStatus", byref(status)):
        return None

    details: dict[int, list[Detail]] = {}
    for gpu in status.gpus[: status.numGpus]:
        peers: list[Detail] = []
        for peer_id in gpu_ids:
            if peer_id != gpu.entityId:
                peers += list_peer_state(peer_id, gpu.linkStatus[peer_id])
        details[gpu.entityId] = peers
    return details
