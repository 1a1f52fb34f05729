"""The options of `podgpu exporter`: dcgm-exporter's and podgpu's own (exporter_options.csv)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from podgpu.cli.options import ACCESS, COMMON, COMPATIBILITY, KUBERNETES, NO_EFFECT, PATHS, USAGE, Option
from podgpu.holders.sources import describe_sources

_GROUPS = {
    "common": COMMON,
    "kubernetes": KUBERNETES,
    "usage": USAGE,
    "access": ACCESS,
    "compatibility": COMPATIBILITY,
    "paths": PATHS,
    "no effect": NO_EFFECT,
}


def _read_options() -> tuple[Option, ...]:
    text = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8")
    return tuple(
        Option(
            flag=row["flag"],
            short=row["short"],
            env=row["env"],
            default=row["default"],
            help=row["help"].replace("{sources}", describe_sources()),
            kind=row["kind"],
            group=_GROUPS[row["group"]],
            common=row["shown"] == "help",
        )
        for row in csv.DictReader(text.splitlines())
    )


EXPORTER_OPTIONS = _read_options()
_BY_FLAG = {option.flag: option for option in EXPORTER_OPTIONS}
PRICES_HELP = _BY_FLAG["prices"].help
EXPORTER_ACCESS_OPTIONS = tuple(option for option in EXPORTER_OPTIONS if option.flag.startswith("exporter-"))
"""Options for reading another exporter. Used by --telemetry exporter:URL, podgpu enrich and podgpu cluster."""


def pick_options(flags: Iterable[str], changes: Mapping[str, Mapping[str, object]] | None = None) -> list[Option]:
    """Returns exporter options for use in another command. `changes` maps a flag to the attributes to override."""
    return [replace(_BY_FLAG[flag], **(changes or {}).get(flag, {})) for flag in flags]  # type: ignore[arg-type]


def hide(options: Iterable[Option]) -> list[Option]:
    """Returns the same options, shown only by --help-all."""
    return [replace(option, common=False) for option in options]
