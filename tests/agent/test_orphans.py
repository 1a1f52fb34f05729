"""Processes that hold memory of a GPU after their container has ended, or on a free GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podgpu.errors import SourceError
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.model import Assignment, Workload, encode_node
from podgpu.node.agent.agent import Settings
from podgpu.node.agent.orphans import ORPHAN_SECONDS
from podgpu.node.holders.identity import Identities
from tests.agent.simulated_node import SimulatedNode
from tests.simulated import FaultyProc, cgroup_text, container_cgroup

GIB = 1024**3
UID = "9f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a11"
TRAIN = Workload("ns", "train", "main", UID, "1" * 64)
NAMES = Identities(current=frozenset({TRAIN}))


class Node(SimulatedNode):
    """Two H100. The pod `train` holds GPU 0 with pid 41."""

    def __init__(self, folder: Path) -> None:
        self.proc = FaultyProc(folder / "proc")
        super().__init__("2xH100", Settings(interval=1.0), proc=self.proc, identities=lambda: NAMES)
        self.proc.add(41, container_cgroup(UID, "1" * 64))
        self.driver.place(SimulatedLoad(0, 41, duty=0.3, memory=10 * GIB))
        self.list_pods("train")
        self.wait(3.0)

    def list_pods(self, *names: str) -> None:
        pods = frozenset(("ns", name) for name in (*names, "other"))
        self.holders.more = {"listed_pods": pods, "offered": frozenset(self.uuids)}
        self.holders.now = []
        if "train" in names:
            holder = Workload("ns", "train", "main")
            self.holders.now = [Assignment(self.uuids[0], holder, "kubelet", share=1.0)]

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.driver.gpus]

    def wait(self, seconds: float) -> None:
        for _ in range(10):
            self.turn(seconds / 10)

    def orphans(self, gpu: int = 0) -> list[dict[str, Any]]:
        state = json.loads(encode_node(self.agent.published.state))
        found: list[dict[str, Any]] = state["devices"][gpu].get("orphans", [])
        return found

    def conditions(self, gpu: int = 0) -> dict[str, str]:
        found = self.agent.published.state.devices[gpu].conditions
        return {condition.name: condition.detail for condition in found}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.fault(
    "A process keeps memory of a GPU after its container has ended",
    "After a minute the GPU has the condition orphaned_memory, with pid, program, memory and the "
    "former pod, until the process ends",
)
def test_the_memory_of_a_pod_that_has_ended(node: Node) -> None:
    node.wait(120.0)
    assert node.orphans() == [], "the pod runs"
    node.list_pods()
    (node.proc.root / "41" / "comm").write_text("python3\n")
    began = node.wall()
    node.wait(ORPHAN_SECONDS - 2.0)
    assert node.orphans() == []
    node.wait(10.0)
    (orphan,) = node.orphans()
    assert (orphan["pid"], orphan["program"]) == (41, "python3")
    assert orphan["memory_used_bytes"] == 10 * GIB
    assert orphan["former"]["pod"] == "train"
    assert orphan["since"] == pytest.approx(began, abs=7.0)
    assert node.conditions()["orphaned_memory"] == (
        "pid 41 (python3) of ns/train/main holds 10.0 GiB"
    )
    (series,) = (
        line
        for line in node.exposition.splitlines()
        if line.startswith("podgpu_device_orphaned_memory_bytes{")
    )
    assert 'pod="train"' in series
    assert 'pid="41"' in series
    assert float(series.rsplit(" ", 1)[1]) == 10 * GIB

    node.driver.remove(41)
    node.turn()
    assert node.orphans() == []
    assert "orphaned_memory" not in node.conditions()


def test_memory_of_a_process_that_does_not_exist(node: Node) -> None:
    node.proc.remove(41)
    node.wait(ORPHAN_SECONDS + 10.0)
    (orphan,) = node.orphans()
    assert orphan["is_gone"]
    assert orphan["former"]["pod"] == "train"


def test_a_process_of_the_host_on_a_free_gpu(node: Node) -> None:
    node.proc.add(50, cgroup_text("/system.slice/agent.service"), "agent")
    node.driver.place(SimulatedLoad(1, 50, duty=0.1, memory=GIB))
    node.proc.add(51, cgroup_text("/system.slice/agent.service"), "agent")
    node.driver.place(SimulatedLoad(0, 51, duty=0.1, memory=GIB))
    node.wait(ORPHAN_SECONDS + 10.0)
    assert [orphan["pid"] for orphan in node.orphans(1)] == [50]
    assert "former" not in node.orphans(1)[0]
    assert node.orphans(0) == [], "a pod has this GPU"


@pytest.mark.parametrize("doubt", ["no kubelet", "no list", "no memory", "mps"])
def test_in_doubt_nothing_is_an_orphan(node: Node, doubt: str) -> None:
    memory = 0 if doubt == "no memory" else GIB
    name = "nvidia-cuda-mps-server" if doubt == "mps" else "agent"
    node.proc.add(50, cgroup_text("/system.slice/agent.service"), name)
    node.driver.place(SimulatedLoad(1, 50, duty=0.1, memory=memory))
    if doubt == "no kubelet":
        node.holders.error = SourceError("unreachable", "the kubelet does not answer")
    if doubt == "no list":
        node.holders.more = {"offered": frozenset(node.uuids)}
    node.wait(ORPHAN_SECONDS + 20.0)
    assert [orphan["pid"] for orphan in node.orphans(0)] == []
    expected = [50] if doubt == "no list" else []
    assert [orphan["pid"] for orphan in node.orphans(1)] == expected
