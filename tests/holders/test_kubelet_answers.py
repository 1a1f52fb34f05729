"""Mapping of a kubelet's answer: real bytes of Kubernetes 1.36, and damaged ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.holders.kubelet import decode_list, parse_assignments
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from podgpu.simulate.kubelet import SimulatedPod
from tests.holders.devices import gpu, mig_uuid, uuid
from tests.simulated_kubelet import list_answer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kubelet-1.36"
LIST = (FIXTURES / "podresources-v1-list.bin").read_bytes()


def instance(number: int, gi_id: int, *mig_uuids: str) -> Device:
    parent = gpu(number)
    return Device(number, parent.uuid, parent.pci_bus_id, parent.model, number, True, gi_id, "1g.5gb", mig_uuids)


NODE = (
    *(gpu(number) for number in range(8)),
    instance(7, 11, mig_uuid("a")),
    instance(7, 12, mig_uuid("b"), mig_uuid("c")),
)


def holders(allocation: Allocation) -> list[tuple[str, str, str, str, str]]:
    return [
        (one.device, one.holder.namespace, one.holder.pod, one.holder.container, one.replica)
        for one in allocation.assignments
    ]


def allocation_of(
    resources: dict[str, list[str]], names: frozenset[str] = frozenset(), numa_nodes: tuple[int, ...] = (0,)
) -> Allocation:
    pod = SimulatedPod("ns", "pod", {"main": resources})
    return parse_assignments(decode_list(list_answer([pod], numa_nodes)), NODE, names)


def test_the_simulated_kubelet_answers_like_the_real_one() -> None:
    pods = [
        SimulatedPod("default", "train-node1", {"main": {"nvidia.com/gpu": [uuid(5), uuid(0)]}}),
        SimulatedPod(
            "research",
            "duo-node1",
            {"main": {"nvidia.com/gpu": [uuid(4)]}, "sidecar": {"nvidia.com/gpu": [uuid(1)]}},
        ),
        SimulatedPod("serving", "slice-a-node1", {"main": {"nvidia.com/gpu.shared": [uuid(6) + "::0"]}}),
        SimulatedPod("serving", "slice-b-node1", {"main": {"nvidia.com/gpu.shared": [uuid(6) + "::1"]}}),
        SimulatedPod("research", "mig-node1", {"main": {"nvidia.com/mig-1g.5gb": [mig_uuid("b")]}}),
        SimulatedPod("default", "cpuonly-node1", {"main": {}}),
    ]
    assert list_answer(pods) == LIST


def test_a_device_on_two_numa_nodes_is_listed_twice_and_held_once() -> None:
    assert holders(allocation_of({"nvidia.com/gpu": [uuid(0)]}, numa_nodes=(0, 1))) == [
        (uuid(0), "ns", "pod", "main", "")
    ]


def test_several_replicas_in_one_container_are_one_assignment() -> None:
    ids = [f"{uuid(0)}::{replica}" for replica in ("10", "9", "11")]
    assert allocation_of({"nvidia.com/gpu": ids}).assignments == (
        Assignment(uuid(0), Workload("ns", "pod", "main"), "kubelet", replica="9"),
    )


def test_all_holds_every_gpu_and_no_instance() -> None:
    assert [one.device for one in allocation_of({"nvidia.com/gpu": ["all"]}).assignments] == [
        uuid(number) for number in range(8)
    ]


@pytest.mark.parametrize("device_id", [uuid(3), "nvidia3", f"{uuid(3)}::0", "nvidia3/vgpu0"])
def test_ids_of_gpus_are_used_with_any_resource(device_id: str) -> None:
    assert [one.device for one in allocation_of({"example.com/gpu": [device_id]}).assignments] == [uuid(3)]


@pytest.mark.parametrize("device_id", ["all", "tegra", "vf0", "tencent.com/vcuda-core-3", ""])
def test_ids_of_other_plugins_are_ignored(device_id: str) -> None:
    assert allocation_of({"example.com/nic": [device_id]}) == Allocation()


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-9g.1gb", "example.com/gpu"])
def test_unrecognised_ids_of_gpu_resources_are_reported(resource: str) -> None:
    allocation = allocation_of({resource: ["card-one"]}, names=frozenset({"example.com/gpu"}))
    assert allocation.unmapped == (
        Unmapped("kubelet", "unrecognised_id", "card-one", resource, Workload("ns", "pod", "main")),
    )


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(LIST) - 1), st.binary(max_size=3)))
def test_any_answer_is_decoded_or_bad(damage: bytes | tuple[int, bytes]) -> None:
    answer = damage if isinstance(damage, bytes) else LIST[: damage[0]] + damage[1] + LIST[damage[0] + 1 :]
    with suppress(SourceError):
        parse_assignments(decode_list(answer), NODE)
