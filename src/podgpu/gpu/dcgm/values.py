"""This module reads the newest values of DCGM's entities, matches and judges them. Blanks and old values end here.

`asked_of` has an engine that is too old to know a field in a base unit asked for the older field instead. DCGM 4.7 has
1613 and the later ones, 4.6.1 those from 1600 on; every version has the fields in the older units. A field that engine
and library both know is asked for by its own id: the older one would be less exact, or cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import c_uint16
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.library import translate
from podgpu.gpu.dcgm.session import DcgmSession
from podgpu.metrics.fields import Blank, Field, value_of, within_unit
from podgpu.metrics.names import converted, counterpart
from podgpu.model import Value

_MOST_VALUES = 1024
"""Of one call: a value takes 4 KiB."""
_QUIET = {"no_data", "not_watched"}
"""Nothing was said yet: not worth counting."""
_NOT_PERMITTED = 3
T = TypeVar("T")


class Entity(NamedTuple):
    group: int
    id: int


def chunks(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


@dataclass(slots=True)
class Latest:
    """What some entities said."""

    values: dict[Entity, dict[int, Value]] = field(default_factory=dict)
    unsupported: list[tuple[Entity, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lost: dict[Entity, DeviceLost] = field(default_factory=dict)

    def add(self, more: Latest) -> None:
        self.values |= more.values
        self.unsupported += more.unsupported
        self.dropped += more.dropped
        self.errors += more.errors
        self.lost |= more.lost


class Freshness:
    """Remembers when each value's timestamp last moved: one that stands still is no reading any more."""

    def __init__(self, patience: float, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        self._seen: dict[tuple[Entity, int], tuple[int, float]] = {}

    def accepts(self, entity: Entity, field_id: int, timestamp: int) -> bool:
        now = self._clock()
        seen = self._seen.get((entity, field_id))
        if seen is None or seen[0] != timestamp:
            self._seen[entity, field_id] = timestamp, now
            return True
        return now - seen[1] < self._patience


def read_latest(
    session: DcgmSession, entities: Sequence[Entity], fields: Sequence[Field], freshness: Freshness
) -> Latest:
    """From the engine's cache. Raises SourceError when the call itself fails; a single value costs only itself."""
    latest = Latest({entity: {} for entity in entities})
    wanted = {f.id: f for f in fields}
    for raw in _read_raw(session, entities, list(wanted)):
        entity = Entity(raw.entityGroupId, raw.entityId)
        if entity in latest.values and raw.fieldId in wanted:
            _accept(latest, entity, wanted[raw.fieldId], raw, freshness)
    return latest


def read_live(session: DcgmSession, entities: Sequence[Entity], known: Field) -> dict[Entity, Value]:
    """One field of some entities, asked of the driver now; what is no value is left out."""
    found: dict[Entity, Value] = {}
    try:
        answer = list(_read_raw(session, entities, [known.id], s.LIVE))
    except DriverGone:
        raise
    except SourceError:
        return found
    for raw in answer:
        with suppress(Blank, SourceError):
            found[Entity(raw.entityGroupId, raw.entityId)] = decode(known, raw)
    return found


def _read_raw(
    session: DcgmSession, entities: Sequence[Entity], field_ids: Sequence[int], flags: int = 0
) -> Iterator[s.FieldValueV2]:
    for ids in chunks(field_ids, s.MAX_FIELDS):
        for some in chunks(entities, max(1, min(s.MAX_ENTITIES, _MOST_VALUES // len(ids)))):
            pairs = (s.EntityPair * len(some))(*(s.EntityPair(*entity) for entity in some))
            values = (s.FieldValueV2 * (len(some) * len(ids)))()
            numbers = (c_uint16 * len(ids))(*ids)
            session.call("dcgmEntitiesGetLatestValues", pairs, len(some), numbers, len(ids), flags, values)
            yield from values


def _accept(latest: Latest, entity: Entity, known: Field, raw: s.FieldValueV2, freshness: Freshness) -> None:
    try:
        value = decode(known, raw)
    except Blank:
        latest.dropped.append(known.id)
    except Unsupported:
        latest.unsupported.append((entity, known.id))
    except DeviceLost as e:
        latest.lost[entity] = e
    except SourceError as e:
        latest.errors += [e.reason] if e.reason not in _QUIET else []
    else:
        # What is constant by nature may keep its timestamp.
        if known.once or freshness.accepts(entity, known.id, raw.ts):
            latest.values[entity][known.id] = value
        else:
            latest.errors.append("stale_data")


def decode(known: Field, raw: s.FieldValueV2 | s.FieldValueV1) -> Value:
    """The value of a field; raises Blank when it is none, Unsupported or SourceError when DCGM says why."""
    if raw.status:
        raise translate(raw.status, known.name)
    match raw.fieldType:
        case s.FieldType.INT | s.FieldType.TIME:
            return _judged(known, raw.value.i64, _int_blank(raw.value.i64))
        case s.FieldType.DOUBLE:
            return _judged(known, raw.value.dbl, _double_blank(raw.value.dbl))
        case s.FieldType.STRING:
            return _text(known, raw.value.str)
    raise Blank(f"type {raw.fieldType}")


def _int_blank(number: int) -> int | None:
    """Which of the four blanks it is; None: a value."""
    if number >= s.INT64_BLANK:
        return number - s.INT64_BLANK
    return number - s.INT32_BLANK if 0 <= number - s.INT32_BLANK < s.BLANKS else None


def _double_blank(number: float) -> int | None:
    """Exactly the four: a large counter of type double may well lie above them."""
    if not math.isfinite(number):
        return 0
    above = number - s.DOUBLE_BLANK
    return int(above) if above in range(s.BLANKS) else None


def _judged(known: Field, number: int | float, blank: int | None) -> Value:
    if blank == s.NOT_SUPPORTED_OFFSET:
        raise Unsupported(f"{known.name}: not supported")
    if blank == _NOT_PERMITTED:
        raise Unsupported(f"{known.name}: not permitted", "no_permission")
    if blank is not None:
        raise Blank(str(number))
    if isinstance(number, float) and number > s.DOUBLE_BLANK:
        return within_unit(known, number)
    return value_of(_as_dcgm_gives_it(known), number)


def _text(known: Field, raw: bytes) -> Value:
    if raw == b"<<<NOT_SUPPORTED>>>":
        raise Unsupported(f"{known.name}: not supported")
    if raw.startswith(b"<<<") and b">>>" in raw:
        raise Blank(raw.decode("utf-8", "replace"))
    return value_of(_as_dcgm_gives_it(known), raw)


@lru_cache(maxsize=2048)
def _as_dcgm_gives_it(known: Field) -> Field:
    """The catalogue's conversions are for NVML's answers; DCGM has done them."""
    return replace(known, convert="")


_FIRST_OF_4_7 = 1613
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine is asked for, so that the wanted fields can be told."""

    fields: tuple[Field, ...]
    instead: tuple[tuple[Field, int, float], ...]
    """A wanted field that is not asked for, the one that is, and what its number is to be multiplied by."""

    def complete(self, latest: Latest) -> None:
        """Adds the fields that were not asked for: their values, and that there cannot be any."""
        for wanted, number, factor in self.instead:
            for values in latest.values.values():
                value = values.get(number)
                if value is not None and not isinstance(value, str):
                    values[wanted.id] = converted(wanted, value, factor)
            latest.unsupported += [(entity, wanted.id) for entity, i in latest.unsupported if i == number]


def asked_of(version: Version, wanted: Sequence[Field]) -> Asked:
    """`version`: the older one of library and engine; empty: not known, and the older fields are asked for."""
    instead: list[tuple[Field, int, float]] = []
    asked: dict[int, Field] = {}
    for want in wanted:
        other = None if knows(version, want) else counterpart(want)
        if other is None:
            asked[want.id] = want
        else:
            older, factor = other
            asked[older.id] = older
            instead.append((want, older.id, factor))
    return Asked(tuple(asked.values()), tuple(instead))


def knows(version: Version, field: Field) -> bool:
    """Whether a DCGM of this version has a field, as far as its unit goes."""
    if field.legacy is None:
        return True
    return version >= ((4, 7) if field.id >= _FIRST_OF_4_7 else (4, 6, 1))
