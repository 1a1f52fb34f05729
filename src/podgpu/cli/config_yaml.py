"""Reads dcgm-exporter's YAML configuration, versions 1 (4.8.3) and 2 (4.8.4)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from msgspec import Meta, Struct, field

from podgpu.agent.collections import DEFAULT_RETENTION, Collection, ConfigFile, SampleRetention
from podgpu.cli.options import parse_go_duration
from podgpu.errors import UsageError
from podgpu.metrics.counters import Counter, make_counter
from podgpu.yaml_file import decode_yaml

_SHORTEST, _LONGEST = Fraction(1, 10), Fraction(86_400)
_ALL_FIELDS = ["*"]
_Text = Annotated[str, Meta(min_length=1)]
_Texts = Annotated[list[_Text], Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=0, le=999_999_999)]


class _ConfigSection(Struct, rename="camel", forbid_unknown_fields=True):
    pass


class _Field(_ConfigSection):
    name: _Text
    prometheus_type: _Text
    help: _Text


class _Metrics(_ConfigSection):
    file: _Text | None = None
    fields: Annotated[list[_Field], Meta(min_length=1)] | None = None
    enable_exporter_metrics: bool | None = None


class _BindUnbind(_ConfigSection):
    enabled: bool | None = None
    poll_interval: str | None = None


class _Server(_ConfigSection):
    max_concurrent_scrapes: Annotated[int, Meta(ge=1, le=999_999_999)] | None = None


class _RetentionV1(_ConfigSection):
    max_age: str | None = None
    max_samples: _Count | None = None


class _WatchGroup(_ConfigSection):
    name: _Text
    interval: str
    fields: _Texts
    retention: _RetentionV1 | None = None


class _CollectionV1(_ConfigSection):
    interval: str | None = None
    watch_groups: list[_WatchGroup] | None = None
    retention: _RetentionV1 | None = None


class _DcgmV1(_ConfigSection):
    detect_bind_unbind: _BindUnbind | None = None


class _SourcesV1(_ConfigSection):
    dcgm: _DcgmV1 | None = None


class _ConfigV1(_ConfigSection):
    version: int
    metrics: _Metrics | None = None
    collection: _CollectionV1 | None = None
    sources: _SourcesV1 | None = None
    server: _Server | None = None


class _Watch(_ConfigSection):
    max_keep_age: str | None = None
    max_keep_samples: _Count | None = None


class _CollectionDcgm(_ConfigSection):
    watch: _Watch | None = None


class _CollectionSources(_ConfigSection):
    dcgm: _CollectionDcgm | None = None


class _Include(_ConfigSection):
    include: _Texts


class _CollectionV2(_ConfigSection):
    name: _Text
    every: str
    metrics: _Include
    sources: _CollectionSources | None = None


class _DcgmV2(_ConfigSection):
    watch: _Watch | None = None
    detect_bind_unbind: _BindUnbind | None = None


class _SourcesV2(_ConfigSection):
    dcgm: _DcgmV2 | None = None


class _ConfigV2(_ConfigSection):
    version: int
    metrics: _Metrics | None = None
    collections: Annotated[list[_CollectionV2], Meta(min_length=1)] | None = None
    sources: _SourcesV2 | None = None
    server: _Server | None = None


class _Version(Struct):
    version: int | None = field(default=None)


def parse_config_file(content: bytes, path: str) -> ConfigFile:
    """Raises UsageError, which names the file and the path inside it."""
    version = decode_yaml(content, path, _Version).version
    if version == 1:
        return _read_v1(decode_yaml(content, path, _ConfigV1), path)
    if version == 2:
        return _read_v2(decode_yaml(content, path, _ConfigV2), path)
    raise UsageError(f"{path}: version: must be 2, or 1 as in dcgm-exporter 4.8.3")


def _read_v1(config: _ConfigV1, path: str) -> ConfigFile:
    base = config.collection or _CollectionV1()
    retention = _read_retention_v1(base.retention, f"{path}: collection.retention")
    collections = []
    for number, group in enumerate(base.watch_groups or ()):
        place = f"{path}: collection.watchGroups[{number}]"
        every, kept = _read_interval(group.interval, f"{place}.interval"), _read_retention_v1(group.retention, place)
        collections.append(Collection(group.name, every, tuple(group.fields), kept, place))
    interval = _read_interval(base.interval, f"{path}: collection.interval") if base.interval else None
    dcgm = (config.sources or _SourcesV1()).dcgm or _DcgmV1()
    return _make(path, config.metrics, config.server, dcgm.detect_bind_unbind, interval, retention, collections)


def _read_v2(config: _ConfigV2, path: str) -> ConfigFile:
    """The collection of all fields sets interval and retention of fields that no other collection has."""
    dcgm = (config.sources or _SourcesV2()).dcgm or _DcgmV2()
    retention, interval = _read_watch(dcgm.watch, f"{path}: sources.dcgm.watch"), None
    collections = []
    for number, row in enumerate(config.collections or ()):
        place = f"{path}: collections[{number}]"
        watch = ((row.sources or _CollectionSources()).dcgm or _CollectionDcgm()).watch
        kept, every = _read_watch(watch, f"{place}.sources.dcgm.watch"), _read_interval(row.every, f"{place}.every")
        if row.metrics.include != _ALL_FIELDS:
            collections.append(Collection(row.name, every, tuple(row.metrics.include), kept, place))
        elif interval is not None:
            raise UsageError(f"{place}: only one collection may include ['*']")
        else:
            interval, retention = every, kept.over(retention)
    return _make(path, config.metrics, config.server, dcgm.detect_bind_unbind, interval, retention, collections)


def _make(
    path: str,
    metrics: _Metrics | None,
    server: _Server | None,
    bind_unbind: _BindUnbind | None,
    interval: float | None,
    retention: SampleRetention,
    collections: Sequence[Collection],
) -> ConfigFile:
    metrics = metrics or _Metrics()
    if metrics.file and metrics.fields:
        raise UsageError(f"{path}: metrics: set file or fields, not both")
    if bind_unbind is not None and bind_unbind.poll_interval:
        place = f"{path}: sources.dcgm.detectBindUnbind.pollInterval"
        _read_interval(bind_unbind.poll_interval, place, shortest=Fraction(1, 1000))
    _check(path, retention, collections)
    return ConfigFile(
        path=path,
        counters_file=metrics.file or "",
        counters=_read_fields(metrics.fields, path) if metrics.fields else None,
        exporter_metrics=metrics.enable_exporter_metrics,
        interval=interval,
        retention=retention,
        collections=tuple(collections),
        bind_unbind=bind_unbind.enabled if bind_unbind is not None else None,
        max_concurrent_scrapes=server.max_concurrent_scrapes if server is not None else None,
    )


def _read_fields(fields: Sequence[_Field], path: str) -> tuple[Counter, ...]:
    """If two names mean the same field, the first one counts, as in a counter file."""
    first: dict[int, Counter] = {}
    names: set[str] = set()
    for number, row in enumerate(fields):
        try:
            counter = make_counter(row.name, row.prometheus_type, " ".join(row.help.split()))
        except UsageError as e:
            raise UsageError(f"{path}: metrics.fields[{number}]: {e}") from None
        if row.name in names:
            raise UsageError(f"{path}: metrics.fields[{number}].name: {row.name} appears twice")
        names.add(row.name)
        first.setdefault(counter.field.id, counter)
    return tuple(first.values())


def _check(path: str, retention: SampleRetention, collections: Sequence[Collection]) -> None:
    default = retention.over(DEFAULT_RETENTION)
    if default.is_endless:
        raise UsageError(f"{path}: neither age nor number of samples is limited: set one of them above 0")
    names: set[str] = set()
    for collection in collections:
        if collection.name in names:
            raise UsageError(f"{collection.place}.name: {collection.name} appears twice")
        names.add(collection.name)
        if collection.retention.over(default).is_endless:
            raise UsageError(f"{collection.place}: neither age nor number of samples is limited: set one above 0")


def _read_retention_v1(retention: _RetentionV1 | None, place: str) -> SampleRetention:
    retention = retention or _RetentionV1()
    return SampleRetention(_read_age(retention.max_age, f"{place}.maxAge"), retention.max_samples)


def _read_watch(watch: _Watch | None, place: str) -> SampleRetention:
    watch = watch or _Watch()
    return SampleRetention(_read_age(watch.max_keep_age, f"{place}.maxKeepAge"), watch.max_keep_samples)


def _read_age(text: str | None, place: str) -> float | None:
    return None if text is None else float(_read_duration(text, place))


def _read_duration(text: str, place: str) -> Fraction:
    seconds = parse_go_duration(text)
    if seconds is None:
        raise UsageError(f"{place}: {text[:80]!a} is not a duration: write it as in 30s, 1m30s or 500ms")
    return seconds


def _read_interval(text: str, place: str, shortest: Fraction = _SHORTEST) -> float:
    seconds = _read_duration(text, place)
    if not shortest <= seconds <= _LONGEST or (seconds * 1000).denominator != 1:
        at_least = "100ms" if shortest == _SHORTEST else "1ms"
        raise UsageError(f"{place}: {text[:80]!a} is out of range: {at_least} to 24h, in whole milliseconds")
    return float(seconds)
