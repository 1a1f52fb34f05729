"""Checks the driver and the GPUs: number, MIG, counters, profiling and per-container usage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from podgpu.doctor.findings import REPORT, Finding, is_bug, note, ok, plural, report_error, wrong
from podgpu.doctor.host import Host
from podgpu.errors import SourceError, StartError, few_of
from podgpu.gpu.dcgm import DcgmTelemetry
from podgpu.gpu.dcgm.connection import format_version
from podgpu.gpu.exporter import ExporterTelemetry
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.nvml.driver import VersionMismatch
from podgpu.gpu.nvml.plan import MIN_GPM_SECONDS
from podgpu.gpu.nvml.switch_splitter import Capability
from podgpu.gpu.source import GpuAnswer, Inventory, Telemetry
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.fields import Field, Gpm, fields
from podgpu.model import Device, UsageMethod
from podgpu.workers import Workers

SIMULATED = "simulated"
_DRIVER_VERSION, _NVML_VERSION, _GR_ENGINE_ACTIVE = 1, 2, 1001
_RUNTIME = (
    "run the container with the NVIDIA runtime (runtimeClassName: nvidia) and NVIDIA_VISIBLE_DEVICES=all,"
    " NVIDIA_DRIVER_CAPABILITIES=utility"
)
_DMESG = "check the host's dmesg for NVRM and Xid lines, and whether nvidia-smi works there"

ReadError = SourceError | StartError


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """The results of reading the driver and the GPUs."""

    inventory: Inventory | None = None  # None if the driver could not be read, see `error`
    error: ReadError | None = None
    answers: Mapping[Device, GpuAnswer] = field(default_factory=dict)
    failures: Mapping[Device, ReadError] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs and their MIG instances. The instances of a GPU that did not respond are unknown."""
        answered = (reading.device for answer in self.answers.values() for reading in answer.readings)
        return (*answered, *self.failures)

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
    wanted |= {number: fields()[number] for number in (_DRIVER_VERSION, _NVML_VERSION, _GR_ENGINE_ACTIVE)}
    result = workers.run({"driver": telemetry.inventory}, deadline)["driver"]
    if result.value is None:
        return GpuReadings(error=result.error)

    chosen = tuple(wanted.values())

    def read(gpu: Device) -> GpuAnswer:
        telemetry.read(gpu, chosen)
        pause(MIN_GPM_SECONDS)  # rates and GPM need two readings
        return telemetry.read(gpu, chosen)

    gpus = result.value.gpus
    results = workers.run({f"GPU {gpu.index}": partial(read, gpu) for gpu in gpus}, deadline)
    by_gpu = {gpu: results[f"GPU {gpu.index}"] for gpu in gpus}
    return GpuReadings(
        result.value,
        answers={gpu: result.value for gpu, result in by_gpu.items() if result.value is not None},
        failures={gpu: result.error for gpu, result in by_gpu.items() if result.error is not None},
    )


def check_gpus(
    readings: GpuReadings, host: Host, telemetry: Telemetry, counters: Sequence[CounterSpec]
) -> list[Finding]:
    """Checks the source of GPU figures. Skips the host checks for simulated GPUs and other exporters."""
    if isinstance(telemetry, ExporterTelemetry):
        findings, provider = _check_exporter(telemetry, readings), "that exporter's counter file"
    elif isinstance(telemetry, DcgmTelemetry):
        findings, provider = [_check_dcgm(telemetry, readings)], "DCGM"
        if readings.inventory is not None:
            findings += _check_driver(readings, host, telemetry.expected)
    elif telemetry.name == SIMULATED:
        findings, provider = _check_driver(readings, Host(), None), ""
    else:
        findings, provider = _check_driver(readings, host, telemetry.expected), ""
    return findings + _check_counters(readings, counters, provider)


# Driver


