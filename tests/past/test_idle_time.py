"""Idle time of pods that work and rest by seconds is the same everywhere: counted by the exporter,
recorded in SQLite, read from a real Prometheus and VictoriaMetrics, and on the page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.clock import Clock
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import NodeReading
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.labels import Policy
from podgpu.metrics.parse import parse_text
from podgpu.model import NS, Assignment, Workload
from podgpu.node.agent.agent import Settings
from podgpu.node.holders.identity import Identities
from podgpu.past.bills.bill import RangeQuery, RangeRow
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.agent.simulated_node import SimulatedNode
from tests.fleet.real_servers import Point
from tests.fleet.states import World
from tests.fleet.test_prometheus_live import Serving
from tests.fleet.test_prometheus_ranges import ask, both_servers
from tests.simulated import FaultyProc, container_cgroup

HOUR = 3600
ROUND = 15
PRICES = Prices("EUR", {"*": Price(10.0)})
# Pod, GPU, share, seconds of work and of rest, idle GPU-hours of an hour. While another pod works on
# the same GPU, the driver's samples do not prove that a pod is idle.
PODS = (
    ("every-other-second", 0, 1.0, 1, 1, 0.5),
    ("two-of-ten", 1, 0.5, 2, 8, 0.4),
    ("never", 1, 0.5, 0, 1, 0.4),
)
IDLE_HOURS = {pod: hours for pod, *_, hours in PODS}


class Node(SimulatedNode):
    """An exporter on two GPUs. Its processes work in some seconds and rest in the others."""

    def __init__(self, folder: Path) -> None:
        self.proc = FaultyProc(folder / "proc")
        settings = Settings(interval=ROUND, usage_interval=1.0, policy=Policy(hostname="n1"))
        pods = [
            Workload("ml", pod, "main", f"{number:08}-0000-4000-8000-000000000000", f"{number:064}")
            for number, (pod, *_) in enumerate(PODS)
        ]
        names = Identities(current=frozenset(pods))
        super().__init__("2xH100", settings, proc=self.proc, identities=lambda: names)
        for number, (_, gpu, share, *_) in enumerate(PODS):
            pod = pods[number]
            self.holders.now.append(Assignment(self.uuid(gpu), pod, "kubelet", share=share))
            self.proc.add(100 + number, container_cgroup(pod.uid, pod.container_id))
            self.driver.place(SimulatedLoad(gpu, 100 + number, duty=0.0))
        self.agent.read_telemetry()
        self.agent.read_allocation()
        self.agent.read_usage()

    def run_second(self, second: int) -> None:
        for number, (_, gpu, _, on, off, _) in enumerate(PODS):
            is_on = second % (on + off) < on
            self.driver.remove(100 + number)
            self.driver.place(SimulatedLoad(gpu, 100 + number, duty=1.0 if is_on else 0.0))
        self.time += 1
        if second % ROUND == ROUND - 1:
            self.agent.read_telemetry()
            self.agent.read_allocation()
        self.agent.read_usage()

    def read(self) -> NodeReading:
        state = self.agent.published.state
        return NodeReading("http://n1:9400/metrics", state, read_at=self.time, listed=True)

    def scrape(self) -> Iterator[Point]:
        for family in parse_text(self.exposition):
            for sample in family.samples:
                labels = {**sample.labels, "job": "podgpu", "instance": "n1:9400"}
                yield Point(sample.name, labels, sample.value, self.wall())


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Hour:
    return Hour(tmp_path_factory.mktemp("hour"))


class Hour:
    """An hour of a node, recorded in SQLite and scraped."""

    def __init__(self, folder: Path) -> None:
        node = Node(folder)
        self.start = node.wall()
        self.points = list(node.scrape())
        world = World()
        recorder = HistoryRecorder(clock=Clock(node.monotonic, node.wall))
        for second in range(HOUR + 1):
            if second % ROUND == 0:
                wall = node.wall()
                state = world.round(node.read(), at=node.time, wall=wall, prices=PRICES)
                recorder.add(make_gpu_samples(state))
                recorder.record()
                self.points += node.scrape()
            if second < HOUR:
                node.run_second(second)
        self.end = node.wall()
        query = RangeQuery("pod", start=self.start, end=self.end)
        past = SqlitePast(recorder, lambda: state)
        self.rows = {row.pod: row for row in asyncio.run(past.range(query)).rows}
        self.holders = {
            holder.pod: holder
            for gpu in node.agent.published.state.devices
            for holder in gpu.holders
        }
        recorder.stop()


def check(rows: dict[str, RangeRow]) -> None:
    for pod, hours in IDLE_HOURS.items():
        assert rows[pod].idle_hours == pytest.approx(hours, rel=0.005), pod
        assert rows[pod].wasted == pytest.approx(10 * hours, rel=0.005), pod


def test_the_exporter_counts_it(hour: Hour) -> None:
    for pod, _, share, _, _, hours in PODS:
        usage = hour.holders[pod].known_usage
        assert usage.idle_ns == pytest.approx(hours / share * HOUR * NS), pod
        assert usage.wasted_idle_ns == pytest.approx(hours * HOUR * NS), pod


def test_sqlite_and_the_page_show_it(hour: Hour) -> None:
    check(hour.rows)


@both_servers
def test_engines_have_the_same(hour: Hour, serving: Serving, tmp_path: Path) -> None:
    with serving(tmp_path, hour.points) as url:
        answer = ask(url, start=hour.start, end=hour.end, prices=PRICES)
    check({row.pod: row for row in answer.rows})
