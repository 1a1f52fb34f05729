"""Tests the protobuf format of GET /metrics: same values as the text, and start times of counters."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.proto import parse_length_prefixed

from podgpu.metrics import exposition_pb2 as pb
from podgpu.metrics.encode import CONTENT_TYPE
from podgpu.metrics.parse import parse_text
from podgpu.metrics.protobuf import PROTOBUF_TYPE, prefers_protobuf
from tests.fleet.real_servers import needs, prometheus
from tests.metrics.test_opencost import ask
from tests.nodes.clock import wait_until
from tests.nodes.node import Node, node_of, read_description
from tests.web.server import Answer, Client, running

NODES = Path(__file__).parents[1] / "nodes"
PROTOBUF = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
)
# as Prometheus 3.5 sends it with --enable-feature=created-timestamp-zero-ingestion
PROMETHEUS = f"{PROTOBUF};q=0.6,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
BUSY = "podgpu_container_gpu_busy_seconds_total"
Key = tuple[str, frozenset[tuple[str, str]]]


@pytest.fixture(params=["usage-time-sliced", "usage-mig", "faulty"])
def node(folder: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    with node_of(read_description(NODES / request.param), folder) as built:
        built.take_turns()
        yield built


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with running(node.agent) as served:
        yield served


def decode(answer: Answer) -> list[Any]:
    assert answer.headers["Content-Type"] == PROTOBUF_TYPE
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    stream = BytesIO(answer.body)
    families = []
    while (family := parse_length_prefixed(pb.MetricFamily, stream)) is not None:
        families.append(family)
    return families


def read_values(families: list[Any]) -> dict[Key, float]:
    values = {}
    for family in families:
        member = {pb.COUNTER: "counter", pb.GAUGE: "gauge"}.get(family.type, "untyped")
        for metric in family.metric:
            labels = frozenset((label.name, label.value) for label in metric.label)
            values[family.name, labels] = getattr(metric, member).value
    return values


def read_text_values(answer: Answer) -> dict[Key, float]:
    assert answer.headers["Content-Type"] == CONTENT_TYPE
    values = {}
    for family in parse_text(answer.text):
        for sample in family.samples:
            values[sample.name, frozenset(sample.labels.items())] = sample.value
    return values


def read_starts(families: list[Any], name: str) -> list[float]:
    starts = []
    for family in families:
        if family.name == name:
            for metric in family.metric:
                created = metric.counter.created_timestamp
                assert metric.counter.HasField("created_timestamp")
                starts.append(created.seconds + created.nanos / 1e9)
    return starts


def without_process(values: dict[Key, float]) -> dict[Key, float]:
    return {key: value for key, value in values.items() if not key[0].startswith("process_")}


def test_values_are_those_of_the_text(client: Client) -> None:
    text = read_text_values(client.ask("/metrics"))
    values = read_values(decode(client.ask("/metrics", Accept=PROMETHEUS)))
    assert len(text) > 20
    assert without_process(values) == without_process(text)
    assert values.keys() == text.keys()


def test_types_and_help_are_those_of_the_text(client: Client) -> None:
    lines = client.ask("/metrics").text.splitlines()
    shown = [line for line in lines if line.startswith("#")]
    types = {pb.COUNTER: "counter", pb.GAUGE: "gauge", pb.UNTYPED: "untyped"}
    expected = []
    for family in decode(client.ask("/metrics", Accept=PROMETHEUS)):
        expected.append(f"# HELP {family.name} {family.help}")
        expected.append(f"# TYPE {family.name} {types[family.type]}")
    assert shown == expected


@pytest.mark.parametrize("node", ["usage-time-sliced"], indirect=True)
def test_counters_have_the_time_at_which_they_were_0(node: Node, client: Client) -> None:
    first = decode(client.ask("/metrics", Accept=PROMETHEUS))
    starts = read_starts(first, BUSY)
    assert starts
    # The first reading of usage is a baseline: all counters are 0 at its time.
    expected = node.clock.wall() - (node.description.usage_turns - 1)
    assert starts == [pytest.approx(expected, abs=0.01)] * len(starts)
    for name in ("podgpu_device_busy_seconds_total", "podgpu_namespace_gpu_busy_seconds_total"):
        own = read_starts(first, name)
        assert own
        assert own == [pytest.approx(expected, abs=0.01)] * len(own)

    node.clock.advance(10.0)
    node.agent.read_usage()
    assert read_starts(decode(client.ask("/metrics", Accept=PROMETHEUS)), BUSY) == starts


@pytest.mark.parametrize("node", ["faulty"], indirect=True)
def test_xids_are_counted_since_the_start_of_the_exporter(node: Node, client: Client) -> None:
    families = decode(client.ask("/metrics", Accept=PROMETHEUS))
    started = node.agent.published.state.counted_since
    assert started is not None
    for name in ("podgpu_xid_errors_total", "podgpu_device_xid_errors_total"):
        starts = read_starts(families, name)
        assert starts
        assert starts == [pytest.approx(started, abs=0.01)] * len(starts)


@pytest.mark.parametrize("node", ["faulty"], indirect=True)
def test_only_podgpu_s_own_counters_have_a_start(client: Client) -> None:
    families = decode(client.ask("/metrics", Accept=PROMETHEUS))
    counters = []
    for family in families:
        if family.name.startswith("DCGM_"):
            counters += [metric.counter for metric in family.metric if metric.HasField("counter")]
    assert counters
    assert not any(counter.HasField("created_timestamp") for counter in counters)


@pytest.mark.parametrize("node", ["usage-time-sliced"], indirect=True)
def test_outdated_values_are_left_out(node: Node, client: Client) -> None:
    node.clock.advance(1000.0)
    node.agent.read_allocation()
    families = decode(client.ask("/metrics", Accept=PROMETHEUS))
    names = [family.name for family in families]
    assert "podgpu_exporter_source_up" in names
    assert all(name.startswith(("podgpu_exporter_", "process_")) for name in names)


@pytest.mark.parametrize(
    "accept",
    [
        PROTOBUF,
        PROTOBUF.replace(";", " ; "),
        PROMETHEUS,
        f"text/plain;q=0.3, {PROTOBUF};q=0.4",
    ],
)
def test_protobuf_for_those_who_prefer_it(accept: str) -> None:
    assert prefers_protobuf(accept)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/plain",
        "application/vnd.google.protobuf",
        PROTOBUF.replace("delimited", "text"),
        PROTOBUF.replace("MetricFamily", "Other"),
        f"{PROTOBUF};q=0",
        f"{PROTOBUF};q=x",
        f"{PROTOBUF};q=0.2,text/plain;q=0.5",
        f"{PROTOBUF},text/plain",
        ";;;=,=;",
    ],
)
def test_text_for_everybody_else(accept: str) -> None:
    assert not prefers_protobuf(accept)


@needs("prometheus")
@pytest.mark.parametrize("node", ["usage-time-sliced"], indirect=True)
def test_a_real_prometheus_reads_it(folder: Path, client: Client) -> None:
    """`native-histograms` makes Debian's Prometheus ask for protobuf."""
    expected = read_text_values(client.ask("/metrics"))
    target = f"{client.address.host}:{client.address.port}"
    job = f"{{job_name: podgpu, honor_labels: true, static_configs: [{{targets: ['{target}']}}]}}"
    configuration = f"{{global: {{scrape_interval: 1s}}, scrape_configs: [{job}]}}"
    options = ["--enable-feature=native-histograms"]
    query = '{job="podgpu", __name__=~"DCGM_.*|podgpu_.*"}'
    with prometheus(folder, configuration=configuration, options=options) as server:
        wait_until(lambda: bool(ask(server, query)), "Prometheus has scraped the exporter")
        stored = {}
        for labels, value in ask(server, query):
            own = {name: text for name, text in labels.items() if name not in ("job", "instance")}
            stored[own.pop("__name__"), frozenset(own.items())] = value
    assert stored == {key: value for key, value in expected.items() if "process_" not in key[0]}
