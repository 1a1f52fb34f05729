"""Tests that scrapes and probes do not wait for the page or the API server."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podgpu.errors import SourceError
from podgpu.fleet.prices import no_prices
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.pending.queue import QueueSnapshot
from podgpu.web.cluster_app import cluster_application
from podgpu.web.exporter_app import application
from tests.fleet.states import gpu
from tests.fleet.states import node as cluster_node
from tests.fleet.test_loop import Script, Time, tell
from tests.nodes.clock import PATIENCE
from tests.nodes.node import Node, kubeconfig
from tests.process import CLUSTER, podgpu
from tests.web.server import running

MANY = 40  # more than the pool has threads: at most 32


def test_scrapes_do_not_wait_for_the_page(node: Node) -> None:
    node.take_turns()
    entered, go = threading.Event(), threading.Event()

    def read_prices() -> object:
        entered.set()
        assert go.wait(PATIENCE)
        return no_prices()

    app = partial(application, prices=read_prices)  # type: ignore[arg-type]
    with running(node.agent, app=app) as client, ThreadPoolExecutor(MANY) as threads:
        views = [threads.submit(client.ask, "/api/v1/view") for _ in range(MANY)]
        assert entered.wait(PATIENCE)
        assert client.ask("/metrics").status == 200
        go.set()
        assert {view.result().status for view in views} == {200}
        assert len({view.result().body for view in views}) == 1


def test_scrapes_of_the_cluster_do_not_wait_for_its_page() -> None:
    entered, go = threading.Semaphore(0), threading.Event()

    def read_queue() -> QueueSnapshot:
        entered.release()
        assert go.wait(PATIENCE)
        raise SourceError("not_asked", "the API server was not read yet")

    cluster = Cluster(Script, ViewSettings(), clock=Time().clock)
    reading = ClusterReading((cluster_node("n-1", gpu(0, used=40.0), read_at=100.0),))
    asyncio.run(cluster.round(Script(tell(reading))))
    app: Any = partial(cluster_application, read_queue=read_queue)
    with running(cluster, app=app) as client, ThreadPoolExecutor(MANY) as threads:  # type: ignore[arg-type]
        answers = [threads.submit(client.ask, "/api/v1/queue") for _ in range(MANY)]
        assert entered.acquire(timeout=PATIENCE)
        assert "# TYPE avg_GPU_utilization gauge" in client.ask("/metrics").text
        assert client.ask("/metrics/nodes").status == 200
        go.set()
        assert {answer.result().status for answer in answers} == {503}


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
