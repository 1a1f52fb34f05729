"""Reads GPU values from NVIDIA's driver library (NVML)."""
