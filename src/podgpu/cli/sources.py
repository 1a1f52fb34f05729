"""Creates the telemetry, the allocation sources and the agent of a node from command-line options.

DCGM and the simulated driver are imported only when they are selected. This saves memory.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from podgpu.cli.options import Options, split_list
from podgpu.clock import Clock
from podgpu.errors import UsageError
from podgpu.http_client import DEFAULT_TIMEOUT, Access, redact_url
from podgpu.metrics.counters import add_other_names
from podgpu.metrics.fields import HOST_LABELS, NameSet
from podgpu.metrics.labels import Policy
from podgpu.model import PodLabels
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.agent.device_selection import parse_selection
from podgpu.node.agent.schedule import (
    CounterSpecs,
    ReadCounters,
    counters_in_configmap,
    read_counters,
)
from podgpu.node.gpu.nvml.kernel_log import DEFAULT_PATH as DEFAULT_KMSG
from podgpu.node.gpu.nvml.kernel_log import KernelLog, open_kernel_log
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry, count_pci_gpus
from podgpu.node.gpu.nvml.switch_splitter import SwitchLogFactory
from podgpu.node.gpu.remote_exporter import (
    ExporterTelemetry,
    ExpositionSource,
    open_exposition_source,
)
from podgpu.node.gpu.source import Telemetry
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.annotations import AnnotationsAllocation
from podgpu.node.holders.api import ApiAccess, ApiHealth, LabelFilter, open_if_api
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.node_files import (
    CHECKPOINT_NAME,
    DEFAULT_PATHS,
    CheckpointAllocation,
    HpcAllocation,
    PodlistAllocation,
    ProcessHolders,
)
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder, in_host_pid_namespace, read_living

if TYPE_CHECKING:
    from podgpu.labs.simulate.simulated_driver import SimulatedNvml
    from podgpu.node.holders.dra import DraClaims

_log = logging.getLogger("podgpu")
DEFAULT_SPEC = "8xH100"


def node_name() -> str:
    """Returns the environment variable NODE_NAME, or else the host name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


def _find_node_name(options: Options) -> str:
    """Like `node_name`, but a remote DCGM reads the GPUs of its own host."""
    engine = options["host_engine"]
    # With -k, the kubelet of this node says who holds the GPUs, so they are GPUs of this node.
    if engine is None or engine.is_local or options["kubernetes"]:
        return node_name()
    return os.environ.get("NODE_NAME") or engine.host


def build_exporter_agent(
    options: Options, api: ApiAccess, telemetry: Telemetry | None = None, clock: Clock | None = None
) -> Agent:
    """Builds the agent of the exporter.

    Without `telemetry`, opens the source that --telemetry names.
    """
    counters, read_again = choose_counters(options)
    selection = parse_selection(options["devices"])
    telemetry = telemetry or open_telemetry(options["telemetry"], options)
    configmap = options["configmap_data"]
    if configmap != "none":
        text = open_if_api("configmap-data", lambda: api.watch_configmap(configmap))
        if text is not None:
            read_again = counters_in_configmap(configmap, text, options["dcgm_names"])

    node = _find_node_name(options)
    settings = Settings(
        node_name=node,
        interval=options["collect_interval"],
        allocation_interval=options["allocation_interval"],
        collections=options["config"].collections,
        skip_empty=configmap != "none",
        selection=selection,
        policy=_make_policy(options, counters, node),
    )

    # Opens a watch, so it comes before `make_holders`.
    pod_labels = _make_label_reader(options, api)
    holders = make_holders(options, api, telemetry)
    containers = None
    if options["usage_from"] != "none":
        containers = make_finder(options)
    agent = Agent(
        telemetry,
        holders,
        settings,
        clock,
        pod_labels=pod_labels,
        read_counters=read_again,
        containers=containers,
        kernel_log=_open_kernel_log(options, clock or Clock()),
    )
    agent.check_selection()
    agent.read_counters()
    return agent


