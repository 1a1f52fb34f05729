"""Simulates a node (driver, kubelet and workloads) for `podgpu demo`, tests and benchmarks.

Methods that inject faults, such as `FaultInjector.unload_driver` and `SimulatedProc.forbid`, exist for the demo and
tests.
"""
