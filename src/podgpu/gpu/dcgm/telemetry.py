"""DcgmTelemetry takes figures from DCGM: an engine inside this process, or a running host engine.

DCGM does the reading, on its own clock; here its latest values are taken, turn by turn, with their timestamps.
Processes and usage are not DCGM's: they come from the driver beside it, where there is one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podgpu.device_selection import Selection
from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.beside import AsksBeside, DriverBeside
from podgpu.gpu.dcgm.entities import GpuEntities, Layout, Outline, read_layout, read_outline
from podgpu.gpu.dcgm.health import HEALTH_FIELD, Judgement, set_health
from podgpu.gpu.dcgm.others import SWITCH_LINK, gpu_links, node_parts
from podgpu.gpu.dcgm.session import Address, DcgmSession
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.gpu.dcgm.values import Asked, Entity, Freshness, Latest, asked_of, read_latest
from podgpu.gpu.dcgm.watches import Wanted, Watches
from podgpu.gpu.dcgm.xids import KEEP_SECONDS, XidSamples, xid_field
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Lane, Telemetry
from podgpu.metrics.fields import DEVICE_LEVELS, Field, Recorded
from podgpu.model import Device, Reading

_log = logging.getLogger(__name__)
_LAYOUT_SECONDS = 60.0
"""A link that came up, a GPU that was renamed: seen after this long, whatever the outline says."""
_BUS_LOOK_SECONDS = 10.0
_CLOSE_WAIT = 2.0
_STALE_INTERVALS = 3
_EXPORTER_FIELDS = 9000
"""From here on fields are dcgm-exporter's, not DCGM's."""
_XID, _MIG_XID = "XID", "XID of MIG"
"""Watched apart: an engine that refuses one of them keeps the other."""


@dataclass(frozen=True)
class DcgmSettings:
    address: Address | None = None
    """None: an engine inside this process."""
    interval: float = 30.0
    log_level: str = ""
    """Empty: DCGM logs nothing."""
    switches: Selection = field(default_factory=Selection)
    cpus: Selection = field(default_factory=Selection)
    library: str = ""
    """A file; empty: the newest libdcgm that is here."""


class DcgmTelemetry(AsksBeside):
    name = "dcgm"

    def __init__(
        self,
        settings: DcgmSettings | None = None,
        driver: Telemetry | None = None,
        count_expected: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`driver`: NVML on the same machine, for processes and usage. `count_expected`: how many GPUs the PCI bus
        shows; None: not known."""
        self._settings = settings or DcgmSettings()
        address = self._settings.address
        self._session = DcgmSession(address, self._settings.library, self._settings.log_level, clock)
        self._driver = driver
        self._beside = DriverBeside(driver)
        self._count_expected = count_expected
        self._clock = clock
        self.expected: int | None = None
        self._bus_looked_at = float("-inf")
        self._outline: Outline | None = None
        self._layout = Layout()
        self._layout_read_at = float("-inf")
        self._lanes: tuple[Lane, ...] = ()
        self._watching = threading.Lock()
        self._watches = self._new_watches()
        self._followed: tuple[Layout, tuple[Lane, ...]] | None = None
        self._freshness: dict[tuple[str, float], Freshness] = {}
        self._xids = XidSamples()
        self._judgement = Judgement()

    @property
    def versions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the library and of the engine; empty: not known."""
        return self._session.library_version, self._session.engine_version

    def _new_watches(self) -> Watches:
        return Watches(self._session)

    def schedule(self, lanes: Sequence[Lane]) -> None:
        """The engine reads each at its own interval."""
        self._lanes = tuple(lanes)

    def _lane(self, fields: Sequence[Field]) -> Lane:
        """That of these fields; without a schedule there is one for whatever is asked."""
        for lane in self._lanes:
            if lane.fields is fields:
                return lane
        interval = self._settings.interval
        lone = Lane(tuple(fields), interval, _STALE_INTERVALS * interval)
        self._lanes = (lone,)
        return lone

    # -- inventory -----------------------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        self._look_at_bus()
        if self._session.lost and not self._close(_CLOSE_WAIT):
            raise SourceError("connection_lost", "the connection to DCGM was lost, and a call over it has not returned")
        if not self._session.is_open:
            self._session.open()
            self._outline = None
        with self._session.using():
            self._follow_layout()
            self._judge()
        self._beside.complete(())
        layout = self._layout
        return Inventory(tuple(gpu.device for gpu in layout.gpus.values()), dict(layout.unreachable))

    def _look_at_bus(self) -> None:
        if self._clock() - self._bus_looked_at >= _BUS_LOOK_SECONDS:
            self.expected, self._bus_looked_at = self._count_expected(), self._clock()

    def _follow_layout(self) -> None:
        outline, now = read_outline(self._session), self._clock()
        if outline == self._outline and now - self._layout_read_at < _LAYOUT_SECONDS:
            return
        layout = self._completed(read_layout(self._session, outline))
        if outline != self._outline:
            _log.info("dcgm: %d GPUs, %d of them unreachable", len(outline.states), len(layout.unreachable))
        self._outline, self._layout, self._layout_read_at = outline, layout, now

    def _completed(self, layout: Layout) -> Layout:
        """With what the driver knows better: the UUIDs of MIG devices."""
        devices = [d for gpu in layout.gpus.values() for d in gpu.devices.values()]
        known = {old.key: new for old, new in zip(devices, self._beside.complete(devices), strict=True)}
        return replace(layout, gpus={uuid: gpu.with_devices(known) for uuid, gpu in layout.gpus.items()})

    def _judge(self) -> None:
        """What the engine tells of all GPUs in one call. Which fields are wanted is known once a GPU was read."""
        with self._watching:
            if self._followed is None:
                return
            layout, lanes = self._followed
            self._read_xids(layout)
            ids = [gpu.id for gpu in layout.gpus.values()]
            self._judgement.read(self._session, _field_ids(lanes), self._gpu_groups(lanes), ids)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        with self._session.using():
            layout = self._layout
            entities = layout.gpus.get(gpu.uuid)
            if entities is None:
                raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer listed by DCGM")
            lane = self._lane(fields)
            self._follow(layout)
            return self._read_gpu(entities, lane)

    def read_others(self, fields: Sequence[Field]) -> GpuAnswer:
        with self._session.using():
            parts = node_parts(self._layout, self._settings.switches, self._settings.cpus)
            wanted = {part.entity for part in parts}
            if not wanted or not any(_of_level(fields, part.kind) for part in parts):
                return GpuAnswer(())
            lane = self._lane(fields)
            self._follow(self._layout)
            latest = self._read_kinds("node", {p.entity: p.kind for p in parts}, lane)
        others = tuple(part.reading(latest.values[part.entity]) for part in parts)
        return GpuAnswer((), dropped=tuple(latest.dropped), errors=_once(latest.errors), others=others)

    def _follow(self, layout: Layout) -> None:
        """Has the engine watch the lanes' fields; only the first reading after a change has anything to do."""
        with self._watching:
            lanes = self._lanes
            if self._followed is not None and self._followed[0] is layout and self._followed[1] is lanes:
                return
            self._watches.follow(self._wanted(layout, lanes))
            if HEALTH_FIELD in _field_ids(lanes):
                self._set_health(self._gpu_groups(lanes))
            self._followed = layout, lanes
            # The first look tells what was there before us, and must not wait for the next turn.
            self._read_xids(layout)

    def _read_xids(self, layout: Layout) -> None:
        groups = [*self._watches.groups(_XID), *self._watches.groups(_MIG_XID)]
        self._xids.read(self._session, groups, _keys(layout))

    def _gpu_groups(self, lanes: Sequence[Lane]) -> list[int]:
        """All GPUs, in groups that the first lane made that asks them anything."""
        found = (self._watches.groups(_watch_name("GPU", lane, lanes)) for lane in lanes)
        return [group for group, _ in next(filter(None, found), ())]

    def _set_health(self, groups: Sequence[int]) -> None:
        try:
            set_health(self._session, groups)
        except DriverGone:
            raise
        except SourceError as e:
            _log.warning("DCGM's health checks cannot be had: %s", e)

    def _wanted(self, layout: Layout, lanes: Sequence[Lane]) -> dict[str, Wanted]:
        gpus = layout.gpus.values()
        parts = node_parts(layout, self._settings.switches, self._settings.cpus)
        entities: dict[str, list[Entity]] = {
            "GPU": [gpu.entity for gpu in gpus],
            "GPU_I": [e for gpu in gpus for e in gpu.instances],
            "LINK": [e for gpu in gpus for e in gpu.link_entities],
        }
        for part in parts:
            entities.setdefault(part.kind, []).append(part.entity)
        wanted = {
            _watch_name(kind, lane, lanes): Wanted(
                tuple(some), _of_level(self._asked(lane).fields, kind), lane.keep_age, lane.interval, lane.keep_samples
            )
            for lane in lanes
            for kind, some in entities.items()
        }
        interval = self._settings.interval
        migs = tuple(e for e in _keys(layout) if e.group != EntityGroup.GPU)
        wanted[_XID] = Wanted(tuple(entities["GPU"]), (xid_field(),), KEEP_SECONDS, interval)
        wanted[_MIG_XID] = Wanted(migs, (xid_field(),), KEEP_SECONDS, interval)
        return {kind: watch for kind, watch in wanted.items() if watch.entities and watch.fields}

    def _read_gpu(self, gpu: GpuEntities, lane: Lane) -> GpuAnswer:
        kinds = {gpu.entity: "GPU"} | dict.fromkeys(gpu.instances, "GPU_I") | dict.fromkeys(gpu.link_entities, "LINK")
        latest = self._read_kinds(gpu.device.uuid, kinds, lane)
        if gpu.entity in latest.lost:
            raise latest.lost[gpu.entity]
        devices = gpu.devices
        details = self._judgement.details.get(gpu.id, ())
        readings = [Reading(device, latest.values[entity]) for entity, device in devices.items()]
        readings[0] = replace(readings[0], details=details)
        unsupported = {(devices[entity].key, i) for entity, i in latest.unsupported if entity in devices}
        unjudged = self._judgement.errors
        unsupported |= {(gpu.device.key, i) for i, e in unjudged.items() if isinstance(e, Unsupported)}
        errors = [e.reason for e in unjudged.values() if not isinstance(e, Unsupported)]
        return GpuAnswer(
            tuple(readings),
            unsupported=tuple(sorted(unsupported)),
            dropped=tuple(latest.dropped),
            errors=_once([*latest.errors, *errors]),
            others=tuple(gpu_links(gpu, latest.values)),
            tells_errors=not self._watches.refused(_XID),
            links_up=len(gpu.links) or None,
        )

    def _read_kinds(self, whose: str, kinds: Mapping[Entity, str], lane: Lane) -> Latest:
        """The latest of some entities, each asked for the fields of its kind that the engine watches."""
        patience = _STALE_INTERVALS * lane.interval
        freshness = self._freshness.setdefault((whose, patience), Freshness(patience, self._clock))
        answer = Latest({entity: {} for entity in kinds})
        of_engine = self._asked(lane)
        for kind in dict.fromkeys(kinds.values()):
            entities = [e for e, k in kinds.items() if k == kind]
            refused = self._watches.refused(_watch_name(kind, lane, self._lanes))
            asked = [f for f in _of_level(of_engine.fields, kind) if f.id not in refused]
            answer.unsupported += [(entity, i) for entity in entities for i in refused]
            if asked:
                answer.add(read_latest(self._session, entities, asked, freshness))
        of_engine.complete(answer)
        return answer

    def _asked(self, lane: Lane) -> Asked:
        return asked_of(min(self.versions), lane.fields)

    def error_events(self) -> Sequence[ErrorEvent]:
        """DCGM's alone: the driver beside sees the same XIDs, and each is to be counted once."""
        if self._driver is not None:
            self._driver.error_events()
        return self._xids.drain()

    def release(self, wait: float) -> bool:
        closed = self._close(wait / 2)
        if not closed:
            _log.warning("DCGM cannot be let go: a call into it has not returned")
        return self._beside.release(wait / 2) and closed

    def _close(self, wait: float) -> bool:
        """Timestamps seen are kept: after a reconnect the same value is still the same."""
        if not self._session.close(wait, before=self._watches.close):
            return False
        with self._watching:
            self._watches, self._followed = self._new_watches(), None
            self._judgement = Judgement()
        return True


