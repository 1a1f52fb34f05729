"""How much of a GPU's compute one of its MIG instances is. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from podgpu.model import Device

_PROFILE = re.compile(r"(\d)g\.")
_USUAL_SLICES = 7
_SLICES = {"A30": 4, "RTX PRO 6000": 4, "RTX PRO 5000": 2, "RTX PRO 4500": 2}
"""The parts that are not cut into seven (NVIDIA's MIG user guide, supported GPUs)."""


def part_of_gpu(device: Device) -> float | None:
    """1 for a whole GPU; an instance's compute slices of those its GPU has; None for a profile without a number."""
    return _part(device.profile, device.model) if device.is_instance else 1.0


@lru_cache(maxsize=1024)
def _part(profile: str, model: str) -> float | None:
    slices = _PROFILE.match(profile)
    if slices is None:
        return None
    of = next((n for name, n in _SLICES.items() if re.search(rf"\b{name}\b", model)), _USUAL_SLICES)
    return min(int(slices[1]) / of, 1.0)
