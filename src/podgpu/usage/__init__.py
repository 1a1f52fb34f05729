"""Finds which workloads use the GPUs, and counts how much. Reads /proc and nothing else."""
