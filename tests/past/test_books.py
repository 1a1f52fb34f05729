"""The books balance: no clock, restart, gap, number or exporter changes the bill of another pod.

Each run simulates weeks or months of a cluster: rounds go through the real cluster state, recorder
and SQLite file. `PODGPU_BOOKS_RUNS=1000` runs more seeds.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from podgpu.clock import Clock
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.model import MJ, NS, DeviceState, DeviceTotals, Holder, HolderUsage, NodeState
from podgpu.past.books.book_clock import STABLE_SECONDS
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.sqlite.sqlite_charges import read_range

RUNS = int(os.environ.get("PODGPU_BOOKS_RUNS", "100"))
START = 1_800_000_000.0
DAY = 86_400.0
WATTS = 300.0
JUMPS = (-400 * DAY, -9 * DAY, -5 * 3600.0, -90.0, 45.0, 7200.0, 9 * DAY, 365 * DAY, -START)
MOST_JUMPS = 30  # each may be a day of its own, and 90 recorded days are kept
FOREVER = 1e11
LONGEST_COUNTED_GAP = 3600.0
TROUBLE = (1, 4, 20)
NAMES = ("allocated", "cost", "busy", "idle", "energy")


@dataclass
class Pod:
    name: str
    busy: float  # fraction of the time
    until: int  # number of the last round
    share: float | None = None
    held_seconds: float = 0.0  # until now
    read_seconds: float | None = None  # until the last reading that podgpu has
    truth: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def hold(self, seconds: float, price: float) -> None:
        held = seconds * (self.share or 1.0)
        self.truth["allocated"] += held
        self.truth["cost"] += held / 3600 * price

    def use(self, seconds: float) -> None:
        self.truth["busy"] += seconds * self.busy
        self.truth["idle"] += seconds * (self.share or 1.0) * (1 - self.busy)
        self.truth["energy"] += seconds * WATTS * self.busy


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
            allocated_ns=round(seconds * (pod.share or 1.0) * NS),
            busy_ns=round(seconds * pod.busy * NS),
            idle_ns=round(seconds * (1 - pod.busy) * NS),
            energy_mj=round(seconds * WATTS * pod.busy * MJ),
        )
        return Holder(
            "team", pod.name, "main", source="kubelet", share_ratio=pod.share, usage=usage
        )


class Simulation:
    """Draws what happens. What is true is computed from the pods, never from counters."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self.folder = folder
        self.interval = self.random.choice((15.0, 300.0, 7200.0))
        self.trouble = self.random.choice(TROUBLE)
        # With a short interval, the churn of a month happens within hours.
        self.rounds = self.random.randint(250, 500)
        self.settings = ViewSettings(interval=self.interval, stale_after=3 * self.interval)
        self.monotonic = 1000.0
        self.true_offset = START - self.monotonic
        self.drift = self.random.choice((0.0, 0.0, 5e-4, -5e-4))  # NTP corrects the clock slowly
        self.jump = 0.0
        self.jumps = 0
        self.jump_until = -1
        self.full_until = -1
        self.silent_until = -1
        self.currency = "VND"
        self.price = 2.0
        self.pods: dict[int, list[Pod]] = {0: [], 1: [], 2: []}  # by GPU of the honest node
        self.ended: list[Pod] = []
        self.born = 0
        self.exporters = [Exporter("http://a:9400/metrics"), Exporter("http://b:9400/metrics")]
        self.shown = 0
        self.state: ClusterState | None = None
        self.honest: NodeReading | None = None
        self.is_honest_known = False  # a round without the hostile node was completed
        self.is_taken = False  # the hostile node has GPU-0, because the honest one is silent
        self.recorded: dict[str, str] = {}
        self.seconds_of_gpus = 0.0
        self.events: Counter[str] = Counter()
        self.open()

    def open(self) -> None:
        clock = Clock(lambda: self.monotonic, self.wall)
        self.recorder = HistoryRecorder(clock=clock, directory=str(self.folder))
        self.recorded = self.recorder.list_nodes()
        self.state = None
        self.honest = None

    def wall(self) -> float:
        slewed = self.drift * (self.monotonic - 1000.0)
        return self.monotonic + self.true_offset + slewed + self.jump

    # What may happen before a round

    def draws(self, event: str, probability: float) -> bool:
        is_drawn = self.random.random() < min(0.3, probability * self.trouble)
        self.events[event] += is_drawn
        return is_drawn

    def disturb(self, number: int) -> float:
        """Returns the seconds until the next round."""
        random = self.random
        self.disturb_clock(number)
        if number >= self.full_until and self.draws("disk full", 0.005):
            self.full_until = number + random.randint(1, 60)
        is_full = number < self.full_until
        self.recorder._store._db.execute(f"PRAGMA query_only = {int(is_full)}")
        # What is not written is lost if podgpu ends, so it does not end now.
        if not is_full and self.draws("restart", 0.01):
            self.recorder.stop()
            self.open()
        if self.draws("other exporter", 0.01):
            self.shown = 1 - self.shown
        if self.draws("exporter restarts", 0.01):
            self.exporters[self.shown].restart(self.list_pods())
        if self.draws("price", 0.01):
            self.price = random.choice((0.0, 1.5, 75_000.0, 1e9))
        if self.draws("currency", 0.003):
            self.currency = "EUR" if self.currency == "VND" else "VND"
        if number >= self.silent_until and self.draws("silent exporter", 0.01):
            self.silent_until = number + random.randint(1, 20)
        self.churn(number)
        if self.draws("gap of minutes", 0.01):
            return random.uniform(30.0, 4000.0)
        if self.draws("gap of days", 0.003):
            return random.uniform(0.2, 9) * DAY
        return self.interval

    def disturb_clock(self, number: int) -> None:
        random = self.random
        if number >= self.jump_until:
            self.jump = 0.0
        if self.jumps < MOST_JUMPS and self.draws("jump", 0.02):
            self.jumps += 1
            self.jump = random.choice(JUMPS) * random.uniform(0.5, 1.0)
            self.jump_until = number + random.randint(1, 60)
        # The monotonic clock stands still while a machine sleeps.
        if self.jumps < MOST_JUMPS and self.draws("sleep", 0.003):
            self.jumps += 1
            self.true_offset += random.uniform(60.0, 3 * DAY)

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
        self.seconds_of_gpus += seconds * (len(self.pods) + 1)
        for pod in self.list_pods():
            is_new = pod.held_seconds == 0.0
            pod.held_seconds += seconds * (self.random.uniform(0.1, 1.0) if is_new else 1.0)

        before = self.honest
        is_silent = before is not None and number < self.silent_until
        if before is None or not is_silent:
            self.honest = self.read_honest()
        assert self.honest is not None
        # Nobody can tell which of two nodes is hostile if both are there from the start.
        nodes = [self.honest]
        if self.is_honest_known:
            nodes.append(self.read_hostile(number))
        reading = ClusterReading(tuple(nodes))
        prices = Prices(self.currency, {"*": Price(self.price)})
        self.state = build_cluster_state(
            reading,
            self.state,
            self.settings,
            self.monotonic,
            self.wall(),
            prices=prices,
            recorded=self.recorded,
        )
        self.recorder.add(make_gpu_samples(self.state))
        is_unwritten = number <= self.full_until
        if not is_unwritten and self.draws("kill", 0.01):
            self.kill()
            return
        self.recorder.record()
        self.is_honest_known = True
        if is_silent:
            silence = self.monotonic - self.honest.read_at
            self.is_taken = self.is_taken or silence > self.settings.stale_after
        else:
            self.add_truth(before)
            self.is_taken = False

    def kill(self) -> None:
        """Kills the view: continues with a copy of the files as they are now.

        This round is lost, and the next one has no reading to compare with, as after a restart.
        """
        copy = self.folder.with_name(f"{self.folder.name}x")
        shutil.copytree(self.folder, copy)
        self.recorder._store.close()
        self.folder = copy
        self.open()

    def add_truth(self, before: NodeReading | None) -> None:
        """Adds what podgpu can know: a gap that nobody counted is unknown."""
        now = self.honest
        assert now is not None
        for pod in self.list_pods():
            earlier, pod.read_seconds = pod.read_seconds, pod.held_seconds
            if before is None:
                continue
            if self.is_taken and pod in self.pods[0]:
                continue
            seconds = now.read_at - before.read_at
            is_same = before.state.exporter_id == now.state.exporter_id
            is_comparable = is_same or before.target == now.target
            is_gap = seconds > max(60.0, self.settings.stale_after)
            if is_gap and not (is_same and seconds <= LONGEST_COUNTED_GAP):
                continue
            if earlier is None and not is_comparable:
                continue
            # A counter that restarted has only the time since then.
            last = self.exporters[self.shown].started_with.get(pod.name, 0.0)
            counted = pod.held_seconds - max(last, earlier or 0.0)
            pod.hold(counted if earlier is None else pod.held_seconds - earlier, self.price)
            if is_comparable:
                pod.use(counted)
        for pod in self.ended:
            pod.read_seconds = None

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
        return NodeReading(exporter.target, state, read_at=self.monotonic, listed=True)

    def read_hostile(self, number: int) -> NodeReading:
        """Its counters jump, it invents pods, and it reports GPUs of the honest node."""
        # Negative counters are refused when a document is decoded.
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
        gpus = (
            DeviceState(uuid="GPU-evil", index=0, model="H200", holders=(liar, invented)),
            DeviceState(uuid="GPU-0", index=1, model="H200", holders=(liar,)),
        )
        state = NodeState(producer="podgpu", node="zz", exporter_id="evil", devices=gpus)
        target = "http://evil:9400/metrics"
        return NodeReading(target, state, read_at=self.monotonic, listed=True)


