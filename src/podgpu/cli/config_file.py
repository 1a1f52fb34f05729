"""This module puts dcgm-exporter's configuration file under the options: a flag goes before its variable, that before
the file, that before the default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from podgpu.agent.collections import ConfigFile, Retention
from podgpu.cli.params import FROM_FILE
from podgpu.errors import SourceError, UsageError
from podgpu.files import read_bounded

_MAX_BYTES = 256 * 1024
_NO_LIMIT = (
    "--watch-max-keep-age and --watch-max-keep-samples: neither age nor number of samples is limited: set one of them"
    " above 0"
)


def with_config_file(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options with what the file says where neither flag nor variable does, and the rest of it as `config`.

    Raises UsageError, which names the file.
    """
    path = options["config_file"]
    config = _read(path) if path else ConfigFile("")
    from_file = {name: value for name, value in _values(config).items() if value is not None and not _said(ctx, name)}
    if _said(ctx, "collectors") or (_said(ctx, "configmap_data") and options["configmap_data"] != "none"):
        config = replace(config, counters=None)
        from_file.pop("collectors", None)
    ctx.meta[FROM_FILE] = dict.fromkeys(from_file, path)
    merged = {**options, **from_file, "config": config}
    retention = Retention(merged["watch_max_keep_age"], merged["watch_max_keep_samples"])
    if retention.is_endless:
        raise UsageError(_NO_LIMIT)
    for collection in config.collections:
        if collection.retention.over(retention).is_endless:
            raise UsageError(f"{collection.place}: {collection.name}: {_NO_LIMIT}")
    return merged


def of_file_without_effect(options: dict[str, Any]) -> list[str]:
    """What the file says and does nothing here, each in a sentence."""
    config: ConfigFile = options["config"]
    if not config.bind_unbind:
        return []
    where = f"{config.path}: sources.dcgm.detectBindUnbind"
    return [f"{where}: podgpu always notices GPUs that come and go; ignored"]


def _said(ctx: click.Context, parameter: str) -> bool:
    return ctx.get_parameter_source(parameter) is not ParameterSource.DEFAULT


def _read(path: str) -> ConfigFile:
    from podgpu.cli.config_yaml import parse_config_file  # loads YAML, which an exporter without a file does not need

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
