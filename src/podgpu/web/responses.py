"""Builds HTTP responses in the encoding that the client accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from podgpu.metrics.encode import CONTENT_TYPE, Body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Probe = Callable[[], tuple[bool, str]]
"""Returns whether the probe succeeds, and the text of the response."""

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
JSON_HEADERS = {**PAGE_HEADERS, "Content-Type": "application/json; charset=utf-8"}


def probe_routes(is_live: Probe, is_ready: Probe) -> list[web.RouteDef]:
    def handler(probe: Probe) -> Handler:
        async def handle(_request: web.Request) -> web.Response:
            good, text = probe()
            return web.Response(status=200 if good else 503, text=text)

        return handle

    return [
        web.get("/health", handler(is_live)),
        web.get("/livez", handler(is_live)),
        web.get("/ready", handler(is_ready)),
    ]


def metrics_response(request: web.Request, body: Body) -> web.Response:
    return body_response(request, body, {"Content-Type": CONTENT_TYPE})


def body_response(request: web.Request, body: Body, headers: Mapping[str, str]) -> web.Response:
    """`headers` must contain the Content-Type. If they contain an ETag that the client has, responds with 304."""
    sent = {**headers, "Vary": "Accept-Encoding"}
    if "ETag" in sent and _has_etag(request, sent["ETag"]):
        return web.Response(status=304, headers={k: v for k, v in sent.items() if k != "Content-Type"})
    if accepts_gzip(request.headers.get("Accept-Encoding", "")):
        return web.Response(body=body.zipped, headers={**sent, "Content-Encoding": "gzip"})
    return web.Response(body=body.plain, headers=sent)


def json_error(status: int, message: str, **headers: str) -> web.Response:
    body = json.dumps({"error": message}).encode()
    return web.Response(status=status, body=body, headers={**JSON_HEADERS, **headers})


def _has_etag(request: web.Request, etag: str) -> bool:
    """Uses the weak comparison of RFC 9110; * matches every ETag."""
    tags = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
    return "*" in tags or etag.removeprefix("W/") in tags


def accepts_gzip(header: str) -> bool:
    """Implements RFC 9110: uses the weight of gzip or, if gzip is not listed, the weight of *. Weight 0 means no."""
    weights: dict[str, bool] = {}
    for part in header.lower().split(","):
        coding, *parameters = (piece.strip() for piece in part.split(";"))
        is_refused = any(re.fullmatch(r"q\s*=\s*0(\.0*)?", parameter) for parameter in parameters)
        weights.setdefault(coding, not is_refused)
    return weights.get("gzip", weights.get("*", False))
