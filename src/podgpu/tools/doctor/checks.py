"""Checks this node: driver, GPUs, counters, usage, privileges, and the sources of holders."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from podgpu.errors import SourceError, StartError, few_of, plural
from podgpu.fleet.repair import make_repair, repair_of
from podgpu.kube.reflector import Informer
from podgpu.metrics.conditions import (
    FABRIC_FIELD,
    FIELD_CONDITIONS,
    NO_RECOVERY,
    RECOVERY,
    conditions_from_fields,
    fabric_detail,
    words_for,
)
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.fields import Field, Gpm, fields
from podgpu.metrics.usage_methods import IMPROVEMENTS, NO_CAPABILITY, NOT_MEASURED
from podgpu.model import (
    UNHEALTHY,
    Allocation,
    Condition,
    Device,
    DeviceState,
    GpuReading,
    Inventory,
    Unmapped,
    Workload,
)
from podgpu.node.agent.device_selection import Selection
from podgpu.node.gpu.dcgm.connection import format_version
from podgpu.node.gpu.dcgm.dcgm_telemetry import DcgmTelemetry
from podgpu.node.gpu.nvml.driver import MIN_GPM_SECONDS, VersionMismatch
from podgpu.node.gpu.nvml.kernel_log import KernelLog
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry, count_pci_gpus
from podgpu.node.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.node.gpu.nvml.switch_splitter import LogNotMeasured
from podgpu.node.gpu.remote_exporter import ExporterTelemetry
from podgpu.node.gpu.source import Telemetry
from podgpu.node.holders import KUBELET, AllocationSource
from podgpu.node.holders.annotations import replace_reservations
from podgpu.node.holders.api import ApiAccess
from podgpu.node.holders.device_ids import DeviceId, parse_id_or_minor
from podgpu.node.holders.identity import Identities, IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.kubernetes_health import find_kubernetes_health
from podgpu.node.holders.reader import describe, explain, merge, reject_ended
from podgpu.node.usage.containers import in_host_pid_namespace
from podgpu.workers import Workers

SIMULATED = "simulated"
_SYS_ADMIN = 1 << 21
_DRIVER_VERSION = 1  # DCGM field
_NVML_VERSION = 2
_RUNTIME = (
    "run the container with the NVIDIA runtime (runtimeClassName: nvidia) and "
    "NVIDIA_VISIBLE_DEVICES=all, NVIDIA_DRIVER_CAPABILITIES=utility"
)
_DMESG = "check the host's dmesg for NVRM and Xid lines, and whether nvidia-smi works there"

ReadError = SourceError | StartError


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # information, not a problem
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str
    advice: str = ""


ok = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
wrong = partial(Finding, Level.WRONG)


@dataclass(frozen=True, slots=True)
class GpuReadings:
    inventory: Inventory | None = None  # None if the driver could not be read, see `error`
    error: ReadError | None = None
    read: Mapping[Device, GpuReading] = field(default_factory=dict)
    failures: Mapping[Device, ReadError] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        """GPUs and MIG instances, including GPUs that failed.

        The instances of a failed GPU are not known.
        """
        devices: list[Device] = []
        for reading in self.read.values():
            devices += reading.values
        devices += self.failures
        return tuple(devices)

    @property
    def is_complete(self) -> bool:
        return self.inventory is not None and not self.inventory.unreachable and not self.failures


def read_gpus(
    telemetry: Telemetry,
    counters: Sequence[CounterSpec],
    workers: Workers,
    deadline: float,
    pause: Callable[[float], object],
) -> GpuReadings:
    inventory = workers.run({"driver": telemetry.inventory}, deadline)["driver"]
    if inventory.value is None:
        return GpuReadings(error=inventory.error)

    wanted: dict[int, Field] = {counter.field.id: counter.field for counter in counters}
    for number in (_DRIVER_VERSION, _NVML_VERSION, *FIELD_CONDITIONS, FABRIC_FIELD):
        wanted[number] = fields()[number]

    wanted_fields = tuple(wanted.values())

    def read(gpu: Device) -> GpuReading:
        telemetry.read(gpu, wanted_fields)
        # Rates and GPM need two readings.
        pause(MIN_GPM_SECONDS)
        return telemetry.read(gpu, wanted_fields)

    gpus = inventory.value.gpus
    jobs = {f"GPU {gpu.index}": partial(read, gpu) for gpu in gpus}
    results = workers.run(jobs, deadline)
    readings: dict[Device, GpuReading] = {}
    failures: dict[Device, ReadError] = {}
    for gpu in gpus:
        result = results[f"GPU {gpu.index}"]
        if result.value is not None:
            readings[gpu] = result.value
        if result.error is not None:
            failures[gpu] = result.error

    return GpuReadings(inventory.value, read=readings, failures=failures)


def check_gpus(
    readings: GpuReadings,
    telemetry: Telemetry,
    counters: Sequence[CounterSpec],
    proc: str,
    sysfs: str,
) -> Iterator[Finding]:
    """Checks the source of GPU values, its GPUs and MIG instances, and the supported counters."""
    if isinstance(telemetry, ExporterTelemetry):
        provider = "that exporter's counter file"
        yield from _check_exporter(telemetry.shown, readings)
    elif isinstance(telemetry, DcgmTelemetry):
        provider = "DCGM"
        yield from _check_dcgm(telemetry, readings, proc, sysfs)
    else:
        provider = ""
        # The PCI bus has no simulated GPUs.
        expected = None if telemetry.name == SIMULATED else telemetry.expected
        yield from _check_driver(readings, expected, proc, sysfs)

    yield from _check_health(readings)
    yield from _check_mig(readings)
    yield from _check_counters(readings, counters, provider)


def _count_names(names: Iterable[str]) -> str:
    numbers = Counter(names)
    return ", ".join(f"{number} × {name}" for name, number in numbers.items())


def _count_models(gpus: Iterable[Device]) -> str:
    return _count_names(gpu.model or "GPU of unknown model" for gpu in gpus)


# Driver


def _check_dcgm(
    telemetry: DcgmTelemetry, readings: GpuReadings, proc: str, sysfs: str
) -> Iterator[Finding]:
    if readings.inventory is None:
        yield wrong("DCGM", str(readings.error))
        return

    library, engine = telemetry.versions
    versions = f"libdcgm {format_version(library)}, host engine {format_version(engine)}"
    yield ok("DCGM", versions)
    yield from _check_driver(readings, telemetry.expected, proc, sysfs)


def _check_driver(
    readings: GpuReadings, expected: int | None, proc: str, sysfs: str
) -> Iterator[Finding]:
    """`expected`: number of GPUs on the PCI bus, or None if it is unknown."""
    inventory = readings.inventory
    if inventory is None:
        yield _explain_driver_error(readings.error, proc, sysfs)
        return

    versions = _describe_versions(readings, proc)
    yield ok("driver", f"{versions}, {plural(len(inventory.gpus), 'GPU')}")
    yield from _check_count(inventory, expected)
    for index, error in inventory.unreachable.items():
        yield wrong("GPUs", f"GPU {index} does not respond: {error}")

    for gpu, failure in readings.failures.items():
        yield wrong("GPUs", f"{failure} ({gpu.uuid})", _DMESG)

    for gpu, reading in readings.read.items():
        if reading.errors:
            reasons = ", ".join(sorted(set(reading.errors)))
            yield note("GPUs", f"GPU {gpu.index}: some calls failed ({reasons})", _DMESG)


def _describe_versions(readings: GpuReadings, proc: str) -> str:
    values: dict[int, object] = {}
    for reading in readings.read.values():
        for device_values in reading.values.values():
            values.update(device_values)

    driver = values.get(_DRIVER_VERSION) or read_kernel_driver(proc) or "driver of unknown version"
    if _NVML_VERSION in values:
        return f"NVIDIA {driver}, NVML {values[_NVML_VERSION]}"
    return f"NVIDIA {driver}"


def _check_count(inventory: Inventory, expected: int | None) -> Iterator[Finding]:
    listed = len(inventory.gpus) + len(inventory.unreachable)
    if expected is not None and listed < expected:
        advice = (
            "in a container set NVIDIA_VISIBLE_DEVICES=all; "
            "on the host check dmesg for NVRM lines, and for GPUs bound to vfio-pci"
        )
        yield wrong("GPUs", f"the PCI bus has {expected}, the driver lists {listed}", advice)
    elif not listed:
        yield wrong("GPUs", "the driver lists none", f"{_RUNTIME}; on the host {_DMESG}")
    elif inventory.gpus:
        yield ok("GPUs", _count_models(inventory.gpus))


def _explain_driver_error(error: ReadError | None, proc: str, sysfs: str) -> Finding:
    kernel_driver = read_kernel_driver(proc)
    text = (
        f"{error}; driver in the kernel: {kernel_driver or 'none'}; "
        f"NVIDIA GPUs on the PCI bus: {count_pci_gpus(sysfs) or 'none'}"
    )
    if isinstance(error, VersionMismatch):
        advice = (
            "the driver was upgraded while podgpu ran: delete the pod so that it is recreated; "
            "on a host reload the nvidia modules or reboot"
        )
    elif getattr(error, "reason", "") not in ("library_not_found", "driver_not_loaded"):
        advice = _DMESG
    elif kernel_driver:
        advice = f"{_RUNTIME}, or mount the library"
    else:
        advice = (
            "install the driver on the host, or check the GPU operator's driver pod; "
            "on nodes without GPUs do not run podgpu (nodeSelector nvidia.com/gpu.present), "
            "or try it with --telemetry simulated"
        )

    return wrong("driver", text, advice)


def _check_health(readings: GpuReadings) -> Iterator[Finding]:
    """Reports what the driver says about the health of each GPU."""
    has_advice = False
    is_healthy = True
    for gpu, reading in readings.read.items():
        details = _read_health(gpu, reading)
        recovery = ""
        if RECOVERY in details:
            recovery = details[RECOVERY] or NO_RECOVERY
            has_advice = True

        for condition, detail in details.items():
            if detail is not None:
                says, do = words_for(condition, detail, recovery=recovery)
                yield wrong("health", f"GPU {gpu.index}: {says}", do)
                is_healthy = False

    if has_advice and is_healthy:
        yield ok("health", "the driver advises no recovery action for any GPU")


def _read_health(gpu: Device, reading: GpuReading) -> dict[str, str | None]:
    """Returns the detail of each condition that the driver reports, or None if it is absent."""
    values = reading.values.get(gpu, {})
    details = conditions_from_fields(values)
    return details | fabric_detail(values.get(FABRIC_FIELD), reading.links_up)


def list_repairs(readings: GpuReadings, node: str, has_pods: bool) -> Iterator[Finding]:
    """Yields the commands that repair each broken GPU. `node`: its name in Kubernetes."""
    for gpu, reading in readings.read.items():
        conditions = []
        for name, detail in _read_health(gpu, reading).items():
            if detail is not None:
                conditions.append(Condition(name, detail=detail))

        action = repair_of(DeviceState(conditions=tuple(conditions)))
        if not action:
            continue

        repair = make_repair(action, node, str(gpu.index), has_pods=has_pods)
        steps = "; ".join(step.command for step in repair.commands)
        yield note("repair", f"GPU {gpu.index}: run these commands in order", steps)


def _check_mig(readings: GpuReadings) -> Iterator[Finding]:
    # In a reading, the GPU comes before its instances.
    layouts = [list(reading.values) for reading in readings.read.values() if reading.values]
    for gpu, *instances in layouts:
        if gpu.mig_enabled:
            yield _check_layout(gpu, instances)

    if layouts and not any(gpu.mig_enabled for gpu, *_ in layouts):
        yield ok("MIG", "off")


def _check_layout(gpu: Device, instances: Sequence[Device]) -> Finding:
    if instances:
        profiles = _count_names(instance.profile for instance in instances)
        return ok("MIG", f"GPU {gpu.index}: {profiles}")

    text = f"GPU {gpu.index}: on, but without instances, so no pod can use it"
    advice = (
        "create instances (nvidia-smi mig -cgi … -C, or the MIG manager's node label), "
        "or turn MIG off"
    )
    return note("MIG", text, advice)


def _check_exporter(shown: str, readings: GpuReadings) -> Iterator[Finding]:
    if readings.inventory is None:
        yield wrong("exporter", str(readings.error))
        return

    gpus = readings.inventory.gpus
    yield ok("exporter", f"{shown} has {plural(len(gpus), 'GPU')}: {_count_models(gpus)}")
    for error in readings.failures.values():
        yield wrong("exporter", str(error))


# Counters


def _check_counters(
    readings: GpuReadings, counters: Sequence[CounterSpec], provider: str
) -> Iterator[Finding]:
    """`provider`: where users can add counters; empty if values come directly from the driver."""
    unsupported: dict[str, set[int]] = defaultdict(set)
    for gpu, reading in readings.read.items():
        model = gpu.model or "the GPU"
        if any(device.mig_enabled for device in reading.values):
            model += " in MIG mode"
        # A field that some of its devices do not support may have a value of another one.
        with_value: set[int] = set()
        for values in reading.values.values():
            with_value.update(values)
        without_support = {number for _device_key, number in reading.unsupported}
        unsupported[model] |= without_support - with_value

    for model, numbers in unsupported.items():
        missing = [counter for counter in counters if counter.field.id in numbers]
        if not missing:
            yield ok("counters", f"{model} supports all {len(counters)}")
            continue

        names = few_of((counter.name for counter in missing), 10)
        text = f"{model} does not support {len(missing)} of {len(counters)}: {names}"
        yield note("counters", text, _advise_on_counters(missing, provider))


def _advise_on_counters(missing: Iterable[CounterSpec], provider: str) -> str:
    if provider:
        return f"they are not exported; add them to {provider} if you need them"
    advice = "nothing to do: the other counters are exported"
    if any(isinstance(counter.field.recipe, Gpm) for counter in missing):
        advice += "; DCGM_FI_PROF_* need Hopper or later, or DCGM (--telemetry dcgm)"
    return advice


# Usage of shared GPUs

_MPS = (
    "used by clients of MPS. The driver reports only the MPS server, so busy time, idle time, "
    "energy, waste, cost by use and autoscaling metrics are not known, "
    "unless all clients belong to one container"
)
_CHECK_DRIVER = (
    "install driver 550 or later, use the NVIDIA runtime (runtimeClassName: nvidia), "
    "and check the host's dmesg for NVRM lines; "
    "a vGPU guest needs the profiling capability of its host"
)


def check_usage(
    telemetry: Telemetry,
    gpus: Sequence[Device],
    usage_from: str,
    workers: Workers,
    deadline: float,
) -> Iterator[Finding]:
    """Checks whether the method of `--usage-from` works, and finds GPUs under MPS."""
    yield from _check_mps(telemetry, gpus, workers, deadline)
    method = usage_from
    if isinstance(telemetry, NvmlTelemetry):
        method = telemetry.switch_logs.wanted

    if method == "samples":
        text = (
            "busy time of shared GPUs is estimated from the driver's samples; "
            "--usage-from auto is more accurate where it can read context switches"
        )
        yield ok("sharing", text)
        return

    if not isinstance(telemetry, NvmlTelemetry):
        text = f"--usage-from {usage_from} cannot be checked with this --telemetry"
        advice = "use --telemetry nvml; podgpu_device_usage_method has the method of each GPU"
        yield note("sharing", text, advice)
        return

    jobs = {f"switches-{gpu.uuid}": partial(_check_switches, telemetry, gpu) for gpu in gpus}
    results = workers.run(jobs, deadline)
    # GPUs with the same result share one finding.
    gpus_by_finding: dict[Finding, list[str]] = defaultdict(list)
    for gpu in gpus:
        result = results[f"switches-{gpu.uuid}"]
        text = f"--usage-from {method} could not be checked: {result.error}"
        finding = result.value or wrong("sharing", text, _CHECK_DRIVER)
        gpus_by_finding[finding].append(str(gpu.index))

    for finding, numbers in gpus_by_finding.items():
        noun = "GPU" if len(numbers) == 1 else "GPUs"
        yield replace(finding, text=f"{noun} {few_of(numbers)}: {finding.text}")


def _check_mps(
    telemetry: Telemetry, gpus: Sequence[Device], workers: Workers, deadline: float
) -> Iterator[Finding]:
    jobs = {f"processes-{gpu.uuid}": partial(telemetry.processes, gpu) for gpu in gpus}
    results = workers.run(jobs, deadline)
    indices = []
    for gpu in gpus:
        # If the processes cannot be read, other checks report this.
        processes = results[f"processes-{gpu.uuid}"].value or ()
        if any(process.mps for process in processes):
            indices.append(gpu.index)

    if indices:
        yield note("MPS", f"GPU {few_of(indices)}: {_MPS}")


def _check_switches(telemetry: NvmlTelemetry, gpu: Device) -> Finding:
    method = telemetry.switch_logs.wanted
    try:
        with closing(telemetry.open_switch_log(gpu)) as listener:
            limit = listener.limit
            no_samples_reason = listener.no_samples_reason
    except LogNotMeasured as e:
        text = f"busy time is estimated from driver samples: {e}"
        return note("sharing", text, IMPROVEMENTS[NOT_MEASURED])
    except SwitchLogError as e:
        text = "busy time is estimated from driver samples, because context switches cannot be read"
        finding = note if method == "auto" else wrong
        return finding("sharing", f"{text}: {e}", _CHECK_DRIVER)

    if not no_samples_reason:
        return ok("sharing", "busy time is exact: it comes from context switches and busy samples")

    text = "busy time comes from context switches and has a lower and an upper bound"
    if limit == NO_CAPABILITY:
        finding = wrong if method == "exact" else note
        consequence = (
            "if several containers run as other users than podgpu, the driver's samples divide "
            "their time"
        )
        text = f"{text}: CAP_SYS_ADMIN is missing; {consequence}"
        return finding("sharing", text, IMPROVEMENTS[NO_CAPABILITY])

    if method == "exact":
        return note("sharing", f"{text}, not exact: {no_samples_reason}")

    return ok("sharing", f"{text} (exact would add busy samples)")


# The machine and this process


def read_kernel_driver(proc: str) -> str:
    """Returns the version of the loaded NVIDIA kernel module, or an empty text.

    Works in every container.
    """
    text = _read(Path(proc, "driver/nvidia/version"))
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    if not version:
        return ""
    return version[1]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_privileges(proc: str, usage_from: str) -> Iterator[Finding]:
    """`usage_from`: see `--usage-from`. `auto` and `exact` use CAP_SYS_ADMIN."""
    status = _read(Path(proc, "self/status"))
    # The second number is the effective user.
    uid = re.search(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE | re.ASCII)
    user = f"uid {uid[1]}" if uid else "unknown uid"
    needed = "CAP_SYS_ADMIN for --usage-from exact" if usage_from == "exact" else "none"
    text = f"running as {user}; root is needed only for the kubelet socket; capabilities needed: "
    yield ok("privileges", text + needed)

    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    is_admin = capabilities is not None and int(capabilities[1], 16) & _SYS_ADMIN
    if is_admin and usage_from not in ("auto", "exact"):
        text = "this process has CAP_SYS_ADMIN, which podgpu does not need"
        advice = "in a pod, set securityContext: {privileged: false, capabilities: {drop: [ALL]}}"
        yield note("privileges", text, advice)


def check_kernel_log(path: str) -> Finding:
    """Checks whether the containers that cause XIDs can be named."""
    try:
        KernelLog(path, time.time).close()
    except SourceError as error:
        text = f"{error}; the cause of an XID is named only if there is a single candidate"
        return note("XIDs", text)
    return ok("XIDs", "the kernel log can be read, so the container that causes an XID is named")


def check_device_files(dev: str) -> Iterator[Finding]:
    """Checks that the GPUs' device files can be opened.

    There may be none, because WSL works without them.
    """
    files = [*Path(dev).glob("nvidiactl"), *Path(dev).glob("nvidia[0-9]*")]
    read_write = os.R_OK | os.W_OK
    closed = [str(path) for path in sorted(files) if not os.access(path, read_write)]
    if closed:
        advice = (
            "use the NVIDIA runtime (runtimeClassName: nvidia), "
            "or allow this user to read and write them"
        )
        yield wrong("device files", f"no permission to open {few_of(closed)}", advice)
    elif files:
        yield ok("device files", f"{plural(len(files), 'file')}, all can be opened")


def check_pid_namespace(proc: str) -> Finding:
    if in_host_pid_namespace(proc):
        return ok("pid namespace", "host PID namespace")
    text = "not in the host PID namespace: per-container usage is unavailable"
    advice = "set hostPID: true, and mount /proc if podgpu cannot read it"
    return note("pid namespace", text, advice)


def check_host_name(no_hostname: bool) -> Finding:
    if no_hostname:
        return ok("host name", "not in the labels (--no-hostname)")

    node_name = os.environ.get("NODE_NAME")
    if node_name:
        return ok("host name", f"{node_name}, from NODE_NAME")

    name = socket.gethostname()
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        text = f"NODE_NAME is not set: the host label is the pod's name, {name}"
        advice = "env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"
        return wrong("host name", text, advice)

    return ok("host name", name)


# The API server, the kubelet and other allocation sources, and the device ids that they report

_WATCH_REFUSED_S = 0.5
"""Seconds to wait for the rejection of a watch.

