"""`python -m endurance.soak [--minutes 60]`: checks the metrics during churn. Exits with 1 if a
rule was broken.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from bench.figures import Figure, any_missed, heading, row
from endurance.soak.churn import CYCLE, Churn
from endurance.soak.judge import Judge
from endurance.soak.truth import SoakClock
from endurance.soak.world import World
from endurance.vitals import Vitals, growth, vitals_of
from podgpu.clock import Clock
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder

SPEED = 100.0
"""Simulated seconds per real second, at most."""
_MAX_GROWTH = 8.0
"""MiB between the first quarter and the end of the run, when all caches are full."""
_MAX_MORE = 2
"""Threads and descriptors that may vary by chance. A leak in each cycle would be hundreds."""
_FASTEST_DEADLINE = 1.0


class LogCounter(logging.Handler):
    """Counts warnings and tracebacks, and keeps the last lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        self.bugs = 0
        self.last: deque[str] = deque(maxlen=12)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.WARNING
        self.bugs += record.exc_info is not None
        self.last.append(record.getMessage())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m endurance.soak", description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="real minutes, of up to 100 simulated minutes each",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    seconds = options.minutes * 60.0
    figures, judge = soak(seconds * SPEED, options.seed, SPEED, seconds)
    print(heading())
    for figure in figures:
        print(row(figure))
    for rule, example in judge.examples.items():
        print(f"first time: {rule}: {example}")
    return 1 if any_missed(figures) else 0


def soak(
    simulated: float, seed: int = 0, speed: float = float("inf"), seconds: float = float("inf")
) -> tuple[list[Figure], Judge]:
    """Runs the test for `simulated` seconds, or for `seconds` of real time. The same seed causes
    the same events.
    """
    with (
        tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder,
        _count_log_lines() as lines,
    ):
        clock, random = SoakClock(), Random(seed)
        world = World(Path(folder), clock, random)
        with world.kubelet, _agent(world, Path(folder)) as agent:
            judge = Judge(world, lines.last)
            churn = Churn(world, agent, judge, random)
            began = time.monotonic()
            seen = list(_live(churn, world, simulated, speed, seconds))
            reached = churn.simulated / (time.monotonic() - began)
            churn.recover()
        return _figures(world, judge, seen, reached, lines), judge


def _live(
    churn: Churn, world: World, simulated: float, speed: float, seconds: float
) -> Iterator[Vitals]:
    """Yields memory, threads and descriptors of this process at the end of every calm period."""
    began = time.monotonic()
    while churn.simulated < simulated and time.monotonic() - began < seconds:
        churn.second()
        if churn.simulated % CYCLE == 0 and world.is_calm:
            # Counts only Python's threads, because the simulated kubelet's number of gRPC threads
            # varies.
            yield replace(vitals_of("self", churn.simulated), threads=threading.active_count())
        time.sleep(max(0.0, began + churn.simulated / speed - time.monotonic()))


def _figures(
    world: World, judge: Judge, seen: list[Vitals], speed: float, lines: LogCounter
) -> list[Figure]:
    settled = seen[len(seen) // 4 :]
    grown = growth(settled)
    last = seen[-1] if seen else vitals_of("self", 0.0)
    rules = (
        "metrics name a pod that does not hold the device",
        "a sample names a pod that never held the device",
        "a device series has a pod, but several pods hold it",
        "a holder is not in the metrics",
        "a share differs from the allocated part",
        "a healthy GPU is not in the metrics",
        "a counter decreases",
        "parts do not add up to the device",
        "namespaces and the rest do not add up to the devices",
    )
    return [
        Figure("simulated hours", seen[-1].at / 3600 if seen else 0.0),
        Figure("simulated seconds per second", speed),
        *(Figure(f"{what} in total", n) for what, n in world.count.items()),
        Figure("expositions checked", judge.expositions),
        Figure("samples with a pod", judge.attributed, at_least=1),
        *(Figure(rule, judge.breaches[rule], "times", at_most=0) for rule in rules),
        Figure("memory", last.rss, "MiB"),
        Figure("growth of memory, by linear regression", grown.rss, "MiB", at_most=_MAX_GROWTH),
        Figure("threads", last.threads),
        Figure("more threads in the second half", grown.threads, "", at_most=_MAX_MORE),
        Figure("more descriptors in the second half", grown.descriptors, "", at_most=_MAX_MORE),
        Figure("warnings logged", lines.count, "lines"),
        Figure("tracebacks logged", lines.bugs, "", at_most=0),
    ]


@contextmanager
def _agent(world: World, folder: Path) -> Iterator[Agent]:
    clock, count = world.clock, len(world.numbers)
    names = IdentityReader(str(folder / "log" / "pods"), str(folder / "log" / "containers"))
    telemetry = NvmlTelemetry(world.driver, "simulated", lambda: count, clock.monotonic, clock.wall)
    kubelet = KubeletAllocation(world.kubelet.socket, clock=clock.monotonic)
    world.calls.track(telemetry, "inventory", "read", "usage")
    world.calls.track(kubelet, "assignments")
    agent = Agent(
        telemetry,
        HolderSources([kubelet], names.read),
        # The interval limits the real time of a hung call. `Churn` calls the agent's turns.
        Settings(
            interval=_FASTEST_DEADLINE,
            policy=Policy(counters=shipped_counters("dcp") or (), hostname="soak"),
        ),
        Clock(clock.monotonic, clock.wall),
        containers=ContainerFinder(str(folder / "proc"), clock.monotonic),
    )
    try:
        yield agent
    finally:
        world.driver.faults.release_all()
        world.driver.faults.unload_driver()
        agent.stop()


@contextmanager
def _count_log_lines() -> Iterator[LogCounter]:
    """Counts log lines instead of printing them."""
    logger, lines = logging.getLogger("podgpu"), LogCounter()
    before = logger.propagate, logger.level
    logger.addHandler(lines)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.propagate, level = before
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
