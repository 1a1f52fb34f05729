"""Compares three methods to attribute the busy time of a shared GPU with the true times of the
loads.
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from podgpu.fleet.parts import gpu_id
from podgpu.fleet.view import make_details
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.usage_methods import IMPROVEMENTS
from podgpu.model import Assignment, UsageMethod, WantedMethod, Workload
from podgpu.node.agent.agent import Settings
from podgpu.node.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.node.gpu.nvml.switch_splitter import SwitchListener, SwitchLog, SwitchLogFactory
from podgpu.node.holders.identity import Identities
from tests.agent.simulated_node import SimulatedNode
from tests.engine import BurstLoad
from tests.simulated import FaultyProc, cgroup_text, container_cgroup

SECONDS = 30
FIRST_PID = 100
Burst = tuple[float, float, float]
"""Work, period and delay of the first burst, in milliseconds."""
SCENARIOS: dict[str, list[Burst]] = {
    "40/10/10 of 100": [(40, 100, 0), (10, 100, 5), (10, 100, 60)],
    "five of 5/100": [(5, 100, 0), (5, 100, 7), (5, 100, 14), (5, 100, 50), (5, 100, 80)],
    "0.5/5, 1/20, 20/100": [(0.5, 5, 0), (1, 20, 1), (20, 100, 3)],
    "two that saturate it": [(1000, 1000, 0), (1000, 1000, 0)],
    "in step with the time slice": [(0.3, 4.8, 0), (0.3, 4.8, 2.4)],
    "beside one that never rests": [(1000, 1000, 0), (0.1, 3, 0)],
    "drifting": [(37, 97, 0), (11, 113, 3), (7, 131, 9)],
    "seconds on end": [(2000, 6000, 0), (1000, 5000, 700)],
}


def uid(number: int) -> str:
    return f"{number:08d}-aaaa-bbbb-cccc-dddddddddddd"


NAMES = Identities(
    current=frozenset(
        Workload("ns", f"p{number}", "main", uid(number), f"{number:064x}") for number in range(6)
    )
)


class Node(SimulatedNode):
    """One shared GPU whose loads run in bursts, with one container each."""

    def __init__(
        self,
        root: Path,
        usage_from: WantedMethod,
        loads: Sequence[Burst],
        *,
        spec: str = "1xH200",
        privileged: bool = True,
        log: Callable[[SwitchLog], Any] = lambda log: log,
        driver_version: str = "580.159.04",
    ) -> None:
        self.random = random.Random(7)
        self.logs: list[Any] = []
        self.between: Callable[[], object] = lambda: None
        self.listeners: list[SwitchListener] = []
        self.proc = FaultyProc(root / "proc")
        switch_logs = SwitchLogFactory(
            usage_from,
            open_log=lambda device, _: self.open_log(log, device.uuid),
            privileged=lambda: privileged,
            make_listener=self.listen,
        )
        telemetry = {"switch_logs": None if usage_from == "samples" else switch_logs}
        settings = Settings(interval=5.0)  # deadline of a turn, long enough for slow machines
        super().__init__(
            spec,
            settings,
            proc=self.proc,
            telemetry=telemetry,
            identities=lambda: NAMES,
            driver_version=driver_version,
        )
        self.gpu: Any = self.driver.gpus[0]
        for number, burst in enumerate(loads):
            self.start(number, burst)

    def open_log(self, wrap: Callable[[SwitchLog], Any], gpu: str) -> SwitchLog:
        log: SwitchLog = wrap(self.driver.switch_log(gpu))
        self.logs.append(log)
        return log

    def listen(self, *arguments: Any, **named: Any) -> SwitchListener:
        listener = SwitchListener(*arguments, **named, clock=lambda: self.time, in_background=False)
        self.listeners.append(listener)
        return listener

    def start(self, number: int, burst: Burst, gi_id: int | None = None) -> None:
        work, period, late = burst
        pid = FIRST_PID + number
        self.proc.add(pid, container_cgroup(uid(number), f"{number:064x}"))
        load = BurstLoad(0, pid, work / period, gi_id, period / 1000, phase=-late / 1000)
        self.driver.place(load)
        key = self.gpu.uuid if gi_id is None else f"{self.gpu.uuid}/gi{gi_id}"
        self.holders.now.append(
            Assignment(key, Workload("ns", f"p{number}", "main"), "kubelet", str(number), 0.2)
        )

    def turn(self, seconds: float = 1.0) -> str:
        """Advances the clock by `seconds`. Steps the listeners at random moments and runs the agent
        at the end.
        """
        end = self.time + seconds
        while (step := self.random.uniform(0.025, 0.075)) < end - self.time:
            self.time += step
            self.between()
            for listener in self.listeners:
                listener.step()
        return super().turn(end - self.time)

    @property
    def truth(self) -> dict[str, float]:
        return {
            f"p{pid - FIRST_PID}": ns / 1e9
            for e in self.gpu.engines.values()
            for pid, ns in e.worked.items()
        }

    def series(self, name: str) -> dict[str, float]:
        """Returns the values of a metric by pod, method or its limit."""
        found = re.findall(
            rf'^{name}{{.*?(?:pod|method|method_limit)="(\w+)".*}} (\S+)$',
            self.exposition,
            re.MULTILINE,
        )
        return {key: float(value) for key, value in found}

    def total(self, name: str) -> float:
        return sum(
            float(x) for x in re.findall(rf"^{name}{{.*}} (\S+)$", self.exposition, re.MULTILINE)
        )

    def errors(self) -> dict[str, float]:
        pattern = r'^podgpu_exporter_source_errors_total{source="switches",reason="(\w+)"} (\S+)$'
        return {
            reason: float(value)
            for reason, value in re.findall(pattern, self.exposition, re.MULTILINE)
        }


MakeNode = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path) -> MakeNode:
    numbers = count()
    return lambda *arguments, **named: Node(tmp_path / str(next(numbers)), *arguments, **named)


BUSY = "podgpu_container_gpu_busy_seconds_total"
WAIT = "podgpu_container_gpu_wait_seconds_total"
UNATTRIBUTED = "podgpu_device_unattributed_busy_seconds_total"


def adds_up(node: Node) -> None:
    for unit in ("busy_seconds", "energy_joules"):
        parts = node.total(f"podgpu_container_gpu_{unit}_total")
        rest = node.total(f"podgpu_device_unattributed_{unit}_total")
        assert parts + rest == pytest.approx(node.total(f"podgpu_device_{unit}_total"), abs=1e-6)


def gains(node: Node, seconds: int) -> dict[str, tuple[float, float]]:
    """Returns the true and the reported busy time of each pod, in percent of `seconds`."""
    node.run(5)  # until the listener runs
    worked, told = node.truth, node.series(BUSY)
    node.run(seconds)
    return {
        pod: (
            100 * (node.truth[pod] - worked[pod]) / seconds,
            100 * (node.series(BUSY)[pod] - told[pod]) / seconds,
        )
        for pod in worked
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_exact_is_within_two_points_of_what_each_really_did(make: MakeNode, scenario: str) -> None:
    node = make("exact", SCENARIOS[scenario])
    for pod, (truth, told) in gains(node, SECONDS).items():
        assert told == pytest.approx(truth, abs=2.0), pod
    assert node.series("podgpu_device_usage_method") == {"exact": 1}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_switches_alone_bound_the_truth_and_lie_within_the_bounds(
    make: MakeNode, scenario: str
) -> None:
    node = make("switches", SCENARIOS[scenario])
    node.run(5)
    least, most = (
        "podgpu_container_gpu_busy_seconds_min_total",
        "podgpu_container_gpu_busy_seconds_max_total",
    )
    before = node.truth, node.series(least), node.series(most), node.series(BUSY)
    node.run(SECONDS)
    after = node.truth, node.series(least), node.series(most), node.series(BUSY)
    for pod in node.truth:
        truth, low, high, told = (b[pod] - a[pod] for a, b in zip(before, after, strict=True))
        assert low - 0.3 <= truth <= high + 0.3, (
            pod
        )  # bursts may overlap the start, and NVML reports whole percents
        assert low - 1e-6 <= told <= high + 1e-6, pod
    assert node.series("podgpu_device_usage_method") == {"switches": 1}


@pytest.mark.parametrize("usage_from", ["switches", "exact"])
@pytest.mark.parametrize("scenario", ["40/10/10 of 100", "two that saturate it", "drifting"])
def test_waiting_is_near_the_truth(make: MakeNode, scenario: str, usage_from: UsageMethod) -> None:
    node = make(usage_from, SCENARIOS[scenario])
    node.run(5)
    engine = node.gpu.engines[None]
    before, truth = node.series(WAIT), dict(engine.waited)
    calls = node.driver.calls["nvmlDeviceGetProcessUtilization"]
    for _ in range(SECONDS):
        last = node.series(WAIT)
        node.turn()
        assert all(node.series(WAIT)[pod] >= last[pod] for pod in last), "a counter decreased"
    for pod, seconds in node.series(WAIT).items():
        pid = FIRST_PID + int(pod[1:])
        waited = (engine.waited[pid] - truth.get(pid, 0)) / 1e9
        assert 100 * (seconds - before[pod]) / SECONDS == pytest.approx(
            100 * waited / SECONDS, abs=4.0
        ), pod
    assert node.driver.calls["nvmlDeviceGetProcessUtilization"] == calls, (
        "samples are not read with the log"
    )
    assert 0 <= node.total("podgpu_device_gpu_pressure_ratio") <= 1
    (gpu,) = node.agent.published.state.devices
    assert gpu.holders[0].usage is not None
    assert "p1" in {part.pod for part in gpu.holders[0].usage.waits_for} <= {"p1", "p2"}


@pytest.mark.parametrize("usage_from", ["samples", "switches", "exact"])
def test_in_every_turn_the_parts_are_the_whole(make: MakeNode, usage_from: UsageMethod) -> None:
    node = make(usage_from, SCENARIOS["0.5/5, 1/20, 20/100"])
    last = dict.fromkeys(("p0", "p1", "p2"), 0.0)
    for _ in range(20):
        node.turn()
        adds_up(node)
        now = node.series(BUSY)
        assert all(now[pod] >= last[pod] for pod in last), "a counter decreased"
        last = now


def test_one_container_alone_is_not_listened_to(make: MakeNode) -> None:
    node = make("exact", [(40, 100, 0)])
    node.run(5)
    assert node.listeners == []
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    node.start(1, (10, 100, 50))
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {"exact": 1}
    node.driver.remove(FIRST_PID + 1)
    node.run(70)
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    with pytest.raises(SwitchLogError, match="is closed"):
        node.listeners[0].take_window(node.wall())


@pytest.mark.fault(
    "a process is killed while it works on a shared GPU",
    (
        "its busy time up to then stays its container's; the others' figures go on, within two "
        "points "
        "of the truth"
    ),
)
def test_a_kill_in_the_middle_costs_nobody_anything(make: MakeNode) -> None:
    node = make("exact", SCENARIOS["40/10/10 of 100"])
    node.run(5)
    worked, told = node.truth, node.series(BUSY)
    node.run(10)
    node.driver.remove(FIRST_PID + 2)
    node.proc.remove(FIRST_PID + 2)
    node.run(10)
    for pod in ("p0", "p1", "p2"):
        assert node.series(BUSY)[pod] - told[pod] == pytest.approx(
            node.truth[pod] - worked[pod], abs=0.4
        ), pod


class Broken:
    """A context-switch log that fails as soon as a test sets `fault`."""

    def __init__(self, log: SwitchLog) -> None:
        self._log = log
        self.now, self.close = log.now, log.close
        self.fault = ""

    def drain(self) -> bytes:
        data = self._log.drain()
        if self.fault == "sequence_gap":
            return data[32:]
        if self.fault == "ring_overflow":
            raise SwitchLogError(
                "ring_overflow", "7 context switches did not fit into the log before it was read"
            )
        return data

    def is_busy(self) -> bool:
        if self.fault == "register_value":
            raise SwitchLogError("register_value", "the busy register answered 0xbadf5040")
        return self._log.is_busy()


@pytest.mark.fault(
    "the driver's context-switch log loses records, overflows, or its register is refused",
    (
        "that GPU is told by the driver's samples at once, the reason is counted, and it is tried "
        "again after a minute"
    ),
)
@pytest.mark.parametrize("fault", ["sequence_gap", "ring_overflow", "register_value"])
def test_any_doubt_falls_back_to_samples_says_why_and_comes_back(
    make: MakeNode, fault: str
) -> None:
    logs: list[Broken] = []

    def broken(log: SwitchLog) -> Broken:
        logs.append(Broken(log))
        return logs[-1]

    node = make("exact", SCENARIOS["40/10/10 of 100"], log=broken)
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {"exact": 1}
    logs[0].fault = fault
    node.run(2)
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    assert node.errors() == {fault: 1}
    before = node.series(BUSY)
    for _ in range(70):
        node.turn()
        adds_up(node)
    assert node.series("podgpu_device_usage_method") == {"exact": 1}
    assert all(node.series(BUSY)[pod] >= before[pod] for pod in before)
    assert len(logs) == 2, "a failed log is not opened every second"


class Slow(Broken):
    """A log whose clock is slow: it advances by 0.9 s per second."""

    def __init__(self, log: SwitchLog) -> None:
        super().__init__(log)
        first = log.now()
        self.now = lambda: first + (log.now() - first) * 9 // 10


class Renaming(Broken):
    """A log that replaces pids."""

    def __init__(self, pid: int, other: int, log: SwitchLog) -> None:
        super().__init__(log)
        self._others = {pid: other}

    def drain(self) -> bytes:
        data = bytearray(super().drain())
        for at in range(16, len(data), 32):
            pid = int.from_bytes(data[at : at + 4], "little")
            data[at : at + 4] = self._others.get(pid, pid).to_bytes(4, "little")
        return bytes(data)


class Hiding(Renaming):
    """A log without CAP_SYS_ADMIN: the driver writes pid 0 for processes of other users."""

    def __init__(self, *numbers: int, log: SwitchLog) -> None:
        super().__init__(0, 0, log)
        self._others = {FIRST_PID + number: 0 for number in numbers}


def hide(*numbers: int) -> Callable[[SwitchLog], SwitchLog]:
    return lambda log: Hiding(*numbers, log=log)


def as_other_user(node: Node, *numbers: int) -> None:
    """Gives user ids to the processes of these pods. All other processes run as podgpu does."""
    for folder in node.proc.root.iterdir():
        if folder.name.isdigit():
            uid = os.geteuid() + (int(folder.name) - FIRST_PID in numbers)
            (folder / "status").write_text(f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (Slow, "unaccounted_time"),
        (partial(Renaming, FIRST_PID + 1, 4242), "unlisted_process"),
    ],
    ids=["time is missing", "an unlisted process"],
)
def test_a_log_that_contradicts_other_sources_is_not_used(
    make: MakeNode, log: Callable[[SwitchLog], SwitchLog], reason: str
) -> None:
    node = make("exact", SCENARIOS["40/10/10 of 100"], log=log)
    node.run(10)
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    assert node.series("podgpu_device_usage_method_limit") == {"log_failed": 1}
    assert set(node.errors()) == {reason}
    adds_up(node)


@pytest.mark.parametrize("others", [(1,), (1, 2)], ids=["one", "one, and one that the log names"])
def test_hidden_time_belongs_to_the_only_container_with_hidden_processes(
    make: MakeNode, others: tuple[int, ...]
) -> None:
    node = make("auto", SCENARIOS["40/10/10 of 100"], log=hide(1), privileged=False)
    as_other_user(node, *others)
    visible = gains(make("switches", SCENARIOS["40/10/10 of 100"]), SECONDS)
    for pod, (_, told) in gains(node, SECONDS).items():
        assert told == pytest.approx(visible[pod][1], abs=0.1), pod
    assert node.series("podgpu_device_usage_method") == {"switches": 1}
    assert node.series("podgpu_device_usage_method_limit") == {"no_capability": 1}
    assert node.series(WAIT).keys() == {"p0", "p1", "p2"}
    assert node.errors() == {}
    adds_up(node)


def test_an_idle_process_of_podgpus_own_user_has_no_hidden_time(make: MakeNode) -> None:
    """The log does not name it either, but the log would show its pid."""
    node = make("auto", [*SCENARIOS["40/10/10 of 100"], (0, 100, 0)], log=hide(1), privileged=False)
    as_other_user(node, 1)
    visible = gains(make("switches", SCENARIOS["40/10/10 of 100"]), SECONDS)
    found = gains(node, SECONDS)
    assert found["p1"][1] == pytest.approx(visible["p1"][1], abs=0.1)
    assert node.series(BUSY)["p3"] == 0
    assert node.series("podgpu_device_usage_method_limit") == {"no_capability": 1}


def test_samples_divide_the_time_of_several_containers_with_hidden_processes(
    make: MakeNode,
) -> None:
    """The loads do not run in step with the driver's samples."""
    loads: list[Burst] = [(11, 97, 0), (37, 113, 3), (7, 131, 9)]
    node = make("auto", loads, log=hide(1, 2), privileged=False)
    as_other_user(node, 1, 2)
    visible = {pod: told for pod, (_, told) in gains(make("switches", loads), SECONDS).items()}
    hidden = {pod: told for pod, (_, told) in gains(node, SECONDS).items()}
    assert hidden["p0"] == pytest.approx(visible["p0"], abs=0.1), "the visible process"
    visible_sum = visible["p1"] + visible["p2"]
    assert hidden["p1"] + hidden["p2"] == pytest.approx(visible_sum, abs=1), "their sum is exact"
    assert hidden["p1"] == pytest.approx(visible["p1"], abs=4), "about the part in the samples"
    assert min(hidden.values()) > 1
    assert node.series("podgpu_device_usage_method") == {"switches": 1}
    assert node.series("podgpu_device_usage_method_limit") == {"hidden_users": 1}
    assert node.series(WAIT).keys() == {"p0"}, "it is unknown which of the others waited"
    most = node.series("podgpu_container_gpu_busy_seconds_max_total")
    assert all(most[pod] >= told for pod, told in node.series(BUSY).items())
    underused = re.findall(
        r'^\w+_wasted_.*pod="p[12]".*kind="underused".* (\S+)$', node.exposition, re.M
    )
    assert underused == ["0.0", "0.0"], (
        "samples do not prove that a container used less than its share"
    )
    adds_up(node)


