"""The exporter as a process of its own, with its real server and kubelet source, and ticks as fast as they come.

`python -m bench.exporter_process` is started by the benchmarks and talks with them in lines: it prints one JSON line
when it listens and one after each `tick N` it is told, and ends when its standard input does. Each tick is one
telemetry turn of one simulated second; every fifth is followed by an allocation turn, every fifteenth by a sample for
its history, in threads of their own as in the running exporter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from bench.node import NodeShape, TickClock, bench_agent, simulated_driver
from podgpu.agent.loop import Agent
from podgpu.cli import exporter as _loaded_as_in_production  # noqa: F401 - click and the option table count too
from podgpu.compose.histories import history_of, node_keeper
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.encode import CONTENT_TYPE
from podgpu.web.app import Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import PageSources, application
from podgpu.web.sockets import Address

TICKS_PER_ALLOCATION = 5
TICKS_PER_SAMPLE = 15
CONSTANT, CONSTANT_ZIPPED = "/constant", "/constant-zipped"


class Ticker:
    """Turns the agent, and keeps what the turns cost in CPU seconds of the whole process."""

    def __init__(self, agent: Agent, clock: TickClock) -> None:
        self._agent = agent
        self.keeper = node_keeper(agent)
        self._clock = clock
        self._telemetry = ThreadPoolExecutor(1, "telemetry")
        self._allocation = ThreadPoolExecutor(1, "allocation")
        self._done = 0

    def tick(self, count: int) -> dict[str, list[float]]:
        return self._telemetry.submit(self._ticks, count).result()

    def _ticks(self, count: int) -> dict[str, list[float]]:
        cost: dict[str, list[float]] = {"telemetry": [], "allocation": []}
        for _ in range(count):
            self._clock.advance()
            began = time.process_time()
            self._agent.read_telemetry()
            read = time.process_time()
            cost["telemetry"].append(read - began)
            self._done += 1
            if self._done % TICKS_PER_ALLOCATION == 0:
                self._allocation.submit(self._agent.read_allocation).result()
                cost["allocation"].append(time.process_time() - read)
            if self._done % TICKS_PER_SAMPLE == 0:
                self._allocation.submit(self.keeper.take).result()
        return cost


async def run(shape: NodeShape, socket: str) -> None:
    clock = TickClock()
    driver = simulated_driver(shape, clock)
    agent = bench_agent(driver, len(driver.gpus), [KubeletAllocation(socket)], clock)
    ticker = Ticker(agent, clock)
    ticker.tick(TICKS_PER_ALLOCATION)
    app = application(agent, page=PageSources(history_of(ticker.keeper)))
    app.add_routes(constant_routes(agent))
    try:
        async with listening(Listener(app, Address("127.0.0.1", 0)), ConnectionLimits()) as bound:
            _say({"port": bound.port})
            await _obey(ticker, agent)
    finally:
        agent.stop()


async def _obey(ticker: Ticker, agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        cost = await loop.run_in_executor(None, ticker.tick, int(line.removeprefix("tick ")))
        parts = agent.published.parts
        exposition = {"plain": len(agent.published.fresh.plain), "zipped": len(agent.published.fresh.zipped)}
        failed = [f"{source.name}: {source.message}" for source in parts.sources if not source.up]
        _say(
            {"cost": cost, "exposition": exposition, "assignments": len(parts.allocation.assignments), "failed": failed}
        )


def constant_routes(agent: Agent) -> list[web.RouteDef]:
    """The exposition as it is now, handed out by the least that aiohttp asks of a handler."""
    body = agent.published.fresh
    headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept, Accept-Encoding"}
    zipped_headers = {**headers, "Content-Encoding": "gzip"}

    async def plain(_request: web.Request) -> web.Response:
        return web.Response(body=body.plain, headers=headers)

    async def zipped(_request: web.Request) -> web.Response:
        return web.Response(body=body.zipped, headers=zipped_headers)

    return [web.get(CONSTANT, plain), web.get(CONSTANT_ZIPPED, zipped)]


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", required=True)
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--kubelet", required=True)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # simulated GPUs leave some fields out, and the agent says so
    asyncio.run(run(NodeShape(given.gpus, given.pods), given.kubelet))