def _make_policy(options: Options, counters: CounterSpecs, node: str) -> Policy:
    names: NameSet = options["dcgm_names"]
    host_labels = HOST_LABELS[names]
    if options["hostname_label"] != "auto":
        host_labels = (options["hostname_label"],)
    return Policy(
        counters=counters,
        hostname="" if options["no_hostname"] else node,
        hostname_labels=host_labels,
        old_namespace=options["use_old_namespace"],
        replace_blanks_in_model_name=options["replace_blanks_in_model_name"],
        pod_uid=options["kubernetes_enable_pod_uid"],
        dcgm_holders=options["dcgm_holder_labels"],
        virtual_gpus=options["kubernetes_virtual_gpus"],
        copy_parent_values=options["mig_copy_parent_values"],
        gpu_manager=options["gpu_manager_metrics"],
        wait_pairs=options["wait_pairs"],
        process_metrics=options["enable_exporter_metrics"],
        xid_window_ms=round(1000 * options["xid_count_window_size"]),
        clock_window_ms=round(1000 * options["clock_events_count_window_size"]),
    )


def choose_counters(options: Options) -> tuple[CounterSpecs, ReadCounters | None]:
    """Returns the counters of the configuration file, or else of `-f`.

    The second value is a function that reads the counters again, or None if they cannot change.
    """
    counters = options["config"].counters
    if counters is not None:
        return add_other_names(counters, options["dcgm_names"]), None
    return read_counters(options["collectors"], options["dcgm_names"])


def _make_label_reader(options: Options, api: ApiAccess) -> Callable[[], PodLabels]:
    label_filter = LabelFilter(options["kubernetes_pod_label_allowlist_regex"])
    if not options["kubernetes_enable_pod_labels"]:
        return dict

    pods = open_if_api("kubernetes-enable-pod-labels", api.watch_pods)
    if pods is None:
        return dict
    return lambda: label_filter.select(pods.items())


def make_holders(options: Options, api: ApiAccess, telemetry: Telemetry) -> HolderSources:
    """Creates the allocation sources.

    Call it after all watches are open: the last source reports their health.
    """
    sources = make_allocations(options, api, telemetry)
    if api.feeds:
        sources.append(ApiHealth(api.feeds))
    identities = make_identities(options, api)
    return HolderSources(sources, identities.read, partial(read_living, options["path_proc"]))


def make_finder(options: Options) -> ContainerFinder:
    """Creates the finder of process owners.

    Without -k and --allocation, it also finds Linux users and jobs.
    """
    is_plain = not options["kubernetes"] and options["allocation"] == "auto"
    return ContainerFinder(options["path_proc"], finds_users=is_plain)


def _open_kernel_log(options: Options, clock: Clock) -> KernelLog | None:
    """Returns None if the log cannot be read, or is not needed."""
    if options["usage_from"] == "none":
        return None
    # The machine's log says nothing about simulated GPUs.
    if _is_simulated(options) and options["path_kmsg"] == DEFAULT_KMSG:
        return None
    return open_kernel_log(options["path_kmsg"], clock.wall)


def _is_simulated(options: Options) -> bool:
    telemetry: str = options.get("telemetry", "")
    return telemetry.partition(":")[0] == "simulated"


def make_identities(options: Options, api: ApiAccess) -> IdentityReader:
    logs = options["path_varlog"]
    return IdentityReader(
        os.path.join(logs, "pods"), os.path.join(logs, "containers"), api.known_pods
    )


# Allocation sources


SOURCES = ("annotations", "podlist", "kubelet", "checkpoint", "hpc", "processes")
"""Sources in order of precedence for `auto`.

Schedulers come first, because HAMi assigns other GPUs than the kubelet lists.
"""
SOURCES_WITH_ARGUMENT = ("podlist", "checkpoint", "hpc")


def make_allocations(
    options: Options, api: ApiAccess, telemetry: Telemetry
) -> list[AllocationSource]:
    """Creates the sources of `--allocation`. Raises UsageError if it is invalid.

    Without -k, `auto` means `hpc`.
    """
    sources = []
    if options["allocation"] != "auto":
        for entry in options["allocation"].split(","):
            sources.append(_create_source(entry.strip(), options, api, telemetry))
        return sources

    candidates = SOURCES if options["kubernetes"] else ("hpc",)
    names = [name for name in candidates if _is_present(name, options, api)]
    if names:
        _log.info("allocation sources: %s", ", ".join(names))
    for name in names:
        try:
            sources.append(_create_source(name, options, api, telemetry))
        except UsageError as error:
            _log.warning("--allocation auto (%s): %s; continuing without it", name, error)
    return sources


