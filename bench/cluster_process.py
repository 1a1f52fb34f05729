"""The collector of `podgpu cluster --scrape` in its own process, on one core.

`python -m bench.cluster_process` reads the exporters' ports as one JSON line, then one command per line, and answers
each with one JSON line: `round` runs a round, `state` builds the state and renders /metrics, `memory` reads its RSS.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Sequence

from bench.running import memory_of
from podgpu.cli import cluster as _loaded_as_in_production  # noqa: F401 - its memory counts
from podgpu.cluster.bills import BillTotals
from podgpu.cluster.metrics import cluster_families
from podgpu.cluster.scrape import FixedTargets, ScrapeCollector
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState, build_cluster_state
from podgpu.metrics.encode import encode

SETTINGS = ViewSettings()


class Bench:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self.collector = ScrapeCollector(FixedTargets(urls), timeout=60.0, keep_fields=SETTINGS.keep_fields)
        self._state: ClusterState | None = None
        self._energy = 0

    async def round(self) -> dict[str, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        await self.collector.run_round()
        took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
        reading = self.collector.reading()
        usages = [device.usage for node in reading.nodes for device in node.state.devices]
        energy = sum(usage.energy_mj or 0 for usage in usages if usage)
        failed = [outcome.message for outcome in reading.outcomes if outcome.error]
        if failed or len(reading.nodes) != len(self._urls) or energy == self._energy:
            raise RuntimeError(f"not all nodes were read: {failed[:3]}")
        self._energy = energy
        return took

    async def state(self) -> dict[str, float]:
        started = time.process_time()
        reading = self.collector.reading()
        self._state = build_cluster_state(reading, self._state, SETTINGS, time.monotonic(), time.time())
        built = time.process_time()
        text = encode(cluster_families(self._state, {}, BillTotals()))
        devices = sum(len(node.state.devices) for node in reading.nodes)
        return {"build": built - started, "render": time.process_time() - built, "bytes": len(text), "devices": devices}

    async def memory(self) -> dict[str, float]:
        now = memory_of("self")
        return {"rss": now.rss, "peak": now.peak}


async def run() -> None:
    loop = asyncio.get_running_loop()

    async def read_line() -> str:
        return (await loop.run_in_executor(None, sys.stdin.readline)).strip()

    bench = Bench([f"http://127.0.0.1:{port}/metrics" for port in json.loads(await read_line())])
    commands = {"round": bench.round, "state": bench.state, "memory": bench.memory}
    try:
        while command := await read_line():
            print(json.dumps(await commands[command]()), flush=True)
    finally:
        await bench.collector.close()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asyncio.run(run())