def _check_driver(readings: GpuReadings, host: Host, expected: int | None) -> list[Finding]:
    """`expected` is the number of GPUs on the PCI bus, or None if unknown."""
    inventory = readings.inventory
    if inventory is None:
        return [_explain_driver_error(readings.error, host)]
    values = {
        number: value
        for answer in readings.answers.values()
        for reading in answer.readings
        for number, value in reading.values.items()
    }
    driver = values.get(_DRIVER_VERSION) or host.kernel_driver or "driver of unknown version"
    nvml = f", NVML {values[_NVML_VERSION]}" if _NVML_VERSION in values else ""
    return [
        ok("driver", f"NVIDIA {driver}{nvml}, {plural(len(inventory.gpus), 'GPU')}"),
        *_check_count(inventory, expected),
        *(wrong("GPUs", f"GPU {index} does not respond: {error}") for index, error in inventory.unreachable.items()),
        *(
            wrong("GPUs", f"GPU {gpu.index} ({gpu.uuid}): {_message(error)}", REPORT if is_bug(error) else _DMESG)
            for gpu, error in readings.failures.items()
        ),
        *(
            note("GPUs", f"GPU {gpu.index}: some calls failed ({', '.join(sorted(set(answer.errors)))})", _DMESG)
            for gpu, answer in readings.answers.items()
            if answer.errors
        ),
        *_check_mig(readings),
    ]


def _check_count(inventory: Inventory, expected: int | None) -> list[Finding]:
    listed = len(inventory.gpus) + len(inventory.unreachable)
    models = ", ".join(f"{number} × {model}" for model, number in Counter(g.model for g in inventory.gpus).items())
    if expected is not None and listed < expected:
        return [
            wrong(
                "GPUs",
                f"the PCI bus has {expected}, the driver lists {listed}" + (f": {models}" if models else ""),
                "in a container set NVIDIA_VISIBLE_DEVICES=all; on the host check dmesg for NVRM lines, and for GPUs"
                " bound to vfio-pci",
            )
        ]
    if not listed:
        return [wrong("GPUs", "the driver lists none", f"{_RUNTIME}; on the host {_DMESG}")]
    return [ok("GPUs", models + ("" if expected is None else f"; the PCI bus has {expected}"))] if models else []


def _check_mig(readings: GpuReadings) -> list[Finding]:
    layouts = {
        answer.readings[0].device: [reading.device for reading in answer.readings[1:]]
        for answer in readings.answers.values()
        if answer.readings
    }
    enabled = {gpu: instances for gpu, instances in layouts.items() if gpu.mig_enabled}
    if layouts and not enabled:
        return [ok("MIG", "off")]
    findings = []
    for gpu, instances in enabled.items():
        profiles = Counter(instance.profile for instance in instances)
        if profiles:
            text = ", ".join(f"{number} × {profile}" for profile, number in profiles.items())
            findings.append(ok("MIG", f"GPU {gpu.index}: {text}"))
        else:
            findings.append(
                note(
                    "MIG",
                    f"GPU {gpu.index}: on, but without instances, so no pod can use it",
                    "create instances (nvidia-smi mig -cgi … -C, or the MIG manager's node label), or turn MIG off",
                )
            )
    return findings


def _message(error: ReadError | None) -> str:
    """Returns the message of the error without the name of the worker."""
    text = str(error)
    return text.partition(": ")[2] if getattr(error, "reason", "") in ("deadline", "bug") else text


def _explain_driver_error(error: ReadError | None, host: Host) -> Finding:
    in_kernel = f"the kernel has driver {host.kernel_driver}"
    reason = getattr(error, "reason", "")
    if isinstance(error, VersionMismatch):
        return wrong(
            "driver",
            "libnvidia-ml and the driver in the kernel have different versions"
            + (f" ({in_kernel})" if host.kernel_driver else ""),
            "the driver was upgraded while podgpu ran: delete the pod so that it is recreated; on a host reload the"
            " nvidia modules or reboot",
        )
    if reason not in ("library_not_found", "driver_not_loaded"):
        return wrong("driver", _message(error), REPORT if is_bug(error) else _DMESG)
    if host.kernel_driver and reason == "library_not_found":
        return wrong("driver", f"libnvidia-ml.so.1 not found, but {in_kernel}", f"{_RUNTIME}, or mount the library")
    if host.kernel_driver:
        missing = "" if host.device_files else ": /dev/nvidia* are missing"
        return wrong("driver", f"NVML cannot reach the driver, but {in_kernel}{missing}", _RUNTIME)
    no_library = "" if reason == "driver_not_loaded" else ", and no libnvidia-ml.so.1"
    if host.pci_gpus is None:
        return wrong(
            "driver",
            f"no NVIDIA GPU on the PCI bus, no NVIDIA driver in the kernel{no_library}",
            'run podgpu on nodes with GPUs only (nodeSelector: {nvidia.com/gpu.present: "true"}); to try it without'
            " one: --telemetry simulated",
        )
    return wrong(
        "driver",
        f"{plural(host.pci_gpus, 'NVIDIA GPU')} on the PCI bus, but no NVIDIA driver in the kernel{no_library}",
        "install the driver on the host, or check the GPU operator's driver pod; podgpu needs no restart",
    )


