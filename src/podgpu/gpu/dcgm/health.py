"""Reads DCGM's health checks, the state of NVLink peers, and XID errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int64
from typing import Any

from podgpu.errors import DriverGone, SourceError
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.connection import DcgmConnection
from podgpu.gpu.dcgm.structs import EntityGroup
from podgpu.gpu.dcgm.values import Entity
from podgpu.gpu.source import ErrorEvent
from podgpu.metrics.conditions import health_code
from podgpu.model import Detail

_log = logging.getLogger(__name__)
HEALTH_FIELD, P2P_FIELD = 9003, 9004
_PASS = 0
_WATCHES = {
    **{1 << bit: name for bit, name in enumerate(("PCIE", "NVLINK", "PMU", "MCU", "MEM", "SM", "INFOROM", "THERMAL"))},
    **{0x100: "POWER", 0x200: "DRIVER", s.HEALTH_ALL: "ALL"},
}
_P2P_STATES = (
    *("OK", "ChipsetNotSupported", "GPUNotSupported", "TopologyNotSupported"),
    *("DisabledByRegKey", "NotSupported", "Unknown"),
)
_OVERLAP_US = 60_000_000
"""Each reading overlaps the previous one by this much, because samples may arrive out of order."""

Details = Mapping[int, tuple[Detail, ...]]
"""GPU id -> details."""


def check_health(connection: DcgmConnection, groups: Sequence[int], gpu_ids: Sequence[int]) -> Details:
    """Returns one detail per watch and GPU, with the worst incident if there are several."""
    worst: dict[tuple[int, int], tuple[int, int]] = {}
    for group in groups:
        response = s.make_struct(s.HealthResponseV5 if connection.major >= 4 else s.HealthResponseV4)
        connection.call("dcgmHealthCheck", group, byref(response))
        for incident in response.incidents[: response.incidentCount]:
            if incident.entity.group == EntityGroup.GPU and incident.system in _WATCHES:
                key = (incident.entity.id, incident.system)
                worst[key] = max(worst.get(key, (_PASS, 0)), (incident.health, incident.code))
    return {gpu: tuple(_make_health_details(gpu, worst)) for gpu in gpu_ids}


def _make_health_details(gpu: int, worst: Mapping[tuple[int, int], tuple[int, int]]) -> list[Detail]:
    """Makes the details of one GPU. The watch ALL is included only if it failed, as in dcgm-exporter."""
    details = []
    for watch, name in _WATCHES.items():
        if watch != s.HEALTH_ALL or (gpu, watch) in worst:
            health, number = worst.get((gpu, watch), (_PASS, 0))
            code = health_code(number)
            labels = (
                ("health_error_code", code.name),
                ("health_error_severity", code.severity),
                ("health_error_category", code.category),
                ("health_watch", name),
            )
            details.append(Detail(HEALTH_FIELD, labels, health))
    return details


def read_p2p(connection: DcgmConnection, gpu_ids: Sequence[int]) -> Details:
    status = s.make_struct(s.NvLinkP2PStatus)
    connection.call("dcgmGetNvLinkP2PStatus", byref(status))
    return {
        gpu.entityId: tuple(
            Detail(P2P_FIELD, (("link_status", _P2P_STATES[state]), ("peer_gpu", str(peer))), state)
            for peer in gpu_ids
            if peer != gpu.entityId and 0 <= (state := gpu.linkStatus[peer]) < len(_P2P_STATES)
        )
        for gpu in status.gpus[: status.numGpus]
    }


def start_health(connection: DcgmConnection, groups: Sequence[int]) -> None:
    """Starts DCGM's health watches. Without them, a check returns nothing."""
    try:
        for group in groups:
            connection.call("dcgmHealthSet", group, s.HEALTH_ALL)
    except DriverGone:
        raise
    except SourceError as e:
        _log.warning("DCGM's health checks are not available: %s", e)


class XidReader:
    """Reads XIDs from the samples of field 230. Each sample is reported once."""

    def __init__(self) -> None:
        self._last: dict[Entity, int] = {}
        self._has_read = False
        self._lock = threading.Lock()
        self._events: list[ErrorEvent] = []

    def read(
        self, connection: DcgmConnection, groups: Sequence[tuple[int, int]], devices: Mapping[Entity, str]
    ) -> None:
        """Reads the samples since the last call. Ignores samples from before the first call.

        `groups`: pairs of entity group and field group. `devices`: entity -> device key.
        """
        if not groups:
            return
        samples: list[tuple[int, Entity, int]] = []

        def add_values(group: int, entity_id: int, values: Any, count: int, _user: object) -> int:
            for value in values[:count]:
                if value.status == 0 and 0 < value.value.i64 < s.INT32_BLANK:
                    samples.append((value.ts, Entity(group, entity_id), value.value.i64))
            return 0

        callback = s.OnValues(add_values)
        since = max(max(self._last.values(), default=0) - _OVERLAP_US, 0)
        for group, field_group in groups:
            connection.call("dcgmGetValuesSince_v2", group, field_group, since, byref(c_int64()), callback, None)
        for timestamp, entity, xid in sorted(samples):
            if timestamp > self._last.get(entity, 0):
                self._last[entity] = timestamp
                if self._has_read and entity in devices:
                    with self._lock:
                        self._events.append(ErrorEvent(devices[entity], xid, timestamp / 1_000_000))
        self._has_read = True

    def drain(self) -> list[ErrorEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events
