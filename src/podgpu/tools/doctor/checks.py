"""Checks this node: driver, GPUs, counters, per-container usage, privileges, and the sources of
holders.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from podgpu.errors import SourceError, StartError, few_of, plural
from podgpu.kube.reflector import Informer
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.fields import Field, Gpm, fields
from podgpu.model import Allocation, Device, GpuReading, Inventory, Unmapped, UsageMethod
from podgpu.node.agent.device_selection import Selection
from podgpu.node.gpu.dcgm.connection import format_version
from podgpu.node.gpu.dcgm.dcgm_telemetry import DcgmTelemetry
from podgpu.node.gpu.nvml.driver import MIN_GPM_SECONDS, VersionMismatch
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry, count_pci_gpus
from podgpu.node.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.node.gpu.remote_exporter import ExporterTelemetry
from podgpu.node.gpu.source import Telemetry
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.annotations import replace_reservations
from podgpu.node.holders.api import ApiAccess
from podgpu.node.holders.device_ids import DeviceId, parse_id_or_minor
from podgpu.node.holders.identity import Identities, IdentityReader
from podgpu.node.holders.kubelet import SOURCE, KubeletAllocation
from podgpu.node.holders.reader import describe, explain, merge
from podgpu.node.usage.containers import in_host_pid_namespace
from podgpu.workers import Workers

SIMULATED = "simulated"
_SYS_ADMIN = 1 << 21
_DRIVER_VERSION, _NVML_VERSION = 1, 2
_RUNTIME = (
    "run the container with the NVIDIA runtime (runtimeClassName: nvidia) and "
    "NVIDIA_VISIBLE_DEVICES=all,"
    " NVIDIA_DRIVER_CAPABILITIES=utility"
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


ok, note, wrong = (partial(Finding, level) for level in Level)


@dataclass(frozen=True, slots=True)
class GpuReadings:
    inventory: Inventory | None = None  # None if the driver could not be read, see `error`
    error: ReadError | None = None
    read: Mapping[Device, GpuReading] = field(default_factory=dict)
    failures: Mapping[Device, ReadError] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        """GPUs and MIG instances, including GPUs that failed. The instances of a failed GPU are not
        known.
        """
        return (
            *(device for reading in self.read.values() for device in reading.values),
            *self.failures,
        )

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
    wanted: dict[int, Field] = {counter.field.id: counter.field for counter in counters}
    wanted |= {number: fields()[number] for number in (_DRIVER_VERSION, _NVML_VERSION)}
    result = workers.run({"driver": telemetry.inventory}, deadline)["driver"]
    if result.value is None:
        return GpuReadings(error=result.error)

    chosen = tuple(wanted.values())

    def read(gpu: Device) -> GpuReading:
        telemetry.read(gpu, chosen)
        pause(MIN_GPM_SECONDS)  # rates and GPM need two readings
        return telemetry.read(gpu, chosen)

    gpus = result.value.gpus
    results = workers.run({f"GPU {gpu.index}": partial(read, gpu) for gpu in gpus}, deadline)
    by_gpu = {gpu: results[f"GPU {gpu.index}"] for gpu in gpus}
    return GpuReadings(
        result.value,
        read={gpu: result.value for gpu, result in by_gpu.items() if result.value is not None},
        failures={gpu: result.error for gpu, result in by_gpu.items() if result.error is not None},
    )


def check_gpus(
    readings: GpuReadings,
    telemetry: Telemetry,
    counters: Sequence[CounterSpec],
    proc: str,
    sysfs: str,
) -> list[Finding]:
    """Checks the source of GPU values, its GPUs, their MIG instances, and whether they support the
    counters.
    """
    if isinstance(telemetry, ExporterTelemetry):
        findings, provider = (
            _check_exporter(telemetry.shown, readings),
            "that exporter's counter file",
        )
    elif isinstance(telemetry, DcgmTelemetry) and readings.inventory is None:
        findings, provider = [wrong("DCGM", str(readings.error))], "DCGM"
    elif isinstance(telemetry, DcgmTelemetry):
        library, engine = map(format_version, telemetry.versions)
        findings, provider = [ok("DCGM", f"libdcgm {library}, host engine {engine}")], "DCGM"
        findings += _check_driver(readings, telemetry.expected, proc, sysfs)
    else:
        expected = None if telemetry.name == SIMULATED else telemetry.expected
        findings, provider = _check_driver(readings, expected, proc, sysfs), ""
    return [*findings, *_check_mig(readings), *_check_counters(readings, counters, provider)]


def _count_names(names: Iterable[str]) -> str:
    return ", ".join(f"{number} × {name}" for name, number in Counter(names).items())


def _count_models(gpus: Iterable[Device]) -> str:
    return _count_names(gpu.model or "GPU of unknown model" for gpu in gpus)


# Driver


def _check_driver(
    readings: GpuReadings, expected: int | None, proc: str, sysfs: str
) -> list[Finding]:
    """`expected`: number of GPUs on the PCI bus, or None if it is unknown."""
    inventory = readings.inventory
    if inventory is None:
        return [_explain_driver_error(readings.error, proc, sysfs)]
    values = dict(
        pair
        for reading in readings.read.values()
        for own in reading.values.values()
        for pair in own.items()
    )
    driver = values.get(_DRIVER_VERSION) or read_kernel_driver(proc) or "driver of unknown version"
    nvml = f", NVML {values[_NVML_VERSION]}" if _NVML_VERSION in values else ""
    return [
        ok("driver", f"NVIDIA {driver}{nvml}, {plural(len(inventory.gpus), 'GPU')}"),
        *_check_count(inventory, expected),
        *(
            wrong("GPUs", f"GPU {index} does not respond: {error}")
            for index, error in inventory.unreachable.items()
        ),
        *(
            wrong("GPUs", f"{error} ({gpu.uuid})", _DMESG)
            for gpu, error in readings.failures.items()
        ),
        *(
            note(
                "GPUs",
                f"GPU {gpu.index}: some calls failed ({', '.join(sorted(set(reading.errors)))})",
                _DMESG,
            )
            for gpu, reading in readings.read.items()
            if reading.errors
        ),
    ]


def _check_count(inventory: Inventory, expected: int | None) -> list[Finding]:
    listed = len(inventory.gpus) + len(inventory.unreachable)
    if expected is not None and listed < expected:
        advice = (
            "in a container set NVIDIA_VISIBLE_DEVICES=all; on the host check dmesg for NVRM "
            "lines, and for GPUs"
            " bound to vfio-pci"
        )
        return [wrong("GPUs", f"the PCI bus has {expected}, the driver lists {listed}", advice)]
    if not listed:
        return [wrong("GPUs", "the driver lists none", f"{_RUNTIME}; on the host {_DMESG}")]
    return [ok("GPUs", _count_models(inventory.gpus))] if inventory.gpus else []


def _explain_driver_error(error: ReadError | None, proc: str, sysfs: str) -> Finding:
    kernel_driver, pci_gpus = read_kernel_driver(proc), count_pci_gpus(sysfs)
    text = (
        f"{error}; driver in the kernel: {kernel_driver or 'none'}; NVIDIA GPUs on the PCI bus: "
        f"{pci_gpus or 'none'}"
    )
    if isinstance(error, VersionMismatch):
        advice = (
            "the driver was upgraded while podgpu ran: delete the pod so that it is recreated; on "
            "a host reload the"
            " nvidia modules or reboot"
        )
    elif getattr(error, "reason", "") not in ("library_not_found", "driver_not_loaded"):
        advice = _DMESG
    elif kernel_driver:
        advice = f"{_RUNTIME}, or mount the library"
    else:
        advice = (
            "install the driver on the host, or check the GPU operator's driver pod; on nodes "
            "without GPUs do not run"
            " podgpu (nodeSelector nvidia.com/gpu.present), or try it with --telemetry simulated"
        )
    return wrong("driver", text, advice)


def _check_mig(readings: GpuReadings) -> list[Finding]:
    layouts = {
        gpu: instances
        for gpu, *instances in filter(None, (reading.values for reading in readings.read.values()))
    }
    enabled = {gpu: instances for gpu, instances in layouts.items() if gpu.mig_enabled}
    if layouts and not enabled:
        return [ok("MIG", "off")]
    findings = []
    for gpu, instances in enabled.items():
        if instances:
            profiles = _count_names(instance.profile for instance in instances)
            findings.append(ok("MIG", f"GPU {gpu.index}: {profiles}"))
        else:
            text = f"GPU {gpu.index}: on, but without instances, so no pod can use it"
            advice = (
                "create instances (nvidia-smi mig -cgi … -C, or the MIG manager's node label), or "
                "turn MIG off"
            )
            findings.append(note("MIG", text, advice))
    return findings


def _check_exporter(shown: str, readings: GpuReadings) -> list[Finding]:
    if readings.inventory is None:
        return [wrong("exporter", str(readings.error))]
    gpus = readings.inventory.gpus
    return [
        ok("exporter", f"{shown} has {plural(len(gpus), 'GPU')}: {_count_models(gpus)}"),
        *(wrong("exporter", str(error)) for error in readings.failures.values()),
    ]


# Counters


def _check_counters(
    readings: GpuReadings, counters: Sequence[CounterSpec], provider: str
) -> list[Finding]:
    """`provider`: where users can add counters; empty if values come directly from the driver."""
    unsupported: dict[str, set[int]] = defaultdict(set)
    for gpu, reading in readings.read.items():
        in_mig_mode = any(device.mig_enabled for device in reading.values)
        available = {number for values in reading.values.values() for number in values}
        model = (gpu.model or "the GPU") + (" in MIG mode" if in_mig_mode else "")
        unsupported[model] |= {number for _, number in reading.unsupported} - available
    findings = []
    for model, numbers in unsupported.items():
        missing = [counter for counter in counters if counter.field.id in numbers]
        if not missing:
            findings.append(ok("counters", f"{model} supports all {len(counters)}"))
            continue
        advice = "nothing to do: the other counters are exported"
        if provider:
            advice = f"they are not exported; add them to {provider} if you need them"
        elif any(isinstance(counter.field.recipe, Gpm) for counter in missing):
            advice += "; DCGM_FI_PROF_* need Hopper or later, or DCGM (--telemetry dcgm)"
        names = few_of((counter.name for counter in missing), 10)
        text = f"{model} does not support {len(missing)} of {len(counters)}: {names}"
        findings.append(note("counters", text, advice))
    return findings


# Usage of shared GPUs

_ADD_CAPABILITY = (
    "add CAP_SYS_ADMIN (chart: exporter.usage.from: exact; docker run --cap-add SYS_ADMIN --user "
    "0), without a user"
    " namespace"
)
_MPS = (
    "used by clients of MPS. The driver reports only the MPS server, so busy time, idle time, "
    "energy, waste, cost by"
    " use and autoscaling metrics are not known, unless all clients belong to one container"
)
_CHECK_DRIVER = (
    "install driver 550 or later, use the NVIDIA runtime (runtimeClassName: nvidia), and check "
    "the host's dmesg for"
    " NVRM lines; a vGPU guest needs the profiling capability of its host"
)


def check_usage(
    telemetry: Telemetry,
    gpus: Sequence[Device],
    method: UsageMethod,
    workers: Workers,
    deadline: float,
) -> list[Finding]:
    """Checks whether the method of `--usage-from` works on this node, and finds GPUs that are used
    through MPS.
    """
    processes = workers.run(
        {f"processes-{gpu.uuid}": partial(telemetry.processes, gpu) for gpu in gpus}, deadline
    )
    under_mps = [
        gpu.index
        for gpu in gpus
        if any(p.mps for p in processes[f"processes-{gpu.uuid}"].value or ())
    ]
    mps = [note("MPS", f"GPU {few_of(under_mps)}: {_MPS}")] if under_mps else []
    if method == "samples" or telemetry.name == SIMULATED:
        text = (
            "busy time of shared GPUs is estimated from the driver's samples; --usage-from "
            "switches or exact is more"
            " accurate"
        )
        return [*mps, ok("sharing", text)]
    if not isinstance(telemetry, NvmlTelemetry):
        return [
            *mps,
            note(
                "sharing",
                "--usage-from cannot be checked with this --telemetry",
                "use --telemetry nvml",
            ),
        ]
    jobs = {
        f"switches-{gpu.uuid}": partial(_check_switches, telemetry, gpu, method) for gpu in gpus
    }
    results = workers.run(jobs, deadline)
    findings: dict[Finding, list[str]] = defaultdict(list)
    for gpu in gpus:
        result = results[f"switches-{gpu.uuid}"]
        finding = result.value or wrong(
            "sharing", f"--usage-from {method} could not be checked: {result.error}", _CHECK_DRIVER
        )
        findings[finding].append(str(gpu.index))
    for finding, numbers in findings.items():
        mps.append(
            replace(
                finding, text=f"GPU{'s' * (len(numbers) > 1)} {few_of(numbers)}: {finding.text}"
            )
        )
    return mps


def _check_switches(telemetry: NvmlTelemetry, gpu: Device, method: UsageMethod) -> Finding:
    try:
        with closing(telemetry.open_switch_log(gpu)) as listener:
            unsampled = listener.unsampled
    except SwitchLogError as e:
        text = (
            "busy time is estimated from driver samples, because context switches cannot be "
            f"read: {e}"
        )
        return wrong("sharing", text, _CHECK_DRIVER)
    if not unsampled:
        return ok("sharing", "busy time is exact: it comes from context switches and busy samples")
    text = "busy time comes from context switches and has a lower and an upper bound"
    if not telemetry.switch_logs.privileged():
        finding = wrong if method == "exact" else note
        hidden = "processes of other users are hidden, so driver samples are used while they run"
        return finding("sharing", f"{text}: CAP_SYS_ADMIN is missing; {hidden}", _ADD_CAPABILITY)
    if method == "exact":
        return note("sharing", f"{text}, not exact: {unsampled}")
    return ok("sharing", f"{text} (exact would add busy samples)")


# The machine and this process


def read_kernel_driver(proc: str) -> str:
    """Returns the version of the loaded NVIDIA kernel module, or an empty text. Works in every
    container.
    """
    version = re.search(
        r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _read(Path(proc, "driver/nvidia/version"))
    )
    return version[1] if version else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_privileges(proc: str, exact_usage: bool) -> list[Finding]:
    status = _read(Path(proc, "self/status"))
    uid = re.search(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE | re.ASCII)
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    user = f"uid {uid[1]}" if uid else "unknown uid"
    needed = "CAP_SYS_ADMIN for --usage-from exact" if exact_usage else "none"
    text = (
        f"running as {user}; root is needed only for the kubelet socket; capabilities needed: "
        f"{needed}"
    )
    if exact_usage or not capabilities or not int(capabilities[1], 16) & _SYS_ADMIN:
        return [ok("privileges", text)]
    advice = "in a pod, set securityContext: {privileged: false, capabilities: {drop: [ALL]}}"
    return [
        ok("privileges", text),
        note("privileges", "this process has CAP_SYS_ADMIN, which podgpu does not need", advice),
    ]


def check_device_files(dev: str) -> list[Finding]:
    """Checks that the GPUs' device files can be opened. There may be none, because WSL works
    without them.
    """
    files = sorted([*Path(dev).glob("nvidiactl"), *Path(dev).glob("nvidia[0-9]*")])
    closed = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        advice = (
            "use the NVIDIA runtime (runtimeClassName: nvidia), or allow this user to read and "
            "write them"
        )
        return [wrong("device files", f"no permission to open {few_of(closed)}", advice)]
    return [ok("device files", f"{plural(len(files), 'file')}, all can be opened")] if files else []


def check_pid_namespace(proc: str) -> Finding:
    if in_host_pid_namespace(proc):
        return ok("pid namespace", "host PID namespace")
    text = "not in the host PID namespace: per-container usage is unavailable"
    return note(
        "pid namespace", text, "set hostPID: true, and mount /proc if podgpu cannot read it"
    )


def check_host_name(no_hostname: bool) -> Finding:
    name, node_name = socket.gethostname(), os.environ.get("NODE_NAME")
    if no_hostname:
        return ok("host name", "not in the labels (--no-hostname)")
    if node_name:
        return ok("host name", f"{node_name}, from NODE_NAME")
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        text = f"NODE_NAME is not set: the host label is the pod's name, {name}"
        advice = "env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"
        return wrong("host name", text, advice)
    return ok("host name", name)


# The API server, the kubelet and other allocation sources, and the device ids that they report

_WATCH_REFUSED_S = 0.5
"""Seconds to wait for the rejection of a watch. An accepted watch gets no response before the first
event.
"""


def check_watches(watches: Sequence[Informer[Any]], timeout: float) -> list[Finding]:
    if not watches:
        return []
    end = time.monotonic() + timeout
    for watch in watches:
        watch.wait_synced(max(0.0, end - time.monotonic()))
    all_synced = all(watch.synced for watch in watches)
    if all_synced:
        time.sleep(_WATCH_REFUSED_S)
    errors = dict.fromkeys(str(watch.error) for watch in watches if watch.error is not None)
    if errors:
        return [wrong("API server", text) for text in errors]
    if not all_synced:
        advice = "check that the API server runs, and that network policies allow connections to it"
        return [wrong("API server", "no complete response in time", advice)]
    return [ok("API server", f"answers, {len(watches)} watch{'es' * (len(watches) > 1)}")]


def check_holders(
    sources: Sequence[AllocationSource],
    readings: GpuReadings,
    selection: Selection,
    identities: IdentityReader,
    kubelet_required: bool,
    api: ApiAccess,
    workers: Workers,
    deadline: float,
) -> list[Finding]:
    """Reads each source of holders, reports its state, and checks the merged allocation."""
    if not sources:
        return [
            note(
                "kubelet",
                "not used, because --kubernetes (DCGM_EXPORTER_KUBERNETES) is false: no pod labels",
            )
        ]
    kubelet = next((source for source in sources if isinstance(source, KubeletAllocation)), None)
    responses: list[Any] = []  # responses of the kubelet

    def read(source: AllocationSource) -> Allocation:
        if not isinstance(source, KubeletAllocation):
            return source.assignments(readings.devices)
        response = source.list()
        responses.append(response)
        return source.map(response, readings.devices)

    allocations: dict[str, Allocation] = {}
    findings: list[Finding] = []
    for name, result in workers.run(
        {source.name: partial(read, source) for source in sources}, deadline
    ).items():
        if result.value is None:
            findings.append(_explain_error(name, result.error, kubelet_required))
            continue
        allocations[name] = result.value
        if kubelet is not None and name == SOURCE:
            findings += _check_kubelet(kubelet.socket, responses[0], result.value, api)
        else:
            findings.append(
                ok(
                    name,
                    plural(
                        len(result.value.assignments) + len(result.value.unmapped), "assignment"
                    ),
                )
            )
    if not allocations:
        return findings
    names = workers.run({"names": identities.read}, deadline)["names"].value or Identities()
    allocations = replace_reservations(allocations, names.pods, readings.devices, names.complete)
    resource_names = kubelet.resource_names if kubelet is not None else frozenset()
    containers = [
        container
        for response in responses
        for pod in response.pod_resources
        for container in pod.containers
    ]
    resources = {entry.resource_name for container in containers for entry in container.devices}
    return findings + check_mapping(
        merge(allocations, names.complete), readings, selection, resource_names, sorted(resources)
    )


def _check_kubelet(
    path: str, response: Any, allocation: Allocation, api: ApiAccess
) -> list[Finding]:
    responds = f"{path} responds"
    pods = {(pod.namespace, pod.name) for pod in response.pod_resources}
    watched = api.watched_pods
    is_read = watched is not None and watched.synced and watched.error is None
    api_pods = {(pod.namespace, pod.name) for pod in api.known_pods()} if is_read else set()
    if not pods:
        return [_explain_no_pods(responds, len(api_pods))]
    workloads = [entry.holder for entry in allocation.assignments] + [
        entry.holder for entry in allocation.unmapped
    ]
    holders = {(workload.namespace, workload.pod) for workload in workloads}
    text = (
        f"{plural(len(pods), 'pod')}, {len(holders)} with GPUs, "
        f"{plural(len(workloads), 'assignment')}"
    )
    findings = [ok("kubelet", f"{responds}: {text}")]
    if is_read and not pods & api_pods:
        text = (
            f"NODE_NAME is not this node: the API server has {plural(len(api_pods), 'pod')} on "
            "the node"
            f" {os.environ.get('NODE_NAME', '')!r}, this node's kubelet has "
            f"{plural(len(pods), 'pod')}, and none is in"
            " both lists, so data of the API server cannot be used"
        )
        advice = (
            "set NODE_NAME from spec.nodeName by the downward API; outside a pod, to the name in "
            "`kubectl get nodes`"
        )
        findings.append(wrong("node name", text, advice))
    return findings


def _explain_no_pods(responds: str, api_pods: int) -> Finding:
    """Explains an empty list of pods. A restarted kubelet lists no pods until the API server has
    answered.
    """
    advice = (
        "run doctor again in a minute; if this persists, check the kubelet's log and the API server"
    )
    if api_pods:
        text = (
            f"{responds}, but lists no pods, and the API server has {plural(api_pods, 'pod')} on "
            "this node"
        )
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        text = f"{responds}, but lists no pods, not even this one"
    else:
        return note(
            "kubelet",
            f"{responds}: no pods; if some run here, the kubelet was just restarted",
            advice,
        )
    return wrong("kubelet", f"{text}: it was restarted and does not know its pods yet", advice)


_ROOTS = (
    "the kubelet's directory is /var/lib/k0s/kubelet in k0s, "
    "/var/snap/microk8s/common/var/lib/kubelet in microk8s"
)


def _explain_error(name: str, error: Exception | None, kubelet_required: bool) -> Finding:
    text = str(error).removeprefix(f"{name}: ")  # the finding itself shows the name
    if name != SOURCE or getattr(error, "reason", "") != "socket_missing":
        return wrong(name, text)
    return (wrong if kubelet_required else note)(
        "kubelet", f"no pod labels, because {text}", _ROOTS
    )


# Mapping

_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")


def check_mapping(
    allocation: Allocation,
    readings: GpuReadings,
    selection: Selection,
    resource_names: frozenset[str],
    resources: Sequence[str],
) -> list[Finding]:
    """Checks that each assigned id is a device of this node. `resources`: names of all resources
    that pods hold.
    """
    if readings.inventory is None:
        assignments = plural(len(allocation.unmapped), "assignment")
        return [note("mapping", f"{assignments} cannot be mapped to GPUs without the driver")]
    findings = [_explain_unmapped(entry, readings, resource_names) for entry in allocation.unmapped]
    if not findings and allocation.assignments:
        text = f"{plural(len(allocation.assignments), 'assignment')}, all to devices of this node"
        findings.append(ok("mapping", text))
    elif not findings and resources:
        text = f"no pod holds a known GPU resource; pods hold devices of {few_of(resources)}"
        findings.append(
            note(
                "mapping", text, "if one of these contains GPUs, add it to --nvidia-resource-names"
            )
        )
    elif not findings:
        findings.append(ok("mapping", "no pod holds a GPU"))
    unnamed = [
        entry for entry in allocation.assignments if not entry.holder.pod and not entry.holder.job
    ]
    if unnamed:
        text = (
            f"{plural(len(unnamed), 'assignment')} of pods with unknown names "
            f"({unnamed[0].holder.text})"
        )
        advice = (
            "names come from the host's /var/log/pods and /var/log/containers: mount /var/log, or "
            "set --path-varlog"
        )
        findings.append(note("mapping", text, advice))
    shown = selection.select(readings.devices)
    hidden = [entry for entry in allocation.assignments if entry.device not in shown]
    if hidden:
        text = (
            f"{plural(len(hidden), 'assignment')} on devices excluded by -d {selection}: they are "
            "not exported"
        )
        findings.append(note("mapping", text, "use -d f to export all devices"))
    return findings


def _explain_unmapped(
    unmapped: Unmapped, readings: GpuReadings, resource_names: frozenset[str]
) -> Finding:
    text = describe(unmapped)
    device_id = parse_id_or_minor(unmapped.device_id)
    if unmapped.reason == "unknown_device" and device_id is not None and unmapped.source != "hpc":
        reason, advice = _explain_unknown(device_id, readings)
        return wrong("mapping", f"{text}: {reason}", advice)
    if unmapped.reason == "unrecognised_id":
        resource = unmapped.resource
        if (
            unmapped.source != "kubelet"
            or resource in resource_names
            or resource.startswith(_GPU_RESOURCES)
        ):
            advice = (
                "report the id and its device plugin or scheduler; until then the pod's GPU has "
                "no pod labels"
            )
            return wrong("mapping", f"{text}: the format of the id is not recognised", advice)
        return note(
            "mapping", f"{text}: not a GPU", "nothing to do unless this resource contains GPUs"
        )
    explanation = explain(unmapped)
    finding = note if explanation.harmless else wrong
    return finding(
        "mapping", f"{text} ({unmapped.source}): {explanation.reason}", explanation.advice
    )


def _explain_unknown(device_id: DeviceId, readings: GpuReadings) -> tuple[str, str]:
    """Returns the reason why a valid id matches no device of this node, and advice."""
    if not readings.is_complete:
        return "it may be a GPU that does not respond", "fix the problems of the GPUs first"
    if device_id.mig_uuid is not None or device_id.gi_id is not None:
        return (
            "this node has no such MIG instance",
            "the MIG layout was changed after the pod got the device: delete the pod, and restart "
            "the device plugin so"
            " that it offers the new instances",
        )
    return (
        "this node has no such GPU",
        "if the GPU was replaced, restart the device plugin and delete the pod; otherwise check "
        "that the socket belongs"
        " to this node's kubelet, and that this container gets all GPUs "
        "(NVIDIA_VISIBLE_DEVICES=all)",
    )
