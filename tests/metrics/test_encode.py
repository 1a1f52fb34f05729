"""Tests the encoder with a real Prometheus. test_parse.py compares the encoder with the parser."""

from __future__ import annotations

from pathlib import Path

from podgpu.metrics.parse import parse_text
from tests.fleet.real_servers import needs
from tests.metrics.test_opencost import ask, scraped
from tests.nodes.clock import wait_until
from tests.nodes.node import Node
from tests.web.conftest import client, node  # noqa: F401 - fixtures
from tests.web.server import Client


@needs("prometheus")
def test_a_real_prometheus_stores_all_series(
    node: Node,  # noqa: F811
    client: Client,  # noqa: F811
    folder: Path,
) -> None:
    node.take_turns()
    with scraped(folder, client) as server:
        wait_until(
            lambda: bool(ask(server, "podgpu_allocation_info")),
            "Prometheus has scraped the exporter",
        )
        answer = ask(server, '{job="podgpu"}')
    stored = {
        frozenset((name, text) for name, text in labels.items() if name not in ("job", "instance"))
        for labels, _ in answer
        if labels["__name__"] != "up" and not labels["__name__"].startswith("scrape_")
    }
    assert stored == {
        frozenset((k, v) for k, v in {**sample.labels, "__name__": sample.name}.items() if v)
        for family in parse_text(client.ask("/metrics").text)
        for sample in family.samples
    }
