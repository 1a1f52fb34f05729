"""Schedules the reading of fields. A lane is a set of fields with the same interval, such as a collection of
dcgm-exporter's configuration file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from podgpu.errors import UsageError
from podgpu.gpu.source import Lane
from podgpu.metrics.conditions import FIELD_CONDITIONS
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.dcgm import CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD
from podgpu.metrics.families import CLOCK_EVENTS_FIELD, THROTTLE_REASONS
from podgpu.metrics.fields import Field, fields
from podgpu.metrics.names import names_of, rename_of
from podgpu.metrics.render import Policy

KEY_FIELDS = (203, 155, 150, 250, 252)  # utilisation, power, temperature, memory; always read
THROTTLE_INTERVAL = 5.0  # shortest interval for the throttling counters; one reading costs 1.5 ms of CPU (H200)
_TOGETHER_SECONDS = 0.02  # lanes that are due within this time are read together


@dataclass(frozen=True, slots=True)
class SampleRetention:
    """How long DCGM keeps samples. None means not set, so that the common setting is used."""

    max_age: float | None = None
    """Seconds; 0 means no limit."""
    max_samples: int | None = None
    """0 means no limit."""

    def fill_from(self, other: SampleRetention) -> SampleRetention:
        """Returns a copy in which unset limits are taken from `other`."""
        return SampleRetention(
            other.max_age if self.max_age is None else self.max_age,
            other.max_samples if self.max_samples is None else self.max_samples,
        )

    @property
    def is_endless(self) -> bool:
        return self.max_age == 0 and self.max_samples == 0


DEFAULT_RETENTION = SampleRetention(600.0, 0)


@dataclass(frozen=True, slots=True)
class Collection:
    """Fields that are read at their own interval."""

    name: str
    every: float
    include: tuple[str, ...]
    """Names of fields, or shell patterns."""
    retention: SampleRetention = field(default_factory=SampleRetention)
    place: str = ""
    """File and position of the definition, for error messages."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of the configuration file. None means not set."""

    path: str
    counters_file: str = ""
    counters: tuple[CounterSpec, ...] | None = None
    exporter_metrics: bool | None = None
    interval: float | None = None
    retention: SampleRetention = field(default_factory=SampleRetention)
    collections: tuple[Collection, ...] = ()
    """Excludes the collection that matches all fields."""
    bind_unbind: bool = False
    max_concurrent_scrapes: int | None = None


def collection_of_fields(
    counters: Sequence[CounterSpec], collections: Sequence[Collection], skip_empty: bool = False
) -> Mapping[int, Collection]:
    """Maps field ids to their collections. Fields without a collection are read at the common interval.

    Patterns match the names in the counter file, else any name of the same field (DCGM 4.8 or 4.9). Raises UsageError
    if a field is in two collections, or if a collection is empty and `skip_empty` is not set.
    """
    collection_of: dict[int, Collection] = {}
    for collection in collections:
        chosen = [counter for pattern in collection.include for counter in _match(counters, pattern)]
        if not chosen and not skip_empty:
            raise UsageError(
                f"{collection.place}: {collection.name}: no configured field matches"
                f" {', '.join(collection.include[:5])}; add the field to the counters, or remove the collection"
            )
        # With --dcgm-names both, a field has two names but one interval.
        renames = {rename for counter in chosen if (rename := rename_of(counter.name)) is not None}
        for counter in counters:
            if counter not in chosen and rename_of(counter.name) not in renames:
                continue
            other = collection_of.setdefault(counter.field.id, collection)
            if other is not collection:
                raise UsageError(
                    f"{collection.place}: {collection.name}: {counter.name} is also in the collection {other.name}; a"
                    " field can be in one collection only"
                )
    return collection_of


def _match(counters: Sequence[CounterSpec], pattern: str) -> list[CounterSpec]:
    matches = re.compile(translate(pattern.replace("[^", "[!"))).match  # Go negates character classes with ^
    as_written = [counter for counter in counters if matches(counter.name)]
    return as_written or [counter for counter in counters if any(map(matches, names_of(counter.field.id)))]


def fields_to_read(policy: Policy) -> tuple[Field, ...]:
    """Returns the fields of the counter file and those that podgpu's own metrics need."""
    wanted = {c.field.id: c.field for c in policy.counters}
    own = {*KEY_FIELDS, *THROTTLE_REASONS, *FIELD_CONDITIONS}
    if wanted.keys() & {CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD}:
        own.add(CLOCK_EVENTS_FIELD)
    return tuple((wanted | {i: fields()[i] for i in own}).values())


def make_lanes(
    wanted: Sequence[Field],
    counters: Sequence[CounterSpec],
    interval: float,
    collections: Sequence[Collection] = (),
    retention: SampleRetention = DEFAULT_RETENTION,
    skip_empty: bool = False,
    throttle_interval: float = THROTTLE_INTERVAL,
) -> tuple[Lane, ...]:
    """Makes one lane for each collection and one for all other fields.

    Throttling counters that are not in the counter file have a slower lane. Raises UsageError for an empty collection,
    unless `skip_empty` is set.
    """
    collection_of = collection_of_fields(counters, collections, skip_empty)
    configured = {counter.field.id for counter in counters}
    slow = THROTTLE_REASONS.keys() - configured if interval < throttle_interval else set()
    base = tuple(f for f in wanted if f.id not in collection_of and f.id not in slow)
    lanes = [_make_lane(base, interval, retention)]
    lanes.append(_make_lane(tuple(f for f in wanted if f.id in slow), throttle_interval, retention))
    for collection in collections:
        own = tuple(f for f in wanted if collection_of.get(f.id) is collection)
        lanes.append(_make_lane(own, collection.every, collection.retention.fill_from(retention)))
    return tuple(lane for lane in lanes if lane.fields) or (lanes[0],)


def _make_lane(fields: tuple[Field, ...], interval: float, retention: SampleRetention) -> Lane:
    return Lane(fields, interval, retention.max_age or 0.0, retention.max_samples or 0)


class Schedule:
    """Decides when each lane is read next. Not thread-safe."""

    def __init__(self, lanes: Sequence[Lane], warm_up: float) -> None:
        """The second reading follows at most `warm_up` seconds after the first, because rates need two readings."""
        self.lanes = tuple(lanes)
        self._warm_up = warm_up
        self._next = dict.fromkeys(self.lanes, float("-inf"))
        self._cold = set(self.lanes)

    @property
    def next_at(self) -> float:
        return min(self._next.values())

    def take_due(self, now: float) -> tuple[Lane, ...]:
        """Returns the lanes to read now, and schedules their next reading."""
        due = tuple(lane for lane in self.lanes if self._next[lane] <= now + _TOGETHER_SECONDS)
        for lane in due:
            self._next[lane] = self._compute_next(lane, now)
        return due

    def _compute_next(self, lane: Lane, now: float) -> float:
        """Returns the next time on a fixed grid, so that lanes are read together. A late lane starts a new grid."""
        if lane in self._cold:
            self._cold.discard(lane)
            return now + min(self._warm_up, lane.interval)
        on_time = self._next[lane] + lane.interval
        return on_time if on_time > now else now + lane.interval

    def make_all_due(self, now: float) -> None:
        for lane in self._next:
            self._next[lane] = min(self._next[lane], now)
