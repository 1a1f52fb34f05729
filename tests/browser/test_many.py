"""Eight thousand GPUs in a real browser: a map of which only what is seen is drawn, by mouse and by keyboard."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Tab, visited
from tests.browser.pictures import Showing, large

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
