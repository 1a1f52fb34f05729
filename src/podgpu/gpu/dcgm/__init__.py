"""NVIDIA's host engine (DCGM) as a telemetry source, through libdcgm."""

from podgpu.gpu.dcgm.telemetry import DcgmSettings, DcgmTelemetry

__all__ = ["DcgmSettings", "DcgmTelemetry"]
