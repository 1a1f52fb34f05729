"""Builds agents from options: telemetry, sources of holders, counters and labels.

Each telemetry source is imported when it is selected: DCGM and the simulated driver are not loaded otherwise.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podgpu.agent.allocation_turn import ReadIdentities, ReadLiveness
from podgpu.agent.api_access import ApiAccess, ApiHealth, open_exposition, unless_no_api
from podgpu.agent.collections import DEFAULT_RETENTION, ConfigFile, SampleRetention
from podgpu.agent.counter_feeds import CounterFeed, FileCounters
from podgpu.agent.loop import Agent, Settings
from podgpu.agent.pod_labels import LabelFilter
from podgpu.device_selection import parse_selection
from podgpu.errors import SourceError, UsageError
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.cache import LivenessProbe
from podgpu.holders.identity import IdentityReader
from podgpu.holders.sources import SourceSettings, create_sources
from podgpu.http_client import redact_url
from podgpu.metrics.counters import SHIPPED, Counter, make_counter
from podgpu.metrics.counters import Naming as DcgmNaming
from podgpu.metrics.render import Policy
from podgpu.model import PodLabels
from podgpu.usage.containers import ContainerFinder, read_living

if TYPE_CHECKING:
    from podgpu.clock import Clock
    from podgpu.gpu.nvml.switch_splitter import SwitchLogFactory
    from podgpu.simulate.driver import SimulatedNvml

_log = logging.getLogger("podgpu")
_COUNTERS_DIRECTORY = "/etc/dcgm-exporter"
DEFAULT_SPEC = "8xH100"
Options = Mapping[str, Any]
Naming = Callable[[str], AbstractContextManager[None]]
"""Context manager that adds the origin of a parameter's value to a UsageError."""


def node_name(default: str = "") -> str:
    """NODE_NAME, else `default`, else the name of this machine."""
    return os.environ.get("NODE_NAME") or default or socket.gethostname()


def _no_naming(_parameter: str) -> AbstractContextManager[None]:
    return nullcontext()


def exporter_agent(
    options: Options,
    api: ApiAccess,
    naming: Naming = _no_naming,
    telemetry: Telemetry | None = None,
    clock: Clock | None = None,
) -> Agent:
    """Builds the exporter's agent. Tests pass their own telemetry and clock. Raises UsageError."""
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
    """Builds an agent from its parts."""
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
    """NODE_NAME, else the name of the host engine's machine, else of this machine."""
    engine = options["host_engine"]
    is_remote = engine is not None and not engine.is_local and not options["kubernetes"]
    return node_name(engine.host if is_remote else "")


def retention_of(options: Options) -> SampleRetention:
    """Retention of DCGM's samples, unless a collection overrides it."""
    given = SampleRetention(options.get("watch_max_keep_age"), options.get("watch_max_keep_samples"))
    return given.over(DEFAULT_RETENTION)


# Counters


def choose_counters(options: Options) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    """The counters of the configuration file, else of `-f`."""
    config: ConfigFile | None = options.get("config")
    if config is not None and config.counters is not None:
        naming = dcgm_naming(options)
        rows = (make_counter(c.name, c.type, c.help) for c in config.counters)
        return naming.of_user(tuple(rows)), None
    return read_counters(options["collectors"], dcgm_naming(options))


def read_counters(
    chosen: str,
    naming: DcgmNaming = DcgmNaming(),  # noqa: B008 - frozen
) -> tuple[tuple[Counter, ...], CounterFeed | None]:
    """The counters of `-f` (the name of a shipped set, none, or a file), and the feed of their changes."""
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
            raise UsageError(f"-f {path}: no such file; give a CSV, or one of {', '.join(SHIPPED)}, none") from None
    _log.info("%s does not exist: using podgpu's copy", path)
    return ours, None


# Holders


@dataclass(frozen=True)
class Holders:
    """The sources of holders, their identities and the liveness of their containers."""

    sources: list[AllocationSource]
    identities: ReadIdentities
    liveness: ReadLiveness | None = None


def make_holders(options: Mapping[str, Any], api: ApiAccess, telemetry: Telemetry) -> Holders:
    """Raises UsageError. Must be called last, because it adds the health of all watches opened before."""
    sources = make_allocations(options, api, telemetry)
    if api.feeds:
        sources.append(ApiHealth(api.feeds))
    probe = LivenessProbe(*_log_directories(options), partial(read_living, options["path_proc"]))
    return Holders(sources, make_identities(options, api).read, probe.read)


def make_allocations(options: Mapping[str, Any], api: ApiAccess, telemetry: Telemetry) -> list[AllocationSource]:
    settings = SourceSettings(
        api=api,
        processes=telemetry.processes,
        kubelet_socket=options["pod_resources_kubelet_socket"],
        resource_names=resource_names(options),
        enable_dra=options["kubernetes_enable_dra"],
        job_directory=options["hpc_job_mapping_dir"],
        proc=options["path_proc"],
    )
    return create_sources(options["allocation"], settings, options["kubernetes"])


