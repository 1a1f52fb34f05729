"""Real HTTP servers that replace exporters. Each response can be changed while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from podgpu.model import DeviceState, NodeState, encode_node


def metrics_text(number: int, util: int = 50) -> bytes:
    labels = f'gpu="0",UUID="GPU-{number}",modelName="H100",Hostname="node-{number}"'
    return f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {util}\n".encode()


def node_document(number: int, **members: object) -> bytes:
    gpu = DeviceState(
        uuid=f"GPU-{number}", index=0, model="H100", utilization_ratio=0.5, fields={"x": 1}
    )
    known = {"producer": "podgpu", "node": f"node-{number}", "devices": (gpu,), **members}
    return encode_node(NodeState(**known))  # type: ignore[arg-type]


@dataclass
class Exporter:
    """Serves `document` at /api/v1/node if there is one, and `text` at /metrics."""

    text: bytes = b""
    document: bytes | None = None
    status: int = 200
    hangs: bool = False
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the hanging of this exporter."""
    url: str = ""
    paths: list[str] = field(default_factory=list)
    peers: set[object] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        self.headers = dict(request.headers)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        if self.hangs:
            await self.release.wait()
        if request.path == "/metrics":
            return web.Response(body=self.text, status=self.status)
        if request.path == "/api/v1/node" and self.document is not None:
            return web.Response(
                body=self.document, status=self.status, content_type="application/json"
            )
        if request.path == "/api/v1/gpus/GPU-0":
            return web.json_response({"uuid": "GPU-0"})
        return web.Response(status=404)


@asynccontextmanager
async def running_exporters(*exporters: Exporter) -> AsyncIterator[list[str]]:
    """Yields the URLs of the exporters' metrics."""
    runners = []
    for exporter in exporters:
        app = web.Application()
        app.router.add_get("/{path:.*}", exporter.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        exporter.url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
    try:
        yield [exporter.url for exporter in exporters]
    finally:
        await asyncio.gather(*(runner.cleanup() for runner in runners))
