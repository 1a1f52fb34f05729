"""NVIDIA's driver library (NVML) as a telemetry source for one node."""
