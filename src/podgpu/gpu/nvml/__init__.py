"""NVIDIA's driver library (NVML) as a telemetry source for one node."""

from podgpu.gpu.nvml.telemetry import NvmlTelemetry, count_pci_gpus

__all__ = ["NvmlTelemetry", "count_pci_gpus"]
