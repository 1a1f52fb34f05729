"""What the page says when figures are old, missing or not known, and how it writes and cuts what it shows."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from podgpu.model import Workload
from tests.browser.chromium import Tab, opened
from tests.browser.flat_documents import DeviceFigures, HolderFigures
from tests.browser.flat_pictures import NamespacePicture, NodePicture
from tests.browser.pictures import GIB, Showing, gpu, held, picture, three_nodes

STATE = "document.querySelector('#status').dataset.state"
NOTES_OPEN = "document.querySelector('#notes').open"


@pytest.fixture
def shown() -> Showing:
    return Showing(three_nodes())


def instance(number: str, profile: str, load: float | None, pod: str = "") -> DeviceFigures:
    holders = (held("notebooks", pod),) if pod else ()
    return replace(gpu(2, "n1", utilization=load, holders=holders), instance=number, profile=profile)


def totals(tab: Tab) -> dict[str, str]:
    return dict(zip(tab.texts(".total-name"), tab.texts(".total-value"), strict=True))


def test_the_mean_of_used_is_that_of_the_tiles(tab: Tab, url: str, shown: Showing) -> None:
    cut = gpu(2, "n1", utilization=0.9)
    fresh = (
        gpu(0, "n1", utilization=0.2),
        gpu(1, "n1", utilization=0.6),
        *(cut, instance("1", "3g.40gb", 0.4, "a"), instance("9", "1g.10gb", 0.0)),
        gpu(3, "n1", utilization=0.0),
    )
    old = NodePicture("n2", (gpu(0, "n2", utilization=1.0),), old=True, age_seconds=90.0)
    shown.picture = picture(NodePicture("n1", fresh), old, used_utilization=0.19)
    opened(tab, url)
    assert tab.texts(".tile-ratio")[:4] == ["20 %", "60 %", "30 %", "0 %"]
    assert tab.texts(".total-used .total-more") == ["mean 37 %"]
    tab.choose("node", "n1")
    tab.wait_for("document.querySelector('#shown').innerText.includes('mean of used 37')", "the same below the filter")


@pytest.mark.parametrize(
    ("model", "profiles", "expected"),
    [
        ("NVIDIA A30", ["1g.6gb"] * 4, [25, 25, 25, 25]),
        ("NVIDIA A30", ["2g.12gb", "1g.6gb"], [50, 25]),
        ("NVIDIA H100 80GB HBM3", ["3g.40gb", "1g.10gb"], [43, 14]),
        ("NVIDIA A30", ["2g.12gb", "odd"], [50, 50]),
    ],
)
def test_instances_fill_the_bar_by_the_slices_their_gpu_has(
    tab: Tab, url: str, shown: Showing, model: str, profiles: list[str], expected: list[int]
) -> None:
    """Four of an A30's four slices are all of it; one whose profile does not say has what the others leave."""
    parts = [replace(instance(str(i), profile, 0.5), model=model) for i, profile in enumerate(profiles)]
    shown.picture = picture(NodePicture("n1", (gpu(2, "n1", model), *parts)))
    opened(tab, url)
    widths = "(t => [...t.querySelectorAll('.segment')].map(s => s.getBoundingClientRect().width))"
    tile = "document.querySelector('.tile[data-key]')"
    bar = tab.evaluate(f"{tile}.querySelector('.bar').getBoundingClientRect().width")
    assert [100 * width / bar for width in tab.evaluate(f"{widths}({tile})")] == pytest.approx(expected, abs=1.5)


def test_a_holder_without_a_name_is_called_as_everywhere_else(tab: Tab, url: str, shown: Showing) -> None:
    """As `Workload.text` has it; the container's name has a place of its own on the page."""
    nameless = (
        Workload(uid="u-1", container_id="c" * 64),
        Workload(uid="u-1"),
        Workload(container_id="c" * 64),
        Workload(job="4711"),
        Workload(container="main", uid="u-1", container_id="c" * 64),
    )
    devices = [gpu(i, "n1", holders=(HolderFigures(workload),)) for i, workload in enumerate(nameless)]
    shown.picture = picture(NodePicture("n1", tuple(devices)))
    opened(tab, url)
    *without_container, named = tab.texts("main .row-pod")
    assert without_container == [workload.text for workload in nameless[:-1]]
    assert f"{named}/{tab.texts('main .row-container')[-1]}" == nameless[-1].text


# -- old, and not there ----------------------------------------------------------------------------------------------


def test_nothing_is_live_when_every_node_is_old(tab: Tab, url: str, shown: Showing) -> None:
    opened(tab, url)
    assert not tab.evaluate(NOTES_OPEN)
    now = three_nodes()
    ages = zip(now.nodes, (130.0, 125.0, 200.0), strict=True)
    shown.picture = replace(now, nodes=tuple(replace(node, old=True, age_seconds=age) for node, age in ages))
    tab.look_again()
    tab.wait_for(f"{STATE} === 'old'", "the state is old")
    assert tab.text("#status-text").startswith("Old, 2")
    assert (totals(tab)["GPUs"], totals(tab)["Used"], totals(tab)["Not known"]) == ("20", "0", "17.86")
    assert tab.evaluate(NOTES_OPEN), "the notes say why"
    tab.click("#notes summary")
    shown.picture = replace(shown.picture, taken_at=time.time(), notes=("another",))
    tab.look_again()
    tab.wait_for("document.querySelector('#notes-list').textContent.includes('another')")
    assert not tab.evaluate(NOTES_OPEN), "once folded by hand, they stay so"
    shown.picture = three_nodes(1)
    tab.look_again()
    tab.wait_for(f"{STATE} === 'live'", "live again")


