"""Reads the configured counters, groups their fields by interval, and schedules the readings."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import partial

from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange
from podgpu.metrics.conditions import FABRIC_FIELD, FIELD_CONDITIONS
from podgpu.metrics.counters import SHIPPED, CounterSpec, parse_counters, shipped_counters
from podgpu.metrics.dcgm import CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD
from podgpu.metrics.fields import (
    CLOCK_EVENTS_FIELD,
    THROTTLE_REASONS,
    Field,
    NameSet,
    fields,
    names_of,
    rename_of,
)
from podgpu.node.gpu.source import FieldGroup
from podgpu.node.holders.api import CONFIGMAP_KEY

_log = logging.getLogger("podgpu")
_COUNTERS_DIRECTORY = "/etc/dcgm-exporter"
_MAX_BYTES = 1 << 20
ALWAYS_READ = (203, 155, 150, 250, 252)  # utilisation, power, temperature, memory
_THROTTLE_INTERVAL = 5.0
"""Minimum interval of the throttling counters. A reading costs 1.5 ms of CPU (H200)."""
_TOGETHER_SECONDS = 0.02  # groups that are due within this time are read together
WARM_UP_SECONDS = 1.0
"""Maximum time between the first two readings, because rates need two readings."""
CounterSpecs = tuple[CounterSpec, ...]
ReadCounters = Callable[[], CounterSpecs]
"""Returns the current counters. Raises SourceError if they are invalid."""


def read_counters(chosen: str, names: NameSet = "4.8") -> tuple[CounterSpecs, ReadCounters | None]:
    """Returns the counters that `-f` selects.

    If they are in a file, also returns a function that re-reads them.
    """
    if chosen == "none":
        return (), None

    if not chosen:
        default = f"{_COUNTERS_DIRECTORY}/{SHIPPED['default']}"
        chosen = default if os.path.exists(default) else "default"

    shipped = _find_shipped(chosen, names)
    if shipped is not None:
        return shipped, None

    read = counters_in_file(chosen, names)
    try:
        return read(), read
    except SourceError as e:
        choices = ""
        if e.reason == "file_missing":
            choices = f"; give a CSV file or one of {', '.join(SHIPPED)}, none"
        raise UsageError(f"-f {e}{choices}") from e


def _find_shipped(chosen: str, names: NameSet) -> CounterSpecs | None:
    """Returns podgpu's own counters. None if `chosen` is another file."""
    shipped = shipped_counters(chosen, names)
    if shipped is not None:
        return shipped

    # Options for dcgm-exporter name a file that exists in its image only.
    directory, name = os.path.split(chosen)
    if directory != _COUNTERS_DIRECTORY or os.path.exists(chosen):
        return None
    shipped = shipped_counters(name, names)
    if shipped is not None:
        _log.info("%s does not exist; using podgpu's copy of it", chosen)
    return shipped


def counters_in_file(path: str, names: NameSet) -> ReadCounters:
    """Returns a function that reads the counters from a CSV file.

    It parses the file only if the file has changed.
    """

    def parse(content: bytes, origin: str) -> CounterSpecs:
        return _parse(content.decode("utf-8", "replace"), origin, names)

    return partial(ReadOnChange(parse, _MAX_BYTES).read, path)


def counters_in_configmap(
    name: str, read_text: Callable[[], str | None], names: NameSet
) -> ReadCounters:
    """Returns a function that parses the counters in a ConfigMap.

    `read_text` returns the CSV text, or None if the ConfigMap or its key is missing.
    """

    def read() -> CounterSpecs:
        text = read_text()
        if text is None:
            raise SourceError(
                "configmap_missing",
                f"there is no ConfigMap {name} with the key {CONFIGMAP_KEY!r}, "
                "or no permission to read it",
            )
        return _parse(text, f"ConfigMap {name}", names)

    return read


def _parse(text: str, origin: str, names: NameSet) -> CounterSpecs:
    try:
        return parse_counters(text, origin, names)
    except UsageError as e:
        raise SourceError("malformed", str(e)) from e


# Field groups


@dataclass(frozen=True, slots=True)
class Collection:
    """Fields with their own interval.

    The section `collections` of dcgm-exporter's configuration file defines them.
    """

    name: str
    every: float
    include: tuple[str, ...]  # names of fields, or shell patterns
    place: str = ""  # file and position of the definition, used in error messages