# Other sources of figures


def _check_dcgm(telemetry: DcgmTelemetry, readings: GpuReadings) -> Finding:
    if readings.inventory is None:
        return wrong("DCGM", str(readings.error))
    library, engine = telemetry.versions
    versions = f"libdcgm {format_version(library)}, host engine {format_version(engine)}"
    if library and engine and library < engine:
        return note(
            "DCGM",
            f"{versions}: the library is older than the engine, so newer fields are not exported",
            "update datacenter-gpu-manager in podgpu's image to the engine's version",
        )
    return ok("DCGM", versions)


def _check_exporter(telemetry: ExporterTelemetry, readings: GpuReadings) -> list[Finding]:
    inventory = readings.inventory
    if inventory is None:
        return [report_error("exporter", readings.error)]
    models = Counter(gpu.model or "GPU of unknown model" for gpu in inventory.gpus)
    listed = ", ".join(f"{number} × {model}" for model, number in models.items())
    return [
        ok("exporter", f"{telemetry.shown} has {plural(len(inventory.gpus), 'GPU')}: {listed}"),
        *(wrong("exporter", str(error)) for error in readings.failures.values()),
        *(
            note(
                "exporter",
                f"GPU {gpu.index}: {plural(len(answer.errors), 'value')} ignored, because the exporter reports"
                " different values for each holder",
                "the exporter may split GPUs among pods (KUBERNETES_VIRTUAL_GPUS): turn this off there, or read the"
                " driver (--telemetry nvml)",
            )
            for gpu, answer in readings.answers.items()
            if answer.errors
        ),
        *_check_mig(readings),
    ]


# Counters


def _check_counters(readings: GpuReadings, counters: Sequence[CounterSpec], provider: str = "") -> list[Finding]:
    """`provider` is the program that supplies the figures instead of the driver, if any. It does not need GPM."""
    models: dict[str, list[GpuAnswer]] = defaultdict(list)
    for gpu, answer in readings.answers.items():
        in_mig_mode = any(reading.device.mig_enabled for reading in answer.readings)
        models[(gpu.model or "the GPU") + (" in MIG mode" if in_mig_mode else "")].append(answer)
    findings = []
    for model, answers in models.items():
        unsupported = {number for answer in answers for number in _find_unsupported(answer)}
        missing = [counter for counter in counters if counter.field.id in unsupported]
        if provider:
            advice = f"they are not exported; add them to {provider} if you need them"
            findings.append(_check_missing(model, missing, len(counters), advice))
            continue
        has_gpm = any(
            isinstance(fields()[number].recipe, Gpm)
            for answer in answers
            for reading in answer.readings
            for number in reading.values
        )
        from_gpm = [] if has_gpm else [counter for counter in missing if isinstance(counter.field.recipe, Gpm)]
        others = [counter for counter in missing if counter not in from_gpm]
        findings += [_check_missing(model, others, len(counters)), _check_gpm(model, has_gpm, from_gpm)]
    return findings


def _find_unsupported(answer: GpuAnswer) -> set[int]:
    """Returns the fields that neither the GPU nor its instances support."""
    available: set[int] = {number for reading in answer.readings for number in reading.values}
    return {number for _, number in answer.unsupported} - available


def _check_missing(
    model: str,
    missing: Sequence[CounterSpec],
    wanted: int,
    advice: str = "nothing to do: the other counters are exported",
) -> Finding:
    if not wanted:
        return ok("counters", "none configured (-f none)")
    if not missing:
        return ok("counters", f"{model} supports all {wanted}")
    return note("counters", f"{model} does not support {len(missing)} of {wanted}: {_list(missing)}", advice)


