"""Simulates a node (driver, kubelet and workloads) for `podgpu demo`, tests and benchmarks."""
