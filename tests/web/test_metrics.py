"""Tests GET /metrics: encodings and stale values."""

from __future__ import annotations

import gzip
from collections import Counter

import pytest

from podgpu.metrics.encode import CONTENT_TYPE
from tests.nodes.node import Node
from tests.web.server import Answer, Client


def families(answer: Answer) -> set[str]:
    return {line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE ")}


def test_gzip(node: Node, client: Client) -> None:
    node.take_turns()
    plain = client.ask("/metrics")
    zipped = client.ask("/metrics", Accept_Encoding="deflate, gzip;q=0.8")
    assert "Content-Encoding" not in plain.headers
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped.body) == plain.body
    for answer in (plain, zipped):
        assert answer.status == 200
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
        assert int(answer.headers["Content-Length"]) == len(answer.body)


@pytest.mark.parametrize("refusal", ["gzip;q=0", "deflate, GZIP; q=0.000", "gzip ; q = 0."])
def test_gzip_that_the_client_refuses(refusal: str, node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/metrics", Accept_Encoding=refusal)
    assert "Content-Encoding" not in answer.headers
    assert answer.body == client.ask("/metrics").body


@pytest.mark.parametrize("wish", ["gzip", "GZIP;q=0.001", "identity;q=0, gzip;q=1"])
def test_gzip_that_the_client_accepts(wish: str, node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/metrics", Accept_Encoding=wish)
    assert answer.headers["Content-Encoding"] == "gzip"


def test_scrapes_do_not_call_the_driver_or_the_kubelet(node: Node, client: Client) -> None:
    node.take_turns()
    before = driver_calls(node), list(node.kubelet.calls)
    bodies = {client.ask("/metrics").body for _ in range(50)}
    assert len(bodies) == 1
    assert (driver_calls(node), list(node.kubelet.calls)) == before


def driver_calls(node: Node) -> Counter[str]:
    """Returns the number of calls per function, except those of the thread that waits for XIDs."""
    return Counter(
        {name: n for name, n in node.driver.calls.items() if name != "nvmlEventSetWait_v2"}
    )


def test_only_self_metrics_before_the_first_reading(client: Client) -> None:
    assert families(client.ask("/metrics")) == {"podgpu_exporter_build_info"}


def test_figures_older_than_three_intervals_are_left_out(node: Node, client: Client) -> None:
    node.take_turns()
    node.clock.advance(90.0)
    assert "DCGM_FI_DEV_GPU_UTIL" in families(client.ask("/metrics"))
    node.clock.advance(0.5)
    node.agent.read_allocation()
    stale = client.ask("/metrics")
    assert all(name.startswith("podgpu_exporter_") for name in families(stale))
    assert "podgpu_exporter_snapshot_timestamp_seconds 1700001061.0\n" in stale.text
    node.agent.read_telemetry()
    assert "DCGM_FI_DEV_GPU_UTIL" in families(client.ask("/metrics"))
