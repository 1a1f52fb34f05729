"""Device ids: every form the plugins write, what each means on a node, and no crash on anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.device_ids import DeviceId, DeviceIndex, parse_device_id
from podgpu.model import Device

UUID = "b1e4a9c2-0d3f-4b57-8a61-92f0c7d5e381"
OTHER = "00000001-1111-2222-3333-444444444444"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (f"GPU-{UUID}", DeviceId(gpu_uuid=f"GPU-{UUID}")),
        (f"GPU-{UUID}::3", DeviceId(gpu_uuid=f"GPU-{UUID}", replica="3")),
        (f"GPU-{UUID}::a::b", DeviceId(gpu_uuid=f"GPU-{UUID}", replica="a::b")),
        (f"MIG-{UUID}", DeviceId(mig_uuid=f"MIG-{UUID}")),
        (f"MIG-{UUID}::0", DeviceId(mig_uuid=f"MIG-{UUID}", replica="0")),
        (f"MIG-GPU-{UUID}/7/0", DeviceId(gpu_uuid=f"GPU-{UUID}", gi_id=7, ci_id=0)),
        (f"MIG-GPU-{UUID}/7/0::2", DeviceId(gpu_uuid=f"GPU-{UUID}", gi_id=7, ci_id=0, replica="2")),
        ("nvidia0", DeviceId(minor=0)),
        ("nvidia12", DeviceId(minor=12)),
        ("nvidia3/gi9", DeviceId(minor=3, gi_id=9)),
        ("nvidia3/vgpu1", DeviceId(minor=3, replica="1")),
        ("nvidia3/gi9/vgpu1", DeviceId(minor=3, gi_id=9, replica="1")),
        ("all", DeviceId(everything=True)),
        ("all::1", DeviceId(everything=True, replica="1")),
        ("tegra", DeviceId(integrated=True)),
        ("tegra::0", DeviceId(integrated=True, replica="0")),
    ],
)
def test_every_form_a_plugin_writes(text: str, meaning: DeviceId) -> None:
    assert parse_device_id(text) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "",
        "::0",
        "GPU-",
        "GPU-0",
        f"GPU-{UUID}0",
        f"GPU-{UUID}\n",
        f" GPU-{UUID}",
        f"MIG-GPU-{UUID}",
        f"MIG-GPU-{UUID}/7",
        UUID,
        "tencent.com/vcuda-core-3",
        "tencent.com/vcuda-memory-268435456-3",
        "nvidia",
        "nvidiactl",
        "nvidia-uvm",
        "nvidia00",
        "nvidia٣",
        "nvidia" + "9" * 5000,
        "nvidia0/gi",
        "nvidia0/vgpu1/gi2",
        "NVIDIA0",
        "All",
    ],
)
def test_what_names_no_gpu(text: str) -> None:
    assert parse_device_id(text) is None


def gpu(index: int, uuid: str, minor: int | None, mig: bool = False) -> Device:
    return Device(index, uuid, f"00000000:0{index}:00.0", "NVIDIA H200", minor, mig)


def instance(parent: Device, gi_id: int, *mig_uuids: str) -> Device:
    return Device(
        parent.index,
        parent.uuid,
        parent.pci_bus_id,
        parent.model,
        parent.minor,
        True,
        gi_id,
        "1g.18gb",
        mig_uuids,
    )


# Minors run against the indexes: an id that is taken for an index finds the wrong card.
FIRST = gpu(0, f"GPU-{UUID}", minor=1, mig=True)
SECOND = gpu(1, f"GPU-{OTHER}", minor=0)
SEVEN = instance(FIRST, 7, "MIG-aaaaaaaa-1111-2222-3333-444444444444", "MIG-bbbbbbbb-1111-2222-3333-444444444444")
EIGHT = instance(FIRST, 8, "MIG-cccccccc-1111-2222-3333-444444444444")
NODE = (SEVEN, SECOND, FIRST, EIGHT)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (f"GPU-{UUID}", (FIRST,)),
        (f"GPU-{UUID.upper()}", (FIRST,)),
        (f"gpu-{UUID}::0", (FIRST,)),
        ("MIG-bbbbbbbb-1111-2222-3333-444444444444", (SEVEN,)),
        ("MIG-CCCCCCCC-1111-2222-3333-444444444444", (EIGHT,)),
        (f"MIG-GPU-{UUID}/8/0", (EIGHT,)),
        ("nvidia0", (SECOND,)),
        ("nvidia1/vgpu2", (FIRST,)),
        ("nvidia1/gi7", (SEVEN,)),
        ("nvidia1/gi8/vgpu0", (EIGHT,)),
        ("all", (FIRST, SECOND)),
        ("tegra", (FIRST,)),
        ("GPU-dddddddd-1111-2222-3333-444444444444", ()),
        ("MIG-dddddddd-1111-2222-3333-444444444444", ()),
        (f"MIG-GPU-{UUID}/9/0", ()),
        (f"MIG-GPU-{OTHER}/7/0", ()),
        ("nvidia2", ()),
        ("nvidia0/gi7", ()),
    ],
)
def test_what_an_id_means_on_a_node(text: str, meant: tuple[Device, ...]) -> None:
    device_id = parse_device_id(text)
    assert device_id is not None
    assert DeviceIndex(NODE).find(device_id) == meant


def test_a_node_without_gpus_has_none_of_them() -> None:
    index = DeviceIndex(())
    for text in ("all", "tegra", "nvidia0", f"GPU-{UUID}"):
        device_id = parse_device_id(text)
        assert device_id is not None
        assert index.find(device_id) == ()


def test_a_gpu_without_minor_is_not_found_by_one() -> None:
    assert DeviceIndex([gpu(0, f"GPU-{UUID}", minor=None)]).find(DeviceId(minor=0)) == ()


uuids = st.uuids().map(str)
numbers = st.integers(0, 999_999_999)


@given(st.text())
def test_any_text_gives_an_id_or_none(text: str) -> None:
    assert parse_device_id(text) is None or isinstance(parse_device_id(text), DeviceId)


@given(st.from_regex(r"(GPU-|MIG-|MIG-GPU-|nvidia|all|tegra)[-0-9a-f/gipuv:]{0,60}", fullmatch=True))
def test_near_misses_do_not_crash_either(text: str) -> None:
    device_id = parse_device_id(text)
    assert device_id is None or DeviceIndex(NODE).find(device_id) in ((), *((one,) for one in NODE), (FIRST, SECOND))


@given(uuids, numbers, numbers, st.text())
def test_nvidias_ids_come_back_in_their_parts(uuid: str, gi: int, ci: int, replica: str) -> None:
    whole = DeviceId(gpu_uuid=f"GPU-{uuid}")
    assert parse_device_id(f"GPU-{uuid}") == whole
    old = DeviceId(gpu_uuid=f"GPU-{uuid}", gi_id=gi, ci_id=ci, replica=replica)
    assert parse_device_id(f"MIG-GPU-{uuid}/{gi}/{ci}::{replica}") == old
    assert parse_device_id(f"MIG-{uuid}::{replica}") == DeviceId(mig_uuid=f"MIG-{uuid}", replica=replica)


@given(numbers, st.none() | numbers, st.none() | numbers)
def test_gkes_ids_come_back_in_their_parts(minor: int, gi: int | None, vgpu: int | None) -> None:
    text = f"nvidia{minor}" + (f"/gi{gi}" if gi is not None else "") + (f"/vgpu{vgpu}" if vgpu is not None else "")
    replica = "" if vgpu is None else str(vgpu)
    assert parse_device_id(text) == DeviceId(minor=minor, gi_id=gi, replica=replica)
