"""Tests that scrapes and probes do not wait for the page or the API server."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from podgpu.fleet.prices import no_prices
from podgpu.web.exporter_app import application
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node, kubeconfig
from tests.process import CLUSTER, podgpu
from tests.web.server import running


def test_scrapes_do_not_wait_for_the_page(node: Node) -> None:
    node.take_turns()
    entered, go = threading.Event(), threading.Event()

    def read_prices() -> object:
        entered.set()
        assert go.wait(PATIENCE)
        return no_prices()

    app = partial(application, prices=read_prices)  # type: ignore[arg-type]
    with running(node.agent, app=app) as client, ThreadPoolExecutor(8) as threads:
        views = [threads.submit(client.ask, "/api/v1/view") for _ in range(3)]
        assert entered.wait(PATIENCE)
        assert client.ask("/metrics").status == 200
        go.set()
        assert {view.result().status for view in views} == {200}
        assert len({view.result().body for view in views}) == 1


DISCOVER = (*CLUSTER, "--discover-kubernetes", "monitoring/app=podgpu")


@pytest.mark.fault(
    "The API server accepts connections and never answers, from before the start",
    (
        "podgpu listens at once and answers /livez; answers of the API server are used when they "
        "arrive"
    ),
)
def test_probes_do_not_wait_for_the_api_server(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        silent_server.settimeout(PATIENCE)
        server = f"http://127.0.0.1:{silent_server.getsockname()[1]}"
        (folder / "kubeconfig").write_text(kubeconfig(server))
        arguments = (*DISCOVER, "--kubeconfig", str(folder / "kubeconfig"))
        with podgpu(arguments, folder) as process, silent_server.accept()[0]:
            assert [process.client.ask("/livez").status for _ in range(10)] == [200] * 10