def test_rare_samples_divide_hidden_time_over_several_readings(make: MakeNode) -> None:
    """Most readings have no sample of either container, so samples of earlier ones count, too."""
    loads: list[Burst] = [(40, 97, 0), (7, 131, 9), (5, 113, 3)]
    node = make("auto", loads, log=hide(1, 2), privileged=False)
    as_other_user(node, 1, 2)
    visible = {pod: told for pod, (_, told) in gains(make("switches", loads), SECONDS).items()}
    hidden = {pod: told for pod, (_, told) in gains(node, SECONDS).items()}
    visible_sum = visible["p1"] + visible["p2"]
    assert hidden["p1"] + hidden["p2"] == pytest.approx(visible_sum, rel=0.1)


def test_the_log_is_closed_when_the_driver_is_released(make: MakeNode) -> None:
    """An open log prevents the driver from being unloaded."""
    node = make("exact", SCENARIOS["40/10/10 of 100"])
    node.run(5)
    [log] = node.logs
    assert not log.closed
    assert node.agent.release(60.0)
    assert log.closed


def test_if_all_containers_are_hidden_they_are_measured_by_samples(make: MakeNode) -> None:
    node = make("auto", SCENARIOS["drifting"], log=hide(0, 1, 2), privileged=False)
    as_other_user(node, 0, 1, 2)
    node.run(10)
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    assert node.series("podgpu_device_usage_method_limit") == {"hidden_users": 1}
    assert node.series(WAIT) == {}
    adds_up(node)