def run(seed: int, folder: Path) -> Simulation:
    simulation = Simulation(seed, folder)
    for number in range(simulation.rounds):
        simulation.run_round(number)
    # The last round writes what a full disk has left.
    simulation.recorder._store._db.execute("PRAGMA query_only = 0")
    simulation.recorder.add([])
    simulation.recorder.record()
    return simulation


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_bill_of_every_honest_pod_is_right(seed: int, tmp_path: Path) -> None:
    simulation = run(seed, tmp_path / "a")
    with simulation.recorder._store.reader() as db:
        charges = read_range(db, 0.0, FOREVER)
    simulation.recorder.stop()

    billed: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    total = 0.0
    for charge in charges:
        amounts = charge.amounts
        total += amounts.allocated_seconds
        bill = billed[charge.account.pod]
        bill["allocated"] += amounts.allocated_seconds
        bill["cost"] += amounts.cost
        bill["busy"] += amounts.busy_seconds
        bill["idle"] += amounts.idle_seconds
        bill["energy"] += amounts.energy_joules

    for pod in (*simulation.ended, *simulation.list_pods()):
        for name in NAMES:
            truth = pod.truth[name]
            found = billed[pod.name][name]
            assert found >= truth * 0.995 - 1e-3, (pod.name, name)
            assert found <= truth * 1.001 + 1e-3, (pod.name, name)
    # All GPUs, also that of the hostile node: nobody is charged for more than there is.
    assert total <= simulation.seconds_of_gpus * (1 + 1e-9)


def test_a_clock_that_is_wrong_for_some_minutes_changes_no_time(tmp_path: Path) -> None:
    """The bill of the real period is exact, not only that of all times."""
    for index, jump in enumerate(JUMPS):
        simulation = Simulation(7, tmp_path / str(index))
        simulation.interval = 15.0
        simulation.settings = ViewSettings()
        simulation.trouble = 0
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
            charges = read_range(db, begin, simulation.wall() + 15)
        simulation.recorder.stop()
        held = sum(one.amounts.allocated_seconds for one in charges if one.account.pod == "pod")
        assert held == pytest.approx(pod.truth["allocated"]) == 199 * 15.0
