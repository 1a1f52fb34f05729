"""What each path answers. `/metrics` hands out bytes that are already there: no driver, no socket, no rendering."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web

from podgpu.agent import health
from podgpu.agent.loop import Agent
from podgpu.exposition.body import EMPTY, Body
from podgpu.exposition.text import CONTENT_TYPE
from podgpu.serve.answers import prepared
from podgpu.serve.node_page import NodePage
from podgpu.serve.page_routes import page_routes

DEFAULT_RELEASE_SECONDS = 60.0
MOST_RELEASE_SECONDS = 3600.0
Handler = Callable[[web.Request], Awaitable[web.Response]]


def routes(agent: Agent) -> list[web.RouteDef]:
    """The page's own among them: it is made of what is published, like everything here."""
    theirs = [web.get("/metric", gpu_manager_metrics(agent))] if agent.settings.policy.gpu_manager else []
    links = ["metrics", *(["metric"] if theirs else []), "health", "ready"]
    return [
        web.get("/metrics", metrics(agent)),
        *theirs,
        *probe_routes(agent),
        web.post("/-/release", release(agent)),
        *page_routes(NodePage(agent).latest, links),
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
    return prepared(request, body, {"Content-Type": CONTENT_TYPE})


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
