"""The tab *Savings*: the figures of the JSON, on screens of all sizes."""

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


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "dark")])
def test_nothing_is_cut(tab: Tab, client: Client, width: int, theme: str) -> None:
    tab.look(width, 900, theme)
    show(tab, client)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(CUT) == []
