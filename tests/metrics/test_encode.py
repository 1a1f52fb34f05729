"""The encoder against prometheus_client, in both formats, and against a real Prometheus."""

from __future__ import annotations

import json
import string
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from podgpu.metrics.encode import (
    OPENMETRICS_TYPE,
    Family,
    Labels,
    Sample,
    encode,
    to_openmetrics,
)
from podgpu.metrics.parse import parse_text
from podgpu.web.responses import accepts_openmetrics
from tests.cluster.real_servers import needs, prometheus
from tests.nodes.clock import wait_until
from tests.nodes.node import Node
from tests.web.conftest import client, node  # noqa: F401 - fixtures
from tests.web.server import Client

GOLDENS = sorted((Path(__file__).parents[1] / "nodes").glob("*/expected.prom"))
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"))
LETTERS = string.ascii_letters + "_"
NAMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + string.digits, max_size=20)).filter(
    lambda name: not name.endswith(("_total", "_created"))
)
OF_PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@given(
    st.dictionaries(NAMES.filter(lambda n: not n.startswith("__")), TEXT, max_size=5),
    st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False)),
    NAMES,
    TEXT,
)
def test_the_oracle_reads_labels_and_values(labels: dict[str, str], value: float, name: str, help_text: str) -> None:
    text = encode([Family(name, "gauge", help_text, (Sample(Labels(labels.items()), value),))]).decode()
    assert text.split("\n")[1] == f"# TYPE {name} gauge"
    (family,) = text_string_to_metric_families(text)
    (sample,) = family.samples
    assert (sample.name, sample.labels, sample.value) == (name, labels, value)


# OpenMetrics


def series_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def assert_same_series(openmetrics: str, text: str) -> None:
    assert openmetrics.endswith("# EOF\n")
    assert series_lines(openmetrics) == series_lines(text)
    assert openmetrics.count("# TYPE ") == text.count("# TYPE ")
    parsed = [sample for family in parse_openmetrics(openmetrics) for sample in family.samples]
    assert len(parsed) == len(series_lines(text))


@pytest.mark.parametrize("path", GOLDENS, ids=lambda p: p.parent.name)
def test_both_formats_have_the_same_series(path: Path) -> None:
    assert_same_series(to_openmetrics(path.read_bytes()).decode(), path.read_text())


def family_of(name: str, kind: str, help_text: str = "Help.") -> Family:
    return Family(name, kind, help_text, (Sample(Labels([("gpu", "0")]), 1),))


def openmetrics(*families: Family) -> dict[str, Metric]:
    return {family.name: family for family in parse_openmetrics(to_openmetrics(encode(families)).decode())}


def test_types_and_units() -> None:
    found = openmetrics(
        family_of("podgpu_device_busy_seconds_total", "counter"),
        family_of("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter"),
        family_of("podgpu_device_count", "untyped"),
        family_of("container_gpu_memory_total", "gauge"),
        family_of("podgpu_allocation_share_ratio", "gauge"),
        family_of("x_total", "counter"),
        family_of("x", "gauge"),
    )
    assert {name: (family.type, family.unit) for name, family in found.items()} == {
        "podgpu_device_busy_seconds": ("counter", "seconds"),
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("unknown", ""),
        "podgpu_device_count": ("unknown", ""),
        "container_gpu_memory_total": ("gauge", ""),
        "podgpu_allocation_share_ratio": ("gauge", "ratio"),
        "x_total": ("unknown", ""),
        "x": ("gauge", ""),
    }


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (OF_PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.6", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_accept_header(header: str, accepted: bool) -> None:
    assert accepts_openmetrics(header) is accepted


def test_over_http(node: Node, client: Client) -> None:  # noqa: F811
    node.take_turns()
    found, text = client.ask("/metrics", Accept=OF_PROMETHEUS), client.ask("/metrics")
    assert (found.status, found.headers["Content-Type"]) == (200, OPENMETRICS_TYPE)
    assert text.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert found.headers["Vary"] == text.headers["Vary"] == "Accept, Accept-Encoding"
    assert_same_series(found.text, text.text)
    node.clock.advance(91.0)
    assert client.ask("/metrics", Accept=OF_PROMETHEUS).text.endswith("# EOF\n"), "stale figures"


@needs("prometheus")
def test_a_real_prometheus_stores_the_series_of_the_text_format(
    node: Node,  # noqa: F811
    client: Client,  # noqa: F811
    folder: Path,
) -> None:
    """Prometheus requests OpenMetrics. Names and labels must be those of the text format."""
    node.take_turns()
    target = f"{client.address.host}:{client.address.port}"
    job = f"{{job_name: podgpu, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}"
    stored: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    with prometheus(folder, configuration=f"scrape_configs: [{job}]") as server:

        def is_scraped() -> bool:
            stored.clear()
            stored.update(stored_series(f'{server}/api/v1/query?query={{job="podgpu"}}'))
            return any(name == "podgpu_allocation_info" for name, _ in stored)

        wait_until(is_scraped, "Prometheus has scraped the exporter")
    assert stored == {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if v))
        for family in parse_text(client.ask("/metrics").text)
        for sample in family.samples
    }


def stored_series(url: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return set()
    series = set()
    for one in found:
        labels = dict(one["metric"])
        name, _, _ = labels.pop("__name__"), labels.pop("job"), labels.pop("instance")
        if name != "up" and not name.startswith("scrape_"):
            series.add((name, frozenset(labels.items())))
    return series
