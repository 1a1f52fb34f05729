"""`podgpu exporter`: one node's GPUs on /metrics."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podgpu.accounting.containers import ContainerFinder
from podgpu.agent.loop import Agent, Settings
from podgpu.allocation.api_health import ApiHealth
from podgpu.catalog.counters import SHIPPED, Counter, shipped_counters
from podgpu.cli.allocations import Surroundings, make_allocations, make_identities, make_signs
from podgpu.cli.api_access import SOON_SECONDS, ApiAccess, unless_no_api
from podgpu.cli.logs import configure_logging, print_out
from podgpu.cli.memory import share_one_heap
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import given, naming_variable, with_options
from podgpu.cli.telemetries import open_telemetry, with_host_engine
from podgpu.clock import Clock
from podgpu.configuration.counter_feeds import CounterFeed, FileCounters
from podgpu.configuration.pod_labels import LabelFilter
from podgpu.device_selection import parse_selection
from podgpu.errors import SourceError, StartError, UsageError
from podgpu.join import Policy
from podgpu.model import PodLabels
from podgpu.serve.app import GPU_MANAGER_OPTION, PROBE_OPTION, serve
from podgpu.serve.sockets import Address, parse_address, systemd_sockets
from podgpu.snapshot_json import dump_snapshot
from podgpu.telemetry.source import Telemetry

if TYPE_CHECKING:
    from podgpu.serve.protection import Protection

_log = logging.getLogger("podgpu")
_COUNTERS_DIRECTORY = "/etc/dcgm-exporter"


@click.command("exporter", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@with_options(EXPORTER_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Export this node's GPUs to Prometheus. Takes every flag and variable of dcgm-exporter."""
    share_one_heap()
    configure_logging(options["log_format"], options["debug"])
    address, gpu_manager_address, probe_address = check_options(ctx, options)
    with naming_variable(ctx, "web_systemd_socket"):
        passed = options["web_systemd_socket"] and not options["once"]
        sockets = systemd_sockets(os.environ) if passed else []
    with naming_variable(ctx, "web_config_file"):
        protection = _protection(options["web_config_file"])
    # Probes are answered soon, whatever the API server does; --once has nobody to answer and can wait.
    api = ApiAccess(options["kubeconfig"]) if options["once"] else ApiAccess(options["kubeconfig"], SOON_SECONDS)
    try:
        agent = build_agent(ctx, options, api)
        for sentence in without_effect(ctx):
            _log.warning("%s", sentence)
        if options["once"]:
            _print_once(agent, options["dump_snapshot"])
        else:
            lifecycle = options["web_enable_lifecycle"]
            serve(agent, address, _announce, gpu_manager_address, probe_address, protection, sockets, lifecycle)
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


def build_agent(
    ctx: click.Context,
    options: dict[str, Any],
    api: ApiAccess,
    telemetry: Telemetry | None = None,
    clock: Clock | None = None,
) -> Agent:
    """The agent these options ask for. Tests bring GPUs and time of their own; all else is as in the field."""
    with naming_variable(ctx, "collectors"):
        counters, counter_feed = read_counters(options["collectors"])
    with naming_variable(ctx, "devices"):
        selection = parse_selection(options["devices"])
    options = with_host_engine(ctx, options)
    with naming_variable(ctx, "telemetry"):
        telemetry = telemetry or open_telemetry(options["telemetry"], options)
    with naming_variable(ctx, "configmap_data"):
        if options["configmap_data"] != "none":
            configmap = unless_no_api("configmap-data", lambda: api.configmap(options["configmap_data"]))
            counter_feed = configmap or counter_feed
    settings = Settings(
        interval=options["collect_interval"],
        allocation_interval=options["allocation_interval"],
        usage_interval=options["usage_interval"],
        selection=selection,
        policy=_policy(options, counters),
    )
    with naming_variable(ctx, "allocation"):
        sources = make_allocations(options["allocation"], Surroundings(options, api, telemetry))
    pod_labels = _pod_labels(options, api)
    identities = make_identities(api, options["path_varlog"])
    if api.feeds:
        sources.append(ApiHealth(api.feeds))
    containers = ContainerFinder(options["path_proc"]) if options["container_usage"] else None
    agent = Agent(
        telemetry, sources, settings, clock, identities, pod_labels, counter_feed, containers, make_signs(options)
    )
    with naming_variable(ctx, "devices"):
        agent.check_selection()
    agent.read_counters()
    return agent


def _policy(options: dict[str, Any], counters: tuple[Counter, ...]) -> Policy:
    return Policy(
        counters=counters,
        hostname="" if options["no_hostname"] else hostname(options),
        hostname_label=options["hostname_label"],
        old_namespace=options["use_old_namespace"],
        replace_blanks_in_model_name=options["replace_blanks_in_model_name"],
        pod_uid=options["kubernetes_enable_pod_uid"],
        virtual_gpus=options["kubernetes_virtual_gpus"],
        copy_parent_values=options["mig_copy_parent_values"],
        gpu_manager=options["gpu_manager_metrics"],
        xid_window_ms=round(options["xid_count_window_size"] * 1000),
        clock_window_ms=round(options["clock_events_count_window_size"] * 1000),
    )


def _pod_labels(options: dict[str, Any], api: ApiAccess) -> Callable[[], PodLabels]:
    patterns = LabelFilter(options["kubernetes_pod_label_allowlist_regex"])
    if not options["kubernetes_enable_pod_labels"]:
        return dict
    pods = unless_no_api("kubernetes-enable-pod-labels", api.pods)
    return dict if pods is None else lambda: patterns.of(pods.items())


def hostname(options: dict[str, Any]) -> str:
    """NODE_NAME, else the host's; outside Kubernetes the figures of another host's engine carry that host's name."""
    engine = options["host_engine"]
    elsewhere = engine.host if engine is not None and not engine.is_local and not options["kubernetes"] else ""
    return os.environ.get("NODE_NAME") or elsewhere or socket.gethostname()


def read_counters(chosen: str) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    """The counters of `-f` (a shipped set by name, none, or a file), and where to look for changes of them."""
    if chosen == "none":
        return (), None
    if not chosen:
        default = f"{_COUNTERS_DIRECTORY}/{SHIPPED['default']}"
        chosen = default if os.path.exists(default) else "default"
    shipped = shipped_counters(chosen)
    return (shipped, None) if shipped is not None else _read_counter_file(Path(chosen))


def _read_counter_file(path: Path) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    feed = FileCounters(str(path))
    try:
        return feed.read(), feed
    except SourceError as e:
        ours = shipped_counters(path.name) if str(path.parent) == _COUNTERS_DIRECTORY else None
        if e.reason != "file_missing":
            raise UsageError(str(e) if e.reason == "malformed" else f"-f {e}") from e
        if ours is None:
            raise UsageError(f"-f {path}: no such file; name a CSV, or one of {', '.join(SHIPPED)}, none") from None
    _log.info("%s is not here: using the copy that comes with podgpu", path)
    return ours, None


def without_effect(ctx: click.Context) -> list[str]:
    """What was said and does nothing here, each in a sentence."""
    said = (option for option in EXPORTER_OPTIONS if not option.works and given(ctx, option))
    return [f"--{one.flag} ({one.env}): {one.help.removeprefix('accepted; ')}; ignored" for one in said]


def _print_once(agent: Agent, dump: str) -> None:
    try:
        agent.warm_up()
        published = agent.published
        if dump:
            _write(Path(dump), dump_snapshot(published.snapshot))
        print_out(published.fresh.plain)
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
