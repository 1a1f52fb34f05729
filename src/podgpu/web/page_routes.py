"""The web page and the paths below `/api/v1` (docs/api.md), for the exporter and the cluster view.

Responses are built and compressed in threads, so that they do not delay scrapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.fleet.read.pages import GpuQuery, parse_gpu_query
from podgpu.fleet.round import PublishedState
from podgpu.fleet.view import GpuResponse, make_gpu_answer, make_pod
from podgpu.metrics.encode import Body, etag_of
from podgpu.model import PodName
from podgpu.past.bill import Order, encode_range_csv, parse_range_query
from podgpu.past.events import parse_events_query
from podgpu.past.interface import Past
from podgpu.past.sqlite import parse_range, parse_time
from podgpu.web.responses import JSON_HEADERS, PAGE_HEADERS, Handler, body_response, json_error

JsonObject = dict[str, Any]
Complete = Callable[[GpuResponse], Awaitable[GpuResponse]]
"""Adds details to the answer about a GPU. Only the GPU's exporter has these details."""
_HTML_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/html; charset=utf-8"}
_CSV_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/csv; charset=utf-8"}
_ASSET_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_FOLDER = Path(__file__).parent / "page"


def page_routes(
    latest: Callable[[], PublishedState],
    complete_gpu: Complete,
    links: Sequence[str],
    past: Past | None = None,
) -> list[web.RouteDef]:
    """Returns the routes of the page and the API.

    Add them last: they answer all other `/api` paths with 404. `latest` is called in a thread.
    `links` are other paths of the server, shown at the bottom of the page. In a large cluster,
    `latest` has only totals. Then `past` finds the GPUs that match a query.
    """
    assets = {file.name: file for file in _FOLDER.iterdir() if file.suffix in _ASSET_TYPES}

    async def index(request: web.Request) -> web.Response:
        has_events = past is None or past.has_events
        return await _response(request, partial(_read_index, links, has_events), _HTML_HEADERS)

    async def asset(request: web.Request) -> web.Response:
        file = assets.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound()
        headers = {**PAGE_HEADERS, "Content-Type": _ASSET_TYPES[file.suffix]}
        return await _response(request, file.read_bytes, headers)

    async def find(query: GpuQuery | None) -> PublishedState:
        if query is None or query.at is None:
            published = await asyncio.to_thread(latest)
            # If the state has all nodes, the page selects GPUs itself.
            if query is None or past is None or published.state.fleet is None:
                return published
        elif past is None:
            raise UsageError("this server has no history")
        return await past.find(query)

    async def view(request: web.Request) -> web.Response:
        parse_time(request.query, "at", time.time())  # rejects the future
        published = await find(parse_gpu_query(request.query))
        body, etag = await asyncio.to_thread(lambda: published.view_json)
        return body_response(request, body, {**JSON_HEADERS, "ETag": etag})

    async def pod(request: web.Request) -> web.Response:
        namespace, name = _parse_pod(request)
        cluster = request.query.get("cluster")
        published = await find(GpuQuery(cluster=cluster or "", ns=namespace, pod=name))
        answer = await asyncio.to_thread(
            lambda: make_pod(published.state, published.view, namespace, name, cluster)
        )
        return await _json_response(request, answer, f"pod {namespace}/{name} holds no GPU")

    async def gpu(request: web.Request) -> web.Response:
        uuid = request.match_info["uuid"]
        published = await find(GpuQuery(gpu=uuid))
        answer = await asyncio.to_thread(lambda: make_gpu_answer(published.view, uuid))
        if answer is not None:
            answer = await complete_gpu(answer)
        return await _json_response(request, answer, f"GPU {uuid[:64]!r} does not exist")

    routes = [
        web.get("/", index),
        web.get("/page/{name}", asset),
        _api_route("/api/v1/view", view),
        _api_route("/api/v1/gpus/{uuid}", gpu),
        _api_route("/api/v1/pods/{namespace}/{pod}", pod),
    ]
    if past is not None:
        routes += _history_routes(past, latest)
        routes += _range_routes(past)
        if past.has_events:
            routes += _event_routes(past)
    routes.append(web.get("/api/{rest:.*}", _unknown_path))
    return routes


def _read_index(links: Sequence[str], has_events: bool) -> bytes:
    anchors = "".join(f'<a href="{link}">{link}</a>' for link in links)
    text = (_FOLDER / "index.html").read_text(encoding="utf-8")
    if not has_events:
        text = text.replace('id="tab-events"', 'id="tab-events" hidden')
    return text.replace("<!--links-->", anchors).replace("<!--version-->", __version__).encode()