def _is_present(name: str, options: Options, api: ApiAccess) -> bool:
    """Returns True if `--allocation auto` uses the source on this node."""
    match name:
        case "annotations":
            return api.is_available
        case "podlist":
            return any(map(os.path.exists, _podlist_paths(options)))
        case "checkpoint":
            # It can be outdated, so it is used only if the kubelet's socket does not exist.
            if os.path.exists(options["pod_resources_kubelet_socket"]):
                return False
            return os.path.exists(_in_kubelet_directory(CHECKPOINT_NAME, options))
        case "hpc":
            return bool(options["hpc_job_mapping_dir"])
        case "processes":
            return _sees_processes(options)
    # The kubelet. If it cannot be read, this is reported.
    return True


def _create_source(
    entry: str, options: Options, api: ApiAccess, telemetry: Telemetry
) -> AllocationSource:
    """`entry`: the name of a source, or name:argument."""
    name, _, argument = entry.partition(":")
    if argument and name in SOURCES and name not in SOURCES_WITH_ARGUMENT:
        raise UsageError(f"--allocation {name} takes no argument, but {argument!r} was given")

    resource_names = frozenset(split_list(options["nvidia_resource_names"]))
    match name:
        case "annotations":
            return AnnotationsAllocation(api.watch_pods())
        case "podlist":
            paths = [argument] if argument else _podlist_paths(options)
            return PodlistAllocation(paths)
        case "kubelet":
            # Imports protobuf and h2, which is slow.
            from podgpu.node.holders.kubelet import KubeletAllocation

            socket_path = options["pod_resources_kubelet_socket"]
            claims = None
            if options["kubernetes_enable_dra"]:
                claims = _create_claims(options, api)
            return KubeletAllocation(socket_path, resource_names, claims=claims)
        case "checkpoint":
            path = argument or _in_kubelet_directory(CHECKPOINT_NAME, options)
            return CheckpointAllocation(path, resource_names)
        case "hpc":
            directory = argument or options["hpc_job_mapping_dir"]
            if directory:
                return HpcAllocation(directory)
            raise UsageError(
                "--allocation hpc: set the directory of the job files, as in hpc:/run/dcgm-job-map"
            )
        case "processes":
            return ProcessHolders(telemetry.processes, ContainerFinder(options["path_proc"]))
    raise UsageError(
        f"--allocation {entry!r}: unknown source; write auto alone, or some of {', '.join(SOURCES)}"
    )


def _podlist_paths(options: Options) -> tuple[str, ...]:
    """Returns the file beside the kubelet's socket. Its usual place has alternatives."""
    path = os.path.join(os.path.dirname(options["pod_resources_kubelet_socket"]), "podlist.json")
    if os.path.normpath(path) == DEFAULT_PATHS[0]:
        return DEFAULT_PATHS
    return (path,)


def _in_kubelet_directory(name: str, options: Options) -> str:
    socket_directory = os.path.dirname(os.path.abspath(options["pod_resources_kubelet_socket"]))
    return os.path.join(os.path.dirname(socket_directory), name)


def _create_claims(options: Options, api: ApiAccess) -> DraClaims | None:
    """Creates the mapping of DRA claims.

    Without an API server, it uses the driver's checkpoint, or returns None.
    """
    from podgpu.node.holders.dra import (
        DRIVER_CHECKPOINT,
        ClaimReader,
        DraClaims,
        DriverCheckpoint,
        watch_slices,
    )

    path = _in_kubelet_directory(DRIVER_CHECKPOINT, options)
    slices = open_if_api("kubernetes-enable-dra", lambda: watch_slices(api))
    if slices is None:
        if not os.path.exists(path):
            return None
        return DraClaims(None, DriverCheckpoint(path))
    return DraClaims(slices, DriverCheckpoint(path), ClaimReader(api.config), api.known_pods)


# Telemetry sources. Commands other than the exporter have only some of its options.


def _open_nvml(argument: str, options: Options) -> Telemetry:
    if argument:
        shown = redact_url(argument)
        raise UsageError(f"--telemetry nvml takes no argument, but {shown} was given")
    return _make_nvml(options)


def _make_nvml(options: Options) -> NvmlTelemetry:
    return NvmlTelemetry(
        count_expected=_make_gpu_counter(options),
        sees_processes=in_host_pid_namespace(),
        switch_logs=_make_switch_logs(options),
    )


