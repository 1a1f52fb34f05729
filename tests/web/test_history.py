"""Tests `/api/v1/history` over real HTTP: the recorded history of a node, and invalid requests."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any

import pytest

from podgpu.errors import SourceError
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.events import EventQuery, EventsAnswer
from podgpu.past.gpu_history import JSON
from podgpu.past.interface import Past
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.exporter_app import application, build_state, node_recorder
from tests.nodes.node import Node
from tests.simulated import stop_after_test
from tests.web.conftest import UUID
from tests.web.server import Client, running


def get(client: Client, path: str, status: int = 200) -> dict[str, Any]:
    answer = client.ask(path)
    assert (answer.status, answer.headers["Content-Type"]) == (
        status,
        "application/json; charset=utf-8",
    )
    found: dict[str, Any] = json.loads(answer.body)
    return found


def past_of(node: Node, recorder: HistoryRecorder) -> Past:
    return SqlitePast(recorder, lambda: build_state(node.agent))


def test_an_exporter_records_what_its_page_shows(node: Node) -> None:
    recorder = node_recorder(node.agent)
    stop_after_test.append(recorder.stop)
    node.take_turns()
    assert recorder.record()
    past = past_of(node, recorder)
    with running(node.agent, app=partial(application, past=past)) as client:
        shown = json.loads(client.ask("/api/v1/view").body)["nodes"][0]["gpus"][0]
        said = get(client, f"/api/v1/history/gpus/{UUID}")
        lines = get(client, "/api/v1/history")
        of_pod = get(client, "/api/v1/history/pods/research/train?range=24h")
    series = said["series"]
    (ratio,) = (value for value in series["utilization_ratio"] if value is not None)
    assert ratio == pytest.approx(shown["utilization_ratio"], abs=1e-4)
    (power,) = (value for value in series["power_watts"] if value is not None)
    assert power == pytest.approx(shown["power_watts"], abs=0.1)
    (held,) = said["holders"]
    assert (held["namespace"], held["pod"], held["container"]) == ("research", "train", "main")
    assert ("to" in held, said["marks"]) == (False, [])
    assert max(
        byte for byte in base64.b64decode(lines["devices"][UUID]) if byte != 255
    ) / 200 == pytest.approx(shown["utilization_ratio"], abs=0.003)
    (device,) = of_pod["devices"]
    assert (device["uuid"], device["node"], device["index"]) == (UUID, "node-1", 0)


def test_figures_that_are_too_old_are_not_recorded(node: Node) -> None:
    recorder = node_recorder(node.agent)
    stop_after_test.append(recorder.stop)
    node.take_turns()
    node.clock.advance(1000.0)
    assert not recorder.record()


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/gpus/GPU-0?range=2y", 400, "range='2y': write a length of time, such as"),
        ("/gpus/GPU-99", 404, "no history of GPU GPU-99"),
        ("/gpus/%3Cscript%3E", 404, "<script>"),
        (
            "/pods/research/nobody",
            404,
            "there is no record that pod research/nobody held a GPU in this time range",
        ),
    ],
)
def test_what_cannot_be_answered_says_why(node: Node, path: str, status: int, says: str) -> None:
    recorder = node_recorder(node.agent)
    stop_after_test.append(recorder.stop)
    past = past_of(node, recorder)
    with running(node.agent, app=partial(application, past=past)) as client:
        assert says in get(client, f"/api/v1/history{path}", status)["error"]
        assert client.ask(f"/api/v1/history{path}", "POST").status == 405


class Away(Past):
    async def sparklines(self) -> JSON:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")

    async def gpu(self, uuid: str, instance: str, seconds: int) -> None:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")

    async def pod(self, namespace: str, pod: str, seconds: int, cluster: str | None = None) -> None:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")

    async def events(self, query: EventQuery) -> EventsAnswer:
        raise SourceError("timeout", "http://prometheus:9090: no whole answer within 10 s")


def test_prometheus_has_events_but_no_summaries(node: Node) -> None:
    with running(node.agent, app=partial(application, past=Away())) as client:
        assert "no summaries" in get(client, "/api/v1/summary/a/b", 404)["error"]
        assert "no whole answer" in get(client, "/api/v1/events", 503)["error"]
        assert 'id="tab-events">' in client.ask("/").text


@pytest.mark.parametrize("path", ["", "/gpus/GPU-0", "/pods/a/b"])
def test_prometheus_does_not_answer(node: Node, path: str) -> None:
    with running(node.agent, app=partial(application, past=Away())) as client:
        assert "no whole answer within 10 s" in get(client, f"/api/v1/history{path}", 503)["error"]
