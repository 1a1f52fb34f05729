"""The cluster's embedded backend as a process of its own, on one core, with a round whenever it is told.

`python -m bench.cluster_process` reads the exporters' ports as one JSON line, then a word per line, and answers each
with one JSON line: `bare` downloads every text and throws it away, `packed` without unpacking it; `first` makes a new
backend and has its first round; `steady` has one more; `render` makes /metrics of what was read; `memory` says what the
process has taken.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from bench.running import memory_of
from podgpu.cli import cluster as _loaded_as_in_production  # noqa: F401 - click, the server and the exposition count too
from podgpu.cluster.labels import LabelMemory
from podgpu.cluster.metrics import cluster_families
from podgpu.cluster.reading import ClusterReading
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend, ScrapeSettings
from podgpu.cluster.scraping.lanes import allow_connections
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import Memory, assemble
from podgpu.http_client import open_session
from podgpu.metrics.encode import encode

_SLOTS = ScrapeSettings().concurrency
_HEADERS = {"Accept": "text/plain;version=0.0.4,text/plain;q=0.5", "Accept-Encoding": "gzip"}
Taken = dict[str, float]


class Measured:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._bare: aiohttp.ClientSession | None = None
        self._packed: aiohttp.ClientSession | None = None
        self._backend: ScrapeBackend | None = None
        self._memory = Memory()
        self._labels = LabelMemory()
        self._energy = 0.0

    async def bare(self) -> Taken:
        """As anybody would download expositions: with the headers and as many at a time as the backend has."""
        if self._bare is None:
            allow_connections(3 * len(self._urls))
            self._bare = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=70))
        return await self._download(self._bare)

    async def packed(self) -> Taken:
        """The same with the backend's own session, which leaves what comes as it is: nobody could read these texts."""
        if self._packed is None:
            self._packed = open_session()
        return await self._download(self._packed)

    async def _download(self, session: aiohttp.ClientSession) -> Taken:
        queue = iter(self._urls)

        async def download() -> None:
            for url in queue:
                async with session.get(url, headers=_HEADERS, allow_redirects=False) as response:
                    await response.read()

        async def all_of_them() -> None:
            await asyncio.gather(*(download() for _ in range(_SLOTS)))

        return await _timed(all_of_them)

    async def first(self) -> Taken:
        if self._backend is not None:
            await self._backend.close()
        self._energy = 0.0
        self._backend = ScrapeBackend(FixedTargets(self._urls), settings=ScrapeSettings(deadline=60.0))
        return await self.steady()

    async def steady(self) -> Taken:
        assert self._backend is not None
        taken = await _timed(self._backend.turn)
        self._check(self._backend.reading())
        return taken

    def _check(self, reading: ClusterReading) -> None:
        """All nodes are there, and with other figures than before."""
        energy = sum(d.energy_joules or 0.0 for node in reading.nodes for d in node.devices)
        failed = [outcome.message for outcome in reading.outcomes if outcome.error]
        if failed or len(reading.nodes) != len(self._urls) or energy == self._energy:
            raise RuntimeError(f"not all was read, so the figures would mean nothing: {failed[:3]}")
        self._energy = energy

    async def render(self) -> Taken:
        assert self._backend is not None
        reading = self._backend.reading()
        settings = ViewSettings()
        began = time.process_time()
        view = assemble(reading, self._memory, settings, time.monotonic(), time.time(), whole_round=True)
        assembled = time.process_time()
        exposition = encode(cluster_families(view, self._labels))
        rendered = time.process_time()
        self._labels.next_rendering()
        devices = sum(len(node.devices) for node in reading.nodes)
        return {
            "assemble": assembled - began,
            "render": rendered - assembled,
            "bytes": len(exposition),
            "devices": devices,
        }

    async def memory(self) -> Taken:
        now = memory_of("self")
        return {"rss": now.rss, "peak": now.peak}

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()
        for session in filter(None, (self._bare, self._packed)):
            await session.close()


async def _timed(act: Callable[[], Awaitable[object]]) -> Taken:
    cpu, wall = time.process_time(), time.perf_counter()
    await act()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


async def run() -> None:
    loop = asyncio.get_running_loop()

    async def heard() -> str:
        return (await loop.run_in_executor(None, sys.stdin.readline)).strip()

    measured = Measured([f"http://127.0.0.1:{port}/metrics" for port in json.loads(await heard())])
    acts: dict[str, Callable[[], Awaitable[Any]]] = {
        name: getattr(measured, name) for name in ("bare", "packed", "first", "steady", "render", "memory")
    }
    try:
        while word := await heard():
            print(json.dumps(await acts[word]()), flush=True)
    finally:
        await measured.close()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asyncio.run(run())