def _check_gpm(model: str, has_gpm: bool, missing: Sequence[CounterSpec]) -> Finding:
    if has_gpm:
        return ok("profiling", f"{model}: GPM works, so DCGM_FI_PROF_* do not need DCGM")
    if not missing:
        return ok("profiling", f"{model}: no GPM, and no counter needs it")
    return note(
        "profiling",
        f"{model}: no GPM, so these are not exported: {_list(missing)}",
        "GPM needs Hopper or later; on older GPUs only DCGM has these metrics: keep a dcgm-exporter for them, or remove"
        " them (-f)",
    )


def _list(counters: Sequence[CounterSpec]) -> str:
    return few_of((counter.name for counter in counters), 10)


# Usage of shared GPUs

_ADD_CAPABILITY = (
    "add CAP_SYS_ADMIN (chart: exporter.usage.from: exact; docker run --cap-add SYS_ADMIN --user 0), without a user"
    " namespace"
)
_CHECK_DRIVER = "check the host's dmesg for NVRM lines, and whether the container uses the NVIDIA runtime"
_SWITCHES_ADVICE = {
    "no_device_node": (
        "mount /dev/nvidiactl and /dev/nvidia0, /dev/nvidia1, … with the NVIDIA runtime (runtimeClassName: nvidia)"
    ),
    "old_driver": "install driver 515 or later, or use --usage-from samples",
    "rm_error": f"{_CHECK_DRIVER}; a vGPU guest needs the profiling capability of its host",
}
"""Advice by the reason why the context-switch log is not available."""


def check_usage(
    telemetry: Telemetry, gpus: Sequence[Device], method: UsageMethod, workers: Workers, deadline: float
) -> list[Finding]:
    """Checks which method of `--usage-from` can split the busy time of shared GPUs on this node."""
    if method == "samples":
        text = (
            "busy time of shared GPUs is split by driver samples, each credited to one process; --usage-from switches"
            " or exact are more accurate"
        )
        return [ok("sharing", text)]
    if not isinstance(telemetry, NvmlTelemetry):
        return [note("sharing", "--usage-from cannot be checked with this --telemetry", "use --telemetry nvml")]
    results = workers.run({f"switches-{gpu.uuid}": partial(telemetry.check_capability, gpu) for gpu in gpus}, deadline)
    findings: dict[Finding, list[str]] = defaultdict(list)
    for gpu in gpus:
        result = results[f"switches-{gpu.uuid}"]
        if result.value is not None:
            finding = _check_switches(result.value, gpu)
        else:
            finding = wrong("sharing", f"unknown: {result.error}", _CHECK_DRIVER)
        findings[finding].append(str(gpu.index))
    return [
        replace(finding, text=f"GPU{'s' * (len(numbers) > 1)} {few_of(numbers)}: {finding.text}")
        for finding, numbers in findings.items()
    ]


def _check_switches(capability: Capability, gpu: Device) -> Finding:
    if capability.error is not None:
        text = f"uses driver samples instead, because context switches cannot be read: {capability.error}"
        return wrong("sharing", text, _SWITCHES_ADVICE.get(capability.error.reason, _CHECK_DRIVER))
    if capability.method == "exact":
        return ok("sharing", "exact: uses context switches and busy samples")
    text = "uses context switches, with bounds"
    if capability.wanted == "exact" and not capability.privileged:
        return wrong("sharing", f"{text}, not exact: CAP_SYS_ADMIN is missing", _ADD_CAPABILITY)
    if capability.wanted == "exact":
        reason = "the busy register was not measured in MIG mode" if gpu.mig_enabled else capability.unsampled
        return note("sharing", f"{text}, not exact: {reason}")
    if capability.privileged:
        return ok("sharing", f"{text} (exact would add busy samples)")
    return note(
        "sharing",
        f"{text}. Uses driver samples while processes of other users run, because they are hidden without"
        " CAP_SYS_ADMIN",
        _ADD_CAPABILITY,
    )
