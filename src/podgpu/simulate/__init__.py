"""This room simulates a node: driver, kubelet, workloads. `podgpu demo`, the tests and the benchmarks run on it.

Imported by `cli/` and tests only. Nothing here is a mock of podgpu's code: it stands where the world stands.
"""
