"""Tests the encoder with a real Prometheus. test_parse.py compares the encoder with the parser."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

from podgpu.metrics.encode import NO_LABELS, Body, Family, Sample, encode, etag_of
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


def lines_of(*values: float, dcgm_numbers: bool) -> list[str]:
    samples = tuple(Sample(NO_LABELS, value) for value in values)
    text = encode([Family("f", "gauge", "h", samples, dcgm_numbers)]).decode()
    return text.splitlines()[2:]


def test_numbers_of_podgpu_are_the_shortest_that_are_equal() -> None:
    values = (7, 0.1, 2.0, math.inf, -math.inf, math.nan)
    numbers = ["f 7", "f 0.1", "f 2.0", "f +Inf", "f -Inf", "f NaN"]
    assert lines_of(*values, dcgm_numbers=False) == numbers


def test_floats_of_dcgm_have_six_decimals() -> None:
    assert lines_of(7, 0.1, 2.0, dcgm_numbers=True) == ["f 7", "f 0.100000", "f 2.000000"]


def test_the_etag_depends_only_on_the_text() -> None:
    etags = {etag_of(text) for text in (b"a", b"a", b"b")}
    assert len(etags) == 2
    for etag in etags:
        assert etag.startswith('W/"')
        assert len(etag) == len('W/""') + 24
    assert gzip.decompress(Body(b"text").zipped) == b"text"
