"""XIDs of applications: the culprit in the JSON, on the page, in the metric and as a condition."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podgpu.fleet.view import make_view
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.model import Assignment, Workload, encode_node
from podgpu.node.agent.agent import Settings
from podgpu.node.gpu.nvml.kernel_log import KernelLog, KernelXid, open_kernel_log
from podgpu.node.holders.identity import Identities
from podgpu.web.exporter_app import build_state
from tests.agent.simulated_node import SimulatedNode
from tests.agent.test_usage_methods import Node as BurstNode
from tests.engine import BurstLoad
from tests.nodes.clock import wait_until
from tests.simulated import FaultyProc, container_cgroup

PODS = ("red", "green")
UID = "9f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{}"
NAMES = Identities(
    current=frozenset(
        Workload("ns", name, "main", UID.format(n), f"{n}" * 64) for n, name in enumerate(PODS)
    )
)
KERNEL, USER = 4, 12
"""Priority of a record of the kernel, and of a record that a program wrote."""


class Node(SimulatedNode):
    """One H100 that `red` (pid 40) and `green` (pid 41) share."""

    def __init__(self, folder: Path, *pods: str) -> None:
        self.proc = FaultyProc(folder / "proc")
        self.kmsg = folder / "kmsg"
        self.kmsg.write_text(_record(KERNEL, "an old line"))
        self.kernel_log = KernelLog(str(self.kmsg), self.wall)
        super().__init__(
            "1xH100",
            Settings(interval=1.0),
            proc=self.proc,
            identities=lambda: NAMES,
            kernel_log=self.kernel_log,
        )
        for name in pods:
            number = PODS.index(name)
            self.add_process(number, 40 + number)
            self.driver.place(SimulatedLoad(0, 40 + number, duty=0.3))
        self.holders.now = [
            Assignment(self.uuid(0), Workload("ns", name, "main"), "kubelet", str(n), 0.5)
            for n, name in enumerate(pods)
        ]
        self.run(5)

    def add_process(self, number: int, pid: int) -> None:
        self.proc.add(pid, container_cgroup(UID.format(number), f"{number}" * 64))

    def fail(self, xid: int = 13, **kernel: Any) -> None:
        """Raises an XID, and writes the kernel's line if it has a pid."""
        before = self.count(xid)
        self.driver.raise_xid(0, xid)
        if kernel:
            self.log(**{"xid": xid} | kernel)
        # The time stands still meanwhile, so a slow machine reports the XID at the same time.
        wait_until(
            lambda: self.agent.read_telemetry() or self.count(xid) > before, "NVML reports the XID"
        )

    def log(self, xid: int, pid: object, pci: str = "0000:04:00", priority: int = KERNEL) -> None:
        text = f"NVRM: Xid (PCI:{pci}): {xid}, pid={pid}, name=train.py, Graphics Exception: x"
        with self.kmsg.open("a") as file:
            file.write(_record(priority, text))
        self.kernel_log.poll()

    def xids(self, xid: int) -> list[dict[str, Any]]:
        state = json.loads(encode_node(self.agent.published.state))
        return [one for one in state["devices"][0].get("xids", ()) if one["xid"] == xid]

    def count(self, xid: int) -> int:
        return sum(one["total"] for one in self.xids(xid))

    def culprits(self, xid: int = 13) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.xids(xid)[0].get("culprits", [])
        return found

    def conditions(self) -> dict[str, str]:
        gpu = self.agent.published.state.devices[0]
        return {condition.name: condition.detail for condition in gpu.conditions}


def _record(priority: int, text: str) -> str:
    return f"{priority},1,2334599906,-;{text}\n SUBSYSTEM=pci\n"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, *PODS)
    yield node
    node.kernel_log.close()


