"""Scrapes and probes do not wait for the page or the API server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from podgpu.figures.prices import no_prices
from podgpu.web.exporter_app import PageSources, application
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node
from tests.web.process import CLUSTER, EXPORTER, podgpu
from tests.web.server import running


@pytest.mark.parametrize("path", ["/api/v1/view", "/api/v1/pods/research/train"])
def test_scrapes_do_not_wait_for_the_page(node: Node, path: str) -> None:
    node.take_turns()
    entered, go = threading.Event(), threading.Event()

    def read_prices() -> object:
        entered.set()
        assert go.wait(PATIENCE)
        return no_prices()

    app = partial(application, page=PageSources(prices=read_prices))  # type: ignore[arg-type]
    with running(node.agent, app=app) as client, ThreadPoolExecutor(8) as threads:
        views = [threads.submit(client.ask, path) for _ in range(3)]
        assert entered.wait(PATIENCE)
        assert client.ask("/metrics").status == 200
        go.set()
        assert {view.result().status for view in views} == {200}
        assert len({view.result().body for view in views}) == 1


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