An accepted watch gets no response before the first event.
"""


def check_watches(watches: Sequence[Informer[Any]], timeout: float) -> Iterator[Finding]:
    if not watches:
        return

    # All watches share one time-out.
    end = time.monotonic() + timeout
    for watch in watches:
        watch.wait_synced(max(0.0, end - time.monotonic()))

    all_synced = all(watch.synced for watch in watches)
    if all_synced:
        time.sleep(_WATCH_REFUSED_S)

    errors = [str(watch.error) for watch in watches if watch.error is not None]
    for text in dict.fromkeys(errors):
        yield wrong("API server", text)
    if errors:
        return

    if all_synced:
        noun = "watches" if len(watches) > 1 else "watch"
        yield ok("API server", f"answers, {len(watches)} {noun}")
    else:
        advice = "check that the API server runs, and that network policies allow connections to it"
        yield wrong("API server", "no complete response in time", advice)


def check_holders(
    sources: Sequence[AllocationSource],
    readings: GpuReadings,
    selection: Selection,
    identities: IdentityReader,
    kubelet_required: bool,
    api: ApiAccess,
    workers: Workers,
    deadline: float,
) -> Iterator[Finding]:
    """Reads each source of holders, reports its state, and checks the merged allocation."""
    if not sources:
        text = "not used, because --kubernetes (DCGM_EXPORTER_KUBERNETES) is false: no pod labels"
        yield note("kubelet", text)
        return

    allocations: dict[str, Allocation] = {}
    gpu_resources: frozenset[str] = frozenset()
    held_resources: list[str] = []
    by_name = {source.name: source for source in sources}
    jobs = {name: partial(_read_holders, source, readings) for name, source in by_name.items()}
    results = workers.run(jobs, deadline)
    for name, source in by_name.items():
        if isinstance(source, KubeletAllocation):
            gpu_resources = source.resource_names
        result = results[name]
        if result.value is None:
            yield _explain_error(name, result.error, kubelet_required)
            continue

        allocation, response = result.value
        allocations[name] = allocation
        if isinstance(source, KubeletAllocation):
            held_resources = _list_resources(response)
            yield from _check_kubelet(source.socket, response, allocation, api)
        else:
            count = len(allocation.assignments) + len(allocation.unmapped)
            yield ok(name, plural(count, "assignment"))

    if not allocations:
        return

    names = workers.run({"names": identities.read}, deadline)["names"].value or Identities()
    merged = _merge_allocations(allocations, names, readings.devices)
    yield from _check_mapping(merged, readings, selection, gpu_resources, held_resources)
    yield from _check_kubernetes_health(merged, names, readings)


def _read_holders(source: AllocationSource, readings: GpuReadings) -> tuple[Allocation, Any]:
    """Returns the holders, and the kubelet's response (None for other sources)."""
    if not isinstance(source, KubeletAllocation):
        return source.assignments(readings.devices), None
    response = source.list_pods()
    return source.map_pods(response, readings.devices), response


