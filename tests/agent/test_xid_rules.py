"""Rules of `XidBlame`: which process is the cause of an XID, by readings once per second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from podgpu.model import HIDDEN_PID, Device, DeviceUsage, ErrorEvent, ProcessUsage, Workload
from podgpu.node.agent.xid_blame import Verdict, XidBlame
from podgpu.node.gpu.nvml.kernel_log import KernelXid
from podgpu.node.gpu.nvml.switch_attribution import KERNEL_PID
from podgpu.node.usage.containers import ProcessOwner

GPU = Device(0, "GPU-1", pci_bus_id="00000000:04:00.0")
SLOT = (0, 4, 0)
AT = 100.0  # time of the XID
RED, RED_TOO, GREEN, BLUE, STRANGER = 40, 41, 50, 60, 99
PODS = {RED: "red", RED_TOO: "red", GREEN: "green", BLUE: "blue"}


class Readings:
    """Readings of one GPU. Times are relative to the XID."""

    def __init__(self) -> None:
        self.now = AT
        self.device = GPU
        self.lines: list[KernelXid] = []
        self.owners = {pid: ProcessOwner(Workload("ns", pod, "main")) for pid, pod in PODS.items()}
        self.blame = XidBlame(self.owners.get, lambda: self.lines, lambda: self.now)
        self.verdicts: list[Verdict] = []

    def read(
        self,
        later: float,
        busy: Mapping[int, int | None] | None,
        last: Mapping[int, float] | None = None,
        listed: Iterable[int] = (RED, GREEN),
        **usage: Any,
    ) -> None:
        """`busy`: nanoseconds by pid. `last`: when each process was last on the engine."""
        self.now = AT + later
        if last is not None:
            usage["last_resident"] = {pid: AT + each for pid, each in last.items()}
        processes = tuple(ProcessUsage(self.device.key, pid) for pid in listed)
        usage.setdefault("window_ns", 10**9)
        usage |= {"processes": processes, "process_busy_ns": busy}
        self.verdicts += self.blame.decide([DeviceUsage(self.device, **usage)], self.owners)

    def fail(self, xid: int = 13) -> None:
        self.blame.add([ErrorEvent(self.device.key, xid, AT)])

    def log(self, later: float, pid: int, xid: int = 13) -> None:
        self.lines.append(KernelXid(SLOT, None, xid, pid, "train.py", AT + later))

    def finish(self, busy: Mapping[int, int | None] | None, **usage: Any) -> str:
        """Reads until the cause is decided. Returns the pod, or `unknown`."""
        for later in (0.5, 1.5, 2.5, 3.5):
            self.read(later, busy, **usage)
        (verdict,) = self.verdicts
        if verdict.culprit is None:
            return "unknown"
        return verdict.culprit.pod


@pytest.fixture
def readings() -> Readings:
    return Readings()


BOTH = {RED: 10**8, GREEN: 10**8}


def test_the_decision_waits_for_the_line_of_the_kernel_log(readings: Readings) -> None:
    readings.fail()
    readings.read(0.2, BOTH)
    assert readings.verdicts == []
    readings.log(0.6, GREEN)
    readings.read(1.1, BOTH)
    (verdict,) = readings.verdicts
    assert verdict.culprit == Workload("ns", "green", "main")
    assert (verdict.pid, verdict.program) == (GREEN, "train.py")


def test_a_second_line_soon_after_the_first_one_makes_the_cause_uncertain(
    readings: Readings,
) -> None:
    readings.fail()
    readings.log(0.1, RED)
    readings.read(0.2, BOTH)
    readings.log(0.4, GREEN)
    assert readings.finish(BOTH) == "unknown"


@pytest.mark.parametrize(
    ("pids", "named"),
    [
        ((RED, RED_TOO), "red"),
        ((RED, GREEN), "unknown"),
        ((RED, STRANGER), "unknown"),
        ((STRANGER, RED), "unknown"),
    ],
)
def test_lines_of_two_processes_name_a_container_only_if_it_owns_both(
    readings: Readings, pids: tuple[int, int], named: str
) -> None:
    readings.fail()
    for number, pid in enumerate(pids):
        readings.log(number / 10, pid)
    assert readings.finish(BOTH) == named


def test_a_line_of_another_fault_is_not_of_this_one(readings: Readings) -> None:
    readings.fail()
    readings.log(-1.5, GREEN)
    readings.log(0.1, RED)
    assert readings.finish(BOTH) == "red"


def test_the_process_is_known_but_not_its_container(readings: Readings) -> None:
    readings.owners[GREEN] = ProcessOwner(problem="unreadable")
    for pid in (STRANGER, GREEN):
        readings.verdicts = []
        readings.lines = []
        readings.log(0.1, pid)
        readings.fail()
        assert readings.finish(BOTH) == "unknown"
        assert readings.verdicts[0].pid == pid


def test_a_line_of_another_xid_a_second_before_is_not_used(readings: Readings) -> None:
    readings.fail()
    readings.log(-1.5, GREEN, xid=43)
    assert readings.finish(BOTH) == "unknown"


def test_a_container_outside_pods_is_named(readings: Readings) -> None:
    container = Workload(container_id="c" * 64)
    readings.owners[RED] = ProcessOwner(container=container)
    readings.fail()
    readings.log(0.1, RED)
    readings.finish(BOTH)
    assert readings.verdicts[0].culprit == container


def test_processes_outside_pods_do_not_own_both_lines(readings: Readings) -> None:
    for pid in (RED, GREEN):
        readings.owners[pid] = ProcessOwner()
    readings.fail()
    readings.log(0.0, RED)
    readings.log(0.1, GREEN)
    readings.finish(BOTH)
    assert readings.verdicts[0].pid == 0


@pytest.mark.parametrize(
    ("instance", "pod"), [(5, "red"), (6, "green"), (None, "unknown"), (7, "unknown")]
)
def test_a_line_of_another_mig_instance_is_not_used(instance: int | None, pod: str) -> None:
    readings = Readings()
    readings.device = replace(GPU, gi_id=instance)
    readings.fail()
    for gi_id, pid in ((5, RED), (6, GREEN)):
        readings.lines.append(KernelXid(SLOT, gi_id, 13, pid, "train.py", AT))
    assert readings.finish(None) == pod


def before(readings: Readings, busy: Mapping[int, int | None] | None, **usage: Any) -> None:
    """Reads three seconds before the XID."""
    for later in (-2.2, -1.2, -0.2):
        readings.read(later, busy, **usage)
    readings.fail()


def test_only_workloads_at_the_time_of_the_xid_are_affected(readings: Readings) -> None:
    readings.read(-10.0, BOTH, listed=[RED, BLUE])
    before(readings, {**BOTH, RED_TOO: 5, BLUE: 0}, listed=[RED])
    readings.log(0.1, RED)
    readings.finish({RED: 1}, listed=[RED])
    # The process of green worked, but ended before it could be listed.
    assert [user.pod for user in readings.verdicts[0].affected] == ["green"]


# By the driver's samples


def test_a_process_that_is_on_the_engine_without_work_is_at_work(readings: Readings) -> None:
    before(readings, BOTH)
    assert readings.finish({GREEN: 0}, resident_ns={GREEN: 10**6}) == "red"


def test_a_listed_process_without_work_may_be_the_cause(readings: Readings) -> None:
    before(readings, BOTH)
    assert readings.finish({GREEN: 0}) == "unknown"


def test_the_decision_waits_until_all_others_have_worked_again(readings: Readings) -> None:
    before(readings, BOTH)
    for later in (0.5, 1.5, 2.5):
        readings.read(later, {})
        assert readings.verdicts == []
    assert readings.finish({GREEN: 10**8}) == "red"


def test_a_process_that_did_not_work_is_not_the_cause(readings: Readings) -> None:
    """The cause began and ended between two readings."""
    before(readings, {GREEN: 10**8})
    assert readings.finish({GREEN: 10**8}) == "unknown"


def test_work_long_before_the_xid_is_no_evidence(readings: Readings) -> None:
    readings.read(-4.0, BOTH)
    before(readings, {GREEN: 10**8}, listed=[GREEN])
    assert readings.finish({}, listed=[]) == "green"


def test_work_in_a_window_that_contains_the_xid_may_be_before_it(readings: Readings) -> None:
    before(readings, BOTH)
    readings.read(0.8, BOTH)
    assert readings.finish({GREEN: 10**8}) == "red"


@pytest.mark.parametrize(
    ("busy", "usage"),
    [
        (None, {}),
        ({GREEN: 10**8}, {"method": "mps"}),
        ({GREEN: 10**8, HIDDEN_PID: 5}, {}),
        ({GREEN: 10**8}, {"window_ns": 0}),
    ],
    ids=["no times of processes", "MPS", "a hidden process", "no reading"],
)
def test_an_incomplete_reading_names_nobody(
    readings: Readings, busy: Mapping[int, int | None] | None, usage: dict[str, Any]
) -> None:
    before(readings, BOTH)
    for later in (0.5, 1.5, 2.5, 3.5, 29.0):
        readings.read(later, busy, **usage)
    assert [verdict.culprit for verdict in readings.verdicts] in ([], [None])
    readings.read(31.0, busy, **usage)
    assert [verdict.culprit for verdict in readings.verdicts] == [None]


def test_readings_only_after_the_xid_name_nobody(readings: Readings) -> None:
    readings.fail()
    assert readings.finish({GREEN: 10**8}) == "unknown"


def test_a_gpu_that_is_no_longer_read_names_nobody(readings: Readings) -> None:
    readings.read(-0.5, {RED: 10**8}, listed=[RED])
    readings.fail()
    readings.now = AT + 29.0
    assert readings.blame.decide([], readings.owners) == []
    readings.now = AT + 31.0
    (verdict,) = readings.blame.decide([], readings.owners)
    assert verdict.culprit is None


# By the log of context switches


def switches_before(readings: Readings, last: Mapping[int, float]) -> None:
    for later in (-2.2, -1.2, -0.2):
        readings.read(later, BOTH, last={pid: min(at, later) for pid, at in last.items()})
    readings.fail()


def test_the_last_time_on_the_engine_names_the_cause(readings: Readings) -> None:
    last = {RED: -0.25, GREEN: 9.0, KERNEL_PID: -0.1}
    switches_before(readings, last)
    # By the samples, neither works any more.
    assert readings.finish({}, last={GREEN: 0.4}) == "red"


def test_of_several_processes_the_last_one_on_the_engine_is_named(readings: Readings) -> None:
    switches_before(readings, {RED: -0.5, RED_TOO: -0.25})
    assert readings.finish({}, last={}) == "red"
    assert [verdict.pid for verdict in readings.verdicts] == [RED_TOO]


def test_a_process_that_rests_for_longer_than_a_second_is_no_candidate(
    readings: Readings,
) -> None:
    switches_before(readings, {RED: -0.25, GREEN: -1.1})
    assert readings.finish({}, last={}) == "red"


@pytest.mark.parametrize(
    "last", [{RED: -0.25, GREEN: -0.3}, {GREEN: 0.4}, {RED: -0.25, HIDDEN_PID: 0.4}]
)
def test_no_sole_candidate(readings: Readings, last: dict[int, float]) -> None:
    switches_before(readings, last)
    assert readings.finish({}, last={pid: at for pid, at in last.items() if at > 0}) == "unknown"


def test_a_log_that_begins_just_before_the_xid_is_not_used(readings: Readings) -> None:
    readings.read(-0.2, BOTH, last={RED: -0.25, GREEN: -0.2})
    readings.fail()
    # Without the log, both are candidates.
    assert readings.finish({}, last={GREEN: 0.4}) == "unknown"
