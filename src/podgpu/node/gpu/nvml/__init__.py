"""Reads GPU values from NVIDIA's driver library (NVML).

With `--usage-from switches` or `exact`, `switch_splitter.py` splits the busy time of a shared GPU
among its processes. `switch_log.py` reads the driver's log of context switches. From this log,
`switch_attribution.py` estimates when each process was busy, and `switch_waiting.py` when it
waited.
"""
