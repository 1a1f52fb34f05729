"""8,000 GPUs in a real browser: the map draws only the visible part. Used by mouse and keyboard."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.chromium import Tab, visited, went
from tests.browser.pictures import Showing, large, three_nodes

TILES = "document.querySelectorAll('main .tile[data-key]').length"


@pytest.fixture(scope="module")
def usual() -> Showing:
    return Showing(large())


def test_thousands_are_a_map_of_which_only_what_is_seen_is_drawn(tab: Tab, page: str) -> None:
    visited(tab, page)
    assert tab.texts(".total-value")[0] == "8,000"
    drawn = tab.evaluate("document.querySelectorAll('.square').length")
    assert 500 < drawn < 3000
    assert tab.texts(".cell-name")[0] == "gpu-a-0000"
    tab.evaluate("scrollTo(0, document.body.scrollHeight)")
    last = "document.querySelector('.cell:last-child .cell-name').innerText"
    tab.wait_for(f"{last} === 'gpu-h-0999'", "the last node")
    assert tab.evaluate("document.querySelectorAll('.square').length") < 3000
    tab.evaluate("scrollTo(0, 0)")
    tab.press("/")
    tab.type("dev-4-")
    tab.wait_for(f"{TILES} === 4", "few are tiles")


def test_pages_of_a_cluster_with_too_many_gpus(tab: Tab) -> None:
    def page(view: dict[str, Any]) -> dict[str, Any]:
        totals = {
            "gpus": 100_000,
            "allocated": 80_000,
            "used": 60_000,
            "idle": 20_000,
            "unknown": 0,
            "free": 20_000,
        }
        namespaces = [
            {
                "namespace": "far",
                "cluster": cluster,
                "allocated_gpus": gpus,
                "idle_gpus": 500,
                "unknown_gpus": 0,
            }
            for cluster, gpus in (("east", 70_000), ("west", 10_000))
        ]
        return {
            **view,
            "paged": True,
            "found": 50,
            "totals": {**totals, "broken": 7},
            "namespaces": namespaces,
        }

    shown = Showing(three_nodes(), more=page)
    with shown.served() as client:
        visited(tab, client.address.url)
        assert tab.texts(".total-value")[:7] == [
            "100,000",
            "80,000",
            "60,000",
            "20,000",
            "0",
            "20,000",
            "7",
        ]
        requests = (
            "performance.getEntriesByType('resource').map((one) => one.name.split('/').at(-1))"
        )
        tab.wait_for(f"{requests}.includes('view?page=1')", "the first page")
        tab.click("#pager-next")
        tab.wait_for(f"{requests}.includes('view?page=2')", "the second page")
        went(tab, "#ns=far&sort=idle&page=3")
        tab.wait_for(f"{requests}.includes('view?ns=far&sort=idle&page=3')", "a filter")
        assert tab.evaluate("document.getElementById('pager-next').hidden")
        went(tab, "#view=pods&by=namespace")
        assert "80,000" in tab.text("main"), "the server's namespaces are shown"
        went(tab, "#view=pods&by=namespace&cluster=east")
        tab.wait_for(
            "!document.getElementById('main').innerText.includes('10,000')", "those of one cluster"
        )
        assert "70,000" in tab.text("main")
        assert "500" in tab.texts(".pods tbody td"), "idle GPUs of a namespace"
        went(tab, "#gpu=GPU-1/3")
        tab.wait_for(f"{requests}.includes('view?gpu=GPU-1&page=1')", "the GPU of a MIG instance")