@pytest.mark.parametrize(
    ("spec", "privileged", "method", "limit"),
    [
        ("1xH200", True, "exact", None),
        ("1xH200", False, "switches", "no_capability"),
        ("1xB200", True, "samples", "not_measured"),
    ],
)
def test_auto_is_the_best_method_that_works(
    make: MakeNode, spec: str, privileged: bool, method: str, limit: str | None
) -> None:
    node = make("auto", SCENARIOS["drifting"], spec=spec, privileged=privileged)
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {method: 1}
    assert set(node.series("podgpu_device_usage_method_limit")) == ({limit} if limit else set())
    state = node.agent.published.state
    details = make_details(state, gpu_id(state.devices[0]), {}, None)
    assert details.method == method
    assert details.improvement == (IMPROVEMENTS[limit] if limit else "")
    assert node.errors() == {}


def test_auto_on_another_driver_branch_uses_samples(make: MakeNode) -> None:
    node = make("auto", SCENARIOS["drifting"], driver_version="590.44.01")
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    assert node.listeners == []


def test_auto_does_without_samples_if_the_register_cannot_be_read(make: MakeNode) -> None:
    logs: list[Broken] = []

    def broken(log: SwitchLog) -> Broken:
        logs.append(Broken(log))
        return logs[-1]

    node = make("auto", SCENARIOS["drifting"], log=broken)
    node.run(5)
    logs[0].fault = "register_value"
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {"switches": 1}
    assert node.series("podgpu_device_usage_method_limit") == {"log_failed": 1}


