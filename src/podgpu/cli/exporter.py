"""`podgpu exporter` serves one node's GPUs on /metrics."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podgpu.agent.loop import Agent
from podgpu.agent.waste_watch import WasteWatch
from podgpu.cli.config_file import of_file_without_effect, with_config_file
from podgpu.cli.help import podgpu_command
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import given, naming_variable, with_options
from podgpu.clock import Clock
from podgpu.compose.agent import exporter_agent
from podgpu.compose.histories import history_of, node_keeper
from podgpu.compose.process import (
    configure_logging,
    give_back_once_settled,
    let_go_of_what_ended,
    look_past_what_stays,
    print_out,
    share_one_heap,
    take_turns_often,
)
from podgpu.compose.servers import SOON_SECONDS, ApiAccess
from podgpu.device_selection import parse_selection
from podgpu.errors import MOST_NAMED, StartError, UsageError
from podgpu.serve.app import PROBE_OPTION
from podgpu.serve.exporter_app import GPU_MANAGER_OPTION, Bounds, serve
from podgpu.serve.routes import BesideFigures
from podgpu.serve.sockets import Address, parse_address, systemd_sockets
from podgpu.snapshot_json import dump_snapshot
from podgpu.telemetry.source import Telemetry

if TYPE_CHECKING:
    from podgpu.figures.prices import ReadPrices
    from podgpu.serve.protection import Protection

_log = logging.getLogger("podgpu")


@podgpu_command(
    "exporter",
    ("podgpu exporter -k", "serve this node's GPUs with pod labels on :9400/metrics, as dcgm-exporter does"),
    ("podgpu exporter -k --once", "print what Prometheus would get, exit"),
    ("podgpu exporter --telemetry simulated:2xH100 -a 127.0.0.1:9400", "try it without a GPU, for this machine only"),
)
@with_options(EXPORTER_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Export this node's GPUs to Prometheus. Takes every flag and variable of dcgm-exporter."""
    share_one_heap()
    configure_logging(options["log_format"], options["debug"])
    options = with_config_file(ctx, options)
    address, gpu_manager_address, probe_address = check_options(ctx, options)
    with naming_variable(ctx, "web_systemd_socket"):
        passed = options["web_systemd_socket"] and not options["once"]
        sockets = systemd_sockets(os.environ) if passed else []
    with naming_variable(ctx, "web_config_file"):
        protection = _protection(options["web_config_file"])
    with naming_variable(ctx, "prices"):
        prices = _prices(options["prices"])
    # Probes are answered soon, whatever the API server does; --once has nobody to answer and can wait.
    api = ApiAccess(options["kubeconfig"]) if options["once"] else ApiAccess(options["kubeconfig"], SOON_SECONDS)
    try:
        agent = build_agent(ctx, options, api)
        for sentence in (*without_effect(ctx), *of_file_without_effect(options)):
            _log.warning("%s", sentence)
        if options["once"]:
            _print_once(agent, options["dump_snapshot"])
        else:
            lifecycle = options["web_enable_lifecycle"]
            waste = WasteWatch(agent, prices)
            with naming_variable(ctx, "history_dir"):
                keeper = node_keeper(agent, options["history_dir"], waste)
            let_go_of_what_ended()
            take_turns_often()
            look_past_what_stays()
            give_back_once_settled()
            serve(
                *(agent, address, _announce, gpu_manager_address, probe_address, protection, sockets, lifecycle),
                shown=BesideFigures(history_of(keeper), prices, waste.wasted),
                beside=[keeper, waste],
                bounds=Bounds(
                    options["web_read_timeout"], options["web_write_timeout"], options["max_concurrent_scrapes"]
                ),
            )
    finally:
        api.close()
        if protection:
            protection.close()


def check_options(ctx: click.Context, options: dict[str, Any]) -> tuple[Address, Address | None, Address | None]:
    """What can be told of the options alone; the addresses of them. Raises UsageError."""
    with naming_variable(ctx, "address"):
        address = parse_address(options["address"])
    with naming_variable(ctx, "gpu_manager_address"):
        gpu_manager_address = _gpu_manager_address(options)
    with naming_variable(ctx, "probe_address"):
        probe_address = parse_address(options["probe_address"], PROBE_OPTION) if options["probe_address"] else None
    if options["dump_snapshot"] and not options["once"]:
        raise UsageError("--dump-snapshot goes with --once")
    return address, gpu_manager_address, probe_address


def _announce(bound: Address) -> None:
    _log.info("listening on %s/metrics", bound.url)


def _gpu_manager_address(options: dict[str, Any]) -> Address | None:
    text = options["gpu_manager_address"]
    if not text:
        return None
    address = parse_address(text, GPU_MANAGER_OPTION)
    if not options["gpu_manager_metrics"]:
        raise UsageError(f"{GPU_MANAGER_OPTION} {text}: goes with --gpu-manager-metrics")
    return address


def _protection(path: str) -> Protection | None:
    """Read with --once too, which serves nothing: whoever looks before leaving it running learns what is wrong."""
    if not path:
        return None
    from podgpu.serve.protection import protect

    return protect(path)


def _prices(chosen: str) -> ReadPrices | None:
    """What brings YAML is loaded by those only who have prices."""
    if not chosen:
        return None
    from podgpu.configuration.price_file import read_prices

    return read_prices(chosen)


def build_agent(
    ctx: click.Context,
    options: dict[str, Any],
    api: ApiAccess,
    telemetry: Telemetry | None = None,
    clock: Clock | None = None,
) -> Agent:
    """The agent of this command line. Raises UsageError, which names the variable a wrong value came from."""
    if "config" not in options:
        options = with_config_file(ctx, options)
    return exporter_agent(with_host_engine(ctx, options), api, partial(naming_variable, ctx), telemetry, clock)


def with_host_engine(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with DCGM's checked. A host engine counts only where it was named: there is none by default."""
    rows = {option.flag: option for option in EXPORTER_OPTIONS}
    engine = None
    with naming_variable(ctx, "remote_hostengine_info"):
        if given(ctx, rows["remote-hostengine-info"]) and options["remote_hostengine_info"]:
            from podgpu.telemetry.dcgm.session import parse_address  # all of DCGM's, for those who have it only

            engine = parse_address(options["remote_hostengine_info"])
    for parameter, letter in (("switch_devices", "-s"), ("cpu_devices", "-p")):
        if parameter in options:
            with naming_variable(ctx, parameter):
                parse_selection(options[parameter], letter)
    return {**options, "host_engine": engine, "dcgm_names_said": given(ctx, rows["dcgm-names"])}


def without_effect(ctx: click.Context) -> list[str]:
    """What was said and does nothing here, each in a sentence."""
    idle = (option for option in EXPORTER_OPTIONS if not option.works and given(ctx, option))
    return [f"--{option.flag} ({option.env}): {option.help.removeprefix('accepted; ')}; ignored" for option in idle]


def _print_once(agent: Agent, dump: str) -> None:
    try:
        agent.warm_up()
        published = agent.published
        if dump:
            _write(Path(dump), dump_snapshot(published.snapshot))
        print_out(published.fresh.plain)
        failed = [o for o in published.snapshot.outcomes if not o.ok]
        if not published.snapshot.readings:
            raise StartError(
                "no GPU could be read: " + ("; ".join(o.message for o in failed[:MOST_NAMED]) or "there is none here")
            )
    finally:
        agent.stop()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise StartError(f"--dump-snapshot {path}: cannot be written: {e.strerror}") from e
