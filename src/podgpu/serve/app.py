"""Puts applications on addresses and runs until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from podgpu.clock import OnceAMinute
from podgpu.errors import StartError
from podgpu.serve.connections import Entrance, Limits, MakeContext, limits_for, note_request
from podgpu.serve.sockets import ADDRESS_OPTION, Address, address_of, bind

if TYPE_CHECKING:
    # A node's agent and its routes are imported by the functions that serve one: `podgpu autoscale` has none.
    # `protection` brings YAML and bcrypt, for those who have a web config only.
    from podgpu.agent.loop import Agent
    from podgpu.serve.protection import Protection
    from podgpu.serve.routes import BesideFigures

GPU_MANAGER_OPTION = "--gpu-manager-address"
PROBE_OPTION = "--probe-address"

_SHUTDOWN_SECONDS = 1.0
_SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_FOREIGN_LOGS = ("asyncio", "aiohttp.server")
_log = logging.getLogger(__name__)


class Served(Protocol):
    """What runs in the background while requests are answered: a node's agent, or the cluster's loop."""

    @property
    def fatal(self) -> StartError | None:
        """Why it must end."""

    def start(self, on_fatal: Callable[[], object]) -> None: ...
    def reload(self) -> None: ...
    def stop(self) -> None: ...


class Several:
    """Served as one: all of them start and stop together, and one that must end ends them all."""

    def __init__(self, members: Sequence[Served]) -> None:
        self._members = list(members)

    def add(self, member: Served) -> None:
        self._members.append(member)

    @property
    def fatal(self) -> StartError | None:
        return next((member.fatal for member in self._members if member.fatal is not None), None)

    def start(self, on_fatal: Callable[[], object]) -> None:
        for member in self._members:
            member.start(on_fatal)

    def reload(self) -> None:
        for member in self._members:
            member.reload()

    def stop(self) -> None:
        for member in reversed(self._members):
            member.stop()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the visitors of one exporter may take."""

    read_seconds: float = 10.0
    """To send a request."""
    write_seconds: float = 30.0
    """To read the answer."""
    scrapes: int = 16
    """Requests for /metrics at a time."""


@dataclass(frozen=True, slots=True)
class Listener:
    app: web.Application
    address: Address
    option: str = ADDRESS_OPTION
    tls: MakeContext | None = None
    announcement: str = ""
    """What is logged once it listens, with %s for its URL."""
    sockets: Sequence[socket.socket] = ()
    """Bound already, in place of the address."""


def serve(
    agent: Agent,
    address: Address,
    on_listening: Callable[[Address], None] = lambda a: None,
    gpu_manager_address: Address | None = None,
    probe_address: Address | None = None,
    protection: Protection | None = None,
    sockets: Sequence[socket.socket] = (),
    lifecycle: bool = True,
    shown: BesideFigures | None = None,
    beside: Sequence[Served] = (),
    bounds: Bounds | None = None,
) -> None:
    """Start the agent and answer requests until SIGINT, SIGTERM or a fatal error of the agent.

    `gpu_manager_address`: a second one, for gpu-manager's metrics alone. `probe_address`: one for the kubelet's probes
    alone, which `protection` leaves plain: a probe can show neither a password nor a certificate. `sockets`: bound
    already, in place of the address. `lifecycle`: POST /-/release is answered. `shown`: on the page. `beside`: what
    runs as long as the agent does.
    """
    from podgpu.serve.lifecycle import DEFAULT_RELEASE_SECONDS
    from podgpu.serve.routes import probe_routes

    bounds = bounds or Bounds()
    app = application(agent, protection, lifecycle, shown, bounds.scrapes)
    tls = protection.tls if protection else None
    listeners = [Listener(app, address, tls=tls, sockets=sockets)]
    if gpu_manager_address is not None:
        theirs = gpu_manager_application(agent, protection)
        words = "gpu-manager's metrics alone on %s/metric"
        listeners.append(Listener(theirs, gpu_manager_address, GPU_MANAGER_OPTION, tls, words))
    if probe_address is not None:
        listeners.append(probe_listener(probe_routes(agent), probe_address))
    release = partial(agent.release, DEFAULT_RELEASE_SECONDS)
    limits = replace(
        limits_for(len(listeners)), headers_seconds=bounds.read_seconds, answer_seconds=bounds.write_seconds
    )
    run(Several([agent, *beside]), listeners, lambda bound: on_listening(bound[0]), release, limits)


