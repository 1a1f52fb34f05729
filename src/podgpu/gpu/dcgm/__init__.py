"""This room has NVIDIA's host engine (DCGM) as a telemetry source: everything podgpu knows of `libdcgm.so.4` lives
here.

`telemetry.py` is the door: `DcgmTelemetry`. `library.py` loads the library and names its errors, `structs.py` has its
memory layouts, `session.py` keeps one connection. `entities.py` says which GPUs and instances there are, `others.py`
which switches, links and CPUs. `watches.py` has fields watched and `values.py` reads them; `health.py` and `xids.py`
read what is not the value of a moment.
"""

from podgpu.gpu.dcgm.telemetry import DcgmSettings, DcgmTelemetry

__all__ = ["DcgmSettings", "DcgmTelemetry"]