@pytest.mark.fault(
    "An application causes an XID",
    "The kernel log names its process, and podgpu its container, also if the process has ended. "
    "The GPU is not broken; the other containers on it are named as affected",
)
def test_the_kernel_log_names_the_container(node: Node) -> None:
    node.fail(pid=40)
    node.run(3)
    (culprit,) = node.culprits()
    assert culprit["pod"] == "red"
    assert (culprit["pid"], culprit["program"], culprit["total"]) == (40, "train.py", 1)
    assert [one["pod"] for one in culprit["affected"]] == ["green"]
    assert node.conditions()["application_xid"] == "13 by ns/red/main, beside ns/green/main"

    metric = "podgpu_container_xid_errors_total{"
    (series,) = (line for line in node.exposition.splitlines() if line.startswith(metric))
    assert 'pod="red"' in series
    assert 'xid="13"' in series
    assert series.endswith(" 1")
    view = json.loads(msgspec.json.encode(make_view(build_state(node.agent))))
    assert view["totals"].get("broken", 0) == 0, "the GPU is healthy"
    assert "an application caused XID 13 by ns/red/main" in view["alerts"][0]["text"]

    node.fail(pid=40)
    node.run(3)
    assert [one["total"] for one in node.culprits()] == [2]
    node.fail(pid=41)
    node.run(3)
    assert [(one["pod"], one["total"]) for one in node.culprits()] == [("red", 2), ("green", 1)]

    node.time += 600.0
    node.turn()
    assert "application_xid" not in node.conditions()
    assert len(node.culprits()) == 2, "counters stay"


def test_a_process_that_has_just_ended_is_named(node: Node) -> None:
    node.driver.remove(40)
    node.proc.remove(40)
    node.run(3)
    node.fail(pid=40)
    node.run(3)
    assert [one["pod"] for one in node.culprits()] == ["red"]


def test_a_process_that_podgpu_has_never_seen_has_no_container(node: Node) -> None:
    node.fail(pid=99)
    node.run(6)
    assert node.culprits() == []
    assert "application_xid" not in node.conditions()


@pytest.mark.parametrize(
    "line",
    [
        {"pid": 40, "priority": USER},
        {"pid": 40, "pci": "0000:05:00"},
        {"pid": "'<unknown>'"},
        {"pid": 40, "xid": 79},
    ],
    ids=["forged by a program", "of another GPU", "without a process", "not at the same time"],
)
def test_lines_that_say_nothing_about_this_xid(node: Node, line: dict[str, Any]) -> None:
    if "xid" in line:
        node.log(**line)
        node.time += 1.0
        line = {"pid": "'<unknown>'"}
    node.fail(**line)
    node.run(6)
    assert node.culprits() == []


def test_an_xid_of_the_hardware_has_no_culprit(node: Node) -> None:
    node.fail(79, pid=40)
    node.run(6)
    assert node.culprits(79) == []


def test_two_programs_that_fail_at_the_same_time_are_not_confused(node: Node) -> None:
    node.log(13, 41)
    node.fail(pid=40)
    node.run(6)
    assert node.culprits() == []


def test_an_xid_31_with_a_line_of_xid_13_only(node: Node) -> None:
    node.log(13, 40)
    node.fail(31)
    node.run(3)
    assert [one["pod"] for one in node.culprits(31)] == ["red"]


def test_without_a_line_the_only_container_that_stops_working_is_named(node: Node) -> None:
    node.fail()
    node.driver.remove(40)
    node.run(6)
    assert [one["pod"] for one in node.culprits()] == ["red"]


def test_a_program_that_survives_its_own_error_is_named(node: Node) -> None:
    """A notebook shows the error and stays. A program of another container ends by chance."""
    node.fail()
    node.driver.remove(40)
    node.driver.place(SimulatedLoad(0, 40, duty=0.0))
    node.run(6)
    assert [(one["pod"], one["pid"]) for one in node.culprits()] == [("red", 40)]


def test_two_containers_that_stop_working_are_not_told_apart(node: Node) -> None:
    node.fail()
    node.driver.remove(40)
    node.driver.remove(41)
    node.run(6)
    assert node.culprits() == []


def test_a_container_that_was_idle_before_is_not_blamed(node: Node) -> None:
    """The culprit began and failed between two readings."""
    node.driver.remove(40)
    node.driver.place(SimulatedLoad(0, 40, duty=0.0))
    node.run(25)
    node.fail()
    node.run(6)
    assert node.culprits() == []


