"""Reads dcgm-exporter's YAML configuration (version 2) and merges it into the options.

Flags and environment variables override the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import click
from msgspec import Meta, Struct

from podgpu.agent.counters import Collection
from podgpu.cli.options import FROM_FILE, is_set
from podgpu.clock import parse_duration
from podgpu.decode import decode_yaml
from podgpu.errors import SourceError, UsageError
from podgpu.files import read_bounded
from podgpu.metrics.counters import CounterSpec, make_counter

_MAX_BYTES = 256 * 1024
_ALL_FIELDS = ["*"]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Content of the configuration file. None means not set."""

    path: str = ""
    counters_file: str = ""
    counters: tuple[CounterSpec, ...] | None = None
    exporter_metrics: bool | None = None
    interval: float | None = None
    collections: tuple[Collection, ...] = ()  # without the collection that matches all fields
    ignored: tuple[str, ...] = ()  # warnings about entries without effect
    max_concurrent_scrapes: int | None = None


def merge_config_file(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options merged with the file. Entries without a matching option are in `config`."""
    path = options["config_file"]
    config = _read(path) if path else ConfigFile()
    values = {
        "collectors": config.counters_file or None,
        "collect_interval": config.interval,
        "max_concurrent_scrapes": config.max_concurrent_scrapes,
        "enable_exporter_metrics": config.exporter_metrics,
    }
    from_file = {name: value for name, value in values.items() if value is not None and not is_set(ctx, name)}
    if is_set(ctx, "collectors") or (is_set(ctx, "configmap_data") and options["configmap_data"] != "none"):
        config = replace(config, counters=None)
        from_file.pop("collectors", None)
    ctx.meta[FROM_FILE] = dict.fromkeys(from_file, path)
    return {**options, **from_file, "config": config}


def _read(path: str) -> ConfigFile:
    try:
        return parse_config_file(read_bounded(path, _MAX_BYTES), path)
    except SourceError as e:
        raise UsageError(f"--config-file {e}") from e


# The file

_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=0, le=999_999_999)]


class _ConfigSection(Struct, rename="camel", forbid_unknown_fields=True):
    pass


class _ConfigField(_ConfigSection):
    name: _Text
    prometheus_type: _Text
    help: _Text


class _Metrics(_ConfigSection):
    file: str | None = None
    fields: Annotated[list[_ConfigField], Meta(min_length=1)] | None = None
    enable_exporter_metrics: bool | None = None


class _BindUnbind(_ConfigSection):
    enabled: bool | None = None
    poll_interval: str | None = None


class _Watch(_ConfigSection):
    """How long DCGM keeps samples. No effect, because podgpu uses only the newest sample."""

    max_keep_age: str | None = None
    max_keep_samples: _Count | None = None


class _Dcgm(_ConfigSection):
    watch: _Watch | None = None
    detect_bind_unbind: _BindUnbind | None = None


class _Sources(_ConfigSection):
    dcgm: _Dcgm | None = None


class _Include(_ConfigSection):
    include: Annotated[list[_Text], Meta(min_length=1)]


class _ConfigCollection(_ConfigSection):
    name: _Text
    every: str
    metrics: _Include
    sources: _Sources | None = None


class _Server(_ConfigSection):
    max_concurrent_scrapes: Annotated[int, Meta(ge=1, le=999_999_999)] | None = None


class _Config(_ConfigSection):
    version: Literal[2]
    metrics: _Metrics | None = None
    collections: Annotated[list[_ConfigCollection], Meta(min_length=1)] | None = None
    sources: _Sources | None = None
    server: _Server | None = None


def parse_config_file(content: bytes, path: str) -> ConfigFile:
    """Parses the file. Raises UsageError with the path of the file and of the invalid entry."""
    config = decode_yaml(content, path, _Config)
    metrics, server = config.metrics or _Metrics(), config.server or _Server()
    bind_unbind = ((config.sources or _Sources()).dcgm or _Dcgm()).detect_bind_unbind
    if metrics.file and metrics.fields:
        raise UsageError(f"{path}: metrics: set file or fields, not both")
    interval, collections = _read_collections(config, path)
    where = f"{path}: sources.dcgm.detectBindUnbind"
    ignored = f"{where} has no effect: podgpu always detects GPUs that are added or removed"
    return ConfigFile(
        path=path,
        counters_file=metrics.file or "",
        counters=_read_fields(metrics.fields, path) if metrics.fields else None,
        exporter_metrics=metrics.enable_exporter_metrics,
        interval=interval,
        collections=collections,
        ignored=(ignored,) if bind_unbind is not None and bind_unbind.enabled else (),
        max_concurrent_scrapes=server.max_concurrent_scrapes,
    )


def _read_collections(config: _Config, path: str) -> tuple[float | None, tuple[Collection, ...]]:
    """The collection with include ['*'] sets the interval of all fields that are in no other collection."""
    interval = None
    collections = []
    for number, row in enumerate(config.collections or ()):
        place = f"{path}: collections[{number}]"
        seconds = parse_duration(row.every)
        if seconds is None or not 0.1 <= seconds <= 86_400:
            raise UsageError(f"{place}.every: {row.every[:80]!a} is not a duration from 100ms to 24h, such as 1m30s")
        if row.metrics.include != _ALL_FIELDS:
            collections.append(Collection(row.name, seconds, tuple(row.metrics.include), place))
        elif interval is not None:
            raise UsageError(f"{place}: only one collection may include ['*']")
        else:
            interval = seconds
    return interval, tuple(collections)


def _read_fields(fields: Sequence[_ConfigField], path: str) -> tuple[CounterSpec, ...]:
    """Returns the counters. If two rows have the same field, the first one is used, as in a counter file."""
    first: dict[int, CounterSpec] = {}
    for number, row in enumerate(fields):
        try:
            counter = make_counter(row.name, row.prometheus_type, " ".join(row.help.split()))
        except UsageError as e:
            raise UsageError(f"{path}: metrics.fields[{number}]: {e}") from None
        first.setdefault(counter.field.id, counter)
    return tuple(first.values())
