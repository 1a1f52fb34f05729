"""GET /metrics: prepared bytes, in the encoding asked for, and never a figure that is too old."""

from __future__ import annotations

import gzip
from collections import Counter

import pytest

from podgpu.metrics.text import CONTENT_TYPE
from podgpu.web.responses import accepts_gzip
from tests.nodes.node import Node
from tests.web.server import Answer, Client


def families(answer: Answer) -> set[str]:
    return {line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE ")}


def test_plain_unless_gzip_is_asked_for(node: Node, client: Client) -> None:
    node.take_turns()
    plain = client.ask("/metrics")
    zipped = client.ask("/metrics", Accept_Encoding="deflate, gzip;q=0.8")
    refused = client.ask("/metrics", Accept_Encoding="gzip;q=0")
    assert "Content-Encoding" not in plain.headers
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped.body) == plain.body == refused.body
    assert "Content-Encoding" not in refused.headers
    for answer in (plain, zipped, refused):
        assert answer.status == 200
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
        assert int(answer.headers["Content-Length"]) == len(answer.body)


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("deflate, gzip", True),
        ("gzip;q=0.5", True),
        ("gzip ; q=1.0", True),
        ("*", True),
        ("", False),
        ("deflate, br", False),
        ("identity", False),
        ("x-gzipped", False),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("*;q=0", False),
        ("gzip;q=0, *", False),
        ("*, gzip;q=0", False),
        ("*;q=0, gzip", True),
    ],
)
def test_what_accepts_gzip(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted


def test_head_is_get_without_a_body(node: Node, client: Client) -> None:
    node.take_turns()
    get, head = client.ask("/metrics"), client.ask("/metrics", "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == get.headers["Content-Length"]
    assert head.headers["Content-Type"] == CONTENT_TYPE


def test_a_scrape_touches_no_driver_and_no_kubelet(node: Node, client: Client) -> None:
    node.take_turns()
    before = driver_calls(node), list(node.kubelet.calls)
    bodies = {client.ask("/metrics").body for _ in range(50)}
    assert len(bodies) == 1
    assert (driver_calls(node), list(node.kubelet.calls)) == before


def driver_calls(node: Node) -> Counter[str]:
    """All but the XID watch's, which waits for events in a thread of its own all the time."""
    return Counter({name: n for name, n in node.driver.calls.items() if name != "nvmlEventSetWait_v2"})


def test_before_the_first_reading_only_self_metrics(client: Client) -> None:
    assert families(client.ask("/metrics")) == {"podgpu_exporter_build_info"}


def test_figures_are_withheld_past_three_intervals(node: Node, client: Client) -> None:
    node.take_turns()
    node.clock.advance(90.0)
    assert "DCGM_FI_DEV_GPU_UTIL" in families(client.ask("/metrics"))
    node.clock.advance(0.5)
    stale = client.ask("/metrics")
    assert all(name.startswith("podgpu_exporter_") for name in families(stale))
    assert "podgpu_exporter_snapshot_timestamp_seconds 1700001061.0\n" in stale.text
    assert gzip.decompress(client.ask("/metrics", Accept_Encoding="gzip").body) == stale.body


def test_an_allocation_turn_does_not_make_old_figures_new(node: Node, client: Client) -> None:
    node.take_turns()
    node.clock.advance(91.0)
    node.agent.read_allocation()
    assert "DCGM_FI_DEV_GPU_UTIL" not in families(client.ask("/metrics"))
    node.agent.read_telemetry()
    assert "DCGM_FI_DEV_GPU_UTIL" in families(client.ask("/metrics"))
