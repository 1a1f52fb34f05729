"""Tests probes and unknown paths."""

from __future__ import annotations

from pathlib import Path

from podgpu.http_client import HttpClient
from podgpu.past.books.recorder import FILE_NAME
from podgpu.past.books.store import HistoryStore
from podgpu.web.exporter_app import node_pusher, node_recorder
from podgpu.web.push import PushSettings, Receiver
from tests.nodes.node import Description, Node, node_of
from tests.web.server import Client, running

PAST_STALE = 91.0
"""Seconds until the loop counts as stuck: three default intervals and one second."""


def test_healthy_until_the_loop_is_stuck(node: Node, client: Client) -> None:
    assert client.ask("/ready").status == 503
    node.take_turns()
    assert client.ask("/ready").status == 200
    for path in ("/health", "/livez"):
        assert (client.ask(path).status, client.ask(path).text) == (200, "OK\n")
    node.clock.advance(PAST_STALE)
    for path in ("/health", "/livez"):
        assert (client.ask(path).status, "loop is stuck" in client.ask(path).text) == (503, True)


def test_live_with_a_lost_gpu(node: Node, client: Client) -> None:
    node.take_turns()
    node.driver.faults.lose(1)
    node.kubelet.stop()
    node.agent.read_telemetry()
    node.agent.read_allocation()
    answer = client.ask("/livez")
    assert answer.status == 200
    heading, *lines = answer.text.splitlines()
    assert heading == "degraded"
    lost, unread, *sources = (line.split(": ") for line in lines)
    assert lost[0].startswith("GPU 1 of node node-1 (GPU-")
    assert unread[:2] == ["node node-1", "podgpu cannot read kubelet"]
    assert [line[:2] for line in sources] == [["gpu1", "gpu_lost"], ["kubelet", "socket_missing"]]


def test_live_but_not_ready_without_a_driver(folder: Path) -> None:
    described = Description(
        about="no driver", gpus="1xT4", on_the_bus=None, faults=[["unload_driver"]]
    )
    with node_of(described, folder) as node, running(node.agent) as client:
        node.take_turns()
        ready, health = client.ask("/ready"), client.ask("/health")
        assert ready.status == 503
        assert health.status == 200
        for answer in (ready, health):
            assert "nvml: driver_not_loaded: no NVIDIA driver is loaded on this node" in answer.text


def test_the_warnings_of_all_components_are_shown(node: Node, tmp_path: Path) -> None:
    node.take_turns()
    nobody = Receiver(HttpClient("http://127.0.0.1:1", timeout=10.0), "v1/metrics")
    pusher = node_pusher(node.agent, PushSettings(nobody, None))
    pusher.update()
    other = HistoryStore(tmp_path / FILE_NAME)
    recorder = node_recorder(node.agent, str(tmp_path))
    with running(node.agent) as client:
        text = client.ask("/livez").text
    recorder.stop()
    other.close()
    assert "nothing listens there" in text
    assert "in use by another podgpu" in text
