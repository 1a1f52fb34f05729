"""The web server of `podgpu exporter`: metrics, JSON API, web page, probes, and gpu-manager's metrics."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.agent.publish import Published, RenderedText
from podgpu.cluster.view import GpuResponse, add_details, make_details
from podgpu.metrics.encode import NO_METRICS, Body
from podgpu.model import has_readings
from podgpu.web.app import Listener, Service, make_application, probe_listener, run
from podgpu.web.connections import ConnectionLimits, send_response
from podgpu.web.lifecycle import DEFAULT_RELEASE_SECONDS, forget_on_node, forget_route, release_route
from podgpu.web.node_page import NodePage, describe_alerts, describe_problems
from podgpu.web.page_routes import page_routes
from podgpu.web.responses import JSON_HEADERS, Handler, body_response, metrics_response, probe_routes
from podgpu.web.sockets import Address

if TYPE_CHECKING:
    from podgpu.cluster.prices import ReadPrices
    from podgpu.cluster.ranges import UsageAnswers
    from podgpu.history.answers import HistorySource
    from podgpu.web.protection import Protection

GPU_MANAGER_OPTION = "--gpu-manager-address"


@dataclass(frozen=True, slots=True)
class PageSources:
    """Optional data of the web page; None if not available."""

    history: HistorySource | None = None
    prices: ReadPrices | None = None
    usage: UsageAnswers | None = None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    read_seconds: float = 10.0
    write_seconds: float = 30.0
    scrapes: int = 16
    """Maximum number of concurrent requests for /metrics."""


def serve(
    agent: Agent,
    address: Address,
    on_listening: Callable[[Address], None] = lambda a: None,
    gpu_manager_address: Address | None = None,
    probe_address: Address | None = None,
    protection: Protection | None = None,
    sockets: Sequence[socket.socket] = (),
    lifecycle: bool = True,
    page: PageSources = PageSources(),  # noqa: B008 - frozen
    services: Sequence[Service] = (),
    limits: RequestLimits = RequestLimits(),  # noqa: B008 - frozen
) -> None:
    """Starts the agent and serves requests until SIGINT, SIGTERM or a fatal error of the agent.

    - `gpu_manager_address`: a separate listener that serves only gpu-manager's metrics.
    - `probe_address`: a separate listener for probes, without `protection`, because a kubelet sends neither a password
      nor a certificate.
    - `sockets`: sockets that are already bound. If given, `address` is not bound.
    - `lifecycle`: enables POST /-/release and /-/forget.
    - `services`: started and stopped together with the agent.
    """
    tls = protection.make_tls if protection else None
    app = application(agent, protection, lifecycle, page, limits.scrapes)
    listeners = [Listener(app, address, tls=tls, sockets=sockets)]
    if gpu_manager_address is not None:
        gpu_manager = gpu_manager_application(agent, protection)
        text = "serving only gpu-manager's metrics on %s/metric"
        listeners.append(Listener(gpu_manager, gpu_manager_address, GPU_MANAGER_OPTION, tls, text))
    if probe_address is not None:
        listeners.append(probe_listener(_probe_routes(agent), probe_address))
    connection_limits = ConnectionLimits(header_seconds=limits.read_seconds, write_seconds=limits.write_seconds)
    release = partial(agent.release, DEFAULT_RELEASE_SECONDS)
    run([agent, *services], listeners, lambda bound: on_listening(bound[0]), release, connection_limits)


def application(
    agent: Agent,
    protection: Protection | None = None,
    lifecycle: bool = True,
    page: PageSources = PageSources(),  # noqa: B008 - frozen
    scrapes: int = 16,
) -> web.Application:
    has_gpu_manager = agent.settings.policy.gpu_manager
    links = ["metrics", *(["metric"] if has_gpu_manager else []), "health", "ready"]

    async def complete_gpu(answer: GpuResponse) -> GpuResponse:
        uuid = answer.gpu.uuid
        return add_details(answer, make_details(agent.published.state, uuid, *agent.details(uuid)))

    routes = [
        web.get("/metrics", limit_concurrency(scrapes, _metrics(agent))),
        *([web.get("/metric", _gpu_manager_metrics(agent))] if has_gpu_manager else []),
        *_probe_routes(agent),
        release_route(agent, lifecycle),
        forget_route(forget_on_node(agent), lifecycle),
        web.get("/api/v1/node", _node_document(agent)),
        *page_routes(NodePage(agent, page.prices).latest, complete_gpu, links, page.history, page.usage),
    ]
    return make_application(routes, protection)


def gpu_manager_application(agent: Agent, protection: Protection | None = None) -> web.Application:
    """Serves gpu-manager's metrics on its own path and on Prometheus' default path."""
    return make_application(
        [web.get(path, _gpu_manager_metrics(agent)) for path in ("/metric", "/metrics")], protection
    )


def _probe_routes(agent: Agent) -> list[web.RouteDef]:
    return probe_routes(partial(is_live, agent), partial(is_ready, agent))


# Metrics


def _metrics(agent: Agent) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        if agent.is_fresh(published):
            text = await _render(published, "fresh")
        if not agent.is_fresh(published):  # the snapshot may also become stale during a long rendering
            text = await _render(published, "stale")
        return metrics_response(request, text)

    return handle


def _gpu_manager_metrics(agent: Agent) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        text = await _render(published, "gpu_manager") if agent.is_fresh(published) else NO_METRICS
        return metrics_response(request, text if agent.is_fresh(published) else NO_METRICS)

    return handle


async def _render(published: Published, text: RenderedText) -> Body:
    """Renders in a thread, once for all concurrent requests, so that probes do not wait."""
    if text in published.rendered:
        return published.rendered[text]
    return await asyncio.to_thread(published.render, text)


def _node_document(agent: Agent) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        body = await _render(published, "fresh_json" if agent.is_fresh(published) else "stale_json")
        return body_response(request, body, JSON_HEADERS)

    return handle


def limit_concurrency(limit: int, handler: Handler) -> Handler:
    """Responds with 503, in dcgm-exporter's words, if `limit` requests are already running."""
    running = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal running
        if running >= limit:
            return web.Response(status=503, text="scrape concurrency limit reached\n")
        running += 1
        try:
            return await send_response(request, await handler(request))
        finally:
            running -= 1

    return handle


# Probes


def is_live(agent: Agent) -> tuple[bool, str]:
    """Fails only if the loop is stuck: a restart does not help against a missing driver."""
    if not agent.turns:
        return False, "podgpu no longer reads the GPUs: its loop is stuck\n"
    lines = [*describe_alerts(agent), *describe_problems(agent)]
    return True, "\n".join(["degraded", *lines, ""]) if lines else "OK\n"


def is_ready(agent: Agent) -> tuple[bool, str]:
    published = agent.published
    if not agent.is_fresh(published):
        return False, "the readings are too old to be served\n"
    if not has_readings(published.state):
        lines = [*describe_alerts(agent), *describe_problems(agent)]
        return False, "\n".join(["no GPU has been read", *lines, ""])
    return True, "OK\n"
