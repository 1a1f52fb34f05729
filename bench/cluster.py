"""Cluster: CPU of one round over 1,000 nodes of 8 GPUs, read as documents and as metrics text.

The nodes are in another process (`bench.fleet`). Connections stay open, and every round has new
values.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.figures import Figure
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.settings import ViewSettings

NODES = 1000
MAX_CORE_PERCENT = 10.0
MIN_RATIO = 2.0
INTERVAL = 15.0
_ROOT = Path(__file__).parents[1]


class FleetProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ports: list[int] = json.loads(self._read())

    def next_round(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fleet ended with exit code {self._process.wait()}")
        return line


@contextmanager
def running_fleet(nodes: int) -> Iterator[FleetProcess]:
    command = [sys.executable, "-m", "bench.fleet", str(nodes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
    ) as process:
        try:
            yield FleetProcess(process)
        finally:
            process.kill()


def measure(nodes: int = NODES, rounds: int = 7) -> list[Figure]:
    with running_fleet(nodes) as fleet:
        documents, text = asyncio.run(_measure_rounds(fleet, rounds))
    of_all = f"{nodes:,} nodes"
    percent = 100 * documents / INTERVAL
    return [
        Figure(
            f"{of_all} as documents, one core, every 15 s", percent, "%", at_most=MAX_CORE_PERCENT
        ),
        Figure("text over documents: CPU", text / documents, "x", at_least=MIN_RATIO),
        Figure(f"  one round, {of_all} as documents: CPU", documents * 1e3, "ms"),
        Figure(f"  one round, {of_all} as text: CPU", text * 1e3, "ms"),
    ]


async def _measure_rounds(fleet: FleetProcess, rounds: int) -> tuple[float, float]:
    collectors = [_make_collector(fleet.ports, path) for path in ("/metrics", "/text/metrics")]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        fleet.next_round()
        for collector, taken in zip(collectors, seconds, strict=True):
            started = time.process_time()
            reading = await collector.run_round()
            if number:  # the first round opens the connections
                taken.append(time.process_time() - started)
            _check(reading, len(fleet.ports))
    for collector in collectors:
        await collector.close()
    return median(seconds[0]), median(seconds[1])


def _make_collector(ports: Sequence[int], path: str) -> ScrapeCollector:
    targets = [f"http://127.0.0.1:{port}{path}" for port in ports]
    return ScrapeCollector(lambda: targets, ViewSettings(), timeout=60.0)


def _check(reading: ClusterReading, nodes: int) -> None:
    failures = [outcome.text for outcome in reading.outcomes if outcome.error]
    if failures or len({node.state.node for node in reading.nodes}) != nodes:
        raise RuntimeError(f"not every node was read: {failures[:3]}")
