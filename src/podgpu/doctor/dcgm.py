"""DCGM as the source of figures: is the library here, does an engine answer, do their versions fit?"""

from __future__ import annotations

from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.doctor.gpus import Gpus
from podgpu.telemetry.dcgm import DcgmTelemetry
from podgpu.telemetry.dcgm_library import shown


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
