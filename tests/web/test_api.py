"""Tests `/api/v1/…` of the exporter."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podgpu import NodeState, __version__, decode_node
from podgpu.fleet import view as view_structs
from podgpu.fleet.prices import read_prices
from podgpu.metrics.parse import parse_text
from podgpu.model import encode_node
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.exporter_app import application, build_state, node_recorder
from tests.nodes.node import Description, Node, node_of
from tests.simulated import stop_after_test
from tests.web.conftest import UUID
from tests.web.server import Client, running

ROOT = Path(__file__).parents[2]


def view(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.ask("/api/v1/view").body)
    return found


def test_view(node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/api/v1/view")
    assert (answer.status, answer.headers["Content-Type"]) == (
        200,
        "application/json; charset=utf-8",
    )
    said = json.loads(answer.body)
    assert (said["api"], said["scope"], said["version"]) == ("podgpu/v1", "node", __version__)
    assert said["taken_at"] == node.agent.published.state.taken_at
    assert said["interval_seconds"] == node.agent.settings.interval
    (shown,) = said["nodes"]
    assert shown["name"] == "node-1"
    assert [gpu["index"] for gpu in shown["gpus"]] == [0, 1]
    first, second = shown["gpus"]
    assert (first["uuid"], first["model"]) == (UUID, "NVIDIA H100 80GB HBM3")
    assert [(h["namespace"], h["pod"], h["container"]) for h in first["holders"]] == [
        ("research", "train", "main")
    ]
    assert "holders" not in second
    assert first["memory_total_bytes"] > first["memory_used_bytes"]
    assert [n["namespace"] for n in said["namespaces"]] == ["research"]
    assert said["namespaces"][0]["allocated_gpus"] == 1
    assert "simulated" not in said


def test_view_gzip_and_etag(node: Node, client: Client) -> None:
    node.take_turns()
    plain = client.ask("/api/v1/view")
    zipped = client.ask("/api/v1/view", Accept_Encoding="gzip")
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped.body) == plain.body
    assert plain.headers["Vary"] == "Accept-Encoding"
    etag = plain.headers["ETag"]
    for known in (etag, f'"a", {etag}', etag.removeprefix("W/")):
        assert client.ask("/api/v1/view", If_None_Match=known).status == 304
    node.clock.advance(1.0)
    node.agent.read_telemetry()
    changed = client.ask("/api/v1/view", If_None_Match=etag)
    assert changed.status == 200
    assert changed.headers["ETag"] != etag


def test_view_before_the_first_reading(client: Client) -> None:
    said = view(client)
    assert said["nodes"] == [{"name": "node-1", "old": True, "gpus": []}]
    assert "taken_at" not in said
    assert "no readings yet" in said["notes"][0]


def test_old_figures_are_left_out(node: Node, client: Client) -> None:
    node.take_turns()
    assert view(client)["nodes"][0]["gpus"]
    node.clock.advance(node.agent.settings.stale_after + 1)
    said = view(client)
    assert said["nodes"] == [{"name": "node-1", "old": True, "gpus": []}]
    assert "too old" in said["notes"][0]
    assert said["namespaces"] == []
    node.agent.read_telemetry()
    assert view(client)["nodes"][0]["gpus"], "must be included after a new reading"


def test_failed_source_is_in_the_notes(node: Node, client: Client) -> None:
    node.kubelet.refusal = ("INTERNAL", 'a "quoted" <reason>')
    node.take_turns()
    (note,) = [n for n in view(client)["notes"] if n.startswith("kubelet")]
    assert 'a "quoted" <reason>' in note


def test_pod(node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/api/v1/pods/research/train")
    assert (answer.status, answer.headers["Content-Type"]) == (
        200,
        "application/json; charset=utf-8",
    )
    said = json.loads(answer.body)
    assert (said["namespace"], said["pod"], said["taken_at"]) == (
        "research",
        "train",
        view(client)["taken_at"],
    )
    assert [gpu["uuid"] for n in said["nodes"] for gpu in n["gpus"]] == [UUID]


def test_errors_are_json(node: Node, client: Client) -> None:
    node.take_turns()
    for path, words in (
        ("/api/v1/pods/research/nobody", "pod research/nobody holds no GPU"),
        ("/api/v1/pods/a%22b/c%0Ad", 'a"b/c\nd'),
        ("/api/v2/view", "no path /api/v2/view"),
    ):
        answer = client.ask(path)
        assert (answer.status, answer.headers["Content-Type"]) == (
            404,
            "application/json; charset=utf-8",
        )
        body = json.loads(answer.body)
        assert words in body["error"]
        assert ("reason" in body) == (path == "/api/v2/view"), "the server does not have the path"


def test_node_document(node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/api/v1/node")
    state = decode_node(answer.body)
    assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (
        200,
        "application/json",
    )
    assert [gpu.index for gpu in state.devices] == [0, 1]
    assert (state.producer, bool(state.exporter_id)) == ("podgpu", True)
    assert encode_node(state) == answer.body
    with pytest.raises(msgspec.ValidationError, match="newer"):
        decode_node(encode_node(NodeState(producer="podgpu", schema=99)))


@pytest.fixture
def lived_in(folder: Path) -> Iterator[Node]:
    described = Description(
        about="whole, shared and MIG",
        gpus="8xH100,1xH100/7x1g.10gb",
        lived_in=True,
        processes={},
        usage_turns=3,
        arguments=["-k"],
    )
    with node_of(described, folder) as built:
        yield built


def test_sums_of_namespaces(lived_in: Node) -> None:
    lived_in.take_turns()
    with running(lived_in.agent) as client:
        said = view(client)
    allocated = {n["namespace"]: n["allocated_gpus"] for n in said["namespaces"]}
    assert allocated == {"batch": 1, "notebooks": round(1 + 5 / 7, 4), "research": 3, "serving": 2}
    instances = said["nodes"][0]["gpus"][-1]["instances"]
    assert [(i["profile"], i["slices"], i["gpu_slices"]) for i in instances] == [
        ("1g.10gb", 1, 7)
    ] * 7
    idle = said["nodes"][0]["gpus"][5]["holders"][0]
    assert idle["pod"] == "jupyter-ada-0"
    assert "used_utilization_ratio" not in said, "only podgpu cluster has this value"
    assert "used_field" not in said


@pytest.mark.fault(
    "The file of `--prices` becomes invalid while podgpu runs",
    "The last valid prices stay, and a note names the mistake",
)
def test_prices(lived_in: Node, tmp_path: Path) -> None:
    lived_in.take_turns()
    file = tmp_path / "prices.yml"
    file.write_text(
        'currency: EUR\nmodels: {"NVIDIA H100 80GB HBM3": {gpu_hour: 7}}', encoding="utf-8"
    )
    with running(lived_in.agent, app=partial(application, prices=read_prices(str(file)))) as client:
        said = view(client)
        assert (said["currency"], said["prices"]) == ("EUR", "file")
        gpus = said["nodes"][0]["gpus"]
        assert [gpu["price_per_hour"] for gpu in gpus] == [7.0] * 9
        shared = gpus[4]["holders"]
        assert [h["cost_per_hour"] for h in shared] == [3.5, 3.5]
        assert [i["price_per_hour"] for i in gpus[8]["instances"]] == [1.0] * 7
        totals = said["totals"]
        assert (totals["gpus"], totals["cost_per_hour"]) == (9, 54.0)
        assert totals["wasted_per_hour"] == totals["idle"] * 7
        assert sum(n["cost_per_hour"] for n in said["namespaces"]) == 54.0
        file.write_text("currency: EUR", encoding="utf-8")
        lived_in.agent.read_telemetry()
        worse = view(client)
        assert worse["totals"]["cost_per_hour"] == 54.0, "must keep the last valid prices"
        assert any("prices.yml" in note for note in worse["notes"])
    with running(lived_in.agent) as client:
        assert not {"currency", "prices"} & view(client).keys()
        assert "cost_per_hour" not in view(client)["totals"]


def test_waste(lived_in: Node) -> None:
    lived_in.take_turns()
    prices = read_prices("example")
    recorder = node_recorder(lived_in.agent, prices=prices)
    stop_after_test.append(recorder.stop)
    recorder.record()
    for _ in range(4):
        lived_in.clock.advance(5.0)
        lived_in.agent.read_telemetry()
        lived_in.agent.read_usage()
        recorder.record()
    past = SqlitePast(recorder, lambda: build_state(lived_in.agent, prices))
    with running(lived_in.agent, app=partial(application, past=past)) as client:
        said = json.loads(client.ask("/api/v1/waste").body)
        table = client.ask("/api/v1/waste?by=namespace&format=csv")
        wrong = client.ask("/api/v1/waste?by=gpu")
        known = client.ask(
            "/api/v1/waste", If_None_Match=client.ask("/api/v1/waste").headers["ETag"]
        )
    assert (said["currency"], said["prices"], said["by"]) == ("USD", "example", "pod")
    idle = next(row for row in said["rows"] if row["pod"] == "jupyter-ada-0")
    assert idle["idle_hours"] == idle["allocated_hours"] == round(20 / 3600, 4)
    assert (idle["wasted"], idle["cost_per_hour"]) == (round(2.8 * 20 / 3600, 4), 2.8)
    both = next(row for row in said["rows"] if row["pod"] == "llm-train-0")
    assert (both["gpus"], both["idle_hours"]) == (2.0, round(2 * 20 / 3600, 4))
    assert table.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert table.headers["Content-Disposition"] == 'attachment; filename="podgpu-waste.csv"'
    assert {line["x_Namespace"] for line in csv.DictReader(table.text.splitlines())} == {
        *("batch", "notebooks"),
        *("research", "serving"),
    }
    assert (wrong.status, known.status) == (400, 304)
    assert "use pod, owner, namespace, model or label:NAME" in json.loads(wrong.body)["error"]


def test_all_members_are_documented() -> None:
    structs = [
        kind
        for kind in vars(view_structs).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    answers = [kind for kind in structs if kind.__module__ == view_structs.__name__]
    found = {field.encode_name for kind in answers for field in msgspec.structs.fields(kind)}
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8")))
    assert found - documented == set()


def test_range_equals_the_counters_of_the_metrics(lived_in: Node) -> None:
    lived_in.take_turns()
    prices = read_prices("example")
    recorder = node_recorder(lived_in.agent, prices=prices)
    stop_after_test.append(recorder.stop)
    past = SqlitePast(recorder, lambda: build_state(lived_in.agent, prices))
    with running(lived_in.agent, app=partial(application, past=past)) as client:
        totals = []
        for number in range(41):
            if number in (0, 40):
                families = {
                    family.name: family for family in parse_text(client.ask("/metrics").text)
                }
                totals.append(
                    sum(s.value for s in families["podgpu_device_energy_joules_total"].samples)
                )
            recorder.record()
            if number < 40:
                lived_in.clock.advance(15.0)
                lived_in.agent.read_telemetry()
                lived_in.agent.read_usage()
        said = json.loads(client.ask("/api/v1/range?range=1h&by=owner").body)
        table = client.ask("/api/v1/range?by=namespace&format=csv")
        wrong = client.ask("/api/v1/range?from=1&to=0")
        future = client.ask("/api/v1/range?from=9999999999")
    assert said["totals"]["energy_kwh"] == pytest.approx((totals[1] - totals[0]) / 3.6e6, abs=2e-4)
    gpus = len(lived_in.agent.published.state.devices)
    assert said["totals"]["gpu_hours"] == pytest.approx(gpus * 600 / 3600, abs=1e-3), (
        "GPUs times hours"
    )
    assert sum(row["gpu_hours"] for row in said["rows"]) == pytest.approx(
        said["totals"]["gpu_hours"], abs=1e-3
    )
    assert sum(row["cost"] for row in said["rows"]) == pytest.approx(
        said["totals"]["cost"], abs=1e-3
    )
    assert table.headers["Content-Disposition"] == 'attachment; filename="podgpu-cost.csv"'
    assert {line["x_Namespace"] for line in csv.DictReader(table.text.splitlines())} >= {
        "research",
        "notebooks",
    }
    assert (wrong.status, json.loads(wrong.body)["error"]) == (400, "from=1 is not before to=0")
    assert future.status == 400


@pytest.mark.parametrize(
    ("path", "takes"),
    [
        ("/api/v1/view?namespace=a", "takes cluster, ns, pod, owner, node, model, gpu, state, q"),
        ("/api/v1/pods/a/b?range=1h", "/api/v1/pods/a/b takes cluster"),
        ("/api/v1/jobs?ns=a", "/api/v1/jobs takes no parameters"),
    ],
)
def test_an_unknown_parameter_is_refused(client: Client, path: str, takes: str) -> None:
    """Otherwise, the answer would be about all GPUs, and look like that of one namespace."""
    answer = client.ask(path)
    assert answer.status == 400
    error = json.loads(answer.body)
    name = path.split("?")[1].split("=")[0]
    assert error["parameter"] == name
    assert error["error"].startswith(f"unknown parameter '{name}': ")
    assert takes in error["error"]
