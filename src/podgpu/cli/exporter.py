"""`podgpu exporter`: serves the GPUs of one node on /metrics."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from podgpu.agent.api_access import SOON_SECONDS, ApiAccess
from podgpu.agent.assemble import Naming, Options, exporter_agent
from podgpu.agent.loop import Agent
from podgpu.cli.config_file import of_file_without_effect, with_config_file
from podgpu.cli.exporter_options import EXPORTER_OPTIONS
from podgpu.cli.options import is_given, make_command, naming_variable
from podgpu.cli.process import configure_logging
from podgpu.cli.terminal import print_out
from podgpu.cluster.prices import ReadPrices, read_prices
from podgpu.device_selection import parse_selection
from podgpu.errors import MOST_NAMED, StartError, UsageError
from podgpu.model import encode_node, has_readings
from podgpu.web.app import PROBE_OPTION, load_protection
from podgpu.web.exporter_app import GPU_MANAGER_OPTION, PageSources, RequestLimits, serve
from podgpu.web.node_page import node_recorder, node_waste
from podgpu.web.sockets import Address, parse_address, systemd_sockets

if TYPE_CHECKING:  # loads bcrypt and YAML, which an exporter without --web-config-file does not need
    from podgpu.web.protection import Protection

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
    options = resolved(ctx, options)
    addresses = check_options(ctx, options)
    with open_exporter(options, partial(naming_variable, ctx)) as exporter:
        for sentence in (*without_effect(ctx), *of_file_without_effect(options)):
            _log.warning("%s", sentence)
        if options["once"]:
            _print_once(exporter.agent, options["dump_snapshot"])
        else:
            exporter.serve(addresses)


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    address: Address
    gpu_manager: Address | None
    probes: Address | None


@dataclass(frozen=True, slots=True)
class AssembledExporter:
    """The agent, not started yet, and everything that is needed to serve it."""

    agent: Agent
    options: Options
    naming: Naming
    sockets: Sequence[socket.socket]
    protection: Protection | None
    prices: ReadPrices

    def serve(self, addresses: ListenAddresses) -> None:
        """Runs until SIGINT, SIGTERM or a fatal error. Raises UsageError and StartError."""
        options = self.options
        with self.naming("history_dir"):
            recorder = node_recorder(self.agent, options["history_dir"], self.prices)
        serve(
            self.agent,
            addresses.address,
            lambda bound: _log.info("listening on %s/metrics", bound.url),
            addresses.gpu_manager,
            addresses.probes,
            self.protection,
            self.sockets,
            options["web_enable_lifecycle"],
            page=PageSources(recorder, self.prices, node_waste(self.agent, recorder, self.prices)),
            services=[recorder],
            limits=RequestLimits(
                options["web_read_timeout"], options["web_write_timeout"], options["max_concurrent_scrapes"]
            ),
        )


@contextmanager
def open_exporter(options: Options, naming: Naming) -> Iterator[AssembledExporter]:
    """Checks everything with --once too, so that problems show before the exporter is deployed. Raises UsageError."""
    once = options["once"]
    with ExitStack() as stack:
        with naming("web_systemd_socket"):
            sockets = systemd_sockets(os.environ) if options["web_systemd_socket"] and not once else []
        with naming("web_config_file"):
            protection = load_protection(options["web_config_file"])
        with naming("prices"):
            prices = read_prices(options["prices"])
        # The exporter must answer probes soon, even if the API server does not; --once can wait.
        api = ApiAccess(options["kubeconfig"]) if once else ApiAccess(options["kubeconfig"], SOON_SECONDS)
        stack.callback(api.close)
        yield AssembledExporter(exporter_agent(options, api, naming), options, naming, sockets, protection, prices)


def resolved(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Merges the configuration file into the options and checks DCGM's. Raises UsageError."""
    return with_host_engine(ctx, with_config_file(ctx, options))


def check_options(ctx: click.Context, options: dict[str, Any]) -> ListenAddresses:
    """Checks the options and parses the addresses. Raises UsageError."""
    with naming_variable(ctx, "address"):
        address = parse_address(options["address"])
    with naming_variable(ctx, "gpu_manager_address"):
        gpu_manager_address = _gpu_manager_address(options)
    with naming_variable(ctx, "probe_address"):
        probe_address = parse_address(options["probe_address"], PROBE_OPTION) if options["probe_address"] else None
    if options["dump_snapshot"] and not options["once"]:
        raise UsageError("--dump-snapshot needs --once")
    return ListenAddresses(address, gpu_manager_address, probe_address)


def _gpu_manager_address(options: dict[str, Any]) -> Address | None:
    text = options["gpu_manager_address"]
    if not text:
        return None
    address = parse_address(text, GPU_MANAGER_OPTION)
    if not options["gpu_manager_metrics"]:
        raise UsageError(f"{GPU_MANAGER_OPTION} {text}: needs --gpu-manager-metrics")
    return address


def with_host_engine(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Checks DCGM's options. A host engine is used only if -r is given."""
    engine = None
    with naming_variable(ctx, "remote_hostengine_info"):
        is_set = ctx.get_parameter_source("remote_hostengine_info") is not ParameterSource.DEFAULT
        if is_set and options["remote_hostengine_info"]:
            from podgpu.gpu.dcgm.connection import parse_address  # all of DCGM's, for those who have it only

            engine = parse_address(options["remote_hostengine_info"])
    for parameter, letter in (("switch_devices", "-s"), ("cpu_devices", "-p")):
        if parameter in options:
            with naming_variable(ctx, parameter):
                parse_selection(options[parameter], letter)
    return {**options, "host_engine": engine}


def without_effect(ctx: click.Context) -> list[str]:
    """Warnings about options without effect."""
    ignored = (option for option in EXPORTER_OPTIONS if not option.works and is_given(ctx, option))
    return [f"--{option.flag} ({option.env}) has no effect: {option.help}" for option in ignored]


def _print_once(agent: Agent, dump: str) -> None:
    try:
        agent.warm_up()
        published = agent.published
        if dump:
            _write(Path(dump), encode_node(published.state))
        print_out(published.fresh.plain)
        if not has_readings(published.state):
            failed = [source.message for source in published.state.sources if source.up is False]
            raise StartError(
                "no GPU could be read: " + ("; ".join(failed[:MOST_NAMED]) or "there is none on this node")
            )
    finally:
        agent.stop()


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content + b"\n")
    except OSError as e:
        raise StartError(f"--dump-snapshot {path}: cannot be written ({e.strerror})") from e
