"""The page, the commands and the JSON show the same figures of each pod and of the bill."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from podgpu.top.table import format_duration, format_gib, format_percent
from tests.cli.test_view_commands import printed, read_table
from tests.cli.view_server import served_cluster

PAGE = Path(__file__).parents[2] / "src/podgpu/web/page"
SCRIPT = Path(__file__).with_name("page_rows.mjs")
COLUMNS = {
    "GPUs": "allocated_gpus",
    "Use of the GPU": "utilization_ratio",
    "Memory": "memory_used_bytes",
    "Idle GPUs": "idle_gpus",
    "Cost/h": "cost_per_hour",
    "Waiting": "wait_ratio",
}
"""Title on the page -> key in the JSON."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_cluster() as served:
        yield served


def fetch(url: str) -> Any:
    with urlopen(url) as answer:
        return json.load(answer)


def list_pods(url: str) -> dict[str, dict[str, Any]]:
    rows = fetch(f"{url}/api/v1/pods")["pods"]
    return {f"{row['namespace']}/{row['pod']}": row for row in rows}


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's JavaScript with node")
def test_the_page_has_the_figures_of_the_json(url: str) -> None:
    done = subprocess.run(
        ["node", str(SCRIPT), PAGE.as_uri(), url], capture_output=True, text=True, check=True
    )
    page = json.loads(done.stdout)
    pods = list_pods(url)
    assert page.keys() == pods.keys()
    assert len(pods) == 5
    taken_at = fetch(f"{url}/api/v1/view")["taken_at"]
    for name, row in pods.items():
        for title, key in COLUMNS.items():
            assert page[name].get(title) == pytest.approx(row.get(key)), (name, title)
        waste = row["waste"]["cost_per_hour"]
        assert page[name]["Wasted/h"] == pytest.approx(sum(waste.values())), name
        idle_for = None if "idle_since" not in row else taken_at - row["idle_since"]
        assert page[name].get("Idle for") == idle_for, name


def test_pods_has_the_figures_of_the_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_table(printed(capsys, "pods", "--url", url))
    taken_at = fetch(f"{url}/api/v1/view")["taken_at"]
    pods = list_pods(url)
    assert table.keys() == pods.keys()
    for name, row in pods.items():
        cells = table[name]
        assert float(cells["GPUs"]) == round(row["allocated_gpus"], 2)
        assert float(cells["Idle GPUs"]) == round(row["idle_gpus"], 2)
        assert cells["Use of the GPU"] == format_percent(row.get("utilization_ratio"))
        assert cells["Memory, GiB"] == format_gib(row.get("memory_used_bytes"))
        assert cells["Waiting"] == format_percent(row.get("wait_ratio"))
        assert cells["Cost EUR/h"] == f"{row['cost_per_hour']:.2f}"
        assert cells["Wasted EUR/h"] == f"{sum(row['waste']['cost_per_hour'].values()):.2f}"
        idle = "–"
        if "idle_since" in row:
            idle = format_duration(taken_at - row["idle_since"])
        assert cells["Idle for"] == idle


def test_pods_add_up_to_the_namespaces_and_totals_of_the_view(url: str) -> None:
    view = fetch(f"{url}/api/v1/view")
    pods = list_pods(url)
    for namespace in view["namespaces"]:
        own = [row for row in pods.values() if row["namespace"] == namespace["namespace"]]
        for key in ("allocated_gpus", "used_gpus", "idle_gpus", "unknown_gpus", "cost_per_hour"):
            total = sum(row[key] for row in own)
            assert total == pytest.approx(namespace[key], abs=1e-3), (namespace["namespace"], key)
    allocated = sum(row["allocated_gpus"] for row in pods.values())
    assert allocated == pytest.approx(view["totals"]["allocated"], abs=1e-3)


def test_cost_has_the_figures_of_the_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = read_table(printed(capsys, "cost", "--url", url))
    answer = fetch(f"{url}/api/v1/range?by=namespace&range=24h")
    rows = {row.get("namespace") or "unallocated": row for row in answer["rows"]}
    assert table.keys() - {"Total"} == rows.keys()
    for name, row in {**rows, "Total": answer["totals"]}.items():
        assert table[name]["GPU-hours"] == f"{row['gpu_hours']:,.2f}"
        assert table[name]["Cost EUR"] == f"{row['cost']:,.2f}"
        assert table[name]["Idle, h"] == f"{row.get('idle_hours', 0.0):,.2f}"
