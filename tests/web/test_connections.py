"""Visitors who hold connections, headers, bodies and answers by the hundred, and what scrapers notice of it."""

from __future__ import annotations

import gc
import http.client
import logging
import resource
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.clock import OnceAMinute
from podgpu.web.app import make_application
from podgpu.web.connections import Limits, limits_for
from podgpu.web.routes import at_most
from tests.net import free_port
from tests.nodes.clock import PATIENCE, wait_until
from tests.nodes.node import Node
from tests.web.process import CLUSTER, EXPORTER, Process, podgpu
from tests.web.server import Client, running

MIB = 1024**2
SOON = Limits(headers_seconds=0.3, answer_seconds=0.3, idle_seconds=0.3, look_seconds=0.05)
BIG_HEADER = b"X-Filler: " + b"a" * 8000 + b"\r\n"


def open_socket(client: Client, receive_buffer: int = 0, source: str = "") -> socket.socket:
    opened = socket.socket()
    if source:
        opened.bind((source, 0))
    if receive_buffer:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    opened.settimeout(PATIENCE)
    opened.connect((client.address.host, client.address.port))
    return opened


@contextmanager
def holding(client: Client, number: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections at once, each with these first bytes sent."""
    with ExitStack() as held:
        sockets = [held.enter_context(open_socket(client)) for _ in range(number)]
        for one in sockets:
            push(one, first)
        yield sockets


def push(one: socket.socket, content: bytes) -> None:
    """As far as the other side takes it."""
    one.settimeout(0.5)
    with suppress(OSError):  # closed by the other side, or no more is read
        one.sendall(content)
    one.settimeout(PATIENCE)


def is_closed(one: socket.socket) -> bool:
    """By the other side; waits for it."""
    try:
        while one.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def stays(one: socket.socket) -> bool:
    """It has not been closed until now."""
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def is_served(process: Process) -> bool:
    return [process.client.ask(path).status for path in ("/metrics", "/livez", "/health")] == [200] * 3


# --- time


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
        b"POST /-/release HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["silence", "headers", "body", "second request", "idle"],
)
@pytest.mark.fault(
    "clients connect and never finish: no request, half of its headers, half of a body",
    "each is let go after 10 s, an idle one after 3 min; scrapes go on",
)
def test_nobody_stays_for_ever(node: Node, first: bytes) -> None:
    with running(node.agent, limits=SOON) as client, open_socket(client) as visitor:
        visitor.sendall(first)
        assert is_closed(visitor)


def test_a_byte_now_and_then_does_not_help(node: Node) -> None:
    with running(node.agent, limits=SOON) as client, open_socket(client) as visitor:
        visitor.sendall(b"GET /metrics HTTP/1.1\r\n")
        began = time.monotonic()
        visitor.settimeout(0.02)
        closed = False
        while not closed and time.monotonic() - began < PATIENCE:
            push_byte(visitor)
            try:
                closed = visitor.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
        assert closed


def push_byte(visitor: socket.socket) -> None:
    with suppress(OSError):
        visitor.send(b"X")


def test_who_asks_again_in_time_is_kept(node: Node) -> None:
    node.take_turns()
    patient = Limits(headers_seconds=0.2, answer_seconds=0.2, idle_seconds=PATIENCE, look_seconds=0.05)
    with running(node.agent, limits=patient) as client, open_socket(client) as other:
        scraper = client.connect()
        scraper.request("GET", "/metrics")
        scraper.getresponse().read()
        assert is_closed(other), "the times have been looked at"
        scraper.request("GET", "/metrics")
        assert scraper.getresponse().status == 200
        scraper.close()


# --- size


def test_big_headers_are_refused(client: Client) -> None:
    with open_socket(client) as visitor:
        visitor.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + BIG_HEADER)
        visitor.sendall(BIG_HEADER * 2)
        answer = b""
        try:
            while piece := visitor.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer


def test_rubbish_is_answered_and_not_logged(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    for rubbish in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\nX: \0\r\n\r\n"):
        with open_socket(client) as visitor:
            visitor.sendall(rubbish)
            assert visitor.recv(100).startswith(b"HTTP/1.")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.fault(
    "80 unfinished requests with 120 headers of 8 kB each, before any login",
    "each is refused past 16 KiB; memory stays where it was",
)
def test_big_headers_cost_no_memory(folder: Path) -> None:
    with podgpu(EXPORTER, folder) as process:
        wait_until(lambda: process.client.ask("/ready").status == 200, "podgpu is ready")
        with holding(process.client, 80):
            before = process.resident_bytes
        with holding(process.client, 80, b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + BIG_HEADER * 119):
            assert is_served(process)
            assert process.resident_bytes - before < 8 * MIB


# --- number


@pytest.mark.parametrize("command", [EXPORTER, CLUSTER], ids=["exporter", "cluster"])
@pytest.mark.fault(
    "10,000 slow clients hold connections and never ask",
    "the oldest of them are let go; every scrape and probe is answered, half of the scrapes within 50 ms, a "
    "scraper's connection stays, memory and descriptors are bounded, and the log says it in one line a minute",
)
def test_ten_thousand_slow_clients(command: tuple[str, ...], folder: Path) -> None:
    _allow_descriptors(10_500)
    with podgpu(command, folder) as process:
        scraper = process.client.connect()
        scrape(scraper)
        descriptors, memory = process.descriptors, process.resident_bytes
        with ExitStack() as held:
            waited = []
            for _ in range(40):
                held.enter_context(holding(process.client, 250, b"GET /metrics HTTP/1.1\r\n"))
                assert is_served(process)
                asked = time.monotonic()
                scrape(scraper)
                waited.append(time.monotonic() - asked)
            assert statistics.median(waited) < 0.05, waited
            assert process.descriptors - descriptors <= Limits().strangers + 8
            assert process.resident_bytes - memory < 16 * MIB
        wait_until(lambda: process.descriptors <= descriptors, "no descriptor is left behind")
        assert process.log.count("connections that have not been answered") in (1, 2), process.log
        scrape(scraper)
        scraper.close()


def scrape(connection: http.client.HTTPConnection) -> None:
    """On the same connection each time: a new one would be made only after `close`."""
    before = connection.sock
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    assert before is None or connection.sock is before


def _allow_descriptors(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        if hard != resource.RLIM_INFINITY and hard < number:
            pytest.skip(f"this machine allows {hard} descriptors, and the test holds {number}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def test_places_are_kept_for_those_who_were_answered(node: Node) -> None:
    """A stranger goes for a stranger, and one who was answered for one who was."""
    few = Limits(strangers=2, known=2)
    with running(node.agent, limits=few) as client, holding(client, 2) as early:
        first, second = client.connect(), client.connect()
        scrape(first)
        scrape(second)
        with holding(client, 2) as late:
            assert all(is_closed(one) for one in early)
            assert all(stays(one) for one in late)
            scrape(first)
            scrape(second)
            third = client.connect()
            scrape(third)
            assert first.sock is not None
            assert is_closed(first.sock), "of those answered equally often, it asked least lately"
            scrape(second)
            fourth = client.connect()
            scrape(fourth)
            assert third.sock is not None
            assert is_closed(third.sock), "answered least often"
            scrape(second)
        for one in (first, second, third, fourth):
            one.close()


@pytest.mark.fault(
    "a client asks a hundred times in one packet",
    "it is answered twice and let go; it does not keep podgpu busy for itself",
)
def test_who_asks_before_he_has_his_answer_is_let_go(client: Client) -> None:
    with open_socket(client) as visitor:
        visitor.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        answers = b""
        with suppress(ConnectionResetError):
            while piece := visitor.recv(65536):
                answers += piece
        assert 1 <= answers.count(b"HTTP/1.1 ") <= 2


@pytest.mark.fault(
    "dozens ask again as soon as they are answered, on connections they keep",
    "who asks seldom is answered first: a scrape waits for a few of the others, not for all of them",
)
def test_who_asks_seldom_goes_before_who_asks_all_the_time(node: Node) -> None:
    answered = 0

    async def busy(_request: web.Request) -> web.Response:
        nonlocal answered
        time.sleep(0.002)  # on the event loop, as work that every request costs there
        answered += 1
        return web.Response(text="ok")

    async def scraped(_request: web.Request) -> web.Response:
        return web.Response(text=str(answered))

    def app(_agent: Agent) -> web.Application:
        return make_application([web.get("/busy", busy), web.get("/metrics", scraped)], None)

    request, waited_for = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n", []
    with (
        running(node.agent, app=app) as client,
        asking_again(client, 80, request % b"busy"),
        open_socket(client) as scraper,
    ):
        for _ in range(15):
            pause_until(lambda seen=answered: answered > seen + 100)  # type: ignore[misc] # all of them once
            before = answered
            scraper.sendall(request % b"metrics")
            waited_for.append(int(scraper.recv(4096).rpartition(b"\r\n")[2]) - before)
    assert sorted(waited_for)[len(waited_for) // 2] < 40


def pause_until(true: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@contextmanager
def asking_again(client: Client, number: int, request: bytes) -> Iterator[None]:
    """So many connections, on each of which the next request follows the answer."""
    ended = threading.Event()

    def ask() -> None:
        with selectors.DefaultSelector() as ready, ExitStack() as held:
            for _ in range(number):
                one = held.enter_context(open_socket(client))
                one.sendall(request)
                ready.register(one, selectors.EVENT_READ)
            while not ended.is_set():
                for key, _ in ready.select(0.1):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.recv(65536)
                    key.fileobj.sendall(request)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/api/v1/view"])
def test_who_ends_his_side_has_his_answer(client: Client, path: str) -> None:
    """As `printf 'GET …' | nc` does."""
    with open_socket(client) as visitor:
        visitor.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        visitor.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := visitor.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 ")


@pytest.mark.fault(
    "clients hang up in the middle of a request",
    "each is let go within three seconds, not after the 10 s that are given to those who are there",
)
def test_who_ends_in_mid_request_is_not_waited_for(node: Node) -> None:
    patient = Limits(headers_seconds=10 * PATIENCE, look_seconds=0.05)
    with running(node.agent, limits=patient) as client, open_socket(client) as visitor:
        visitor.sendall(b"GET /metrics HTTP/1.1\r\n")
        visitor.shutdown(socket.SHUT_WR)
        assert is_closed(visitor)


@pytest.mark.fault(
    "clients hang up as soon as they have asked",
    "nothing is made for them, and nothing of it is in the log",
)
def test_who_hangs_up_at_once_is_not_in_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    for hang_up in (b"\1\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0"):  # by a reset, or as one should
        for _ in range(50):
            with open_socket(client) as visitor:
                visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hang_up)
                visitor.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    gc.collect()  # asyncio tells of a task that broke when it is thrown away
    assert client.ask("/metrics").status == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.fault(
    "clients ask for the metrics and never read them",
    "no more than 16 MiB wait for all of them together; the slowest are let go",
)
def test_slow_readers_are_let_go(node: Node) -> None:
    big = b"x" * (8 * MIB)

    async def exposition(_request: web.Request) -> web.Response:
        return web.Response(body=big)

    def app(_agent: Agent) -> web.Application:
        return make_application([web.get("/metrics", exposition)], None)

    with running(node.agent, app=app, limits=Limits(unread_bytes=10 * MIB)) as client, ExitStack() as held:
        readers = [held.enter_context(open_socket(client, receive_buffer=4096)) for _ in range(5)]
        for reader in readers:
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: not all(stays_unread(one) for one in readers), "one of them is let go")
        assert client.ask("/metrics").body == big


@pytest.mark.fault(
    "as many as may scrape at once ask for the metrics and never read them, again and again",
    "they give their places to scrapers from elsewhere at once, to those of their own address after five seconds",
)
@pytest.mark.parametrize(("source", "slow_seconds"), [("127.0.0.2", 60.0), ("127.0.0.1", 0.2)])
def test_who_does_not_read_keeps_no_scraper_out(node: Node, source: str, slow_seconds: float) -> None:
    async def exposition(_request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (8 * MIB))

    def app(_agent: Agent) -> web.Application:
        return make_application([web.get("/metrics", at_most(4, exposition))], None)

    limits = Limits(unread_bytes=1024 * MIB, slow_seconds=slow_seconds)
    with running(node.agent, app=app, limits=limits) as client, ExitStack() as held:
        for _ in range(4):
            reader = held.enter_context(open_socket(client, 4096, source))
            reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            reader.recv(100)
        wait_until(lambda: client.ask("/metrics").status == 200, "a scraper has a place")
        assert [client.ask("/metrics").status for _ in range(3)] == [200] * 3


def stays_unread(one: socket.socket) -> bool:
    """Without reading: whether the other side has reset it."""
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


# --- descriptors


@pytest.mark.fault(
    "the process runs out of descriptors",
    "a visitor goes for the next who comes, or accepting waits half a second; the log says it once a minute, nothing "
    "spins, and it is over when there are descriptors again",
)
def test_no_descriptors_left(folder: Path) -> None:
    with podgpu(EXPORTER, folder) as process:
        wait_until(lambda: process.client.ask("/ready").status == 200, "podgpu is ready")
        _, hard = resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE)
        few = process.descriptors + 6
        lines = len(process.log.splitlines())
        resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (few, hard))
        with holding(process.client, 60):
            for _ in range(10):
                assert is_served(process)
        wait_until(lambda: process.descriptors < few, "the visitors are gone")

        resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (3, hard))
        with holding(process.client, 20):
            before, began = process.cpu_seconds, time.monotonic()
            time.sleep(1.0)  # not for luck: for as long, the processor is watched
            assert (process.cpu_seconds - before) / (time.monotonic() - began) < 0.5
            resource.prlimit(process.popen.pid, resource.RLIMIT_NOFILE, (hard, hard))
            assert is_served(process)
        told = [line for line in process.log.splitlines()[lines:] if "LimitNOFILE" in line]
        assert len(told) == 1
        assert "Traceback" not in process.log


@pytest.mark.parametrize(("descriptors", "places"), [(64, 8), (128, 16), (1024, 128), (1 << 20, 128)])
def test_places_follow_the_descriptors(descriptors: int, places: int, with_descriptors: Callable[[int], None]) -> None:
    with_descriptors(descriptors)
    assert limits_for(1).strangers == limits_for(1).known == places


@pytest.fixture
def with_descriptors() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(number: int) -> None:
        if hard != resource.RLIM_INFINITY and number > hard:
            pytest.skip(f"this machine allows {hard} descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- the probes' own address, and the log


def test_the_probes_own_address_is_guarded_too(folder: Path) -> None:
    port = free_port()
    with podgpu((*EXPORTER, "--probe-address", f"127.0.0.1:{port}"), folder) as process:
        probes = Client(type(process.client.address)("127.0.0.1", port))
        with holding(probes, 300):
            assert [probes.ask(path).status for path in ("/livez", "/health")] == [200, 200]
            assert is_served(process)


def test_what_repeats_is_said_once_a_minute() -> None:
    now = [0.0]
    seldom = OnceAMinute(lambda: now[0])

    def said(text: str) -> str | None:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, text, ("a",), None)
        return record.getMessage() if seldom.filter(record) else None

    assert said("no room for %s") == "no room for a"
    assert said("other %s") == "other a"
    assert [said("no room for %s") for _ in range(3)] == [None] * 3
    now[0] = 60.0
    assert said("no room for %s") == "no room for a (and 3 more like it since the last such line)"
    assert said("other %s") == "other a"
