"""`podgpu exporter`: serves the GPUs of one node on /metrics.

Accepts dcgm-exporter's YAML configuration file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import click
from msgspec import Meta, Struct

from podgpu.cli.options import EXPORTER_OPTIONS, FROM_FILE, Options, is_set, make_command
from podgpu.cli.otlp import read_push_settings
from podgpu.cli.sources import build_exporter_agent
from podgpu.cli.terminal import print_out
from podgpu.clock import parse_duration
from podgpu.decode import decode_yaml
from podgpu.errors import MOST_NAMED, SourceError, StartError, UsageError
from podgpu.files import read_bounded
from podgpu.fleet.prices import read_prices
from podgpu.kube.config import ApiConfig
from podgpu.metrics.counters import CounterSpec, make_counter
from podgpu.model import NodeState, has_readings
from podgpu.node.agent.agent import Agent
from podgpu.node.agent.device_selection import parse_selection
from podgpu.node.agent.schedule import Collection
from podgpu.node.holders.api import SOON_SECONDS, SYNC_SECONDS, ApiAccess
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.app import (
    Listener,
    Service,
    load_protection,
    make_listeners,
    open_systemd_sockets,
    run,
)
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import (
    application,
    build_state,
    gpu_manager_application,
    node_probes,
    node_pusher,
    node_recorder,
)
from podgpu.web.lifecycle import DEFAULT_RELEASE_SECONDS
from podgpu.writers.write_option import parse_write

if TYPE_CHECKING:
    from socket import socket

    from aiohttp.web import Application

    from podgpu.web.protection import Protection
    from podgpu.writers.health_writer import HealthWriter

_log = logging.getLogger("podgpu")
_MAX_BYTES = 256 * 1024
_ALL_FIELDS = ["*"]  # in `include` of a collection


@make_command(
    "exporter",
    ("podgpu exporter -k", "serve this node's GPUs with pod labels on :9400/metrics"),
    ("podgpu exporter -k --once", "print the metrics and exit"),
    ("podgpu exporter --telemetry simulated:2xH100 -a 127.0.0.1:9400", "try it without a GPU"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Export this node's GPUs to Prometheus. Accepts every flag and variable of dcgm-exporter."""
    options = resolve_options(ctx, options)
    once = options["once"]
    sockets = []
    if options["web_systemd_socket"] and not once:
        sockets = open_systemd_sockets(os.environ)
    # Loaded even with --once, so that users can find errors in these files before deployment.
    protection = load_protection(options["web_config_file"])
    prices = read_prices(options["prices"])
    push = read_push_settings(ctx, options, os.environ, kubernetes=options["kubernetes"])

    # The exporter must answer probes soon, so it waits only briefly for the API server. With --once
    # it waits longer.
    sync_seconds = SYNC_SECONDS if once else SOON_SECONDS
    with closing(ApiAccess(options["kubeconfig"], sync_seconds)) as api:
        agent = build_exporter_agent(options, api)
        for sentence in list_ignored_options(ctx, options["config"]):
            _log.warning("%s", sentence)
        if once:
            _print_once(agent, options)
            return

        recorder = node_recorder(agent, options["history_dir"], prices)
        app = application(
            agent,
            protection,
            options["web_enable_lifecycle"],
            SqlitePast(recorder, lambda: build_state(agent, prices)),
            prices,
            options["max_concurrent_scrapes"],
        )
        listeners = _make_listeners(options, agent, app, protection, sockets)

        services: list[Service] = [agent, recorder]

        health_writer = _make_health_writer(options, api, agent)
        if health_writer is not None:
            services.append(health_writer)
            agent.warnings.append(health_writer.warnings)

        if push is not None:
            services.append(node_pusher(agent, push))

        limits = ConnectionLimits(
            header_seconds=options["web_read_timeout"], write_seconds=options["web_write_timeout"]
        )
        run(
            services,
            listeners,
            release=partial(agent.release, DEFAULT_RELEASE_SECONDS),
            limits=limits,
        )


def _make_listeners(
    options: Options,
    agent: Agent,
    app: Application,
    protection: Protection | None,
    sockets: Sequence[socket],
) -> list[Listener]:
    """Returns the listeners for `app`, for probes and for gpu-manager's metrics."""
    tls = protection.make_tls if protection else None
    text = "listening on %s/metrics"
    main = Listener(app, options["address"], tls=tls, announcement=text, sockets=sockets)
    listeners = make_listeners(main, node_probes(agent), options["probe_address"])

    address = options["gpu_manager_address"]
    if address is not None:
        manager_app = gpu_manager_application(agent, protection)
        text = "serving only gpu-manager's metrics on %s/metric"
        listeners.append(Listener(manager_app, address, "--gpu-manager-address", tls, text))
    return listeners


