"""Tests how the GPUs of a container are found: annotations, variables, mounts and device nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.node.holders.annotations import BadAnnotation
from podgpu.node.hook import nri_pb2
from podgpu.node.hook.devices import Card, Cards, Sandbox, find_gpus, read_cards
from tests.hook.runtime import uuid

KOORDINATOR = "scheduling.koordinator.sh/device-allocated"
MOUNTS = "/var/run/nvidia-container-devices"
SAME = Cards(tuple(Card(uuid(number), number) for number in range(4)))
SWAPPED = Cards((Card(uuid(0), 1), Card(uuid(1), 0)))
"""Index 0 is minor 1."""
MIG = "MIG-00000007-0000-0000-0000-000000000000"
NVIDIA_NODES = [(195, 255), (195, 254), (510, 0)]


def koordinator(*devices: Mapping[str, object]) -> dict[str, str]:
    return {KOORDINATOR: json.dumps({"gpu": devices, "rdma": [{"minor": 3}]})}


def sandbox(
    annotations: Mapping[str, str] | None = None, **containers: Mapping[str, object]
) -> Sandbox:
    """Builds a sandbox from NRI messages. The order of containers is the order of creation."""
    pod = nri_pb2.PodSandbox(
        id="s", name="train", namespace="ml", uid="u", annotations=annotations or {}
    )
    made = [
        nri_pb2.Container(
            id=f"id-{name}",
            pod_sandbox_id="s",
            name=name,
            env=[str(one).encode() for one in _list(facts, "env")],
            mounts=[nri_pb2.Mount(destination=str(one).encode()) for one in _list(facts, "mounts")],
            linux=nri_pb2.LinuxContainer(
                devices=[
                    nri_pb2.LinuxDevice(major=major, minor=minor)
                    for major, minor in _list(facts, "nodes")
                ]
            ),
        )
        for name, facts in containers.items()
    ]
    return Sandbox(pod, tuple(made))


def _list(facts: Mapping[str, object], key: str) -> list[Any]:
    found = facts.get(key, [])
    assert isinstance(found, Sequence)
    return list(found)


def held(told: Sandbox, cards: Cards = SAME) -> dict[str, list[str]]:
    return {entry.container: list(entry.gpu_list or ()) for entry in find_gpus(told, cards)}


def visible(value: str, *more: str) -> dict[str, object]:
    return {"env": ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={value}", *more]}


@pytest.mark.parametrize(
    ("container", "gpus"),
    [
        (visible(uuid(2)), [uuid(2)]),
        (visible(f"{uuid(2)},{uuid(1)},{uuid(2)}"), [uuid(2), uuid(1)]),
        (visible("1,3"), [uuid(1), uuid(3)]),
        (visible("17"), ["17"]),
        (visible(MIG), [MIG]),
        (visible("nvidia.com/gpu=2"), [uuid(2)]),
        (visible("all"), [uuid(0), uuid(1), uuid(2), uuid(3)]),
        (visible("all", "NVIDIA_DRIVER_CAPABILITIES=utility"), []),
        (visible("management.nvidia.com/gpu=all"), []),
        (visible("none"), []),
        (visible("void"), []),
        (visible("nonsense, also 1 2 3"), []),
        ({"env": ["NVIDIA_VISIBLE_DEVICES=all", f"NVIDIA_VISIBLE_DEVICES={uuid(1)}"]}, [uuid(1)]),
        ({"mounts": [f"{MOUNTS}/{uuid(1)}", "/data"]}, [uuid(1)]),
        ({"mounts": [f"{MOUNTS}/cdi/nvidia.com/gpu/{uuid(1)}"]}, [uuid(1)]),
        (visible(MOUNTS) | {"mounts": [f"{MOUNTS}/{uuid(3)}"]}, [uuid(3)]),
        ({"nodes": [(195, 2), *NVIDIA_NODES]}, [uuid(2)]),
        (visible("void") | {"nodes": [(195, 3), (195, 0), *NVIDIA_NODES]}, [uuid(0), uuid(3)]),
        ({"nodes": NVIDIA_NODES}, []),
        ({"nodes": [(1, 3), (1, 5), (195, 0), (195, 1)]}, []),
        (visible(uuid(1)) | {"mounts": [f"{MOUNTS}/{uuid(2)}"], "nodes": [(195, 3)]}, [uuid(1)]),
    ],
)
def test_gpus_of_a_container(container: Mapping[str, object], gpus: list[str]) -> None:
    assert held(sandbox(main=container)) == ({"main": gpus} if gpus else {})


def test_without_a_driver_numbers_stay_numbers() -> None:
    told = sandbox(a=visible("1"), b={"nodes": [(195, 0)]}, c=visible("all"))
    assert held(told, Cards()) == {"a": ["1"], "b": ["0"], "c": ["all"]}


def test_koordinators_annotation_overrides_other_sources() -> None:
    told = sandbox(
        koordinator({"minor": 1, "id": uuid(1)}, {"minor": 2}),
        main=visible("all"),
        side=visible("none"),
    )
    assert held(told) == {"main": [uuid(1), uuid(2)], "side": [uuid(1), uuid(2)]}
    assert held(told, Cards()) == {"main": [uuid(1), "2"], "side": [uuid(1), "2"]}


@pytest.mark.fault(
    "The annotation in which a scheduler notes a pod's GPUs is not JSON",
    (
        "The container starts; the log names the pod and the annotation, and the pod has no GPUs "
        "in "
        "podlist.json"
    ),
)
@pytest.mark.parametrize(
    "text", ["not JSON", "[]", '{"gpu": [{"minor": "x"}]}', "[" * 100_000, '{"gpu": 7}']
)
def test_an_annotation_that_is_not_json(text: str) -> None:
    told = sandbox({KOORDINATOR: text}, main=visible(uuid(1)))
    with pytest.raises(
        BadAnnotation, match=f"cannot parse the annotation {KOORDINATOR} of pod ml/train"
    ):
        find_gpus(told, SAME)


def test_koordinator_uses_minors_and_the_toolkit_indices() -> None:
    told = sandbox(koordinator({"minor": 0}), main=visible("0"))
    assert held(told, SWAPPED) == {"main": [uuid(1)]}


@given(
    st.text(),
    st.text(),
    st.text(),
    st.lists(st.tuples(st.integers(-9, 300), st.integers(-9, 300)), max_size=5),
)
def test_any_input_gives_entries_with_ids(
    annotation: str, variable: str, mount: str, nodes: list[tuple[int, int]]
) -> None:
    facts = {
        "env": [f"NVIDIA_VISIBLE_DEVICES={variable}"],
        "mounts": [f"{MOUNTS}/{mount}"],
        "nodes": nodes,
    }
    with suppress(BadAnnotation):
        for entry in find_gpus(sandbox({KOORDINATOR: annotation}, main=facts), SAME):
            assert entry.gpu_list
            assert all(entry.gpu_list)


INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 55
GPU UUID: \t {uuid}
Bus Type: \t PCIe
Bus Location: \t {place}
Device Minor: \t {minor}
GPU Excluded:\t {excluded}
"""


def card(proc: Path, place: str, uuid: str, minor: int, excluded: str = "No") -> None:
    folder = proc / "driver/nvidia/gpus" / place
    folder.mkdir(parents=True)
    (folder / "information").write_text(
        INFORMATION.format(uuid=uuid, place=place, minor=minor, excluded=excluded)
    )


def test_cards_of_the_kernel_driver(tmp_path: Path) -> None:
    assert read_cards(str(tmp_path)) == Cards()
    card(tmp_path, "0000:9a:00.0", uuid(2), 0)
    card(tmp_path, "0000:1a:00.0", uuid(0), 1)
    card(tmp_path, "0000:5b:00.0", uuid(9), 2, excluded="Yes")
    card(tmp_path, "0000:3c:00.0", "GPU-????????-????-????-????-????????????", 3)
    cards = read_cards(str(tmp_path))
    assert cards == Cards((Card(uuid(0), 1), Card("", 3), Card(uuid(2), 0)))
    assert [cards.find_by_minor(number) for number in range(4)] == [uuid(2), uuid(0), "2", "3"]
    assert [cards.find_by_index(number) for number in range(4)] == [uuid(0), "1", uuid(2), "3"]
    assert cards.uuids == ()
