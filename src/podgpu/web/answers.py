"""This module answers with prepared bytes: in the format and encoding asked for, or not at all when the asker has them
already."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache

from aiohttp import web

from podgpu.metrics.encode import CONTENT_TYPE, OPENMETRICS_TYPE, Body, Exposition

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
}
JSON_HEADERS = {**PAGE_HEADERS, "Content-Type": "application/json; charset=utf-8"}

_OPENMETRICS = "application/openmetrics-text"
_VERSIONS = ("", "1.0.0")
_LONG = 512 * 1024


def probe(judge: Callable[[], tuple[bool, str]]) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        good, text = judge()
        return web.Response(status=200 if good else 503, text=text)

    return handle


async def exposition(request: web.Request, answer: Exposition) -> web.Response:
    """Metrics, as text unless OpenMetrics is asked for. Whoever asks for that first has it made.

    Here, unless it is long: that takes a millisecond, and other threads may be busy with those who look at the page.
    """
    if not accepts_openmetrics(",".join(request.headers.getall("Accept", ()))):
        return prepared(request, answer.text, {"Content-Type": CONTENT_TYPE}, vary="Accept, Accept-Encoding")
    body = answer.openmetrics_if_made
    if body is None:
        is_long = len(answer.plain) > _LONG
        body = await asyncio.to_thread(answer.openmetrics) if is_long else answer.openmetrics()
    return prepared(request, body, {"Content-Type": OPENMETRICS_TYPE}, vary="Accept, Accept-Encoding")


def prepared(
    request: web.Request, body: Body, headers: Mapping[str, str], vary: str = "Accept-Encoding"
) -> web.Response:
    """`headers` with the Content-Type. With an ETag among them, whoever knows it is told that nothing changed."""
    answer_headers = {**headers, "Vary": vary}
    if "ETag" in answer_headers and knows(request, answer_headers["ETag"]):
        return web.Response(status=304, headers={k: v for k, v in answer_headers.items() if k != "Content-Type"})
    if accepts_gzip(request.headers.get("Accept-Encoding", "")):
        answer_headers["Content-Encoding"] = "gzip"
        return web.Response(body=body.zipped, headers=answer_headers)
    return web.Response(body=body.plain, headers=answer_headers)


def json_error(status: int, message: str, **headers: str) -> web.Response:
    """For scripts: what is wrong is JSON too."""
    body = json.dumps({"error": message}).encode()
    return web.Response(status=status, body=body, headers={**JSON_HEADERS, **headers})


def knows(request: web.Request, etag: str) -> bool:
    """By RFC 9110: the weak comparison, * for any."""
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
    return "*" in known or etag.removeprefix("W/") in known


@lru_cache(maxsize=64)
def accepts_gzip(header: str) -> bool:
    """By RFC 9110: gzip's own weight counts, else that of *; 0 means no."""
    weights: dict[str, bool] = {}
    for coding, _, weight in _weighted(header):
        weights.setdefault(coding, weight > 0)
    return weights.get("gzip", weights.get("*", False))


@lru_cache(maxsize=64)
def accepts_openmetrics(header: str) -> bool:
    """It is asked for by name, in the version we write, and no less than text is. A wildcard does not ask for it."""
    asked, text, anything = 0.0, 0.0, 0.0
    for kind, parameters, weight in _weighted(header):
        if kind == _OPENMETRICS and parameters.get("version", "") in _VERSIONS:
            asked = max(asked, weight)
        elif kind in ("text/plain", "text/*"):
            text = max(text, weight)
        elif kind == "*/*":
            anything = weight
    return asked > 0 and asked >= (text or anything)


def _weighted(header: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Each part of an Accept header, with its parameters and its weight: 1 unless said, 0 where it is no number."""
    for part in header.lower().split(","):
        what, *pieces = (piece.strip() for piece in part.split(";"))
        named = (piece.partition("=") for piece in pieces)
        parameters = {name.strip(): value.strip().strip('"') for name, _, value in named}
        try:
            weight = float(parameters.get("q", "1"))
        except ValueError:
            weight = 0.0
        yield what, parameters, weight if 0 <= weight <= 1 else 0.0
