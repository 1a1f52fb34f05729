"""Sources of GPU figures: NVML, DCGM and the metrics of another exporter. They implement the interface in `source`."""