def _parse_pod(request: web.Request) -> PodName:
    return request.match_info["namespace"], request.match_info["pod"]


async def _json_response(
    request: web.Request, answer: msgspec.Struct | JsonObject | None, missing: str = ""
) -> web.Response:
    """Encodes the answer. If it is None, the response is a 404 with the message `missing`."""
    if answer is None:
        return json_error(404, missing)
    return await _response(request, partial(msgspec.json.encode, answer), JSON_HEADERS)


async def _response(
    request: web.Request, make: Callable[[], bytes], headers: Mapping[str, str]
) -> web.Response:
    """Calls `make` in a thread and sends its result. `headers` must contain the Content-Type."""

    def compress() -> tuple[Body, str]:
        content = make()
        return Body(content), etag_of(content)

    body, etag = await asyncio.to_thread(compress)
    return body_response(request, body, {**headers, "ETag": etag})


def _api_route(path: str, handler: Handler) -> web.RouteDef:
    """Answers with 400 if the query is invalid, or with 503 if the data cannot be read."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except UsageError as error:
            return json_error(400, str(error))
        except SourceError as error:
            return json_error(503, f"the data cannot be read: {error}", **{"Retry-After": "15"})

    return web.get(path, handle)


# History


def _history_routes(past: Past, latest: Callable[[], PublishedState]) -> list[web.RouteDef]:
    async def sparklines(request: web.Request) -> web.StreamResponse:
        published = await asyncio.to_thread(latest)
        if published.state.fleet is not None:
            return json_error(404, "too many GPUs for sparklines")
        return await _json_response(request, await past.sparklines())

    async def gpu(request: web.Request) -> web.StreamResponse:
        uuid = request.match_info["uuid"]
        instance = request.query.get("instance", "")
        answer = await past.gpu(uuid, instance, parse_range(request.query.get("range", "1h")))

        name = uuid[:64]
        if instance:
            name += f"/{instance[:16]}"
        return await _json_response(request, answer, f"there is no history of GPU {name}")

    async def pod(request: web.Request) -> web.StreamResponse:
        namespace, name = _parse_pod(request)
        seconds = parse_range(request.query.get("range", "1h"))
        answer = await past.pod(namespace, name, seconds, request.query.get("cluster"))
        missing = f"there is no record that pod {namespace}/{name} held a GPU in this time range"
        return await _json_response(request, answer, missing)

    return [
        _api_route("/api/v1/history", sparklines),
        _api_route("/api/v1/history/gpus/{uuid}", gpu),
        _api_route("/api/v1/history/pods/{namespace}/{pod}", pod),
    ]


def _range_routes(past: Past) -> list[web.RouteDef]:
    def ordered_by(order: Order, file_name: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            parse_time(request.query, "from", time.time())  # rejects the future
            query = parse_range_query(request.query, order)
            answer = await past.range(query)
            if not query.is_csv:
                return await _json_response(request, answer)

            suffix = "-SIMULATED" if answer.simulated else ""
            attachment = f'attachment; filename="{file_name}{suffix}.csv"'
            headers = {**_CSV_HEADERS, "Content-Disposition": attachment}
            return await _response(request, partial(encode_range_csv, answer), headers)

        return handle

    return [
        _api_route("/api/v1/range", ordered_by("cost", "podgpu-cost")),
        _api_route("/api/v1/waste", ordered_by("wasted", "podgpu-waste")),
    ]


def _event_routes(past: Past) -> list[web.RouteDef]:
    async def events(request: web.Request) -> web.StreamResponse:
        return await _json_response(request, await past.events(parse_events_query(request.query)))

    async def summary(request: web.Request) -> web.StreamResponse:
        namespace, name = _parse_pod(request)
        answer = await past.summary(namespace, name)
        missing = f"there is no record that pod {namespace}/{name} held a GPU"
        return await _json_response(request, answer, missing)

    return [
        _api_route("/api/v1/events", events),
        _api_route("/api/v1/summary/{namespace}/{pod}", summary),
    ]


async def _unknown_path(request: web.Request) -> web.Response:
    if request.path.startswith(("/api/v1/events", "/api/v1/summary/")):
        message = (
            "podgpu records no events and no summaries with --prometheus; use the alerts instead"
        )
        return json_error(404, message)
    return json_error(404, f"there is no path {request.path}; docs/api.md lists the paths")
