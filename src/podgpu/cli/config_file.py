"""Merges dcgm-exporter's configuration file into the options. Flags and environment variables override it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from podgpu.agent.collections import ConfigFile, SampleRetention
from podgpu.cli.options import FROM_FILE
from podgpu.errors import SourceError, UsageError
from podgpu.files import read_bounded

_MAX_BYTES = 256 * 1024
_NO_LIMIT = (
    "--watch-max-keep-age and --watch-max-keep-samples: neither age nor number of samples is limited: set one of them"
    " above 0"
)


def with_config_file(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options, with the rest of the file as `config`. Raises UsageError."""
    path = options["config_file"]
    config = _read(path) if path else ConfigFile("")
    from_file = {name: value for name, value in _values(config).items() if value is not None and not _is_set(ctx, name)}
    if _is_set(ctx, "collectors") or (_is_set(ctx, "configmap_data") and options["configmap_data"] != "none"):
        config = replace(config, counters=None)
        from_file.pop("collectors", None)
    ctx.meta[FROM_FILE] = dict.fromkeys(from_file, path)
    merged = {**options, **from_file, "config": config}
    retention = SampleRetention(merged["watch_max_keep_age"], merged["watch_max_keep_samples"])
    if retention.is_endless:
        raise UsageError(_NO_LIMIT)
    for collection in config.collections:
        if collection.retention.over(retention).is_endless:
            raise UsageError(f"{collection.place}: {collection.name}: {_NO_LIMIT}")
    return merged


def of_file_without_effect(options: dict[str, Any]) -> list[str]:
    """Warnings about entries without effect."""
    config: ConfigFile = options["config"]
    if not config.bind_unbind:
        return []
    where = f"{config.path}: sources.dcgm.detectBindUnbind"
    return [f"{where} has no effect: podgpu always follows GPUs that appear and disappear"]


def _is_set(ctx: click.Context, parameter: str) -> bool:
    return ctx.get_parameter_source(parameter) is not ParameterSource.DEFAULT


def _read(path: str) -> ConfigFile:
    from podgpu.cli.config_yaml import parse_config_file  # YAML costs memory, and most exporters have no file

    try:
        return parse_config_file(read_bounded(path, _MAX_BYTES), path)
    except SourceError as e:
        raise UsageError(f"--config-file {e}") from e


def _values(config: ConfigFile) -> dict[str, Any]:
    return {
        "collectors": config.counters_file or None,
        "collect_interval": config.interval,
        "watch_max_keep_age": config.retention.max_age,
        "watch_max_keep_samples": config.retention.max_samples,
        "max_concurrent_scrapes": config.max_concurrent_scrapes,
        "enable_exporter_metrics": config.exporter_metrics,
    }
