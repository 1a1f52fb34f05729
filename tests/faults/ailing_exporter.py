"""`podgpu exporter` on a faulty simulated driver: one GPU hangs at the start, one later, one has an invalid value.

`python -m tests.faults.ailing_exporter exporter --telemetry simulated ...` takes the options of the exporter.
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
"""Number of a healthy GPU -> its utilization in %."""
NO_ENERGY = 3
"""The energy counter of this GPU returns NaN."""
HANGS_LATER, HANGS_AT_START = 4, 5
WELL_VARIABLE = "ALL_WELL"
"""If this environment variable is set, no GPU has a fault."""
_WELL_SECONDS = 5.0
_HUNG_SECONDS, _BACK_SECONDS = 90.0, 10.0
_READING, _ENUMERATION = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUUID"


def driver() -> FaultyNvml:
    """Returns a driver with the same UUIDs in every process."""
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
    """Makes one GPU hang again and again."""
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