class SwitchNode(BurstNode):
    """Three containers share a GPU, and the log of context switches shows when each works."""

    def fail(self, *pids: int, delay: float = 0.25) -> None:
        """Ends these processes. NVML reports an XID 13 `delay` seconds later."""
        total = self.total_xids
        for pid in pids:
            self.driver.remove(pid)
        self.turn(delay)
        self.driver.raise_xid(0, 13)
        wait_until(lambda: self.turn(0.0) and self.total_xids > total, "NVML reports the XID")

    @property
    def total_xids(self) -> int:
        return sum(xid.total for xid in self.agent.published.state.devices[0].xids)

    def culprits(self) -> list[tuple[str, int]]:
        """Returns pod and total of each culprit, once the last XID is decided."""
        self.run(6)
        (xid,) = self.agent.published.state.devices[0].xids
        return [(culprit.pod, culprit.total) for culprit in xid.culprits]


LOADS = [(5.0, 50.0, 0.0), (5.0, 50.0, 20.0), (5.0, 50.0, 35.0)]


@pytest.fixture
def switch_node(tmp_path: Path) -> SwitchNode:
    node = SwitchNode(tmp_path, "exact", LOADS)
    node.run(6)
    return node


@pytest.mark.parametrize(
    ("ended", "named"),
    [((101,), [("p1", 1)]), ((101, 102), []), ((), [])],
    ids=["one", "two", "none"],
)
def test_the_log_of_switches_names_a_sole_candidate(
    switch_node: SwitchNode, ended: tuple[int, ...], named: list[tuple[str, int]]
) -> None:
    switch_node.fail(*ended)
    assert switch_node.culprits() == named


def test_faults_of_two_containers_soon_after_each_other_are_told_apart(
    switch_node: SwitchNode,
) -> None:
    switch_node.fail(101)
    switch_node.turn(1.1)
    switch_node.fail(102)
    assert switch_node.culprits() == [("p1", 1), ("p2", 1)]


def test_faults_of_two_containers_within_a_second_are_not_told_apart(
    switch_node: SwitchNode,
) -> None:
    switch_node.fail(101)
    switch_node.turn(0.4)
    switch_node.fail(102)
    assert switch_node.culprits() == [("p1", 1)]


def test_an_idle_container_is_not_a_candidate(switch_node: SwitchNode) -> None:
    """Its process stays on the GPU without work, as that of a notebook does."""
    switch_node.driver.remove(100)
    switch_node.driver.place(SimulatedLoad(0, 100, duty=0.0))
    switch_node.run(2)
    switch_node.fail(102)
    assert switch_node.culprits() == [("p2", 1)]


def test_a_container_that_works_again_is_not_a_candidate(switch_node: SwitchNode) -> None:
    switch_node.driver.remove(100)
    switch_node.fail(102)
    switch_node.turn(0.3)
    switch_node.driver.place(BurstLoad(0, 100, 0.1, None, 0.05))
    assert switch_node.culprits() == [("p2", 1)]


def test_without_the_log_before_the_xid_nobody_is_named(tmp_path: Path) -> None:
    """A second container came just now, so the log has just been opened."""
    node = SwitchNode(tmp_path, "exact", LOADS)
    node.turn(0.5)
    node.fail(101)
    assert node.culprits() == []


def test_a_process_that_is_about_to_exit_is_looked_up_at_once(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("")
    stopped = threading.Event()
    seen: list[KernelXid] = []
    log = KernelLog(str(path), lambda: 5.0)
    thread = threading.Thread(target=log.run, args=(stopped, seen.append))
    thread.start()
    path.write_text(_record(KERNEL, "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 43, pid=7, name=a b, x"))
    wait_until(lambda: seen, "the line is read")
    stopped.set()
    thread.join()
    assert seen == [KernelXid((0, 0x3B, 0), 5, 43, 7, "a b", 5.0)]


def test_a_log_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    assert open_kernel_log(str(tmp_path / "absent"), lambda: 0.0) is None
    assert open_kernel_log("none", lambda: 0.0) is None
