"""Assembles agents: the exporter's from its options, those of `podgpu top` and of the demo from their parts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podgpu.agent.collections import DEFAULT_RETENTION, ConfigFile, SampleRetention
from podgpu.agent.counter_feeds import CounterFeed, FileCounters
from podgpu.agent.loop import Agent, Settings
from podgpu.agent.pod_labels import LabelFilter
from podgpu.compose.allocations import Holders, make_holders
from podgpu.compose.process import node_name
from podgpu.compose.servers import ApiAccess, unless_no_api
from podgpu.compose.telemetries import open_telemetry
from podgpu.device_selection import parse_selection
from podgpu.errors import SourceError, UsageError
from podgpu.metrics.counters import SHIPPED, Counter, make_counter
from podgpu.metrics.counters import Naming as DcgmNaming
from podgpu.metrics.render import Policy
from podgpu.model import PodLabels
from podgpu.usage.containers import ContainerFinder

if TYPE_CHECKING:
    from podgpu.clock import Clock
    from podgpu.gpu.source import Telemetry

_log = logging.getLogger("podgpu")
_COUNTERS_DIRECTORY = "/etc/dcgm-exporter"
Options = Mapping[str, Any]
Naming = Callable[[str], AbstractContextManager[None]]
"""Given a parameter's name: adds to a usage error raised inside where the parameter's value came from."""


def _no_naming(_parameter: str) -> AbstractContextManager[None]:
    return nullcontext()


def exporter_agent(
    options: Options,
    api: ApiAccess,
    naming: Naming = _no_naming,
    telemetry: Telemetry | None = None,
    clock: Clock | None = None,
) -> Agent:
    """Assembles what the exporter serves. Tests bring GPUs and time of their own; all else is as in the field."""
    with naming("collectors"):
        counters, counter_feed = choose_counters(options)
    with naming("devices"):
        selection = parse_selection(options["devices"])
    with naming("telemetry"):
        telemetry = telemetry or open_telemetry(options["telemetry"], options)
    with naming("configmap_data"):
        if options["configmap_data"] != "none":
            configmap = unless_no_api(
                "configmap-data", lambda: api.configmap(options["configmap_data"], dcgm_naming(options))
            )
            counter_feed = configmap or counter_feed
    config = options.get("config", ConfigFile(""))
    settings = Settings(
        interval=options["collect_interval"],
        allocation_interval=options["allocation_interval"],
        usage_interval=options["usage_interval"],
        collections=config.collections,
        counters_may_come=options["configmap_data"] != "none",
        retention=retention_of(options),
        selection=selection,
        policy=_exporter_policy(options, counters),
    )
    pod_labels = _pod_labels(options, api)
    with naming("allocation"):
        holders = make_holders(options, api, telemetry)
    finder = ContainerFinder(options["path_proc"]) if options["container_usage"] else None
    agent = assemble_agent(telemetry, holders, settings, finder, clock, pod_labels, counter_feed)
    with naming("devices"):
        agent.check_selection()
    agent.read_counters()
    return agent


def assemble_agent(
    telemetry: Telemetry,
    holders: Holders,
    settings: Settings,
    finder: ContainerFinder | None,
    clock: Clock | None = None,
    pod_labels: Callable[[], PodLabels] = dict,
    counter_feed: CounterFeed | None = None,
) -> Agent:
    """Whoever's it is; the demo brings all of it itself."""
    return Agent(
        telemetry,
        holders.sources,
        settings,
        clock,
        identities=holders.identities,
        pod_labels=pod_labels,
        counter_feed=counter_feed,
        containers=finder,
        liveness=holders.liveness,
    )


# What is on the series


def _exporter_policy(options: Options, counters: tuple[Counter, ...]) -> Policy:
    return Policy(
        counters=counters,
        hostname="" if options["no_hostname"] else hostname(options),
        hostname_labels=_host_labels(options),
        old_namespace=options["use_old_namespace"],
        replace_blanks_in_model_name=options["replace_blanks_in_model_name"],
        pod_uid=options["kubernetes_enable_pod_uid"],
        virtual_gpus=options["kubernetes_virtual_gpus"],
        copy_parent_values=options["mig_copy_parent_values"],
        gpu_manager=options["gpu_manager_metrics"],
        process_metrics=options["path_proc"] if options.get("enable_exporter_metrics") else "",
        xid_window_ms=round(options["xid_count_window_size"] * 1000),
        clock_window_ms=round(options["clock_events_count_window_size"] * 1000),
    )


def dcgm_naming(options: Options) -> DcgmNaming:
    return DcgmNaming(options["dcgm_names"])


def _host_labels(options: Options) -> tuple[str, ...]:
    chosen = options["hostname_label"]
    return dcgm_naming(options).host_labels if chosen == "auto" else (chosen,)


def _pod_labels(options: Options, api: ApiAccess) -> Callable[[], PodLabels]:
    patterns = LabelFilter(options["kubernetes_pod_label_allowlist_regex"])
    if not options["kubernetes_enable_pod_labels"]:
        return dict
    pods = unless_no_api("kubernetes-enable-pod-labels", api.pods)
    return dict if pods is None else lambda: patterns.of(pods.items())


def hostname(options: Options) -> str:
    """NODE_NAME, else the host's; outside Kubernetes the figures of another host's engine carry that host's name."""
    engine = options["host_engine"]
    elsewhere = engine.host if engine is not None and not engine.is_local and not options["kubernetes"] else ""
    return node_name(elsewhere)


def retention_of(options: Options) -> SampleRetention:
    """Of DCGM's samples, where no collection says otherwise."""
    said = SampleRetention(options.get("watch_max_keep_age"), options.get("watch_max_keep_samples"))
    return said.over(DEFAULT_RETENTION)


# Counters


def choose_counters(options: Options) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    """Those that stand in the configuration file, else those of `-f`."""
    config: ConfigFile | None = options.get("config")
    if config is not None and config.counters is not None:
        naming = dcgm_naming(options)
        written = (make_counter(c.name, c.type, c.help) for c in config.counters)
        return naming.of_user(tuple(written)), None
    return read_counters(options["collectors"], dcgm_naming(options))


def read_counters(
    chosen: str,
    naming: DcgmNaming = DcgmNaming(),  # noqa: B008 - frozen
) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    """The counters of `-f` (a shipped set by name, none, or a file), and where to look for changes of them."""
    if chosen == "none":
        return (), None
    if not chosen:
        default = f"{_COUNTERS_DIRECTORY}/{SHIPPED['default']}"
        chosen = default if os.path.exists(default) else "default"
    shipped = naming.shipped(chosen)
    return (shipped, None) if shipped is not None else _read_counter_file(Path(chosen), naming)


def _read_counter_file(path: Path, naming: DcgmNaming) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    feed = FileCounters(str(path), naming)
    try:
        return feed.read(), feed
    except SourceError as e:
        ours = naming.shipped(path.name) if str(path.parent) == _COUNTERS_DIRECTORY else None
        if e.reason != "file_missing":
            raise UsageError(str(e) if e.reason == "malformed" else f"-f {e}") from e
        if ours is None:
            raise UsageError(f"-f {path}: no such file; name a CSV, or one of {', '.join(SHIPPED)}, none") from None
    _log.info("%s is not here: using the copy that comes with podgpu", path)
    return ours, None
