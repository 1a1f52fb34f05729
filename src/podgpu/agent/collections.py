"""Settings of dcgm-exporter's configuration file, and the read interval of each field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from podgpu.errors import UsageError
from podgpu.metrics.counters import Counter
from podgpu.metrics.names import names_of, rename_of


@dataclass(frozen=True, slots=True)
class SampleRetention:
    """How long DCGM keeps samples. None: not set here, so that the outer setting applies."""

    max_age: float | None = None
    """Seconds; 0: no limit."""
    max_samples: int | None = None
    """0: no limit."""

    def over(self, other: SampleRetention) -> SampleRetention:
        """Fills what is not set from `other`."""
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
    """File and position, for messages."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of the configuration file. None: not set."""

    path: str
    counters_file: str = ""
    counters: tuple[Counter, ...] | None = None
    exporter_metrics: bool | None = None
    interval: float | None = None
    retention: SampleRetention = field(default_factory=SampleRetention)
    collections: tuple[Collection, ...] = ()
    """Without the one for all fields."""
    bind_unbind: bool | None = None
    max_concurrent_scrapes: int | None = None


def collection_of_fields(
    counters: Sequence[Counter], collections: Sequence[Collection], skip_empty: bool = False
) -> Mapping[int, Collection]:
    """Maps field ids to their collections. Fields without a collection are read at the common interval.

    Patterns match the names in the counter file, else any name of the same field (4.8 or 4.9). Raises UsageError if a
    collection has no field, unless `skip_empty` is set, or if two have the same field.
    """
    collection_of: dict[int, Collection] = {}
    for collection in collections:
        chosen = [counter for pattern in collection.include for counter in _match(counters, pattern)]
        if not chosen and not skip_empty:
            raise UsageError(
                f"{collection.place}: {collection.name}: no configured field matches"
                f" {', '.join(collection.include[:5])}: add the field to the counters, or remove the collection"
            )
        # With --dcgm-names both, a field has two names but one interval.
        renames = {rename for counter in chosen if (rename := rename_of(counter.name)) is not None}
        for counter in counters:
            if counter not in chosen and rename_of(counter.name) not in renames:
                continue
            other = collection_of.setdefault(counter.field.id, collection)
            if other is not collection:
                raise UsageError(
                    f"{collection.place}: {collection.name}: {counter.name} is also in the collection {other.name}: a"
                    " field has one interval"
                )
    return collection_of


def _match(counters: Sequence[Counter], pattern: str) -> list[Counter]:
    matches = re.compile(translate(pattern.replace("[^", "[!"))).match  # Go negates with ^
    as_written = [counter for counter in counters if matches(counter.name)]
    return as_written or [counter for counter in counters if any(map(matches, names_of(counter.field.id)))]
