"""This module says what a MIG instance is billed as, and how much of its GPU's compute it is. Pure.

A GPU of some model has so many compute slices, and a profile such as `1g.10gb` takes so many of them.
"""

from __future__ import annotations

import re
from functools import lru_cache

_PROFILE = re.compile(r"(\d{1,2})g\.")
_BILLED = " MIG "
_USUAL_SLICES = 7
_SLICES = {"A30": 4, "RTX PRO 6000": 4, "RTX PRO 5000": 2, "RTX PRO 4500": 2}
"""The parts that are not cut into seven (NVIDIA's MIG user guide, supported GPUs)."""


def billed_name(model: str, profile: str) -> str:
    """An hour of an instance is no hour of a GPU: it is billed under the name that NVML has for such a device."""
    return f"{model}{_BILLED}{profile}".rstrip()


@lru_cache(maxsize=1024)
def parent_and_part(billed: str) -> tuple[str, float | None]:
    """The GPU's model, and the part of one that is billed under this name. None: its profile does not say."""
    model, mig, profile = billed.rpartition(_BILLED)
    return (model, part_of_gpu(model, profile)) if mig else (billed, 1.0)


@lru_cache(maxsize=1024)
def part_of_gpu(model: str, profile: str) -> float | None:
    """An instance's compute slices of those its GPU has; None for a profile without a number."""
    slices = slices_of_profile(profile)
    return None if slices is None else min(slices / slices_of_gpu(model), 1.0)


@lru_cache(maxsize=1024)
def slices_of_gpu(model: str) -> int:
    """How many instances of the smallest profile a GPU of this model can be cut into."""
    return next((number for name, number in _SLICES.items() if re.search(rf"\b{name}\b", model)), _USUAL_SLICES)


def slices_of_profile(profile: str) -> int | None:
    """How many of them an instance takes; None when its profile does not say, or says none."""
    named = _PROFILE.match(profile)
    return int(named[1]) or None if named else None
