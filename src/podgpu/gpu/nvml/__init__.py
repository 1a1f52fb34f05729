"""NVIDIA's driver library (NVML) as a telemetry source for one node."""

from podgpu.gpu.nvml.telemetry import NvmlTelemetry

__all__ = ["NvmlTelemetry"]
