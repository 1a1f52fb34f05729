"""The web server of `podgpu cluster`: metrics, page and probes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from podgpu.cluster.loop import Cluster
from podgpu.cluster.nodes import bounded
from podgpu.cluster.view import ClusterView
from podgpu.errors import SourceError
from podgpu.figures.waste import WasteStatement
from podgpu.figures.waste_rows import Source
from podgpu.metrics.body import NO_METRICS
from podgpu.web.app import Listener, make_application, probe_listener
from podgpu.web.lifecycle import forget_in_cluster, forget_route
from podgpu.web.page_routes import page_routes
from podgpu.web.responses import Handler, metrics_response, probe_routes
from podgpu.web.sockets import Address

if TYPE_CHECKING:
    from podgpu.history.asking import History
    from podgpu.web.page_routes import Complete
    from podgpu.web.protection import Protection

_LINKS = ("metrics", "metrics/nodes", "health", "ready")
_MAX_PROBLEMS = 100
_EXPORTER_SECONDS = 3.0
_MAX_EXPORTER_REQUESTS = 8
"""Concurrent requests to exporters for the details of a GPU."""


def cluster_listeners(
    cluster: Cluster,
    address: Address,
    probe_address: Address | None,
    protection: Protection | None,
    history: History | None = None,
    lifecycle: bool = True,
) -> list[Listener]:
    """`lifecycle`: POST /-/forget is allowed."""
    app = cluster_application(cluster, protection, history, lifecycle)
    listeners = [Listener(app, address, tls=protection.make_tls if protection else None)]
    if probe_address is not None:
        listeners.append(probe_listener(_probe_routes(cluster), probe_address))
    return listeners


def cluster_application(
    cluster: Cluster,
    protection: Protection | None = None,
    history: History | None = None,
    lifecycle: bool = True,
) -> web.Application:
    routes = [
        web.get("/metrics", _metrics(cluster)),
        web.get("/metrics/nodes", _node_metrics(cluster)),
        *_probe_routes(cluster),
        forget_route(forget_in_cluster(cluster), lifecycle),
        *page_routes(cluster.page, _complete_gpu(cluster), _LINKS, history, lambda: _waste(cluster.published.view)),
    ]
    return make_application(routes, protection)


def _waste(view: ClusterView) -> tuple[WasteStatement, Source]:
    source = view.prices.source if view.prices.currency else ""
    return view.waste, Source(source, any(node.simulated for node in view.nodes))


def _complete_gpu(cluster: Cluster) -> Complete:
    """Adds the details that the exporter of the GPU has."""
    limit = asyncio.Semaphore(_MAX_EXPORTER_REQUESTS)

    async def complete(uuid: str, view: dict[str, Any]) -> dict[str, Any]:
        from podgpu.figures.gpu_view import parse_details

        target = next((node.target for node in cluster.published.view.nodes if node.name == view["node"]), "")
        try:
            async with asyncio.timeout(_EXPORTER_SECONDS), limit:
                answer = await cluster.ask_exporter(target, ("api", "v1", "gpus", uuid))
            return await asyncio.to_thread(parse_details, answer)
        except TimeoutError:
            problem = SourceError("deadline", f"its exporter did not answer within {_EXPORTER_SECONDS:g} s")
        except SourceError as error:
            problem = error
        return {"sources": [{"source": "exporter", "ok": False, "error": problem.reason, "message": str(problem)}]}

    return complete


def _metrics(cluster: Cluster) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = cluster.published
        return await metrics_response(request, published.metrics if cluster.turns else published.stale)

    return handle


def _node_metrics(cluster: Cluster) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return await metrics_response(request, cluster.published.nodes if cluster.turns else NO_METRICS)

    return handle


def _probe_routes(cluster: Cluster) -> list[web.RouteDef]:
    return probe_routes(partial(_is_live, cluster), partial(_is_ready, cluster))


def _is_live(cluster: Cluster) -> tuple[bool, str]:
    """Unreachable exporters are no reason for a restart; a loop that does not run is."""
    if not cluster.turns:
        return False, "podgpu does not read the nodes any more (its loop is stuck)\n"
    view = cluster.published.view
    alerts = (alert.text for alert in view.alerts)
    old = (f"{node.name}: old, its figures are of {node.age:.0f} s ago" for node in view.nodes if node.old)
    failed = (outcome.said for outcome in view.outcomes if outcome.error)
    problems = bounded(tuple(dict.fromkeys((*alerts, *view.notes, *old, *failed))), _MAX_PROBLEMS)
    return True, "\n".join(["degraded", *problems, ""]) if problems else "OK\n"


def _is_ready(cluster: Cluster) -> tuple[bool, str]:
    view = cluster.published.view
    if not cluster.turns or not view.has_fresh_nodes:
        return False, "\n".join(["no node's figures are fresh", *view.notes, ""])
    return True, "OK\n"
