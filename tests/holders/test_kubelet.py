"""Tests the kubelet as an allocation source, with a real gRPC server: its answers and its
errors.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from podgpu.node.holders.kubelet import GrpcError, KubeletAllocation, call_unary, decode_list
from tests.holders.devices import gpu, mig_uuid, uuid
from tests.nodes.clock import PATIENCE
from tests.privilege import without_privilege
from tests.simulated_kubelet import RATE_LIMITED, FaultyKubelet, list_answer

MakeSource = Callable[..., KubeletAllocation]

V1 = "/v1.PodResourcesLister/List"


def instance(number: int, gi_id: int, *mig_uuids: str) -> Device:
    parent = gpu(number)
    return Device(
        number,
        parent.uuid,
        parent.pci_bus_id,
        parent.model,
        number,
        True,
        gi_id,
        "1g.5gb",
        mig_uuids,
    )


NODE = (
    *(gpu(number) for number in range(8)),
    instance(7, 11, mig_uuid("a")),
    instance(7, 12, mig_uuid("b"), mig_uuid("c")),
)


def pod(name: str, *ids: str) -> SimulatedPod:
    return SimulatedPod("ns", name, {"main": {"nvidia.com/gpu": ids}, "proxy": {}})


def pods_by_device(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.pod) for one in allocation.assignments]


def failure(source: KubeletAllocation) -> SourceError:
    with pytest.raises(SourceError) as caught:
        source.assignments(NODE)
    assert "\n" not in str(caught.value)
    assert source.socket in str(caught.value)
    return caught.value


def test_a_reading_is_one_list_call(kubelet: FaultyKubelet, source: KubeletAllocation) -> None:
    for _ in range(3):
        source.assignments(NODE)
    offered = "/v1.PodResourcesLister/GetAllocatableResources"
    assert list(kubelet.calls) == [V1, offered, V1, V1], (
        "allocatable devices are read once a minute"
    )


def test_another_server(kubelet: FaultyKubelet, source: KubeletAllocation) -> None:
    kubelet.versions = frozenset()
    error = failure(source)
    assert error.reason == "error"
    assert "UNIMPLEMENTED" in str(error)
    assert "before Kubernetes 1.20, the kubelet serves only v1alpha1" in str(error)
    assert "--pod-resources-kubelet-socket" in str(error)


def test_a_missing_socket(folder: Path, make_source: MakeSource) -> None:
    error = failure(make_source(folder / "kubelet.sock"))
    assert error.reason == "socket_missing"
    assert "pod-resources directory" in str(error)
    assert "--pod-resources-kubelet-socket" in str(error)


def test_a_file_or_directory_instead_of_a_socket(folder: Path, make_source: MakeSource) -> None:
    (folder / "kubelet.sock").touch()
    assert failure(make_source(folder / "kubelet.sock")).reason == "not_a_socket"
    assert failure(make_source(folder)).reason == "not_a_socket"


def test_no_permission_to_connect(
    kubelet: FaultyKubelet, folder: Path, make_source: MakeSource
) -> None:
    folder.chmod(0o755)
    os.chmod(kubelet.socket, 0o555)
    with without_privilege():
        error = failure(make_source(kubelet.socket))
    assert error.reason == "permission_denied"
    assert "uid 0" in str(error)
    assert list(kubelet.calls) == []


def test_a_hanging_kubelet_times_out(kubelet: FaultyKubelet, make_source: MakeSource) -> None:
    source = make_source(kubelet.socket, deadline=0.2)
    kubelet.hang()
    error = failure(source)
    assert error.reason == "deadline"
    kubelet.resume()
    kubelet.pods = (pod("a", uuid(0)),)
    source.deadline = 10
    assert pods_by_device(source.assignments(NODE)) == [(uuid(0), "a")]


def test_a_rate_limit(kubelet: FaultyKubelet, source: KubeletAllocation) -> None:
    kubelet.refusal = RATE_LIMITED
    error = failure(source)
    assert error.reason == "rate_limited"
    assert "the last mapping is used" in str(error)
    assert list(kubelet.calls) == [V1]


@pytest.mark.parametrize("code", ["INTERNAL", "RESOURCE_EXHAUSTED"])
def test_other_errors_contain_their_status(
    kubelet: FaultyKubelet, source: KubeletAllocation, code: str
) -> None:
    kubelet.refusal = (code, "device manager\nis on fire: 100 % ü")
    error = failure(source)
    assert error.reason == "error"
    assert f"{code}: device manager is on fire: 100 % ü" in str(error)


@pytest.mark.parametrize(
    "garbage", [b"\xff", b"\n\xff\x01", b"\n\x04\n\x02\xff\xfe", b"HTTP/1.1 200 OK"]
)
def test_garbage(kubelet: FaultyKubelet, source: KubeletAllocation, garbage: bytes) -> None:
    kubelet.raw_answer = garbage
    assert failure(source).reason == "bad_answer"
    kubelet.raw_answer = None
    assert source.assignments(NODE) == Allocation()


FIXTURES = Path(__file__).parents[1] / "fixtures" / "kubelet-1.36"
LIST = (FIXTURES / "podresources-v1-list.bin").read_bytes()


def holders(allocation: Allocation) -> list[tuple[str, str, str, str, str]]:
    return [
        (one.device, one.holder.namespace, one.holder.pod, one.holder.container, one.replica)
        for one in allocation.assignments
    ]


def allocation_of(
    resources: dict[str, list[str]],
    names: frozenset[str] = frozenset(),
    numa_nodes: tuple[int, ...] = (0,),
) -> Allocation:
    pod = SimulatedPod("ns", "pod", {"main": resources})
    return KubeletAllocation("unused.sock", names).map_pods(
        decode_list(list_answer([pod], numa_nodes)), NODE
    )


def test_the_simulated_kubelet_answers_like_the_real_one() -> None:
    pods = [
        SimulatedPod("default", "train-node1", {"main": {"nvidia.com/gpu": [uuid(5), uuid(0)]}}),
        SimulatedPod(
            "research",
            "duo-node1",
            {"main": {"nvidia.com/gpu": [uuid(4)]}, "sidecar": {"nvidia.com/gpu": [uuid(1)]}},
        ),
        SimulatedPod(
            "serving", "slice-a-node1", {"main": {"nvidia.com/gpu.shared": [uuid(6) + "::0"]}}
        ),
        SimulatedPod(
            "serving", "slice-b-node1", {"main": {"nvidia.com/gpu.shared": [uuid(6) + "::1"]}}
        ),
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
    assert [one.device for one in allocation_of({"example.com/gpu": [device_id]}).assignments] == [
        uuid(3)
    ]


@pytest.mark.parametrize("device_id", ["all", "tegra", "vf0", "tencent.com/vcuda-core-3", ""])
def test_ids_of_other_plugins_are_ignored(device_id: str) -> None:
    allocation = allocation_of({"example.com/nic": [device_id]})
    assert allocation == Allocation(listed_pods=frozenset({("ns", "pod")}))


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/mig-9g.1gb", "example.com/gpu"])
def test_unrecognised_ids_of_gpu_resources_are_reported(resource: str) -> None:
    allocation = allocation_of({resource: ["card-one"]}, names=frozenset({"example.com/gpu"}))
    assert allocation.unmapped == (
        Unmapped("kubelet", "unrecognised_id", "card-one", resource, Workload("ns", "pod", "main")),
    )


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(LIST) - 1), st.binary(max_size=3)))
def test_any_answer_is_decoded_or_bad(damage: bytes | tuple[int, bytes]) -> None:
    answer = (
        damage
        if isinstance(damage, bytes)
        else LIST[: damage[0]] + damage[1] + LIST[damage[0] + 1 :]
    )
    with suppress(SourceError):
        KubeletAllocation("unused.sock").map_pods(decode_list(answer), NODE)


# The gRPC client, against real gRPC servers and servers that break the protocol


PODS = [
    SimulatedPod("ml", f"train-{n}", {"main": {"nvidia.com/gpu": [f"GPU-{n:032x}"]}})
    for n in range(250)
]


def call_failure(path: str) -> GrpcError:
    with pytest.raises(GrpcError) as caught:
        call_unary(path, V1, PATIENCE)
    return caught.value


def test_many_calls(kubelet: FaultyKubelet) -> None:
    kubelet.pods = tuple(PODS)
    files = len(os.listdir("/proc/self/fd"))
    assert {call_unary(kubelet.socket, V1, PATIENCE) for _ in range(100)} == {list_answer(PODS)}
    assert len(os.listdir("/proc/self/fd")) <= files + 4


def test_restarts_of_the_server(kubelet: FaultyKubelet) -> None:
    for _ in range(3):
        call_unary(kubelet.socket, V1, PATIENCE)
        kubelet.restart()
    call_unary(kubelet.socket, V1, PATIENCE)
    kubelet.stop(leave_socket=True)
    assert call_failure(kubelet.socket).status == "UNAVAILABLE"
    assert call_failure(kubelet.socket).message == "Connection refused"
    kubelet.start()
    call_unary(kubelet.socket, V1, PATIENCE)


@pytest.mark.fault(
    "the server on the kubelet's socket speaks broken HTTP/2, or another protocol",
    "the reading fails, the last holders are kept, and the next reading opens a new connection",
)
def test_broken_http(folder: Path) -> None:
    """Sends random bytes, and valid answers that are truncated or have one changed byte."""
    chance = random.Random(7)
    valid = bytes.fromhex("00000004000000000000000101040000000188000006000000000001000000000178")
    answers = [chance.randbytes(chance.randint(0, 500)) for _ in range(100)] + [
        b"HTTP/1.1 400 Bad Request\r\n\r\n"
    ]
    answers += [
        valid[:at] + bytes([chance.randrange(256)]) + valid[at + 1 :] for at in range(len(valid))
    ]
    answers += [valid[:at] for at in range(len(valid))]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "kubelet.sock"))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                for answer in answers:
                    accepted, _ = listener.accept()
                    with accepted, suppress(ConnectionError):
                        accepted.recv(65536)
                        accepted.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        files = len(os.listdir("/proc/self/fd"))
        statuses = {call_failure(str(folder / "kubelet.sock")).status for _ in answers}
        assert statuses <= {"UNAVAILABLE", "UNKNOWN", "INTERNAL"}
        assert len(os.listdir("/proc/self/fd")) <= files + 1
        server.join(PATIENCE)
