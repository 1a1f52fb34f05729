"""The books balance: no clock, restart, gap, number or exporter changes the bill of another pod.

Each run simulates weeks or months of a cluster: rounds go through the real cluster state, recorder
and SQLite file. `PODGPU_BOOKS_RUNS=1000` runs more seeds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from podgpu.clock import Clock
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading, NodeReading, ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.model import (
    MJ,
    NS,
    DeviceState,
    DeviceTotals,
    Holder,
    HolderUsage,
    NodeState,
)
from podgpu.past.book_clock import STABLE_SECONDS
from podgpu.past.record import make_records
from podgpu.past.recorder import HistoryRecorder
from podgpu.past.sqlite_charges import read_range

RUNS = int(os.environ.get("PODGPU_BOOKS_RUNS", "100"))
START = 1_800_000_000.0
DAY = 86_400.0
WATTS = 300.0
JUMPS = (-400 * DAY, -9 * DAY, -5 * 3600.0, -90.0, 45.0, 7200.0, 9 * DAY, 365 * DAY, -START)
FOREVER = 1e11


@dataclass
class Pod:
    name: str
    busy: float  # fraction of the time
    until: int  # number of the last round
    share: float | None = None
    held_seconds: float = 0.0  # for the exporter's counters
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class Exporter:
    """One exporter process. Its counters start with it."""

    target: str
    number: int = 0
    started_with: dict[str, float] = field(default_factory=dict)  # pod -> held seconds at the start

    @property
    def exporter_id(self) -> str:
        return f"{self.target}-{self.number}"

    def restart(self, pods: list[Pod]) -> None:
        self.number += 1
        self.started_with = {pod.name: pod.held_seconds for pod in pods}

    def describe(self, pod: Pod) -> Holder:
        seconds = pod.held_seconds - self.started_with.get(pod.name, 0.0)
        usage = HolderUsage(
            utilization_ratio=pod.busy,
            allocated_ns=round(seconds * NS),
            busy_ns=round(seconds * pod.busy * NS),
            idle_ns=round(seconds * (1 - pod.busy) * NS),
            energy_mj=round(seconds * WATTS * pod.busy * MJ),
        )
        return Holder(
            "team", pod.name, "main", source="kubelet", share_ratio=pod.share, usage=usage
        )


class Simulation:
    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self.folder = folder
        self.interval = self.random.choice((15.0, 300.0, 7200.0))
        # With a short interval, the churn of a month happens within hours.
        self.rounds = self.random.randint(250, 500)
        self.settings = ViewSettings(interval=self.interval, stale_after=3 * self.interval)
        self.monotonic = 1000.0
        self.true_offset = START - self.monotonic
        self.jump = 0.0
        self.jump_until = -1
        self.price = 2.0
        self.pods: dict[int, list[Pod]] = {0: [], 1: [], 2: []}  # by GPU of the honest node
        self.ended: list[Pod] = []
        self.born = 0
        self.exporters = [Exporter("http://a:9400/metrics"), Exporter("http://b:9400/metrics")]
        self.shown = 0
        self.state: ClusterState | None = None
        self.recorded: dict[str, str] = {}
        self.seconds_of_gpus = 0.0
        self.before: set[str] = set()
        self.open()

    def open(self) -> None:
        clock = Clock(lambda: self.monotonic, self.wall)
        self.recorder = HistoryRecorder(clock=clock, directory=str(self.folder))
        self.recorded = self.recorder.list_nodes()

    def wall(self) -> float:
        return self.monotonic + self.true_offset + self.jump

    # What may happen before a round

    def disturb(self, number: int) -> float:
        """Returns the seconds until the next round."""
        random = self.random
        if number >= self.jump_until:
            self.jump = 0.0
        if random.random() < 0.02:
            self.jump = random.choice(JUMPS) * random.uniform(0.5, 1.0)
            self.jump_until = number + random.randint(1, 12)
        if random.random() < 0.02:  # podgpu is killed: what is not written is lost
            self.recorder.stop()
            self.state = None
            self.before = set()
            self.open()
        if random.random() < 0.01:
            self.exporters[self.shown].restart(self.list_pods())
        if random.random() < 0.01:
            self.shown = 1 - self.shown
        if random.random() < 0.01:
            self.price = random.choice((0.0, 1.5, 75_000.0, 1e9))
        self.churn(number)
        return self.interval if random.random() > 0.01 else random.uniform(0.2, 9) * DAY

    def churn(self, number: int) -> None:
        for gpu, pods in self.pods.items():
            self.ended += [pod for pod in pods if pod.until < number]
            pods[:] = [pod for pod in pods if pod.until >= number]
            if len(pods) < 1 + gpu and self.random.random() < 0.2:
                self.born += 1
                share = None if gpu == 0 else 1 / (1 + gpu)
                until = number + self.random.randint(5, 200)
                pods.append(Pod(f"pod-{self.born}", self.random.random(), until, share))

    def list_pods(self) -> list[Pod]:
        return [pod for pods in self.pods.values() for pod in pods]

    # A round

    def run_round(self, number: int) -> None:
        seconds = self.disturb(number)
        self.monotonic += seconds
        present = {pod.name for pod in self.list_pods()}
        is_charged = self.state is not None and seconds <= self.settings.stale_after
        for pod in self.list_pods():
            pod.held_seconds += seconds if pod.name in self.before else 0.0
        previous = self.state
        reading = ClusterReading((self.read_honest(), self.read_hostile(number)))
        prices = Prices("VND", {"*": Price(self.price)})
        self.state = build_cluster_state(
            reading,
            previous,
            self.settings,
            self.monotonic,
            self.wall(),
            prices=prices,
            recorded=self.recorded,
        )
        if is_charged:
            self.add_truth(seconds, previous)
        self.before = present
        self.recorder.add(make_records(self.state))
        self.recorder.record()

    def add_truth(self, seconds: float, previous: ClusterState | None) -> None:
        self.seconds_of_gpus += seconds * len(self.pods)
        assert previous is not None
        is_same = previous.nodes[0].reading.target == self.exporters[self.shown].target
        for pod in self.list_pods():
            if pod.name not in self.before:
                continue
            held = seconds * (1.0 if pod.share is None else pod.share)
            pod.truth["allocated"] += held
            pod.truth["cost"] += held / 3600 * self.price
            if is_same:  # counters of another exporter start a new baseline
                pod.truth["busy"] += seconds * pod.busy
                pod.truth["idle"] += held * (1 - pod.busy)
                pod.truth["energy"] += seconds * WATTS * pod.busy

    def read_honest(self) -> NodeReading:
        exporter = self.exporters[self.shown]
        gpus = []
        for index, pods in self.pods.items():
            holders = tuple(exporter.describe(pod) for pod in pods)
            gpus.append(
                DeviceState(
                    uuid=f"GPU-{index}",
                    index=index,
                    model="NVIDIA H200",
                    holders=holders,
                    utilization_ratio=0.5,
                    usage=DeviceTotals(method="exact", unattributed_energy_mj=0),
                )
            )
        state = NodeState(
            producer="podgpu",
            node="honest",
            exporter_id=exporter.exporter_id,
            devices=tuple(gpus),
            usage_at=self.wall(),
        )
        return NodeReading(exporter.target, state, read_at=self.monotonic)

    def read_hostile(self, number: int) -> NodeReading:
        """Its counters jump, it invents pods, and it reports GPUs of the honest node."""
        huge = self.random.choice((0, 1, 10**12, 2**63 - 1, number * 10**9))
        usage = HolderUsage(
            utilization_ratio=1.0,
            allocated_ns=huge,
            busy_ns=huge,
            idle_ns=huge,
            wait_ns=huge,
            energy_mj=huge,
        )
        invented = Holder("evil", f"invented-{number}", "main", source="kubelet", usage=usage)
        liar = Holder("evil", "liar", "main", source="kubelet", usage=usage)
        gpus = [DeviceState(uuid="GPU-evil", index=0, model="H200", holders=(liar, invented))]
        if number >= 2:  # it comes later than the node that it robs
            gpus.append(DeviceState(uuid="GPU-0", index=1, model="H200", holders=(liar,)))
        state = NodeState(producer="podgpu", node="zz", exporter_id="evil", devices=tuple(gpus))
        return NodeReading("http://evil:9400/metrics", state, read_at=self.monotonic)


def run(seed: int, folder: Path) -> Simulation:
    simulation = Simulation(seed, folder)
    for number in range(simulation.rounds):
        simulation.run_round(number)
    return simulation


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_bill_of_every_honest_pod_is_right(seed: int, tmp_path: Path) -> None:
    simulation = run(seed, tmp_path)
    with simulation.recorder._store.reader() as db:
        _, _, charges = read_range(db, 0.0, FOREVER)
    simulation.recorder.stop()

    billed: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    evil = 0.0
    for charge in charges:
        amounts = charge.amounts
        if charge.account.namespace == "evil":
            evil += amounts.allocated_seconds
        bill = billed[charge.account.pod]
        bill["allocated"] += amounts.allocated_seconds
        bill["cost"] += amounts.cost
        bill["busy"] += amounts.busy_seconds
        bill["idle"] += amounts.idle_seconds
        bill["energy"] += amounts.energy_joules

    for pod in (*simulation.ended, *simulation.list_pods()):
        for name, truth in pod.truth.items():
            found = billed[pod.name][name]
            assert found >= truth * 0.995 - 1e-3, (pod.name, name)
            assert found <= truth * 1.001 + 1e-3, (pod.name, name)
    assert evil <= simulation.seconds_of_gpus  # its own GPU, and nothing of the others


def test_a_clock_that_is_wrong_for_some_minutes_changes_no_time(tmp_path: Path) -> None:
    """The bill of the real period is exact, not only that of all times."""
    for index, jump in enumerate(JUMPS):
        simulation = Simulation(7, tmp_path / str(index))
        simulation.interval = 15.0
        simulation.settings = ViewSettings()
        pod = Pod("pod", 0.5, until=10**9)
        simulation.pods = {0: [pod]}
        simulation.churn = lambda number: None  # type: ignore[method-assign]
        simulation.disturb = lambda number: 15.0  # type: ignore[method-assign]
        begin = simulation.wall()
        for number in range(200):
            is_wrong = 100 <= number < 100 + (STABLE_SECONDS - 60) / 15
            simulation.jump = jump if is_wrong else 0.0
            simulation.run_round(number)
        with simulation.recorder._store.reader() as db:
            _, _, charges = read_range(db, begin, simulation.wall() + 15)
        simulation.recorder.stop()
        held = sum(one.amounts.allocated_seconds for one in charges if one.account.pod == "pod")
        assert held == pytest.approx(pod.truth["allocated"]) == 199 * 15.0
