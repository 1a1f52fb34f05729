"""This room has NVIDIA's driver library as a telemetry source, for one node.

`telemetry.py` is the door: `NvmlTelemetry`. `driver.py` is the only way to a call, and `roll_call.py` meets the GPUs.
`gpu.py` is one GPU, with its instances by `mig.py`, its values by `plan.py` and `gpm.py`, and its error events by
`xid_watch.py`. Who works on it is read by `process_list.py`, and how much by `usage.py`, which asks `busy.py`,
`energy.py` and, for a shared GPU, the context switches of `switches/`.
"""

from podgpu.gpu.nvml.telemetry import NvmlTelemetry

__all__ = ["NvmlTelemetry"]
