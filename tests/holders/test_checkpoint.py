"""The kubelet's device checkpoint as a source: a real one of Kubernetes 1.36, older forms, shares, and garbage."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.holders.checkpoint import CheckpointAllocation, map_checkpoint, parse_checkpoint
from podgpu.holders.kubelet import parse_assignments
from podgpu.holders.pod_resources import decode_list
from podgpu.holders.source import AllocationSource
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from tests.holders.devices import failure, gpu, mig_uuid, uuid

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kubelet-1.36"
REAL = FIXTURES / "kubelet_internal_checkpoint"


def instance(gi_id: int, *mig_uuids: str) -> Device:
    return Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 7, True, gi_id, "1g.5gb", mig_uuids)


NODE = (
    *(gpu(number) for number in range(8)),
    instance(11, mig_uuid("a")),
    instance(12, mig_uuid("b")),
    instance(13, mig_uuid("c"), mig_uuid("d")),
)


def pod_entry(uid: str, ids: object, resource: str = "nvidia.com/gpu", container: str = "main") -> dict[str, object]:
    return {
        "PodUID": uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": ids,
        "AllocResp": "Cg==",
    }


def checkpoint(entries: object, registered: object = None) -> bytes:
    content = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 1}
    return json.dumps(content).encode()


def read(entries: object, registered: object = None, names: frozenset[str] = frozenset()) -> Allocation:
    return map_checkpoint(parse_checkpoint(checkpoint(entries, registered), resource_names=names), NODE)


def shares(allocation: Allocation) -> list[tuple[str, str, str, float | None]]:
    return [(one.device, one.holder.uid, one.replica, one.share) for one in allocation.assignments]


# What it says


def test_it_is_an_allocation_source() -> None:
    as_one: AllocationSource = CheckpointAllocation()
    assert as_one.name == "checkpoint"
    as_one.close()


def test_the_default_path_is_the_kubelets() -> None:
    assert CheckpointAllocation().path == "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"


def test_the_real_checkpoint() -> None:
    allocation = CheckpointAllocation(str(REAL)).assignments(NODE)
    assert shares(allocation) == [
        (uuid(0), "e14eee3c4e2fe48a3f7d8d6f56111c60", "", 1.0),
        (uuid(1), "bcfd1eab25dc5a2c101abd9532272891", "", 1.0),
        (uuid(4), "bcfd1eab25dc5a2c101abd9532272891", "", 1.0),
        (uuid(5), "e14eee3c4e2fe48a3f7d8d6f56111c60", "", 1.0),
        (uuid(6), "42f820079a71f4d1f4cbc7ef250536d7", "1", 1 / 3),
        (uuid(6), "b93da1be5ef361f61b4f3f7fa2996ce2", "0", 1 / 3),
        (f"{uuid(7)}/gi12", "78549c75c85293562722febfdf686b4b", "", 1.0),
    ]
    assert allocation.unmapped == ()
    assert allocation.assignments[1] == Assignment(
        uuid(1), Workload(container="sidecar", uid="bcfd1eab25dc5a2c101abd9532272891"), "checkpoint", share=1.0
    )


def test_it_says_of_devices_and_containers_what_the_same_kubelets_socket_says() -> None:
    answer = decode_list((FIXTURES / "podresources-v1-list.bin").read_bytes())

    def known_to_both(allocation: Allocation) -> list[tuple[str, str, str]]:
        return sorted((one.device, one.holder.container, one.replica) for one in allocation.assignments)

    by_file = map_checkpoint(parse_checkpoint(REAL.read_bytes()), NODE)
    assert known_to_both(by_file) == known_to_both(parse_assignments(answer, NODE))


@pytest.mark.parametrize("entries", [None, [], [pod_entry("a", None)], [pod_entry("a", {})], [pod_entry("a", [])]])
def test_nobody_holds_anything(entries: object) -> None:
    assert read(entries) == Allocation()


def test_missing_lists_are_empty() -> None:
    assert map_checkpoint(parse_checkpoint(b'{"Data": {}}'), NODE) == Allocation()


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([uuid(1), uuid(0)], id="before 1.20"),
        pytest.param({"-1": [uuid(1), uuid(0)]}, id="no NUMA nodes"),
        pytest.param({"0": [uuid(0)], "1": [uuid(1)]}, id="two NUMA nodes"),
        pytest.param({"0": [uuid(0), uuid(1)], "1": [uuid(0), uuid(1)]}, id="on both NUMA nodes"),
        pytest.param({"0": [uuid(0), uuid(1)], "1": None}, id="nothing on one"),
    ],
)
def test_device_ids_by_numa_node_or_not(ids: object) -> None:
    assert shares(read([pod_entry("a", ids)])) == [(uuid(0), "a", "", 1.0), (uuid(1), "a", "", 1.0)]


def test_what_is_not_there_or_not_readable_is_reported() -> None:
    allocation = read([pod_entry("a", {"0": [uuid(9), "card-one"]})])
    holder = Workload(container="main", uid="a")
    assert allocation == Allocation(
        (),
        (
            Unmapped("checkpoint", "unknown_device", uuid(9), "nvidia.com/gpu", holder),
            Unmapped("checkpoint", "unrecognised_id", "card-one", "nvidia.com/gpu", holder),
        ),
    )


@pytest.mark.parametrize("names", [frozenset(), frozenset({"example.com/x"})])
@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-9g", "example.com/x", ""])
@pytest.mark.parametrize("text", [uuid(3), "nvidia3/vgpu0", uuid(9), "all", "tegra", "vf0", "tencent.com/vcuda-core-3"])
def test_the_same_resources_and_ids_count_as_for_the_kubelets_socket(
    resource: str, text: str, names: frozenset[str]
) -> None:
    from podgpu.simulate.kubelet import SimulatedPod, list_answer

    pod = SimulatedPod("ns", "pod", {"main": {resource: [text]}})
    asked = parse_assignments(decode_list(list_answer([pod])), NODE, names)
    noted = read([pod_entry("pod", [text], resource)], names=names)
    assert [(a.device, a.replica) for a in noted.assignments] == [(a.device, a.replica) for a in asked.assignments]
    assert [(u.reason, u.device_id, u.resource) for u in noted.unmapped] == [
        (u.reason, u.device_id, u.resource) for u in asked.unmapped
    ]


# Shares


def replicas(number: int, count: int) -> list[str]:
    return [f"{uuid(number)}::{replica}" for replica in range(count)]


def test_a_share_is_replicas_held_of_replicas_registered() -> None:
    registered = {"nvidia.com/gpu.shared": replicas(0, 10)}
    entries = [pod_entry("a", {"0": replicas(0, 10)[:3]}), pod_entry("b", {"0": replicas(0, 10)[9:]})]
    assert shares(read(entries, registered)) == [(uuid(0), "a", "0", 0.3), (uuid(0), "b", "9", 0.1)]


def test_replicas_under_two_resources_and_numa_nodes_count_once() -> None:
    entries = [
        pod_entry("a", {"0": replicas(0, 2), "1": replicas(0, 2)}),
        pod_entry("a", [f"{uuid(0)}::1", f"{uuid(0)}::2"], "nvidia.com/gpu.shared"),
    ]
    assert shares(read(entries, {"nvidia.com/gpu": replicas(0, 4)})) == [(uuid(0), "a", "0", 0.75)]


def test_shares_of_googles_plugin_and_of_shared_instances() -> None:
    registered = {
        "nvidia.com/gpu": [f"nvidia1/vgpu{number}" for number in range(4)],
        "nvidia.com/mig-1g.5gb.shared": [f"{mig_uuid('a')}::0", f"{mig_uuid('a')}::1"],
    }
    entries = [pod_entry("a", ["nvidia1/vgpu2"]), pod_entry("b", [f"{mig_uuid('a')}::1"])]
    assert shares(read(entries, registered)) == [(uuid(1), "a", "2", 0.25), (f"{uuid(7)}/gi11", "b", "1", 0.5)]


def test_a_replica_held_but_not_registered_any_more_counts() -> None:
    entries = [pod_entry("a", replicas(0, 2)), pod_entry("b", [f"{uuid(0)}::7"])]
    assert [share for *_, share in shares(read(entries, {"nvidia.com/gpu": replicas(0, 3)}))] == [0.5, 0.25]


def test_a_replica_of_a_plugin_that_is_gone_has_no_share() -> None:
    for registered in (None, {}, {"nvidia.com/gpu": replicas(1, 3)}, {"nvidia.com/gpu": [uuid(0)]}):
        assert shares(read([pod_entry("a", replicas(0, 1))], registered)) == [(uuid(0), "a", "0", None)]


def test_a_gpu_held_whole_and_in_part_is_held_whole() -> None:
    entries = [pod_entry("a", [uuid(0), *replicas(0, 1)])]
    assert shares(read(entries, {"nvidia.com/gpu": replicas(0, 2)})) == [(uuid(0), "a", "", 1.0)]


def test_one_of_several_compute_instances_has_no_known_share() -> None:
    assert shares(read([pod_entry("a", [mig_uuid("c")])])) == [(f"{uuid(7)}/gi13", "a", "", None)]
    assert shares(read([pod_entry("a", ["nvidia7/gi13"])])) == [(f"{uuid(7)}/gi13", "a", "", 1.0)]


# What it does not understand


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "it is empty"),
        (REAL.read_bytes()[:-1], "column"),
        (b"[]", "the whole is not an object"),
        (b"{}", "Data is not an object"),
        (b'{"Data": null}', "Data is not an object"),
        (checkpoint({}), "PodDeviceEntries is not a list"),
        (checkpoint([pod_entry("a", []), []]), "entry 2 is not an object"),
        (checkpoint([pod_entry("", [])]), "entry 1: PodUID is empty"),
        (checkpoint([{"PodUID": "a", "ContainerName": "b"}]), "entry 1: ResourceName is not a text"),
        (checkpoint([pod_entry("a", "x")]), "entry 1: DeviceIDs is not a list"),
        (checkpoint([pod_entry("a", {"0": {"1": []}})]), "entry 1: DeviceIDs is not a list"),
        (checkpoint([pod_entry("a", {"0": [1]})]), "entry 1: DeviceIDs: an id is not a text"),
        (checkpoint([], []), "RegisteredDevices is not an object"),
        (checkpoint([], {"r\n": 1}), r"RegisteredDevices: 'r\n' is not a list"),
        (checkpoint([], {"r": [1]}), "RegisteredDevices: an id is not a text"),
    ],
)
def test_what_cannot_be_understood_is_no_reading_and_names_the_place(content: bytes, place: str) -> None:
    assert failure(lambda: parse_checkpoint(content, "/x/checkpoint"), "/x/checkpoint", place).reason == "malformed"


def reasons(content: bytes) -> set[str]:
    """Read it if it can be read; why it cannot otherwise."""
    try:
        map_checkpoint(parse_checkpoint(content), NODE)
    except SourceError as error:
        return {error.reason, *(["several lines"] if "\n" in str(error) else [])}
    return set()


@given(st.binary(max_size=100))
def test_any_bytes_are_a_reading_or_malformed(content: bytes) -> None:
    assert reasons(content) <= {"malformed"}


@given(st.integers(0, REAL.stat().st_size - 1), st.binary(max_size=3))
def test_a_damaged_checkpoint_is_a_reading_or_malformed(place: int, damage: bytes) -> None:
    content = REAL.read_bytes()
    assert reasons(content[:place] + damage + content[place + 1 :]) <= {"malformed"}


whole_ids = [uuid(0), "nvidia1", "all", "tegra", mig_uuid("c"), uuid(9), "vf0", ""]
device_ids = st.sampled_from([*whole_ids, *replicas(6, 11)])
entries = st.builds(
    pod_entry,
    st.sampled_from(["uid-a", "uid-b"]),
    st.dictionaries(st.sampled_from(["0", "1"]), st.lists(device_ids, max_size=4)),
    st.sampled_from(["nvidia.com/gpu", "nvidia.com/gpu.shared", "example.com/x"]),
    st.sampled_from(["main", "sidecar"]),
)


@given(st.lists(entries, max_size=8), st.integers(0, 11), st.randoms(use_true_random=False))
def test_order_does_not_matter(content: list[dict[str, Any]], registered: int, chance: random.Random) -> None:
    shuffled = [{**one, "DeviceIDs": dict(reversed(one["DeviceIDs"].items()))} for one in content]
    chance.shuffle(shuffled)
    ids = replicas(6, registered)
    nodes = chance.sample(NODE, len(NODE))
    bytes_of_it = checkpoint(shuffled, {"nvidia.com/gpu.shared": chance.sample(ids, len(ids))})
    allocation = read(content, {"nvidia.com/gpu.shared": ids})
    assert map_checkpoint(parse_checkpoint(bytes_of_it), nodes) == allocation
    assert all(one.share is None or 0 < one.share <= 1 for one in allocation.assignments)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 12))
def test_shares_of_one_gpu_never_add_up_to_more_than_it(owners: list[int], registered: int) -> None:
    held = [pod_entry(f"uid-{owner}", [f"{uuid(0)}::{replica}"]) for replica, owner in enumerate(owners)]
    allocation = read(held, {"nvidia.com/gpu": replicas(0, registered)})
    total = sum(one.share or 0 for one in allocation.assignments)
    assert total == pytest.approx(len(owners) / max(registered, len(owners)))


# The file as it changes


def test_a_replaced_checkpoint_is_seen_at_once_and_a_broken_one_is_malformed(tmp_path: Path) -> None:
    path, new = tmp_path / "checkpoint", tmp_path / "new"
    source = CheckpointAllocation(str(path))
    for uid in ("a", "b", "c"):
        new.write_bytes(checkpoint([pod_entry(uid, [uuid(0)])]))
        os.replace(new, path)
        assert shares(source.assignments(NODE)) == [(uuid(0), uid, "", 1.0)]
    path.write_bytes(path.read_bytes()[:-5])
    for _ in range(2):
        assert failure(lambda: source.assignments(NODE), str(path)).reason == "malformed"
    path.unlink()
    assert failure(lambda: source.assignments(NODE), str(path), "mount").reason == "file_missing"
    os.mkfifo(path)
    assert failure(lambda: source.assignments(NODE), str(path)).reason == "not_a_file"


def test_resource_names_reach_the_parser(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(checkpoint([pod_entry("a", ["card-one"], "example.com/gpu")]))
    assert CheckpointAllocation(str(path)).assignments(NODE) == Allocation()
    named = CheckpointAllocation(str(path), frozenset({"example.com/gpu"}))
    assert [one.reason for one in named.assignments(NODE).unmapped] == ["unrecognised_id"]
