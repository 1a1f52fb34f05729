"""This module asks the driver and every GPU, one by one under a deadline, and judges the answers. Changes nothing.

So it does where another program gives the figures: DCGM's host engine, an exporter's exposition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from podgpu.doctor.findings import REPORT, Finding, note, ok, plural, wrong
from podgpu.doctor.host import Host
from podgpu.errors import SourceError, StartError
from podgpu.gpu.dcgm import DcgmTelemetry
from podgpu.gpu.dcgm.connection import format_version
from podgpu.gpu.exporter import ExporterTelemetry
from podgpu.gpu.nvml.driver import VersionMismatch
from podgpu.gpu.nvml.plan import MIN_GPM_SECONDS
from podgpu.gpu.source import GpuAnswer, Inventory, Telemetry
from podgpu.metrics.fields import Field
from podgpu.model import Device
from podgpu.workers import Workers

DRIVER_VERSION, NVML_VERSION = 1, 2
"""Fields the doctor wants whatever the counter file says."""

_RUNTIME = (
    "run the container with the NVIDIA runtime (runtimeClassName: nvidia) and NVIDIA_VISIBLE_DEVICES=all,"
    " NVIDIA_DRIVER_CAPABILITIES=utility"
)
_LOOK = "look for NVRM and Xid lines in the host's dmesg, and whether nvidia-smi answers there"


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the driver and the GPUs answered."""

    inventory: Inventory | None = None
    """None: the driver gave none, and `error` says why."""
    error: SourceError | StartError | None = None
    answers: Mapping[Device, GpuAnswer] = field(default_factory=dict)
    failures: Mapping[Device, SourceError | StartError] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        """GPUs with their MIG instances; of one that did not answer only the GPU is known."""
        answered = (r.device for a in self.answers.values() for r in a.readings)
        return (*answered, *self.failures)

    @property
    def are_all_known(self) -> bool:
        return self.inventory is not None and not self.inventory.unreachable and not self.failures


def read_gpus(
    telemetry: Telemetry,
    fields: Sequence[Field],
    isolation: Workers,
    deadline: float,
    pause: Callable[[float], object],
) -> Gpus:
    asked = isolation.run({"driver": telemetry.inventory}, deadline)["driver"]
    if asked.value is None:
        return Gpus(error=asked.error)

    def read(gpu: Device) -> GpuAnswer:
        telemetry.read(gpu, fields)
        pause(MIN_GPM_SECONDS)  # rates and GPM answer from the second reading on
        return telemetry.read(gpu, fields)

    results = isolation.run({f"GPU {g.index}": partial(read, g) for g in asked.value.gpus}, deadline)
    outcomes = {g: results[f"GPU {g.index}"] for g in asked.value.gpus}
    return Gpus(
        asked.value,
        answers={g: r.value for g, r in outcomes.items() if r.value is not None},
        failures={g: r.error for g, r in outcomes.items() if r.error is not None},
    )


def judge_gpus(gpus: Gpus, host: Host, expected: int | None) -> list[Finding]:
    """`expected`: how many GPUs the PCI bus shows, None when that is not known."""
    inventory = gpus.inventory
    if inventory is None:
        return [_explain_no_driver(gpus.error, host)]
    return [
        ok("driver", f"{_versions(gpus, host)}, {plural(len(inventory.gpus), 'GPU')}"),
        *_judge_count(inventory, expected),
        *(wrong("GPUs", f"GPU {index} does not answer: {why}") for index, why in inventory.unreachable.items()),
        *(wrong("GPUs", f"GPU {g.index} ({g.uuid}): {_unanswered(e)}", _advice(e)) for g, e in gpus.failures.items()),
        *_judge_single_calls(gpus),
        *judge_mig(gpus),
    ]


def _versions(gpus: Gpus, host: Host) -> str:
    values = {i: v for a in gpus.answers.values() for r in a.readings for i, v in r.values.items()}
    driver = values.get(DRIVER_VERSION) or host.kernel_driver or "driver of unknown version"
    return f"NVIDIA {driver}" + (f", NVML {values[NVML_VERSION]}" if NVML_VERSION in values else "")


def _judge_count(inventory: Inventory, expected: int | None) -> list[Finding]:
    listed = len(inventory.gpus) + len(inventory.unreachable)
    models = ", ".join(f"{n} × {model}" for model, n in Counter(g.model for g in inventory.gpus).items())
    if expected is not None and listed < expected:
        return [
            wrong(
                "GPUs",
                f"the PCI bus shows {expected}, the driver lists {listed}" + (f": {models}" if models else ""),
                "in a container set NVIDIA_VISIBLE_DEVICES=all; on the host look for NVRM lines in dmesg, and for GPUs"
                " bound to vfio-pci",
            )
        ]
    if not listed:
        return [wrong("GPUs", "the driver lists none", f"{_RUNTIME}; on the host {_LOOK}")]
    on_the_bus = "" if expected is None else f"; the PCI bus shows {expected}"
    return [ok("GPUs", f"{models}{on_the_bus}")] if models else []


def _judge_single_calls(gpus: Gpus) -> list[Finding]:
    failed = {g: sorted(set(a.errors)) for g, a in gpus.answers.items() if a.errors}
    return [
        note("GPUs", f"GPU {g.index}: single calls failed this time ({', '.join(reasons)})", _LOOK)
        for g, reasons in failed.items()
    ]


