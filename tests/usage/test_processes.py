"""Tests the allocation source that finds holders by the processes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.errors import DeviceLost, SourceError
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.node_files import ProcessHolders
from podgpu.node.usage.containers import ContainerFinder
from tests.privilege import without_privilege
from tests.simulated import OTHER_PID_NAMESPACE, FaultyNvml, FaultyProc, container_cgroup

UID = "3f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a11"
OTHER_UID = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
A, B = "a" * 64, "b" * 64
IN_A, IN_B = container_cgroup(UID, A), container_cgroup(OTHER_UID, B, driver="cgroupfs", version=1)
CONTAINER_A, CONTAINER_B = (
    Workload(uid=UID, container_id=A),
    Workload(uid=OTHER_UID, container_id=B),
)
HOST = "0::/user.slice/user-1000.slice/session-3.scope\n"


class Node:
    """Simulated GPUs, a simulated /proc, and the source that reads both."""

    def __init__(self, spec: str, proc: FaultyProc) -> None:
        self.driver = FaultyNvml(spec)
        self.proc = proc
        self.telemetry = NvmlTelemetry(self.driver, count_expected=lambda: None)
        self.gpus = self.telemetry.inventory().gpus
        self.finder = ContainerFinder(str(proc.root))
        self.source: AllocationSource = ProcessHolders(self.telemetry.processes, self.finder)

    @property
    def devices(self) -> list[Device]:
        return [device for gpu in self.gpus for device in self.telemetry.read(gpu, ()).values]

    def run(self, pid: int, cgroup: str, gpu: int = 0, gi_id: int | None = None) -> None:
        if not (self.proc.root / str(pid)).exists():
            self.proc.add(pid, cgroup)
        self.driver.place(SimulatedLoad(gpu, pid, gi_id=gi_id))

    def read(self) -> Allocation:
        return self.source.assignments(self.devices)


@pytest.fixture
def node(request: pytest.FixtureRequest, proc: FaultyProc) -> Iterator[Node]:
    node = Node(getattr(request, "param", "2xH100"), proc)
    yield node
    node.telemetry.release(1.0)


def test_a_lost_gpu_does_not_hide_the_holders_of_the_others(node: Node) -> None:
    node.run(41, IN_A)
    node.run(42, IN_B, gpu=1)
    devices = node.devices
    lost, other = (device.key for device in devices)
    node.driver.lose(0)
    assert node.source.assignments(devices) == Allocation(
        (Assignment(other, CONTAINER_B, "processes"),)
    )

    node.driver.lose(1)
    with pytest.raises(DeviceLost):
        node.source.assignments(devices)
    node.driver.recover(0)
    assert node.source.assignments(devices).assignments == (
        Assignment(lost, CONTAINER_A, "processes"),
    )


def test_the_share_that_kai_writes_into_the_environment(node: Node) -> None:
    for pid, cgroup, variables in (
        (41, IN_A, "A=b\0GPU_PORTION=0.25\0"),
        (42, IN_A, ""),
        (43, IN_B, "GPU_PORTION=7\0"),
    ):
        node.run(pid, cgroup)
        (node.proc.root / str(pid) / "environ").write_text(variables)
    assert {(a.holder, a.share) for a in node.read().assignments} == {
        (CONTAINER_A, 0.25),
        (CONTAINER_B, None),
    }


@pytest.mark.parametrize("node", ["1xH100/2x3g.40gb"], indirect=True)
def test_a_mig_instance_has_its_own_holder(node: Node) -> None:
    first, second = (device for device in node.devices if device.is_instance)
    node.run(41, IN_A, gi_id=first.gi_id)
    node.run(42, IN_B, gi_id=second.gi_id)
    assert {(a.device, a.holder) for a in node.read().assignments} == {
        (first.key, CONTAINER_A),
        (second.key, CONTAINER_B),
    }


def test_processes_of_the_host_hold_nothing(node: Node) -> None:
    node.run(41, HOST)
    assert node.read() == Allocation()


def test_outside_the_hosts_pid_namespace(root: Path) -> None:
    node = Node("1xH100", FaultyProc(root / "pod", OTHER_PID_NAMESPACE))
    node.driver.faults.hide_processes()
    node.run(41, IN_A)
    for _ in range(2):
        with pytest.raises(SourceError, match="hostPID: true") as caught:
            node.read()
        assert caught.value.reason == "not_host_pid_namespace"


def test_unreadable_processes_are_counted_once_per_device(node: Node) -> None:
    node.run(41, IN_A)
    for pid in (42, 43):
        node.run(pid, IN_B)
        node.proc.forbid(pid)
    key = node.gpus[0].key
    with without_privilege():
        assert node.read() == Allocation(
            (Assignment(key, CONTAINER_A, "processes"),),
            (Unmapped("processes", "not_permitted", key, "pid", Workload()),),
        )