def _merge_allocations(
    allocations: Mapping[str, Allocation], names: Identities, devices: Sequence[Device]
) -> Allocation:
    """Merges the sources like the exporter, which also uses earlier readings."""
    kubelet_pods = allocations.get(KUBELET, Allocation()).listed_pods

    def has_ended(workload: Workload) -> bool:
        is_alive = names.is_alive(workload, ())
        # None means unknown. A restarted kubelet lists no pods at all.
        if is_alive is None and kubelet_pods:
            is_alive = workload.pod_name in kubelet_pods
        return is_alive is False

    allocations = reject_ended(allocations, names.complete, has_ended)
    allocations = replace_reservations(allocations, names.pods, devices, names.complete)
    return merge(allocations, names.complete)


def _check_kubernetes_health(
    merged: Allocation, names: Identities, readings: GpuReadings
) -> Iterator[Finding]:
    """Reports the GPUs that Kubernetes calls unhealthy. podgpu may find no problem of them."""
    assignments = merged.assignments
    opinions = find_kubernetes_health(names.pods, merged.offered, assignments, readings.devices)
    for device in readings.devices:
        opinion = opinions.get(device.key)
        if opinion is not None and opinion.health == UNHEALTHY:
            why = f" ({opinion.message})" if opinion.message else ""
            text = f"Kubernetes calls GPU {device.uuid} unhealthy{why} and gives it to no new pod"
            advice = (
                "if no other problem is listed, check the log of the device plugin or DRA driver"
            )
            yield note("health", text, advice)


