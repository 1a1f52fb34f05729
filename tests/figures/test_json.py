"""The JSON of `/api/v1/view`: what is written is read back, whatever else comes is refused or left out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.figures.as_json import encode_picture, picture_json
from podgpu.figures.device import Condition, DeviceFigures, HolderFigures
from podgpu.figures.from_json import parse_view
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.model import Workload

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ratios = st.none() | st.integers(0, 10_000).map(lambda n: n / 10_000)
whole = st.none() | st.integers(0, 2**50)
tenths = st.none() | st.integers(0, 10**9).map(lambda n: n / 10)

holders = st.builds(
    HolderFigures,
    st.builds(Workload, texts, texts, texts, texts, texts, texts),
    utilization=ratios,
    memory=whole,
    processes=st.none() | st.integers(0, 100),
    busy_seconds=tenths,
    idle_seconds=tenths,
    energy_joules=tenths,
    share=ratios,
    idle_since=st.none() | st.integers(0, 2**32).map(float),
)


def devices(node: str) -> st.SearchStrategy[DeviceFigures]:
    return st.builds(
        DeviceFigures,
        uuid=st.sampled_from(["GPU-a", "GPU-b", "GPU-c"]),
        index=st.integers(0, 15),
        model=texts,
        node=st.just(node),
        instance=st.just(""),
        profile=st.just(""),
        utilization=ratios,
        memory_used=whole,
        memory_total=whole,
        power_watts=tenths,
        temperature=st.none() | st.integers(0, 120).map(float),
        energy_joules=tenths,
        measured=st.none(),
        holders=st.lists(holders, max_size=3).map(tuple),
        processes=st.just(()),
    )


@given(st.lists(devices("n1"), max_size=3, unique_by=lambda d: d.uuid), st.lists(texts, max_size=2))
def test_what_is_written_is_read_back(of_node: list[DeviceFigures], notes: list[str]) -> None:
    picture = Picture("cluster", 1_700_000_000.5, 15.0, (NodePicture("n1", tuple(of_node)),), tuple(notes))
    view = parse_view(encode_picture(picture))
    assert sorted(view.devices, key=lambda d: d.uuid) == sorted(of_node, key=lambda d: d.uuid)
    assert view.notes == tuple(notes)


def test_mig_instances_are_parts_of_their_gpu() -> None:
    gpu = DeviceFigures("GPU-a", 0, "H100", "n1", power_watts=300.0)
    first, second = (
        DeviceFigures("GPU-a", 0, "H100", "n1", instance=number, profile="1g.10gb", utilization=0.5)
        for number in ("7", "11")
    )
    picture = Picture("node", 1.0, 1.0, (NodePicture("n1", (second, gpu, first)),))
    (written,) = picture_json(picture)["nodes"][0]["gpus"]
    assert written["power_watts"] == 300.0
    assert [i["id"] for i in written["instances"]] == ["7", "11"]
    assert written["utilization_ratio"] == 0.5, "of its instances"
    assert parse_view(encode_picture(picture)).devices == (replace(gpu, utilization=0.5), first, second)


def test_instances_whose_gpu_has_no_figures() -> None:
    only = DeviceFigures("GPU-a", 2, "H100", "n1", instance="1", profile="1g.10gb", memory_used=5)
    picture = Picture("node", 1.0, 1.0, (NodePicture("n1", (only,)),))
    assert parse_view(encode_picture(picture)).devices == (only,)


def test_what_is_not_known_is_left_out() -> None:
    picture = Picture("node", 1.0, 1.0, (NodePicture("n1", (DeviceFigures("GPU-a", 0),)),))
    (gpu,) = picture_json(picture)["nodes"][0]["gpus"]
    assert gpu == {"uuid": "GPU-a", "index": 0, "model": ""}
    assert b"null" not in encode_picture(picture)


def test_namespaces_with_hours_and_cost() -> None:
    team = NamespacePicture("research", 2.0, 1.5, 0.5, 12.34567, 3.0, 9.0, (("allocated", 30.5),))
    written = picture_json(Picture("cluster", 1.0, 1.0, namespaces=(team,), currency="EUR"))
    assert written["currency"] == "EUR"
    assert written["namespaces"][0]["allocated_gpu_hours"] == 12.3457
    assert written["namespaces"][0]["cost"] == {"allocated": 30.5}


def test_old_nodes_are_named_in_the_notes() -> None:
    picture = Picture("cluster", 1.0, 1.0, (NodePicture("n1", old=True, age_seconds=61.0, notes=("kubelet: away",)),))
    assert parse_view(encode_picture(picture)).notes == ("n1 is old: 61 s", "n1: kubelet: away")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"api": "other"}', b"[" * 100_000, b"\xff"])
def test_what_is_no_view_is_refused(body: bytes) -> None:
    with pytest.raises(SourceError, match="is not an answer of podgpu's /api/v1/view"):
        parse_view(body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
members = st.sampled_from(["nodes", "notes", "gpus", "holders", "instances", "name", "uuid", "index", "old"])


@given(st.dictionaries(members, values | st.lists(st.dictionaries(members, values, max_size=4), max_size=3)))
def test_strange_members_never_crash(document: dict[str, object]) -> None:
    parse_view(json.dumps({"api": "podgpu/v1", **document}).encode())


def test_an_instance_without_a_number_stays_inside_its_gpu() -> None:
    devices = (DeviceFigures("GPU-a", -1, instance="7"), DeviceFigures("GPU-a", 0, "H100"))
    (gpu,) = picture_json(Picture("node", 1.0, 15.0, (NodePicture("n", devices),)))["nodes"][0]["gpus"]
    assert (gpu["index"], [one["id"] for one in gpu["instances"]]) == (0, ["7"])


def test_a_view_of_nothing_that_was_ever_read() -> None:
    never = Picture("node", None, 30.0, (NodePicture("n1", old=True),))
    assert "taken_at" not in picture_json(never)
    view = parse_view(encode_picture(never))
    assert (view.devices, view.notes, view.taken_at) == ((), ("n1 is old",), None)


def test_the_used_field_stands_beside_its_mean() -> None:
    said = picture_json(Picture("cluster", 1.0, 1.0, used_utilization=0.19, used_field="DCGM_FI_DEV_MEM_COPY_UTIL"))
    assert (said["used_utilization_ratio"], said["used_field"]) == (0.19, "DCGM_FI_DEV_MEM_COPY_UTIL")


def test_a_gpu_with_instances_keeps_its_own_holder_and_what_is_wrong_with_it() -> None:
    """It was cut while somebody held the whole of it, and nobody knows a figure of it."""
    own = DeviceFigures("GPU-a", 0, "H100", "n", holders=(HolderFigures(Workload("ns", "pod", "c")),))
    lost = replace(own, uuid="GPU-b", index=1, holders=(), conditions=(Condition.of("lost", 5.0),))
    parts = tuple(DeviceFigures(of.uuid, of.index, "H100", "n", "7", "1g.10gb") for of in (own, lost))
    picture = Picture("node", 1.0, 1.0, (NodePicture("n", (own, lost, *parts)),))
    assert set(parse_view(encode_picture(picture)).devices) == {own, lost, *parts}
