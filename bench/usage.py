"""What it costs to know who uses the GPUs: CPU of a usage turn beyond the driver's own, and memory over 100,000 jobs.

Eight GPUs in eight time slices each, a container with one process on every slice, a fake /proc (in memory where
there is /dev/shm), names from the kubelet's log directories. A turn reads the driver and /proc, charges everybody,
and renders the text. CPU is of all threads; judged is the least of many turns, the others are medians. Memory is that
of a process of its own: `python -m bench.usage FIRST LAST` has every container live for one turn, and prints its
resident memory after so many of them.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

from bench.figures import Figure
from bench.node import TickClock
from bench.running import memory_of
from bench.tick import TimedNvml, median_seconds
from podgpu.agent.loop import Agent, Settings
from podgpu.agent.publish import Published
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders.identity import IdentityReader
from podgpu.metrics.render import Policy
from podgpu.model import Allocation, Assignment, Device, Workload
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.proc import SimulatedProc, container_cgroup, stat_line
from podgpu.simulate.workload import SimulatedLoad
from podgpu.usage.containers import ContainerFinder

MOST_MS = 10
MOST_GROWTH_MIB = 1
GPUS, SLICES = 8, 8
_IN_MEMORY = "/dev/shm"
_FIRST_PID, _PIDS = 1000, 4_000_000
_GIB = 1024**3


class Holders:
    """The containers now on the GPUs, as a kubelet would list them."""

    name = "kubelet"

    def __init__(self) -> None:
        self.now: tuple[Assignment, ...] = ()

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        return Allocation(self.now)

    def close(self) -> None:
        pass


class BusyNode:
    """The node and the jobs on it. `change` ends all of them and starts as many others, which podgpu sees to hold."""

    def __init__(self, root: Path) -> None:
        self.clock = TickClock()
        self.driver = SimulatedNvml(f"{GPUS}xH100", clock=self.clock, wall=self.clock)
        self.timed = TimedNvml(self.driver)
        self.finder = ContainerFinder(str(root / "proc"), self.clock)
        self.holders = Holders()
        self._root = root
        self._jobs: list[tuple[int, Workload]] = []
        self.started = 0
        SimulatedProc(root / "proc")
        for folder in ("pods", "containers"):
            (root / folder).mkdir()
        self.agent = self._agent()
        self.agent.read_telemetry()

    def _agent(self) -> Agent:
        names = IdentityReader(str(self._root / "pods"), str(self._root / "containers"))
        return Agent(
            NvmlTelemetry(self.timed, "simulated", lambda: GPUS, self.clock, self.clock),
            [self.holders],
            Settings(policy=Policy(hostname="simulated-node")),
            Clock(self.clock, self.clock),
            identities=names.read,
            containers=self.finder,
        )

    def change(self) -> None:
        for pid, workload in self._jobs:
            self.driver.remove(pid)
            for name in ("stat", "cgroup"):
                os.unlink(f"{self.finder.proc}/{pid}/{name}")
            for folder in (f"{self.finder.proc}/{pid}", *self._names_of(workload)):
                os.rmdir(folder)
        self._jobs = [self._start(number) for number in range(GPUS * SLICES)]
        uuids = [gpu.uuid for gpu in self.driver.gpus]
        self.holders.now = tuple(
            Assignment(uuids[number % GPUS], workload, "kubelet", str(number // GPUS), 1 / SLICES)
            for number, (_, workload) in enumerate(self._jobs)
        )
        self.agent.read_allocation()

    @property
    def pids(self) -> list[int]:
        return [pid for pid, _ in self._jobs]

    def _start(self, number: int) -> tuple[int, Workload]:
        pid, self.started = _FIRST_PID + self.started % _PIDS, self.started + 1
        pod = f"job-{self.started:06}"
        workload = Workload(
            f"team-{self.started % 7}", pod, "main", str(uuid5(NAMESPACE_DNS, pod)), sha256(pod.encode()).hexdigest()
        )
        for folder in (f"{self.finder.proc}/{pid}", *self._names_of(workload)):
            os.mkdir(folder)
        _write(f"{self.finder.proc}/{pid}/stat", stat_line(pid, "python3", self.started))
        _write(f"{self.finder.proc}/{pid}/cgroup", container_cgroup(workload.uid, workload.container_id))
        self.driver.place(SimulatedLoad(number % GPUS, pid, duty=0.1, memory=_GIB, phase=number * 0.013))
        return pid, workload

    def _names_of(self, workload: Workload) -> list[str]:
        """The log too is a directory here: only its name is read.

        No pathlib for what comes and goes: it interns every name, and the table of interned strings grew by 2 MiB.
        """
        log = f"{workload.pod}_{workload.namespace}_{workload.container}-{workload.container_id}.log"
        pod = f"{workload.namespace}_{workload.pod}_{workload.uid}"
        return [f"{self._root}/pods/{pod}", f"{self._root}/containers/{log}"]

    def turn(self) -> None:
        self.timed.seconds.clear()
        self.clock.advance()
        self.agent.read_usage()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def busy_node() -> Iterator[BusyNode]:
    where = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="podgpu-bench-", dir=where) as folder:
        node = BusyNode(Path(folder))
        try:
            yield node
        finally:
            node.driver.faults.unload_driver()  # so that stopping does not wait for the XID watch
            node.agent.stop()


def measure(turns: int = 200, first: int = 10_000, last: int = 100_000) -> list[Figure]:
    return [*measure_cpu(turns), *measure_memory(first, last)]


def measure_cpu(turns: int) -> list[Figure]:
    with busy_node() as node:
        node.change()
        node.turn()
        whole, driver = zip(*islice(_turn_costs(node), turns), strict=True)
        holders = [holder for gpu in node.agent.published.state.devices for holder in gpu.holders]
        attributed = sum(holder.usage is not None and bool(holder.usage.processes) for holder in holders)
        pids = node.pids
        (rendering,) = median_seconds(
            turns, lambda: Published(node.agent.published.parts, node.agent.settings.policy, 0.0).fresh.zipped
        )
        (remembered,) = median_seconds(turns, lambda: [node.finder.find(pid) for pid in pids])
        (forgotten,) = median_seconds(turns, lambda: _look_afresh(node.finder, pids))
        node.change()
        node.turn()
        kept = node.finder.remembered
    if attributed != GPUS * SLICES:
        raise RuntimeError(f"{attributed} containers were seen at work, so the figures would mean nothing")
    beyond = [w - d for w, d in zip(whole, driver, strict=True)]
    return [
        Figure("usage turn beyond the driver's own time: CPU", min(beyond) * 1e3, "ms", MOST_MS),
        Figure("  median of them all, other work on the machine included", median(beyond) * 1e3, "ms"),
        Figure("  of it rendering the exposition", rendering * 1e3, "ms"),
        Figure("  of it looking 64 processes up, cgroups remembered", remembered * 1e3, "ms"),
        Figure("  the same with no cgroup remembered", forgotten * 1e3, "ms"),
        Figure("the simulated driver's own calls", median(driver) * 1e3, "ms"),
        Figure("cgroups remembered after all 64 ended and 64 began", kept, "", GPUS * SLICES),
    ]


def _turn_costs(node: BusyNode) -> Iterator[tuple[float, float]]:
    """CPU seconds of a whole turn in all threads, and of the driver's calls in it."""
    while True:
        began = time.process_time()
        node.turn()
        yield time.process_time() - began, sum(node.timed.seconds)


def _look_afresh(finder: ContainerFinder, pids: Sequence[int]) -> None:
    finder.forget_others(())
    for pid in pids:
        finder.find(pid)


def measure_memory(first: int, last: int) -> list[Figure]:
    command = [sys.executable, "-m", "bench.usage", str(first), str(last)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    early, late, remembered = json.loads(done.stdout)
    return [
        Figure(f"RSS after {first:,} short processes, driver and node included", early, "MiB"),
        Figure(f"RSS after {last:,}", late, "MiB"),
        Figure(f"growth from {first:,} to {last:,}", late - early, "MiB", MOST_GROWTH_MIB),
        Figure("processes remembered at the end", remembered, "", GPUS * SLICES),
    ]


def _live_and_die(first: int, last: int) -> list[Any]:
    """Every turn ends 64 processes and begins 64 in as many new pods, and sees them hold and use their GPUs."""
    with busy_node() as node:
        rss = []
        for until in (first, last):
            while node.started < until:
                node.change()
                node.turn()
            rss.append(memory_of("self").rss)
        return [*rss, node.finder.remembered]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    print(json.dumps(_live_and_die(int(sys.argv[1]), int(sys.argv[2]))))
