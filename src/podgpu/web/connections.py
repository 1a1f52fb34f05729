"""This module decides who may stay connected, and for how long. It accepts an application's connections and owns them.

No visitor can take what the scrapers and probes need. Whoever was answered well has a place among the known; everybody
else is a stranger. The known have a fixed number of places, and so have strangers. When all are taken and another
comes, the stranger has to go who has been here longest, or of the known the one who was answered least often: a scraper
that comes again and again is the last to go.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from traceback import clear_frames
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu.clock import OnceAMinute

BACKLOG = 512
MakeContext = Callable[[], Awaitable[ssl.SSLContext]]
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_OWN_DESCRIPTORS = 64
"""What podgpu needs besides connections: files, sockets and the driver's device nodes."""
_WAITING_BYTES = 64 * 1024
"""Whoever leaves more of an answer unread counts as slow."""
_HEARD_AT_A_TIME = 4
"""Requests that are begun before the loop looks who else has come: each takes a third of a millisecond."""
_RESET = struct.pack("ii", 1, 0)
_CLOSED = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_log = logging.getLogger(__name__)
_log.addFilter(OnceAMinute())


@dataclass(frozen=True, slots=True)
class Limits:
    strangers: int = 128
    known: int = 128
    headers_seconds: float = 10.0
    """From the first byte, or from the connection's beginning and through its TLS handshake, to the last header."""
    answer_seconds: float = 60.0
    """From there until the answer is written: whoever reads slower is let go."""
    idle_seconds: float = 180.0
    """Between two requests: longer than Prometheus usually waits between two scrapes."""
    request_bytes: int = 16 * 1024
    """Headers and body together: nothing here takes a body."""
    unread_bytes: int = 16 * 1024 * 1024
    """What all who read slowly may keep waiting for them."""
    slow_seconds: float = 5.0
    """After which whoever reads slowly gives his place to the next who wants it."""
    look_seconds: float = 1.0
    """How often the times are looked at."""


def limits_for(listeners: int) -> Limits:
    """What this process' descriptors allow each of so many listeners."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (soft if soft != resource.RLIM_INFINITY else 1 << 20) - _OWN_DESCRIPTORS
    places = max(8, free // (4 * listeners))
    usual = Limits()
    return Limits(strangers=min(usual.strangers, places), known=min(usual.known, places))


class Connection(web.RequestHandler):
    """aiohttp's, which also knows since when it waits for what."""

    __slots__ = (
        *("_accepted", "_answering", "_beginning", "_has_ended", "_line", "_places", "_received", "_slow_since"),
        *("answers", "deadline", "idle_since", "when_answered"),
    )

    def __init__(self, places: Places, server: web.Server, accepted: Metered) -> None:
        limits = places.limits
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.idle_seconds,
            lingering_time=1.0,
        )
        self._places = places
        self._accepted = accepted
        self._line: asyncio.Transport | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._answering = False
        self._has_ended = False
        self._received = 0
        self._slow_since: float | None = None
        self.answers = 0
        self.idle_since = places.clock()
        """When it was last answered, or came."""
        self.when_answered: Callable[[], object] | None = None
        """What a handler wants to have done once its answer is sent, or cannot be."""
        self.deadline = places.clock() + limits.headers_seconds

    def begins(self, task: asyncio.Task[None]) -> None:
        """While the TLS handshake lasts there is a task, and no transport yet."""
        self._beginning = task

    @property
    def has_begun(self) -> bool:
        return self._line is not None

    def drop(self) -> None:
        self._places.forget(self)
        if self._line is not None:
            line = self._line.get_extra_info("socket")
            if line is not None and self.unread:  # else the kernel would keep it for them
                with suppress(OSError):
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._line.abort()
        elif self._beginning is not None:
            self._beginning.cancel()

    # What asyncio tells it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._line = transport
        transport.set_write_buffer_limits(_WAITING_BYTES)  # over TLS it would be eight times as much
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._beginning = None  # which knows by way of what it was cancelled, this connection too
        self._places.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answering:
            self.close()  # after this answer: see `understood`
        elif not self._received:
            self.deadline = self._places.clock() + self._places.limits.headers_seconds
        self._received += len(data)
        if self._received <= self._places.limits.request_bytes:
            self._places.have_read(self, data)
        elif self._answering or self._line is None:
            self.drop()
        else:
            self._line.write(_CLOSED)
            self._line.close()

    def read(self, data: bytes) -> None:
        """It is this one's turn."""
        if self._line is not None and not self._line.is_closing():
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: stays open. Who has said all that he will may still wait for an answer, as `printf … | nc` does. TLS
        has no such half connection."""
        if self._line is None or self._line.get_extra_info("sslcontext") is not None:
            return False
        self._has_ended = True
        if self._answering:
            self.close()
        else:  # no more will come: what is no request by then never will be
            self.deadline = min(self.deadline, self._places.clock() + 2 * self._places.limits.look_seconds)
        return self._answering or self._received > 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow_since = self._places.clock()
        self._places.reads_slowly(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slow_since = None
        self._places.reads_again(self)

    @property
    def reads_slowly(self) -> bool:
        return self._slow_since is not None

    @property
    def is_too_slow(self) -> bool:
        """For somebody whose place others want."""
        since, limits = self._slow_since, self._places.limits
        return since is not None and self._places.clock() - since > limits.slow_seconds

    @property
    def unread(self) -> int:
        return self._line.get_write_buffer_size() if self._line is not None else 0

    # What aiohttp tells it

    def understood(self) -> None:
        """A request's headers are all here.

        One that came along with another is the last: nobody who scrapes or looks asks before he has his answer, and
        whoever asks a thousand times in one packet would have us work for him alone.
        """
        if not self._received or self._has_ended:
            self.close()
        self._answering, self._received = True, 0
        self._accepted.allow()
        self.deadline = self._places.clock() + self._places.limits.answer_seconds

    async def finish_response(self, request: Any, resp: Any, start_time: Any) -> Any:
        try:
            done = await super().finish_response(request, resp, start_time)
        finally:
            when_answered, self.when_answered = self.when_answered, None
            if when_answered is not None:
                when_answered()
        limits, self._answering, self.idle_since = self._places.limits, False, self._places.clock()
        wait = limits.headers_seconds if self._received else limits.idle_seconds
        self.deadline = self.idle_since + wait
        if resp.status < 400:
            self._places.has_been_answered(self)
        return done

    def handle_error(self, request: Any, status: int = 500, exc: Any = None, message: str | None = None) -> Any:
        """Rubbish is answered and not logged: it is not podgpu's fault, and there may be much of it."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if exc is not None:
            clear_frames(exc.__traceback__)  # they hold the connection, which holds them
        answer = web.Response(status=status, text="podgpu does not understand this request\n")
        answer.force_close()
        return answer


