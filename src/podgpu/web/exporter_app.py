"""The web server of `podgpu exporter`: metrics, JSON API, page, probes, gpu-manager's metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.errors import Note, collect_notes, texts_of
from podgpu.fleet.choose import describe_node, sort_alerts
from podgpu.fleet.prices import ReadPrices, no_prices
from podgpu.fleet.round import PublishedState
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_single_node_state
from podgpu.fleet.view import GpuResponse, add_details, make_details
from podgpu.metrics.otlp import PushedNode
from podgpu.model import has_readings
from podgpu.node.agent.agent import Agent
from podgpu.node.agent.health import RECURRING_SECONDS, PastFailure
from podgpu.node.agent.publish import Published
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.web.app import make_application
from podgpu.web.lifecycle import forget_on_node, forget_route, release_route
from podgpu.web.page_routes import page_routes
from podgpu.web.push import OtlpPusher, PushSettings
from podgpu.web.responses import (
    JSON_HEADERS,
    describe_health,
    limit_concurrency,
    probe_routes,
    serve_metrics,
    serve_text,
)

if TYPE_CHECKING:
    from podgpu.past.interface import Past
    from podgpu.web.protection import Protection


def application(
    agent: Agent,
    protection: Protection | None = None,
    lifecycle: bool = True,
    past: Past | None = None,
    prices: ReadPrices = no_prices,
    scrapes: int = 16,
) -> web.Application:
    """Returns the application of an exporter.

    `lifecycle` enables POST /-/release and /-/forget. `scrapes` limits concurrent requests for
    /metrics.
    """

    def add_own_details(answer: GpuResponse) -> GpuResponse:
        uuid = answer.gpu.uuid
        details = make_details(agent.published.state, uuid, *agent.details(uuid))
        return add_details(answer, details)

    async def complete_gpu(answer: GpuResponse) -> GpuResponse:
        return await asyncio.to_thread(add_own_details, answer)

    links = ["metrics", "health", "ready"]
    metrics = limit_concurrency(scrapes, serve_metrics(agent))
    node = serve_text(agent, "fresh_json", "stale_json", JSON_HEADERS)
    routes = [
        web.get("/metrics", metrics),
        release_route(agent, lifecycle),
        forget_route(partial(forget_on_node, agent), lifecycle),
        web.get("/api/v1/node", node),
    ]
    if agent.settings.policy.gpu_manager:
        links.insert(1, "metric")
        routes.append(web.get("/metric", serve_text(agent, "gpu_manager", None)))

    page = node_page(agent, prices)
    routes += node_probes(agent)
    routes += page_routes(page, complete_gpu, links, past)
    return make_application(routes, protection)


def gpu_manager_application(agent: Agent, protection: Protection | None = None) -> web.Application:
    """Serves gpu-manager's metrics on its path /metric, and on /metrics, Prometheus' default."""
    handler = serve_text(agent, "gpu_manager", None)
    routes = [web.get("/metric", handler), web.get("/metrics", handler)]
    return make_application(routes, protection)


def node_probes(agent: Agent) -> list[web.RouteDef]:
    return probe_routes(partial(is_live, agent), partial(is_ready, agent))


# Probes


def is_live(agent: Agent) -> tuple[bool, str]:
    """Fails only if the loop is stuck: a restart would not help against a missing driver."""
    if not agent.is_running:
        return False, "podgpu no longer reads the GPUs: its loop is stuck\n"
    return True, describe_health(describe_alerts(agent) + texts_of(list_problems(agent)))


def is_ready(agent: Agent) -> tuple[bool, str]:
    published = agent.published
    if not agent.is_fresh(published):
        return False, "the readings are too old to be served\n"
    if has_readings(published.state):
        return True, "OK\n"
    lines = describe_alerts(agent) + texts_of(list_problems(agent))
    return False, "\n".join(["no GPU has been read", *lines, ""])


def describe_alerts(agent: Agent) -> list[str]:
    state = agent.published.state
    return [alert.text for alert in sort_alerts(describe_node(state.node, state))]


def list_problems(agent: Agent) -> list[Note]:
    """Returns one note per problem, such as a source that fails."""
    state = agent.published.state
    notes = []
    for source in state.sources:
        # None: the source was not read.
        if source.up is False:
            text = f"{source.name}: {source.error}: {source.message}"
            notes.append(Note(source.name, text))

    # If a source fails, its error explains why GPUs are missing.
    all_succeed = not notes and any(source.up for source in state.sources)
    if all_succeed and state.gpus_expected and not state.gpus_visible:
        text = (
            f"the PCI bus shows {state.gpus_expected} GPUs, but the driver shows none: "
            "run `podgpu doctor`"
        )
        notes.append(Note("no GPU in the driver", text))

    notes += collect_notes(agent.warnings)
    return notes


# The page: the state, history and waste of this node


def build_state(
    agent: Agent,
    prices: ReadPrices = no_prices,
    notes: Iterable[Note] = (),
    previous: ClusterState | None = None,
    now: float | None = None,
    published: Published | None = None,
) -> ClusterState:
    """Builds a cluster state that contains only this node.

    `now`: Unix time for prices. `published`: the readings; by default the newest ones.
    """
    if published is None:
        published = agent.published

    settings = ViewSettings(interval=agent.settings.interval, idle_after=None)
    tags, problems = prices()
    if now is None:
        now = agent.clock.wall()

    return build_single_node_state(
        published.state,
        settings,
        agent.clock.monotonic(),
        agent.clock.wall(),
        fresh=agent.is_fresh(published),
        prices=tags.at(now),
        notes=(*notes, *problems),
        previous=previous,
    )


def node_page(agent: Agent, prices: ReadPrices) -> Callable[[], PublishedState]:
    """Returns a function that builds the data of the web page, once per snapshot."""

    making = threading.Lock()

    @lru_cache(maxsize=1)
    def make(published: Published, fresh: bool) -> PublishedState:
        notes = list_problems(agent)
        if not fresh and published.state.taken_at:
            notes.insert(0, Note("readings", "the readings are too old to be shown"))
        elif not fresh:
            notes.insert(0, Note("readings", "there are no readings yet"))
        return PublishedState(build_state(agent, prices, notes, published=published))

    def make_once() -> PublishedState:
        with making:
            published = agent.published
            return make(published, agent.is_fresh(published))

    return make_once


def node_recorder(
    agent: Agent, directory: str = "", prices: ReadPrices = no_prices
) -> HistoryRecorder:
    """Creates the recorder that stores this node's history.

    Raises UsageError if `directory` is not a directory.
    """
    # Spent time is the difference of two states, so each one needs the one before.
    previous: ClusterState | None = None

    def read_gpus() -> list[GpuSample] | None:
        nonlocal previous
        if not agent.is_fresh(agent.published):
            return None
        previous = build_state(agent, prices, previous=previous, now=recorder.read_time())
        return make_gpu_samples(previous)

    recorder = HistoryRecorder(read_gpus, agent.clock, directory)
    since = agent.clock.wall() - RECURRING_SECONDS
    agent.restore_failures(
        PastFailure(span.uuid, span.condition, span.started, span.ended is None)
        for span in recorder.list_failures(since)
    )
    agent.warnings.append(recorder.warnings)
    return recorder


def node_pusher(agent: Agent, settings: PushSettings) -> OtlpPusher:
    """Creates the service that sends this node's document by OTLP."""

    def read() -> list[PushedNode]:
        published = agent.published
        return [PushedNode(published.state)] if agent.is_fresh(published) else []

    pusher = OtlpPusher(settings, read, agent.clock)
    agent.warnings.append(pusher.warnings)
    return pusher