def _list_resources(response: Any) -> list[str]:
    """Returns the names of all resources that pods hold."""
    resources: set[str] = set()
    for pod in response.pod_resources:
        for container in pod.containers:
            resources.update(entry.resource_name for entry in container.devices)
    return sorted(resources)


def _check_kubelet(
    path: str, response: Any, allocation: Allocation, api: ApiAccess
) -> Iterator[Finding]:
    responds = f"{path} responds"
    pods = {(pod.namespace, pod.name) for pod in response.pod_resources}
    watch = api.watched_pods
    knows_api_pods = watch is not None and watch.synced and watch.error is None
    api_pods = set()
    if knows_api_pods:
        api_pods = {(pod.namespace, pod.name) for pod in api.known_pods()}
    if not pods:
        yield _explain_no_pods(responds, len(api_pods))
        return

    workloads = [entry.holder for entry in allocation.assignments]
    workloads += [entry.holder for entry in allocation.unmapped]
    holders = {workload.pod_name for workload in workloads}
    counts = f"{plural(len(pods), 'pod')}, {len(holders)} with GPUs"
    yield ok("kubelet", f"{responds}: {counts}, {plural(len(workloads), 'assignment')}")

    if knows_api_pods and pods.isdisjoint(api_pods):
        node = os.environ.get("NODE_NAME", "")
        text = (
            f"NODE_NAME is not this node: the API server has {plural(len(api_pods), 'pod')} "
            f"on the node {node!r}, this node's kubelet has {plural(len(pods), 'pod')}, "
            "and none is in both lists, so data of the API server cannot be used"
        )
        advice = (
            "set NODE_NAME from spec.nodeName by the downward API; "
            "outside a pod, to the name in `kubectl get nodes`"
        )
        yield wrong("node name", text, advice)


