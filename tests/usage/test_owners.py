"""Whose process a pid is, and when names are read anew."""

from __future__ import annotations

import pytest

from podgpu.model import Workload
from podgpu.usage.containers import ContainerFinder
from podgpu.usage.owners import Owners, ProcessOwners
from tests.simulated import FaultyProc, cgroup_text, container_cgroup

UIDS = [f"{n}f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{n}" for n in range(3)]
IDS = [f"{n:x}" * 64 for n in range(3)]


class Names:
    """The names on the node, as they are and as they were last read."""

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


def test_a_pod_without_a_name_has_its_name_read_at_once(proc: FaultyProc, owners: ProcessOwners, names: Names) -> None:
    start(proc, 7, 0)
    names.pods[UIDS[0]] = "train"
    assert owners.find({7}) == Owners({7: train()})
    assert names.read == 1


def test_names_are_not_read_again_for_who_has_one_or_never_gets_one(
    proc: FaultyProc, owners: ProcessOwners, names: Names
) -> None:
    start(proc, 7, 0)
    start(proc, 8, 1)
    names.pods[UIDS[0]] = "train"
    for _ in range(3):
        found = owners.find({7, 8})
        assert (found.workloads, found.unknown, set(found.nameless)) == ({7: train()}, {8: "no_pod_name"}, {8})
    assert names.read == 1, "for the second, once"
    start(proc, 9, 2)
    owners.find({7, 8, 9})
    assert names.read == 2
    owners.require_permission()


@pytest.mark.parametrize("cgroup", ["/system.slice/sshd.service", f"/system.slice/docker-{IDS[0]}.scope"])
def test_what_is_in_no_pod_is_nobodys_for_sure(
    proc: FaultyProc, owners: ProcessOwners, names: Names, cgroup: str
) -> None:
    proc.add(7, cgroup_text(cgroup))
    found = owners.find({7})
    assert (found.workloads, found.unknown) == ({}, {})
    owners.require_permission()


def test_a_process_that_ended_after_the_driver_listed_it_is_still_whose_it_was(
    proc: FaultyProc, owners: ProcessOwners, names: Names
) -> None:
    start(proc, 7, 0)
    names.pods[UIDS[0]] = "train"
    owners.find({7})
    proc.remove(7)
    assert owners.find({7, 8}) == Owners({7: train()}), "8 was never seen: nobody's"
    assert owners.find(set()) == Owners()
    assert owners.find({7}) == Owners()
