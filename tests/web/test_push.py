"""Tests the OTLP push over real HTTP: what arrives, retries, events, secrets, and scrapes meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.clock import Clock
from podgpu.errors import texts_of
from podgpu.fleet.round import Cluster
from podgpu.http_client import Access, HttpClient
from podgpu.metrics.otlp import PushedNode
from podgpu.model import Condition, DeviceState, NodeState, Workload, XidCount, XidCulprit
from podgpu.web.push import OtlpPusher, PushSettings, Receiver
from tests import net
from tests.cli.test_option_table import execute
from tests.fleet.test_loop import SETTINGS, Script
from tests.metrics.otlp import Point, Record, decode_logs, decode_metrics, metrics_service
from tests.nodes.clock import FakeClock, wait_until
from tests.process import CLUSTER, EXPORTER, podgpu

SECRET = "s3cr3t-of-the-team"


@dataclass
class Collector:
    """An OTLP receiver that answers as told."""

    metrics: list[list[Point]] = field(default_factory=list)
    logs: list[list[Record]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    status: int = 200
    answer: bytes = b""
    retry_after: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(net.QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            collector.headers.append(dict(self.headers))
            if self.path == "/v1/metrics":
                collector.metrics.append(decode_metrics(body))
            elif self.path == "/v1/logs":
                collector.logs.append(decode_logs(body))
            self.send_response(collector.status)
            if collector.retry_after:
                self.send_header("Retry-After", collector.retry_after)
            self.send_header("Content-Length", str(len(collector.answer)))
            self.end_headers()
            self.wfile.write(collector.answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with net.serving(server) as port:
        collector.port = port
        yield collector


@dataclass
class Node:
    """A node whose document the test changes, and the pusher that reads it."""

    clock: FakeClock
    pusher: OtlpPusher
    nodes: list[PushedNode]

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.pusher.update()

    def change(self, **members: Any) -> None:
        [instance] = self.nodes
        [gpu] = instance.state.devices
        devices = (replace(gpu, **members),)
        state = replace(instance.state, devices=devices, taken_at=self.clock.wall())
        self.nodes[:] = [instance._replace(state=state)]


def make_node(collector: Collector, **more: Any) -> Node:
    clock = FakeClock()
    gpu = DeviceState(uuid="GPU-1", index=0, model="H100", power_mw=300_000, healthy=("ecc",))
    state = NodeState(producer="podgpu", node="gpu-1", taken_at=clock.wall(), devices=(gpu,))
    nodes = [PushedNode(state)]
    access = Access(headers=(("X-Api-Key", SECRET),))
    client = HttpClient(collector.url, access, timeout=10.0)
    settings = PushSettings(Receiver(client, "v1/metrics"), Receiver(client, "v1/logs"), **more)
    pusher = OtlpPusher(settings, lambda: nodes, Clock(clock.monotonic, clock.wall))
    return Node(clock, pusher, nodes)


# Metrics


def test_metrics_arrive_at_the_interval(collector: Collector) -> None:
    node = make_node(collector, attributes={"team": "ml"})
    node.turn()
    node.turn(30.0)
    node.change(power_mw=400_000)
    node.turn(30.0)
    assert len(collector.metrics) == 2
    values = []
    for points in collector.metrics:
        [power] = [point for point in points if point.metric == "hw.power"]
        values.append(power.value)
        assert power.resource["team"] == "ml"
    assert values == [300.0, 400.0]
    assert collector.headers[0]["Content-Encoding"] == "gzip"
    assert collector.headers[0]["X-Api-Key"] == SECRET


def test_nothing_is_sent_without_readings(collector: Collector) -> None:
    node = make_node(collector)
    [instance] = node.nodes
    node.nodes.clear()
    node.turn()
    assert collector.metrics == []
    # Then the first readings are sent soon.
    node.nodes.append(instance)
    node.turn(2.5)
    assert len(collector.metrics) == 1


def test_compression_can_be_turned_off(collector: Collector) -> None:
    make_node(collector, compress=False).turn()
    assert "Content-Encoding" not in collector.headers[0]
    assert len(collector.metrics) == 1


def test_many_nodes_are_sent_in_several_requests(collector: Collector) -> None:
    node = make_node(collector)
    [instance] = node.nodes
    gpus = tuple(replace(instance.state.devices[0], uuid=f"GPU-{i}") for i in range(1000))
    names = [f"gpu-{i}" for i in range(6)]
    node.nodes[:] = [PushedNode(replace(instance.state, node=name, devices=gpus)) for name in names]
    node.turn()
    assert 1 < len(collector.metrics) < 6
    arrived = [point.resource["host.name"] for points in collector.metrics for point in points]
    assert list(dict.fromkeys(arrived)) == names


# Failures


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_receiver_gets_newer_values_later(
    collector: Collector, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = make_node(collector)
    collector.status = status
    node.turn()
    assert node.pusher.warnings() != []
    node.turn(1.0)
    assert len(collector.metrics) == 1
    collector.status = 200
    node.change(power_mw=100_000)
    node.turn(5.0)
    assert len(collector.metrics) == 2
    assert [p.value for p in collector.metrics[1] if p.metric == "hw.power"] == [100.0]
    assert node.pusher.warnings() == []
    assert "accepts them again" in caplog.text


def test_pauses_become_longer_but_not_endless(collector: Collector) -> None:
    node = make_node(collector)
    collector.status = 503
    for _ in range(3600):
        node.turn(1.0)
    # With pauses of 5, 10, 20, ... up to 300 s, or half as long: about 6 + 11 to 6 + 22 requests.
    assert 15 < len(collector.metrics) < 35


@pytest.mark.parametrize("in_http_form", [False, True])
def test_retry_after_is_honoured(collector: Collector, in_http_form: bool) -> None:
    node = make_node(collector)
    collector.status = 429
    collector.retry_after = "120"
    if in_http_form:
        # 120 s after the start of the clock
        collector.retry_after = "Tue, 14 Nov 2023 22:32:00 GMT"
    node.turn()
    node.turn(118.0)
    assert len(collector.metrics) == 1
    node.turn(3.0)
    assert len(collector.metrics) == 2


@pytest.mark.parametrize("text", ["soon", "-5", "9" * 400, "Thu, 99 Foo 2026", "1e9"])
def test_a_retry_after_that_is_no_time_delays_at_most_an_hour(
    collector: Collector, text: str
) -> None:
    node = make_node(collector)
    collector.status = 503
    collector.retry_after = text
    node.turn()
    node.turn(3601.0)
    assert len(collector.metrics) == 2


def test_rejected_metrics_are_not_sent_again(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(collector)
    collector.status = 400
    node.turn()
    node.turn(30.0)
    assert len(collector.metrics) == 1
    assert "answers 400" in caplog.text
    node.turn(30.0)
    assert len(collector.metrics) == 2
    assert caplog.text.count("answers 400") == 1


def test_a_failure_is_on_the_page_and_in_the_log_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """The view logs new notes of other components, but not those that they log themselves."""
    node = make_node(collector)
    cluster = Cluster(Script, SETTINGS)
    cluster.warnings.append(node.pusher.warnings)
    collector.status = 503
    node.turn()
    asyncio.run(cluster.round(Script()))
    [note] = texts_of(cluster.published.state.notes)
    assert note.startswith("OTLP metrics: ")
    assert caplog.text.count("OTLP metrics: ") == 1


def test_a_partial_success_is_logged(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    response = metrics_service.ExportMetricsServiceResponse()
    response.partial_success.rejected_data_points = 3
    response.partial_success.error_message = "too old\nreally"
    collector.answer = response.SerializeToString()
    make_node(collector).turn()
    assert "rejected 3 of them: too old\\nreally" in caplog.text


@pytest.mark.parametrize("answer", [b"{}", b"\xff\xff\xff", b"<html>"])
def test_any_answer_with_status_200_is_a_success(collector: Collector, answer: bytes) -> None:
    collector.answer = answer
    node = make_node(collector)
    node.turn()
    assert node.pusher.warnings() == []


def test_no_message_contains_a_secret(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    node = make_node(collector)
    for status in (401, 400, 503, 302, 200):
        collector.status = status
        node.turn(4000.0)
    assert len(collector.metrics) == 5
    collector.port = 1
    away = make_node(collector)
    away.turn()
    warnings = texts_of([*node.pusher.warnings(), *away.pusher.warnings()])
    assert "nothing listens there" in warnings[0]
    assert SECRET not in caplog.text + "".join(warnings)


# Events


def test_xids_and_lost_gpus_are_sent_once_and_soon(collector: Collector) -> None:
    node = make_node(collector)
    node.turn()
    now = node.clock.wall() + 4.0
    culprit = XidCulprit("ml", "train", "main", total=2, last_seen=now)
    xid = XidCount(xid=31, total=2, last_seen=now, culprits=(culprit,))
    node.change(xids=(xid,))
    node.turn(5.0)
    node.turn(5.0)
    [[record]] = collector.logs
    assert record.event == "podgpu.gpu.xid"
    assert record.severity == "WARN"  # an application caused it
    assert record.at == pytest.approx(now)
    assert "GPU 0 of gpu-1: it reported XID 31" in record.body
    assert record.attributes["hw.id"] == "GPU-1"
    assert record.attributes["error.type"] == "xid_31"
    assert record.attributes["podgpu.xid"] == 31
    assert record.attributes["podgpu.xid.total"] == 2
    assert record.attributes["k8s.pod.name"] == "train"
    assert record.resource["host.name"] == "gpu-1"

    lost = Condition("lost", node.clock.wall())
    holders = (Workload("ml", "train", "main"),)
    node.change(conditions=(lost,), last_holders=holders)
    node.turn(5.0)
    node.turn(60.0)
    _, [record] = collector.logs
    assert record.event == "podgpu.gpu.lost"
    assert record.severity == "ERROR"
    assert record.attributes["k8s.pod.name"] == "train"

    node.change(xids=(replace(xid, total=3, last_seen=node.clock.wall()),))
    node.turn(5.0)
    # Now not all of them are known to have this cause.
    [record] = collector.logs[2]
    assert record.attributes["podgpu.xid.total"] == 3
    assert "k8s.pod.name" not in record.attributes


def test_an_xid_that_needs_action_is_an_error_with_advice(collector: Collector) -> None:
    node = make_node(collector)
    node.change(xids=(XidCount(xid=79, total=1, last_seen=node.clock.wall()),))
    node.turn()
    [[record]] = collector.logs
    assert record.severity == "ERROR"
    assert "drain the node" in record.body


def test_events_are_not_sent_without_a_receiver_of_logs(collector: Collector) -> None:
    client = HttpClient(collector.url, timeout=10.0)
    node = make_node(collector)
    settings = PushSettings(Receiver(client, "v1/metrics"), None)
    node.change(xids=(XidCount(xid=79, total=1, last_seen=node.clock.wall()),))
    clock = Clock(node.clock.monotonic, node.clock.wall)
    OtlpPusher(settings, lambda: node.nodes, clock).update()
    assert len(collector.metrics) == 1
    assert collector.logs == []


def test_events_before_the_start_are_not_sent(collector: Collector) -> None:
    node = make_node(collector)
    before = node.clock.wall() - 10.0
    node.change(
        xids=(XidCount(xid=79, total=1, last_seen=before),),
        conditions=(Condition("lost", before), Condition("lost")),
    )
    node.turn(5.0)
    assert collector.logs == []


def test_events_wait_for_the_receiver(collector: Collector) -> None:
    node = make_node(collector)
    collector.status = 503
    for number in range(1, 4):
        now = node.clock.wall()
        node.change(xids=(XidCount(xid=79, total=number, last_seen=now),))
        node.turn(400.0)
    collector.status = 200
    node.turn(400.0)
    delivered = [record.attributes["podgpu.xid.total"] for record in collector.logs[-1]]
    assert delivered == [1, 2, 3]
    count = len(collector.logs)
    node.turn(400.0)
    assert len(collector.logs) == count


def test_only_so_many_events_wait(collector: Collector) -> None:
    node = make_node(collector)
    collector.status = 503
    for _ in range(30):
        now = node.clock.wall()
        node.change(xids=tuple(XidCount(xid=i, total=1, last_seen=now) for i in range(100)))
        node.turn(1.0)
    collector.status = 200
    node.turn(400.0)
    assert len(collector.logs[-1]) == 1000


# The commands


def test_exporter_and_cluster_view_send_the_same_values(
    collector: Collector, tmp_path: Path
) -> None:
    variables = {
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=t%65st",
        "OTEL_EXPORTER_OTLP_HEADERS": f"X-Api-Key={SECRET}",
    }
    folder = tmp_path / "view"
    folder.mkdir()
    exporter = [*EXPORTER, "--otlp", collector.url]
    with collecting() as of_view, podgpu(exporter, tmp_path, variables=variables) as node:
        wait_until(lambda: len(collector.metrics) > 1, "the exporter has sent metrics")
        cluster = [*CLUSTER, "--scrape", f"127.0.0.1:{node.port}", "--otlp", of_view.url]
        with podgpu(cluster, folder, variables=variables) as view:
            wait_until(lambda: len(of_view.metrics) > 1, "the cluster view has sent metrics")
            assert SECRET not in view.log + node.log
    for sent in (collector, of_view):
        points = sent.metrics[-1]
        assert sent.headers[-1]["X-Api-Key"] == SECRET
        assert {point.resource["deployment.environment"] for point in points} == {"test"}
        limits = {
            p.attributes["hw.id"]: p.value for p in points if p.metric == "hw.gpu.memory.limit"
        }
        assert len(limits) == 2
        energy = [point for point in points if point.metric == "hw.energy"]
        assert len(energy) == 2
        assert all(point.since and point.value > 0 for point in energy)
    series = list_series(of_view.metrics[-1])
    assert series <= list_series(collector.metrics[-1])
    # The cluster view does not read the exporters' fields.
    missing = {name for name, _ in list_series(collector.metrics[-1]) - series}
    assert missing <= {"hw.gpu.utilization", "hw.errors"}


def list_series(points: list[Point]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(point.metric, tuple(point.attributes.items())) for point in points}


def test_scrapes_do_not_wait_for_a_receiver_that_hangs(tmp_path: Path) -> None:
    class Hangs(net.QuietHandler):
        def do_POST(self) -> None:
            self.rfile.read()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads = True
    with net.serving(server) as port:
        exporter = [*EXPORTER, "--otlp", f"127.0.0.1:{port}"]
        variables = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600000"}
        with podgpu(exporter, tmp_path, variables=variables) as node:
            wait_until(lambda: len(node.series("DCGM_FI_DEV_POWER_USAGE")) == 2)
            assert node.client.ask("/ready").status == 200


QUICK = ["exporter", "--once", "--telemetry", "simulated:1xT4", "-c", "100"]


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (["--otlp", "grpc://a:4317"], {}, "--otlp 'grpc://a:4317': not the URL of an HTTP server"),
        (
            ["--otlp", "a:4318"],
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL='grpc': podgpu sends only http/protobuf",
        ),
        (
            ["--otlp", "a:4318"],
            {"OTEL_EXPORTER_OTLP_HEADERS": f"Authorization {SECRET}"},
            "OTEL_EXPORTER_OTLP_HEADERS: write NAME=VALUE,NAME=VALUE",
        ),
        (
            ["--otlp", "a:4318"],
            {"OTEL_EXPORTER_OTLP_METRICS_HEADERS": f"a={SECRET}%0d%0ab: c"},
            "OTEL_EXPORTER_OTLP_METRICS_HEADERS: a name or a value is not valid",
        ),
        (
            ["--otlp", "a:4318"],
            {"OTEL_METRIC_EXPORT_INTERVAL": "10"},
            "OTEL_METRIC_EXPORT_INTERVAL='10' must be a number of milliseconds, at least 1000",
        ),
        (
            ["--otlp", "a:4318"],
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "1s"},
            "OTEL_EXPORTER_OTLP_TIMEOUT='1s' must be a number of milliseconds",
        ),
        (
            [],
            {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://user@"},
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
        ),
    ],
)
def test_wrong_settings(arguments: list[str], variables: dict[str, str], complaint: str) -> None:
    ran = execute([*QUICK, *arguments], **variables)
    assert ran.code == 2
    assert complaint in ran.err
    assert SECRET not in ran.err


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "nothing is sent by OTLP"),
        ({"OTEL_EXPORTER_OTLP_CLIENT_KEY": "k.pem"}, "OTEL_EXPORTER_OTLP_CLIENT_KEY has no effect"),
        ({}, "port 4317 is usually for gRPC"),
        (
            {"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"},
            "OTEL_EXPORTER_OTLP_COMPRESSION='zstd' has no effect: podgpu knows gzip",
        ),
        (
            {"OTEL_EXPORTER_OTLP_LOGS_COMPRESSION": "none"},
            "OTEL_EXPORTER_OTLP_LOGS_COMPRESSION has no effect",
        ),
    ],
)
def test_variables_for_other_programs_do_not_end_the_exporter(
    variables: dict[str, str], warning: str
) -> None:
    """An operator may set these variables in every pod."""
    ran = execute(QUICK, OTEL_EXPORTER_OTLP_ENDPOINT="http://collector:4317", **variables)
    assert ran.code == 0
    assert warning in ran.err


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "console"},
    ],
)
def test_standard_variables_turn_it_off(
    collector: Collector, tmp_path: Path, variables: dict[str, str]
) -> None:
    exporter = [*EXPORTER, "--otlp", collector.url]
    variables = {**variables, "OTEL_METRIC_EXPORT_INTERVAL": "1000"}
    with podgpu(exporter, tmp_path, variables=variables) as node:
        wait_until(lambda: len(node.series("DCGM_FI_DEV_POWER_USAGE")) == 2)
    assert collector.headers == []