def probe_listener(handlers: list[web.RouteDef], address: Address) -> Listener:
    return Listener(make_application(handlers, None), address, PROBE_OPTION, announcement="probes alone on %s/livez")


def run(
    served: Served,
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None] = lambda bound: None,
    release: Callable[[], object] | None = None,
    limits: Limits | None = None,
) -> None:
    """Until SIGINT, SIGTERM or a fatal error of what is served. `on_listening` gets every listener's address, before
    what is served starts."""
    asyncio.run(_run(served, listeners, on_listening, release, limits or limits_for(len(listeners))))
    if served.fatal is not None:
        raise served.fatal


async def _run(
    served: Served,
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None],
    release: Callable[[], object] | None,
    limits: Limits,
) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop_signal, done.set)
    if release is not None:
        loop.add_signal_handler(signal.SIGUSR1, _one_at_a_time(release))
    loop.add_signal_handler(signal.SIGHUP, served.reload)
    async with AsyncExitStack() as at_the_end:
        at_the_end.enter_context(_foreign_logs_are_short())
        at_the_end.callback(served.stop)
        bound = [await at_the_end.enter_async_context(listening(listener, limits)) for listener in listeners]
        for listener, where in zip(listeners, bound, strict=True):
            if listener.announcement:
                _log.info(listener.announcement, where.url)
        on_listening(bound)
        served.start(on_fatal=partial(loop.call_soon_threadsafe, done.set))
        await done.wait()


def _one_at_a_time(work: Callable[[], object]) -> Callable[[], None]:
    """In another thread. Whoever asks while it is being done has asked for the same: a queue of what takes seconds
    would keep every thread, and the process from its end."""
    loop = asyncio.get_running_loop()
    doing: asyncio.Future[object] | None = None

    def do() -> None:
        nonlocal doing
        if doing is None or doing.done():
            doing = loop.run_in_executor(None, work)

    return do


@contextmanager
def _foreign_logs_are_short() -> Iterator[None]:
    """What asyncio and aiohttp say of visitors, they may have to say a thousand times a second."""
    seldom = OnceAMinute()
    for name in _FOREIGN_LOGS:
        logging.getLogger(name).addFilter(seldom)
    try:
        yield
    finally:
        for name in _FOREIGN_LOGS:
            logging.getLogger(name).removeFilter(seldom)


@asynccontextmanager
async def listening(listener: Listener, limits: Limits) -> AsyncIterator[Address]:
    """Answers for as long as it is entered; raises StartError that names the address."""
    runner = web.AppRunner(listener.app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        sockets = listener.sockets or await bind(listener.address, listener.option)
        entrance = Entrance(runner, sockets, listener.tls, limits)
        entrance.open()
        try:
            asked_for = None if listener.sockets else listener.address.host
            yield address_of(sockets[0], asked_for, secure=listener.tls is not None)
        finally:
            await entrance.close()
    finally:
        await runner.cleanup()


def application(
    agent: Agent,
    protection: Protection | None = None,
    lifecycle: bool = True,
    shown: BesideFigures | None = None,
    scrapes: int = 16,
) -> web.Application:
    from podgpu.serve.routes import NOTHING_BESIDE, routes

    return make_application(routes(agent, lifecycle, shown or NOTHING_BESIDE, scrapes), protection)


def gpu_manager_application(agent: Agent, protection: Protection | None = None) -> web.Application:
    """What gpu-manager itself would answer, as far as its metrics go."""
    from podgpu.serve.routes import gpu_manager_routes

    return make_application(gpu_manager_routes(agent), protection)


def make_application(handlers: list[web.RouteDef], protection: Protection | None) -> web.Application:
    guards = [protection.middleware] if protection else []
    app = web.Application(client_max_size=64 * 1024, middlewares=[note_request, *guards])
    app.add_routes(handlers)
    app.on_response_prepare.append(_with_safe_headers)
    return app


async def _with_safe_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, errors too: none of them is anything to a browser but what it says it is. What a handler or the
    web config says itself stands."""
    for name, value in _SAFE_HEADERS.items():
        response.headers.setdefault(name, value)
