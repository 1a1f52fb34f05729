"""Sources of GPU figures: NVML, DCGM and the metrics of another exporter, behind the interface in `source.py`."""
