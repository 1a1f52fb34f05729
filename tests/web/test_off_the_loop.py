"""What may take long is not done where scrapes are answered: files, certificates, the page, the API server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import pytest
from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.figures.as_json import PageState
from podgpu.web.app import make_application
from podgpu.web.aside import Aside, Latest
from podgpu.web.auth import Passwords, guard
from podgpu.web.exporter_app import application
from podgpu.web.page_routes import page_routes
from podgpu.web.protection import Protection
from podgpu.web.routes import NodePage, routes
from podgpu.web.web_config import WebConfig
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node
from tests.web.process import CLUSTER, EXPORTER, podgpu
from tests.web.server import Client, running

T = TypeVar("T")


class Held(Generic[T]):
    """Stands for a disk, or for much work: does not return until it is let."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.entered, self.let = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self) -> T:
        self.calls += 1
        self.entered.set()
        assert self.let.wait(PATIENCE)
        return self._work()


OPEN = WebConfig(tls=None, headers={"X-Frame-Options": "deny"}, users={}, rate_limit=None)


@contextmanager
def guarded_by(node: Node, disk: Held[WebConfig | None]) -> Iterator[Client]:
    aside, passwords = Aside("test"), Passwords()
    current: Latest[WebConfig | None] = Latest(disk, OPEN, aside)
    protection = Protection(None, guard(current.now, None, passwords), lambda: None)
    try:
        with running(node.agent, app=partial(application, protection=protection)) as client:
            yield client
    finally:
        disk.let.set()
        passwords.close()
        aside.close()


@pytest.mark.fault(
    "the disk with the web config and the certificates hangs",
    "what was read last holds; scrapes and probes are answered without waiting for the disk",
)
def test_a_hung_disk_keeps_nobody_waiting(node: Node) -> None:
    node.take_turns()
    disk: Held[WebConfig | None] = Held(lambda: None)
    with guarded_by(node, disk) as client:
        for _ in range(20):
            answer = client.ask("/metrics")
            assert (answer.status, answer.headers["X-Frame-Options"]) == (200, "deny")
        assert disk.calls == 1, "no second thread waits for it"
        disk.let.set()
        wait_for_status(client, 500)  # what the disk said in the end counts again: None, it cannot be used


def wait_for_status(client: Client, status: int) -> None:
    give_up_at = time.monotonic() + PATIENCE
    while client.ask("/metrics").status != status:
        assert time.monotonic() < give_up_at


def test_what_is_on_the_disk_counts_at_once(node: Node) -> None:
    disk: Held[WebConfig | None] = Held(lambda: None)
    disk.let.set()
    with guarded_by(node, disk) as client:
        assert client.ask("/metrics").status == 500


@pytest.mark.parametrize("path", ["/api/v1/view", "/api/v1/pods/research/train"])
def test_the_page_is_not_made_where_scrapes_are_answered(node: Node, path: str) -> None:
    node.take_turns()
    held: Held[PageState] = Held(NodePage(node.agent).latest)

    def app(agent: Agent) -> object:
        scrapes = [route for route in routes(agent) if route.path == "/metrics"]
        return make_application([*scrapes, *page_routes(held)], None)

    with running(node.agent, app=app) as client, ThreadPoolExecutor(1) as elsewhere:  # type: ignore[arg-type]
        looking = elsewhere.submit(client.ask, path)
        assert held.entered.wait(PATIENCE)
        assert client.ask("/metrics").status == 200
        held.let.set()
        assert looking.result().status == 200


@pytest.mark.fault(
    "dozens look at the page at once, and what they look at takes long to make",
    "two of them at a time have a thread; a scraper who needs one, for a long exposition, finds one free",
)
def test_those_who_look_take_no_thread_from_a_scraper(node: Node) -> None:
    held: Held[PageState] = Held(NodePage(node.agent).latest)

    async def scraped(_request: web.Request) -> web.Response:
        return web.Response(body=await asyncio.to_thread(lambda: b"made in a thread"))

    def app(_agent: Agent) -> web.Application:
        return make_application([web.get("/metrics", scraped), *page_routes(held)], None)

    with running(node.agent, app=app) as client, ThreadPoolExecutor(40) as elsewhere:
        looking = [elsewhere.submit(client.ask, "/api/v1/view") for _ in range(40)]
        assert held.entered.wait(PATIENCE)
        assert [client.ask("/metrics").status for _ in range(20)] == [200] * 20
        assert held.calls <= 2
        held.let.set()
        assert {one.result(PATIENCE).status for one in looking} == {200}


def test_many_who_look_at_once_have_it_made_once(node: Node, client: Client) -> None:
    node.take_turns()
    with ThreadPoolExecutor(8) as elsewhere:
        answers = [one.result() for one in [elsewhere.submit(client.ask, "/api/v1/view") for _ in range(32)]]
    assert len({answer.headers["ETag"] for answer in answers}) == 1


# --- the API server


@pytest.fixture
def mute_server() -> Iterator[socket.socket]:
    """Accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE)
        yield listening


def still_waits(asking: socket.socket) -> bool:
    """Has asked, and not given up."""
    asking.settimeout(PATIENCE)
    asking.recv(65536)
    asking.setblocking(False)
    try:
        return asking.recv(65536) != b""
    except BlockingIOError:
        return True


def kubeconfig(folder: Path, server: str) -> str:
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return str(path)


CONFIGMAP = (*EXPORTER, "-m", "monitoring:counters")
DISCOVER = (*(CLUSTER[:1]), *CLUSTER[3:], "--discover-kubernetes", "monitoring/app=podgpu")


@pytest.mark.parametrize("command", [CONFIGMAP, DISCOVER], ids=["exporter", "cluster"])
@pytest.mark.fault(
    "the API server accepts connections and never answers, from before the start",
    "podgpu listens at once; /livez answers, and what the API server would tell is taken up when it does",
)
def test_probes_do_not_wait_for_the_api_server(
    command: tuple[str, ...], folder: Path, mute_server: socket.socket
) -> None:
    """The first question is given up after 10 s: until then all probes have been answered, in one of three starts at
    least, as a machine may stand still for long."""
    server = f"http://127.0.0.1:{mute_server.getsockname()[1]}"
    for _ in range(3):
        with podgpu((*command, "--kubeconfig", kubeconfig(folder, server)), folder) as process:
            first, _address = mute_server.accept()
            with first:
                assert [process.client.ask("/livez").status for _ in range(10)] == [200] * 10
                if still_waits(first):
                    return
        refuse_who_waits(mute_server)
    raise AssertionError("a probe waited until podgpu gave the API server up")


def refuse_who_waits(listening: socket.socket) -> None:
    """Those of a podgpu that has ended."""
    listening.settimeout(0.0)
    with suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
    listening.settimeout(PATIENCE)
