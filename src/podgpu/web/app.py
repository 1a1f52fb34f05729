"""This module puts applications on addresses and runs them until it is told to stop, whatever they serve."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from podgpu.clock import OnceAMinute
from podgpu.errors import StartError
from podgpu.web.connections import Entrance, Limits, MakeContext, limits_for, note_request
from podgpu.web.sockets import ADDRESS_OPTION, Address, address_of, bind

if TYPE_CHECKING:
    # It brings YAML and bcrypt, for those who have a web config only.
    from podgpu.web.protection import Protection

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
class Listener:
    app: web.Application
    address: Address
    option: str = ADDRESS_OPTION
    tls: MakeContext | None = None
    announcement: str = ""
    """What is logged once it listens, with %s for its URL."""
    sockets: Sequence[socket.socket] = ()
    """Bound already, in place of the address."""


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


def make_application(handlers: list[web.RouteDef], protection: Protection | None) -> web.Application:
    guards = [protection.middleware] if protection else []
    app = web.Application(client_max_size=64 * 1024, middlewares=[note_request, *guards])
    app.add_routes(handlers)
    app.on_response_prepare.append(_with_safe_headers)
    return app


@contextmanager
def protected_by(path: str) -> Iterator[Protection | None]:
    """As the web config there says, if there is a path. Raises UsageError."""
    if not path:
        yield None
        return
    from podgpu.web.protection import protect

    protection = protect(path)
    try:
        yield protection
    finally:
        protection.close()


async def _with_safe_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, errors too: none of them is anything to a browser but what it says it is. What a handler or the
    web config says itself stands."""
    for name, value in _SAFE_HEADERS.items():
        response.headers.setdefault(name, value)
