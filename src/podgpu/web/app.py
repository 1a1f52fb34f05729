"""Runs web applications until a signal or a fatal error.

The sockets are bound by podgpu or passed by systemd.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from podgpu.errors import StartError, UsageError
from podgpu.http_client import url_host
from podgpu.tls import MakeTlsContext
from podgpu.web.connections import ConnectionLimits, LimitedServer
from podgpu.web.responses import open_own_threads

if TYPE_CHECKING:
    from podgpu.web.protection import Protection

PROBE_OPTION = "--probe-address"
SYSTEMD_OPTION = "--web-systemd-socket"
_BACKLOG = 512
_UNIX = "unix:"
_ADDRESS = re.compile(r"(?:\[(?P<ipv6>.*)\]|(?P<host>[^:]*)):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535
_FIRST_DESCRIPTOR = 3
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    host: str  # host name or IP address; empty for all interfaces
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        if self.host.startswith(_UNIX):
            return self.host
        host = url_host(self.host or "localhost")
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parses `:9400`, `127.0.0.1:9400`, `[::1]:9400` and `name:9400`. Raises UsageError."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} must be HOST:PORT, :PORT or [IPV6]:PORT, such as :9400")

    host = match["ipv6"] or match["host"] or ""
    port = int(match["port"])
    if port > _MAX_PORT:
        raise UsageError(f"{text!r}: the port must be a number from 0 to {_MAX_PORT}")
    return Address(host, port)


class Service(Protocol):
    """Background work that runs while the server is up.

    Examples are a node's agent and the loop of the cluster view.
    """

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
    option: str = "-a"
    tls: MakeTlsContext | None = None
    announcement: str = ""  # logged when the listener is up; %s is replaced by its URL
    # Bound sockets that replace `address`, for example from systemd.
    sockets: Sequence[socket.socket] = ()


def make_listeners(
    main: Listener, probes: list[web.RouteDef], probe_address: Address | None
) -> list[Listener]:
    """If `probe_address` is given, adds a listener for probes.

    It has no TLS or login: the kubelet cannot log in.
    """
    listeners = [main]
    if probe_address is not None:
        app = make_application(probes, None)
        text = "serving only probes on %s/livez"
        listeners.append(Listener(app, probe_address, PROBE_OPTION, announcement=text))
    return listeners


def make_application(
    handlers: list[web.RouteDef], protection: Protection | None
) -> web.Application:
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(handlers)
    app.cleanup_ctx.append(open_own_threads)
    if protection:
        app.middlewares.append(protection.check_request)
        app.on_response_prepare.append(protection.add_headers)
    app.on_response_prepare.append(_add_security_headers)
    return app


async def _add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in _SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)


def load_protection(path: str) -> Protection | None:
    """Reads the web config file. Raises UsageError if it is invalid.

    Returns None if the path is empty.
    """
    if not path:
        return None

    # Imports bcrypt and YAML, which are needed only here.
    from podgpu.web.protection import Protection

    try:
        return Protection(path)
    except UsageError as error:
        raise UsageError(f"--web-config-file {error}") from error


def run(
    services: Sequence[Service],
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None] = lambda bound: None,
    release: Callable[[], object] | None = None,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008 - frozen
) -> None:
    """Runs until SIGINT, SIGTERM or a fatal error of a service.

    Calls `on_listening` with the addresses of all listeners before the services start. Calls
    `release` on SIGUSR1.
    """
    asyncio.run(_serve(services, listeners, on_listening, release, limits))
    for service in services:
        if service.fatal is not None:
            raise service.fatal


async def _serve(
    services: Sequence[Service],
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None],
    release: Callable[[], object] | None,
    limits: ConnectionLimits,
) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def reload_all() -> None:
        for service in services:
            service.reload()

    _handle_signal(signal.SIGINT, done.set)
    _handle_signal(signal.SIGTERM, done.set)
    _handle_signal(signal.SIGHUP, reload_all)
    if release is not None:
        _handle_signal(signal.SIGUSR1, _run_once_at_a_time(release))

    async with AsyncExitStack() as stack:
        # They stop after the listeners, also if an address cannot be bound.
        for service in services:
            stack.callback(service.stop)

        bound = await _listen(stack, listeners, limits)
        on_listening(bound)
        stop = partial(loop.call_soon_threadsafe, done.set)
        for service in services:
            service.start(on_fatal=stop)

        await done.wait()


async def _listen(
    stack: AsyncExitStack, listeners: Sequence[Listener], limits: ConnectionLimits
) -> list[Address]:
    """Announces the addresses when all of them are bound."""
    bound = []
    for listener in listeners:
        address = await stack.enter_async_context(listening(listener, limits))
        bound.append(address)

    for listener, address in zip(listeners, bound, strict=True):
        if listener.announcement:
            _log.info(listener.announcement, address.url)

    return bound


def _handle_signal(number: signal.Signals, callback: Callable[[], object]) -> None:
    """Calls `callback` in the event loop when the signal arrives.

    `loop.add_signal_handler` is not used, because it restores the default action when the loop is
    closed. Then a second SIGTERM would kill the process during shutdown.
    """
    loop = asyncio.get_running_loop()

    def handle(_number: int, _frame: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    signal.signal(number, handle)


def _run_once_at_a_time(work: Callable[[], object]) -> Callable[[], None]:
    """Returns a signal handler that runs `work` in a thread.

    Ignores signals that arrive while `work` runs.
    """
    loop = asyncio.get_running_loop()
    running: asyncio.Future[object] | None = None

    def run_unless_running() -> None:
        nonlocal running
        if running is None or running.done():
            running = loop.run_in_executor(None, work)

    return run_unless_running


@asynccontextmanager
async def listening(listener: Listener, limits: ConnectionLimits) -> AsyncIterator[Address]:
    """Serves requests while the context is open.

    Raises StartError if the address cannot be bound.
    """
    sockets = listener.sockets
    host = None
    if not sockets:
        sockets = await bind(listener.address, listener.option)
        host = listener.address.host

    server = LimitedServer(listener.app, limits, listener.tls)
    serving = asyncio.create_task(server.serve(sockets))
    try:
        yield address_of(sockets[0], host, secure=listener.tls is not None)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


# Sockets


def _explain_bind_error(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return str(error)

    # asyncio's own text repeats the address. Newer versions of Python give no number if the
    # address belongs to another machine.
    number = error.errno or errno.EADDRNOTAVAIL
    # Errors of the resolver have negative numbers.
    if number > 0:
        return os.strerror(number)

    return error.strerror or str(error)


async def bind(address: Address, option: str) -> list[socket.socket]:
    """Listens on every IP address of the host name. Raises StartError if that fails."""
    loop = asyncio.get_running_loop()
    try:
        # This server only resolves names and binds sockets. LimitedServer accepts the connections.
        server = await loop.create_server(
            asyncio.Protocol,
            address.host or None,
            address.port,
            backlog=_BACKLOG,
            start_serving=False,
        )
    except (OSError, UnicodeError) as e:
        # A host name such as a..b raises UnicodeError.
        raise StartError(
            f"cannot listen on {url_host(address.host)}:{address.port}: {_explain_bind_error(e)}; "
            f"choose another address with {option}"
        ) from e

    # The server closes its own sockets, so these are copies.
    bound = []
    for opened in server.sockets:
        descriptor = os.dup(opened.fileno())
        bound.append(socket.socket(fileno=descriptor))
    server.close()
    for listener in bound:
        listener.listen(_BACKLOG)
        listener.setblocking(False)

    return bound


def open_systemd_sockets(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Returns the sockets that systemd passed to this process (see sd_listen_fds).

    Raises UsageError if there are none. Removes the LISTEN_* variables, so that child processes do
    not use the sockets.
    """
    # A parent process may have passed its variables on.
    is_for_us = environment.pop("LISTEN_PID", "") == str(os.getpid())
    listed = environment.pop("LISTEN_FDS", "")
    try:
        count = int(listed) if is_for_us else 0
        sockets = [socket.socket(fileno=_FIRST_DESCRIPTOR + number) for number in range(count)]
        listening = [s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for s in sockets]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{SYSTEMD_OPTION}: cannot use systemd's sockets (LISTEN_FDS={listed}): {error}"
        ) from error

    if not sockets or not all(listening):
        raise UsageError(
            f"{SYSTEMD_OPTION}: systemd passed no listening socket to this process. "
            "Start podgpu through podgpu.socket (systemctl enable --now podgpu.socket; "
            "it needs ListenStream= and Accept=no), or use -a instead"
        )

    for opened in sockets:
        opened.set_inheritable(False)
        opened.setblocking(False)

    return sockets


def address_of(listening: socket.socket, host: str | None, secure: bool) -> Address:
    """Returns the address of a bound socket. `host` replaces the host in this address."""
    name = listening.getsockname()
    scheme = "https" if secure else "http"
    if not isinstance(name, tuple):
        return Address(f"{_UNIX}{name}", 0, scheme)
    if host is None:
        host = "" if name[0] in ("0.0.0.0", "::") else name[0]
    return Address(host, name[1], scheme)
