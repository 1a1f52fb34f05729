"""This module reads dcgm-exporter's YAML configuration, versions 1 (4.8.3) and 2 (4.8.4). Pure.

Whatever is wrong is said with file:line:column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

from podgpu.configuration.config_file import (
    DEFAULT_RETENTION,
    Collection,
    ConfigFile,
    Retention,
    parse_go_duration,
)
from podgpu.errors import UsageError
from podgpu.metrics.counters import MOST_ROWS, Counter, make_counter
from podgpu.strict_yaml import PlacedMapping, parse_mapping

_MOST_COLLECTIONS = 64
_MOST_PATTERNS = 1_000
_SHORTEST, _LONGEST = Fraction(1, 10), Fraction(86_400)
"""Intervals, in seconds: as -c takes them."""
_ALL_FIELDS = "*"
_VERSIONS = (1, 2)
_KEYS = {
    1: {
        "": ("version", "metrics", "collection", "sources", "server"),
        "collection": ("interval", "watchGroups", "retention"),
        "sources.dcgm": ("detectBindUnbind",),
    },
    2: {
        "": ("version", "metrics", "collections", "sources", "server"),
        "sources.dcgm": ("watch", "detectBindUnbind"),
    },
}


def parse_config_file(content: bytes, path: str) -> ConfigFile:
    """Raises UsageError, which names file, line and column."""
    top = parse_mapping(content, path, PlacedMapping)
    version = _version(top)
    _allow(top, version, "")
    metrics, sources, server = top.mapping("metrics"), top.mapping("sources"), top.mapping("server")
    counters_file, counters, exporter_metrics = _metrics(top, metrics)
    sources.allow(("dcgm",))
    dcgm = sources.mapping("dcgm")
    _allow(dcgm, version, "sources.dcgm")
    bind_unbind, bind_unbind_interval = _bind_unbind(dcgm.mapping("detectBindUnbind"))
    server.allow(("maxConcurrentScrapes",))
    interval, retention, collections = (_collection if version == 1 else _collections)(top, dcgm)
    return ConfigFile(
        path=path,
        counters_file=counters_file,
        counters=counters,
        exporter_metrics=exporter_metrics,
        interval=interval,
        retention=retention,
        collections=collections,
        bind_unbind=bind_unbind,
        bind_unbind_interval=bind_unbind_interval,
        max_concurrent_scrapes=_more_than_none(server, "maxConcurrentScrapes"),
    )


def _version(top: PlacedMapping) -> int:
    if not top.has("version"):
        raise top.complaint("version", "is required: write version: 2 (or 1, as dcgm-exporter 4.8.3 has it)")
    version = top.whole_number("version")
    if version not in _VERSIONS:
        raise top.complaint("version", f"podgpu knows 1 and 2, not {version}: write the file as one of these")
    return version


def _allow(mapping: PlacedMapping, version: int, where: str) -> None:
    known, others = _KEYS[version].get(where, ()), _KEYS[3 - version].get(where, ())
    for name in mapping.names():
        if name not in known and name in others:
            raise mapping.complaint(name, f"belongs to version {3 - version}, and this file says version {version}")
    mapping.allow(known)


# What is measured


def _metrics(top: PlacedMapping, metrics: PlacedMapping) -> tuple[str, tuple[Counter, ...] | None, bool | None]:
    metrics.allow(("file", "fields", "enableExporterMetrics"))
    names = set(metrics.names())
    if "metrics" in top.names() and not names:
        raise top.complaint("metrics", "is empty: give file, fields or enableExporterMetrics, or leave it out")
    if {"file", "fields"} <= names:
        raise metrics.complaint("fields", "there is a file too: give file or fields, not both")
    if "file" in names and not metrics.text("file"):
        raise metrics.complaint("file", "is empty: name a counter CSV, or leave the key out")
    counters = _fields(metrics) if "fields" in names else None
    return metrics.text("file"), counters, metrics.flag("enableExporterMetrics")


def _fields(metrics: PlacedMapping) -> tuple[Counter, ...]:
    rows = metrics.mappings("fields")
    if not rows:
        raise metrics.complaint("fields", "is empty: list fields, each with name, prometheusType and help")
    if len(rows) > MOST_ROWS:
        raise metrics.complaint("fields", f"more than {MOST_ROWS} fields")
    chosen: dict[str, Counter] = {}
    for row in rows:
        row.allow(("name", "prometheusType", "help"))
        for key in ("name", "prometheusType", "help"):
            if not row.has(key):
                raise row.complaint(key, "is required")
        name = row.text("name")
        if name in chosen:
            raise row.complaint("name", f"{_short(name)} is there twice: name each field once")
        try:
            chosen[name] = make_counter(name, row.text("prometheusType"), " ".join(row.text("help").split()))
        except UsageError as e:
            key = "prometheusType" if "type" in str(e) else "name"
            raise row.complaint(key, str(e)) from None
    return _one_of_each(chosen.values())


def _one_of_each(counters: Iterable[Counter]) -> tuple[Counter, ...]:
    """Of two names of one field the first stands, as in a counter file."""
    first: dict[int, Counter] = {}
    for counter in counters:
        first.setdefault(counter.field.id, counter)
    return tuple(first.values())


# How often, and for how long it is kept

_Times = tuple[float | None, Retention, tuple[Collection, ...]]


def _collection(top: PlacedMapping, _dcgm: PlacedMapping) -> _Times:
    """Version 1."""
    base = top.mapping("collection")
    _allow(base, 1, "collection")
    retention = _retention(base.mapping("retention"), "maxAge", "maxSamples")
    groups = base.mappings("watchGroups")
    collections = tuple(_named(groups, base, "watchGroups", ("name", "interval", "fields", "retention"), _watch_group))
    _check_retentions(retention, collections, base, "retention")
    return _interval(base, "interval") if base.has("interval") else None, retention, collections


def _watch_group(group: PlacedMapping) -> Collection:
    retention = _retention(group.mapping("retention"), "maxAge", "maxSamples")
    return Collection(group.text("name"), _interval(group, "interval"), _patterns(group, "fields"), retention)


def _collections(top: PlacedMapping, dcgm: PlacedMapping) -> _Times:
    """Version 2: the collection of all fields says the interval and retention of those that no other has."""
    rows = top.mappings("collections")
    if "collections" in top.names() and not rows:
        raise top.complaint("collections", "is empty: list some, or leave it out")
    found = tuple(_named(rows, top, "collections", ("name", "every", "metrics", "sources"), _one_collection))
    of_all = [c for c in found if c.include == (_ALL_FIELDS,)]
    if len(of_all) > 1:
        raise UsageError(f"{of_all[1].place}: collections: only one may include ['*'], and {of_all[0].name} does")
    retention = _watch(dcgm.mapping("watch"))
    if of_all:
        retention = of_all[0].retention.over(retention)
    collections = tuple(c for c in found if c.include != (_ALL_FIELDS,))
    _check_retentions(retention, collections, top, "collections")
    return of_all[0].every if of_all else None, retention, collections


def _one_collection(row: PlacedMapping) -> Collection:
    metrics, sources = row.mapping("metrics"), row.mapping("sources")
    metrics.allow(("include",))
    sources.allow(("dcgm",))
    dcgm = sources.mapping("dcgm")
    dcgm.allow(("watch",))
    return Collection(
        row.text("name"), _interval(row, "every"), _patterns(metrics, "include"), _watch(dcgm.mapping("watch"))
    )


def _named(
    rows: tuple[PlacedMapping, ...],
    above: PlacedMapping,
    key: str,
    known: tuple[str, ...],
    make: Callable[[PlacedMapping], Collection],
) -> Iterator[Collection]:
    if len(rows) > _MOST_COLLECTIONS:
        raise above.complaint(key, f"more than {_MOST_COLLECTIONS} of them")
    names: set[str] = set()
    for row in rows:
        row.allow(known)
        name = row.text("name")
        if not name:
            raise row.complaint("name", "is required")
        if name in names:
            raise row.complaint("name", f"{_short(name)} is there twice: give each a name of its own")
        names.add(name)
        made = make(row)
        yield Collection(made.name, made.every, made.include, made.retention, row.place_of("name"))


def _patterns(mapping: PlacedMapping, key: str) -> tuple[str, ...]:
    patterns = mapping.texts(key)
    if not patterns or not all(patterns):
        raise mapping.complaint(key, "is empty: list names of fields, or patterns such as DCGM_FI_DEV_NVLINK_*")
    if len(patterns) > _MOST_PATTERNS:
        raise mapping.complaint(key, f"more than {_MOST_PATTERNS} of them")
    return patterns


def _watch(watch: PlacedMapping) -> Retention:
    return _retention(watch, "maxKeepAge", "maxKeepSamples")


def _retention(mapping: PlacedMapping, age_key: str, samples_key: str) -> Retention:
    mapping.allow((age_key, samples_key))
    age = _duration(mapping, age_key) if mapping.has(age_key) else None
    samples = mapping.whole_number(samples_key) if mapping.has(samples_key) else None
    return Retention(None if age is None else float(age), samples)


def _check_retentions(base: Retention, collections: tuple[Collection, ...], mapping: PlacedMapping, key: str) -> None:
    """Without a limit of either kind DCGM would keep every sample for ever."""
    default = base.over(DEFAULT_RETENTION)
    if default.is_endless:
        raise mapping.complaint(key, "neither age nor number of samples is limited: set one of them above 0")
    for collection in collections:
        if collection.retention.over(default).is_endless:
            raise UsageError(
                f"{collection.place}: {_short(collection.name)}: neither age nor number of its samples is limited: set"
                " one of them above 0"
            )


def _bind_unbind(mapping: PlacedMapping) -> tuple[bool | None, float | None]:
    mapping.allow(("enabled", "pollInterval"))
    interval = _interval(mapping, "pollInterval", shortest=Fraction(1, 1000)) if mapping.has("pollInterval") else None
    return mapping.flag("enabled"), interval


def _more_than_none(mapping: PlacedMapping, key: str) -> int | None:
    if not mapping.has(key):
        return None
    number = mapping.whole_number(key)
    if not number:
        raise mapping.complaint(key, "must be above 0")
    return number


def _duration(mapping: PlacedMapping, key: str) -> Fraction:
    text = mapping.text(key)
    seconds = parse_go_duration(text)
    if seconds is None:
        raise mapping.complaint(key, f"{_short(text)!r} is not a duration: write it as in 30s, 1m30s or 500ms")
    return seconds


def _interval(mapping: PlacedMapping, key: str, shortest: Fraction = _SHORTEST) -> float:
    if not mapping.has(key):
        raise mapping.complaint(key, "is required: say how often, as in 30s")
    seconds = _duration(mapping, key)
    if not shortest <= seconds <= _LONGEST or (seconds * 1000).denominator != 1:
        at_least = "100ms" if shortest == _SHORTEST else "1ms"
        raise mapping.complaint(
            key, f"{_short(mapping.text(key))} is out of range: {at_least} to 24h, in whole milliseconds"
        )
    return float(seconds)


def _short(text: str) -> str:
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return printable if len(printable) <= 80 else f"{printable[:80]}…"
