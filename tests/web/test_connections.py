"""Tests the limits on connections with real sockets."""

from __future__ import annotations

import asyncio
import http.client
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from podgpu.web.app import make_application
from podgpu.web.connections import ConnectionLimits
from podgpu.web.responses import limit_concurrency
from tests.nodes.clock import PATIENCE, wait_until
from tests.nodes.node import Node
from tests.process import EXPORTER, podgpu
from tests.web.server import Client, running

# Only one of the limits is short, apart from `header_seconds`: overdue connections are looked for
# four times within it.
NO_REQUEST = ConnectionLimits(header_seconds=0.3)
NO_BODY = ConnectionLimits(header_seconds=0.3, write_seconds=0.3)
IDLE = ConnectionLimits(header_seconds=0.3, idle_seconds=0.3)
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(client: Client, receive_buffer: int = 0) -> socket.socket:
    opened = socket.socket()
    if receive_buffer:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    opened.settimeout(PATIENCE)
    opened.connect((client.address.host, client.address.port))
    return opened


@contextmanager
def connections(client: Client, number: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(connect(client)) for _ in range(number)]
        for each in sockets:
            with suppress(OSError):
                each.sendall(first)
        yield sockets


def is_closed(opened: socket.socket) -> bool:
    """Waits until the server closes the connection. Returns False after the timeout."""
    try:
        while opened.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize(
    ("first", "limits"),
    [
        (b"", NO_REQUEST),
        (REQUEST[:20], NO_REQUEST),
        (b"POST /-/release HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc", NO_BODY),
        (REQUEST, IDLE),
    ],
    ids=["silence", "half of the headers", "half of a body", "idle"],
)
@pytest.mark.fault(
    "Clients connect and never finish: no request, half of its headers, half of a body",
    "Each is closed after 10 s, an idle one after 3 min; scrapes go on",
)
def test_unfinished_connections_are_closed(
    node: Node, first: bytes, limits: ConnectionLimits
) -> None:
    with running(node.agent, limits=limits) as client, connections(client, 1, first) as (opened,):
        assert is_closed(opened)


def test_connections_that_are_not_overdue_stay_open(node: Node) -> None:
    """The server looks for overdue connections every second."""
    limits = ConnectionLimits(header_seconds=4.0)
    app = small_application
    with running(node.agent, app=app, limits=limits) as client, connect(client) as opened:
        for _ in range(2):
            time.sleep(1.3)
            assert get_status(opened) == 200


@pytest.mark.fault(
    "Thousands of clients hold connections and send no request",
    (
        "The oldest are closed; a scraper keeps its connection, new ones are answered, and "
        "descriptors are limited"
    ),
)
def test_many_silent_clients(folder: Path) -> None:
    with podgpu(EXPORTER, folder) as process, ExitStack() as stack:
        scraper = process.client.connect()
        stack.callback(scraper.close)
        for _ in range(1000):
            stack.enter_context(connect(process.client))
        assert process.client.ask("/metrics").status == 200
        scraper.request("GET", "/livez")
        kept = scraper.sock
        assert scraper.getresponse().read()
        assert scraper.sock is kept
        assert process.descriptors < 400
        assert process.log.count("closing those that have been idle longest") == 1


def get_status(opened: socket.socket) -> int:
    """Sends a request over a connection and reads the whole response."""
    opened.sendall(REQUEST)
    response = http.client.HTTPResponse(opened)
    response.begin()
    response.read()
    return response.status


async def small(_request: web.Request) -> web.Response:
    return web.Response(text="small")


def small_application(_agent: object) -> web.Application:
    return make_application([web.get("/", small)], None)


def test_the_oldest_silent_connection_is_evicted_first(node: Node) -> None:
    limits = ConnectionLimits(max_connections=3)
    with running(node.agent, app=small_application, limits=limits) as client, ExitStack() as stack:
        scraper = stack.enter_context(connect(client))
        assert get_status(scraper) == 200
        older, younger = [stack.enter_context(connect(client)) for _ in range(2)]

        stack.enter_context(connect(client))
        assert is_closed(older)
        assert get_status(younger) == 200
        assert get_status(scraper) == 200


