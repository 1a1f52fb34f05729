"""`podgpu pods`, `waste` and `cost`: read the API of a cluster and print a table, JSON or CSV."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.request import urlopen

import pytest

from podgpu.cli.main import run
from tests.cli.view_server import served_cluster
from tests.net import free_port
from tests.top.servers import podgpu_server

Table = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_cluster() as served:
        yield served


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def read_table(text: str) -> Table:
    """Returns the cells of the table by row and column. Columns have two spaces between them."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if re.search(r"\S {2,}\S", line))
    table: Table = {}
    header = re.split(r" {2,}", lines[start])
    for line in lines[start + 1 :]:
        cells = re.split(r" {2,}", line)
        # The cell of a missing owner is blank.
        if len(cells) == len(header) - 1:
            cells.insert(1, "")
        table[cells[0]] = dict(zip(header, cells, strict=True))
    return table


def test_pods(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_table(printed(capsys, "pods", "--url", url))
    assert list(table) == ["ml/a", "ml/train", "notes/idle", "web/b", "web/small"]
    assert table["ml/train"] == {
        "Pod": "ml/train",
        "Owner": "Job/train",
        "Node": "2 nodes",
        "GPUs": "2",
        "Use of the GPU": "75%",
        "Memory, GiB": "60.0",
        "Idle GPUs": "0",
        "Idle for": "–",
        "Waiting": "–",
        "Cost EUR/h": "200.00",
        "Wasted EUR/h": "0.00",
    }
    idle = table["notes/idle"]
    assert (idle["Idle GPUs"], idle["Idle for"], idle["Wasted EUR/h"]) == ("1", "24m00s", "100.00")
    assert idle["Owner"] == r"Deployment/\x1b[31mred"
    assert (table["web/b"]["GPUs"], table["web/b"]["Waiting"]) == ("0.5", "25%")
    assert (table["web/small"]["GPUs"], table["web/small"]["Use of the GPU"]) == ("0.14", "50%")


def test_pods_of_which_little_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"cluster": "east", "namespace": "ml", "pod": "a", "nodes": ["n1"]}
    gpus = {"allocated_gpus": 1.0, "used_gpus": 0.0, "idle_gpus": 0.0, "unknown_gpus": 1.0}
    document = {"api": "podgpu/v1", "simulated": True, "pods": [row | gpus]}
    with podgpu_server({"/api/v1/pods": document}) as server:
        text = printed(capsys, "pods", "--url", server.address)
    assert text.startswith("SIMULATED GPUs\n")
    cells = read_table(text)["east: ml/a"]
    unknown = {title: cell for title, cell in cells.items() if cell == "–"}
    assert (cells["Node"], cells["GPUs"], cells["Idle GPUs"]) == ("n1", "1", "–")
    assert {"Use of the GPU", "Memory, GiB", "Idle for", "Cost/h", "Wasted/h"} <= unknown.keys()


def test_pods_of_a_namespace_in_an_order(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_table(printed(capsys, "pods", "--url", url, "-n", "web", "--sort", "gpus"))
    assert list(table) == ["web/b", "web/small"]
    text = printed(capsys, "pods", "--url", url, "-n", "nothing")
    assert text == "No pod in the namespace 'nothing' holds a GPU.\n"


@pytest.mark.parametrize(
    ("order", "first"), [("gpus", "ml/train"), ("idle", "notes/idle"), ("wasted", "notes/idle")]
)
def test_orders(url: str, order: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_table(printed(capsys, "pods", "--url", url, "--sort", order))
    assert next(iter(table)) == first


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("pods", "api/v1/pods"),
        ("waste", "api/v1/waste?range=24h&by=pod"),
        ("cost", "api/v1/range?range=24h&by=namespace"),
    ],
)
def test_json_is_that_of_the_server(
    url: str, command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(printed(capsys, command, "--url", url, "-o", "json"))
    with urlopen(f"{url}/{path}") as answer:
        expected = json.load(answer)
    for document in (shown, expected):
        document.pop("from", None)
        document.pop("to", None)
    assert shown == expected


def test_cost_adds_up(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "cost", "--url", url)
    assert re.match(r"Cost, \S+Z to \S+Z\n- The prices are examples: ", text)
    assert text.count("\n- there is no record before ") == 1, "once, and in one wording"
    table = read_table(text)
    total = table.pop("Total")
    assert list(table) == ["ml", "notes", "web", "unallocated"]
    for column in ("GPU-hours", "Idle, h", "Cost EUR"):
        rows = sum(float(row[column]) for row in table.values())
        assert rows == pytest.approx(float(total[column]), abs=0.02)
    assert table["notes"]["Wasted EUR, idle"] == table["notes"]["Cost EUR"] == "40.00"


def test_cost_of_the_pods_of_a_namespace(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cost", "--url", url, "--by", "pod", "-n", "web"]
    table = read_table(printed(capsys, *arguments))
    assert list(table) == ["web/b", "web/small", "Total of all namespaces"]
    assert table["web/b"]["Cost EUR"] == "20.00"


def test_a_namespace_without_gpus(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "cost", "--url", url, "-n", "nothing")
    assert "\n- no pod of the namespace 'nothing' held a GPU in this period\n" in text
    assert "held a GPU" not in printed(capsys, "cost", "--url", url, "-n", "web")


def test_underused_time_that_nobody_counted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "waste", "--url", url)
    assert read_table(text)["Total"]["Under-used, h"] == "–"
    assert "\n- under-used time is not known: no exporter counted it" in text


def test_the_largest_waste_is_first(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_table(printed(capsys, "waste", "--url", url, "--by", "owner"))
    assert next(iter(table)).startswith("notes/Deployment/")
    assert table["Total"]["Idle, h"] == "0.40"


@pytest.mark.parametrize("command", ["waste", "cost"])
def test_csv(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(printed(capsys, command, "--url", url, "-o", "csv").splitlines()))
    cost = sum(float(row["BilledCost"]) for row in rows)
    assert cost > 0
    assert any("notes" in row.values() for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pods", "-n", "a", "-o", "json"], "--namespace selects rows of the table: leave it"),
        (["cost", "-n", "a", "-o", "csv"], "--namespace selects rows of the table: leave it"),
        (["cost", "-n", "a", "--by", "label:x"], "--namespace needs --by pod, owner, namespace"),
        (["waste", "--range", "1x"], "--range='1x': write a length of time"),
        (
            ["cost", "--range", "banana"],
            "--range='banana': write a length of time, such as 30m, 1h, 24h, 7d or 12w, or month",
        ),
        (["waste", "--by", "team"], "--by='team': use pod, owner, namespace, model or label"),
        (["pods", "--url", "http://"], "--url 'http:': not the URL of an HTTP server"),
    ],
)
def test_wrong_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.startswith(f"podgpu: {message}")


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pods", "--url", f"localhost:{free_port()}"]) == 1
    assert "nothing listens there" in capsys.readouterr().err


def test_a_month(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    document = json.loads(printed(capsys, "cost", "--url", url, "--range", "month", "-o", "json"))
    assert document["from"] == min(first.timestamp(), document["to"])


@pytest.mark.parametrize("command", ["pods", "waste", "cost", "report", "savings", "why"])
def test_a_wrong_url_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--url", "http://["]) == 2
    assert capsys.readouterr().err.startswith("podgpu: --url 'http://[': not the URL of an HTTP")
