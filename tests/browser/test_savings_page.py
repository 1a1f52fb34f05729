"""The tab *Waste*: what is wasted, and savings: the figures of the JSON, on screens of all sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.chromium import Tab
from tests.browser.test_fit import CUT
from tests.past.savings_world import record, serving
from tests.web.server import Client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    cluster, recorder = record(26)
    with serving(cluster, recorder) as client:
        yield client
    recorder.stop()


def show(tab: Tab, client: Client) -> dict[str, Any]:
    """Opens all lines. Returns the JSON."""
    tab.open(f"{client.address.url}/#view=savings&range=7d")
    tab.wait_for("document.querySelector('.saving-lines details')", "the lines")
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    found: dict[str, Any] = json.loads(client.ask("/api/v1/savings?range=7d").body)
    return found


def test_the_page_shows_the_figures_of_the_json(tab: Tab, client: Client) -> None:
    found = show(tab, client)
    totals = found["totals"]
    sums = tab.text(".sums")
    for part in ("before", "saved", "after"):
        assert f"{totals[part]['gpus']:.0f} GPUs" in sums
    assert f"{totals['saved']['gpu_hours']:,.0f}" in sums

    lines = tab.texts(".saving-lines > li")
    assert len(lines) == len(found["advice"])
    for text, line in zip(lines, found["advice"], strict=True):
        assert text.startswith(line["kind"].capitalize())
        assert line["says"] in text
        assert line["assumes"] in text
        assert line["falsified_by"] in text
        saved = line["saved"].get("gpus", 0)
        if saved:
            unit = "GPU" if saved == 1 else "GPUs"
            assert f"saves {saved:.0f} {unit}, €{line['saved']['cost']:,.2f} per month" in text
        for pod in line["pods"]:
            assert f"ml/{pod['pod']}" in text
            if "slowdown" in pod:
                assert f"{pod['slowdown']:.2f}" in text
    left = tab.text(".savings .marks")
    for row in found["left_out"]:
        assert row["says"] in left
    error = 100 * found["prediction_error_ratio"]
    assert f"{error:.1f}" in tab.text(".savings section .about")


def test_what_is_wasted_by_whom_and_what_to_do(tab: Tab, client: Client) -> None:
    tab.open(f"{client.address.url}/#view=savings&range=24h")
    tab.wait_for("document.querySelector('.waste-row')", "the rows")
    waste = json.loads(client.ask("/api/v1/waste?range=24h&by=owner").body)
    totals = waste["totals"]
    parts = totals["waste"]["cost"]
    wasted = sum(parts.values())
    ratio = f"{100 * wasted / totals['cost']:.0f}"
    headline = tab.text(".waste-headline").replace("\u202f", " ")
    assert headline == (
        f"€{wasted:,.2f} of €{totals['cost']:,.2f} ({ratio} %) was wasted in the last 24 hours."
    )
    legend = " ".join(tab.texts(".waste-legend"))
    assert f"idle €{parts['idle']:,.2f} held, and nothing ran on it" in legend
    assert f"unallocated €{parts['unallocated']:,.2f}" in legend
    assert f"€{totals['cost'] - wasted:,.2f} not wasted" in legend, "the parts are the whole"

    rows = tab.texts(".waste-row")
    sums = [sum(row["waste"]["cost"].values()) for row in waste["rows"]]
    shown = sorted([*sums, parts["unallocated"]], reverse=True)
    assert len(rows) == min(8, sum(one >= 0.005 for one in shown))
    for text, cost in zip(rows, shown, strict=False):
        assert f"€{cost:,.2f}" in text
    [idle] = [text for text in rows if text.startswith("ml/idle ")]
    assert (
        "idle for all of 48.0 GPU-hours To do: stop it, or ask its owner: it was idle all the time"
        in idle
    )
    [free] = [text for text in rows if text.startswith("unallocated GPUs")]
    assert "held by nobody To do: if no pod waits for them, fewer nodes would do" in free
    assert tab.texts("#tab-savings[aria-current=page]") == ["Waste"]

    tab.evaluate("location.hash = '#view=savings&range=24h&ns=ml'")
    tab.wait_for("!document.querySelector('.waste-rows').textContent.includes('nobody')", "ml only")
    assert tab.text(".waste-headline").startswith("Of all: ")


def test_what_was_measured_says_what_to_do(tab: Tab, client: Client) -> None:
    savings = json.loads(client.ask("/api/v1/savings?range=7d").body)
    tab.open(f"{client.address.url}/#view=savings&range=7d")
    tab.wait_for("document.querySelector('.waste-row')", "the rows")
    tab.wait_for("document.querySelector('.saving-lines details')", "the lines")
    rows = {text.split(" ")[0]: text for text in tab.texts(".waste-row")}
    found = set()
    for line in savings["advice"]:
        for pod in line["pods"]:
            owner = pod.get("owner")
            name = f"{owner['kind']}/{owner['name']}" if owner else pod["pod"]
            text = rows.get(f"ml/{name}")
            if text is None or line["kind"] not in ("shrink", "share"):
                continue
            found.add(line["kind"])
            gain = f"saves €{line['saved']['cost']:,.2f} per month (measured, below)"
            if line["kind"] == "shrink":
                assert f"To do: give {pod['pod']} {line['target']}: {gain}" in text
            else:
                others = len(line["pods"]) - 1
                pods = "pod" if others == 1 else "pods"
                whom = f"{pod['pod']} share a GPU with {others} other {pods}"
                assert f"To do: let {whom}: {gain}" in text
    assert found == {"shrink", "share"}


def test_less_than_a_day_of_history_is_not_nothing_to_save(tab: Tab) -> None:
    cluster, recorder = record(2)
    try:
        with serving(cluster, recorder) as young:
            answer = json.loads(young.ask("/api/v1/savings?range=7d").body)
            assert answer["computed"] is False
            tab.open(f"{young.address.url}/#view=savings&range=7d")
            tab.wait_for(
                "document.querySelector('.savings').textContent.includes('it needs a day')", "why"
            )
            assert tab.text(".savings").count("it needs a day") == 1
            assert tab.count(".sums > div") == 0, "0 GPUs could be given back is not known"
    finally:
        recorder.stop()


def test_the_tile_leads_to_who_wastes(tab: Tab, client: Client) -> None:
    tab.open(f"{client.address.url}/#")
    tab.wait_for("document.querySelector('.total-wasted')", "the tile")
    assert "by whom" in tab.text(".total-wasted")
    tab.click(".total-wasted")
    tab.wait_for("document.querySelector('.waste-row')", "the rows")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1024, "dark"), (390, "dark")])
def test_nothing_is_cut(tab: Tab, client: Client, width: int, theme: str) -> None:
    tab.look(width, 900, theme)
    show(tab, client)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CUT) == []
