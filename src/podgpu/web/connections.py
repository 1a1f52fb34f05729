"""Accepts connections for an aiohttp application, and limits their number and duration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import MSG_PEEK, SHUT_RDWR, socket
from time import monotonic

from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu.clock import RepeatFilter
from podgpu.tls import MakeTlsContext
from podgpu.web.responses import send_response

_log = logging.getLogger(__name__)
_log.addFilter(RepeatFilter())

# The first five bytes of a request without TLS. The same as in Go.
_HTTP_STARTS = (b"GET /", b"HEAD ", b"POST ", b"PUT /", b"OPTIO")
_NOT_TLS = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
)
_MAX_REQUEST_BYTES = 65536


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    # Per listener. Three listeners use at most 768 of the usual 1,024 descriptors.
    max_connections: int = 256
    header_seconds: float = 10.0  # for the TLS handshake and the first complete request
    write_seconds: float = 60.0  # for computing and sending a response
    # From a response to the next request; longer than usual scrape intervals.
    idle_seconds: float = 180.0


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket
    deadline: float
    has_requests: bool = False
    is_answering: bool = False

    def close(self) -> None:
        # This makes asyncio close the socket, even during a TLS handshake.
        with suppress(OSError):
            self.socket.shutdown(SHUT_RDWR)


class LimitedServer:
    """Replaces `web.SockSite`.

    If there are too many connections, closes the one that has been idle longest.
    """

    def __init__(
        self, app: web.Application, limits: ConnectionLimits, make_tls: MakeTlsContext | None
    ) -> None:
        app.middlewares.insert(0, self._track_request)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=limits.idle_seconds,
            shutdown_timeout=1.0,
            max_headers=64,
        )
        self._limits = limits
        self._make_tls = make_tls
        # Ordered by the last complete request: the longest idle connection comes first.
        self._connections: dict[web.RequestHandler, _Connection] = {}

    async def serve(self, sockets: Sequence[socket]) -> None:
        """Accepts connections until the task is cancelled. The sockets must be non-blocking."""
        await self._runner.setup()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._close_overdue())
                for listener in sockets:
                    tasks.create_task(self._accept(listener, tasks))
        finally:
            for listener in sockets:
                listener.close()
            await self._runner.cleanup()

    async def _accept(self, listener: socket, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
                tasks.create_task(self._open(accepted))
                await asyncio.sleep(0)  # let other tasks run before the next accept
            except OSError as error:
                _log.error(
                    "cannot accept connections (%s): raise LimitNOFILE or ulimit -n", error.strerror
                )
                self._evict()
                await asyncio.sleep(0.1)

    def _remove_closed(self) -> None:
        for handler, connection in list(self._connections.items()):
            if connection.socket.fileno() < 0:
                del self._connections[handler]

    async def _open(self, accepted: socket) -> None:
        self._remove_closed()
        if len(self._connections) >= self._limits.max_connections:
            _log.warning("too many connections: closing those that have been idle longest")
            if not self._evict():
                accepted.close()
                return

        assert self._runner.server is not None
        handler = self._runner.server()
        timeout = self._limits.header_seconds
        self._connections[handler] = _Connection(accepted, monotonic() + timeout)
        try:
            is_plain = self._make_tls is not None and await _is_plain_http(accepted)
        except asyncio.CancelledError:
            accepted.close()
            raise

        if is_plain:
            _reject_plain_http(accepted)
            return

        loop = asyncio.get_running_loop()
        # A failed handshake must not stop the server.
        with suppress(Exception):
            if self._make_tls is None:
                await loop.connect_accepted_socket(lambda: handler, accepted)
            else:
                await loop.connect_accepted_socket(
                    lambda: handler, accepted, ssl=self._make_tls(), ssl_handshake_timeout=timeout
                )

    def _evict(self) -> bool:
        """Closes the longest idle connection, preferably one without any request.

        Returns False if none is idle.
        """
        idle = []
        silent = []
        for handler, connection in self._connections.items():
            if not connection.is_answering:
                idle.append(handler)
                if not connection.has_requests:
                    silent.append(handler)

        if not idle:
            return False
        longest = silent[0] if silent else idle[0]
        self._connections.pop(longest).close()
        return True

    @web.middleware
    async def _track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._connections.pop(request.protocol, None)
        if connection is None:
            # The connection was evicted while the request arrived.
            raise web.HTTPServiceUnavailable

        self._connections[request.protocol] = connection
        connection.deadline = monotonic() + self._limits.write_seconds
        connection.has_requests = True
        connection.is_answering = True
        try:
            return await send_response(request, await handler(request))
        finally:
            connection.is_answering = False
            connection.deadline = monotonic() + self._limits.idle_seconds

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(self._limits.header_seconds / 4)
            for connection in self._connections.values():
                if connection.deadline < monotonic():
                    connection.close()


async def _is_plain_http(accepted: socket) -> bool:
    """Waits for the first bytes of a client, and leaves them in the socket."""
    has_bytes = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(accepted, has_bytes.set)
    try:
        await has_bytes.wait()
        return accepted.recv(5, MSG_PEEK) in _HTTP_STARTS
    except OSError:
        # The TLS handshake then fails, too.
        return False
    finally:
        loop.remove_reader(accepted)


def _reject_plain_http(accepted: socket) -> None:
    with accepted, suppress(OSError):
        # If a closed socket has unread bytes, the client may lose the answer.
        accepted.recv(_MAX_REQUEST_BYTES)
        accepted.send(_NOT_TLS)