def _explain_no_pods(responds: str, api_pods: int) -> Finding:
    """Explains an empty list of pods.

    A restarted kubelet lists no pods until the API server has answered.
    """
    advice = (
        "run doctor again in a minute; if this persists, check the kubelet's log and the API server"
    )
    if api_pods:
        pods = plural(api_pods, "pod")
        text = f"{responds}, but lists no pods, and the API server has {pods} on this node"
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        text = f"{responds}, but lists no pods, not even this one"
    else:
        text = f"{responds}: no pods; if some run here, the kubelet was just restarted"
        return note("kubelet", text, advice)

    return wrong("kubelet", f"{text}: it was restarted and does not know its pods yet", advice)


_ROOTS = (
    "the kubelet's directory is /var/lib/k0s/kubelet in k0s, "
    "/var/snap/microk8s/common/var/lib/kubelet in microk8s"
)


def _explain_error(name: str, error: Exception | None, kubelet_required: bool) -> Finding:
    # The finding itself shows the name.
    text = str(error).removeprefix(f"{name}: ")
    is_missing = name == KUBELET and getattr(error, "reason", "") == "socket_missing"
    if not is_missing:
        return wrong(name, text)
    finding = wrong if kubelet_required else note
    return finding("kubelet", f"no pod labels, because {text}", _ROOTS)


