"""The changes between two documents of a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from podgpu.metrics.conditions import FABRIC, LOST, RECURRING, THERMAL, XID
from podgpu.model import (
    Condition,
    DeviceState,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    Orphan,
    Workload,
    XidCount,
    XidCulprit,
)
from podgpu.writers.gpu_changes import ChangeReason, GpuChange, Records, find_changes

GPU = "GPU-1"
IDLE_AFTER = 1800.0
RED = Holder("team", "red", "main", "uid-red", source="kubelet")
GREEN = Holder("team", "green", "main", "uid-green", source="kubelet")
HEALTHY = (LOST, XID, FABRIC, RECURRING)


class Watch:
    """Compares documents one after the other."""

    def __init__(self) -> None:
        self.records: Records = {}
        self.now = 10_000.0

    def see(self, *gpus: DeviceState, after: float = 2.0, first: bool = False) -> list[GpuChange]:
        self.now += after
        state = NodeState(producer="podgpu", node="n", devices=gpus)
        self.records, changes = find_changes(self.records, state, self.now, IDLE_AFTER, first)
        return changes


def gpu(*conditions: str, unknown: Sequence[str] = (), **members: Any) -> DeviceState:
    """A GPU that red and green hold. Other conditions are absent, if not `unknown`."""
    healthy = tuple(name for name in HEALTHY if name not in conditions and name not in unknown)
    present = tuple(Condition(name, 1.0) for name in conditions)
    members = {"holders": (RED, GREEN)} | members
    return DeviceState(uuid=GPU, index=3, conditions=present, healthy=healthy, **members)


def summarize(changes: Sequence[GpuChange]) -> list[tuple[str, list[str], bool]]:
    return [
        (change.reason.value, [pod.pod for pod in change.pods], change.concerns_node)
        for change in changes
    ]


@pytest.fixture
def watch() -> Watch:
    watch = Watch()
    assert watch.see(gpu()) == []
    return watch


def test_lost_and_recovered_gpu(watch: Watch) -> None:
    [lost] = watch.see(gpu(LOST, unknown=[XID]))
    assert summarize([lost]) == [("GpuLost", ["red", "green"], True)]
    assert lost.message.startswith("GPU 3 (GPU-1): the driver no longer lists it")
    assert "reset the GPU" in lost.message
    assert lost.is_warning
    assert lost.is_new
    assert watch.see(gpu(LOST, unknown=[XID])) == []

    [recovered] = watch.see(gpu())
    assert summarize([recovered]) == [("GpuRecovered", ["red", "green"], True)]
    assert recovered.message == "GPU 3 (GPU-1): it works again; before, it was lost"
    assert not recovered.is_warning


def test_holders_of_a_lost_gpu_that_the_kubelet_no_longer_lists(watch: Watch) -> None:
    [lost] = watch.see(gpu(LOST, holders=(), last_holders=(Workload("team", "red", "main"),)))
    assert [pod.pod for pod in lost.pods] == ["red"]


def test_a_problem_that_cannot_be_checked_lasts(watch: Watch) -> None:
    [change] = watch.see(gpu(FABRIC))
    assert change.reason is ChangeReason.UNHEALTHY
    [lost] = watch.see(gpu(LOST, unknown=[FABRIC]))
    assert lost.reason is ChangeReason.LOST
    assert list(watch.records[GPU].problems) == [LOST, FABRIC]
    # It answers again, but its registration is not read yet.
    assert watch.see(gpu(unknown=[FABRIC])) == []
    [recovered] = watch.see(gpu())
    assert recovered.reason is ChangeReason.RECOVERED


def test_a_gpu_that_keeps_failing_recovers_in_between(watch: Watch) -> None:
    watch.see(gpu(LOST))
    found = watch.see(gpu(RECURRING))
    assert [change.reason for change in found] == [ChangeReason.UNHEALTHY, ChangeReason.RECOVERED]
    assert "but it failed" in found[1].message
    assert list(watch.records[GPU].problems) == [RECURRING]
    assert watch.records[GPU].acute == []


def test_warnings_are_no_changes(watch: Watch) -> None:
    assert watch.see(gpu(THERMAL)) == []
    assert watch.records[GPU].problems == {}


def test_xid_that_needs_action(watch: Watch) -> None:
    [change] = watch.see(gpu(XID, xids=(XidCount(48, 3, 9.0),)))
    assert summarize([change]) == [("GpuXid", ["red", "green"], True)]
    assert "XID 48 (double-bit ECC error)" in change.message
    assert change.times == 3
    assert change.is_warning
    assert watch.see(gpu(XID, xids=(XidCount(48, 3, 9.0),))) == []
    [again] = watch.see(gpu(XID, xids=(XidCount(48, 4, 11.0),)))
    assert again.times == 1


def test_xid_without_action_is_no_warning(watch: Watch) -> None:
    [change] = watch.see(gpu(xids=(XidCount(16, 1, 9.0),)))
    assert not change.is_warning


def test_xid_of_an_instance_concerns_only_its_pods(watch: Watch) -> None:
    part = MigInstance(id=1, holders=(GREEN,), xids=(XidCount(48, 1, 9.0),))
    [change] = watch.see(gpu(holders=(RED,), instances=(part,)))
    assert [pod.pod for pod in change.pods] == ["green"]


def test_xid_waits_for_its_cause(watch: Watch) -> None:
    assert watch.see(gpu(xids=(XidCount(31, 1, 9.0),))) == []
    culprit = XidCulprit("team", "red", "main", "uid-red", total=1, last_seen=9.0, pid=40)
    [change] = watch.see(gpu(xids=(XidCount(31, 1, 9.0, culprits=(culprit,)),)))
    assert summarize([change]) == [("GpuXid", ["red"], False)]
    assert "XID 31 (GPU page fault), caused by pid 40 of team/red/main" in change.message
    assert watch.see(gpu(xids=(XidCount(31, 1, 9.0, culprits=(culprit,)),)), after=60) == []


def test_xid_of_unknown_cause_concerns_all_pods(watch: Watch) -> None:
    xids = (XidCount(31, 1, 9.0),)
    assert watch.see(gpu(xids=xids)) == []
    [change] = watch.see(gpu(xids=xids), after=11.0)
    assert summarize([change]) == [("GpuXid", ["red", "green"], False)]
    assert change.message.endswith("one of team/red/main, team/green/main")
    assert watch.see(gpu(xids=xids), after=60) == []


def test_xids_whose_cause_is_known_in_part(watch: Watch) -> None:
    first = XidCulprit("team", "red", "main", total=1, last_seen=9.0, program="train.py", pid=4)
    watch.see(gpu(xids=(XidCount(13, 1, 9.0, culprits=(first,)),)))
    newer = XidCulprit("team", "red", "main", total=3, last_seen=20.0, program="train.py", pid=5)
    xids = (XidCount(13, 4, 20.0, culprits=(newer,)),)
    assert watch.see(gpu(xids=xids)) == []
    known, unknown = watch.see(gpu(xids=xids), after=11.0)
    assert (known.times, [pod.pod for pod in known.pods]) == (2, ["red"])
    assert "train.py (pid 5)" in known.message
    assert unknown.times == 1


def test_xid_of_a_process_outside_pods_concerns_the_node(watch: Watch) -> None:
    culprit = XidCulprit(total=1, last_seen=9.0, pid=77, program="dcgmi")
    [change] = watch.see(gpu(xids=(XidCount(13, 1, 9.0, culprits=(culprit,)),)))
    assert summarize([change]) == [("GpuXid", [], True)]
    assert "caused by dcgmi (pid 77) of a process outside pods" in change.message


def idle(since: float | None, measured: bool = True) -> DeviceState:
    usage = HolderUsage(idle_since=since) if measured else None
    holder = Holder("team", "red", "main", "uid-red", source="kubelet", usage=usage)
    return gpu(holders=(holder, GREEN))


def test_idle_pod_is_reported_once(watch: Watch) -> None:
    since = watch.now
    assert watch.see(idle(since), after=IDLE_AFTER - 1) == []
    [change] = watch.see(idle(since))
    assert summarize([change]) == [("GpuIdle", ["red"], False)]
    assert not change.is_warning
    assert watch.see(idle(since), after=3600.0) == []
    # Its use cannot be read for a moment.
    assert watch.see(idle(None, measured=False)) == []
    assert watch.see(idle(since)) == []

    assert watch.see(idle(None)) == []
    since = watch.now
    [again] = watch.see(idle(since), after=IDLE_AFTER)
    assert again.reason is ChangeReason.IDLE


def test_use_without_an_allocation_is_not_idle(watch: Watch) -> None:
    outsider = Holder("team", "red", "main", usage=HolderUsage(idle_since=1.0))
    assert watch.see(gpu(holders=(outsider,)), after=IDLE_AFTER) == []


def test_orphaned_memory(watch: Watch) -> None:
    orphan = Orphan(pid=9, memory_used_bytes=2**30, since=5.0, program="python")
    condition = Condition("orphaned_memory", 5.0, "pid 9 (python) holds 1.0 GiB")
    conditions = (Condition(THERMAL, 5.0), condition)
    holds = DeviceState(uuid=GPU, index=3, conditions=conditions, orphans=(orphan,))
    [change] = watch.see(holds)
    assert change.reason is ChangeReason.ORPHANED
    assert "pid 9 (python) holds 1.0 GiB" in change.message
    assert watch.see(holds) == []


def test_present_problems_at_the_start_are_not_new() -> None:
    watch = Watch()
    since = watch.now - IDLE_AFTER
    holder = Holder("t", "red", "main", source="kubelet", usage=HolderUsage(idle_since=since))
    found = watch.see(gpu(LOST, holders=(holder,)), first=True)
    assert [(change.reason, change.is_new) for change in found] == [
        (ChangeReason.LOST, False),
        (ChangeReason.IDLE, False),
    ]


def test_a_successor_reports_only_what_is_present(watch: Watch) -> None:
    """It has compared documents before, while another exporter wrote."""
    watch.see(gpu(FABRIC, xids=(XidCount(48, 1, 9.0),)))
    [change] = watch.see(gpu(FABRIC, xids=(XidCount(48, 1, 9.0),)), first=True)
    assert (change.reason, change.is_new) == (ChangeReason.UNHEALTHY, False)
    assert [each.reason for each in watch.see(gpu())] == [ChangeReason.RECOVERED]


def test_a_successor_reports_what_changed_since_its_last_comparison(watch: Watch) -> None:
    watch.see(gpu(FABRIC))
    found = watch.see(gpu(LOST), first=True)
    assert [(each.reason, each.is_new) for each in found] == [(ChangeReason.LOST, True)]
    [recovered] = watch.see(gpu(), first=True)
    assert (recovered.reason, recovered.is_new) == (ChangeReason.RECOVERED, True)


def test_a_forgotten_gpu_has_no_problem(watch: Watch) -> None:
    watch.see(gpu(LOST))
    assert watch.see() == []
    assert watch.records == {}


def test_details_of_a_problem_are_kept_with_it(watch: Watch) -> None:
    failed = DeviceState(uuid=GPU, conditions=(Condition(XID, 1.0, "79"),))
    watch.see(failed)
    assert watch.records[GPU].details == {XID: "79"}
    watch.see(gpu(LOST, unknown=[XID]))
    assert watch.records[GPU].details == {LOST: "", XID: "79"}
    watch.see(gpu())
    assert watch.records[GPU].details == {}


def test_only_pods_have_events(watch: Watch) -> None:
    job = Holder(job="4711", user="ann", source="hpc")
    [change] = watch.see(gpu(LOST, holders=(RED, job)))
    assert [pod.pod for pod in change.pods] == ["red"]


def test_xid_of_a_gpu_concerns_the_pods_of_its_instances(watch: Watch) -> None:
    part = MigInstance(id=1, holders=(GREEN,))
    [change] = watch.see(gpu(holders=(), instances=(part,), xids=(XidCount(48, 1, 9.0),)))
    assert [pod.pod for pod in change.pods] == ["green"]


def test_xid_of_unknown_cause_of_an_instance(watch: Watch) -> None:
    part = MigInstance(id=1, holders=(GREEN,), xids=(XidCount(31, 1, 9.0),))
    devices = gpu(holders=(RED,), instances=(part,))
    watch.see(devices)
    [change] = watch.see(devices, after=11.0)
    assert [pod.pod for pod in change.pods] == ["green"]
    # There is only one candidate, but a process that has ended may be the cause.
    assert change.message.endswith("an application caused it")


def test_culprit_without_a_pid(watch: Watch) -> None:
    culprit = XidCulprit("team", "red", "main", total=1, last_seen=9.0, program="train.py")
    [change] = watch.see(gpu(xids=(XidCount(13, 1, 9.0, culprits=(culprit,)),)))
    assert "caused by train.py (a process) of team/red/main" in change.message


def test_a_gpu_without_an_index(watch: Watch) -> None:
    [change] = watch.see(DeviceState(uuid="GPU-9", conditions=(Condition(LOST, 1.0),)))
    assert change.message.startswith("a GPU (GPU-9): ")
