"""Reads GPU values from NVML, DCGM or the metrics of another exporter. Each source implements
`source.Telemetry`.
"""
