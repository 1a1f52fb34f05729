"""Runs all checks of a node with the exporter's options. Each read has a deadline; a failure is a finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podgpu.device_selection import Selection
from podgpu.doctor.findings import Finding, wrong
from podgpu.doctor.gpus import SIMULATED, check_gpus, check_usage, read_gpus
from podgpu.doctor.holders import check_holders, check_watches
from podgpu.doctor.host import Host, check_host, check_host_name, read_host
from podgpu.errors import UsageError
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.identity import IdentityReader
from podgpu.kube.objects import PodRecord
from podgpu.kube.reflector import Store
from podgpu.metrics.counters import Counter
from podgpu.model import UsageMethod
from podgpu.workers import Workers

DEADLINE = 5.0


@dataclass(frozen=True)
class NodeSettings:
    """The settings of the exporter on this node."""

    counters: tuple[Counter, ...] = ()
    selection: Selection = field(default_factory=Selection)
    sources: tuple[AllocationSource, ...] = ()  # highest precedence first; empty if pod labels are off
    kubelet_required: bool = False
    watches: tuple[Store[Any], ...] = ()  # all watches of the API server
    pods: Store[PodRecord] | None = None  # this node's pods in the API server, if watched
    identities: IdentityReader = field(default_factory=IdentityReader)
    no_hostname: bool = False
    container_usage: bool = True
    usage_from: UsageMethod = "samples"
    proc: str = "/proc"
    sysfs: str = "/sys"
    dev: str = "/dev"
    environment: Mapping[str, str] = field(default_factory=dict)


def examine(
    settings: NodeSettings,
    telemetry: Telemetry,
    deadline: float = DEADLINE,
    pause: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    workers = Workers()
    try:
        host, findings = _read_host(settings, workers, deadline)
        gpus = read_gpus(telemetry, settings.counters, workers, deadline, pause)
        findings += check_gpus(gpus, host, telemetry, settings.counters)
        if gpus.is_complete:
            try:
                settings.selection.check(gpus.devices)
            except UsageError as error:
                findings.append(wrong("devices", str(error)))
        findings += check_host(
            host,
            exact_usage=settings.usage_from == "exact",
            device_files=telemetry.name == "nvml",
            pid_namespace=telemetry.name != SIMULATED and settings.container_usage,
        )
        whole = [device for device in gpus.devices if not device.is_instance and device not in gpus.failures]
        if settings.container_usage and whole:
            findings += check_usage(telemetry, whole, settings.usage_from, workers, deadline)
        findings += check_watches(settings.watches, deadline)
        findings += check_holders(
            settings.sources,
            gpus,
            selection=settings.selection,
            identities=settings.identities,
            kubelet_required=settings.kubelet_required,
            pods=settings.pods,
            node_name=settings.environment.get("NODE_NAME", ""),
            workers=workers,
            deadline=deadline,
        )
        return [*findings, check_host_name(host, settings.no_hostname)]
    finally:
        workers.run({"release": lambda: telemetry.release(deadline / 2)}, deadline)
        for source in settings.sources:
            source.close()
        workers.close()


def _read_host(settings: NodeSettings, workers: Workers, deadline: float) -> tuple[Host, list[Finding]]:
    proc, sysfs, dev = settings.proc, settings.sysfs, settings.dev
    result = workers.run({"host": lambda: read_host(proc, sysfs, dev, settings.environment)}, deadline)["host"]
    if result.value is not None:
        return result.value, []
    return Host(), [wrong("host", str(result.error), f"check that {proc}, {sysfs} and {dev} can be listed")]
