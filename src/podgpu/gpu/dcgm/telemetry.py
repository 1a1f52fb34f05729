"""DcgmTelemetry takes figures from DCGM: an engine inside this process, or a running host engine.

DCGM reads the GPUs at its own interval; every turn takes its latest values. Processes and usage come from the local
driver, if there is one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podgpu.device_selection import Selection
from podgpu.errors import DeviceLost, SourceError, Unsupported
from podgpu.gpu.companion import CompanionDriver, UsageFromCompanion
from podgpu.gpu.dcgm.connection import DcgmConnection, EngineAddress, Version
from podgpu.gpu.dcgm.entities import SWITCH_LINK, GpuEntities, NodeLayout, Outline, read_layout, read_outline
from podgpu.gpu.dcgm.health import HEALTH_FIELD, HealthReader, XidReader
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.gpu.dcgm.values import (
    Entity,
    FieldSubstitution,
    LatestValues,
    StalenessCheck,
    Watch,
    Watches,
    read_latest,
    substitute_fields,
)
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Lane, Telemetry
from podgpu.metrics.fields import DEVICE_LEVELS, XID_FIELD, Field, Recorded, fields
from podgpu.model import Device, Reading

_log = logging.getLogger(__name__)
_LAYOUT_SECONDS = 60.0
"""Changes that the outline does not show, such as a link that came up, are seen after this time."""
_BUS_SECONDS = 10.0
_CLOSE_WAIT = 2.0
_STALE_INTERVALS = 3
_EXPORTER_FIELDS = 9000
"""Fields from here on are dcgm-exporter's, not DCGM's."""
_XID, _MIG_XID = "XID", "XID of MIG"
"""Separate watches, because an engine may refuse one of them."""
_XID_KEEP_SECONDS = 600.0


@dataclass(frozen=True)
class DcgmSettings:
    address: EngineAddress | None = None
    """None: an engine inside this process."""
    interval: float = 30.0
    log_level: str = ""
    """Empty: DCGM logs nothing."""
    switches: Selection = field(default_factory=Selection)
    cpus: Selection = field(default_factory=Selection)
    library: str = ""
    """Path; empty: the newest libdcgm of this machine."""


class DcgmTelemetry(UsageFromCompanion):
    name = "dcgm"

    def __init__(
        self,
        settings: DcgmSettings | None = None,
        driver: Telemetry | None = None,
        count_expected: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`driver`: NVML on the same machine, for processes and usage.

        `count_expected`: number of GPUs on the PCI bus, None if unknown.
        """
        self._settings = settings or DcgmSettings()
        self._connection = DcgmConnection(
            self._settings.address, self._settings.library, self._settings.log_level, clock
        )
        self._companion = CompanionDriver(driver)
        self._count_expected = count_expected
        self._clock = clock
        self.expected: int | None = None
        self._bus_read_at = float("-inf")
        self._outline: Outline | None = None
        self._layout = NodeLayout()
        self._layout_read_at = float("-inf")
        self._lanes: tuple[Lane, ...] = ()
        self._watch_lock = threading.Lock()
        self._watches = Watches(self._connection)
        self._watched: tuple[NodeLayout, tuple[Lane, ...]] | None = None
        self._staleness: dict[tuple[str, float], StalenessCheck] = {}
        self._xids = XidReader()
        self._health = HealthReader()

    @property
    def versions(self) -> tuple[Version, Version]:
        """Versions of the library and of the engine."""
        return self._connection.library_version, self._connection.engine_version

    def schedule(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)

    def _find_lane(self, fields: Sequence[Field]) -> Lane:
        """Returns the lane of these fields. Without a schedule creates one."""
        for lane in self._lanes:
            if lane.fields is fields:
                return lane
        interval = self._settings.interval
        lane = Lane(tuple(fields), interval, _STALE_INTERVALS * interval)
        self._lanes = (lane,)
        return lane

    def inventory(self) -> Inventory:
        if self._clock() - self._bus_read_at >= _BUS_SECONDS:
            self.expected, self._bus_read_at = self._count_expected(), self._clock()
        if self._connection.lost and not self._close(_CLOSE_WAIT):
            raise SourceError("connection_lost", "the connection to DCGM was lost, and a call over it has not returned")
        if not self._connection.is_open:
            self._connection.open()
            self._outline = None
        with self._connection.hold():
            self._follow_layout()
            self._read_health()
        self._companion.complete(())
        layout = self._layout
        return Inventory(tuple(gpu.device for gpu in layout.gpus.values()), dict(layout.unreachable))

    def _follow_layout(self) -> None:
        outline, now = read_outline(self._connection), self._clock()
        if outline == self._outline and now - self._layout_read_at < _LAYOUT_SECONDS:
            return
        layout = read_layout(self._connection, outline)
        devices = [d for gpu in layout.gpus.values() for d in gpu.devices.values()]
        complete = {old.key: new for old, new in zip(devices, self._companion.complete(devices), strict=True)}
        layout = replace(layout, gpus={uuid: gpu.replace_devices(complete) for uuid, gpu in layout.gpus.items()})
        if outline != self._outline:
            _log.info("dcgm: %d GPUs, %d of them unreachable", len(outline.states), len(layout.unreachable))
        self._outline, self._layout, self._layout_read_at = outline, layout, now

    def _read_health(self) -> None:
        """Reads what one call returns for all GPUs. The wanted fields are known after the first reading."""
        with self._watch_lock:
            if self._watched is None:
                return
            layout, lanes = self._watched
            self._read_xids(layout)
            ids = [gpu.id for gpu in layout.gpus.values()]
            self._health.read(self._connection, _field_ids(lanes), self._find_gpu_groups(lanes), ids)

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        with self._connection.hold():
            layout = self._layout
            entities = layout.gpus.get(gpu.uuid)
            if entities is None:
                raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer listed by DCGM")
            lane = self._find_lane(fields)
            self._update_watches(layout)
            return self._read_gpu(entities, lane)

    def read_others(self, fields: Sequence[Field]) -> GpuAnswer:
        with self._connection.hold():
            others = list(self._layout.select_others(self._settings.switches, self._settings.cpus))
            if not any(_select_fields(fields, other.kind) for other in others):
                return GpuAnswer(())
            lane = self._find_lane(fields)
            self._update_watches(self._layout)
            latest = self._read_latest("node", {other.entity: other.kind for other in others}, lane)
        readings = tuple(other.make_reading(latest.values[other.entity]) for other in others)
        return GpuAnswer((), dropped=tuple(latest.dropped), errors=_deduplicate(latest.errors), others=readings)

    def _read_gpu(self, gpu: GpuEntities, lane: Lane) -> GpuAnswer:
        kinds = {gpu.entity: "GPU"} | dict.fromkeys(gpu.instances, "GPU_I") | dict.fromkeys(gpu.link_entities, "LINK")
        latest = self._read_latest(gpu.device.uuid, kinds, lane)
        if gpu.entity in latest.lost:
            raise latest.lost[gpu.entity]
        devices = gpu.devices
        readings = [Reading(device, latest.values[entity]) for entity, device in devices.items()]
        readings[0] = replace(readings[0], details=self._health.details.get(gpu.id, ()))
        failed = self._health.errors
        unsupported = {(devices[entity].key, i) for entity, i in latest.unsupported if entity in devices}
        unsupported |= {(gpu.device.key, i) for i, e in failed.items() if isinstance(e, Unsupported)}
        errors = [e.reason for e in failed.values() if not isinstance(e, Unsupported)]
        return GpuAnswer(
            tuple(readings),
            unsupported=tuple(sorted(unsupported)),
            dropped=tuple(latest.dropped),
            errors=_deduplicate([*latest.errors, *errors]),
            others=tuple(gpu.make_link_readings(latest.values)),
            reports_errors=not self._watches.refused(_XID),
            links_up=len(gpu.links) or None,
        )

    def _read_latest(self, owner: str, kinds: Mapping[Entity, str], lane: Lane) -> LatestValues:
        max_age = _STALE_INTERVALS * lane.interval
        staleness = self._staleness.setdefault((owner, max_age), StalenessCheck(max_age, self._clock))
        latest = LatestValues({entity: {} for entity in kinds})
        substitution = self._substitute(lane)
        for kind in dict.fromkeys(kinds.values()):
            entities = [e for e, k in kinds.items() if k == kind]
            refused = self._watches.refused(_name_watch(kind, lane, self._lanes))
            latest.unsupported += [(entity, i) for entity in entities for i in refused]
            watched = [f for f in _select_fields(substitution.fields, kind) if f.id not in refused]
            if watched:
                read_latest(self._connection, entities, watched, staleness, latest)
        substitution.apply(latest)
        return latest

    def _substitute(self, lane: Lane) -> FieldSubstitution:
        return substitute_fields(min(self.versions), lane.fields)

    def _update_watches(self, layout: NodeLayout) -> None:
        with self._watch_lock:
            lanes = self._lanes
            if self._watched is not None and self._watched[0] is layout and self._watched[1] is lanes:
                return
            self._watches.update(self._make_watches(layout, lanes))
            if HEALTH_FIELD in _field_ids(lanes):
                self._health.start(self._connection, self._find_gpu_groups(lanes))
            self._watched = layout, lanes
            # The first reading finds the XIDs from before podgpu started, so it must not wait for the next turn.
            self._read_xids(layout)

    def _make_watches(self, layout: NodeLayout, lanes: Sequence[Lane]) -> dict[str, Watch]:
        gpus = layout.gpus.values()
        entities: dict[str, list[Entity]] = {
            "GPU": [gpu.entity for gpu in gpus],
            "GPU_I": [e for gpu in gpus for e in gpu.instances],
            "LINK": [e for gpu in gpus for e in gpu.link_entities],
        }
        for other in layout.select_others(self._settings.switches, self._settings.cpus):
            entities.setdefault(other.kind, []).append(other.entity)
        watches: dict[str, Watch] = {}
        for lane in lanes:
            read = self._substitute(lane).fields
            for kind, some in entities.items():
                watches[_name_watch(kind, lane, lanes)] = Watch(
                    tuple(some), _select_fields(read, kind), lane.keep_age, lane.interval, lane.keep_samples
                )
        xid, interval = (fields()[XID_FIELD],), self._settings.interval
        migs = tuple(e for e in layout.xid_entities if e.group != EntityGroup.GPU)
        watches[_XID] = Watch(tuple(entities["GPU"]), xid, _XID_KEEP_SECONDS, interval)
        watches[_MIG_XID] = Watch(migs, xid, _XID_KEEP_SECONDS, interval)
        return {kind: watch for kind, watch in watches.items() if watch.entities and watch.fields}

    def _read_xids(self, layout: NodeLayout) -> None:
        groups = [*self._watches.groups(_XID), *self._watches.groups(_MIG_XID)]
        self._xids.read(self._connection, groups, layout.xid_entities)

    def _find_gpu_groups(self, lanes: Sequence[Lane]) -> list[int]:
        """Returns groups with all GPUs: those of the first lane that reads any GPU field."""
        groups = (self._watches.groups(_name_watch("GPU", lane, lanes)) for lane in lanes)
        return [group for group, _ in next(filter(None, groups), ())]

    def error_events(self) -> Sequence[ErrorEvent]:
        self._companion.discard_error_events()
        return self._xids.drain()

    def release(self, wait: float) -> bool:
        closed = self._close(wait / 2)
        if not closed:
            _log.warning("DCGM cannot be released: a call has not returned")
        return self._companion.release(wait / 2) and closed

    def _close(self, wait: float) -> bool:
        """Keeps the known timestamps, because the same value is still stale after a reconnect."""
        if not self._connection.close(wait, self._watches.close):
            return False
        with self._watch_lock:
            self._watches, self._watched = Watches(self._connection), None
            self._health = HealthReader()
        return True


def _name_watch(kind: str, lane: Lane, lanes: Sequence[Lane]) -> str:
    number = next((n for n, other in enumerate(lanes) if other is lane), 0)
    return f"{kind} every {lane.interval:g} s ({number})" if number else kind


def _field_ids(lanes: Sequence[Lane]) -> set[int]:
    return {f.id for lane in lanes for f in lane.fields}


def _select_fields(fields: Sequence[Field], kind: str) -> tuple[Field, ...]:
    """Returns the fields that DCGM has for an entity of this kind."""
    read = (f for f in fields if not isinstance(f.recipe, Recorded) and f.id < _EXPORTER_FIELDS)
    if kind == "GPU":
        return tuple(f for f in read if f.level in DEVICE_LEVELS)
    if kind == "GPU_I":
        return tuple(f for f in read if f.per_instance)
    if kind in ("LINK", SWITCH_LINK):
        return tuple(f for f in read if f.level == "LINK" and ("NVSWITCH" in f.name) == (kind == SWITCH_LINK))
    return tuple(f for f in read if f.level == kind)


def _deduplicate(reasons: Sequence[str]) -> tuple[str, ...]:
    """A reason counts once per reading, however many values it affected."""
    return tuple(dict.fromkeys(reasons))
