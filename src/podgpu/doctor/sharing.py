"""This module says how a GPU would be told apart if containers shared it, with the given `--usage-from`, and what
better would need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.errors import few_of
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.nvml.switch_splitter import Capability
from podgpu.gpu.source import Telemetry
from podgpu.model import Device, UsageMethod
from podgpu.workers import Workers

SUBJECT = "sharing"
ADD_CAPABILITY = (
    "give it CAP_SYS_ADMIN (chart: exporter.usage.from: exact adds it; docker run --cap-add SYS_ADMIN --user 0),"
    " without a user namespace"
)
_OF_DRIVER = "look for NVRM lines in the host's dmesg, and whether the container has the GPUs by the NVIDIA runtime"
_ADVICE = {
    "no_device_node": (
        "let the NVIDIA runtime hand in /dev/nvidiactl and /dev/nvidia0, /dev/nvidia1, … (runtimeClassName: nvidia)"
    ),
    "old_driver": "install driver 515 or later, or keep to --usage-from samples",
    "gpu_not_found": _OF_DRIVER,
    "rm_error": f"{_OF_DRIVER}; a vGPU guest needs the profiling capability of its host",
}
"""By the reason for which a log cannot be had."""


def judge_sharing(
    telemetry: Telemetry, gpus: Sequence[Device], wanted: UsageMethod, isolation: Workers, deadline: float
) -> list[Finding]:
    if wanted == "samples":
        return [
            ok(
                SUBJECT,
                "the time of shared GPUs is divided by the driver's samples, each given whole to one process;"
                " --usage-from switches or exact divide it better",
            )
        ]
    if not isinstance(telemetry, NvmlTelemetry):
        return [note(SUBJECT, "what --usage-from can do here is not looked at with this --telemetry", "say nvml")]
    results = isolation.run({f"switches-{g.uuid}": partial(telemetry.check_capability, g) for g in gpus}, deadline)
    findings: dict[Finding, list[str]] = {}
    for gpu in gpus:
        result = results[f"switches-{gpu.uuid}"]
        finding = judge_capability(result.value, gpu) if result.value is not None else _unknown(str(result.error))
        findings.setdefault(finding, []).append(str(gpu.index))
    return [Finding(f.level, f.subject, f"{_name(numbers)}: {f.text}", f.advice) for f, numbers in findings.items()]


def judge_capability(capability: Capability, gpu: Device) -> Finding:
    if capability.error is not None:
        text = f"divided by the driver's samples, since its context switches cannot be read: {capability.error}"
        return wrong(SUBJECT, text, _ADVICE.get(capability.error.reason, _OF_DRIVER))
    if capability.method == "exact":
        return ok(SUBJECT, "divided exactly, by context switches and busy samples")
    if capability.wanted == "exact":
        return _judge_unsampled(capability, gpu)
    if capability.privileged:
        return ok(SUBJECT, "divided by context switches, with bounds (exact would add busy samples)")
    return note(
        SUBJECT,
        "divided by context switches, with bounds; while processes of another user run on it, by samples, since"
        " without CAP_SYS_ADMIN those are hidden",
        ADD_CAPABILITY,
    )


def _judge_unsampled(capability: Capability, gpu: Device) -> Finding:
    text = "divided by context switches, with bounds and not exactly"
    if not capability.privileged:
        return wrong(SUBJECT, f"{text}: CAP_SYS_ADMIN is missing", ADD_CAPABILITY)
    if gpu.mig_enabled:
        return note(SUBJECT, f"{text}: nobody has measured the busy register of a GPU that MIG cuts")
    return note(
        SUBJECT,
        f"{text}: {capability.unsampled}",
        "podgpu doctor --probe-switches measures it on an idle GPU; report what it says",
    )


def _unknown(why: str) -> Finding:
    return wrong(SUBJECT, f"not known: {why}", _OF_DRIVER)


def _name(numbers: Sequence[str]) -> str:
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {few_of(numbers)}"