def collection_of_fields(
    counters: Sequence[CounterSpec], collections: Sequence[Collection], skip_empty: bool = False
) -> Mapping[int, Collection]:
    """Returns the collection of each field, by field id. Omits fields without a collection.

    Patterns match the names in the counter file or, if none matches, the other names of the fields
    (DCGM 4.8 and 4.9). Raises UsageError if a field is in two collections, or if a collection is
    empty and `skip_empty` is not set.
    """
    collection_of: dict[int, Collection] = {}
    for collection in collections:
        chosen: list[CounterSpec] = []
        for pattern in collection.include:
            chosen += _match(counters, pattern)
        if not chosen and not skip_empty:
            raise UsageError(
                f"{collection.place}: {collection.name}: no configured field matches "
                f"{', '.join(collection.include[:5])}; "
                "add the field to the counters, or remove the collection"
            )

        # With --dcgm-names both, a field has two counters. Both must have the same interval.
        renames = {rename_of(counter.name) for counter in chosen} - {None}
        for counter in counters:
            if counter not in chosen and rename_of(counter.name) not in renames:
                continue
            other = collection_of.setdefault(counter.field.id, collection)
            if other is not collection:
                raise UsageError(
                    f"{collection.place}: {collection.name}: {counter.name} is also in the "
                    f"collection {other.name}; a field can be in one collection only"
                )
    return collection_of


def _match(counters: Sequence[CounterSpec], pattern: str) -> list[CounterSpec]:
    # Go negates character classes with ^.
    matches = re.compile(translate(pattern.replace("[^", "[!"))).match

    as_written = [counter for counter in counters if matches(counter.name)]
    if as_written:
        return as_written

    matching = []
    for counter in counters:
        if any(matches(name) for name in names_of(counter.field.name)):
            matching.append(counter)
    return matching


def _add_own_fields(configured: Mapping[int, Field]) -> dict[int, Field]:
    """Adds the fields that podgpu itself needs."""
    own = {*ALWAYS_READ, *THROTTLE_REASONS, *FIELD_CONDITIONS, FABRIC_FIELD}

    if configured.keys() & {CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD}:
        own.add(CLOCK_EVENTS_FIELD)

    wanted = dict(configured)
    for number in own:
        wanted[number] = fields()[number]
    return wanted


def group_fields(
    counters: Sequence[CounterSpec],
    interval: float,
    collections: Sequence[Collection],
    skip_empty: bool,
) -> tuple[FieldGroup, ...]:
    """Returns one group per collection, and one group for all other fields.

    Fields that podgpu needs are included. Throttling counters that only podgpu needs have their own
    group with a longer interval. Raises UsageError if a collection is empty and `skip_empty` is not
    set.
    """
    collection_of = collection_of_fields(counters, collections, skip_empty)
    configured = {}
    for counter in counters:
        if counter.field.type == "blob":
            _log.warning("%s has no series: its values are binary data", counter.name)
        else:
            configured[counter.field.id] = counter.field

    slow = set()
    if interval < _THROTTLE_INTERVAL:
        slow = THROTTLE_REASONS.keys() - configured.keys()

    normal_fields = []
    slow_fields = []
    collected: dict[Collection, list[Field]] = {collection: [] for collection in collections}
    for number, spec in _add_own_fields(configured).items():
        if number in collection_of:
            collected[collection_of[number]].append(spec)
        elif number in slow:
            slow_fields.append(spec)
        else:
            normal_fields.append(spec)

    groups = [
        FieldGroup(tuple(normal_fields), interval),
        FieldGroup(tuple(slow_fields), _THROTTLE_INTERVAL),
    ]
    for collection, chosen in collected.items():
        groups.append(FieldGroup(tuple(chosen), collection.every))
    return tuple(group for group in groups if group.fields)


class Schedule:
    """Computes when each field group is due. Not thread-safe."""

    def __init__(self, groups: tuple[FieldGroup, ...]) -> None:
        self.groups = groups
        self._next: dict[FieldGroup, float] = {}

    @property
    def next_at(self) -> float:
        """The monotonic time at which a group is due."""
        return min(self._next.get(group, float("-inf")) for group in self.groups)

    def take_due(self, now: float) -> tuple[FieldGroup, ...]:
        """Returns the groups that are due, and schedules their next reading.

        A group is due one interval after its last due time, or one interval from now if that time
        has passed. A new group is due at once.
        """
        due = []
        for group in self.groups:
            interval = group.interval

            due_at = self._next.get(group)
            if due_at is None:
                due.append(group)
                # Rates need a second reading.
                self._next[group] = now + min(WARM_UP_SECONDS, interval)
            elif due_at <= now + _TOGETHER_SECONDS:
                due.append(group)
                on_time = due_at + interval
                self._next[group] = on_time if on_time > now else now + interval
        return tuple(due)
