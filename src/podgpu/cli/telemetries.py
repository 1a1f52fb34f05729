"""The table that names the telemetry sources: `--telemetry NAME[:ARGUMENT]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from podgpu.errors import UsageError
from podgpu.telemetry.source import Telemetry

DEFAULT_SPEC = "8xH100"


def _nvml(argument: str) -> Telemetry:
    from podgpu.accounting.containers import in_host_pid_namespace
    from podgpu.telemetry.nvml import NvmlTelemetry

    if argument:
        raise UsageError(f"--telemetry nvml takes no argument, not {argument!r}")
    return NvmlTelemetry(sees_processes=in_host_pid_namespace() is True)


def _simulated(argument: str) -> Telemetry:
    from podgpu.simulate.driver import SimulatedNvml
    from podgpu.simulate.node import place_loads, tenants
    from podgpu.telemetry.nvml import NvmlTelemetry

    driver = SimulatedNvml(argument or DEFAULT_SPEC)
    place_loads(driver, tenants(driver))
    count = len(driver.machine.gpus)
    return NvmlTelemetry(driver, "simulated", count_expected=lambda: count)


TELEMETRIES: Mapping[str, Callable[[str], Telemetry]] = {"auto": _nvml, "nvml": _nvml, "simulated": _simulated}


def open_telemetry(chosen: str) -> Telemetry:
    name, _, argument = chosen.partition(":")
    if name not in TELEMETRIES:
        raise UsageError(f"--telemetry {chosen!r}: unknown source; there are {', '.join(TELEMETRIES)}")
    return TELEMETRIES[name](argument)
