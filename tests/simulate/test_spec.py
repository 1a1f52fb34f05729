"""Tests the parser of SPEC in `--telemetry simulated:SPEC`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.labs.simulate.models import MAX_GPUS, MODELS, GpuModel, parse_profiles, parse_spec
from podgpu.labs.simulate.simulated_driver import SimulatedNvml
from podgpu.labs.simulate.simulated_node import place_loads, tenants


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("H200", ["NVIDIA H200"]),
        ("2xA100", ["NVIDIA A100-SXM4-40GB"] * 2),
        ("1xA100-80GB, t4", ["NVIDIA A100-SXM4-80GB", "Tesla T4"]),
        ("8xH100", ["NVIDIA H100 80GB HBM3"] * 8),
    ],
)
def test_gpus_come_in_the_order_of_the_text(text: str, names: list[str]) -> None:
    assert [gpu.model.name for gpu in parse_spec(text)] == names


@pytest.mark.parametrize(
    ("text", "profiles"),
    [
        ("1xH100/7x1g.10gb", ["1g.10gb"] * 7),
        ("1xA100/2x1g.5gb+1x3g.20gb", ["1g.5gb", "1g.5gb", "3g.20gb"]),
        ("A30/4g.24gb", ["4g.24gb"]),
        ("H100/4g.40gb+3g.40gb", ["4g.40gb", "3g.40gb"]),
    ],
)
def test_mig_layouts(text: str, profiles: list[str]) -> None:
    (gpu,) = parse_spec(text)
    assert [profile.name for profile in gpu.profiles] == profiles


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be COUNTxMODEL"),
        ("H100,,T4", "must be COUNTxMODEL"),
        ("0xH100", "GPU model '0xH100' cannot be simulated"),
        ("65xH100", "more than 64 GPUs"),
        ("40xH100,40xT4", "more than 64 GPUs"),
        ("8xH10", "known: V100, T4"),
        ("H100/1g.5gb", "known: 1g.10gb, 1g.20gb"),
        ("T4/1x1g.5gb", "MIG profile '1g.5gb' of Tesla T4 cannot be simulated; known: none"),
        ("A100/8x1g.5gb", "8 of 7 compute slices"),
        ("H100/2x3g.40gb+1g.10gb", "9 of 8 memory slices"),
        ("H100/", "must be COUNTxMODEL"),
    ],
)
def test_mistakes_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_spec(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.text() | st.text(alphabet="0123456789xH1A0T4/+,.gb "))
def test_garbage_is_refused_and_nothing_else(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert 0 < len(parse_spec(text)) <= MAX_GPUS


def layouts(model: GpuModel) -> Iterator[list[str]]:
    """Yields every combination of MIG profiles that fits the model."""
    names = [profile.name for profile in model.profiles]
    for count in range(1, model.compute_slices + 1):
        for layout in combinations_with_replacement(names, count):
            with contextlib.suppress(UsageError):
                parse_profiles(model, layout)
                yield list(layout)


@pytest.mark.parametrize("key", [key for key, model in MODELS.items() if model.profiles])
def test_every_layout_that_fits_has_its_pods(key: str) -> None:
    for layout in layouts(MODELS[key]):
        driver = SimulatedNvml(f"1x{key}/{'+'.join(layout)}")
        place_loads(driver, tenants(driver))
        instances = driver.gpus[0].instances
        assert [instance.profile.name for instance in instances] == layout
        assert len({instance.gi_id for instance in instances}) == len(layout)


def test_every_node_has_gpus_of_its_own() -> None:
    nodes = [
        SimulatedNvml("2xH100/2x1g.10gb", node=name) for name in ("", "node-1", "node-2", "node-1")
    ]
    uuids = [
        [g.uuid for g in n.gpus] + [i.uuid for g in n.gpus for i in g.instances] for n in nodes
    ]
    assert uuids[1] == uuids[3], "a node must always have the same UUIDs"
    assert len({uuid for of_node in uuids[:3] for uuid in of_node}) == 3 * 6
