"""What /health of `podgpu cluster` says, over real HTTP, of exporters that fail and nodes that are old."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from podgpu.cluster.loop import Cluster
from podgpu.cluster.publish import Publisher
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend
from podgpu.cluster.settings import ViewSettings
from podgpu.web.cluster_app import cluster_application
from tests.cluster.test_scrape import Ticking, exporters, exposition_of


@pytest.mark.fault(
    "an exporter fails, and its node's figures grow old",
    "/health of podgpu cluster stays 200 and names the exporter and the node",
)
def test_health_names_nodes_that_are_old_or_fail() -> None:
    async def go() -> list[tuple[int, list[str]]]:
        time = Ticking()
        cluster = Cluster(ScrapeBackend, Publisher(ViewSettings(interval=15.0, stale_after=45.0)), time.clock())  # type: ignore[arg-type]
        said: list[tuple[int, list[str]]] = []
        async with exporters(exposition_of(0), exposition_of(1)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), clock=time.clock())
            runner = web.AppRunner(cluster_application(cluster))
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/health"
            async with aiohttp.ClientSession() as session:

                async def look() -> None:
                    await cluster.round(backend)
                    async with session.get(url) as answer:
                        said.append((answer.status, (await answer.text()).splitlines()))

                await look()
                fleet.status[1] = 500
                time.now += 15.0
                await look()
                time.now += 45.0
                await look()
                fleet.status.clear()
                time.now += 15.0
                await look()
            await backend.close()
            await runner.cleanup()
            well, fails, old, again = said
            assert well == again == (200, ["OK"])
            assert fails == (200, ["degraded", f"{fleet.urls[1]} answers 500 Internal Server Error"])
            gone, *rest = old[1][1:]
            assert gone.startswith("node node-1 does not answer; 1 GPU went with it: ")
            assert rest == ["node-1: old, its figures are of 60 s ago", fails[1][1]]
        return said

    assert asyncio.run(go())
