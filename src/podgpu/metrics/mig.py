"""Computes the size of MIG instances and their name in bills.

A GPU has a fixed number of compute slices. A MIG instance with the profile `1g.10gb` uses one of
them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_PROFILE = re.compile(r"(\d{1,2})g\.")
_BILLED = " MIG "
_USUAL_SLICES = 7
# from NVIDIA's MIG user guide
_SLICES = {"A30": 4, "RTX PRO 6000": 4, "RTX PRO 5000": 2, "RTX PRO 4500": 2}
# Others have no MIG mode.
_MIG_MODEL = re.compile(r"\b(A30|A100|H100|H200|H20|GH200|B200|B300|GB200|GB300|RTX PRO \d+)\b")


class MigSize(NamedTuple):
    """A size of MIG instances, as fractions of a GPU."""

    name: str  # how profiles of this size begin
    slices: int
    compute: float
    memory: float


_SIZES = {
    7: ((1, 1 / 8), (1, 1 / 4), (2, 1 / 4), (3, 1 / 2), (4, 1 / 2)),
    4: ((1, 1 / 4), (2, 1 / 2)),
    2: ((1, 1 / 2),),
}
"""Compute slices of a GPU -> compute slices of each instance, and its part of the memory."""


def billed_name(model: str, profile: str) -> str:
    """Returns the name of a MIG instance in price lists and bills. NVML uses the same name."""
    return f"{model}{_BILLED}{profile}".rstrip()


@lru_cache(maxsize=1024)
def parent_and_fraction(billed: str) -> tuple[str, float | None]:
    """Splits a billed name into GPU model and fraction of that GPU.

    The fraction is None if the profile has no size.
    """
    model, mig, profile = billed.rpartition(_BILLED)
    if not mig:
        return billed, 1.0
    return model, fraction_of_gpu(model, profile)


@lru_cache(maxsize=1024)
def fraction_of_gpu(model: str, profile: str) -> float | None:
    """Returns the instance's fraction of the GPU's compute slices.

    Returns None if the profile has no size.
    """
    slices = slices_of_profile(profile)
    if slices is None:
        return None
    return min(slices / slices_of_gpu(model), 1.0)


@lru_cache(maxsize=1024)
def slices_of_gpu(model: str) -> int:
    for name, number in _SLICES.items():
        if re.search(rf"\b{name}\b", model):
            return number
    return _USUAL_SLICES


def slices_of_profile(profile: str) -> int | None:
    match = _PROFILE.match(profile)
    if match is None:
        return None
    return int(match[1]) or None


def list_mig_sizes(model: str) -> list[MigSize]:
    """Returns the sizes of MIG instances of a GPU, the smallest first. Empty without MIG mode."""
    if not _MIG_MODEL.search(model):
        return []

    total = slices_of_gpu(model)
    sizes = []
    for slices, memory in _SIZES[total]:
        sizes.append(MigSize(f"{slices}g", slices, slices / total, memory))

    return sizes
