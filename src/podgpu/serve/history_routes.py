"""Answers what GPUs and pods did before: `/api/v1/history` (docs/api.md), of whoever kept it. JSON, errors too."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.errors import SourceError, UsageError
from podgpu.exposition.body import Body
from podgpu.http.aside import Turns
from podgpu.serve.answers import JSON_HEADERS, Handler, json_error, prepared

if TYPE_CHECKING:
    from podgpu.history.asking import JSON, History, Range

_NOT_KEPT = "no history is kept here"
_AGAIN_SECONDS = "15"


def history_routes(history: History | None, turns: Turns) -> list[web.RouteDef]:
    return [
        web.get("/api/v1/history", _answer(history, sparklines, turns)),
        web.get("/api/v1/history/gpus/{uuid}", _answer(history, gpu, turns)),
        web.get("/api/v1/history/pods/{namespace}/{pod}", _answer(history, pod, turns)),
    ]


def _answer(
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


async def sparklines(request: web.Request, history: History) -> bytes:
    from podgpu.history.asking import DEFAULT_POINTS, points_asked

    return await history.sparklines(points_asked(request.query.get("points", str(DEFAULT_POINTS))))


async def gpu(request: web.Request, history: History) -> JSON | web.Response:
    from podgpu.history.rows import Key

    asked, device = _range(request), Key(request.match_info["uuid"], request.query.get("instance", ""))
    found = await history.gpu(device, asked)
    return found or json_error(404, f"nothing is known of GPU {device.text} within the last day")


async def pod(request: web.Request, history: History) -> JSON | web.Response:
    asked, namespace, name = _range(request), request.match_info["namespace"], request.match_info["pod"]
    found = await history.pod(namespace, name, asked)
    return found or json_error(404, f"pod {namespace}/{name} is not known to have held a GPU in that time")


def _range(request: web.Request) -> Range:
    from podgpu.history.asking import range_asked

    return range_asked(request.query.get("range", "1h"))


def _body(found: bytes | JSON) -> tuple[Body, str]:
    from podgpu.figures.page_state import etag_of

    if not isinstance(found, bytes):
        found = json.dumps(found, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return Body.of(found), etag_of(found)
