"""This module has the table that names the telemetry sources: `--telemetry NAME[:ARGUMENT]`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from podgpu.compose.process import node_name
from podgpu.device_selection import parse_selection
from podgpu.errors import UsageError
from podgpu.gpu.source import Telemetry
from podgpu.http_client import redact_url

if TYPE_CHECKING:
    from podgpu.gpu.nvml.switch_splitter import SwitchLogFactory
    from podgpu.simulate.driver import SimulatedNvml

_log = logging.getLogger(__name__)
DEFAULT_SPEC = "8xH100"
Options = Mapping[str, Any]


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
    """How context switches are read, if they are. A simulated driver's own way (`how`) is known all the same: the
    doctor would look for a real log otherwise."""
    wanted = options.get("usage_from", "samples")
    if wanted == "samples" and not how:
        return None
    from podgpu.gpu.nvml.switch_splitter import SwitchLogFactory

    return SwitchLogFactory(wanted, **how)


def simulated_driver(spec: str = "") -> SimulatedNvml:
    """With GPUs that no other node has."""
    from podgpu.simulate.driver import SimulatedNvml

    return SimulatedNvml(spec or DEFAULT_SPEC, node=node_name())


def _simulated(argument: str, options: Options) -> Telemetry:
    from podgpu.gpu.nvml import NvmlTelemetry
    from podgpu.simulate.node import place_loads, tenants

    driver = simulated_driver(argument)
    place_loads(driver, tenants(driver))
    count = len(driver.machine.gpus)
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
    if engine is not None and not engine.is_local:  # this machine's bus and driver say nothing of its GPUs
        return DcgmTelemetry(settings)
    return DcgmTelemetry(settings, _nvml("", options), _bus(options))


def _exporter(argument: str, options: Options) -> Telemetry:
    from podgpu.compose.servers import open_exposition
    from podgpu.gpu.exporter import ExporterTelemetry

    if not argument:
        raise UsageError("--telemetry exporter: name its address, as in exporter:localhost:9400")
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
    """`options`: the exporter's, for sources that need more than their argument."""
    name, _, argument = chosen.partition(":")
    if name not in TELEMETRIES:
        raise UsageError(f"--telemetry {redact_url(chosen)}: unknown source; there are {', '.join(TELEMETRIES)}")
    engine = (options or {}).get("host_engine")
    if engine is not None and name == "auto":
        name = "dcgm"
    if engine is not None and name != "dcgm":
        _log.warning("-r %s: not used, since figures come from --telemetry %s", engine.text, name)
    return TELEMETRIES[name](argument, options or {})
