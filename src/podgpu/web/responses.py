"""Builds HTTP responses in the format and encoding that the client accepts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping

from aiohttp import web

from podgpu.metrics.encode import CONTENT_TYPE, OPENMETRICS_TYPE, Body, Exposition

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


async def metrics_response(request: web.Request, exposition: Exposition) -> web.Response:
    """Responds with the Prometheus text format, or OpenMetrics if the client prefers it."""
    vary = "Accept, Accept-Encoding"
    if not accepts_openmetrics(",".join(request.headers.getall("Accept", ()))):
        return body_response(request, exposition, {"Content-Type": CONTENT_TYPE}, vary)
    if "openmetrics" not in vars(exposition):
        await asyncio.to_thread(lambda: exposition.openmetrics)
    body = exposition.openmetrics
    return body_response(request, body, {"Content-Type": OPENMETRICS_TYPE}, vary)


def body_response(
    request: web.Request, body: Body, headers: Mapping[str, str], vary: str = "Accept-Encoding"
) -> web.Response:
    """`headers` must contain the Content-Type. If they contain an ETag that the client has, responds with 304."""
    sent = {**headers, "Vary": vary}
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
    for coding, _, weight in _parse_accept(header):
        weights.setdefault(coding, weight > 0)
    return weights.get("gzip", weights.get("*", False))


def accepts_openmetrics(header: str) -> bool:
    """Returns True if OpenMetrics 1.0.0 is listed by name and its weight is not below that of plain text."""
    openmetrics, text, anything = 0.0, 0.0, 0.0
    for kind, parameters, weight in _parse_accept(header):
        if kind == "application/openmetrics-text" and parameters.get("version", "") in ("", "1.0.0"):
            openmetrics = max(openmetrics, weight)
        elif kind in ("text/plain", "text/*"):
            text = max(text, weight)
        elif kind == "*/*":
            anything = weight
    return openmetrics > 0 and openmetrics >= (text or anything)


def _parse_accept(header: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yields each value with its parameters and weight. The default weight is 1; an invalid weight is 0."""
    for part in header.lower().split(","):
        value, *pieces = (piece.strip() for piece in part.split(";"))
        pairs = (piece.partition("=") for piece in pieces)
        parameters = {name.strip(): text.strip().strip('"') for name, _, text in pairs}
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            weight = 0.0
        yield value, parameters, weight if 0 <= weight <= 1 else 0.0
