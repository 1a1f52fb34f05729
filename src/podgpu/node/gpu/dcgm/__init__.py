"""Reads GPU values from NVIDIA's DCGM through libdcgm."""
