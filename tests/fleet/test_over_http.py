"""Broken GPUs in `podgpu cluster` with real exporters: the alerts are equal to those of the
exporters.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from podgpu.clock import Clock
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.view import decode_view
from podgpu.web.cluster_app import cluster_application
from tests.agent.gpu_bench import GpuBench, bench_of
from tests.web.server import Client, running

FORGET = {"X_Podgpu_Request": "forget"}


class ClusterBench:
    """The exporter of one node with four GPUs, and a cluster that scrapes it when a test calls
    `round`.
    """

    def __init__(self, node: GpuBench, loop: asyncio.AbstractEventLoop) -> None:
        self.node = node
        self._loop = loop
        self._clock = Clock(lambda: node.time, node.wall)
        self.cluster = Cluster(self._make, ViewSettings(), clock=self._clock)
        self._plug = ExitStack()
        address = self._plug.enter_context(running(node.agent)).address
        self._plugged = True
        self._url = f"http://{address.host}:{address.port}/metrics"
        self._collector = self._make()
        self.client: Client

    def _make(self) -> ScrapeCollector:
        return ScrapeCollector(lambda: [self._url], ViewSettings(), clock=self._clock)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def round(self, seconds: float = 15.0) -> dict[str, Any]:
        """Runs a round after this time, and a turn of the node unless it is unplugged."""
        if self._plugged:
            self.node.turn(seconds=seconds)
        else:
            self.node.time += seconds
        self._wait(self.cluster.round(self._collector))
        return self.view()

    def view(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.client.ask("/api/v1/view").body)
        return found

    def gpu(self, number: int) -> dict[str, Any]:
        uuid = self.node.uuid(number)
        (found,) = (g for node in self.view()["nodes"] for g in node["gpus"] if g["uuid"] == uuid)
        return dict(found)

    def unplug(self) -> None:
        """Closes the exporter's port."""
        self._plug.close()
        self._plugged = False

    def close(self) -> None:
        self._plug.close()
        self._wait(self._collector.close())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, name="rounds")
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@pytest.fixture
def bench(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Iterator[ClusterBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as node, cluster_of(node, loop) as made:
        yield made


@contextmanager
def cluster_of(node: GpuBench, loop: asyncio.AbstractEventLoop) -> Iterator[ClusterBench]:
    made = ClusterBench(node, loop)
    app: Any = cluster_application
    with running(made.cluster, app=app) as made.client:  # type: ignore[arg-type]
        try:
            yield made
        finally:
            made.close()


def assert_same_words(bench: ClusterBench) -> list[str]:
    """Checks that the views, both /health and `top` show the same alerts, and returns their
    texts.
    """
    of_node = json.loads(bench.node.client.ask("/api/v1/view").body)["alerts"]
    of_cluster = bench.view()["alerts"]
    assert of_cluster == of_node
    texts = [alert["text"] for alert in of_cluster]
    for client in (bench.client, bench.node.client):
        lines = client.ask("/health").text.splitlines()
        assert [text for text in texts if text not in lines] == []
        assert [
            alert.text for alert in decode_view(client.ask("/api/v1/view").body).alerts
        ] == texts
    return texts


@pytest.mark.fault(
    "GPUs of a node are lost, hang, or tell of an XID that needs action",
    "podgpu cluster shows each of them as broken, with the holder, since when and what to do, in "
    "the very words of the"
    " node's own page and /health",
)
def test_the_cluster_says_what_the_node_says(bench: ClusterBench) -> None:
    assert bench.round()["alerts"] == []
    assert bench.client.ask("/health").text == "OK\n"
    node = bench.node
    node.faults.lose(1, enumerated=False)
    node.expected = 3
    node.faults.answer("nvmlDeviceGetRemappedRows", (0, 1, 1, 0), 0)
    node.faults.raise_xid(2, 95)
    for _ in range(12):
        node.turn(seconds=5.0)
    view = bench.round()
    words = assert_same_words(bench)
    assert len(words) == 3
    conditions = {n: [c["condition"] for c in bench.gpu(n).get("conditions", ())] for n in range(4)}
    assert conditions == {0: ["row_remap_pending"], 1: ["lost"], 2: ["xid"], 3: []}
    of_node = json.loads(node.client.ask("/api/v1/view").body)["nodes"][0]["gpus"]
    (lost,) = (g for g in of_node if g["uuid"] == node.uuid(1))
    seen = bench.gpu(1)
    for member in ("index", "model", "absent", "conditions"):
        assert seen[member] == lost[member], member
    assert [h["pod"] for h in seen["holders"]] == ["p1"]
    assert (view["totals"]["gpus"], view["totals"]["broken"], view["totals"]["allocated"]) == (
        4,
        3,
        4,
    )


@pytest.mark.fault(
    "A node dies, with its exporter",
    "After --stale-after podgpu cluster says that it is gone and how many GPUs went with it; they "
    "stay, with"
    " the condition node_gone and who held them, while its exporter is listed; "
    "podgpu_device_health tells it for each",
)
def test_a_node_that_is_gone(bench: ClusterBench) -> None:
    bench.round()
    assert 'condition="node_gone"} 0' in bench.client.ask("/metrics").text
    bench.node.faults.lose(3)
    bench.node.turn()
    bench.round()
    died_at = bench.node.wall()
    bench.unplug()
    bench.round()
    assert not bench.view()["nodes"][0].get("gone"), "one missed round is not enough"
    view = bench.round(40.0)
    (node,) = view["nodes"]
    assert (node["gone"], node["old"], len(node["gpus"])) == (True, True, 4)
    assert [c["condition"] for c in bench.gpu(0)["conditions"]] == ["node_gone"]
    assert [c["condition"] for c in bench.gpu(3)["conditions"]] == ["lost", "node_gone"]
    since = bench.gpu(0)["conditions"][0]["since"]
    assert since == pytest.approx(died_at, abs=1.0)
    assert [h["pod"] for h in bench.gpu(0)["holders"]] == ["p0"]
    gone = view["alerts"][0]
    assert gone["text"].startswith("node h does not answer, with its 4 GPUs: ")
    assert (gone["severity"], gone["node"]) == ("broken", "h")
    assert gone["text"] in bench.client.ask("/health").text.splitlines()
    exposition = bench.client.ask("/metrics").text
    assert exposition.count('condition="node_gone"} 1') == 4
    assert view["totals"]["unknown"] == view["totals"]["allocated"] == 4


def test_forgetting_on_the_cluster(bench: ClusterBench) -> None:
    node, ask = bench.node, bench.client.ask
    bench.round()
    uuid = node.uuid(1)
    here = ask(f"/-/forget?gpu={uuid}", "POST", **FORGET)
    assert here.status == 409
    assert ask("/-/forget?gpu=GPU-nobody", "POST", **FORGET).status == 404
    assert ask(f"/-/forget?gpu={uuid}", "POST").status == 403
    node.faults.lose(1)
    node.turn()
    bench.round()
    answer = ask(f"/-/forget?gpu={uuid}", "POST", **FORGET)
    assert (answer.status, answer.text.split(".")[0]) == (
        200,
        f"{uuid} is removed from this page until it reappears",
    )
    view = bench.round()
    assert [g["index"] for g in view["nodes"][0]["gpus"]] == [0, 2, 3]
    assert view["alerts"] == []
    assert ask(f"/-/forget?gpu={uuid}", "POST", **FORGET).status == 404
    node.faults.recover(1)
    node.turn()
    bench.round()
    assert "conditions" not in bench.gpu(1), "the GPU returned"
    node.faults.lose(1)
    node.turn()
    bench.round()
    assert bench.gpu(1)["absent"], "a GPU that is lost again is shown again"


def test_a_gpu_s_own_view_is_asked_of_its_exporter(bench: ClusterBench) -> None:
    bench.round()
    uuid = bench.node.uuid(2)
    of_node = json.loads(bench.node.client.ask(f"/api/v1/gpus/{uuid}").body)
    answer = bench.client.ask(f"/api/v1/gpus/{uuid}")
    assert answer.status == 200
    of_cluster = json.loads(answer.body)
    for member in ("fields", "xids", "sources", "method"):
        assert of_cluster[member] == of_node[member], member
    assert (of_cluster["node"], of_cluster["gpu"]["uuid"]) == ("h", uuid)
    values = {field["name"]: field["value"] for field in of_cluster["fields"]}
    assert values["DCGM_FI_DEV_ENFORCED_POWER_LIMIT"] == 700
    assert values["nvlinks_up"] == 18
    assert bench.client.ask("/api/v1/gpus/GPU-nobody").status == 404
    bench.unplug()
    (source,) = json.loads(bench.client.ask(f"/api/v1/gpus/{uuid}").body)["sources"]
    assert (source["source"], source["ok"]) == ("exporter", False)