def test_a_log_that_auto_cannot_use_is_no_failure_of_a_source(make: MakeNode) -> None:
    node = make("auto", SCENARIOS["drifting"], log=Slow)
    node.run(10)
    assert node.series("podgpu_device_usage_method") == {"samples": 1}
    assert node.errors().keys() == {"unaccounted_time"}
    sources = {source.name: source.up for source in node.agent.published.state.sources}
    assert sources["switches"] is not False


class ShortLived:
    """Replaces the process of a pod again and again. Each lives for a part of a second."""

    def __init__(self, node: Node, number: int, ratio: float) -> None:
        self._node = node
        self._number = number
        self._ratio = ratio
        self._pid = FIRST_PID + number
        self._next_pid = 1000 * number
        self._ends_at = 0.0
        self.worked = 0.0

    def step(self) -> None:
        node = self._node
        if node.time < self._ends_at:
            return
        engine = node.gpu.engines[None]
        self.worked += engine.worked.get(self._pid, 0) / 1e9
        node.driver.remove(self._pid)
        node.proc.remove(self._pid)
        self._next_pid += 1
        self._pid = self._next_pid
        number = self._number
        node.proc.add(self._pid, container_cgroup(uid(number), f"{number:064x}"))
        node.driver.place(BurstLoad(0, self._pid, self._ratio, None, 0.05))
        self._ends_at = node.time + node.random.uniform(0.4, 1.3)


