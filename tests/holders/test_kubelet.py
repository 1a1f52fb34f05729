"""The kubelet source against a real gRPC server: answers, restarts and errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from podgpu.errors import SourceError
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.model import Allocation, Device
from podgpu.simulate.kubelet import SimulatedPod
from tests.privilege import without_privilege
from tests.simulated_kubelet import RATE_LIMITED, FaultyKubelet

MakeSource = Callable[..., KubeletAllocation]

UUID = "GPU-00000000-1111-2222-3333-444444444444"
OTHER = "GPU-00000001-1111-2222-3333-444444444444"
NODE = (
    Device(0, UUID, "00000000:01:00.0", "NVIDIA H200", minor=0),
    Device(1, OTHER, "00000000:02:00.0", "NVIDIA H200", minor=1),
)

V1 = "/v1.PodResourcesLister/List"


def pod(name: str, *ids: str) -> SimulatedPod:
    return SimulatedPod("ns", name, {"main": {"nvidia.com/gpu": ids}, "proxy": {}})


def pods_by_device(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.pod) for one in allocation.assignments]


def failure(source: KubeletAllocation) -> SourceError:
    with pytest.raises(SourceError) as caught:
        source.assignments(NODE)
    assert "\n" not in str(caught.value)
    assert source.client.socket in str(caught.value)
    return caught.value


def test_a_reading_is_one_list_call(kubelet: FaultyKubelet, source: KubeletAllocation) -> None:
    for _ in range(3):
        source.assignments(NODE)
    offered = "/v1.PodResourcesLister/GetAllocatableResources"
    assert list(kubelet.calls) == [V1, offered, V1, V1], "allocatable devices are read once a minute"


def test_another_server(kubelet: FaultyKubelet, source: KubeletAllocation) -> None:
    kubelet.versions = frozenset()
    error = failure(source)
    assert error.reason == "error"
    assert "UNIMPLEMENTED" in str(error)
    assert "--pod-resources-kubelet-socket" in str(error)


# Failures


def test_a_missing_socket(folder: Path, make_source: MakeSource) -> None:
    error = failure(make_source(folder / "kubelet.sock"))
    assert error.reason == "socket_missing"
    assert "pod-resources directory" in str(error)
    assert "--pod-resources-kubelet-socket" in str(error)


def test_a_file_or_directory_instead_of_a_socket(folder: Path, make_source: MakeSource) -> None:
    (folder / "kubelet.sock").touch()
    assert failure(make_source(folder / "kubelet.sock")).reason == "not_a_socket"
    assert failure(make_source(folder)).reason == "not_a_socket"


def test_no_permission_to_connect(kubelet: FaultyKubelet, folder: Path, make_source: MakeSource) -> None:
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
    kubelet.pods = (pod("a", UUID),)
    source.deadline = 10
    assert pods_by_device(source.assignments(NODE)) == [(UUID, "a")]


def test_a_rate_limit(kubelet: FaultyKubelet, source: KubeletAllocation) -> None:
    kubelet.refusal = RATE_LIMITED
    error = failure(source)
    assert error.reason == "rate_limited"
    assert "the last mapping is used" in str(error)
    assert list(kubelet.calls) == [V1]


@pytest.mark.parametrize("code", ["INTERNAL", "RESOURCE_EXHAUSTED"])
def test_other_errors_contain_their_status(kubelet: FaultyKubelet, source: KubeletAllocation, code: str) -> None:
    kubelet.refusal = (code, "device manager\nis on fire")
    error = failure(source)
    assert error.reason == "error"
    assert f"{code}: device manager is on fire" in str(error)


@pytest.mark.parametrize("garbage", [b"\xff", b"\n\xff\x01", b"\n\x04\n\x02\xff\xfe", b"HTTP/1.1 200 OK"])
def test_garbage(kubelet: FaultyKubelet, source: KubeletAllocation, garbage: bytes) -> None:
    kubelet.raw_answer = garbage
    assert failure(source).reason == "bad_answer"
    kubelet.raw_answer = None
    assert source.assignments(NODE) == Allocation()
