"""`podgpu cluster` serves many nodes at one address: map, used GPUs, idle ones, cost, and a page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from podgpu.cli.cluster_options import CLUSTER_OPTIONS, PROMETHEUS_OPTIONS, SCRAPE_OPTIONS
from podgpu.cli.help import podgpu_command
from podgpu.cli.params import Option, naming_variable, with_options
from podgpu.cluster.settings import ViewSettings, check_settings
from podgpu.compose.cluster import run_cluster
from podgpu.compose.process import configure_logging
from podgpu.errors import UsageError
from podgpu.web.app import PROBE_OPTION
from podgpu.web.sockets import parse_address

_INTERVALS_FRESH = 3
_BACKENDS = ("prometheus", "scrape", "discover_kubernetes")


@podgpu_command(
    "cluster",
    ("podgpu cluster --scrape gpu-1:9400,gpu-2:9400", "look at two nodes; the page is on http://localhost:9401/"),
    (
        "podgpu cluster --discover-kubernetes monitoring/app.kubernetes.io/name=podgpu",
        "every node with an exporter, found by its Service",
    ),
    ("podgpu cluster --prometheus prometheus:9090 --prices prices.yaml", "ask Prometheus, and say what it costs"),
)
@with_options(CLUSTER_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Look at every node: which pod is on which GPU, how the used ones are doing, what it costs. With a page.

    Asks a Prometheus server, or scrapes the exporters itself: exactly one of --prometheus, --scrape and
    --discover-kubernetes.
    """
    configure_logging(options["log_format"], options["debug"])
    with naming_variable(ctx, "address"):
        address = parse_address(options["address"])
    with naming_variable(ctx, "probe_address"):
        probe_address = parse_address(options["probe_address"], PROBE_OPTION) if options["probe_address"] else None
    settings = _settings(ctx, options)
    check_backend(ctx, options)
    run_cluster(options, settings, address, probe_address, partial(naming_variable, ctx))


def _settings(ctx: click.Context, options: dict[str, Any]) -> ViewSettings:
    stale_after, drop_after = freshness(ctx, options)
    return check_settings(
        ViewSettings(
            interval=options["interval"],
            stale_after=stale_after,
            drop_after=drop_after,
            used_field=options["used_field"],
            window=options["window"],
            idle_after=options["idle_after"],
            legacy_map_metrics=options["legacy_map_metrics"],
        )
    )


def freshness(ctx: click.Context, options: dict[str, Any]) -> tuple[float, float]:
    """--stale-after and --drop-after: where they are not said, by the interval."""
    said = ctx.get_parameter_source("stale_after") is not ParameterSource.DEFAULT
    stale_after = options["stale_after"] if said else _INTERVALS_FRESH * options["interval"]
    kept = ctx.get_parameter_source("drop_after") is not ParameterSource.DEFAULT
    return stale_after, options["drop_after"] if kept else max(options["drop_after"], 2 * stale_after)


# Whom to ask


def check_backend(
    ctx: click.Context,
    options: dict[str, Any],
    only_with: tuple[Sequence[Option], Sequence[Option]] = (PROMETHEUS_OPTIONS, SCRAPE_OPTIONS),
) -> None:
    """`only_with`: options of the one and of the other backend. Raises UsageError for what cannot be meant, before
    anything is asked."""
    chosen = [name for name in _BACKENDS if options[name]]
    if len(chosen) != 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        problem = f"{flags} do not go together" if chosen else f"podgpu {ctx.command.name} needs somewhere to read from"
        raise UsageError(
            f"{problem}: give exactly one of --prometheus HOST:9090, --scrape HOST:9400,… and "
            "--discover-kubernetes SELECTOR"
        )
    if chosen == ["prometheus"]:
        _refuse(ctx, only_with[1], "--scrape or --discover-kubernetes")
    else:
        _refuse(ctx, only_with[0], "--prometheus")


def _refuse(ctx: click.Context, others: Sequence[Option], backend: str) -> None:
    """What would be ignored is not taken. Those from variables are left alone: they may be set for somebody else."""
    for option in others:
        if ctx.get_parameter_source(option.parameter) is ParameterSource.COMMANDLINE:
            raise UsageError(f"--{option.flag} goes with {backend}, which is not given")
