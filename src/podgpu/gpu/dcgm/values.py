"""Watches fields in the DCGM engine, and reads and validates their latest values."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import byref, c_uint16
from dataclasses import dataclass, field, replace
from functools import lru_cache
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


# Watches


class Watch:
    """Fields that the engine reads periodically from a set of entities (GPUs, links, CPUs).

    The engine removes watches when the connection is closed.
    """

    def __init__(
        self,
        connection: DcgmConnection,
        entities: Sequence[Entity],
        fields: Sequence[Field],
        interval: float,
    ) -> None:
        self._connection = connection
        self._entities = entities
        # Profiling fields are separate, because the profiling module may reject all of them.
        plain = [f.id for f in fields if f.id not in _PROFILING]
        profiling = [f.id for f in fields if f.id in _PROFILING]
        self._fields = [*_chunks(plain, s.MAX_FIELDS), *_chunks(profiling, s.MAX_FIELDS)]
        self._options = round(interval * 1_000_000), _KEEP_SECONDS, 0
        self.groups: list[int] = []
        """Groups of entities."""
        self.field_groups: list[int] = []
        self.rejected: dict[int, str] = {}
        """Id of a field that the engine does not watch -> reason word."""

    def start(self) -> None:
        """Raises SourceError. Fields that the engine rejects are only added to `rejected`."""
        self.groups = [self._create_group(entities) for entities in _chunks(self._entities, s.MAX_ENTITIES)]
        for ids in self._fields:
            self._watch_fields(ids)

    def stop(self) -> None:
        for field_group in self.field_groups:
            self._remove(field_group)
        for group in self.groups:
            with suppress(SourceError):
                self._connection.call("dcgmGroupDestroy", group)
        self.groups, self.field_groups = [], []

    def _create_group(self, entities: Sequence[Entity]) -> int:
        group = s.Handle()
        self._connection.call("dcgmGroupCreate", s.GROUP_EMPTY, _make_name(), byref(group))
        for entity in entities:
            try:
                self._connection.call("dcgmGroupAddEntity", group, *entity)
            except DriverGone:
                raise
            except SourceError as e:  # the entity was removed after the layout was read
                _log.debug("%s cannot be watched: %s", entity, e)
        return group.value

    def _watch_fields(self, ids: Sequence[int]) -> None:
        """Watches these fields. If the engine rejects the group because of one field, finds that field by bisection."""
        field_group = s.Handle()
        try:
            numbers = (c_uint16 * len(ids))(*ids)
            self._connection.call("dcgmFieldGroupCreate", len(ids), numbers, _make_name(), byref(field_group))
            for group in self.groups:
                self._connection.call("dcgmWatchFields", group, field_group, *self._options)
            self.field_groups.append(field_group.value)
        except (DriverGone, DeviceLost):
            raise
        except SourceError as e:
            self._remove(field_group.value)
            if e.reason in _NOT_CAUSED_BY_A_FIELD:
                raise
            if len(ids) == 1:
                self.rejected[ids[0]] = e.reason
                return
            middle = len(ids) // 2
            self._watch_fields(ids[:middle])
            self._watch_fields(ids[middle:])

    def _remove(self, field_group: int) -> None:
        for group in self.groups:
            with suppress(SourceError):
                self._connection.call("dcgmUnwatchFields", group, field_group)
        with suppress(SourceError):
            self._connection.call("dcgmFieldGroupDestroy", field_group)


def _make_name() -> bytes:
    return f"podgpu-{uuid.uuid4().hex[:16]}".encode()


# Values


@dataclass(slots=True)
class LatestValues:
    values: dict[Entity, dict[int, Value]] = field(default_factory=dict)
    unsupported: list[tuple[Entity, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lost: dict[Entity, DeviceLost] = field(default_factory=dict)


class ValueReader:
    """Reads values from the engine's cache. A value is stale if its timestamp has not changed for `max_age` seconds."""

    def __init__(self, connection: DcgmConnection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._seen: dict[tuple[Entity, int], tuple[int, float]] = {}

    def read(self, entities: Sequence[Entity], fields: Sequence[Field], max_age: float, latest: LatestValues) -> None:
        """Adds the values to `latest`. Raises SourceError if the call itself fails."""
        wanted = {f.id: f for f in fields}
        for raw in _read_raw(self._connection, entities, list(wanted)):
            entity = Entity(raw.entityGroupId, raw.entityId)
            if entity in latest.values and raw.fieldId in wanted:
                self._accept(latest, entity, wanted[raw.fieldId], raw, max_age)

    def _accept(self, latest: LatestValues, entity: Entity, wanted: Field, raw: Any, max_age: float) -> None:
        try:
            value = decode(wanted, raw)
        except Blank:
            latest.dropped.append(wanted.id)
        except Unsupported:
            latest.unsupported.append((entity, wanted.id))
        except DeviceLost as e:
            latest.lost[entity] = e
        except SourceError as e:
            latest.errors += [e.reason] if e.reason not in _NOT_YET_READ else []
        else:
            # The timestamp of a constant never changes.
            if wanted.once or self._is_fresh(entity, wanted.id, raw.ts, max_age):
                latest.values[entity][wanted.id] = value
            else:
                latest.errors.append("stale_data")

    def _is_fresh(self, entity: Entity, field_id: int, timestamp: int, max_age: float) -> bool:
        now = self._clock()
        seen = self._seen.get((entity, field_id))
        if seen is None or seen[0] != timestamp:
            self._seen[entity, field_id] = timestamp, now
            return True
        return now - seen[1] < max_age


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
    """Returns the value. Raises Blank if there is none, and Unsupported or SourceError if DCGM reports an error."""
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
    return value_of(_without_conversion(wanted), value)


@lru_cache(maxsize=2048)
def _without_conversion(wanted: Field) -> Field:
    """Returns the field without its conversion, which is only needed for NVML. DCGM's values are already converted."""
    return replace(wanted, convert="")


# Fields of newer versions


@dataclass(frozen=True, slots=True)
class FieldSubstitution:
    """Fields to read, and how to compute the wanted fields from them."""

    fields: tuple[Field, ...]
    substitutes: tuple[tuple[Field, int, float], ...]
    """(wanted field, id of the field that is read instead, factor)"""

    def apply(self, latest: LatestValues) -> None:
        for wanted, field_id, factor in self.substitutes:
            for values in latest.values.values():
                value = values.get(field_id)
                if value is not None and not isinstance(value, str):
                    values[wanted.id] = converted(wanted, value, factor)
            latest.unsupported += [(entity, wanted.id) for entity, i in latest.unsupported if i == field_id]


def substitute_fields(version: Version, wanted: Sequence[Field]) -> FieldSubstitution:
    """Replaces fields that this version of DCGM does not have by their older counterparts in other units.

    DCGM 4.6.1 added the fields 1600 to 1612, and 4.7 the fields from 1613 on. Fields that the version has are not
    replaced, because the older counterpart may be less exact. `version`: the older version of library and engine. If it
    is unknown, all new fields are replaced.
    """
    substitutes: list[tuple[Field, int, float]] = []
    read: dict[int, Field] = {}
    for want in wanted:
        first_version = (4, 7) if want.id >= _FIRST_FIELD_OF_4_7 else (4, 6, 1)
        older = want if want.legacy is None or version >= first_version else fields()[want.legacy]
        read[older.id] = older
        if older is not want:
            substitutes.append((want, older.id, want.factor))
    return FieldSubstitution(tuple(read.values()), tuple(substitutes))
