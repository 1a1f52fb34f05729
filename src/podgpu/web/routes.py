"""This module owns what each path of the exporter answers. `/metrics` hands out what is published, rendered for who
asks first: no driver, no socket.

The picture behind the web page is made when somebody looks, once for each snapshot; no scrape waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu import __version__
from podgpu.agent.loop import Agent
from podgpu.agent.publish import ExpositionName, Published
from podgpu.metrics.body import NO_METRICS, Exposition
from podgpu.web.answers import JSON_HEADERS, Handler, exposition, prepared, probe
from podgpu.web.api_routes import node_gpu, turns_to_look
from podgpu.web.aside import Turns
from podgpu.web.connections import Connection
from podgpu.web.lifecycle import forget, forget_of_node, release
from podgpu.web.page_routes import page_routes

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.figures.as_json import PageState
    from podgpu.figures.prices import ReadPrices
    from podgpu.history.asking import History
    from podgpu.web.api_routes import TellWaste

UNNAMED = "this node"
_TOO_OLD = "the figures are too old to be shown: the driver has not been read in time"
_NONE_YET = "there are no figures yet: the driver has never been read"


@dataclass(frozen=True, slots=True)
class BesideFigures:
    """What the page shows beside the figures of now; None: nobody keeps it."""

    history: History | None = None
    prices: ReadPrices | None = None
    wasted: TellWaste | None = None


NOTHING_BESIDE = BesideFigures()


def routes(
    agent: Agent, lifecycle: bool = True, shown: BesideFigures = NOTHING_BESIDE, scrapes: int = 16
) -> list[web.RouteDef]:
    """The page's own among them: it is made of what is published, like everything here."""
    theirs = [web.get("/metric", gpu_manager_metrics(agent))] if agent.settings.policy.gpu_manager else []
    page, turns = NodePage(agent, shown.prices), turns_to_look()
    links = ["metrics", *(["metric"] if theirs else []), "health", "ready"]
    return [
        web.get("/metrics", at_most(scrapes, metrics(agent))),
        *theirs,
        *probe_routes(agent),
        web.post("/-/release", release(agent, lifecycle)),
        web.post("/-/forget", forget(forget_of_node(agent), lifecycle)),
        web.get("/api/v1/node", node_document(agent, turns)),
        node_gpu(agent, page.latest, turns),
        *page_routes(page.latest, links, shown.history, shown.wasted, turns),
    ]


def probe_routes(agent: Agent) -> list[web.RouteDef]:
    """Also at an address of their own, where a web config protects the rest."""
    return [
        web.get("/health", probe(lambda: live(agent))),
        web.get("/livez", probe(lambda: live(agent))),
        web.get("/ready", probe(lambda: ready(agent))),
    ]


def gpu_manager_routes(agent: Agent) -> list[web.RouteDef]:
    """Of the second address: gpu-manager's own path, and the one that Prometheus asks for unless told otherwise."""
    return [web.get(path, gpu_manager_metrics(agent)) for path in ("/metric", "/metrics")]


def metrics(agent: Agent) -> Handler:
    renderer = Renderer()

    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        if agent.is_fresh(published):
            text = await renderer.exposition(published, "fresh")
        if not agent.is_fresh(published):  # now, or after what took long to render
            text = await renderer.exposition(published, "stale")
        return await exposition(request, text)

    return handle


def gpu_manager_metrics(agent: Agent) -> Handler:
    renderer = Renderer()

    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        text = await renderer.exposition(published, "gpu_manager") if agent.is_fresh(published) else NO_METRICS
        return await exposition(request, text if agent.is_fresh(published) else NO_METRICS)

    return handle


def node_document(agent: Agent, turns: Turns) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        published = agent.published
        body = await turns.do(published.node_json, agent.is_fresh(published))
        return prepared(request, body, JSON_HEADERS)

    return handle


def at_most(number: int, handler: Handler) -> Handler:
    """So many are answered at a time, counted until the last byte is sent; the words are dcgm-exporter's.

    Whoever asks and does not read keeps his place from nobody for long: see `_makes_room`.
    """
    answering: dict[Connection, str] = {}
    """And where they come from; the oldest first."""

    async def handle(request: web.Request) -> web.StreamResponse:
        connection: object = request.protocol
        if not isinstance(connection, Connection):
            return await handler(request)
        asker = request.remote or ""
        if len(answering) >= number and not _makes_room(answering, asker):
            return web.Response(status=503, text="scrape concurrency limit reached\n")
        answering[connection] = asker
        with ExitStack() as unless_answered:
            unless_answered.callback(answering.pop, connection, None)
            response = await handler(request)
            connection.when_answered = unless_answered.pop_all().close
            return response

    return handle


