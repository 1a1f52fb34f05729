"""The field table: complete, without contradictions, and in words pynvml knows."""

from __future__ import annotations

from collections import Counter

import pynvml
import pytest

from podgpu.metrics.conversions import CONVERSIONS
from podgpu.metrics.families import OWN_FAMILIES, THROTTLE_REASONS
from podgpu.metrics.fields import Call, FieldValue, Gpm, Kept, field_named, fields, nearest_names, parse_recipe

ALL = list(fields().values())


def test_every_field_of_dcgm_is_here_once() -> None:
    assert len(ALL) == 693
    names = Counter(name for field in ALL for name in field.names)
    assert [name for name, n in names.items() if n > 1] == []


def test_calls_exist_in_pynvml() -> None:
    calls = {field.name: field.recipe for field in ALL if isinstance(field.recipe, Call)}
    assert len(calls) > 200
    for name, call in calls.items():
        assert callable(getattr(pynvml, call.function, None)), name
        assert all(hasattr(pynvml, a) for a in call.arguments if isinstance(a, str)), name


def test_conversions_levels_and_types_are_known() -> None:
    assert {f.convert for f in ALL} <= set(CONVERSIONS)
    assert {f.type for f in ALL} <= {"int", "float", "text", "blob", "time"}
    assert all(f.recipe is None for f in ALL if f.type in ("blob", "time"))


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("", None),
        ("nvmlDeviceGetClockInfo(NVML_CLOCK_SM)", Call("nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",))),
        ("nvmlDeviceGetUtilizationRates().gpu", Call("nvmlDeviceGetUtilizationRates", (), "gpu")),
        ("nvmlDeviceGetMigMode()[0]", Call("nvmlDeviceGetMigMode", (), "", 0)),
        ("nvmlDeviceGetTotalEccErrors(0,1)", Call("nvmlDeviceGetTotalEccErrors", (0, 1))),
        ("field 82", FieldValue((82,))),
        ("field 139+138@all", FieldValue((139, 138), 0xFFFFFFFF)),
        ("field 138@17", FieldValue((138,), 17)),
        ("gpm 5", Gpm(5)),
        ("event xid", Kept("event xid")),
    ],
)
def test_recipes(text: str, recipe: object) -> None:
    assert parse_recipe(text) == recipe


def test_a_recipe_nobody_can_read_is_refused() -> None:
    with pytest.raises(ValueError, match="no such recipe"):
        parse_recipe("guess 12")


@pytest.mark.parametrize(
    ("name", "field_id"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", 150),
        ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 150),
        ("dcgm_gpu_temp", 150),
        ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 112),
    ],
)
def test_a_field_answers_to_all_its_names(name: str, field_id: int) -> None:
    field = field_named(name)
    assert field is not None
    assert field.id == field_id


def test_a_typing_error_finds_its_neighbour() -> None:
    assert nearest_names("DCGM_FI_DEV_GPU_TEMPP") == ["DCGM_FI_DEV_GPU_TEMP"]
    assert nearest_names("dcgm_fi_dev_power_usage") == ["DCGM_FI_DEV_POWER_USAGE"]


def test_throttle_reasons_are_nanosecond_fields() -> None:
    assert all(fields()[i].unit == "ns" for i in THROTTLE_REASONS)


def test_our_families_follow_prometheus_naming() -> None:
    for family in OWN_FAMILIES:
        assert family.name.startswith("podgpu_")
        assert (family.type == "counter") == family.name.endswith("_total")
        assert family.help.endswith(".")
