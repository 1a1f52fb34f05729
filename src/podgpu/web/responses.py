"""Builds and sends HTTP responses: metrics, JSON and probes. Compresses them if possible."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.metrics.encode import CONTENT_TYPE, NO_METRICS, Body, Family, encode
from podgpu.metrics.protobuf import PROTOBUF_TYPE, prefers_protobuf

if TYPE_CHECKING:
    from podgpu.node.agent.agent import Agent
    from podgpu.node.agent.publish import RenderedText

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Probe = Callable[[], tuple[bool, str]]
"""Returns whether the probe succeeds, and the text of the response."""
_SLOT_SECONDS = 2.0  # much less than the 10 s for which Prometheus waits
_PROBE_THREAD = web.AppKey("probe_thread", ThreadPoolExecutor)
_SCRAPE_THREAD = web.AppKey("scrape_thread", ThreadPoolExecutor)

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
METRICS_HEADERS = {"Content-Type": CONTENT_TYPE}
_REFUSED = re.compile(r"q\s*=\s*0(\.0*)?")  # in Accept-Encoding
_EITHER_FORMAT = {"Vary": "Accept, Accept-Encoding"}
JSON_HEADERS = {**PAGE_HEADERS, "Content-Type": "application/json; charset=utf-8"}


def describe_health(problems: Sequence[str]) -> str:
    """Returns the text of a liveness probe that succeeds."""
    if not problems:
        return "OK\n"
    return "\n".join(["degraded", *problems, ""])


async def open_own_threads(app: web.Application) -> AsyncIterator[None]:
    """Opens the threads of probes and scrapes, and ends them with the application.

    Both may build the document. They have their own threads, because those of the pool may be busy
    with pages: the kubelet restarts a container that answers late, and a late scrape is a gap.
    """
    app[_PROBE_THREAD] = ThreadPoolExecutor(1, "probes")
    app[_SCRAPE_THREAD] = ThreadPoolExecutor(1, "scrapes")
    yield
    app[_PROBE_THREAD].shutdown(wait=False)
    app[_SCRAPE_THREAD].shutdown(wait=False)


async def render_scrape(request: web.Request, render: Callable[[], Body]) -> Body:
    """Renders metrics in the thread of the scrapes."""
    thread = request.app[_SCRAPE_THREAD]
    return await asyncio.get_running_loop().run_in_executor(thread, render)


def probe_routes(is_live: Probe, is_ready: Probe) -> list[web.RouteDef]:
    def handler(probe: Probe) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            thread = request.app[_PROBE_THREAD]
            succeeds, text = await asyncio.get_running_loop().run_in_executor(thread, probe)
            return web.Response(status=200 if succeeds else 503, text=text)

        return handle

    return [
        web.get("/health", handler(is_live)),
        web.get("/livez", handler(is_live)),
        web.get("/ready", handler(is_ready)),
    ]


def metrics_route(make_families: Callable[[], Iterable[Family]]) -> web.RouteDef:
    async def handle(request: web.Request) -> web.Response:
        return body_response(request, Body(encode(make_families())), METRICS_HEADERS)

    return web.get("/metrics", handle)


def serve_metrics(agent: Agent) -> Handler:
    """Serves text, or protobuf if the scraper prefers it."""
    text = serve_text(agent, "fresh", "stale", _EITHER_FORMAT | METRICS_HEADERS)
    protobuf_headers = _EITHER_FORMAT | {"Content-Type": PROTOBUF_TYPE}
    protobuf = serve_text(agent, "fresh_protobuf", "stale_protobuf", protobuf_headers)

    async def handle(request: web.Request) -> web.StreamResponse:
        chosen = protobuf if prefers_protobuf(request.headers.get("Accept", "")) else text
        return await chosen(request)

    return handle


def serve_text(
    agent: Agent,
    fresh: RenderedText,
    stale: RenderedText | None,
    headers: Mapping[str, str] = METRICS_HEADERS,
) -> Handler:
    """Returns a handler that renders each snapshot once, in a thread."""

    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        text = fresh if agent.is_fresh(published) else stale
        if text is None:
            body = NO_METRICS
        elif text in published.rendered:
            body = published.rendered[text]
        else:
            body = await render_scrape(request, partial(published.render, text))

        return body_response(request, body, headers)

    return handle


def limit_concurrency(limit: int, handler: Handler) -> Handler:
    """Responds with 503, as dcgm-exporter does, if `limit` requests are running, but not at once.

    Others wait with a scrape until new values are rendered, and are then answered immediately.
    """
    slots = asyncio.Semaphore(limit)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(_SLOT_SECONDS):
                await slots.acquire()
        except TimeoutError:
            return web.Response(status=503, text="scrape concurrency limit reached\n")

        try:
            return await send_response(request, await handler(request))
        finally:
            slots.release()

    return handle


def body_response(request: web.Request, body: Body, headers: Mapping[str, str]) -> web.Response:
    """Answers with 304 if the client already has the ETag in `headers`.

    `headers` must contain the Content-Type.
    """
    sent = {"Vary": "Accept-Encoding", **headers}
    # The header may list several ETags, weak or not. Ours is quoted, so it is in no other one.
    cached_etags = request.headers.get("If-None-Match", "")
    etag = sent.get("ETag")
    if etag is not None and etag.removeprefix("W/") in cached_etags:
        del sent["Content-Type"]
        return web.Response(status=304, headers=sent)
    if accepts_gzip(request.headers.get("Accept-Encoding", "")):
        sent["Content-Encoding"] = "gzip"
        return web.Response(body=body.zipped, headers=sent)

    return web.Response(body=body.plain, headers=sent)


def json_error(
    status: int,
    message: str,
    facts: Mapping[str, str | float] = {},
    headers: Mapping[str, str] = {},
) -> web.Response:
    """`facts`: further fields, for programs. The message is for people."""
    body = json.dumps({"error": message, **facts}).encode()
    return web.Response(status=status, body=body, headers={**JSON_HEADERS, **headers})


def accepts_gzip(header: str) -> bool:
    """Returns True if the Accept-Encoding header lists gzip, and does not refuse it with q=0.

    Ignores other quality values, as Prometheus' Go client does.
    """
    for part in header.lower().split(","):
        encoding, *parameters = [word.strip() for word in part.split(";")]
        if encoding == "gzip":
            return not any(_REFUSED.fullmatch(parameter) for parameter in parameters)
    return False


async def send_response(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Sends the whole response before it returns.

    So slow clients count towards the limit of running scrapes.
    """
    with suppress(ConnectionError):  # the client has closed the connection
        await response.prepare(request)
        await response.write_eof()
    return response
