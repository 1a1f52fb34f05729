"""Serves a GPU's own view, `/api/v1/gpus/UUID`: of the exporter from what it read, of the cluster with what the GPU's
exporter adds when somebody looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.errors import SourceError
from podgpu.exposition.body import Body
from podgpu.http.aside import Turns
from podgpu.serve.answers import JSON_HEADERS, Handler, json_error, prepared

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.cluster.loop import Cluster
    from podgpu.figures.page_state import PageState

JSON = dict[str, Any]
LONGEST_ASK = 3.0
_MOST_ASKED = 8
"""Exporters that are asked at the same time, however many look."""
Complete = Callable[[str, JSON], Awaitable[JSON]]
"""Given the UUID and the answer so far, what there is to add."""


def node_gpu(agent: Agent, latest: Callable[[], PageState], turns: Turns) -> web.RouteDef:
    async def complete(uuid: str, _found: JSON) -> JSON:
        from podgpu.figures.gpu_view import details_json

        return details_json(agent.published.snapshot, uuid, *agent.details(uuid))

    return web.get("/api/v1/gpus/{uuid}", _gpu(latest, complete, turns))


def cluster_gpu(cluster: Cluster, turns: Turns) -> web.RouteDef:
    asking = asyncio.Semaphore(_MOST_ASKED)

    async def complete(uuid: str, found: JSON) -> JSON:
        from podgpu.figures.gpu_view import parse_details

        target = next((node.target for node in cluster.published.view.nodes if node.name == found["node"]), "")
        try:
            async with asyncio.timeout(LONGEST_ASK), asking:
                answer = await cluster.ask_exporter(target, ("api", "v1", "gpus", uuid))
            return await turns.do(parse_details, answer)
        except TimeoutError:
            why = SourceError("deadline", f"its exporter did not answer within {LONGEST_ASK:g} s")
        except SourceError as error:
            why = error
        return {"sources": [{"source": "exporter", "ok": False, "error": why.reason, "message": str(why)}]}

    return web.get("/api/v1/gpus/{uuid}", _gpu(cluster.page, complete, turns))


def _gpu(latest: Callable[[], PageState], complete: Complete, turns: Turns) -> Handler:
    def find(uuid: str) -> JSON | None:
        from podgpu.figures.gpu_view import gpu_json

        return gpu_json(latest().picture, uuid)

    def made(answer: JSON) -> Body:
        return Body.of(json.dumps(answer, ensure_ascii=False).encode())

    async def handle(request: web.Request) -> web.Response:
        uuid = request.match_info["uuid"]
        found = await turns.do(find, uuid)
        if found is None:
            return json_error(404, f"there is no GPU {uuid[:64]!r}")
        body = await turns.do(made, {**await complete(uuid, found), **found})
        return prepared(request, body, JSON_HEADERS)

    return handle