def _make_health_writer(options: Options, api: ApiAccess, agent: Agent) -> HealthWriter | None:
    """Returns None if nothing is to be written. Raises UsageError if that is not possible."""
    wanted = parse_write(options["write"])
    if not wanted.arguments:
        return None
    # Imports protobuf and HTTP/2, which most exporters do not need.
    from podgpu.writers.health_writer import HealthWriter
    from podgpu.writers.node_lock import NodeLock
    from podgpu.writers.open_writers import make_session_opener

    def read() -> tuple[NodeState, bool]:
        published = agent.published
        return published.state, agent.is_fresh(published)

    config = api.config if wanted.needs_api else ApiConfig("", "no API server is used")
    opener = make_session_opener(wanted, config, api.node, agent.clock, options["path_nvsentinel"])
    return HealthWriter(
        read,
        opener,
        NodeLock(lock_directory(options)),
        options["idle_after"],
        agent.clock,
    )


def lock_directory(options: Options) -> str:
    """Returns the kubelet's directory, which all exporters of a node see."""
    path: str = options["pod_resources_kubelet_socket"]
    return os.path.dirname(os.path.abspath(path))


def resolve_options(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Merges the configuration file into the options.

    Adds `host_engine`: the parsed address of -r, or None. Raises UsageError if options contradict
    each other.
    """
    options = merge_config_file(ctx, options)
    engine = None
    if options["remote_hostengine_info"]:
        # Imports the DCGM client, which is optional.
        from podgpu.node.gpu.dcgm.connection import parse_address

        engine = parse_address(options["remote_hostengine_info"])

    # Used only with DCGM, but errors in them are reported with every source.
    parse_selection(options["switch_devices"], "-s")
    parse_selection(options["cpu_devices"], "-p")
    if options["gpu_manager_address"] and not options["gpu_manager_metrics"]:
        raise UsageError("--gpu-manager-address needs --gpu-manager-metrics")
    if options["kubernetes_virtual_gpus"] and not options["dcgm_holder_labels"]:
        raise UsageError("--kubernetes-virtual-gpus needs --dcgm-holder-labels")
    if parse_write(options["write"]).arguments and not options["kubernetes"]:
        raise UsageError("--write needs -k: it writes about the pods that hold the GPUs")
    return {**options, "host_engine": engine}


def list_ignored_options(ctx: click.Context, config: ConfigFile) -> list[str]:
    """Returns warnings about options and entries of the configuration file that have no effect.

    Omits options that are set to their default values.
    """
    warnings = []
    for option in EXPORTER_OPTIONS:
        value = str(ctx.params[option.parameter])
        if not option.works and value.lower() != option.default.lower():
            warnings.append(f"--{option.flag} ({option.env}) has no effect: {option.help}")
    warnings += config.ignored
    return warnings


def _print_once(agent: Agent, options: Options) -> None:
    try:
        agent.warm_up()
        published = agent.published
        print_out(published.fresh.plain)
        if not has_readings(published.state):
            raise StartError(
                f"no GPU could be read: {_explain_no_readings(published.state, options)}"
            )
    finally:
        agent.stop()


def _explain_no_readings(state: NodeState, options: Options) -> str:
    if state.gpus_visible and not state.devices:
        return f"-d {options['devices']} selects none of this node's GPUs"
    failed = [source.message for source in state.sources if source.up is False]
    return "; ".join(failed[:MOST_NAMED]) or "this node has no GPU"


# The configuration file. Flags and environment variables override it.


class ConfigFile(NamedTuple):
    options: Mapping[str, Any] = {}  # option -> value; None if the file does not set the option
    counters: tuple[CounterSpec, ...] | None = None  # None if the file lists no counters
    # Without the collection ['*'], whose interval is an option.
    collections: tuple[Collection, ...] = ()
    ignored: tuple[str, ...] = ()  # warnings about entries without effect


def merge_config_file(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with the values of the configuration file.

    Adds `config`, the parsed file.
    """
    path = options["config_file"]
    config = ConfigFile()
    if path:
        try:
            config = parse_config_file(read_bounded(path, _MAX_BYTES), path)
        except SourceError as e:
            raise UsageError(f"--config-file {e}") from e

    from_file: dict[str, Any] = {}
    for name, value in config.options.items():
        if value is not None and not is_set(ctx, name):
            from_file[name] = value

    # -f and -m override both ways in which the file can choose counters.
    if is_set(ctx, "collectors") or options["configmap_data"] != "none":
        config = config._replace(counters=None)
        from_file.pop("collectors", None)

    ctx.meta[FROM_FILE] = dict.fromkeys(from_file, path)
    return {**options, **from_file, "config": config}


_Text = Annotated[str, Meta(min_length=1)]


class _ConfigSection(Struct, rename="camel", forbid_unknown_fields=True):
    pass


class _ConfigField(_ConfigSection):
    name: _Text
    prometheus_type: _Text
    help: _Text


class _MetricsSection(_ConfigSection):
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


class _WatchGroup(_ConfigSection):
    name: _Text
    interval: str
    fields: Annotated[list[_Text], Meta(min_length=1)]
    retention: Any = None


class _CollectionV1(_ConfigSection):
    interval: str = ""
    watch_groups: list[_WatchGroup] = []
    retention: Any = None


class _Server(_ConfigSection):
    max_concurrent_scrapes: Annotated[int, Meta(ge=1, le=999_999_999)] | None = None


class _Config(_ConfigSection):
    version: Literal[1, 2]
    metrics: _MetricsSection | None = None
    collection: _CollectionV1 | None = None  # only version 1
    collections: Annotated[list[_ConfigCollection], Meta(min_length=1)] | None = None
    sources: Any = None  # accepted without effect
    server: _Server | None = None


def parse_config_file(content: bytes, path: str) -> ConfigFile:
    """Parses the configuration file. Raises UsageError if an entry is invalid."""
    config = decode_yaml(content, path, _Config)
    metrics = config.metrics or _MetricsSection()
    server = config.server or _Server()
    if metrics.file and metrics.fields:
        raise UsageError(f"{path}: metrics: set file or fields, not both")

    if config.version == 1:
        interval, collections = _read_watch_groups(config, path)
    else:
        interval, collections = _read_collections(config, path)

    options = {
        "collectors": metrics.file or None,
        "collect_interval": interval,
        "max_concurrent_scrapes": server.max_concurrent_scrapes,
        "enable_exporter_metrics": metrics.enable_exporter_metrics,
    }

    counters = None
    if metrics.fields:
        counters = _read_fields(metrics.fields, path)

    ignored: tuple[str, ...] = ()
    if config.sources:
        reason = "podgpu uses the newest sample, and always detects added and removed GPUs"
        ignored = (f"{path}: sources has no effect: {reason}",)
    return ConfigFile(options, counters, collections, ignored)


def _read_watch_groups(config: _Config, path: str) -> tuple[float | None, tuple[Collection, ...]]:
    """Returns the interval of all other fields, and the groups with their own interval."""
    if config.collections is not None:
        raise UsageError(f"{path}: version 1 has no collections: use collection, or version: 2")
    section = config.collection or _CollectionV1()
    place = f"{path}: collection"
    interval = None
    if section.interval:
        interval = _read_interval(section.interval, f"{place}.interval")

    _require_unique_names(section.watch_groups, f"{place}.watchGroups")
    collections = []
    for number, group in enumerate(section.watch_groups):
        position = f"{place}.watchGroups[{number}]"
        seconds = _read_interval(group.interval, f"{position}.interval")
        collections.append(Collection(group.name, seconds, tuple(group.fields), position))
    return interval, tuple(collections)


def _read_collections(config: _Config, path: str) -> tuple[float | None, tuple[Collection, ...]]:
    """Returns the interval of the collection of all fields (['*']), and the other collections."""
    if config.collection is not None:
        raise UsageError(f"{path}: version 2 has no collection: use collections, or version: 1")
    interval = None
    collections = []
    _require_unique_names(config.collections or (), f"{path}: collections")
    for number, row in enumerate(config.collections or ()):
        place = f"{path}: collections[{number}]"
        seconds = _read_interval(row.every, f"{place}.every")
        if row.metrics.include != _ALL_FIELDS:
            collections.append(Collection(row.name, seconds, tuple(row.metrics.include), place))
        elif interval is not None:
            raise UsageError(f"{place}: only one collection may include ['*']")
        else:
            interval = seconds
    return interval, tuple(collections)


def _require_unique_names(
    rows: Sequence[_ConfigField | _WatchGroup | _ConfigCollection], place: str
) -> None:
    names = set()
    for number, row in enumerate(rows):
        name = row.name.strip()
        if name in names:
            raise UsageError(f"{place}[{number}]: the name {name[:80]!a} is repeated")
        names.add(name)


def _read_interval(text: str, place: str) -> float:
    seconds = parse_duration(text)
    if seconds is None or not 0.1 <= seconds <= 86_400:
        problem = f"{text[:80]!a} is not a duration from 100ms to 24h, such as 1m30s"
        raise UsageError(f"{place}: {problem}")
    return seconds


def _read_fields(fields: Sequence[_ConfigField], path: str) -> tuple[CounterSpec, ...]:
    """Returns the counters.

    If two names stand for the same field, the first one is used, as in a counter file.
    """
    _require_unique_names(fields, f"{path}: metrics.fields")
    first: dict[int, CounterSpec] = {}
    for number, row in enumerate(fields):
        try:
            counter = make_counter(
                row.name.strip(), row.prometheus_type, " ".join(row.help.split())
            )
        except UsageError as e:
            raise UsageError(f"{path}: metrics.fields[{number}]: {e}") from None
        first.setdefault(counter.field.id, counter)
    return tuple(first.values())
