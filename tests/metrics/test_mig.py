"""MIG's names and sizes, against the models and profiles that the simulated driver knows from NVIDIA's guide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.mig import billed_name, parent_and_part, part_of_gpu, slices_of_gpu, slices_of_profile
from podgpu.simulate.models import MODELS, GpuModel

CUT = [model for model in MODELS.values() if model.profiles]


@pytest.mark.parametrize("model", CUT, ids=lambda model: model.name)
def test_every_model_has_the_slices_its_profiles_compete_for(model: GpuModel) -> None:
    assert slices_of_gpu(model.name) == model.compute_slices


@pytest.mark.parametrize("model", CUT, ids=lambda model: model.name)
def test_every_profile_is_the_part_its_slices_are(model: GpuModel) -> None:
    for profile in model.profiles:
        billed = billed_name(model.name, profile.name)
        assert parent_and_part(billed) == (model.name, profile.compute_slices / model.compute_slices)


def test_a_whole_gpu_is_billed_as_itself() -> None:
    assert parent_and_part("NVIDIA A30") == ("NVIDIA A30", 1.0)


@pytest.mark.parametrize("profile", ["", "gi7", "0g.5gb", "g.5gb", "1000g.5gb"])
def test_a_profile_that_does_not_say_is_no_part(profile: str) -> None:
    assert slices_of_profile(profile) is None
    assert part_of_gpu("NVIDIA A30", profile) is None


@given(st.text(), st.text())
def test_no_name_that_anybody_tells_is_more_than_a_gpu(model: str, profile: str) -> None:
    part = part_of_gpu(model, profile)
    assert part is None or 0 < part <= 1
    parent_and_part(billed_name(model, profile))
