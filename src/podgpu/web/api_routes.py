"""This module owns every path below `/api/v1` (docs/api.md), of the exporter and of the cluster view: JSON, errors too.

Figures are made and compressed in other threads: no scrape waits for somebody who looks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.errors import SourceError, UsageError
from podgpu.metrics.body import Body, etag_of
from podgpu.web.answers import JSON_HEADERS, PAGE_HEADERS, Handler, json_error, prepared
from podgpu.web.aside import Turns

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.cluster.loop import Cluster
    from podgpu.figures.as_json import PageState
    from podgpu.figures.waste import WasteStatement
    from podgpu.figures.waste_rows import By, Format, Source
    from podgpu.history.asking import History, Range

    TellWaste = Callable[[], tuple[WasteStatement, Source]]
    """What was counted until now, and what has to be said of it."""

JSON = dict[str, Any]
LONGEST_ASK = 3.0
_MOST_ASKED = 8
"""Exporters that are asked at the same time, however many look."""
Complete = Callable[[str, JSON], Awaitable[JSON]]
"""Given the UUID and the answer so far, what there is to add."""
_NOT_KEPT = "no history is kept here"
_AGAIN_SECONDS = "15"
_CSV_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/csv; charset=utf-8"}


def api_routes(
    latest: Callable[[], PageState],
    turns: Turns,
    history: History | None = None,
    wasted: TellWaste | None = None,
) -> list[web.RouteDef]:
    """All but a GPU's own view, which an exporter and the cluster complete differently. Behind all others: it answers
    whatever else is asked below `/api`."""
    return [
        web.get("/api/v1/view", _view(latest, turns)),
        web.get("/api/v1/pods/{namespace}/{pod}", _pod(latest, turns)),
        *_history_routes(history, turns),
        *([] if wasted is None else [web.get("/api/v1/waste", _waste(wasted, turns))]),
        web.route("*", "/api/{rest:.*}", _nothing_here),
    ]


def turns_to_look() -> Turns:
    """For all who look at one server. More than one: who has much made keeps nobody from the page itself."""
    return Turns(2)


# What is now


def _view(latest: Callable[[], PageState], turns: Turns) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        state = await turns.do(latest)
        return prepared(request, state.view, {**JSON_HEADERS, "ETag": state.etag})

    return handle


def _pod(latest: Callable[[], PageState], turns: Turns) -> Handler:
    def find(namespace: str, name: str) -> Body | None:
        from podgpu.figures.as_json import pod_json

        found = pod_json(latest().picture, namespace, name)
        return None if found is None else Body.of(json.dumps(found, ensure_ascii=False).encode())

    async def handle(request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        found = await turns.do(find, namespace, name)
        if found is None:
            return json_error(404, f"no GPU is held by pod {namespace}/{name}")
        return prepared(request, found, JSON_HEADERS)

    return handle


# A GPU's own view: of the exporter from what it read, of the cluster with what the GPU's exporter adds


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


# What was before


def _history_routes(history: History | None, turns: Turns) -> list[web.RouteDef]:
    return [
        web.get("/api/v1/history", _history(history, _sparklines, turns)),
        web.get("/api/v1/history/gpus/{uuid}", _history(history, _history_of_gpu, turns)),
        web.get("/api/v1/history/pods/{namespace}/{pod}", _history(history, _history_of_pod, turns)),
    ]


def _history(
    history: History | None,
    find: Callable[[web.Request, History], Awaitable[bytes | JSON | web.Response]],
    turns: Turns,
) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        if history is None:
            return json_error(404, _NOT_KEPT)
        try:
            found = await find(request, history)
        except UsageError as error:
            return json_error(400, str(error))
        except SourceError as error:
            return json_error(503, f"history cannot be had: {error}", **{"Retry-After": _AGAIN_SECONDS})
        if isinstance(found, web.Response):
            return found
        body, etag = await turns.do(_body, found)
        return prepared(request, body, {**JSON_HEADERS, "ETag": etag})

    return handle


async def _sparklines(request: web.Request, history: History) -> bytes:
    from podgpu.history.asking import DEFAULT_POINTS, points_asked

    return await history.sparklines(points_asked(request.query.get("points", str(DEFAULT_POINTS))))


async def _history_of_gpu(request: web.Request, history: History) -> JSON | web.Response:
    from podgpu.history.rows import Key

    asked, device = _range(request), Key(request.match_info["uuid"], request.query.get("instance", ""))
    found = await history.gpu(device, asked)
    return found or json_error(404, f"nothing is known of GPU {device.text} within the last day")


async def _history_of_pod(request: web.Request, history: History) -> JSON | web.Response:
    asked, namespace, name = _range(request), request.match_info["namespace"], request.match_info["pod"]
    found = await history.pod(namespace, name, asked)
    return found or json_error(404, f"pod {namespace}/{name} is not known to have held a GPU in that time")


def _range(request: web.Request) -> Range:
    from podgpu.history.asking import range_asked

    return range_asked(request.query.get("range", "1h"))


def _body(found: bytes | JSON) -> tuple[Body, str]:
    if not isinstance(found, bytes):
        found = json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return Body.of(found), etag_of(found)


# What was held and idle, by pod, owner or namespace


def _waste(wasted: TellWaste, turns: Turns) -> Handler:
    def made(by: By, form: Format) -> tuple[Body, dict[str, str]]:
        from podgpu.figures.waste_rows import csv_name, waste_csv, waste_json

        statement, source = wasted()
        if form == "json":
            content, headers = waste_json(statement, by, source), JSON_HEADERS
        else:
            attached = f'attachment; filename="{csv_name(by, source)}"'
            content, headers = waste_csv(statement, by, source), {**_CSV_HEADERS, "Content-Disposition": attached}
        return Body.of(content), {**headers, "ETag": etag_of(content)}

    async def handle(request: web.Request) -> web.Response:
        from podgpu.figures.waste_rows import waste_asked

        try:
            by, form = waste_asked(request.query)
        except UsageError as error:
            return json_error(400, str(error))
        body, headers = await turns.do(made, by, form)
        return prepared(request, body, headers)

    return handle


# All else


async def _nothing_here(request: web.Request) -> web.Response:
    """For scripts: what is wrong is JSON too."""
    if request.method not in ("GET", "HEAD"):
        return json_error(405, f"{request.method} {request.path}: only GET and HEAD", Allow="GET, HEAD")
    there = "/api/v1/view, /api/v1/gpus/UUID, /api/v1/pods/NAMESPACE/POD, /api/v1/history and /api/v1/waste"
    return json_error(404, f"no such path: {request.path}; there are {there}")
