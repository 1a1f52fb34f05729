"""`podgpu exporter`: serves the GPUs of one node on /metrics."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from typing import Any

import click

from podgpu.agent.loop import Agent
from podgpu.cli.config_file import ConfigFile, merge_config_file
from podgpu.cli.node import build_exporter_agent
from podgpu.cli.options import EXPORTER_OPTIONS, is_given, make_command
from podgpu.cli.terminal import configure_logging, print_out
from podgpu.cluster.prices import read_prices
from podgpu.device_selection import parse_selection
from podgpu.errors import MOST_NAMED, StartError, UsageError
from podgpu.holders.api import SOON_SECONDS, SYNC_SECONDS, ApiAccess
from podgpu.model import has_readings
from podgpu.web.app import load_protection, open_systemd_sockets
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import application, node_recorder, node_usage, serve

_log = logging.getLogger("podgpu")


@make_command(
    "exporter",
    EXPORTER_OPTIONS,
    ("podgpu exporter -k", "serve this node's GPUs with pod labels on :9400/metrics"),
    ("podgpu exporter -k --once", "print the metrics and exit"),
    ("podgpu exporter --telemetry simulated:2xH100 -a 127.0.0.1:9400", "try it without a GPU"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Export this node's GPUs to Prometheus. Accepts every flag and variable of dcgm-exporter."""
    configure_logging(options["log_format"], options["debug"])
    options = resolve_options(ctx, options)
    once = options["once"]
    sockets = open_systemd_sockets(os.environ) if options["web_systemd_socket"] and not once else []
    # Also loaded with --once, so that errors in these files are found before deployment.
    protection = load_protection(options["web_config_file"])
    prices = read_prices(options["prices"])
    # The exporter must answer probes soon, even if the API server does not respond. With --once it can wait longer.
    with closing(ApiAccess(options["kubeconfig"], SYNC_SECONDS if once else SOON_SECONDS)) as api:
        agent = build_exporter_agent(options, api)
        for sentence in list_ignored_options(ctx, options["config"]):
            _log.warning("%s", sentence)
        if once:
            _print_once(agent)
            return
        recorder = node_recorder(agent, options["history_dir"], prices)
        app = application(
            agent,
            protection,
            options["web_enable_lifecycle"],
            recorder,
            prices,
            node_usage(agent, recorder, prices),
            options["max_concurrent_scrapes"],
        )
        serve(
            agent,
            app,
            options["address"],
            protection,
            options["gpu_manager_address"],
            options["probe_address"],
            sockets,
            [recorder],
            ConnectionLimits(header_seconds=options["web_read_timeout"], write_seconds=options["web_write_timeout"]),
        )


def resolve_options(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Merges the configuration file into the options and checks options that depend on each other. Raises UsageError.

    Adds `host_engine`, which is None unless -r is given.
    """
    options = merge_config_file(ctx, options)
    engine = None
    if options["remote_hostengine_info"]:
        from podgpu.gpu.dcgm.connection import parse_address  # imports the DCGM client, which is optional

        engine = parse_address(options["remote_hostengine_info"])
    parse_selection(options["switch_devices"], "-s")
    parse_selection(options["cpu_devices"], "-p")
    if options["gpu_manager_address"] and not options["gpu_manager_metrics"]:
        raise UsageError("--gpu-manager-address needs --gpu-manager-metrics")
    if options["kubernetes_virtual_gpus"] and not options["dcgm_holder_labels"]:
        raise UsageError("--kubernetes-virtual-gpus needs --dcgm-holder-labels")
    return {**options, "host_engine": engine}


def list_ignored_options(ctx: click.Context, config: ConfigFile) -> list[str]:
    """Returns warnings about given options and entries of the configuration file that have no effect."""
    ignored = (option for option in EXPORTER_OPTIONS if not option.works and is_given(ctx, option))
    return [*(f"--{option.flag} ({option.env}) has no effect: {option.help}" for option in ignored), *config.ignored]


def _print_once(agent: Agent) -> None:
    try:
        agent.warm_up()
        published = agent.published
        print_out(published.fresh.plain)
        if not has_readings(published.state):
            failed = [source.message for source in published.state.sources if source.up is False]
            raise StartError("no GPU could be read: " + ("; ".join(failed[:MOST_NAMED]) or "this node has no GPU"))
    finally:
        agent.stop()
