"""Owners of processes, and when names are read again."""

from __future__ import annotations

import pytest

from podgpu.model import Workload
from podgpu.usage.containers import ContainerFinder
from podgpu.usage.owners import Owners, ProcessOwners
from tests.simulated import FaultyProc, cgroup_text, container_cgroup

UIDS = [f"{n}f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{n}" for n in range(3)]
IDS = [f"{n:x}" * 64 for n in range(3)]


class Names:
    """Names of pods: those of the node, and those that were read last."""

    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        self.known: dict[str, str] = {}
        self.read = 0

    def complete(self, workload: Workload) -> Workload:
        pod = self.known.get(workload.uid)
        return workload if pod is None else Workload("ns", pod, "main", workload.uid, workload.container_id)

    def read_identities(self) -> None:
        self.read += 1
        self.known = dict(self.pods)


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
def owners(finder: ContainerFinder, names: Names) -> ProcessOwners:
    return ProcessOwners(finder, names)


def start(proc: FaultyProc, pid: int, number: int) -> None:
    proc.add(pid, container_cgroup(UIDS[number], IDS[number]))


def train() -> Workload:
    return Workload("ns", "train", "main", UIDS[0], IDS[0])


def test_names_are_read_for_a_new_pod(proc: FaultyProc, owners: ProcessOwners, names: Names) -> None:
    start(proc, 7, 0)
    names.pods[UIDS[0]] = "train"
    assert owners.find({7}) == Owners({7: train()})
    assert names.read == 1


def test_names_are_read_once_for_each_pod(proc: FaultyProc, owners: ProcessOwners, names: Names) -> None:
    start(proc, 7, 0)
    start(proc, 8, 1)
    names.pods[UIDS[0]] = "train"
    for _ in range(3):
        found = owners.find({7, 8})
        assert (found.workloads, found.unknown, set(found.nameless)) == ({7: train()}, {8: "no_pod_name"}, {8})
    assert names.read == 1, "once for the second pod"
    start(proc, 9, 2)
    owners.find({7, 8, 9})
    assert names.read == 2
    owners.require_permission()


@pytest.mark.parametrize("cgroup", ["/system.slice/sshd.service", f"/system.slice/docker-{IDS[0]}.scope"])
def test_processes_outside_pods_have_no_owner(
    proc: FaultyProc, owners: ProcessOwners, names: Names, cgroup: str
) -> None:
    proc.add(7, cgroup_text(cgroup))
    found = owners.find({7})
    assert (found.workloads, found.unknown) == ({}, {})
    owners.require_permission()


def test_a_process_that_ended_after_it_was_listed_keeps_its_owner(
    proc: FaultyProc, owners: ProcessOwners, names: Names
) -> None:
    start(proc, 7, 0)
    names.pods[UIDS[0]] = "train"
    owners.find({7})
    proc.remove(7)
    assert owners.find({7, 8}) == Owners({7: train()}), "8 was never seen"
    assert owners.find(set()) == Owners()
    assert owners.find({7}) == Owners()
