"""Small nodes as figures, for the tests of `podgpu top`."""

from __future__ import annotations

from podgpu.model import Device, Workload
from podgpu.top.figures import DeviceFigures, FlatView, HolderFigures

HEADER = ["GPU", "MODEL", "HOLDER", "UTIL", "MEM", "GiB", "POWER", "TEMP", "PROC", "IDLE"]
GIB = 1024**3
MIB = 1024**2
TRAINER = Workload("research", "train", "main")
SERVER = Workload("serving", "chat", "engine")
BATCH = Workload("batch", "embed", "worker")


def gpu(index: int, model: str = "NVIDIA H100 80GB HBM3", **more: object) -> Device:
    return Device(index, f"GPU-{index}", f"0000:0{index}:00.0", model, **more)  # type: ignore[arg-type]


def view(*devices: DeviceFigures) -> FlatView:
    return FlatView(devices)


def holder(who: Workload = TRAINER, **figures: float | None) -> HolderFigures:
    return HolderFigures(who, **figures)  # type: ignore[arg-type]
