"""`podgpu exporter` itself, but for its simulated driver: GPUs of it hang at the start, hang later, or talk nonsense.

`python -m tests.faults.ailing_exporter exporter --telemetry simulated ...` takes the exporter's own command line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from podgpu.cli import main, node
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.source import Telemetry
from podgpu.simulate.gpu import SimulatedLoad
from tests.simulated import FaultyNvml

GPUS = "6xH100"
WELL = {0: 90, 1: 50, 2: 20, 3: 0}
"""Number of the GPU -> per cent it is busy, always."""
NO_ENERGY = 3
"""Its energy counter answers NaN; all else of it is well."""
HANGS_LATER, HANGS_AT_START = 4, 5
WELL_VARIABLE = "ALL_WELL"
"""Set in the environment: nothing is wrong with any GPU, to see what the attackers alone do."""
_WELL_SECONDS = 5.0
_HUNG_SECONDS, _BACK_SECONDS = 90.0, 10.0
_READING, _ENUMERATION = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUUID"


def driver() -> FaultyNvml:
    """The seed is fixed: whoever scrapes knows the UUIDs."""
    made = FaultyNvml(GPUS, jitter=0)
    for number, percent in WELL.items():
        if percent:
            made.place(SimulatedLoad(number, 4000 + number, percent / 100))
    return made


def _ailing(_argument: str, _options: Mapping[str, Any]) -> Telemetry:
    nvml = driver()
    if WELL_VARIABLE not in os.environ:
        _spoil(nvml)
    count = len(nvml.gpus)
    return NvmlTelemetry(nvml, "simulated", count_expected=lambda: count)


def _spoil(nvml: FaultyNvml) -> None:
    nvml.faults.answer("nvmlDeviceGetTotalEnergyConsumption", float("nan"), NO_ENERGY)
    nvml.faults.hang(_ENUMERATION, HANGS_AT_START)
    threading.Thread(target=_ail, args=(nvml,), daemon=True).start()


def _ail(nvml: FaultyNvml) -> None:
    """One GPU hangs for a while, answers again, and hangs again, to the end."""
    pause = threading.Event()
    pause.wait(_WELL_SECONDS)
    while True:
        hang = nvml.faults.hang(_READING, HANGS_LATER)
        pause.wait(_HUNG_SECONDS)
        hang.release()
        pause.wait(_BACK_SECONDS)


if __name__ == "__main__":
    node.TELEMETRIES["simulated"] = _ailing  # type: ignore[index]
    main()