# Mapping

_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")


def _check_mapping(
    allocation: Allocation,
    readings: GpuReadings,
    selection: Selection,
    resource_names: frozenset[str],
    resources: Sequence[str],
) -> Iterator[Finding]:
    """Checks that each assigned id is a device of this node.

    `resources`: names of all resources that pods hold.
    """
    if readings.inventory is None:
        assignments = plural(len(allocation.unmapped), "assignment")
        yield note("mapping", f"{assignments} cannot be mapped to GPUs without the driver")
        return

    for entry in allocation.unmapped:
        yield _explain_unmapped(entry, readings, resource_names)
    if not allocation.unmapped:
        yield _describe_mapping(allocation, resources)

    holders = [entry.holder for entry in allocation.assignments]
    unnamed = [holder for holder in holders if not holder.pod and not holder.job]
    if unnamed:
        count = plural(len(unnamed), "assignment")
        text = f"{count} of pods with unknown names ({unnamed[0].text})"
        advice = (
            "names come from the host's /var/log/pods and /var/log/containers: "
            "mount /var/log, or set --path-varlog"
        )
        yield note("mapping", text, advice)

    selected = selection.select(readings.devices)
    excluded = [entry for entry in allocation.assignments if entry.device not in selected]
    if excluded:
        count = plural(len(excluded), "assignment")
        text = f"{count} on devices excluded by -d {selection}: they are not exported"
        yield note("mapping", text, "use -d f to export all devices")


