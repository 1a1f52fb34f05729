"""Accepts connections for an aiohttp application and limits their number, duration and memory use."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import SHUT_RDWR, socket
from time import monotonic

from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu.clock import RepeatFilter

MakeTlsContext = Callable[[], ssl.SSLContext]
"""Called for each new connection, so that renewed certificates are picked up."""
_log = logging.getLogger(__name__)
_log.addFilter(RepeatFilter())


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 256
    """Per listener. Three listeners use at most 768 of the usual 1,024 file descriptors."""
    header_seconds: float = 10.0
    """Time limit for the TLS handshake and the first complete request."""
    write_seconds: float = 60.0
    """Time limit for computing and sending a response."""
    idle_seconds: float = 180.0
    """Time limit between a response and the next request. Longer than usual scrape intervals."""
    max_unread_bytes: int = 16 * 1024 * 1024
    """Total size of all responses that clients have not read yet."""


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket
    deadline: float
    transport: asyncio.Transport | None = None
    """None until the first complete request."""
    is_answering: bool = False

    @property
    def unread_bytes(self) -> int:
        if self.transport is None or self.transport.is_closing():  # a closed TLS transport has no size
            return 0
        return self.transport.get_write_buffer_size()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)  # makes asyncio close the socket, even during a TLS handshake


class LimitedServer:
    """Replaces `web.SockSite`. At the connection limit, closes the connection that has been idle longest."""

    def __init__(self, app: web.Application, limits: ConnectionLimits, make_tls: MakeTlsContext | None = None) -> None:
        app.middlewares.insert(0, self._track_request)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=limits.idle_seconds,
            lingering_time=1.0,
            shutdown_timeout=1.0,
            max_headers=64,
        )
        self._limits, self._make_tls = limits, make_tls
        self._connections: dict[web.RequestHandler, _Connection] = {}
        """Ordered by the time of the last complete request, oldest first."""
        self._sockets: Sequence[socket] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, sockets: Sequence[socket]) -> None:
        """Accepts connections until `close`. The sockets must be non-blocking."""
        await self._runner.setup()
        self._sockets = sockets
        for listener in sockets:
            self._run(self._accept(listener))
        self._run(self._close_overdue())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._sockets:
            listener.close()
        await self._runner.cleanup()

    def _run(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket) -> None:
        while True:
            try:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                _log.error("cannot accept connections (%s): raise LimitNOFILE or ulimit -n", error.strerror)
                self._evict()
                await asyncio.sleep(0.1)
            else:
                self._run(self._open(accepted))
                await asyncio.sleep(0)  # let other tasks run before the next accept

    async def _open(self, accepted: socket) -> None:
        self._connections = {key: each for key, each in self._connections.items() if each.socket.fileno() >= 0}
        is_full = len(self._connections) >= self._limits.max_connections
        if is_full:
            _log.warning(
                "more than %d connections: closing those that have been idle longest", self._limits.max_connections
            )
        if self._runner.server is None or (is_full and not self._evict()):
            return accepted.close()
        handler, timeout = self._runner.server(), self._limits.header_seconds
        self._connections[handler] = _Connection(accepted, monotonic() + timeout)
        tls = self._make_tls() if self._make_tls is not None else None
        with suppress(OSError):  # the TLS handshake failed
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, accepted, ssl=tls, ssl_handshake_timeout=timeout if tls else None
            )

    def _evict(self) -> bool:
        """Closes the longest idle connection; returns False if none is idle.

        If half of the limit is used by connections that never sent a request, closes one of these, so that scrapers
        stay connected.
        """
        idle = [handler for handler, each in self._connections.items() if not each.is_answering]
        new = [handler for handler in idle if self._connections[handler].transport is None]
        if idle:
            self._connections.pop(new[0] if 2 * len(new) >= self._limits.max_connections else idle[0]).close()
        return bool(idle)

    @web.middleware
    async def _track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (connection := self._connections.pop(request.protocol, None)) is None:
            raise web.HTTPServiceUnavailable  # the connection was evicted while the request arrived
        self._connections[request.protocol] = connection
        connection.deadline = monotonic() + self._limits.write_seconds
        connection.transport, connection.is_answering = request.transport, True
        self._close_slow_readers()
        try:
            return await send_response(request, await handler(request))
        finally:
            connection.is_answering = False
            connection.deadline = monotonic() + self._limits.idle_seconds

    def _close_slow_readers(self) -> None:
        slow = [each for each in self._connections.values() if each.unread_bytes]
        while len(slow) > 1 and sum(each.unread_bytes for each in slow) > self._limits.max_unread_bytes:
            slow.pop(0).close()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._close_slow_readers()
            for connection in self._connections.values():
                if connection.deadline < monotonic():
                    connection.close()


async def send_response(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Returns when the response is fully written, so that the count of running scrapes includes slow clients."""
    with suppress(ConnectionError):  # the client has closed the connection
        await response.prepare(request)
        await response.write_eof()
    return response
