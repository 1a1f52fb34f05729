"""OpenMetrics 1.0: the series of the text format, by prometheus_client's strict parser and a real Prometheus."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from podgpu.metrics.body import Exposition
from podgpu.metrics.parse import parse_text
from podgpu.metrics.text import encode, to_openmetrics
from podgpu.series import Family, Labels, Sample
from podgpu.web.responses import accepts_openmetrics
from tests.cluster.real_servers import needs, prometheus
from tests.nodes.clock import wait_until
from tests.nodes.node import Node
from tests.web.conftest import client, node  # noqa: F401 - fixtures
from tests.web.server import Client

GOLDENS = sorted((Path(__file__).parents[1] / "nodes").glob("*/expected.prom"))
OF_PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def series_lines(exposition: str) -> list[str]:
    """Not by prometheus_client's parser of the text format, which renames counters."""
    return [line for line in exposition.splitlines() if line and not line.startswith("#")]


def assert_same_series(written: str, text: str) -> None:
    assert written.endswith("# EOF\n")
    assert series_lines(written) == series_lines(text)
    assert written.count("# TYPE ") == text.count("# TYPE ")
    parsed = [sample for family in parse_openmetrics(written) for sample in family.samples]
    assert len(parsed) == len(series_lines(text))


@pytest.mark.parametrize("path", GOLDENS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_exposition_has_the_same_series_in_both_formats(path: Path) -> None:
    assert_same_series(to_openmetrics(path.read_bytes()).decode(), path.read_text())


def family_of(name: str, kind: str, help_text: str = "Help.") -> Family:
    return Family(name, kind, help_text, (Sample(Labels([("gpu", "0")]), 1),))


def openmetrics(*families: Family) -> dict[str, Metric]:
    return {family.name: family for family in parse_openmetrics(to_openmetrics(encode(families)).decode())}


def test_types_and_units() -> None:
    found = openmetrics(
        family_of("podgpu_device_busy_seconds_total", "counter"),
        family_of("podgpu_device_xid_errors_total", "counter"),
        family_of("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter"),
        family_of("podgpu_device_count", "untyped"),
        family_of("container_gpu_memory_total", "gauge"),
        family_of("podgpu_container_gpu_memory_used_bytes", "gauge"),
        family_of("podgpu_allocation_share_ratio", "gauge"),
    )
    assert {name: (family.type, family.unit) for name, family in found.items()} == {
        "podgpu_device_busy_seconds": ("counter", "seconds"),
        "podgpu_device_xid_errors": ("counter", ""),
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("unknown", ""),
        "podgpu_device_count": ("unknown", ""),
        "container_gpu_memory_total": ("gauge", ""),
        "podgpu_container_gpu_memory_used_bytes": ("gauge", "bytes"),
        "podgpu_allocation_share_ratio": ("gauge", "ratio"),
    }


def test_a_counter_whose_family_name_is_anothers_keeps_its_own() -> None:
    found = openmetrics(family_of("x_total", "counter"), family_of("x", "gauge"), family_of("y_total", "counter"))
    assert {name: family.type for name, family in found.items()} == {"x_total": "unknown", "x": "gauge", "y": "counter"}


def test_help_is_escaped_as_openmetrics_wants() -> None:
    said = 'a "quoted" word, a \\ and\na second line'
    (family,) = openmetrics(family_of("x", "gauge", said)).values()
    assert family.documentation == said


def test_nothing_is_an_end_only() -> None:
    assert to_openmetrics(b"") == b"# EOF\n"


def test_it_is_made_once_and_only_when_asked_for() -> None:
    exposition = Exposition.of(encode([family_of("x", "gauge")]))
    assert exposition.openmetrics_if_made is None
    assert exposition.openmetrics() is exposition.openmetrics() is exposition.openmetrics_if_made


@pytest.mark.parametrize(
    ("header", "asked_for"),
    [
        (OF_PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ('Application/OpenMetrics-Text;version="1.0.0"', True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.5", True),
        ("application/openmetrics-text;q=0.5,text/plain;q=0.6", False),
        ("text/plain;q=0.9, application/openmetrics-text;q=0.9", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=nan", False),
        ("application/openmetrics-text;q=x", False),
        ("application/openmetrics-text;q=0.1,*/*", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/json", False),
        ("", False),
    ],
)
def test_who_asks_for_it(header: str, asked_for: bool) -> None:
    assert accepts_openmetrics(header) is asked_for


def test_over_http(node: Node, client: Client) -> None:  # noqa: F811
    node.take_turns()
    asked, text = client.ask("/metrics", Accept=OF_PROMETHEUS), client.ask("/metrics")
    assert (asked.status, asked.headers["Content-Type"]) == (200, TYPE)
    assert text.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert asked.headers["Vary"] == text.headers["Vary"] == "Accept, Accept-Encoding"
    assert_same_series(asked.text, text.text)
    node.clock.advance(91.0)
    assert client.ask("/metrics", Accept=OF_PROMETHEUS).text.endswith("# EOF\n"), "in stale times too"


# --- a real Prometheus


def ask(url: str) -> object:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]
    except OSError:
        return None


@needs("prometheus")
def test_a_real_prometheus_stores_the_series_of_the_text_format(
    node: Node,  # noqa: F811
    client: Client,  # noqa: F811
    folder: Path,
) -> None:
    """It asks for OpenMetrics by itself. Names, labels and values must be those of the text format."""
    node.take_turns()
    target = f"{client.address.host}:{client.address.port}"
    job = f"{{job_name: podgpu, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}"
    with prometheus(folder, configuration=f"scrape_configs: [{job}]") as server:
        found: list[object] = []

        def scraped() -> bool:
            found[:] = [ask(f'{server}/api/v1/query?query={{job="podgpu"}}')]
            answer = found[0]
            return isinstance(answer, dict) and any(
                s["metric"]["__name__"] == "podgpu_allocation_info" for s in answer["result"]
            )

        wait_until(scraped, "Prometheus has scraped the exporter")
        assert node.agent.published.fresh.openmetrics_if_made is not None, "it asked for OpenMetrics"
        stored = series_of(found[0])
    exposition = client.ask("/metrics").text
    assert stored == {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if v))
        for family in parse_text(exposition)
        for sample in family.samples
    }


def series_of(answer: object) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    assert isinstance(answer, dict)
    found = set()
    for series in answer["result"]:
        labels = dict(series["metric"])
        name, _, _ = labels.pop("__name__"), labels.pop("job"), labels.pop("instance")
        if name != "up" and not name.startswith("scrape_"):
            found.add((name, frozenset(labels.items())))
    return found
