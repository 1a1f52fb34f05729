"""This module judges figures that another program gives (DCGM's host engine, an exporter's page): is it there?

What is wrong with it is no matter of this machine's driver: neither the PCI bus nor dmesg is looked at for it.
"""

from __future__ import annotations

from collections import Counter

from podgpu.doctor.findings import REPORT, Finding, note, ok, plural, wrong
from podgpu.doctor.gpus import Gpus, judge_mig
from podgpu.telemetry.dcgm import DcgmTelemetry
from podgpu.telemetry.dcgm.library import shown
from podgpu.telemetry.exporter import ExporterTelemetry


def judge_dcgm(telemetry: DcgmTelemetry, gpus: Gpus) -> list[Finding]:
    if gpus.inventory is None:
        return [wrong("DCGM", str(gpus.error))]
    library, engine = telemetry.versions
    what = f"libdcgm {shown(library)}, host engine {shown(engine)}"
    if library and engine and library < engine:
        return [
            note(
                "DCGM",
                f"{what}: the library is older than the engine, so fields that are new there have no series",
                "update datacenter-gpu-manager in podgpu's image to the engine's version",
            )
        ]
    return [ok("DCGM", what)]


def judge_page(telemetry: ExporterTelemetry, gpus: Gpus) -> list[Finding]:
    """The messages of a page that cannot be had say what to do."""
    inventory = gpus.inventory
    if inventory is None:
        is_bug = getattr(gpus.error, "reason", "") == "bug"
        return [wrong("exporter", str(gpus.error), REPORT if is_bug else "")]
    models = Counter(gpu.model or "GPU of an unknown model" for gpu in inventory.gpus)
    listed = ", ".join(f"{number} × {model}" for model, number in models.items())
    return [
        ok("exporter", f"{telemetry.shown} tells of {plural(len(inventory.gpus), 'GPU')}: {listed}"),
        *(wrong("exporter", str(error)) for error in gpus.failures.values()),
        *_judge_copies(gpus),
        *judge_mig(gpus),
    ]


def _judge_copies(gpus: Gpus) -> list[Finding]:
    unsure = {gpu.index: len(answer.errors) for gpu, answer in gpus.answers.items() if answer.errors}
    return [
        note(
            "exporter",
            f"GPU {index}: {plural(number, 'figure')} left out, because the page has different ones for its holders",
            "an exporter that splits a GPU's figures among pods (KUBERNETES_VIRTUAL_GPUS) does that: let it tell the"
            " GPU's own, or read the driver (--telemetry nvml)",
        )
        for index, number in unsure.items()
    ]
