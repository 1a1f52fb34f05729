"""Serving: CPU of the server for one scrape of /metrics, compared with a constant response of the
same size.

The server runs in its own thread. The constant is served by a minimal aiohttp handler.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from aiohttp import web

from bench.figures import Figure
from bench.node import simulated_node
from podgpu.metrics.encode import CONTENT_TYPE
from podgpu.node.agent.agent import Agent
from podgpu.web.app import Address, Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import application

MAX_RATIO = 1.5
_CODINGS = {"plain": "identity", "gzip": "gzip"}


class Server:
    def __init__(self, agent: Agent) -> None:
        self.port = 0
        self._app = application(agent)
        self._app.add_routes(_constants(agent))
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        async with listening(
            Listener(self._app, Address("127.0.0.1", 0)), ConnectionLimits()
        ) as bound:
            self.port = bound.port
            self._started.set()
            await self._stop.wait()

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def cpu_seconds(self) -> float:
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))


def _constants(agent: Agent) -> list[web.RouteDef]:
    body = agent.published.fresh
    headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}

    async def plain(_request: web.Request) -> web.Response:
        return web.Response(body=body.plain, headers=headers)

    async def zipped(_request: web.Request) -> web.Response:
        return web.Response(body=body.zipped, headers={**headers, "Content-Encoding": "gzip"})

    return [web.get("/constant/plain", plain), web.get("/constant/gzip", zipped)]


def measure(blocks: int = 200, requests: int = 20) -> list[Figure]:
    figures = []
    with simulated_node() as node, _running(node.agent) as server:
        for name in _CODINGS:
            scrape, constant = _compare(server, name, blocks, requests)
            figures += [
                Figure(
                    f"scrape over constant, {name}: CPU", scrape / constant, "x", at_most=MAX_RATIO
                ),
                Figure(f"  one scrape, {name}: CPU", scrape * 1e6, "us"),
            ]
        figures.append(Figure("  size, plain", len(node.agent.published.fresh.plain) / 1024, "KiB"))
    return figures


@contextmanager
def _running(agent: Agent) -> Iterator[Server]:
    server = Server(agent)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _compare(server: Server, name: str, blocks: int, requests: int) -> tuple[float, float]:
    """Returns the median CPU seconds of a scrape and of the constant. Blocks of requests
    alternate.
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port)

    def get(path: str) -> bytes:
        connection.request("GET", path, headers={"Accept-Encoding": _CODINGS[name]})
        return connection.getresponse().read()

    def block(path: str) -> float:
        started = server.cpu_seconds()
        for _ in range(requests):
            get(path)
        time.sleep(0.002)  # the server finishes its work after the last byte
        return (server.cpu_seconds() - started) / requests

    constant = f"/constant/{name}"
    if get("/metrics") != get(constant):
        raise RuntimeError("the constant differs from /metrics")
    pairs = [(block("/metrics"), block(constant)) for _ in range(blocks)]
    connection.close()
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
