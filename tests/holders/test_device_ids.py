"""Tests the devices and shares that podgpu derives from the device ids of all plugins."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import Device, VcudaRequest, Workload
from podgpu.node.holders.device_ids import (
    DeviceIndex,
    HeldId,
    count_vcuda,
    group_replicas,
    map_held,
    parse_device_id,
)

UUID = "b1e4a9c2-0d3f-4b57-8a61-92f0c7d5e381"
OTHER = "00000001-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "::0",
            "GPU-",
            "GPU-0",
            f"GPU-{UUID}0",
            f"GPU-{UUID}\n",
            f" GPU-{UUID}",
            f"MIG-GPU-{UUID}/7",
            UUID,
        ),
        *(
            "tencent.com/vcuda-core-3",
            "nvidia",
            "nvidia-uvm",
            "nvidia00",
            "nvidia٣",
            "nvidia" + "9" * 5000,
        ),
        *("nvidia0/gi", "nvidia0/vgpu1/gi2", "NVIDIA0", "All"),
    ],
)
def test_other_ids(text: str) -> None:
    assert parse_device_id(text) is None


def gpu(index: int, uuid: str, minor: int | None, mig: bool = False) -> Device:
    return Device(index, uuid, f"00000000:0{index}:00.0", "NVIDIA H200", minor, mig)


def instance(parent: Device, gi_id: int, *mig_uuids: str) -> Device:
    return replace(parent, mig_enabled=True, gi_id=gi_id, profile="1g.18gb", mig_uuids=mig_uuids)


# Minors and indices differ, so that a test fails if the code confuses them.
FIRST = gpu(0, f"GPU-{UUID}", minor=1, mig=True)
SECOND = gpu(1, f"GPU-{OTHER}", minor=0)
SEVEN = instance(
    FIRST, 7, "MIG-aaaaaaaa-1111-2222-3333-444444444444", "MIG-bbbbbbbb-1111-2222-3333-444444444444"
)
EIGHT = instance(FIRST, 8, "MIG-cccccccc-1111-2222-3333-444444444444")
NODE = (SEVEN, SECOND, FIRST, EIGHT)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (f"GPU-{UUID.upper()}", (FIRST,)),
        (f"gpu-{UUID}::0", (FIRST,)),
        ("MIG-bbbbbbbb-1111-2222-3333-444444444444", (SEVEN,)),
        ("MIG-CCCCCCCC-1111-2222-3333-444444444444", (EIGHT,)),
        (f"MIG-GPU-{UUID}/8/0", (EIGHT,)),
        ("nvidia0", (SECOND,)),
        ("nvidia1/vgpu2", (FIRST,)),
        ("nvidia1/gi8/vgpu0", (EIGHT,)),
        ("all", (SECOND, FIRST)),
        ("tegra", (SECOND, FIRST)),
        ("GPU-dddddddd-1111-2222-3333-444444444444", ()),
        ("MIG-dddddddd-1111-2222-3333-444444444444", ()),
        (f"MIG-GPU-{UUID}/9/0", ()),
        ("nvidia0/gi7", ()),
    ],
)
def test_devices_of_ids(text: str, meant: tuple[Device, ...]) -> None:
    device_id = parse_device_id(text)
    assert device_id is not None
    assert DeviceIndex(NODE).find(device_id) == meant


@given(
    st.lists(
        st.sampled_from(["GPU-", "MIG-", "nvidia", "all", "tegra", "::", "/gi", "/", "7", UUID])
    ).map("".join)
)
def test_any_text_gives_an_id_or_none(text: str) -> None:
    device_id = parse_device_id(text)
    assert device_id is None or DeviceIndex(NODE).find(device_id) in (
        (),
        *((one,) for one in NODE),
        (SECOND, FIRST),
    )


def held(pod: str, *texts: str) -> list[HeldId]:
    return [HeldId(Workload("ns", pod, "main"), "nvidia.com/gpu", text) for text in texts]


def replicas(count: int, first: int = 0) -> list[str]:
    return [f"GPU-{OTHER}::{number}" for number in range(first, first + count)]


def shares(entries: list[HeldId], registered: list[str]) -> list[tuple[str, str, float | None]]:
    mapped = map_held("kubelet", entries, NODE, group_replicas(registered))
    return [(one.holder.pod, one.replica, one.share) for one in mapped.assignments]


def test_a_share_is_held_replicas_divided_by_registered_ones() -> None:
    entries = held("a", *replicas(3, 8)) + held("b", *replicas(1))
    assert shares(entries, replicas(12)) == [("a", "8", 0.25), ("b", "0", 1 / 12)]
    assert shares(entries, []) == [("a", "8", None), ("b", "0", None)], (
        "shares are unknown without the plugin"
    )


def test_a_held_replica_that_is_not_registered_any_more_is_counted() -> None:
    assert shares(held("a", *replicas(2)) + held("b", *replicas(1, 7)), replicas(3)) == [
        ("a", "0", 0.5),
        ("b", "7", 0.25),
    ]


def test_a_gpu_held_whole_and_in_part_is_held_whole() -> None:
    assert shares(held("a", f"GPU-{OTHER}", *replicas(1)), replicas(2)) == [("a", "", 1.0)]


def test_shares_of_instances() -> None:
    assert shares(held("a", SEVEN.mig_uuids[0]), []) == [("a", "", None)], (
        "unknown for one of two compute instances"
    )
    assert shares(held("a", "nvidia1/gi7"), []) == [("a", "", 1.0)]
    registered = [f"{EIGHT.mig_uuids[0]}::{number}" for number in range(2)]
    assert shares(held("a", registered[1]), registered) == [("a", "1", 0.5)]


OWNERS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(OWNERS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_shares_add_up_and_order_does_not_matter(
    owners: list[int], registered: int, chance: random.Random
) -> None:
    entries = [
        entry for n, owner in enumerate(owners) for entry in held(f"p{owner}", f"GPU-{OTHER}::{n}")
    ]
    result = shares(entries, replicas(registered))
    assert sum(share or 0 for *_, share in result) == pytest.approx(
        len(owners) / max(registered, len(owners))
    )
    chance.shuffle(entries)
    assert shares(entries, replicas(registered)) == result


def test_vcuda_ids_are_counted_once_per_container() -> None:
    main = Workload("ns", "p", "main")
    core, memory = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
    texts = [f"{core}-1", f"{core}-1", f"{core}-2", f"{memory}-268435456-7"]
    wrong = [core, f"{core}-x", f"{core}-1\n", f"{memory}-3", f"x{core}-1", "nvidia0"]
    assert count_vcuda(HeldId(main, core, text) for text in texts + wrong) == (
        VcudaRequest.for_holder(main, 2, 1),
    )
    assert (
        count_vcuda([HeldId(main, core, "x"), HeldId(main, "example.com/nic", f"{core}-1")]) == ()
    )