def test_notes_fold_again_when_there_are_gpus(tab: Tab, url: str, shown: Showing) -> None:
    shown.picture = picture(NodePicture("n1"), notes=("no exporter answers",))
    opened(tab, url)
    assert tab.evaluate(NOTES_OPEN)
    shown.picture = three_nodes()
    tab.look_again()
    tab.wait_for(f"!{NOTES_OPEN}", "folded")


def test_a_node_that_was_never_read_has_no_figures_yet(tab: Tab, url: str, shown: Showing) -> None:
    node = NodePicture("n1", old=True)
    shown.picture = replace(picture(node, notes=("driver: there is none",)), scope="node", taken_at=None)
    opened(tab, url, state="old")
    assert (tab.text("#status-text"), tab.text("#updated")) == ("No figures yet", "No figures yet")
    assert "driver: there is none" in tab.text("#notes-list"), "unfolded"
    assert set(totals(tab).values()) == {"\u2013"}, "no zeros"
    shown.picture = three_nodes()
    tab.look_again()
    tab.wait_for(f"{STATE} === 'live'", "live")
    assert tab.text("#updated").startswith("Figures of")


# -- not known -------------------------------------------------------------------------------------------------------


def test_what_nobody_measured_is_neither_used_nor_free(tab: Tab, url: str, shown: Showing) -> None:
    shown.picture = picture(
        NodePicture(
            "n1",
            (
                gpu(0, "n1", utilization=None, memory=40, holders=(held("a", "pod-0"),)),
                gpu(1, "n1", utilization=None, memory=0),
                gpu(2, "n1", utilization=None, memory=40),
                gpu(3, "n1", utilization=0.5),
            ),
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


def test_a_holder_tells_where_its_gpu_does_not(tab: Tab, url: str, shown: Showing) -> None:
    busy = held("a", "pod-0", utilization=0.4, processes=0)
    shown.picture = picture(NodePicture("n1", (gpu(0, "n1", utilization=None, memory=40, holders=(busy,)),)))
    opened(tab, url)
    assert (totals(tab)["Used"], totals(tab)["Idle"]) == ("1", "0")
    assert tab.texts(".tile-ratio") == ["\u2013"]
    assert tab.texts(".row-figure") == ["40 %"]


# -- how it is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["node", "cluster"])
def test_the_name_fits_a_phone_beside_the_badge(tab: Tab, url: str, shown: Showing, scope: str) -> None:
    nodes = three_nodes().nodes[: 1 if scope == "node" else 3]
    shown.picture = replace(picture(*nodes, simulated=True), scope=scope)
    tab.look(360, 780)
    opened(tab, url)
    assert tab.texts("#simulated") == ["Simulated"]
    assert tab.evaluate("(s => s.scrollWidth <= s.clientWidth)(document.querySelector('.scope'))")
    assert tab.evaluate("document.documentElement.scrollWidth") == 360


def test_namespaces_that_have_only_begun(tab: Tab, url: str, shown: Showing) -> None:
    teams = (
        NamespacePicture("a", 7.0, 6.5, 2 / 3, 0.0371, 0.0137, 0.00215),
        NamespacePicture("b", 0.0, 0.0, 0.0, 12.0, 0.0, 4.25),
        NamespacePicture("c", 1.0, None, 0.0),
    )
    shown.picture = picture(*three_nodes().nodes, namespaces=teams)
    opened(tab, url, "#view=namespaces")
    assert tab.texts("tbody tr") == [
        "a 7 6.5 0.67 0.037 0.014 37 % 0.0022",
        "c 1 \u2013 0 \u2013 \u2013 \u2013 \u2013",
        "b 0 0 0 12.0 0 0 % 4.3",
    ]


def test_a_pods_name_goes_before_its_namespaces(tab: Tab, url: str, shown: Showing) -> None:
    pod = "jupyter-grace-0"
    part = replace(instance("1", "1g.10gb", 0.4, pod), memory_used=2 * GIB)
    whole = gpu(3, "n1", utilization=0.5, holders=(held("serving", "chat-0"),))
    shown.picture = picture(NodePicture("n1", (gpu(2, "n1"), part, whole)))
    opened(tab, url)
    seen = """[...document.querySelectorAll('main .row-name')].map(name => [...name.querySelectorAll('bdi')].filter(e =>
      e.getBoundingClientRect().top < name.getBoundingClientRect().bottom).map(e => e.textContent))"""
    assert tab.evaluate(seen) == [[pod], ["serving/", "chat-0", "main"]]
    assert tab.evaluate("(p => p.scrollWidth <= p.clientWidth)(document.querySelector('main .row-pod'))"), "not cut"
    assert tab.evaluate("document.querySelector('main .row-name').title") == f"notebooks/{pod}/main"
    for row in range(2):
        middles = f"[...document.querySelectorAll('main .row')[{row}].querySelectorAll('.row-pod, .profile')]"
        bottoms = tab.evaluate(f"{middles}.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().bottom)")
        assert max(bottoms) - min(bottoms) < 3, "on one line"
