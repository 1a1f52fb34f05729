"""This module owns what each path of `podgpu cluster` answers: bytes that are already there, as on the exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.cluster.loop import Cluster
from podgpu.cluster.nodes import bounded
from podgpu.cluster.view import ClusterView
from podgpu.figures.waste import WasteStatement
from podgpu.figures.waste_rows import Source
from podgpu.metrics.encode import NO_METRICS
from podgpu.web.answers import Handler, exposition, probe
from podgpu.web.api_routes import cluster_gpu, turns_to_look
from podgpu.web.app import Listener, make_application, probe_listener
from podgpu.web.lifecycle import forget, forget_of_cluster
from podgpu.web.page_routes import page_routes
from podgpu.web.sockets import Address

if TYPE_CHECKING:
    from podgpu.history.asking import History
    from podgpu.web.protection import Protection

_LINKS = ("metrics", "metrics/nodes", "health", "ready")
_MOST_ILLS = 100
"""Lines of /health: a rack that is dark is named whole."""


def cluster_listeners(
    cluster: Cluster,
    address: Address,
    probe_address: Address | None,
    protection: Protection | None,
    history: History | None = None,
    lifecycle: bool = True,
) -> list[Listener]:
    """`lifecycle`: POST /-/forget is answered."""
    app = cluster_application(cluster, protection, history, lifecycle)
    listeners = [Listener(app, address, tls=protection.tls if protection else None)]
    if probe_address is not None:
        listeners.append(probe_listener(_probe_routes(cluster), probe_address))
    return listeners


def cluster_application(
    cluster: Cluster,
    protection: Protection | None = None,
    history: History | None = None,
    lifecycle: bool = True,
) -> web.Application:
    turns = turns_to_look()
    return make_application(
        [
            web.get("/metrics", _metrics(cluster)),
            web.get("/metrics/nodes", _node_metrics(cluster)),
            *_probe_routes(cluster),
            web.post("/-/forget", forget(forget_of_cluster(cluster), lifecycle)),
            cluster_gpu(cluster, turns),
            *page_routes(cluster.page, _LINKS, history, lambda: _wasted(cluster.published.view), turns),
        ],
        protection,
    )


def _wasted(view: ClusterView) -> tuple[WasteStatement, Source]:
    source = view.prices.source if view.prices.currency else ""
    return view.waste, Source(source, any(node.simulated for node in view.nodes))


def _probe_routes(cluster: Cluster) -> list[web.RouteDef]:
    return [
        web.get("/health", probe(lambda: _live(cluster))),
        web.get("/livez", probe(lambda: _live(cluster))),
        web.get("/ready", probe(lambda: _ready(cluster))),
    ]


def _metrics(cluster: Cluster) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = cluster.published
        return await exposition(request, published.metrics if cluster.turns else published.stale)

    return handle


def _node_metrics(cluster: Cluster) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        return await exposition(request, cluster.published.nodes if cluster.turns else NO_METRICS)

    return handle


def _live(cluster: Cluster) -> tuple[bool, str]:
    """Exporters that are away are no reason to restart us; a loop that stands still is."""
    if not cluster.turns:
        return False, "podgpu does not read the nodes any more (its loop is stuck)\n"
    ills = _ills(cluster.published.view)
    return True, "\n".join(["degraded", *ills, ""]) if ills else "OK\n"


def _ills(view: ClusterView) -> tuple[str, ...]:
    """What is not as it should be: of GPUs and nodes in the words of the page, of the whole, of each node that is old,
    of each target that fails."""
    serious = (alert.text for alert in view.alerts)
    old = (f"{node.name}: old, its figures are of {node.age:.0f} s ago" for node in view.nodes if node.old)
    failing = (outcome.said for outcome in view.outcomes if outcome.error)
    return bounded(tuple(dict.fromkeys((*serious, *view.notes, *old, *failing))), _MOST_ILLS)


def _ready(cluster: Cluster) -> tuple[bool, str]:
    view = cluster.published.view
    if not cluster.turns or not view.has_fresh_nodes:
        return False, "\n".join(["no node's figures are fresh", *view.notes, ""])
    return True, "OK\n"