def _make_gpu_counter(options: Options) -> Callable[[], int | None]:
    """Returns a function that counts the GPUs on the PCI bus."""
    return partial(count_pci_gpus, options.get("path_sysfs", "/sys"))


def _make_switch_logs(options: Options) -> SwitchLogFactory:
    wanted = options.get("usage_from", "none")
    # With none, or in commands without this option, no context switches are read.
    if wanted == "none":
        wanted = "samples"
    return SwitchLogFactory(wanted)


def simulated_driver(spec: str) -> SimulatedNvml:
    """Creates a simulated driver. The UUIDs of its GPUs depend on the node's name.

    `spec`: such as `8xH100`, which is the default if it is empty.
    """
    from podgpu.labs.simulate.simulated_driver import SimulatedNvml

    return SimulatedNvml(spec or DEFAULT_SPEC, node=node_name())


def _open_simulated(argument: str, options: Options) -> Telemetry:
    from podgpu.labs.simulate.simulated_driver import read_simulated
    from podgpu.labs.simulate.simulated_node import place_loads, tenants

    driver = simulated_driver(argument)
    place_loads(driver, tenants(driver))
    return read_simulated(driver, Clock(), _make_switch_logs(options), _sees_processes(options))


def _sees_processes(options: Options) -> bool:
    proc = options["path_proc"]
    # Simulated processes are not in the real /proc. Their pods would look idle.
    if _is_simulated(options) and proc == "/proc":
        return False
    return in_host_pid_namespace(proc)


def _open_dcgm(library: str, options: Options) -> Telemetry:
    from podgpu.node.gpu.dcgm.dcgm_telemetry import DcgmSettings, DcgmTelemetry

    engine = options.get("host_engine")
    # `podgpu top` has --interval instead of --collect-interval.
    interval = options.get("collect_interval", options.get("interval", 30.0))
    log_level = ""
    if options.get("enable_dcgm_log"):
        log_level = options.get("dcgm_log_level", "")
    # Commands without -s and -p read all switches and CPUs: f.
    settings = DcgmSettings(
        address=engine,
        interval=interval,
        log_level=log_level,
        switches=parse_selection(options.get("switch_devices", "f"), "-s"),
        cpus=parse_selection(options.get("cpu_devices", "f"), "-p"),
        library=library,
    )

    if engine is not None and not engine.is_local:
        # This machine's driver cannot read the GPUs of another machine.
        return DcgmTelemetry(settings)
    return DcgmTelemetry(settings, _make_nvml(options), _make_gpu_counter(options))


def open_exposition(place: str, options: Options) -> ExpositionSource:
    """Opens the metrics of another exporter. `place`: a URL or the path of a file."""
    access = Access.from_options(options, "exporter")
    # Ends before the deadline of the reading, because the message of this timeout is more specific.
    # The deadline is the interval, but at least 1 s.
    deadline = max(1.0, options.get("collect_interval", DEFAULT_TIMEOUT))
    timeout = min(DEFAULT_TIMEOUT, 0.8 * deadline)
    return open_exposition_source(place, access, timeout=timeout)


def _open_exporter(argument: str, options: Options) -> Telemetry:
    if not argument:
        raise UsageError("--telemetry exporter needs an address, such as exporter:localhost:9400")
    by_name = options.get("kubernetes_gpu_id_type") == "device-name"
    return ExporterTelemetry(
        open_exposition(argument, options), _make_nvml(options), device_name_ids=by_name
    )


TELEMETRIES: Mapping[str, Callable[[str, Options], Telemetry]] = {
    "auto": _open_nvml,
    "nvml": _open_nvml,
    "dcgm": _open_dcgm,
    "exporter": _open_exporter,
    "simulated": _open_simulated,
}


def open_telemetry(chosen: str, options: Options) -> Telemetry:
    """Opens a source of GPU values. `chosen`: value of --telemetry, NAME[:ARGUMENT]."""
    name, _, argument = chosen.partition(":")
    if name not in TELEMETRIES:
        valid = ", ".join(TELEMETRIES)
        raise UsageError(f"--telemetry {redact_url(chosen)}: unknown source; valid are {valid}")
    engine = options.get("host_engine")
    if engine is not None and name == "auto":
        name = "dcgm"
    if engine is not None and name != "dcgm":
        _log.warning("-r %s is ignored, because --telemetry is %s", engine.text, name)
    return TELEMETRIES[name](argument, options)
