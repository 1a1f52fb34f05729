"""Runs web applications on their addresses until a signal or a fatal error."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from podgpu.errors import StartError
from podgpu.tls import MakeTlsContext
from podgpu.web.connections import ConnectionLimits, LimitedServer
from podgpu.web.sockets import ADDRESS_OPTION, Address, address_of, bind

if TYPE_CHECKING:
    from podgpu.web.protection import Protection

PROBE_OPTION = "--probe-address"
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_log = logging.getLogger(__name__)


class Service(Protocol):
    """Background work that runs while the server is up, such as a node's agent or the loop of the cluster view."""

    @property
    def fatal(self) -> StartError | None:
        """The error that ends the process, or None."""

    def start(self, on_fatal: Callable[[], object]) -> None: ...
    def reload(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Listener:
    app: web.Application
    address: Address
    option: str = ADDRESS_OPTION
    tls: MakeTlsContext | None = None
    announcement: str = ""
    """Log message for when the listener is up; %s is replaced by its URL."""
    sockets: Sequence[socket.socket] = ()
    """Sockets that are already bound. If given, the address is not bound."""


def probe_listener(handlers: list[web.RouteDef], address: Address) -> Listener:
    return Listener(
        make_application(handlers, None), address, PROBE_OPTION, announcement="serving only probes on %s/livez"
    )


def make_application(handlers: list[web.RouteDef], protection: Protection | None) -> web.Application:
    app = web.Application(client_max_size=64 * 1024, middlewares=[protection.check_request] if protection else [])
    app.add_routes(handlers)
    if protection:
        app.on_response_prepare.append(protection.add_headers)
    app.on_response_prepare.append(_add_security_headers)
    return app


async def _add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)


def load_protection(path: str) -> Protection | None:
    """Reads the web config file. Returns None if the path is empty. Raises UsageError if the file is invalid."""
    if not path:
        return None
    from podgpu.web.protection import Protection  # imports bcrypt and YAML, which are needed only here

    return Protection(path)


def run(
    services: Sequence[Service],
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None] = lambda bound: None,
    release: Callable[[], object] | None = None,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
) -> None:
    """Runs until SIGINT, SIGTERM or a fatal error of a service.

    Calls `on_listening` with the addresses of all listeners before the services start, and `release` on SIGUSR1.
    """
    asyncio.run(_run(services, listeners, on_listening, release, limits))
    for service in services:
        if service.fatal is not None:
            raise service.fatal


async def _run(
    services: Sequence[Service],
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None],
    release: Callable[[], object] | None,
    limits: ConnectionLimits,
) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        _handle_signal(stop_signal, done.set)
    if release is not None:
        _handle_signal(signal.SIGUSR1, _run_once_at_a_time(release))

    def reload_all() -> None:
        for service in services:
            service.reload()

    _handle_signal(signal.SIGHUP, reload_all)
    async with AsyncExitStack() as stack:
        for service in services:
            stack.callback(service.stop)
        bound = [await stack.enter_async_context(listening(listener, limits)) for listener in listeners]
        for listener, address in zip(listeners, bound, strict=True):
            if listener.announcement:
                _log.info(listener.announcement, address.url)
        on_listening(bound)
        for service in services:
            service.start(on_fatal=partial(loop.call_soon_threadsafe, done.set))
        await done.wait()


def _handle_signal(number: signal.Signals, callback: Callable[[], object]) -> None:
    """Calls `callback` in the event loop when the signal arrives.

    `loop.add_signal_handler` would restore the default action when the loop is closed, so that a second SIGTERM would
    kill the process while it ends.
    """
    loop = asyncio.get_running_loop()

    def handle(_number: int, _frame: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    signal.signal(number, handle)


def _run_once_at_a_time(work: Callable[[], object]) -> Callable[[], None]:
    """Returns a signal handler that runs `work` in a thread. Signals that arrive while it runs are ignored."""
    loop = asyncio.get_running_loop()
    running: asyncio.Future[object] | None = None

    def run_unless_running() -> None:
        nonlocal running
        if running is None or running.done():
            running = loop.run_in_executor(None, work)

    return run_unless_running


@asynccontextmanager
async def listening(listener: Listener, limits: ConnectionLimits) -> AsyncIterator[Address]:
    """Serves requests while the context is open. Raises StartError if the address cannot be bound."""
    sockets = listener.sockets or await bind(listener.address, listener.option)
    server = asyncio.create_task(LimitedServer(listener.app, limits, listener.tls).serve(sockets))
    try:
        host = None if listener.sockets else listener.address.host
        yield address_of(sockets[0], host, secure=listener.tls is not None)
    finally:
        server.cancel()
        await asyncio.wait([server])