def _describe_mapping(allocation: Allocation, resources: Sequence[str]) -> Finding:
    if allocation.assignments:
        text = f"{plural(len(allocation.assignments), 'assignment')}, all to devices of this node"
        return ok("mapping", text)

    if resources:
        text = f"no pod holds a known GPU resource; pods hold devices of {few_of(resources)}"
        advice = "if one of these contains GPUs, add it to --nvidia-resource-names"
        return note("mapping", text, advice)

    return ok("mapping", "no pod holds a GPU")


def _explain_unmapped(
    unmapped: Unmapped, readings: GpuReadings, resource_names: frozenset[str]
) -> Finding:
    text = describe(unmapped)
    device_id = parse_id_or_minor(unmapped.device_id)
    # The ids in job files of HPC have an explanation of their own.
    is_unknown = unmapped.reason == "unknown_device" and unmapped.source != "hpc"
    if is_unknown and device_id is not None:
        reason, advice = _explain_unknown(device_id, readings)
        return wrong("mapping", f"{text}: {reason}", advice)

    if unmapped.reason != "unrecognised_id":
        explanation = explain(unmapped)
        make_finding = note if explanation.harmless else wrong
        explained = f"{text} ({unmapped.source}): {explanation.reason}"
        return make_finding("mapping", explained, explanation.advice)

    # The kubelet also lists devices that are no GPUs.
    resource = unmapped.resource
    is_gpu = resource in resource_names or resource.startswith(_GPU_RESOURCES)
    if unmapped.source == "kubelet" and not is_gpu:
        advice = "nothing to do unless this resource contains GPUs"
        return note("mapping", f"{text}: not a GPU", advice)

    advice = (
        "report the id and its device plugin or scheduler; "
        "until then the pod's GPU has no pod labels"
    )
    return wrong("mapping", f"{text}: the format of the id is not recognised", advice)


def _explain_unknown(device_id: DeviceId, readings: GpuReadings) -> tuple[str, str]:
    """Returns the reason why a valid id matches no device of this node, and advice."""
    if not readings.is_complete:
        return "it may be a GPU that does not respond", "fix the problems of the GPUs first"

    if device_id.mig_uuid is not None or device_id.gi_id is not None:
        return (
            "this node has no such MIG instance",
            "the MIG layout was changed after the pod got the device: delete the pod, "
            "and restart the device plugin so that it offers the new instances",
        )

    return (
        "this node has no such GPU",
        "if the GPU was replaced, restart the device plugin and delete the pod; "
        "otherwise check that the socket belongs to this node's kubelet, "
        "and that this container gets all GPUs (NVIDIA_VISIBLE_DEVICES=all)",
    )