@pytest.mark.parametrize("usage_from", ["switches", "exact"])
def test_processes_that_end_before_they_are_listed(
    make: MakeNode, usage_from: WantedMethod
) -> None:
    node = make(usage_from, [(300, 1000, 0), (5, 50, 0), (15, 50, 0)])
    short = {"p1": ShortLived(node, 1, 0.1), "p2": ShortLived(node, 2, 0.3)}
    node.between = lambda: [each.step() for each in short.values()]
    node.run(5)
    before = node.series(BUSY)
    worked = {pod: each.worked for pod, each in short.items()}
    unattributed = node.total(UNATTRIBUTED)
    methods: set[str] = set()
    for _ in range(SECONDS):
        node.turn()
        methods |= node.series("podgpu_device_usage_method").keys()
    assert methods == {usage_from}
    assert node.errors() == {}
    for pod, each in short.items():
        told = node.series(BUSY)[pod] - before[pod]
        assert told == pytest.approx(each.worked - worked[pod], abs=0.05 * SECONDS), pod
    # Switches and saved contexts take less than 6 % of the time.
    assert node.total(UNATTRIBUTED) - unattributed < 0.06 * SECONDS, "each has its owner"
    assert node.series(WAIT).keys() == {"p0", "p1", "p2"}
    adds_up(node)


