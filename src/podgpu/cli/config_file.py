"""Reads dcgm-exporter's YAML configuration (version 2) and merges it into the options.

Flags and environment variables override the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

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


class ConfigFile(NamedTuple):
    """Content of the configuration file."""

    options: Mapping[str, Any] = MappingProxyType({})  # values of options; None means not set
    counters: tuple[CounterSpec, ...] | None = None  # None if the counters are in a file of their own
    collections: tuple[Collection, ...] = ()  # without the collection that matches all fields
    ignored: tuple[str, ...] = ()  # warnings about entries without effect


def merge_config_file(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options merged with the file. Entries without a matching option are in `config`."""
    path = options["config_file"]
    try:
        config = parse_config_file(read_bounded(path, _MAX_BYTES), path) if path else ConfigFile()
    except SourceError as e:
        raise UsageError(f"--config-file {e}") from e
    given = {name for name in config.options if is_set(ctx, name)}
    if "collectors" in given or options["configmap_data"] != "none":
        config = config._replace(counters=None)
        given.add("collectors")
    from_file = {name: value for name, value in config.options.items() if value is not None and name not in given}
    ctx.meta[FROM_FILE] = dict.fromkeys(from_file, path)
    return {**options, **from_file, "config": config}


# The file

_Text = Annotated[str, Meta(min_length=1)]


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


class _Include(_ConfigSection):
    include: Annotated[list[_Text], Meta(min_length=1)]


class _ConfigCollection(_ConfigSection):
    name: _Text
    every: str
    metrics: _Include
    sources: Any = None


class _Server(_ConfigSection):
    max_concurrent_scrapes: Annotated[int, Meta(ge=1, le=999_999_999)] | None = None


class _Config(_ConfigSection):
    version: Literal[2]
    metrics: _Metrics | None = None
    collections: Annotated[list[_ConfigCollection], Meta(min_length=1)] | None = None
    sources: Any = None  # how DCGM is watched; no effect
    server: _Server | None = None


def parse_config_file(content: bytes, path: str) -> ConfigFile:
    """Parses the file. Raises UsageError with the path of the file and of the invalid entry."""
    config = decode_yaml(content, path, _Config)
    metrics, server = config.metrics or _Metrics(), config.server or _Server()
    if metrics.file and metrics.fields:
        raise UsageError(f"{path}: metrics: set file or fields, not both")
    interval, collections = _read_collections(config, path)
    ignored = f"{path}: sources has no effect: podgpu uses the newest sample, and always detects added and removed GPUs"
    return ConfigFile(
        {
            "collectors": metrics.file or None,
            "collect_interval": interval,
            "max_concurrent_scrapes": server.max_concurrent_scrapes,
            "enable_exporter_metrics": metrics.enable_exporter_metrics,
        },
        _read_fields(metrics.fields, path) if metrics.fields else None,
        collections,
        (ignored,) if config.sources else (),
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
