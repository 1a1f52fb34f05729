"""`/api/v1/history` over real HTTP: an exporter's node, samples taken by hand; and a ring that was told of pods."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from podgpu.compose.histories import history_of, node_keeper
from podgpu.errors import SourceError
from podgpu.history.answering import RingHistory
from podgpu.history.asking import JSON, Range
from podgpu.history.keeper import Keeper
from podgpu.history.ring import Told
from podgpu.history.rows import Key
from podgpu.web.exporter_app import PageSources, application
from tests.history.figures import MIB, HandClock, gpu, holder, pod, wrong
from tests.nodes.node import Node
from tests.web.conftest import UUID
from tests.web.server import Client, running


def get(client: Client, path: str, status: int = 200) -> dict[str, Any]:
    answer = client.ask(path)
    assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json; charset=utf-8")
    found: dict[str, Any] = json.loads(answer.body)
    return found


class Told15:
    """A ring that is told what the test says, 15 s after 15 s, behind a server."""

    def __init__(self) -> None:
        self.hand = HandClock()
        self.now: list[Told] = []
        self.keeper = Keeper(lambda: self.now, self.hand.clock)

    def tell(self, *devices: Any, times: int = 1, fresh: bool = True) -> None:
        for _ in range(times):
            self.now = [Told(devices, fresh)]
            self.keeper.take()
            self.hand.pass_(15)

    @contextmanager
    def served(self, node: Node) -> Iterator[Client]:
        history = RingHistory(self.keeper.ring, self.keeper.clock)
        with running(node.agent, app=lambda agent: application(agent, page=PageSources(history))) as client:
            yield client


@pytest.fixture
def told() -> Told15:
    return Told15()


# The exporter


def test_an_exporter_keeps_what_its_page_shows(node: Node) -> None:
    keeper = node_keeper(node.agent)
    node.take_turns()
    keeper.take()
    with running(node.agent, app=lambda agent: application(agent, page=PageSources(history_of(keeper)))) as client:
        shown = json.loads(client.ask("/api/v1/view").body)["nodes"][0]["gpus"][0]
        said = get(client, f"/api/v1/history/gpus/{UUID}")
        lines = get(client, "/api/v1/history?points=60")
        of_pod = get(client, "/api/v1/history/pods/research/train?range=24h")
    assert (said["api"], said["uuid"], said["step_seconds"]) == ("podgpu/v1", UUID, 15)
    assert said["to"] - said["from"] == 3600
    series = said["series"]
    assert {name: len(values) for name, values in series.items()} == dict.fromkeys(series, 240)
    assert series["utilization_ratio"][-1] == pytest.approx(shown["utilization_ratio"], abs=1e-4)
    assert series["memory_used_bytes"][-1] == shown["memory_used_bytes"]
    assert series["power_watts"][-1] == pytest.approx(shown["power_watts"], abs=0.1)
    assert series["temperature_celsius"][-1] == shown["temperature_celsius"]
    assert {value for values in series.values() for value in values[:-1]} == {None}
    (held,) = said["holders"]
    assert (held["namespace"], held["pod"], held["container"]) == ("research", "train", "main")
    assert "to" not in held
    assert said["marks"] == []
    line = base64.b64decode(lines["devices"][UUID])
    assert (len(line), set(line[:-1])) == (60, {255})
    assert line[-1] / 200 == pytest.approx(shown["utilization_ratio"], abs=0.003)
    assert (lines["step_seconds"], lines["points"]) == (60, 60)
    (device,) = of_pod["devices"]
    assert (device["uuid"], device["node"], device["index"], of_pod["step_seconds"]) == (UUID, "node-1", 0, 300)
    assert device["series"]["utilization_ratio"][-1] == series["utilization_ratio"][-1]


def test_figures_that_are_too_old_are_not_kept(node: Node) -> None:
    keeper = node_keeper(node.agent)
    node.take_turns()
    node.clock.advance(1000.0)
    keeper.take()
    assert not keeper.ring.fine


# What is asked


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("?points=0", 400, "points='0': write a number from 1 to 240"),
        ("?points=241", 400, "from 1 to 240"),
        ("?points=-1", 400, "from 1 to 240"),
        ("?points=" + "9" * 5000, 400, "from 1 to 240"),
        ("?points=%D9%A3", 400, "from 1 to 240"),
        ("?points=", 400, "from 1 to 240"),
        ("/gpus/GPU-0?range=2h", 400, "range='2h': write one of 1h, 6h, 24h"),
        ("/gpus/GPU-0?range=", 400, "write one of"),
        ("/gpus/GPU-0?range=1h%00%0a", 400, "write one of"),
        ("/pods/research/a?range=" + "x" * 3000, 400, "write one of"),
        ("/gpus/GPU-99", 404, "nothing is known of GPU GPU-99 within the last day"),
        ("/gpus/GPU-0?instance=7", 404, "GPU-0/7"),
        ("/gpus/%3Cscript%3E", 404, "<script>"),
        ("/pods/research/nobody", 404, "pod research/nobody is not known to have held a GPU in that time"),
        ("/nothing", 404, "no such path"),
    ],
)
def test_what_cannot_be_answered_says_why(node: Node, told: Told15, path: str, status: int, says: str) -> None:
    told.tell(gpu(0, 0.5, holder(pod("a"))))
    with told.served(node) as client:
        assert says in get(client, f"/api/v1/history{path}", status)["error"]
        assert client.ask(f"/api/v1/history{path}", "POST").status == 405


def test_fewer_points_are_means_of_the_same_hour(node: Node, told: Told15) -> None:
    for ratio in (0.2, 0.4, 0.6, 0.8):
        told.tell(gpu(0, ratio))
    told.hand.pass_(-1)  # within the minute they are of
    with told.served(node) as client:
        fine = get(client, "/api/v1/history?points=240")
        coarse = get(client, "/api/v1/history?points=60")
        few = get(client, "/api/v1/history?points=100")
    assert list(base64.b64decode(fine["devices"]["GPU-0"]))[-4:] == [40, 80, 120, 160]
    assert base64.b64decode(coarse["devices"]["GPU-0"])[-1] == 100
    assert (few["points"], few["step_seconds"]) == (80, 45)
    assert fine["from"] + 240 * 15 == coarse["from"] + 60 * 60


def test_a_device_without_a_utilisation_has_no_line(node: Node, told: Told15) -> None:
    told.tell(gpu(0, None), gpu(0, 0.5, instance="7"))
    with told.served(node) as client:
        assert list(get(client, "/api/v1/history")["devices"]) == ["GPU-0/7"]
        assert get(client, "/api/v1/history/gpus/GPU-0?instance=7")["instance"] == "7"
        assert get(client, "/api/v1/history/gpus/GPU-0")["series"]["power_watts"][-2] == 300.0


def test_without_a_history_it_is_said(client: Client) -> None:
    assert get(client, "/api/v1/history", 404) == {"error": "no history is kept here"}


class Away:
    async def sparklines(self, asked: Range) -> bytes:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")

    async def gpu(self, device: Key, asked: Range) -> JSON | None:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")

    async def pod(self, namespace: str, pod: str, asked: Range) -> JSON | None:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")


@pytest.mark.parametrize("path", ["", "/gpus/GPU-0", "/pods/a/b"])
def test_whoever_keeps_it_is_away(node: Node, path: str) -> None:
    with running(node.agent, app=partial(application, page=PageSources(Away()))) as client:
        assert "no whole answer within 10 s" in get(client, f"/api/v1/history{path}", 503)["error"]


# Pods and what was wrong


def test_a_pod_on_a_shared_gpu_has_its_own_figures(node: Node, told: Told15) -> None:
    """Alone for a minute, then with another: its watts are not known then. After it has gone, nothing is its."""
    a, b = pod("a"), pod("b")
    told.tell(gpu(0, 0.5, holder(a, 0.5, 512 * MIB)), times=4)
    told.tell(gpu(0, 0.9, holder(a, 0.3, 100 * MIB), holder(b, 0.6, 200 * MIB)), times=4)
    told.tell(gpu(0, 0.6, holder(b, 0.6, 200 * MIB)), times=4)
    told.hand.pass_(-15)
    with told.served(node) as client:
        said = get(client, "/api/v1/history/pods/research/a")
        everything = get(client, "/api/v1/history/gpus/GPU-0")
    series = said["devices"][0]["series"]
    assert series["utilization_ratio"][-12:] == [0.5] * 4 + [0.3] * 4 + [None] * 4
    assert series["memory_used_bytes"][-12:] == [1024 * MIB] * 4 + [100 * MIB] * 4 + [None] * 4
    assert series["power_watts"][-12:] == [300.0] * 4 + [None] * 8
    assert series["temperature_celsius"][-12:] == [55.0] * 8 + [None] * 4
    began = everything["to"] - 12 * 15
    assert [(h["pod"], h["from"], h.get("to")) for h in everything["holders"]] == [
        ("a", began, began + 8 * 15),
        ("b", began + 4 * 15, None),
    ]


def test_two_containers_of_a_pod_add_up(node: Node, told: Told15) -> None:
    one, other = pod("a", container="one"), pod("a", container="other")
    told.tell(gpu(0, 0.9, holder(one, 0.3, 100 * MIB), holder(other, 0.4, 50 * MIB)))
    told.tell(gpu(0, 0.9, holder(one, 0.3), holder(other)))
    told.hand.pass_(-15)
    with told.served(node) as client:
        series = get(client, "/api/v1/history/pods/research/a")["devices"][0]["series"]
    assert series["utilization_ratio"][-2] == pytest.approx(0.7)
    assert series["utilization_ratio"][-1] == 0.9, "of one of them it is not known: nobody else is there"
    assert series["memory_used_bytes"][-2] == 150 * MIB


def test_what_was_wrong_is_a_mark_from_then_until_then(node: Node, told: Told15) -> None:
    began = told.hand.unix
    told.tell(gpu(0), times=2)
    told.tell(gpu(0, conditions=(wrong("xid", began + 20, "XID 48"),)), times=4)
    told.tell(gpu(0, conditions=(wrong("xid", began + 85, "XID 79"), wrong("thermal", None, "hot"))), times=4)
    told.tell(gpu(0, None, holder(pod("a")), conditions=(wrong("thermal", None, "very hot"),)), times=1)
    told.hand.pass_(-15)
    with told.served(node) as client:
        marks = get(client, "/api/v1/history/gpus/GPU-0")["marks"]
        of_pod = get(client, "/api/v1/history/pods/research/a")["marks"]
    assert marks == [
        {"at": began + 20, "until": began + 85, "condition": "xid", "says": "XID 48"},
        {"at": began + 85, "until": began + 150, "condition": "xid", "says": "XID 79"},
        {"at": began + 90, "condition": "thermal", "says": "very hot"},
    ]
    assert of_pod == [mark | {"uuid": "GPU-0"} for mark in marks]


def test_a_node_that_is_gone_is_marked_and_has_no_figures(node: Node, told: Told15) -> None:
    told.tell(gpu(0, 0.5, holder(pod("a"))), times=2)
    gone = gpu(0, 0.5, holder(pod("a")), conditions=(wrong("node_gone", None, "node-1 does not answer"),))
    told.tell(gone, times=2, fresh=False)
    told.hand.pass_(-15)
    with told.served(node) as client:
        said = get(client, "/api/v1/history/gpus/GPU-0")
        told.hand.pass_(600)
        later = get(client, "/api/v1/history/gpus/GPU-0")
    assert said["series"]["utilization_ratio"][-4:] == [0.5, 0.5, None, None]
    assert [(mark["condition"], "until" in mark) for mark in said["marks"]] == [("node_gone", False)]
    assert "to" not in said["holders"][0], "it may be back in a moment, and nobody says that it was let go"
    assert later["holders"][0]["to"] == said["holders"][0]["from"] + 15, "when it was last seen"