def judge_mig(gpus: Gpus) -> list[Finding]:
    layouts = {a.readings[0].device: [r.device for r in a.readings[1:]] for a in gpus.answers.values() if a.readings}
    in_mig_mode = {gpu: instances for gpu, instances in layouts.items() if gpu.mig_enabled}
    if layouts and not in_mig_mode:
        return [ok("MIG", "off")]
    return [_judge_layout(gpu, instances) for gpu, instances in in_mig_mode.items()]


def _judge_layout(gpu: Device, instances: Sequence[Device]) -> Finding:
    if not instances:
        return note(
            "MIG",
            f"GPU {gpu.index}: on, but there is no instance on it, so no pod can use it",
            "make instances (nvidia-smi mig -cgi … -C, or the MIG manager's node label), or turn MIG off",
        )
    profiles = Counter(instance.profile for instance in instances)
    return ok("MIG", f"GPU {gpu.index}: " + ", ".join(f"{n} × {profile}" for profile, n in profiles.items()))


def _unanswered(error: SourceError | StartError | None) -> str:
    """The worker's name stands in front of a message about a deadline; ours says the same better."""
    text = str(error)
    return text.partition(": ")[2] if getattr(error, "reason", "") in ("deadline", "bug") else text


def _advice(error: SourceError | StartError | None) -> str:
    return REPORT if getattr(error, "reason", "") == "bug" else _LOOK


def _explain_no_driver(error: SourceError | StartError | None, host: Host) -> Finding:
    in_kernel = f"the kernel has the driver, version {host.kernel_driver}"
    reason = getattr(error, "reason", "")
    if isinstance(error, VersionMismatch):
        what = f" ({in_kernel})" if host.kernel_driver else ""
        return wrong(
            "driver",
            f"libnvidia-ml here and the driver in the kernel are of different versions{what}",
            "the driver was upgraded while podgpu ran: delete the pod so that it is recreated; on a host reload the"
            " nvidia modules or reboot",
        )
    if reason not in ("library_not_found", "driver_not_loaded"):
        return wrong("driver", _unanswered(error), _advice(error))
    if not host.kernel_driver:
        return _explain_bare_kernel(host, "" if reason == "driver_not_loaded" else ", no libnvidia-ml.so.1 here")
    if reason == "library_not_found":
        return wrong(
            "driver", f"libnvidia-ml.so.1 is not here, though {in_kernel}", f"{_RUNTIME}, or mount the library"
        )
    missing = "" if host.device_files else ": its files /dev/nvidia* are not here"
    return wrong("driver", f"NVML does not reach the driver, though {in_kernel}{missing}", _RUNTIME)


def _explain_bare_kernel(host: Host, nor: str) -> Finding:
    if host.pci_gpus is None:
        return wrong(
            "driver",
            f"no NVIDIA GPU on the PCI bus, no NVIDIA driver in the kernel{nor}",
            'keep podgpu to nodes with GPUs (nodeSelector: {nvidia.com/gpu.present: "true"}); to try it without one:'
            " --telemetry simulated",
        )
    return wrong(
        "driver",
        f"{plural(host.pci_gpus, 'NVIDIA GPU')} on the PCI bus, but no NVIDIA driver in the kernel{nor}",
        "install the driver on the host, or see what the GPU operator's driver pod waits for; podgpu takes it up"
        " without a restart",
    )


# Figures that another program gives: neither the PCI bus nor dmesg of this machine is looked at for those


def judge_dcgm(telemetry: DcgmTelemetry, gpus: Gpus) -> list[Finding]:
    if gpus.inventory is None:
        return [wrong("DCGM", str(gpus.error))]
    library, engine = telemetry.versions
    what = f"libdcgm {format_version(library)}, host engine {format_version(engine)}"
    if library and engine and library < engine:
        return [
            note(
                "DCGM",
                f"{what}: the library is older than the engine, so fields that are new there have no series",
                "update datacenter-gpu-manager in podgpu's image to the engine's version",
            )
        ]
    return [ok("DCGM", what)]


def judge_exposition(telemetry: ExporterTelemetry, gpus: Gpus) -> list[Finding]:
    """The messages of an exposition that cannot be had say what to do."""
    inventory = gpus.inventory
    if inventory is None:
        is_bug = getattr(gpus.error, "reason", "") == "bug"
        return [wrong("exporter", str(gpus.error), REPORT if is_bug else "")]
    models = Counter(gpu.model or "GPU of an unknown model" for gpu in inventory.gpus)
    listed = ", ".join(f"{number} × {model}" for model, number in models.items())
    return [
        ok("exporter", f"{telemetry.shown} has {plural(len(inventory.gpus), 'GPU')}: {listed}"),
        *(wrong("exporter", str(error)) for error in gpus.failures.values()),
        *_judge_copies(gpus),
        *judge_mig(gpus),
    ]


def _judge_copies(gpus: Gpus) -> list[Finding]:
    unsure = {gpu.index: len(answer.errors) for gpu, answer in gpus.answers.items() if answer.errors}
    return [
        note(
            "exporter",
            f"GPU {index}: {plural(number, 'figure')} left out, as the exporter has different ones for its holders",
            "an exporter that splits a GPU's figures among pods (KUBERNETES_VIRTUAL_GPUS) does that: let it export"
            " the GPU's own, or read the driver (--telemetry nvml)",
        )
        for index, number in unsure.items()
    ]
