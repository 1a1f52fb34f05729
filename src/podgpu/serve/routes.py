"""What each path answers. `/metrics` hands out what was rendered already: no driver, no socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from podgpu.agent import health
from podgpu.agent.loop import Agent
from podgpu.exposition.body import NO_METRICS
from podgpu.serve.answers import exposition
from podgpu.serve.lifecycle import release
from podgpu.serve.node_page import NodePage
from podgpu.serve.page_routes import page_routes

Handler = Callable[[web.Request], Awaitable[web.Response]]


def routes(agent: Agent, lifecycle: bool = True) -> list[web.RouteDef]:
    """The page's own among them: it is made of what is published, like everything here."""
    theirs = [web.get("/metric", gpu_manager_metrics(agent))] if agent.settings.policy.gpu_manager else []
    links = ["metrics", *(["metric"] if theirs else []), "health", "ready"]
    return [
        web.get("/metrics", metrics(agent)),
        *theirs,
        *probe_routes(agent),
        web.post("/-/release", release(agent, lifecycle)),
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
        return await exposition(request, published.fresh if agent.is_fresh(published) else published.stale)

    return handle


def gpu_manager_metrics(agent: Agent) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        return await exposition(request, published.gpu_manager if agent.is_fresh(published) else NO_METRICS)

    return handle


def probe(judge: Callable[[], tuple[bool, str]]) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        good, text = judge()
        return web.Response(status=200 if good else 503, text=text)

    return handle
