"""What each path answers. `/metrics` hands out bytes that are already there: no driver, no socket, no rendering."""

from __future__ import annotations

import asyncio
import html
import ipaddress
import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from podgpu import __version__
from podgpu.agent import health
from podgpu.agent.loop import Agent
from podgpu.exposition.body import EMPTY, Body
from podgpu.exposition.text import CONTENT_TYPE

DEFAULT_RELEASE_SECONDS = 60.0
MOST_RELEASE_SECONDS = 3600.0
Handler = Callable[[web.Request], Awaitable[web.Response]]


def routes(agent: Agent) -> list[web.RouteDef]:
    theirs = [web.get("/metric", gpu_manager_metrics(agent))] if agent.settings.policy.gpu_manager else []
    return [
        web.get("/metrics", metrics(agent)),
        *theirs,
        *probe_routes(agent),
        web.post("/-/release", release(agent)),
        web.get("/", index(agent)),
    ]


def probe_routes(agent: Agent) -> list[web.RouteDef]:
    """Also at an address of their own, where a web config protects the rest."""
    return [
        web.get("/health", probe(lambda: health.live(agent))),
        web.get("/livez", probe(lambda: health.live(agent))),
        web.get("/ready", probe(lambda: health.ready(agent))),
    ]


def gpu_manager_routes(agent: Agent) -> list[web.RouteDef]:
    """Of the second address: gpu-manager's own path, and the one that Prometheus asks for unless told otherwise."""
    return [web.get(path, gpu_manager_metrics(agent)) for path in ("/metric", "/metrics")]


def metrics(agent: Agent) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        return _exposition(request, published.fresh if agent.is_fresh(published) else published.stale)

    return handle


def gpu_manager_metrics(agent: Agent) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        return _exposition(request, published.gpu_manager if agent.is_fresh(published) else EMPTY)

    return handle


def _exposition(request: web.Request, body: Body) -> web.Response:
    headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
    if _accepts_gzip(request.headers.get("Accept-Encoding", "")):
        headers["Content-Encoding"] = "gzip"
        return web.Response(body=body.zipped, headers=headers)
    return web.Response(body=body.plain, headers=headers)


def _accepts_gzip(header: str) -> bool:
    """By RFC 9110: gzip's own weight counts, else that of *; 0 means no."""
    weights: dict[str, bool] = {}
    for part in header.lower().split(","):
        coding, *parameters = (piece.strip() for piece in part.split(";"))
        weights.setdefault(coding, not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", p) for p in parameters))
    return weights.get("gzip", weights.get("*", False))


def probe(judge: Callable[[], tuple[bool, str]]) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        good, text = judge()
        return web.Response(status=200 if good else 503, text=text)

    return handle


def release(agent: Agent) -> Handler:
    """Lets go of the driver so that it can be unloaded. Only from this machine."""

    async def handle(request: web.Request) -> web.Response:
        if not _is_loopback(request.remote):
            return web.Response(status=403, text="only from this machine (127.0.0.1 or ::1)\n")
        asked = request.query.get("seconds", str(DEFAULT_RELEASE_SECONDS))
        try:
            seconds = float(asked)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MOST_RELEASE_SECONDS:
            limits = f"a number above 0, up to {MOST_RELEASE_SECONDS:.0f}"
            return web.Response(status=400, text=f"seconds={asked!r}: {limits}\n")
        done = await asyncio.get_running_loop().run_in_executor(None, agent.release, seconds)
        if not done:
            return web.Response(status=409, text="a call into the driver has not returned: it cannot be let go\n")
        return web.Response(text=f"driver let go for {seconds:g} s\n")

    return handle


def _is_loopback(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def index(agent: Agent) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        snapshot = agent.published.snapshot
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in health.degraded(agent))
        degraded = f"<h2>Degraded</h2><ul>{lines}</ul>" if lines else ""
        gpus = len([d for d in snapshot.devices if not d.is_instance])
        theirs = '<li><a href="metric">metric</a></li>' if agent.settings.policy.gpu_manager else ""
        page = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>podgpu</title>'
            f"<h1>podgpu {__version__}</h1><p>{gpus} GPUs, {len(snapshot.assignments)} assignments.</p>"
            '<ul><li><a href="metrics">metrics</a></li>'
            f'{theirs}<li><a href="health">health</a></li>'
            f'<li><a href="ready">ready</a></li></ul>{degraded}</html>'
        )
        return web.Response(
            text=page, content_type="text/html", headers={"Content-Security-Policy": "default-src 'none'"}
        )

    return handle
