"""Watches asks the engine to keep fields: groups of entities, groups of fields, watches with bounded retention."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import byref, c_uint16
from dataclasses import dataclass
from itertools import count

from podgpu.errors import DeviceLost, DriverGone, SourceError, few_of
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.session import DcgmSession
from podgpu.gpu.dcgm.values import Entity, chunks
from podgpu.metrics.fields import Field

_log = logging.getLogger(__name__)
_PROFILING = range(1000, 1100)
_NOT_THE_FIELDS_FAULT = {"timeout", "max_limit", "insufficient_resources", "version_mismatch"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """These fields of these entities."""

    entities: tuple[Entity, ...]
    fields: tuple[Field, ...]
    keep_seconds: float
    """How long the engine keeps a sample; 0: no limit by age."""
    interval: float = 30.0
    keep_samples: int = 0
    """How many it keeps; 0: no limit by number."""


class Watches:
    """By kind of entity. To be thrown away with the connection: the engine forgets them with it."""

    def __init__(self, session: DcgmSession) -> None:
        self._session = session
        self._names = (f"podgpu-{uuid.uuid4().hex[:12]}-{n}" for n in count())
        self._followed: dict[str, Wanted] = {}
        self._parts: dict[str, _Part] = {}

    def follow(self, wanted: Mapping[str, Wanted]) -> None:
        """Watch exactly this. Raises SourceError; a field that cannot be watched is only refused."""
        changed = {kind: w for kind, w in wanted.items() if w != self._followed.get(kind)}
        for kind in [k for k in self._followed if k in changed or k not in wanted]:
            self._drop(kind)
        for kind, watch in changed.items():
            self._make(kind, watch)
        if changed:
            self._session.call("dcgmUpdateAllFields", 1)

    def groups(self, kind: str) -> Sequence[tuple[int, Sequence[int]]]:
        """Each entity group of a kind with the field groups watched on it."""
        part = self._parts.get(kind)
        return [] if part is None else [(group, part.field_groups) for group in part.groups]

    def refused(self, kind: str) -> Mapping[int, str]:
        """Field id -> reason word, of fields the engine would not watch."""
        part = self._parts.get(kind)
        return {} if part is None else part.refused

    def close(self) -> None:
        for kind in list(self._followed):
            self._drop(kind)

    def _make(self, kind: str, wanted: Wanted) -> None:
        part = self._parts[kind] = _Part(self._session, self._names, wanted)
        self._followed[kind] = wanted
        try:
            part.make()
        except SourceError:
            self._drop(kind)
            raise
        self._report(kind, part.refused)

    def _report(self, kind: str, refused: Mapping[int, str]) -> None:
        for reason in sorted(set(refused.values())):
            ids = few_of(i for i, why in refused.items() if why == reason)
            _log.warning("DCGM does not watch these fields of %s (%s): %s", kind, reason, ids)

    def _drop(self, kind: str) -> None:
        self._followed.pop(kind, None)
        part = self._parts.pop(kind, None)
        if part is not None:
            part.drop()


class _Part:
    """The groups of one kind of entity."""

    def __init__(self, session: DcgmSession, names: Iterable[str], wanted: Wanted) -> None:
        self._session = session
        self._names = iter(names)
        self._wanted = wanted
        self.groups: list[int] = []
        self.field_groups: list[int] = []
        self.refused: dict[int, str] = {}

    def make(self) -> None:
        wanted = self._wanted
        for some in chunks(wanted.entities, s.MAX_ENTITIES):
            self.groups.append(self._make_group(some))
        # Profiling has a module of its own, which may refuse: it must not take the plain fields with it.
        plain = [f.id for f in wanted.fields if f.id not in _PROFILING]
        profiling = [f.id for f in wanted.fields if f.id in _PROFILING]
        for ids in (*chunks(plain, s.MAX_FIELDS), *chunks(profiling, s.MAX_FIELDS)):
            self._watch(ids)

    def _make_group(self, entities: Sequence[Entity]) -> int:
        group = s.Handle()
        self._session.call("dcgmGroupCreate", s.GROUP_EMPTY, next(self._names).encode(), byref(group))
        for entity in entities:
            try:
                self._session.call("dcgmGroupAddEntity", group, *entity)
            except DriverGone:
                raise
            except SourceError as e:  # it left between two looks
                _log.debug("%s cannot be watched: %s", entity, e)
        return group.value

    def _watch(self, ids: Sequence[int]) -> None:
        """One field the engine refuses makes it refuse the whole group: halve until that one is alone."""
        try:
            self._watch_together(ids)
        except (DriverGone, DeviceLost):
            raise
        except SourceError as e:
            if e.reason in _NOT_THE_FIELDS_FAULT:
                raise
            if len(ids) == 1:
                self.refused[ids[0]] = e.reason
                return
            middle = len(ids) // 2
            self._watch(ids[:middle])
            self._watch(ids[middle:])

    def _watch_together(self, ids: Sequence[int]) -> None:
        numbers, made = (c_uint16 * len(ids))(*ids), s.Handle()
        self._session.call("dcgmFieldGroupCreate", len(ids), numbers, next(self._names).encode(), byref(made))
        try:
            for group in self.groups:
                self._session.call(
                    "dcgmWatchFields",
                    group,
                    made,
                    round(self._wanted.interval * 1_000_000),
                    self._wanted.keep_seconds,
                    self._wanted.keep_samples,
                )
        except SourceError:
            self._forget(made.value)
            raise
        self.field_groups.append(made.value)

    def _forget(self, field_group: int) -> None:
        for group in self.groups:
            with suppress(SourceError):
                self._session.call("dcgmUnwatchFields", group, field_group)
        with suppress(SourceError):
            self._session.call("dcgmFieldGroupDestroy", field_group)

    def drop(self) -> None:
        for field_group in self.field_groups:
            self._forget(field_group)
        for group in self.groups:
            with suppress(SourceError):
                self._session.call("dcgmGroupDestroy", group)
