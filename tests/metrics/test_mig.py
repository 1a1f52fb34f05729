"""Compares names and sizes of MIG instances with those of the simulated driver."""

from __future__ import annotations

import pytest

from podgpu.labs.simulate.models import MODELS, GpuModel
from podgpu.metrics.mig import (
    billed_name,
    fraction_of_gpu,
    parent_and_fraction,
    slices_of_gpu,
    slices_of_profile,
)


@pytest.mark.parametrize(
    "model", [m for m in MODELS.values() if m.profiles], ids=lambda model: model.name
)
def test_profiles_are_parts_of_their_gpu(model: GpuModel) -> None:
    assert slices_of_gpu(model.name) == model.compute_slices
    for profile in model.profiles:
        billed = billed_name(model.name, profile.name)
        assert parent_and_fraction(billed) == (
            model.name,
            profile.compute_slices / model.compute_slices,
        )
    assert parent_and_fraction(model.name) == (model.name, 1.0)


@pytest.mark.parametrize("profile", ["", "gi7", "0g.5gb", "g.5gb", "1000g.5gb"])
def test_profiles_without_a_number_have_no_size(profile: str) -> None:
    assert slices_of_profile(profile) is None
    assert fraction_of_gpu("NVIDIA A30", profile) is None
