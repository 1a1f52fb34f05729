"""This room says how each GPU is, what runs on it and which errors it told of: all the numbers come through here.

`source.py` is the protocol that every source keeps. `nvml/` reads NVIDIA's driver library and `dcgm/` its host engine;
`exporter.py` reads what another exporter already shows, as `exposition.py` understands it. `beside.py` lets the driver
complete a source that does not see everything. `gate.py` and `pci.py` are shared by the two that load a library.
"""