def test_a_fallback_is_logged_once(make: MakeNode, caplog: pytest.LogCaptureFixture) -> None:
    """The log contradicts the driver's list in every other second."""
    node = make("switches", SCENARIOS["40/10/10 of 100"], log=partial(Renaming, FIRST_PID + 1, 101))
    caplog.set_level(logging.INFO)
    for second in range(40):
        for each in node.logs:
            each._others = {FIRST_PID + 1: 4242 if second % 2 else FIRST_PID + 1}
        node.turn()
    assert node.errors()["unlisted_process"] > 5
    assert caplog.text.count("temporarily measured") == 1
    for each in node.logs:
        each._others = {}
    node.run(70)
    assert caplog.text.count("by context switches again") == 1


def test_without_the_capability_exact_becomes_switches(make: MakeNode) -> None:
    node = make("exact", SCENARIOS["40/10/10 of 100"], privileged=False)
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {"switches": 1}


def test_mps_is_told_by_nothing(make: MakeNode) -> None:
    node = make("exact", [])
    for number in (0, 1):
        node.proc.add(FIRST_PID + number, container_cgroup(uid(number), f"{number:064x}"))
        node.driver.place(SimulatedLoad(0, FIRST_PID + number, 0.0, kind="mps"))
    node.proc.add(9, cgroup_text("/system.slice/nvidia-mps.service"), "nvidia-cuda-mps-server")
    node.driver.place(SimulatedLoad(0, 9, 0.6))
    node.run(5)
    assert node.series("podgpu_device_usage_method") == {"mps": 1}
    assert set(node.errors()) == {"mps"}
    assert node.series(BUSY) == node.series(WAIT) == {}
    assert node.series("podgpu_container_gpu_busy_seconds_max_total").keys() == {"p0", "p1"}


def test_a_mig_instance_with_several_holders_is_split(make: MakeNode) -> None:
    node = make("exact", [], spec="1xH200/1x3g.71gb+1x1g.18gb")
    gi_id = node.gpu.instances[0].gi_id
    node.start(0, (30, 100, 0), gi_id)
    node.start(1, (10, 100, 50), gi_id)
    node.run(SECONDS)
    assert node.series("podgpu_device_usage_method") == {"switches": 1}
    told = node.series(BUSY)
    assert min(told["p0"], told["p1"]) > 1
    assert sum(told.values()) == pytest.approx(node.truth["p0"] + node.truth["p1"], rel=0.1)
