"""Savings from the rounds of exporters, through SQLite and HTTP."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.cli.main import run
from podgpu.fleet.saved_gpus import NO_SAVINGS
from podgpu.fleet.state import ClusterState
from podgpu.past.savings_watch import SavingsWatch
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.past.savings_world import predict_waits, read_nodes, record, record_with, serving
from tests.web.server import Client

HOURS = 26.0


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    cluster, recorder = record(HOURS)
    with serving(cluster, recorder) as client:
        yield client
    recorder.stop()


def get(client: Client, query: str = "", status: int = 200) -> dict[str, Any]:
    answer = client.ask(f"/api/v1/savings{query}")
    assert answer.status == status, answer.text
    found: dict[str, Any] = json.loads(answer.body)
    return found


def test_each_kind_is_found_in_a_recorded_cluster(client: Client) -> None:
    found = get(client, "?range=25h")
    assert found.get("notes", []) == []
    lines = {line["kind"]: line for line in found["advice"] if line["kind"] != "share"}
    shared = [line for line in found["advice"] if line["kind"] == "share"]

    [idle] = lines["stop"]["pods"]
    assert (idle["pod"], idle["gpus"], idle["node"]) == ("idle", 2, "node-a")
    assert lines["stop"]["saved"] == {"gpus": 2, "gpu_hours": 1460, "cost": 2920}

    [wide] = lines["shrink"]["pods"]
    assert (wide["pod"], lines["shrink"]["target"]) == ("wide", "1 GPU")
    assert (wide["busy"], wide["peak_busy"]) == (0.5, 0.5)
    assert wide["peak_memory_bytes"] == 40 * 1024**3, "the largest sum of a round"

    [hot] = lines["pack"]["pods"]
    assert (hot["pod"], hot["node"], hot["to_node"]) == ("hot", "node-a", "node-b")
    assert lines["pack"]["target"] == "2 free GPUs on node-a"

    together = {pod["pod"]: pod for line in shared for pod in line["pods"]}
    assert {tuple(sorted(pod["pod"] for pod in line["pods"])) for line in shared} == {
        ("day", "night"),
        ("quiet-a", "quiet-b"),
    }
    waits = predict_waits([0.15, 0.1])
    assert together["quiet-a"]["wait"] == pytest.approx(waits[0], abs=1e-3)
    assert together["quiet-b"]["slowdown"] == pytest.approx(1 + waits[1] / 0.1, abs=1e-2)
    assert together["day"]["slowdown"] == 1
    assert together["quiet-a"]["owner"] == {"kind": "Deployment", "name": "quiet"}


def test_what_is_left_out_is_counted(client: Client) -> None:
    found = get(client, "?range=25h")
    left = {row["reason"]: (row["pods"], row["gpus"]) for row in found["left_out"]}
    assert left == {
        "annotation": (1, 1),
        "namespace": (1, 1),
        "training": (1, 2),
        "part": (2, 1),
        "needed": (1, 1),
    }
    totals = found["totals"]
    assert totals["before"]["gpus"] == 14
    assert totals["saved"] == {"gpus": 5, "gpu_hours": 3650, "cost": 7300}
    assert totals["after"]["gpus"] == 9


def test_predictions_are_compared_with_pods_that_share_already(client: Client) -> None:
    found = get(client, "?range=25h")
    waits = predict_waits([0.2, 0.1])
    pairs = [(one["pod"], one["measured_wait"]) for one in found["shared"]]
    assert pairs == [("pair-a", 0.05), ("pair-b", 0.03)]
    predicted = [one["predicted_wait"] for one in found["shared"]]
    assert predicted == pytest.approx(waits, abs=1e-3)
    error = (abs(waits[0] - 0.05) + abs(waits[1] - 0.03)) / 2
    assert found["prediction_error_ratio"] == pytest.approx(error, abs=1e-3)


@pytest.mark.parametrize(
    ("pod", "hint"),
    [
        (
            "wide",
            "1 GPU would be enough: Its 2 GPUs were together at most 0.50 busy GPUs in a mean of 5"
            " minutes, and its memory at most 40.0 GiB.",
        ),
        ("idle", "It could be stopped: Nothing ran on its 2 GPUs for the last 25 hours."),
        ("hot", ""),
        ("train-0", ""),
        ("pair-a", ""),
        ("kept", ""),
    ],
)
def test_the_page_of_a_pod_has_the_same_recommendation(client: Client, pod: str, hint: str) -> None:
    summary = json.loads(client.ask(f"/api/v1/summary/ml/{pod}").body)
    assert summary.get("hint", "") == hint


def test_csv_has_a_row_per_pod_and_adds_up(client: Client) -> None:
    answer = client.ask("/api/v1/savings?range=25h&format=csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert answer.headers["Content-Disposition"] == 'attachment; filename="podgpu-savings.csv"'
    assert sorted(row["Pod"] for row in rows) == [
        "day",
        "hot",
        "idle",
        "night",
        "quiet-a",
        "quiet-b",
        "wide",
    ]
    assert sum(float(row["SavedCostPerMonth"] or 0) for row in rows) == 7300
    assert {row["Currency"] for row in rows} == {"EUR"}
    lines = [int(row["Line"]) for row in rows]
    assert lines == sorted(lines)
    assert lines[0] == 1
    assert lines[-1] == len(set(lines)) < len(rows), "pods that share a GPU are one line"


def test_a_longer_range_is_cut_to_the_record(client: Client) -> None:
    found = get(client)
    assert found["to"] - found["from"] == pytest.approx(HOURS * 3600, abs=1200)
    assert "there is no record before" in found["notes"][0]
    assert len(found["advice"]) == 5


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("?range=9d", "up to 8d"),
        ("?slowdown=1", "slowdown='1'"),
        ("?slowdown=x", "slowdown='x'"),
        ("?idle=5m", "at least 1h"),
        ("?idle=5", "idle='5'"),
        ("?format=xml", "format='xml'"),
    ],
)
def test_wrong_queries_are_refused(client: Client, query: str, error: str) -> None:
    assert error in get(client, query, 400)["error"]


def test_memory_peaks_before_a_short_range_count() -> None:
    cluster, recorder = record(34)
    with serving(cluster, recorder) as client:
        found = get(client, "?range=24h")
    recorder.stop()
    [wide] = [line["pods"][0] for line in found["advice"] if line["kind"] == "shrink"]
    assert wide["peak_memory_bytes"] == 40 * 1024**3


def test_older_days_are_not_counted_twice_and_not_as_time_without_waiting() -> None:
    """In memory, usage of more than 25 hours ago is stored by day only."""
    cluster, recorder = record(80)
    with serving(cluster, recorder) as client:
        found = get(client, "?range=53h")
    recorder.stop()
    [idle] = [line for line in found["advice"] if line["kind"] == "stop"]
    assert idle["cost"] == pytest.approx(2 * 2.0 * 53, rel=0.01)
    assert [one["measured_wait"] for one in found["shared"]] == [0.05, 0.03]


def test_too_little_history_is_said() -> None:
    cluster, recorder = record(20)
    with serving(cluster, recorder) as client:
        found = get(client)
    recorder.stop()
    assert found["advice"] == []
    assert "nothing is recommended from" in found["notes"][0]


def test_records_of_free_gpus_are_not_called_no_record() -> None:
    """For two hours, no pod held a GPU: Cost has records, but no use is known."""

    def read(counters: Any, number: int, at: float) -> tuple[Any, ...]:
        nodes = read_nodes(counters, number, at)
        if number >= 24:
            return nodes
        free = []
        for one in nodes:
            devices = tuple(replace(gpu, holders=()) for gpu in one.state.devices)
            free.append(replace(one, state=replace(one.state, devices=devices)))
        return tuple(free)

    cluster, recorder = record(5, read)
    with serving(cluster, recorder) as client:
        note = get(client)["notes"][0]
        bill = json.loads(client.ask("/api/v1/range?range=7d").body)
    recorder.stop()
    assert note.startswith("no use of a GPU is known before ")
    assert "although there are records since " in note
    since = note.partition("records since ")[2].partition(":0")[0]
    assert since in bill["notes"][0], "the hour in which the records of the Cost view begin"


def test_a_range_shorter_than_a_day_is_refused_in_words(client: Client) -> None:
    found = get(client, "?range=6h")
    assert found["advice"] == []
    assert "shorter than a day" in found["notes"][0]


def test_the_command_the_report_and_the_csv_show_the_figures_of_the_json(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{client.address.port}"
    found = get(client, "?range=7d")
    assert run(["savings", "--url", url]) == 0
    table = capsys.readouterr().out
    assert run(["report", "--url", url]) == 0
    report = capsys.readouterr().out.replace("\\", "")
    assert run(["savings", "--url", url, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert run(["savings", "--url", url, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    saved = found["totals"]["saved"]
    total = (
        f"{saved['gpus']:.0f} of 14 GPUs that pods hold could be given back:"
        f" {saved['gpu_hours']:,.1f} GPU-hours and {saved['cost']:,.2f} EUR per month."
    )
    for text in (table, report):
        assert total in text
        for line in found["advice"]:
            assert line["says"] in text
            assert line["assumes"] in text
            assert line["falsified_by"] in text
        for row in found["left_out"]:
            assert row["says"] in text
    assert sum(float(row["SavedGpus"] or 0) for row in rows) == saved["gpus"]
    costs = [line.get("cost", 0) for line in found["advice"]]
    assert sum(float(row["CostInRange"] or 0) for row in rows) == pytest.approx(sum(costs))
    left = found["totals"]["after"]
    cells = ["left", "9", f"{left['gpu_hours']:,.1f}", f"{left['cost']:,.2f}"]
    assert cells in [row.split() for row in table.splitlines()]
    assert " | ".join(cells) in report
    for line in found["advice"]:
        for pod in line["pods"]:
            [shown] = [row for row in table.splitlines() if f"/{pod['pod']} " in row][-1:]
            if "owner" in pod:
                assert f"{pod['owner']['kind']}/{pod['owner']['name']}" in shown
            if "slowdown" in pod:
                assert f"{pod['slowdown']:.2f}" in shown
                assert f"{100 * pod['wait']:.1f} %" in shown


def test_metrics_show_the_figures_of_the_json() -> None:
    cluster, recorder, record_round = record_with(HOURS)
    past = SqlitePast(recorder, lambda: cluster.published.state)
    watch = SavingsWatch(past)
    watch.update()
    cluster.read_savings = watch.read
    record_round()
    with serving(cluster, recorder) as client:
        found = get(client)
        lines = client.ask("/metrics").text.splitlines()
    recorder.stop()
    samples = {}
    for line in lines:
        if line.startswith("podgpu_savings_"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)

    for row in found["kinds"]:
        if row["kind"] == "pack":
            continue
        kind = row["kind"]
        assert samples[f'podgpu_savings_gpus{{kind="{kind}"}}'] == row["saved"].get("gpus", 0)
        cost = f'podgpu_savings_cost_per_month{{kind="{kind}",currency="EUR"}}'
        assert samples[cost] == row["saved"].get("cost", 0)
    total = sum(value for name, value in samples.items() if name.startswith("podgpu_savings_pod_g"))
    assert total == found["totals"]["saved"]["gpus"] == 5
    wide = 'podgpu_savings_pod_gpus{kind="shrink",namespace="ml",pod="wide",model="NVIDIA L40S",'
    assert samples[wide + 'target="1 GPU"}'] == 1
    error = samples["podgpu_savings_prediction_error_ratio"]
    assert error == found["prediction_error_ratio"] > 0


def test_savings_before_the_first_round_are_not_kept() -> None:
    cluster, recorder = record(HOURS)
    state = ClusterState(cluster.settings, None)
    past = SqlitePast(recorder, lambda: state)
    watch = SavingsWatch(past)
    watch.update()
    assert watch.read() == NO_SAVINGS
    state = cluster.published.state
    watch.update()
    recorder.stop()
    assert sum(row.gpus for row in watch.read().kinds) == 5


def test_without_a_day_of_history_there_are_no_metrics() -> None:
    cluster, recorder = record(20)
    watch = SavingsWatch(SqlitePast(recorder, lambda: cluster.published.state))
    watch.update()
    recorder.stop()
    assert watch.read() == NO_SAVINGS
    assert watch.pause < 60


def test_wrong_options_end_with_2(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["savings", "--url", "localhost:1", "--slowdown", "3"]) == 2
    assert "--slowdown='3'" in capsys.readouterr().err
    assert run(["savings", "--url", "localhost:1"]) == 1
