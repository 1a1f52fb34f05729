"""XidSamples takes XID errors from DCGM: every sample of field 230 since the last look, each counted once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int64
from typing import Any

from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.session import DcgmSession
from podgpu.gpu.dcgm.values import Entity
from podgpu.gpu.source import ErrorEvent
from podgpu.metrics.conditions import xid_text
from podgpu.metrics.fields import XID_FIELD, Field, fields

_log = logging.getLogger(__name__)
KEEP_SECONDS = 600.0
_OVERLAP_US = 60_000_000
"""Looked at again each time: samples of different entities need not arrive in the order of their times."""


def xid_field() -> Field:
    return fields()[XID_FIELD]


class XidSamples:
    def __init__(self) -> None:
        self._last: dict[Entity, int] = {}
        self._seen_before = False
        self._lock = threading.Lock()
        self._events: list[ErrorEvent] = []

    def read(
        self, session: DcgmSession, groups: Sequence[tuple[int, Sequence[int]]], devices: Mapping[Entity, str]
    ) -> None:
        """`devices`: the key of the device behind each entity. What the engine kept from before us is not counted."""
        if not groups:
            return
        samples: list[tuple[Entity, int, int]] = []

        def note(group: int, entity_id: int, values: Any, number: int, _user: object) -> int:
            for value in values[:number]:
                if value.status == 0 and 0 < value.value.i64 < s.INT32_BLANK:
                    samples.append((Entity(group, entity_id), value.ts, value.value.i64))
            return 0

        callback = s.OnValues(note)
        since = max(max(self._last.values(), default=0) - _OVERLAP_US, 0)
        for group, field_groups in groups:
            for field_group in field_groups:
                session.call("dcgmGetValuesSince_v2", group, field_group, since, byref(c_int64()), callback, None)
        self._take(sorted(samples, key=lambda sample: sample[1]), devices)

    def _take(self, samples: Sequence[tuple[Entity, int, int]], devices: Mapping[Entity, str]) -> None:
        for entity, at, xid in samples:
            if at <= self._last.get(entity, 0):
                continue
            self._last[entity] = at
            if self._seen_before and entity in devices:
                self._note(ErrorEvent(devices[entity], xid, at / 1_000_000))
        self._seen_before = True

    def _note(self, event: ErrorEvent) -> None:
        _log.warning("XID %d on %s: %s", event.code, event.device, xid_text(event.code))
        with self._lock:
            self._events.append(event)

    def drain(self) -> list[ErrorEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events
