"""`podgpu exporter`: one node's GPUs on /metrics."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from typing import Any

import click

from podgpu.agent.loop import Agent, Settings
from podgpu.allocation.source import AllocationSource
from podgpu.catalog.counters import MOST_BYTES, SHIPPED, Counter, parse_counters, shipped_counters
from podgpu.cli.logs import configure_logging
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import given, naming_variable, with_options
from podgpu.cli.telemetries import open_telemetry
from podgpu.device_selection import parse_selection
from podgpu.errors import StartError, UsageError
from podgpu.join import Policy
from podgpu.serve.app import parse_address, serve
from podgpu.snapshot_json import dump_snapshot

_log = logging.getLogger("podgpu")
_COUNTERS_DIRECTORY = "/etc/dcgm-exporter"


@click.command("exporter", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@with_options(EXPORTER_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Export this node's GPUs to Prometheus. Takes every flag and variable of dcgm-exporter."""
    configure_logging(options["log_format"], options["debug"])
    with naming_variable(ctx, "address"):
        address = parse_address(options["address"])
    agent = build_agent(ctx, options)
    _warn_about_unbuilt(ctx)
    if options["once"]:
        _print_once(agent, options["dump_snapshot"])
        return
    if options["dump_snapshot"]:
        raise UsageError("--dump-snapshot goes with --once")
    serve(agent, address, lambda bound: _log.info("listening on %s/metrics", bound.url))


def build_agent(ctx: click.Context, options: dict[str, Any]) -> Agent:
    with naming_variable(ctx, "collectors"):
        counters = read_counters(options["collectors"])
    with naming_variable(ctx, "devices"):
        selection = parse_selection(options["devices"])
    with naming_variable(ctx, "telemetry"):
        telemetry = open_telemetry(options["telemetry"])
    policy = Policy(
        counters=counters,
        hostname="" if options["no_hostname"] else hostname(),
        hostname_label=options["hostname_label"],
        old_namespace=options["use_old_namespace"],
        replace_blanks_in_model_name=options["replace_blanks_in_model_name"],
        copy_parent_values=options["mig_copy_parent_values"],
        xid_window_ms=round(options["xid_count_window_size"] * 1000),
        clock_window_ms=round(options["clock_events_count_window_size"] * 1000),
    )
    settings = Settings(
        interval=options["collect_interval"],
        allocation_interval=options["allocation_interval"],
        selection=selection,
        policy=policy,
    )
    agent = Agent(telemetry, allocation_sources(options), settings)
    with naming_variable(ctx, "devices"):
        agent.check_selection()
    return agent


def allocation_sources(options: dict[str, Any]) -> list[AllocationSource]:
    if not options["kubernetes"]:
        return []
    from podgpu.allocation.kubelet import KubeletAllocation

    names = frozenset(name.strip() for name in options["nvidia_resource_names"].split(",") if name.strip())
    return [KubeletAllocation(options["pod_resources_kubelet_socket"], names)]


def hostname() -> str:
    return os.environ.get("NODE_NAME") or socket.gethostname()


def read_counters(chosen: str) -> tuple[Counter, ...]:
    """The counters of `-f`: a shipped set by name, none, or a file."""
    if chosen == "none":
        return ()
    if not chosen:
        default = f"{_COUNTERS_DIRECTORY}/{SHIPPED['default']}"
        chosen = default if os.path.exists(default) else "default"
    shipped = shipped_counters(chosen)
    return shipped if shipped is not None else _read_counter_file(Path(chosen))


def _read_counter_file(path: Path) -> tuple[Counter, ...]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        ours = shipped_counters(path.name) if str(path.parent) == _COUNTERS_DIRECTORY else None
        if ours is None:
            raise UsageError(f"-f {path}: no such file; name a CSV, or one of {', '.join(SHIPPED)}, none") from None
        _log.info("%s is not here: using the copy that comes with podgpu", path)
        return ours
    except OSError as e:
        raise UsageError(f"-f {path}: cannot be read: {e.strerror}") from e
    try:
        return parse_counters(content.decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"-f {path}: is not UTF-8 text; is it a counters CSV?") from None


def _warn_about_unbuilt(ctx: click.Context) -> None:
    for option in EXPORTER_OPTIONS:
        if not option.works and given(ctx, option):
            _log.warning("--%s (%s): %s; ignored", option.flag, option.env, option.help.removeprefix("accepted; "))


def _print_once(agent: Agent, dump: str) -> None:
    try:
        agent.warm_up()
        published = agent.published
        if dump:
            _write(Path(dump), dump_snapshot(published.snapshot))
        click.echo(published.fresh.plain, nl=False)
        failed = [o for o in published.snapshot.outcomes if not o.ok]
        if not published.snapshot.readings:
            raise StartError("no GPU could be read: " + ("; ".join(o.message for o in failed) or "there is none here"))
    finally:
        agent.stop()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StartError(f"--dump-snapshot {path}: cannot be written: {e.strerror}") from e
