"""Simulates a hundred XIDs of three containers that share a GPU, without the kernel log.

The containers work with random periods. Each fault leaves the records in the log of context
switches that were seen on an H200, see `EngineFault`. `tests/device/xid_blame.py` measures the same
on a real GPU. This is only a simulation: it shows that the rules are right for these records.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from podgpu.model import Assignment, WantedMethod, Workload
from tests.agent.test_usage_methods import FIRST_PID, uid
from tests.agent.test_usage_methods import Node as BurstNode
from tests.engine import SWITCH_NS, BurstLoad, EngineFault
from tests.nodes.clock import wait_until
from tests.simulated import container_cgroup

FAULTS = 100
KINDS = (13, 31, 43)
REPORTED = {13: (13, 31), 31: (31,), 43: (43,)}
"""The XIDs that NVML reports for each kind of fault."""
MS = 1_000_000


class TrueXid(NamedTuple):
    at: float
    xid: int
    pod: str
    fault: int


class Named(NamedTuple):
    """A culprit in the document."""

    xid: int
    pod: str
    last_seen: float
    new: int  # number of XIDs since the last reading


class SharedNode(BurstNode):
    """Three programs that fail one after the other. Each is started again as another process."""

    def __init__(self, folder: Path, method: WantedMethod, seed: int) -> None:
        self.chance = random.Random(seed)
        super().__init__(folder, method, [])
        self.pids: dict[int, int] = {}
        self.next_pid = count(FIRST_PID)
        self.numbers = count()
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.next_reading = self.time + 1.0
        self.true: list[TrueXid] = []
        self.named: list[Named] = []
        self.totals: Counter[tuple[int, str]] = Counter()
        for number in range(3):
            self.begin(number)
            pod = Workload("ns", f"p{number}", "main")
            self.holders.now.append(Assignment(self.gpu.uuid, pod, "kubelet", str(number), 0.2))
        self.pass_time(8.0)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.time + seconds, next(self.numbers), action))

    def pass_time(self, seconds: float) -> None:
        """Samples at random moments, reads every second, and runs what is due."""
        end = self.time + seconds
        while self.time < end:
            step = self.time + self.random.uniform(0.025, 0.075)
            due = self.agenda[0][0] if self.agenda else end
            self.time = max(self.time, min(step, end, due, self.next_reading))
            while self.agenda and self.agenda[0][0] <= self.time:
                heapq.heappop(self.agenda)[2]()
            for listener in self.listeners:
                listener.step()
            if self.time >= self.next_reading:
                self.next_reading += 1.0
                self.turn(0.0)
                self.read_culprits()

    def begin(self, number: int) -> None:
        """Starts a process of the container. Its work and its pauses are random."""
        pid = next(self.next_pid)
        self.pids[number] = pid
        self.proc.add(pid, container_cgroup(uid(number), f"{number:064x}"))
        period = math.exp(self.chance.uniform(math.log(0.004), math.log(1.5)))
        duty = self.chance.uniform(0.03, 0.3)
        self.driver.place(BurstLoad(0, pid, duty, None, period, phase=self.chance.random()))
        self.unload_engine()

    def unload_engine(self) -> None:
        seconds = math.exp(self.chance.uniform(math.log(0.001), math.log(0.42)))
        self.gpu.engines[None].unload(int(seconds * 1e9))

    def fail(self, number: int, kind: int, fault: int) -> None:
        """Lets the program of a container cause an XID, and starts it again."""
        chance = self.chance
        pid = self.pids.pop(number)
        engine = self.gpu.engines[None]
        self.driver.advance(self.gpu)
        if kind == 43:
            delay = chance.uniform(0.004, 0.008)
            engine.fail(pid, EngineFault(chance.randint(4 * MS, 29 * MS), SWITCH_NS, True))
        else:
            delay = chance.uniform(0.216, 0.265)
            empty = chance.randint(217 * MS, 295 * MS)
            engine.fail(pid, EngineFault(chance.randint(0, MS), empty, chance.random() < 1 / 3))

        def report() -> None:
            for xid in REPORTED[kind]:
                self.report(TrueXid(self.wall(), xid, f"p{number}", fault))
            self.later(chance.uniform(0.01, 0.3), end)

        def end() -> None:
            self.driver.remove(pid)
            self.proc.remove(pid)
            self.unload_engine()
            self.later(chance.uniform(0.2, 0.7), lambda: self.begin(number))

        def wait_for_error() -> None:
            self.driver.advance(self.gpu)
            if pid in engine.failed:
                self.later(delay, report)
            else:
                self.later(0.001, wait_for_error)

        wait_for_error()

    def report(self, xid: TrueXid) -> None:
        total = self.total_xids
        self.true.append(xid)
        self.driver.raise_xid(0, xid.xid)

        def is_published() -> bool:
            self.agent.read_allocation()
            return self.total_xids > total

        wait_until(is_published, "NVML reports the XID")

    @property
    def total_xids(self) -> int:
        return sum(xid.total for xid in self.agent.published.state.devices[0].xids)

    def read_culprits(self) -> None:
        for xid in self.agent.published.state.devices[0].xids:
            for culprit in xid.culprits:
                new = culprit.total - self.totals[xid.xid, culprit.pod]
                self.totals[xid.xid, culprit.pod] = culprit.total
                if new:
                    self.named.append(Named(xid.xid, culprit.pod, culprit.last_seen, new))

    def judge(self) -> Counter[str]:
        """Counts the faults that are named right, wrong and not at all."""
        names: dict[tuple[int, float], str] = {}
        for named in self.named:
            earlier = [true for true in self.true if true.xid == named.xid]
            earlier = [true for true in earlier if true.at <= named.last_seen]
            unnamed = [true for true in earlier if (true.xid, true.at) not in names]
            for true in unnamed[-named.new :]:
                names[true.xid, true.at] = named.pod

        verdicts: Counter[str] = Counter()
        for fault in range(FAULTS):
            xids = [true for true in self.true if true.fault == fault]
            pods = {names[true.xid, true.at] for true in xids if (true.xid, true.at) in names}
            if pods == {xids[0].pod}:
                verdicts["right"] += 1
            elif pods:
                verdicts["wrong"] += 1
            else:
                verdicts["unknown"] += 1
        return verdicts


@pytest.mark.parametrize(
    ("method", "least_right"), [("exact", 99), ("switches", 99), ("samples", 50)]
)
def test_a_hundred_simulated_faults(tmp_path: Path, method: WantedMethod, least_right: int) -> None:
    node = SharedNode(tmp_path, method, seed=46)
    plan = [(number % 3, KINDS[number // 3 % 3]) for number in range(FAULTS)]
    node.chance.shuffle(plan)
    for fault, (number, kind) in enumerate(plan):
        while number not in node.pids:
            node.pass_time(0.1)
        node.fail(number, kind, fault)
        node.pass_time(node.chance.uniform(1.3, 4.0))
    node.pass_time(8.0)

    verdicts = node.judge()
    assert verdicts.total() == FAULTS
    assert verdicts["wrong"] == 0
    assert verdicts["right"] >= least_right
