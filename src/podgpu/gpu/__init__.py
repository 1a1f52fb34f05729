"""Sources of GPU values: NVML, DCGM and the metrics of another exporter. They implement the interface in `source`."""
