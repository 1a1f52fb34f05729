"""What the page says when figures are old, missing or not known, and how it writes and cuts what it shows."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Tab, opened
from tests.browser.pictures import Showing, gpu, held, mig, node, picture, three_nodes


@pytest.fixture
def shown() -> Showing:
    return Showing(three_nodes())


def totals(tab: Tab) -> dict[str, str]:
    return dict(zip(tab.texts(".total-name"), tab.texts(".total-value"), strict=True))


def test_the_mean_of_used_is_that_of_the_tiles(tab: Tab, url: str, shown: Showing) -> None:
    instances = [mig("1", "3g.40gb", 0.4, holders=[held("notebooks", "a")]), mig("9", "1g.10gb", 0.0)]
    fresh = [
        gpu(0, "n1", utilization=0.2),
        gpu(1, "n1", utilization=0.6),
        gpu(2, "n1", utilization=0.9, instances=instances),
        gpu(3, "n1", utilization=0.0),
    ]
    old = node("n2", [gpu(0, "n2", utilization=1.0)], old=True, age_seconds=90.0)
    shown.picture = picture(node("n1", fresh), old)
    opened(tab, url)
    assert tab.texts(".tile-ratio")[:4] == ["20 %", "60 %", "30 %", "0 %"]
    assert tab.texts(".total-used .total-more") == ["mean 37 %"]
    tab.choose("node", "n1")
    tab.wait_for("document.querySelector('#shown').innerText.includes('mean of used 37')", "the same below the filter")


def test_what_nobody_measured_is_neither_used_nor_free(tab: Tab, url: str, shown: Showing) -> None:
    shown.picture = picture(
        node(
            "n1",
            [
                gpu(0, "n1", utilization=None, memory=40, holders=(held("a", "pod-0"),)),
                gpu(1, "n1", utilization=None, memory=0),
                gpu(2, "n1", utilization=None, memory=40),
                gpu(3, "n1", utilization=0.5),
            ],
        )
    )
    opened(tab, url)
    assert totals(tab) == {
        "GPUs": "4",
        "Allocated": "1",
        "Used": "0",
        "Idle": "0",
        "Not known": "1",
        "Free": "3",
        "Broken": "0",
        "Power": "\u2013",
    }
    assert tab.texts(".total-free .total-more") == ["2 busy"], "nobody is known to hold them, but something works there"
    assert tab.texts(".tile-ratio") == ["\u2013", "\u2013", "\u2013", "50 %"]
    told = tab.texts("main .row")
    assert told[1:] == ["Free", "Nobody is known to hold it", "Nobody is known to hold it"]
    tab.choose("state", "unknown")
    tab.wait_for("document.querySelectorAll('.tile[data-key]').length === 1", "the one that is held")
