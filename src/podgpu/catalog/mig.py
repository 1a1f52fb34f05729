"""How much of a GPU's compute one of its MIG instances is. Pure."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from podgpu.model import Device

_PROFILE = re.compile(r"(\d)g\.")
_USUAL_SLICES = 7
_SLICES = {"A30": 4, "RTX PRO 6000": 4, "RTX PRO 5000": 2, "RTX PRO 4500": 2}
"""The parts that are not cut into seven (NVIDIA's MIG user guide, supported GPUs)."""


@lru_cache(maxsize=1024)
def part_of_gpu(device: Device) -> Fraction | None:
    """1 for a whole GPU; an instance's compute slices of those its GPU has; None for a profile without a number."""
    if not device.is_instance:
        return Fraction(1)
    slices = _PROFILE.match(device.profile)
    if slices is None:
        return None
    of = next((n for model, n in _SLICES.items() if re.search(rf"\b{model}", device.model)), _USUAL_SLICES)
    return min(Fraction(int(slices[1]), of), Fraction(1))
