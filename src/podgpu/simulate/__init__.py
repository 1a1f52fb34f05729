"""A simulated node: driver, kubelet, workloads. What `podgpu demo`, the tests and the benchmarks run on.

Imported by `cli/` and tests only. Nothing here is a mock of podgpu's code: it stands where the world stands.
"""
