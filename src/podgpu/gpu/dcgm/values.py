"""Watches fields in the DCGM engine, and reads and validates their latest values."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import byref, c_double, c_int64, c_uint16
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.connection import DcgmConnection, Version, translate
from podgpu.metrics.fields import Blank, Field, fields, value_of, within_unit
from podgpu.metrics.names import converted
from podgpu.model import Value

_log = logging.getLogger(__name__)
_MAX_VALUES = 1024
"""Maximum number of values per call, because a value needs 4 KiB of memory."""
_NOT_YET_READ = {"no_data", "not_watched"}
_KEEP_SECONDS = 600.0  # how long the engine keeps a sample: dcgm-exporter's default
_STALE_INTERVALS = 3
_PROFILING = range(1000, 1100)
_NOT_CAUSED_BY_A_FIELD = {"timeout", "max_limit", "insufficient_resources", "version_mismatch"}
_FIRST_FIELD_OF_4_7 = 1613
_BLANKS = (s.INT64_BLANK, s.INT32_BLANK, s.DOUBLE_BLANK)
_BLANK_VALUES = {blank + offset for blank in _BLANKS for offset in range(2)} | set(range(s.INT64_BLANK + 4, 1 << 63))
"""Blank and not found; larger 64-bit numbers are reserved."""
_UNSUPPORTED_VALUES = {blank + offset for blank in _BLANKS for offset in (2, 3)} | {b"<<<NOT_SUPPORTED>>>"}
"""Not supported and not permitted."""
T = TypeVar("T")


class Entity(NamedTuple):
    group: int
    id: int


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass(slots=True)
class LatestValues:
    values: dict[Entity, dict[int, Value]]
    unsupported: list[tuple[Entity, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Timestamps:
    """Remembers when the timestamp of each value last changed, even if the connection is opened again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[tuple[Entity, int], tuple[int, float]] = {}

    def is_fresh(self, entity: Entity, raw: Any, max_age: float) -> bool:
        """Returns False if the timestamp has not changed for `max_age` seconds."""
        now, key = self._clock(), (entity, raw.fieldId)
        seen = self._seen.get(key)
        if seen is None or seen[0] != raw.ts:
            self._seen[key] = raw.ts, now
            return True
        return now - seen[1] < max_age