def test_the_connection_with_the_oldest_request_is_evicted(node: Node) -> None:
    limits = ConnectionLimits(max_connections=2)
    with running(node.agent, app=small_application, limits=limits) as client, ExitStack() as stack:
        first, second = [stack.enter_context(connect(client)) for _ in range(2)]
        statuses = [get_status(opened) for opened in (first, second, first)]
        assert statuses == [200, 200, 200]

        new = stack.enter_context(connect(client))
        assert is_closed(second)
        assert get_status(first) == 200
        assert get_status(new) == 200


def test_a_connection_is_not_evicted_while_it_is_answered(node: Node) -> None:
    is_asked = threading.Event()
    may_answer = threading.Event()

    async def slow(_request: web.Request) -> web.Response:
        is_asked.set()
        await asyncio.to_thread(may_answer.wait, PATIENCE)
        return web.Response(text="slow")

    def app(_agent: object) -> web.Application:
        return make_application([web.get("/", slow)], None)

    limits = ConnectionLimits(max_connections=1)
    with running(node.agent, app=app, limits=limits) as client, connect(client) as answered:
        answered.sendall(REQUEST)
        assert is_asked.wait(PATIENCE)
        with connect(client) as rejected:
            assert is_closed(rejected)
        may_answer.set()
        assert answered.recv(65536).startswith(b"HTTP/1.1 200 ")


async def large(_request: web.Request) -> web.Response:
    return web.Response(body=bytes(8 << 20))


@pytest.mark.fault(
    "Clients request the metrics and do not read them",
    "Each is closed after 60 s; scrapers are answered meanwhile",
)
def test_slow_readers_are_closed(node: Node) -> None:
    async def answer(request: web.Request) -> web.Response:
        return await (small(request) if request.query_string else large(request))

    def app(_agent: object) -> web.Application:
        limited = web.get("/", limit_concurrency(1, answer))
        return make_application([limited, web.get("/small", small)], None)

    limits = ConnectionLimits(header_seconds=2.0, write_seconds=12.0)
    with running(node.agent, app=app, limits=limits) as client, connect(client, 4096) as slow:
        slow.sendall(REQUEST)
        wait_until(lambda: client.ask("/?small").status == 503, "the response is being sent")
        assert client.ask("/small").status == 200
        wait_until(lambda: client.ask("/?small").status == 200, "the slow reader is closed")
        received = 0
        with suppress(OSError):
            while chunk := slow.recv(65536):
                received += len(chunk)
        assert received < 8 << 20


def test_scrapes_are_limited_until_they_are_sent(node: Node) -> None:
    def app(_agent: object) -> web.Application:
        return make_application([web.get("/", limit_concurrency(2, large))], None)

    with running(node.agent, app=app) as client, ExitStack() as stack:
        slow = [stack.enter_context(connect(client, 4096)) for _ in range(2)]
        for opened in slow:
            opened.sendall(REQUEST)
        wait_until(lambda: client.ask("/").status == 503, "the limit is reached")
        assert client.ask("/").text == "scrape concurrency limit reached\n"
        for opened in slow:
            opened.close()
        wait_until(lambda: client.ask("/").status == 200, "the limit is free again")


def test_a_scrape_at_the_limit_waits_for_those_that_are_soon_done(node: Node) -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return await small(request)

    def app(_agent: object) -> web.Application:
        return make_application([web.get("/", limit_concurrency(1, answer))], None)

    with running(node.agent, app=app) as client, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(client.ask, "/") for _ in range(4)]
        assert [one.result(PATIENCE).status for one in asked] == [200] * 4


@pytest.mark.fault(
    "The process runs out of descriptors",
    (
        "Idle connections are closed for new ones; the log has one line a minute; "
        "it recovers without a restart"
    ),
)
def test_no_descriptors_left(folder: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with podgpu(EXPORTER, folder, before=few) as process:
        with connections(process.client, 100), suppress(OSError, http.client.HTTPException):
            process.client.ask("/metrics")
        wait_until(
            lambda: process.client.ask("/metrics").status == 200, "scrapes are answered again"
        )
        assert process.log.count("cannot accept connections") <= 1