def resource_names(options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name.strip() for name in options["nvidia_resource_names"].split(",") if name.strip())


def make_identities(options: Mapping[str, Any], api: ApiAccess) -> IdentityReader:
    return IdentityReader(*_log_directories(options), pods=api.known_pods)


def _log_directories(options: Mapping[str, Any]) -> tuple[str, str]:
    return os.path.join(options["path_varlog"], "pods"), os.path.join(options["path_varlog"], "containers")


# Telemetry


def _nvml(argument: str, options: Options) -> Telemetry:
    from podgpu.gpu.nvml import NvmlTelemetry
    from podgpu.usage.containers import in_host_pid_namespace

    if argument:
        raise UsageError(f"--telemetry nvml takes no argument, not {redact_url(argument)}")
    return NvmlTelemetry(
        count_expected=_bus(options), sees_processes=in_host_pid_namespace() is True, switch_logs=_switch_logs(options)
    )


def _bus(options: Options) -> Callable[[], int | None]:
    """Counts the GPUs on the PCI bus of this machine."""
    from podgpu.gpu.pci import count_pci_gpus

    return partial(count_pci_gpus, options.get("path_sysfs", "/sys"))


def _switch_logs(options: Options, **how: Any) -> SwitchLogFactory | None:
    """None: context switches are not read. `how` replaces the log of a simulated driver."""
    wanted = options.get("usage_from", "samples")
    if wanted == "samples" and not how:
        return None
    from podgpu.gpu.nvml.switch_splitter import SwitchLogFactory

    return SwitchLogFactory(wanted, **how)


def simulated_driver(spec: str = "") -> SimulatedNvml:
    """A simulated driver whose GPUs have UUIDs of their own on each node."""
    from podgpu.simulate.driver import SimulatedNvml

    return SimulatedNvml(spec or DEFAULT_SPEC, node=node_name())


def _simulated(argument: str, options: Options) -> Telemetry:
    from podgpu.gpu.nvml import NvmlTelemetry
    from podgpu.simulate.node import place_loads, tenants

    driver = simulated_driver(argument)
    place_loads(driver, tenants(driver))
    count = len(driver.gpus)
    switch_logs = _switch_logs(
        options, open_log=lambda device, _version: driver.switch_log(device.uuid), privileged=lambda: True
    )
    return NvmlTelemetry(driver, "simulated", count_expected=lambda: count, switch_logs=switch_logs)


def _dcgm(argument: str, options: Options) -> Telemetry:
    from podgpu.gpu.dcgm import DcgmSettings, DcgmTelemetry

    engine = options.get("host_engine")
    settings = DcgmSettings(
        address=engine,
        interval=options.get("collect_interval", options.get("interval", 30.0)),
        log_level=options.get("dcgm_log_level", "") if options.get("enable_dcgm_log") else "",
        switches=parse_selection(options.get("switch_devices", "f"), "-s"),
        cpus=parse_selection(options.get("cpu_devices", "f"), "-p"),
        library=argument,
    )
    if engine is not None and not engine.is_local:  # other GPUs than this machine's
        return DcgmTelemetry(settings)
    return DcgmTelemetry(settings, _nvml("", options), _bus(options))


def _exporter(argument: str, options: Options) -> Telemetry:
    from podgpu.gpu.exporter import ExporterTelemetry

    if not argument:
        raise UsageError("--telemetry exporter: give an address, such as exporter:localhost:9400")
    by_name = options.get("kubernetes_gpu_id_type") == "device-name"
    return ExporterTelemetry(open_exposition(argument, options), _nvml("", options), device_name_ids=by_name)


TELEMETRIES: Mapping[str, Callable[[str, Options], Telemetry]] = {
    "auto": _nvml,
    "nvml": _nvml,
    "dcgm": _dcgm,
    "exporter": _exporter,
    "simulated": _simulated,
}


def open_telemetry(chosen: str, options: Options | None = None) -> Telemetry:
    """Opens `--telemetry NAME[:ARGUMENT]`. Raises UsageError."""
    name, _, argument = chosen.partition(":")
    if name not in TELEMETRIES:
        raise UsageError(f"--telemetry {redact_url(chosen)}: unknown source; valid are {', '.join(TELEMETRIES)}")
    engine = (options or {}).get("host_engine")
    if engine is not None and name == "auto":
        name = "dcgm"
    if engine is not None and name != "dcgm":
        _log.warning("-r %s: not used, because --telemetry is %s", engine.text, name)
    return TELEMETRIES[name](argument, options or {})