def _makes_room(answering: dict[Connection, str], asker: str) -> bool:
    """Somebody who reads slowly is let go: at once, where others of his address are here in greater number than those
    of the asker's will be, and else after a while. False: nobody was."""
    places = Counter(answering.values())
    for connection, address in answering.items():
        is_crowd = places[address] > places[asker] + 1
        if connection.is_too_slow or (is_crowd and connection.reads_slowly):
            del answering[connection]
            connection.drop()
            return True
    return False


class Renderer:
    """Has each exposition made once for all who ask at the same time: here, or beside the event loop if it is long."""

    def __init__(self) -> None:
        self._coming: tuple[Published, ExpositionName, asyncio.Future[Exposition]] | None = None

    async def exposition(self, published: Published, name: ExpositionName) -> Exposition:
        made = published.exposition_if_made(name)
        if made is not None:
            return made
        make: Callable[[], Exposition] = partial(getattr, published, name)
        if not published.is_large:
            return make()
        if self._coming is None or self._coming[:2] != (published, name):
            future = asyncio.ensure_future(asyncio.to_thread(make))
            self._coming = published, name, future
        made = await asyncio.shield(self._coming[2])
        self._coming = None  # whoever comes now finds it made
        return made


# The figures behind the web page


class NodePage:
    """Made in the threads of those who look, one at a time: whoever comes second finds it made."""

    def __init__(self, agent: Agent, prices: ReadPrices | None = None) -> None:
        self._agent = agent
        self._prices = prices
        self._making = threading.Lock()
        self._made: tuple[Published, bool, PageState] | None = None

    def latest(self) -> PageState:
        with self._making:
            published = self._agent.published
            fresh = self._agent.is_fresh(published)
            if self._made is None or self._made[0] is not published or self._made[1] is not fresh:
                self._made = published, fresh, self._make(published, fresh)
            return self._made[2]

    def _make(self, published: Published, fresh: bool) -> PageState:
        from podgpu.figures.as_json import PageState
        from podgpu.figures.of_node import node_picture
        from podgpu.figures.prices import no_prices

        settings, notes = self._agent.settings, degraded(self._agent)
        prices, wrong = (self._prices or no_prices)()
        snapshot = published.snapshot
        if not fresh:
            notes = [_TOO_OLD if snapshot.taken_at else _NONE_YET, *notes]
        name = node_of(self._agent)
        picture = node_picture(
            snapshot, name, settings.interval, [*notes, *wrong], fresh=fresh, version=__version__, prices=prices
        )
        return PageState.of(picture)


# What the probes say


def node_of(agent: Agent) -> str:
    return agent.settings.policy.hostname or UNNAMED


def degraded(agent: Agent) -> list[str]:
    """One line for each source that does not work, and for what is wrong although all of them do."""
    snapshot = agent.published.snapshot
    lines = [f"{o.source}: {o.error}: {o.message}" for o in snapshot.outcomes if not o.ok]
    expected = snapshot.device_count.expected
    if snapshot.outcomes and not lines and not snapshot.device_count.visible and expected:
        lines.append(f"the PCI bus shows {expected} GPUs, the driver none: `podgpu doctor` says what to look at")
    return [*lines, *agent.notes_beside()]


def alerts(published: Published, node: str) -> list[str]:
    """What is serious of it, in the words of the page."""
    snapshot = published.snapshot
    is_well = all(o.ok for o in snapshot.outcomes) and not any(of.findings for of in snapshot.health)
    if is_well and not snapshot.device_count.lost:
        return []
    from podgpu.figures.from_snapshot import view_of_snapshot  # a node on which all is well does not load it

    return [alert.text for alert in view_of_snapshot(snapshot, node).alerts]


def live(agent: Agent) -> tuple[bool, str]:
    """A missing driver is no reason to restart us; a loop that stands still is."""
    if not agent.turns:
        return False, "podgpu does not read the GPUs any more (its loop is stuck)\n"
    lines = [*alerts(agent.published, node_of(agent)), *degraded(agent)]
    return True, "\n".join(["degraded", *lines, ""]) if lines else "OK\n"


def ready(agent: Agent) -> tuple[bool, str]:
    published = agent.published
    if not agent.is_fresh(published):
        return False, "the figures are too old to be shown\n"
    if not published.snapshot.readings:
        lines = [*alerts(published, node_of(agent)), *degraded(agent)]
        return False, "\n".join(["no GPU has been read", *lines, ""])
    return True, "OK\n"
