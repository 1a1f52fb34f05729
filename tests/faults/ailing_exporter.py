"""Runs `podgpu exporter` on a simulated driver. One GPU hangs at its first call, another when it is
read.

`python -m tests.faults.ailing_exporter exporter --telemetry simulated ...` takes the options of the
exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podgpu.cli import main, sources
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.gpu.source import Telemetry
from tests.simulated import FaultyNvml


def _open_telemetry(_argument: str, _options: Mapping[str, Any]) -> Telemetry:
    nvml = FaultyNvml("6xH100")
    nvml.faults.hang("nvmlDeviceGetPowerUsage", 4)
    nvml.faults.hang("nvmlDeviceGetUUID", 5)
    return NvmlTelemetry(nvml, "simulated", count_expected=lambda: len(nvml.gpus))


if __name__ == "__main__":
    sources.TELEMETRIES["simulated"] = _open_telemetry  # type: ignore[index]
    main()
