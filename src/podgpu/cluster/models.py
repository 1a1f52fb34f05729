"""What a device is called where devices are counted by model, and how much of a GPU one of that name is. Pure."""

from __future__ import annotations

from functools import lru_cache

from podgpu.catalog.mig import part_of_gpu
from podgpu.figures.device import DeviceFigures
from podgpu.model import Device

_MIG = " MIG "


def device_model(device: DeviceFigures) -> str:
    """A MIG instance is no GPU: it goes by the name its use is billed under, `<model> MIG <profile>`."""
    return f"{device.model}{_MIG}{device.profile}".rstrip() if device.instance else device.model


@lru_cache(maxsize=1024)
def parent_and_part(model: str) -> tuple[str, float | None]:
    """The GPU's model, and the part of one that a device of this model is. None: its profile does not say."""
    gpu, mig, profile = model.rpartition(_MIG)
    if not mig:
        return model, 1.0
    return gpu, part_of_gpu(Device(0, "", "", gpu, gi_id=0, profile=profile))
