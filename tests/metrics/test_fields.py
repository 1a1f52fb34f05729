"""Tests the table of fields and the conversion of values."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.fields import (
    FB_FREE,
    FB_RESERVED,
    FB_USED,
    Field,
    NvmlCall,
    field_named,
    fields,
)
from podgpu.metrics.values import (
    Blank,
    device_figures,
    in_legacy_units,
    scale_number,
    value_of,
    value_printed,
)

ALL = list(fields().values())


def test_every_field_of_dcgm_is_here_once() -> None:
    assert len(ALL) == 693
    names = Counter(name for field in ALL for name in field.names)
    assert [name for name, n in names.items() if n > 1] == []


def test_calls_exist_in_pynvml() -> None:
    calls = {field.name: field.recipe for field in ALL if isinstance(field.recipe, NvmlCall)}
    assert len(calls) > 200
    for name, call in calls.items():
        assert callable(getattr(pynvml, call.function, None)), name
        assert all(hasattr(pynvml, a) for a in call.arguments if isinstance(a, str)), name


def the(name: str) -> Field:
    field = field_named(name)
    assert field is not None
    return field


def licenses(*features: tuple[int, int], count: int = 2) -> SimpleNamespace:
    """Licences for vGPUs: code and state of each feature."""
    listed = [SimpleNamespace(featureCode=code, featureState=state) for code, state in features]
    return SimpleNamespace(
        isGridLicenseSupported=1, gridLicensableFeatures=listed, licensableFeaturesCount=count
    )


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("DCGM_FI_DEV_POWER_USAGE", 418764, 418.764),
        ("DCGM_FI_DEV_FB_USED", 16477716480, 15714),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 46.12, 0.4612),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", 1.5, 1572864),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 12345.6, 12),
        ("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", 12345.5, 12641792),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 94, 0.94),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1980, 1980000000),
        ("DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL", 1500000000, 1.5),
        ("DCGM_FI_DEV_GPU_TEMP", 41, 41),
        ("DCGM_FI_DEV_BRAND", 14, "NVIDIA"),
        ("DCGM_FI_DEV_COMPUTE_MODE", 3, 2),
        ("DCGM_FI_DEV_CUDA_COMPUTE_CAPABILITY", (9, 0), 9 << 16),
        ("DCGM_FI_DEV_SERIAL", b"1650", "1650"),
        ("DCGM_FI_DEV_FB_USED_PERCENT", SimpleNamespace(total=100, reserved=20, used=40), 0.5),
        ("DCGM_FI_DEV_NVLINK_COUNT_SYMBOL_BER_FLOAT", (5 << 8) | 15, 5e-15),
        ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", SimpleNamespace(isGridLicenseSupported=0), 0),
        ("DCGM_FI_DEV_SERIAL", b"7", "7"),
        ("DCGM_FI_DEV_GPU_TEMP", b")", 41),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 100.5, 1.0),
        ("DCGM_FI_DEV_FB_USED_PERCENT", SimpleNamespace(total=21, reserved=20, used=1), 1.0),
        ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", licenses((0, 1), (1, 1)), 1),
        ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", licenses((0, 1), (1, 0)), 0),
        ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", licenses((1, 1), count=0), 0),
        ("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", SimpleNamespace(state=2, status=0), 2),
        ("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", SimpleNamespace(state=3, status=0), 3),
        ("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", SimpleNamespace(state=3, status=7), 4),
        ("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", SimpleNamespace(state=4, status=0), 5),
    ],
)
def test_values(name: str, raw: Any, value: Any) -> None:
    assert value_of(the(name), raw) == pytest.approx(value)
    assert type(value_of(the(name), raw)) is type(value)


@pytest.mark.parametrize(
    ("name", "raws"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", (4294967295, 201, None, "hot")),
        ("DCGM_FI_DEV_GPU_UTIL", (101, b"12", [1])),
        (
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            (9223372036854775794, 0xFFFFFFFFFFFFFFFF, math.nan, -1),
        ),
        ("DCGM_FI_DEV_POWER_USAGE", (0xFFFFFFFF, -1000)),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", (math.nan, 110.0)),
        ("DCGM_FI_PROF_PCIE_TX_BYTES", (math.inf, math.nan)),
        ("DCGM_FI_DEV_COMPUTE_MODE", (77,)),
        ("DCGM_FI_DEV_SERIAL", ("",)),
        ("DCGM_FI_DEV_FB_USED_PERCENT", (SimpleNamespace(total=20, reserved=20, used=0),)),
        ("DCGM_FI_DEV_FABRIC_MANAGER_ERROR_CODE", (SimpleNamespace(state=2, status=0),)),
    ],
)
def test_invalid_values_are_refused(name: str, raws: tuple[Any, ...]) -> None:
    for raw in raws:
        with pytest.raises(Blank):
            value_of(the(name), raw)


@pytest.mark.parametrize(
    ("name", "printed", "value"),
    [
        ("DCGM_FI_DEV_GPU_TEMP", 41.0, 41),
        ("DCGM_FI_DEV_GPU_TEMP", 41.5, 41),
        ("DCGM_FI_DEV_POWER_USAGE", 418.0, 418.0),
        ("DCGM_FI_DEV_GPU_TEMP", float(0x7FFFFFF0), None),
        ("DCGM_FI_DEV_POWER_USAGE", 140737488355328.0, None),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 2.0**63, None),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", math.inf, None),
        ("DCGM_FI_DEV_GPU_UTIL", 101.0, None),
    ],
)
def test_printed_values(name: str, printed: float, value: float | None) -> None:
    if value is None:
        with pytest.raises(Blank):
            value_printed(the(name), printed)
        return
    assert value_printed(the(name), printed) == value
    assert type(value_printed(the(name), printed)) is type(value)


def test_values_in_older_units_are_added_and_never_replaced() -> None:
    used_bytes = the("DCGM_FI_DEV_FB_USED_BYTES").id
    used_mib = the("DCGM_FI_DEV_FB_USED").id
    assert in_legacy_units({used_bytes: 3 * 2**20}) == {used_bytes: 3 * 2**20, used_mib: 3.0}
    both = {used_mib: 4.0, used_bytes: 3 * 2**20}
    assert in_legacy_units(both) == both


def test_factors_truncate_integers_and_round_other_numbers() -> None:
    temperature = the("DCGM_FI_DEV_GPU_TEMP")
    assert scale_number(temperature, 1999, 1e-3) == 1
    assert scale_number(temperature, 3000, 1e-3) == 3
    assert scale_number(temperature, 1.4, 2) == 3
    assert scale_number(the("DCGM_FI_DEV_POWER_USAGE"), 0.1, 3) == 0.3


def test_memory_of_a_device_whose_total_is_not_exported() -> None:
    totals = []
    for values in (
        {FB_FREE: 5.0, FB_USED: 3.0, FB_RESERVED: 2.0},
        {FB_FREE: 5.0, FB_USED: 3.0},
        {FB_FREE: 5.0},
        {FB_USED: 3.0},
    ):
        totals.append(device_figures(values)["memory_total_bytes"])
    assert totals == [10 * 2**20, 8 * 2**20, None, None]


NUMERIC = [
    f
    for f in fields().values()
    if f.type in ("int", "float") and f.recipe is not None and not f.convert
]


@given(st.sampled_from(NUMERIC), st.one_of(st.integers(0, 2**64 - 1), st.floats()))
def test_no_sentinel_and_no_nan_ever_passes(field: Field, raw: float) -> None:
    with suppress(Blank):
        value = value_of(field, raw)
        assert isinstance(value, int | float)
        assert math.isfinite(value)
        if not field.unit.startswith("bitmask"):
            assert value not in (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFF0)
