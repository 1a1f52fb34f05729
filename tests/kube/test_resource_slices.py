"""ResourceSlices of every API version, the generations of a pool, and the choice of a version."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.kube.objects import (
    NVIDIA_DRIVER,
    PoolSlice,
    SliceDevice,
    choose_version,
    current_devices,
    parse_slice,
)

GPU = "GPU-00000000-1111-2222-3333-444444444444"
MIG = "MIG-aaaaaaaa-1111-2222-3333-444444444444"

WHOLE = {
    "type": {"string": "gpu"},
    "uuid": {"string": GPU},
    "minor": {"int": 3},
    "productName": {"string": "NVIDIA A100-SXM4-40GB"},
    "cudaComputeCapability": {"version": "8.0.0"},
    "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
}
PART = {
    "type": {"string": "mig"},
    "uuid": {"string": MIG},
    "parentUUID": {"string": GPU},
    "profile": {"string": "1g.5gb"},
}
NESTED = {"v1": False, "v1beta2": False, "v1beta1": True, "v1alpha3": True}
"""API version -> whether it has a device's attributes under `basic`."""


def offered(name: str, attributes: dict[str, Any], nested: bool = False) -> dict[str, Any]:
    body = {"attributes": attributes, "capacity": {"memory": {"value": "40Gi"}}}
    return {"name": name, "basic": body} if nested else {"name": name} | body


def slice_of(*devices: dict[str, Any], driver: str = NVIDIA_DRIVER, **pool: Any) -> dict[str, Any]:
    said = {"name": "node-a", "generation": 1, "resourceSliceCount": 1} | pool
    return {"metadata": {"name": "node-a-x7k2p"}, "spec": {"driver": driver, "pool": said, "devices": list(devices)}}


def devices_of(body: dict[str, Any]) -> tuple[SliceDevice, ...]:
    found = parse_slice(body)
    assert found is not None
    return found.devices


# One slice


@pytest.mark.parametrize("version", NESTED)
def test_devices_in_every_api_version(version: str) -> None:
    nested = NESTED[version]
    body = slice_of(offered("gpu-3", WHOLE, nested), offered("gpu-3-mig-1g5gb-19-0", PART, nested), generation=7)
    assert parse_slice(body) == PoolSlice(
        NVIDIA_DRIVER,
        "node-a",
        7,
        (
            SliceDevice(NVIDIA_DRIVER, "node-a", "gpu-3", "gpu", GPU, minor=3),
            SliceDevice(NVIDIA_DRIVER, "node-a", "gpu-3-mig-1g5gb-19-0", "mig", MIG, GPU, "1g.5gb"),
        ),
    )


@pytest.mark.parametrize("nested", [False, True])
def test_attributes_with_their_domain(nested: bool) -> None:
    qualified = {f"{NVIDIA_DRIVER}/{name}": value for name, value in PART.items()}
    assert devices_of(slice_of(offered("a", qualified, nested))) == devices_of(slice_of(offered("a", PART, nested)))


def test_attributes_of_other_domains_are_not_ours() -> None:
    assert devices_of(slice_of(offered("a", {"example.com/uuid": {"string": GPU}})))[0].uuid == ""


def test_a_mig_device_that_is_made_when_claimed_has_no_uuid() -> None:
    attributes = {name: value for name, value in PART.items() if name != "uuid"}
    for unsaid in ({}, {"uuid": None}):
        (device,) = devices_of(slice_of(offered("gpu-3-mig-1g5gb-19-0", attributes | unsaid)))
        assert (device.type, device.uuid, device.parent_uuid, device.profile) == ("mig", "", GPU, "1g.5gb")


@pytest.mark.parametrize("driver", ["compute-domain.nvidia.com", "gpu.intel.com", "", None])
def test_slices_of_other_drivers_are_left_out(driver: Any) -> None:
    assert parse_slice(slice_of(offered("gpu-3", WHOLE), driver=driver)) is None


def test_a_slice_that_holds_only_counters_is_still_one_of_its_generation() -> None:
    body = slice_of()
    del body["spec"]["devices"]
    assert parse_slice(body) == PoolSlice(NVIDIA_DRIVER, "node-a", 1)


# Generations


def device(name: str, pool: str = "node-a", uuid: str = GPU) -> SliceDevice:
    return SliceDevice(NVIDIA_DRIVER, pool, name, "gpu", uuid)


def part(generation: int, *devices: SliceDevice, pool: str = "node-a") -> PoolSlice:
    return PoolSlice(NVIDIA_DRIVER, pool, generation, devices)


def test_a_pool_is_the_sum_of_its_slices() -> None:
    current = current_devices([part(2, device("gpu-0")), part(2, device("gpu-1"))])
    assert current == {(NVIDIA_DRIVER, "node-a"): (device("gpu-0"), device("gpu-1"))}


def test_an_older_generation_is_forgotten_at_once_even_where_the_new_one_is_not_complete() -> None:
    old, new = part(1, device("gpu-0"), device("gpu-1")), part(2, device("gpu-0", uuid=MIG))
    for slices in ([old, new], [new, old]):
        assert current_devices(slices) == {(NVIDIA_DRIVER, "node-a"): (device("gpu-0", uuid=MIG),)}


def test_a_new_generation_without_devices_empties_the_pool() -> None:
    assert current_devices([part(1, device("gpu-0")), part(2)]) == {(NVIDIA_DRIVER, "node-a"): ()}


parts = st.lists(
    st.builds(
        lambda generation, pool, number: part(generation, device(f"gpu-{number}", pool), pool=pool),
        st.integers(0, 3),
        st.sampled_from(["node-a", "node-b"]),
        st.integers(0, 5),
    ),
    max_size=8,
)


@given(parts, st.randoms(use_true_random=False))
def test_the_order_of_slices_does_not_matter(slices: list[PoolSlice], chance: random.Random) -> None:
    shuffled = list(slices)
    chance.shuffle(shuffled)
    expected = {pool: sorted(found, key=str) for pool, found in current_devices(slices).items()}
    assert {pool: sorted(found, key=str) for pool, found in current_devices(shuffled).items()} == expected


# Which version to ask for


def group(*versions: str) -> dict[str, Any]:
    listed = [{"groupVersion": f"resource.k8s.io/{one}", "version": one} for one in versions]
    return {"kind": "APIGroup", "name": "resource.k8s.io", "versions": listed, "preferredVersion": listed[0]}


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (["v1", "v1beta2", "v1beta1"], "v1"),
        (["v1beta1", "v1beta2", "v1"], "v1"),
        (["v1beta1", "v1beta2"], "v1beta2"),
        (["v1beta1"], "v1beta1"),
        (["v1alpha3", "v1beta1"], "v1beta1"),
        (["v1alpha3"], "v1alpha3"),
        (["v1alpha2"], None),
        (["v2"], None),
    ],
)
def test_the_newest_version_that_both_know(versions: list[str], chosen: str | None) -> None:
    assert choose_version(group(*versions)) == chosen
