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

from podgpu.errors import DeviceLost, SourceError
from podgpu.metrics.dcgm import health_labels
from podgpu.metrics.fields import (
    DEVICE_LEVELS,
    HEALTH,
    HEALTH_FIELD,
    P2P,
    P2P_FIELD,
    P2P_STATES,
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
)

_log = logging.getLogger(__name__)
_LAYOUT_SECONDS = 60.0
"""Interval at which the whole layout is read.

Some changes, such as a new link, are not visible in the outline.
"""
_CLOSE_WAIT = 2.0
_XID_KINDS = ("GPU", "GPU_I", "GPU_CI")
"""Kinds of entities with XIDs.

Each kind has its own watch, because an engine may reject some kinds.
"""

_PASS = 0
_WATCHES = {
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
        self._connection = DcgmConnection(
            self._settings.address, self._settings.library, self._settings.log_level
        )

        self._companion = CompanionDriver(driver)
        self.processes = self._companion.processes
        self.usage = self._companion.usage
        self._count_expected = count_expected
        self._clock = clock
        self.expected: int | None = None

        self._outline: Outline | None = None
        self._layout = NodeLayout()
        self._layout_read_at = float("-inf")
        self._groups: tuple[FieldGroup, ...] = ()
        self._is_scheduled = False
        self._xid_group = FieldGroup((fields()[XID_FIELD],), self._settings.interval)

        self._watch_lock = threading.Lock()
        # Watches by kind of entity and field group.
        self._watches: dict[tuple[str, FieldGroup], FieldWatch] = {}
        self._watched: tuple[NodeLayout, tuple[FieldGroup, ...]] | None = None
        self._seen: dict[tuple[Entity, int], tuple[int, float]] = {}

        self._xids = ErrorEvents()
        self._last_xids: dict[Entity, int] = {}  # timestamp of the last XID of each entity
        self._has_read_xids = False
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

        If `schedule` was never called, creates a group and uses only that one.
        """
        for group in self._groups:
            if group.fields is fields:
                return group

        group = FieldGroup(tuple(fields), self._settings.interval)
        # If they are scheduled, the groups have just changed and are kept.
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

        self.expected = self._count_expected()
        self._outline = outline
        self._layout = layout
        self._layout_read_at = now

    def _read_health(self) -> None:
        """Reads XIDs, health checks and NVLink peers of all GPUs.

        Does nothing before the first call of `read`, because the fields are not known yet.
        """
        with self._watch_lock:
            if self._watched is None:
                return
            layout, groups = self._watched
            self._read_xids(layout)
            ids = [gpu.entity.id for gpu in layout.gpus]
            wanted = _list_field_ids(groups)

            details: dict[int, Details | None] = {}
            if HEALTH_FIELD in wanted:
                details[HEALTH_FIELD] = check_health(self._connection, self._find_gpu_groups(), ids)
            if P2P_FIELD in wanted:
                details[P2P_FIELD] = read_p2p(self._connection, ids)
            self._details = details

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuReading:
        with self._connection.hold():
            entities = self._layout.find_entities(gpu.uuid)
            if not entities:
                raise DeviceLost(f"{gpu.text} is no longer listed by DCGM")
            readable = [entity for entity in entities if entity.kind != "GPU_CI"]
            reading = self._read_entities(readable, fields)

        details: list[Detail] = []
        unsupported = list(reading.unsupported)
        for field_id, by_gpu in self._details.items():
            if by_gpu is None:
                unsupported.append((gpu.uuid, field_id))
            else:
                details += by_gpu.get(entities[0].entity.id, ())

        xid_watch = self._watches.get(("GPU", self._xid_group))
        return replace(
            reading,
            details=tuple(details),
            unsupported=tuple(unsupported),
            reports_errors=xid_watch is not None and not xid_watch.rejected,
            links_up=sum(entity.kind == "LINK" for entity in entities) or None,
        )

    def read_others(self, fields: Sequence[Field]) -> GpuReading:
        with self._connection.hold():
            return self._read_entities(self._layout.others, fields)

    def _read_entities(self, entities: Sequence[DcgmEntity], fields: Sequence[Field]) -> GpuReading:
        group = self._find_group(fields)
        self._update_watches()
        latest = LatestValues({one.entity: {} for one in entities})
        by_kind = group_by_key((one.kind, one.entity) for one in entities)
        for kind, some in by_kind.items():
            watch = self._watches.get((kind, group))
            if watch is not None:
                watch.read(some, latest)

        keys = {}
        readings: dict[Device, FieldValues] = {}
        others = []
        for one in entities:
            values = latest.values[one.entity]
            if one.device is not None and one.kind != "LINK":
                device = self._companion.complete(one.device)
                keys[one.entity] = device.key
                readings[device] = values
            elif values:
                kind = "LINK" if one.kind == SWITCH_LINK else one.kind
                others.append(EntityState(kind, one.labels, by_name(values)))

        unsupported = set()
        for entity, field_id in latest.unsupported:
            if entity in keys:
                unsupported.add((keys[entity], field_id))
        errors = dict.fromkeys(latest.errors)

        return GpuReading(
            readings,
            unsupported=tuple(sorted(unsupported)),
            dropped=tuple(latest.dropped),
            errors=tuple(errors),
            entities=tuple(others),
        )

    def _update_watches(self) -> None:
        with self._watch_lock:
            layout = self._layout
            groups = self._groups
            if self._watched == (layout, groups):
                return

            self._stop_watches()
            self._watches = self._make_watches(layout, groups)
            try:
                for watch in self._watches.values():
                    watch.start()
            except SourceError:
                self._stop_watches()
                raise

            self._connection.call("dcgmUpdateAllFields", 1)
            # A health check returns nothing before dcgmHealthSet.
            if HEALTH_FIELD in _list_field_ids(groups):
                for gpus in self._find_gpu_groups():
                    self._connection.try_call("dcgmHealthSet", gpus, s.HEALTH_ALL)

            self._watched = layout, groups
            # The first call skips old XIDs, so that later calls report only new XIDs.
            self._read_xids(layout)

    def _stop_watches(self) -> None:
        for watch in self._watches.values():
            watch.stop()
        self._watches = {}

    def _make_watches(
        self, layout: NodeLayout, groups: Sequence[FieldGroup]
    ) -> dict[tuple[str, FieldGroup], FieldWatch]:
        watches = {}
        by_kind = group_by_key((one.kind, one.entity) for one in layout.entities)
        for kind, entities in by_kind.items():
            wanted = {group: _select_fields(group.fields, kind) for group in groups}
            if kind in _XID_KINDS:
                wanted[self._xid_group] = self._xid_group.fields

            for group, some in wanted.items():
                if some:
                    watches[kind, group] = FieldWatch(
                        self._connection, entities, some, group.interval, self._clock, self._seen
                    )
        return watches

    def _read_xids(self, layout: NodeLayout) -> None:
        """Adds the XIDs since the last call to `_xids`. The first call only skips old XIDs."""
        watches = []
        for (_, group), watch in self._watches.items():
            if group is self._xid_group:
                watches.append(watch)

        keys = {}
        for one in layout.entities:
            if one.device is not None and one.kind in _XID_KINDS:
                keys[one.entity] = one.device.key

        for timestamp, entity, xid in sorted(self._read_samples(watches)):
            if timestamp <= self._last_xids.get(entity, 0):
                continue
            self._last_xids[entity] = timestamp
            if self._has_read_xids and entity in keys:
                seconds = timestamp / 1_000_000
                self._xids.add(ErrorEvent(keys[entity], xid, seconds))
        self._has_read_xids |= bool(watches)

    def _read_samples(self, watches: Iterable[FieldWatch]) -> list[tuple[int, Entity, int]]:
        """Returns time in microseconds, entity and XID since the last call, and some older ones."""
        samples: list[tuple[int, Entity, int]] = []

        def add_values(group: int, entity_id: int, values: Any, count: int, _user: object) -> int:
            for value in values[:count]:
                if value.status == 0 and 0 < value.value.i64 < s.INT32_BLANK:
                    samples.append((value.ts, Entity(group, entity_id), value.value.i64))
            return 0

        callback = s.OnValues(add_values)
        last = max(self._last_xids.values(), default=0)
        since = c_int64(max(last - _OVERLAP_US, 0))

        for watch in watches:
            for groups in product(watch.groups, watch.field_groups):
                self._connection.call(
                    "dcgmGetValuesSince_v2", *groups, since, byref(c_int64()), callback, None
                )
        return samples

    def _find_gpu_groups(self) -> list[s.Handle]:
        watch = self._watches.get(("GPU", self._xid_group))
        if watch is None:
            return []
        return watch.groups

    def error_events(self) -> Sequence[ErrorEvent]:
        self._companion.discard_error_events()
        return self._xids.drain()

    def release(self, wait: float) -> bool:
        closed = self._close(wait / 2)
        if not closed:
            _log.warning("DCGM cannot be closed, because a call into it has not returned")

        return self._companion.release(wait / 2) and closed

    def _close(self, wait: float) -> bool:
        if not self._connection.close(wait, self._stop_watches):
            return False
        with self._watch_lock:
            self._watches = {}
            self._watched = None
            self._details = {}
        return True


def _list_field_ids(groups: Sequence[FieldGroup]) -> set[int]:
    ids: set[int] = set()
    for group in groups:
        ids.update(field.id for field in group.fields)
    return ids


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
    if wanted.level == "LINK":
        return kind == (SWITCH_LINK if "NVSWITCH" in wanted.name else "LINK")
    return wanted.level == kind


# Health


def check_health(
    connection: DcgmConnection, groups: Sequence[s.Handle], gpu_ids: Sequence[int]
) -> Details | None:
    """Returns the result of each health check for each GPU.

    If a check has several incidents, returns the worst.
    """
    worst: dict[tuple[int, int], tuple[int, int]] = {}  # GPU id and check -> health and error code
    kind = s.HealthResponseV5 if connection.major >= 4 else s.HealthResponseV4
    for group in groups:
        response = s.make_struct(kind)
        if not connection.try_call("dcgmHealthCheck", group, byref(response)):
            return None

        for incident in response.incidents[: response.incidentCount]:
            entity = incident.entity
            if entity.group != EntityGroup.GPU or incident.system not in _WATCHES:
                continue
            key = entity.id, incident.system
            result = incident.health, incident.code
            worst[key] = max(result, worst.get(key, result))

    details = {}
    for gpu_id in gpu_ids:
        details[gpu_id] = tuple(_make_health_details(gpu_id, worst))
    return details


def _make_health_details(
    gpu: int, worst: Mapping[tuple[int, int], tuple[int, int]]
) -> list[Detail]:
    """Returns the health details of one GPU.

    Includes the check ALL only if it failed, as in dcgm-exporter.
    """
    details: list[Detail] = []
    for watch, name in _WATCHES.items():
        health, number = worst.get((gpu, watch), (_PASS, 0))
        if watch != s.HEALTH_ALL or health:
            details.append((HEALTH, health_labels(name, number), health))
    return details


def read_p2p(connection: DcgmConnection, gpu_ids: Sequence[int]) -> Details | None:
    """Returns the state of the NVLink connection between each GPU and its peers."""
    status = s.make_struct(s.NvLinkP2PStatus)
    if not connection.try_call("dcgmGetNvLinkP2PStatus", byref(status)):
        return None

    details: dict[int, list[Detail]] = {}
    for gpu in status.gpus[: status.numGpus]:
        details[gpu.entityId] = []
        for peer in gpu_ids:
            state = gpu.linkStatus[peer]
            if peer != gpu.entityId and 0 <= state < len(P2P_STATES):
                labels = {"link_status": P2P_STATES[state], "peer_gpu": str(peer)}
                details[gpu.entityId].append((P2P, labels, state))
    return details
