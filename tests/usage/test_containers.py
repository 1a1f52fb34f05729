"""Tests the containers and owners of processes, and when the names of pods are read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from podgpu.model import Workload
from podgpu.node.usage.containers import (
    CACHE_SECONDS,
    NOT_IN_POD,
    ContainerFinder,
    ContainerLookup,
    ProcessOwner,
    ProcessOwners,
    in_host_pid_namespace,
)
from tests.nodes.clock import FakeClock
from tests.privilege import without_privilege
from tests.simulated import FaultyProc, cgroup_text, container_cgroup

UID = "3f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a11"
A, B = "a" * 64, "b" * 64
IN_A, IN_B = container_cgroup(UID, A), container_cgroup(UID, B)
HOST = "0::/user.slice/user-1000.slice/session-3.scope\n"

FOUND_A = ContainerLookup("found", Workload(uid=UID, container_id=A))
FOUND_B = ContainerLookup("found", Workload(uid=UID, container_id=B))


def test_processes_in_containers_and_on_the_host(proc: FaultyProc, finder: ContainerFinder) -> None:
    proc.add(41, IN_A)
    proc.add(42, HOST)
    assert list(finder.find_all((41, 42, 43)).values()) == [
        FOUND_A,
        ContainerLookup("not_in_container"),
        ContainerLookup("gone"),
    ]


def test_an_mps_server_is_recognised(proc: FaultyProc, finder: ContainerFinder) -> None:
    proc.add(41, IN_A)
    stat = proc.root / "41" / "stat"
    stat.write_text("41 (nvidia-cuda-mps) " + stat.read_text().rpartition(") ")[2])
    assert finder.find(41) == ContainerLookup("found", FOUND_A.workload, is_mps_server=True)


def test_a_process_that_ends_between_two_reads(proc: FaultyProc, finder: ContainerFinder) -> None:
    proc.add(41, IN_A)
    (proc.root / "41" / "cgroup").unlink()
    assert finder.find(41) == ContainerLookup("gone")


def test_a_reused_pid_is_another_process(proc: FaultyProc, finder: ContainerFinder) -> None:
    proc.add(41, IN_A)
    finder.find(41)
    proc.reuse(41, IN_B)
    assert finder.find(41) == FOUND_B


def test_the_cgroup_is_read_once_while_fresh(
    proc: FaultyProc, finder: ContainerFinder, clock: FakeClock
) -> None:
    proc.add(41, IN_A)
    finder.find(41)
    proc.move(41, IN_B)
    clock.advance(CACHE_SECONDS - 1)
    assert finder.find(41) == FOUND_A
    clock.advance(1)
    assert finder.find(41) == FOUND_B, "must be read again, because a process may change its cgroup"


def test_a_lookup_that_is_not_permitted_is_repeated(
    proc: FaultyProc, finder: ContainerFinder
) -> None:
    proc.add(41, IN_A)
    proc.forbid(41)
    with without_privilege():
        assert finder.find(41) == ContainerLookup("not_permitted")
    (proc.root / "41" / "cgroup").chmod(0o444)
    assert finder.find(41) == FOUND_A


@pytest.mark.parametrize("stat", ["", "41 (python) S 1 2 3", "41 (python", "41 (x) S" + " x" * 30])
def test_an_invalid_stat_file(proc: FaultyProc, finder: ContainerFinder, stat: str) -> None:
    proc.add(41, IN_A)
    (proc.root / "41" / "stat").write_text(stat)
    assert finder.find(41) == ContainerLookup("unreadable")


@pytest.mark.reads_host("the test reads the real /proc")
def test_the_real_proc() -> None:
    finder = ContainerFinder()
    assert finder.find(os.getpid()).outcome in ("found", "not_in_container")
    kernel_thread = Path("/proc/2/comm")  # visible only in the host's PID namespace
    is_host = kernel_thread.exists() and kernel_thread.read_text() == "kthreadd\n"
    assert in_host_pid_namespace() == is_host
    with subprocess.Popen(["sleep", "60"]) as child:
        assert finder.find(child.pid).outcome == finder.find(os.getpid()).outcome
        child.kill()
    assert finder.find(child.pid) == ContainerLookup("gone")


UIDS = [f"{n}f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{n}" for n in range(3)]
IDS = [f"{n:x}" * 64 for n in range(3)]


class Names:
    """Fake names of pods. `pods`: names on the node. `known`: names at the last read."""

    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        self.known: dict[str, str] = {}
        self.read = 0

    def complete(self, workload: Workload) -> Workload:
        pod = self.known.get(workload.uid)
        return (
            workload
            if pod is None
            else Workload("ns", pod, "main", workload.uid, workload.container_id)
        )

    def read_identities(self) -> None:
        self.read += 1
        self.known = dict(self.pods)


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
def owners(finder: ContainerFinder, names: Names) -> ProcessOwners:
    return ProcessOwners(finder, names.complete, names.read_identities)


def start(proc: FaultyProc, pid: int, number: int) -> None:
    proc.add(pid, container_cgroup(UIDS[number], IDS[number]))


def train() -> Workload:
    return Workload("ns", "train", "main", UIDS[0], IDS[0])


def test_names_are_read_for_a_new_pod(
    proc: FaultyProc, owners: ProcessOwners, names: Names
) -> None:
    start(proc, 7, 0)
    names.pods[UIDS[0]] = "train"
    assert owners.find({7}) == {7: ProcessOwner(train())}
    assert names.read == 1


def test_names_are_read_once_for_each_pod(
    proc: FaultyProc, owners: ProcessOwners, names: Names
) -> None:
    start(proc, 7, 0)
    start(proc, 8, 1)
    names.pods[UIDS[0]] = "train"
    for _ in range(3):
        found = owners.find({7, 8})
        assert found[7] == ProcessOwner(train())
        assert (found[8].workload, found[8].problem, found[8].container is None) == (
            None,
            "no_pod_name",
            False,
        )
    assert names.read == 1, "must not be read again for the pod without a name"
    start(proc, 9, 2)
    owners.find({7, 8, 9})
    assert names.read == 2
    owners.require_permission()


@pytest.mark.parametrize(
    "cgroup", ["/system.slice/sshd.service", f"/system.slice/docker-{IDS[0]}.scope"]
)
def test_processes_outside_pods_have_no_owner(
    proc: FaultyProc, owners: ProcessOwners, names: Names, cgroup: str
) -> None:
    proc.add(7, cgroup_text(cgroup))
    found = owners.find({7})[7]
    assert (found.workload, found.problem) == (None, "")
    owners.require_permission()


def test_a_process_that_ended_after_it_was_listed_keeps_its_owner(
    proc: FaultyProc, owners: ProcessOwners, names: Names
) -> None:
    start(proc, 7, 0)
    names.pods[UIDS[0]] = "train"
    owners.find({7})
    proc.remove(7)
    assert owners.find({7, 8}) == {7: ProcessOwner(train()), 8: NOT_IN_POD}, (
        "8 was never found in /proc"
    )
    assert owners.find(set()) == {}
    assert owners.find({7}) == {7: NOT_IN_POD}