@web.middleware
async def note_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware of every application."""
    connection: object = request.protocol
    if isinstance(connection, Connection):
        connection.understood()
    return await handler(request)


class Places:
    """Every connection of one listener; strangers as they came, the known as they were last answered."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.clock = clock
        self._strangers: dict[Connection, None] = {}
        self._known: dict[Connection, None] = {}
        self._slow: dict[Connection, None] = {}
        self._unheard: list[tuple[float, int, Connection, bytes]] = []
        """What came and was not looked at yet: a heap, who was idle longest first."""
        self._arrivals = count()

    def have_read(self, connection: Connection, data: bytes) -> None:
        """A few at a time, and who asks seldom before who asks all the time: behind a hundred who ask again as soon as
        they are answered, a scraper would wait for a hundred answers."""
        if not self._unheard:
            asyncio.get_running_loop().call_soon(self._hear)
        heappush(self._unheard, (connection.idle_since, next(self._arrivals), connection, data))

    def _hear(self) -> None:
        soon = asyncio.get_running_loop().call_soon
        for _ in range(min(_HEARD_AT_A_TIME, len(self._unheard))):
            _, _, connection, data = heappop(self._unheard)
            soon(self._read, connection, data)  # not here: one that breaks breaks no other
        if self._unheard:
            soon(self._hear)

    def _read(self, connection: Connection, data: bytes) -> None:
        if connection in self._strangers or connection in self._known:
            connection.read(data)

    def take(self, connection: Connection) -> None:
        if len(self._strangers) >= self.limits.strangers:
            _log.warning(
                "more than %d connections that have not been answered: the oldest are closed", self.limits.strangers
            )
            next(iter(self._strangers)).drop()
        self._strangers[connection] = None

    def has_been_answered(self, connection: Connection) -> None:
        if connection not in self._strangers and connection not in self._known:
            return  # dropped meanwhile
        self._strangers.pop(connection, None)
        connection.answers += 1
        if connection not in self._known and len(self._known) >= self.limits.known:
            min(self._known, key=lambda each: each.answers).drop()  # of several, who was answered least lately
        self._known.pop(connection, None)
        self._known[connection] = None

    def reads_slowly(self, connection: Connection) -> None:
        self._slow[connection] = None
        while len(self._slow) > 1 and sum(connection.unread for connection in self._slow) > self.limits.unread_bytes:
            _log.warning("clients read their answers too slowly: the slowest are disconnected")
            next(iter(self._slow)).drop()

    def reads_again(self, connection: Connection) -> None:
        self._slow.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        for room in (self._strangers, self._known, self._slow):
            room.pop(connection, None)

    def make_room(self) -> bool:
        """One goes, a stranger if there is one; False when nobody is here."""
        oldest = next(iter(self._strangers or self._known), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    def drop_overdue(self) -> None:
        now = self.clock()
        for connection in [c for room in (self._strangers, self._known) for c in room if c.deadline < now]:
            connection.drop()


class Entrance:
    """Accepts on the sockets and hands each connection to the runner's application."""

    def __init__(
        self, runner: web.AppRunner, sockets: Sequence[socket.socket], tls: MakeContext | None, limits: Limits
    ) -> None:
        assert runner.server is not None
        self._server = runner.server
        self._sockets = sockets
        self._tls = tls
        self._handshake_seconds = limits.headers_seconds
        self._places = Places(limits)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        for listening in self._sockets:
            self._keep(asyncio.create_task(self._accept_from(listening)))
        self._keep(asyncio.create_task(self._look_at_times()))

    async def close(self) -> None:
        """No more are accepted. Those who are here are the runner's to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept_from(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                await self._wait_after(error)
            else:
                self._welcome(accepted)
                await asyncio.sleep(0)  # one at a time: those who are here are read before the next is let in

    async def _wait_after(self, error: OSError) -> None:
        """Somebody who is here makes room. Asking the kernel again at once would only get the same answer."""
        room = error.errno in _EXHAUSTED and self._places.make_room()
        if error.errno in _EXHAUSTED:
            _log.error("no connection can be accepted (%s): raise LimitNOFILE or ulimit -n", error.strerror)
        await asyncio.sleep(0.01 if room else 0.5)

    def _welcome(self, accepted: socket.socket) -> None:
        accepted = Metered(accepted)
        connection = Connection(self._places, self._server, accepted)
        self._places.take(connection)
        task = self._keep(asyncio.create_task(self._begin(accepted, connection)))
        connection.begins(task)
        task.add_done_callback(lambda _: self._begun(accepted, connection))

    async def _begin(self, accepted: socket.socket, connection: Connection) -> None:
        loop, handshake = asyncio.get_running_loop(), {}
        context = await self._tls() if self._tls is not None else None
        if context is not None:
            handshake = {"ssl_handshake_timeout": self._handshake_seconds}
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, ssl=context, **handshake)
        except OSError as error:  # of a handshake that failed, or was too slow; ssl's errors are of this kind too
            clear_frames(error.__traceback__)
        except asyncio.CancelledError as error:
            clear_frames(error.__traceback__)  # what it came through holds the connection, in a circle
            raise

    def _begun(self, accepted: socket.socket, connection: Connection) -> None:
        """Also for a task that was cancelled before its first step."""
        if not connection.has_begun:
            connection.connection_lost(None)  # nobody else will say so
            accepted.close()

    async def _look_at_times(self) -> None:
        while True:
            await asyncio.sleep(self._places.limits.look_seconds)
            self._places.drop_overdue()


class Metered(socket.socket):
    """An accepted connection of which TLS reads little at a time, and no more in all than a request and a handshake
    take, until it is allowed more.

    Messages of TLS 1.3 may carry nothing and cost a new key each (KeyUpdate): a quarter of a megabyte of them, which
    asyncio reads at a time, takes 200 ms, for anybody who can connect, and no limit on requests counts them.
    """

    def __init__(self, accepted: socket.socket, at_a_time: int = 2 * 1024, most: int = 48 * 1024) -> None:
        """In the place of the given one, which is no more."""
        super().__init__(fileno=accepted.detach())
        self.setblocking(False)
        self._at_a_time = at_a_time
        self._most = self._left = most

    def allow(self) -> None:
        """As much again: what came was a request."""
        self._left = self._most

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """What asyncio's TLS calls, and nobody else."""
        if self._left <= 0:
            raise ConnectionResetError(errno.ECONNRESET, "more than a request takes")
        count = super().recv_into(buffer, min(nbytes or len(buffer), self._at_a_time), flags)
        self._left -= count
        return count