class Watch:
    """Fields that the engine reads periodically from a set of entities (GPUs, links, CPUs).

    The engine removes watches when the connection is closed.
    """

    def __init__(
        self,
        connection: DcgmConnection,
        entities: Sequence[Entity],
        wanted: Sequence[Field],
        interval: float,
        timestamps: Timestamps,
    ) -> None:
        self._connection = connection
        self._entities = entities
        self._interval = interval
        self._timestamps = timestamps
        self._wanted: dict[int, list[Field]] = {}
        """Id of the field that is read -> wanted fields."""
        for want in wanted:
            self._wanted.setdefault(_read_as(want, connection.version).id, []).append(want)
        self.groups: list[s.Handle] = []
        """Groups of entities."""
        self.field_groups: list[s.Handle] = []
        self.rejected: dict[int, str] = {}
        """Id of a field that the engine rejected -> reason word."""

    def start(self) -> None:
        """Raises SourceError. Fields that the engine rejects are only added to `rejected`."""
        self.groups = [self._create_group(entities) for entities in _chunks(self._entities, s.MAX_ENTITIES)]
        # Profiling fields are watched separately, because the profiling module may reject all of them.
        plain = [i for i in self._wanted if i not in _PROFILING]
        profiling = [i for i in self._wanted if i in _PROFILING]
        for ids in (*_chunks(plain, s.MAX_FIELDS), *_chunks(profiling, s.MAX_FIELDS)):
            self._watch_fields(ids)

    def stop(self) -> None:
        for field_group in self.field_groups:
            self._remove(field_group)
        for group in self.groups:
            with suppress(SourceError):
                self._connection.call("dcgmGroupDestroy", group)
        self.groups, self.field_groups = [], []

    def read(self, entities: Sequence[Entity], latest: LatestValues) -> None:
        """Reads the values of some entities from the engine's cache.

        Raises DeviceLost for a lost GPU, SourceError if the call itself fails.
        """
        rejected = [want.id for field_id in self.rejected for want in self._wanted[field_id]]
        latest.unsupported += [(entity, field_id) for entity in entities for field_id in rejected]
        watched = [field_id for field_id in self._wanted if field_id not in self.rejected]
        for raw in _read_raw(self._connection, entities, watched):
            entity = Entity(raw.entityGroupId, raw.entityId)
            if entity in latest.values:
                for want in self._wanted.get(raw.fieldId, ()):
                    self._accept(latest, entity, want, raw)

    def _accept(self, latest: LatestValues, entity: Entity, wanted: Field, raw: Any) -> None:
        try:
            value = decode(fields()[raw.fieldId], raw)
        except Blank:
            latest.dropped.append(wanted.id)
        except Unsupported:
            latest.unsupported.append((entity, wanted.id))
        except SourceError as e:
            if isinstance(e, DeviceLost) and entity.group == s.EntityGroup.GPU:
                raise
            latest.errors += [e.reason] if e.reason not in _NOT_YET_READ else []
        else:
            # The timestamp of a constant never changes.
            if not wanted.once and not self._timestamps.is_fresh(entity, raw, _STALE_INTERVALS * self._interval):
                latest.errors.append("stale_data")
            elif raw.fieldId == wanted.id or isinstance(value, str):
                latest.values[entity][wanted.id] = value
            else:
                latest.values[entity][wanted.id] = converted(wanted, value, wanted.factor)

    def _create_group(self, entities: Sequence[Entity]) -> s.Handle:
        group = s.Handle()
        self._connection.call("dcgmGroupCreate", s.GROUP_EMPTY, _make_name(), byref(group))
        for entity in entities:
            try:
                self._connection.call("dcgmGroupAddEntity", group, *entity)
            except DriverGone:
                raise
            except SourceError as e:  # the entity was removed after the layout was read
                _log.debug("%s cannot be watched: %s", entity, e)
        return group

    def _watch_fields(self, ids: Sequence[int]) -> None:
        """Watches these fields. If the engine rejects the group because of one field, finds that field by bisection."""
        field_group = s.Handle()
        timing = c_int64(round(self._interval * 1_000_000)), c_double(_KEEP_SECONDS), 0
        try:
            numbers = (c_uint16 * len(ids))(*ids)
            self._connection.call("dcgmFieldGroupCreate", len(ids), numbers, _make_name(), byref(field_group))
            for group in self.groups:
                self._connection.call("dcgmWatchFields", group, field_group, *timing)
            self.field_groups.append(field_group)
        except (DriverGone, DeviceLost):
            raise
        except SourceError as e:
            self._remove(field_group)
            if e.reason in _NOT_CAUSED_BY_A_FIELD:
                raise
            if len(ids) == 1:
                self.rejected[ids[0]] = e.reason
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


def _read_as(wanted: Field, version: Version) -> Field:
    """Returns the field to read: if this version of DCGM lacks the wanted field, the older field in another unit.

    DCGM 4.6.1 added the fields 1600 to 1612, and 4.7 the fields from 1613 on. The older fields may be less exact.
    """
    first_version = (4, 7) if wanted.id >= _FIRST_FIELD_OF_4_7 else (4, 6, 1)
    return wanted if wanted.legacy is None or version >= first_version else fields()[wanted.legacy]


def read_live(connection: DcgmConnection, entities: Sequence[Entity], wanted: Field) -> dict[Entity, Value]:
    """Reads one field from the driver instead of the cache. Entities without a value are left out."""
    values: dict[Entity, Value] = {}
    try:
        for raw in _read_raw(connection, entities, [wanted.id], s.LIVE):
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
        for some in _chunks(entities, max(1, min(s.MAX_ENTITIES, _MAX_VALUES // len(ids)))):
            pairs = (s.EntityPair * len(some))(*(s.EntityPair(*entity) for entity in some))
            values = (s.FieldValueV2 * (len(some) * len(ids)))()
            numbers = (c_uint16 * len(ids))(*ids)
            connection.call("dcgmEntitiesGetLatestValues", pairs, len(some), numbers, len(ids), flags, values)
            yield from values


def decode(wanted: Field, raw: Any) -> Value:
    """Returns the value. Raises Blank if there is no value, and Unsupported or SourceError if DCGM reports an error."""
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
    if value in _BLANK_VALUES or (isinstance(value, bytes) and value.startswith(b"<<<")):
        raise Blank(repr(value))
    if isinstance(value, float) and s.DOUBLE_BLANK < value < math.inf:
        return within_unit(wanted, value)  # a large counter, which `value_of` would treat as blank
    return value_of(wanted, value, is_converted=True)
