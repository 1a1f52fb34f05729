"""The web server of `podgpu cluster`: metrics, page and probes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.errors import SourceError
from podgpu.fleet.round import Cluster
from podgpu.fleet.state import ClusterState, bound_texts
from podgpu.fleet.view import GpuDetails, GpuResponse, SourceView, add_details, decode_details
from podgpu.metrics.encode import NO_METRICS
from podgpu.metrics.otlp import PushedNode
from podgpu.web.app import make_application
from podgpu.web.lifecycle import forget_in_cluster, forget_route
from podgpu.web.page_routes import ReadQueue, page_routes
from podgpu.web.push import OtlpPusher, PushSettings
from podgpu.web.responses import (
    METRICS_HEADERS,
    body_response,
    describe_health,
    probe_routes,
    render_scrape,
)

if TYPE_CHECKING:
    from podgpu.past.interface import Past
    from podgpu.web.access import KubernetesAccess
    from podgpu.web.protection import Protection

_LINKS = ("metrics", "metrics/nodes", "health", "ready")
_MAX_PROBLEMS = 100
_EXPORTER_SECONDS = 3.0
_MAX_MESSAGE = 512


def cluster_application(
    cluster: Cluster,
    protection: Protection | None = None,
    past: Past | None = None,
    lifecycle: bool = True,
    access: KubernetesAccess | None = None,
    read_queue: ReadQueue | None = None,
) -> web.Application:
    """`lifecycle` enables POST /-/forget. `access` limits what users see to their namespaces."""

    async def metrics(request: web.Request) -> web.Response:
        body = await render_scrape(request, cluster.render_metrics)
        return body_response(request, body, METRICS_HEADERS)

    async def node_metrics(request: web.Request) -> web.Response:
        body = NO_METRICS
        if cluster.is_on_time:
            published = cluster.published
            body = await render_scrape(request, lambda: published.nodes)
        return body_response(request, body, METRICS_HEADERS)

    complete_gpu = partial(_complete_gpu, cluster)
    routes = [
        web.get("/metrics", metrics),
        web.get("/metrics/nodes", node_metrics),
        forget_route(partial(forget_in_cluster, cluster), lifecycle),
    ]
    routes += cluster_probes(cluster)
    routes += page_routes(lambda: cluster.published, complete_gpu, _LINKS, past, read_queue)
    app = make_application(routes, protection)
    if access is not None:
        app.middlewares.append(access.check_request)
        app.on_cleanup.append(access.close)

    return app


def _find_target(state: ClusterState, name: str) -> str:
    """Returns the exporter of a node. Empty if the last round did not find the node."""
    for node in state.nodes:
        if node.name == name:
            return node.reading.target
    return ""


async def _complete_gpu(cluster: Cluster, answer: GpuResponse) -> GpuResponse:
    """Adds the details that only the node's exporter has, or the error."""
    target = _find_target(cluster.published.state, answer.node)
    try:
        async with asyncio.timeout(_EXPORTER_SECONDS):
            body = await cluster.fetch(target, f"api/v1/gpus/{answer.gpu.uuid}")
        return add_details(answer, await asyncio.to_thread(decode_details, body))
    except TimeoutError:
        reason = "deadline"
        message = f"the exporter did not respond within {_EXPORTER_SECONDS:g} s"
    except SourceError as error:
        reason = error.reason
        message = str(error)[:_MAX_MESSAGE]

    failed = SourceView(source="exporter", ok=False, error=reason, message=message)
    return add_details(answer, GpuDetails(sources=[failed]))


def cluster_probes(cluster: Cluster) -> list[web.RouteDef]:
    return probe_routes(partial(_is_live, cluster), partial(_is_ready, cluster))


def _is_live(cluster: Cluster) -> tuple[bool, str]:
    """Fails only if the loop is stuck: a restart would not help against unreachable exporters."""
    if not cluster.is_on_time:
        return False, "podgpu no longer reads the nodes: its loop is stuck\n"

    state = cluster.published.state
    problems = state.messages
    for node in state.nodes:
        if node.stale:
            problems.append(f"{node.name}: stale, last read {node.age_seconds or 0:.0f} s ago")

    problems += state.failures
    return True, describe_health(bound_texts(list(dict.fromkeys(problems)), _MAX_PROBLEMS))


def _is_ready(cluster: Cluster) -> tuple[bool, str]:
    """Succeeds after the first attempt to read all nodes.

    If no exporter answered, the page shows the errors.
    """
    if cluster.is_on_time and cluster.has_results:
        return True, "OK\n"
    return False, "podgpu has not finished reading the nodes\n"


def cluster_pusher(cluster: Cluster, settings: PushSettings) -> OtlpPusher:
    """Creates the service that sends the documents of all nodes by OTLP."""

    def read() -> list[PushedNode]:
        if not cluster.is_on_time:
            return []

        state = cluster.published.state
        nodes = []
        for node in state.nodes:
            if not node.stale:
                owners = node.reading.owners or state.owners
                nodes.append(PushedNode(node.state, node.reading.cluster, owners))

        return nodes

    pusher = OtlpPusher(settings, read, cluster.clock)
    cluster.warnings.append(pusher.warnings)
    return pusher
