"""NVIDIA's host engine (DCGM) as a telemetry source, through libdcgm."""