def _watch_name(kind: str, lane: Lane, lanes: Sequence[Lane]) -> str:
    """A lane's watches of one kind of entity; of the first lane, the kind's own name."""
    number = next((n for n, other in enumerate(lanes) if other is lane), 0)
    return f"{kind} every {lane.interval:g} s ({number})" if number else kind


def _field_ids(lanes: Sequence[Lane]) -> set[int]:
    return {f.id for lane in lanes for f in lane.fields}


def _of_level(fields: Sequence[Field], kind: str) -> tuple[Field, ...]:
    """The fields an entity of this kind is asked for."""
    read = (f for f in fields if not isinstance(f.recipe, Recorded) and f.id < _EXPORTER_FIELDS)
    if kind == "GPU":
        return tuple(f for f in read if f.level in DEVICE_LEVELS)
    if kind == "GPU_I":
        return tuple(f for f in read if f.per_instance)
    if kind in ("LINK", SWITCH_LINK):
        return tuple(f for f in read if f.level == "LINK" and ("NVSWITCH" in f.name) == (kind == SWITCH_LINK))
    return tuple(f for f in read if f.level == kind)


def _keys(layout: Layout) -> dict[Entity, str]:
    """Whose XIDs are whose: DCGM notes them on the GPU, the instance or the compute instance."""
    return {e: d.key for gpu in layout.gpus.values() for e, d in (*gpu.devices.items(), *gpu.compute_instances.items())}


def _once(reasons: Sequence[str]) -> tuple[str, ...]:
    """A reason counts once a reading, however many values it cost."""
    return tuple(dict.fromkeys(reasons))
