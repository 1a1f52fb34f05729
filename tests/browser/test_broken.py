"""Broken GPUs on the page: status line, alerts, tiles, map and filters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from podgpu.fleet.view import ConditionView
from tests.browser.chromium import Tab, opened, reloaded, visited, went
from tests.browser.pictures import Showing, gpu, node, picture
from tests.browser.records import ALERTS, TEXTS, troubled, troubled_showing

TILES = "document.querySelectorAll('main .tile[data-key]').length"
STATUS = "document.querySelector('#status').dataset"
LOST = "GPU-gpu-a-01-0003-4c5e-9d3f-000000000000"


@pytest.fixture(scope="module")
def usual() -> Showing:
    return troubled_showing()


def tile(tab: Tab, name: str) -> str:
    """Returns the text of the first tile whose label begins with this text."""
    found = (
        f"[...document.querySelectorAll('main .tile')].find(t => t.ariaLabel.startsWith({name!r}))"
    )
    return " ".join(str(tab.wait_for(f"({found})?.innerText", f"tile {name}")).split())


def test_the_dot_is_green_only_while_nothing_is_wrong(tab: Tab, url: str, shown: Showing) -> None:
    dot = "getComputedStyle(document.querySelector('.dot')).backgroundColor"
    opened(tab, url)
    tab.wait_for(f"{STATUS}.health === 'broken'")
    red = tab.evaluate(dot)
    assert tab.text("#status-text").startswith("9 broken. Live")
    assert tab.evaluate("document.title").startswith("(9 broken)")
    hot = ConditionView(
        condition="thermal",
        since=time.time() - 60,
        says="slowed by heat",
        do="Look after the fans.",
    )
    device = gpu(0, "n1", utilization=0.5, conditions=[hot])
    shown.more, shown.picture = None, picture(node("n1", [device, gpu(1, "n1", utilization=0.0)]))
    tab.look_again()
    tab.wait_for(f"{STATUS}.health === 'warning'", "heat is no more than a warning")
    amber = tab.evaluate(dot)
    assert tab.text("#status-text").startswith("1 broken. Live")
    shown.picture = picture(node("n1", [replace(device, conditions=[])]))
    tab.look_again()
    tab.wait_for(f"{STATUS}.health === ''", "nothing is wrong")
    assert tab.text("#status-text").startswith("Live")
    assert tab.count("#alerts") == 0
    assert len({red, amber, tab.evaluate(dot)}) == 3


def test_serious_notes_are_open_and_the_others_folded(tab: Tab, url: str, shown: Showing) -> None:
    usual = shown.more
    shown.more = lambda view: {**view, "alerts": ALERTS[:3]}
    opened(tab, url)
    assert (tab.count(".alert"), tab.count("#alerts-more")) == (3, 0), (
        "a single further alert is not folded"
    )
    node_gone, first, second, *_ = ALERTS
    again = {**first, "text": "gpu-a-01: GPU 3 fails again and again"}
    shown.more = lambda view: {**view, "alerts": [first, again, second, node_gone]}
    shown.picture = replace(shown.picture)
    opened(tab, url)
    assert tab.texts(".alert-text") == [node_gone["text"], first["text"]]
    tab.click("#alerts-more")
    wanted = [node_gone, first, second, again]
    assert tab.texts(".alert-text") == [alert["text"] for alert in wanted], (
        "further problems of a GPU come after the first of all GPUs"
    )
    shown.more, shown.picture = usual, replace(shown.picture)
    opened(tab, url)
    serious = [t for t, a in zip(TEXTS, ALERTS, strict=True) if a["severity"] == "broken"]
    assert tab.texts(".alert-text") == serious[:2]
    assert set(tab.texts(".alert-word")) == {"Broken"}, (
        "the severity is shown in words, not only by colour"
    )
    assert tab.texts("#alerts-more") == ["Show 3 more"]
    tab.click("#alerts-more")
    assert tab.texts(".alert.is-broken .alert-text") == serious
    assert tab.texts(".alert.is-warning .alert-text") == ["gpu-a-01: GPU 6 is throttled"]
    assert not tab.evaluate("document.querySelector('#notes').open")
    assert tab.text("#notes-summary") == "1 note", "open alerts are not repeated in the notes"
    tab.click(".alert-link")
    tab.wait_for(
        "document.querySelector('.node-view .pod-title')?.innerText.includes('gpu-b-02')",
        "the node's view",
    )
    tab.evaluate("history.back()")
    tab.wait_for(f"{TILES} === 20")
    tab.click(".alert:nth-child(2) .alert-link")
    tab.wait_for("document.querySelector('.uuid code')?.textContent", "the GPU's own view")
    assert tab.text(".uuid code") == LOST


@pytest.mark.fault(
    "A GPU falls off the bus",
    "Its tile stays on the page: what, since when, who held it, what to do",
)
def test_a_lost_gpu_stays_with_its_holder_and_what_to_do(
    tab: Tab, url: str, shown: Showing
) -> None:
    opened(tab, url)
    held_one = tile(tab, "GPU 3 of gpu-a-01")
    assert held_one.startswith("GPU 3 H100 80GB Lost GPU 3 has fallen off the bus since ")
    assert "for 1 h 6 min" in held_one
    assert "Drain the node and power-cycle it." in held_one
    assert held_one.endswith("research/ llm-pretrain-gpu-a-01")
    assert "%" not in held_one, "a lost GPU has no values"
    loose = tile(tab, "GPU 7 of gpu-a-02")
    assert loose.endswith("last held by notebooks/ jupyter-linus")
    shown.picture = troubled(1)
    tab.look_again()
    tab.evaluate("new Promise(done => setTimeout(done, 500))")
    assert tile(tab, "GPU 3 of gpu-a-01").startswith("GPU 3"), "the tile stays"


def test_broken_is_counted_and_filters_by_a_click(tab: Tab, page: str) -> None:
    visited(tab, page)
    assert tab.texts(".total-broken") == ["9 Broken 4 not answering"]
    assert tab.texts(".total-unheld .total-more") == ["3 not answering"], (
        "their holders are unknown"
    )
    tab.click(".total-broken")
    tab.wait_for(f"{TILES} === 5", "five, and the node of the other four as one row")
    assert "serving/asr-0" in tab.text(".node.is-gone")
    assert tab.evaluate("location.hash") == "#state=broken"
    assert tab.evaluate("document.querySelector('.total-broken').ariaPressed") == "true"
    reloaded(tab)
    tab.wait_for(f"{TILES} === 5", "the address says it")
    tab.evaluate("history.back()")
    tab.wait_for(f"{TILES} === 20", "back to all")


def test_commands_that_help_can_be_copied(tab: Tab, page: str) -> None:
    visited(tab, page, "#gpu=GPU-gpu-a-01-0005-4c5e-9d3f-000000000000")
    drain = "kubectl drain gpu-a-01 --ignore-daemonsets --delete-emptydir-data"
    assert tab.texts(".commands code") == [
        "kubectl cordon gpu-a-01",
        f"{drain} --dry-run=server",
        drain,
        "podgpu release --seconds 600 --node gpu-a-01",
        "nvidia-smi -r -i 5",
        "kubectl uncordon gpu-a-01",
    ]
    places = tab.texts(".command-where")
    assert places == [*["your terminal"] * 4, "on gpu-a-01", "your terminal"]
    assert "For Kubernetes Healthy" in " ".join(tab.text(".groups").split())
    assert "evicts these pods with GPUs: research/llm, serving/asr." in tab.text(".commands + p")
    tab.click(".commands li:nth-child(2) button")
    tab.wait_for(
        "document.querySelector('.commands li:nth-child(2) button').innerText === 'Copied'"
    )
    visited(tab, page, "#view=nodes&node=gpu-a-01")
    assert tab.texts(".node-view .commands code")[2] == "kubectl cordon gpu-a-01"
    visited(tab, page, "#gpu=GPU-gpu-a-02-0007-4c5e-9d3f-000000000000")
    commands = tab.texts(".commands code")
    assert commands[:2] == ["dmesg -T | grep -iE 'xid|nvrm'", "lspci -d 10de:"]
    assert commands[2] == "kubectl cordon gpu-a-02", "commands are shown for a lost GPU too"
    assert "systemctl reboot" in tab.texts(".commands code")
    assert tab.texts(".troubles code") == ["podgpu forget"], "the code has no backticks"
    visited(tab, page, "#view=nodes")
    titles = tab.texts(".nodes-table thead th")
    row = dict(zip(titles, tab.texts(".nodes-table tbody tr:last-child > *"), strict=True))
    number = {name: float(row[name]) for name in titles if row[name].replace(".", "").isdecimal()}
    assert number["Allocated"] == number["Used"] + number["Idle"] + number["Use unknown"]
    assert number["GPUs"] == number["Allocated"] + number["Free"] + number["Holder unknown"]
    assert (row["Utilisation"], row["Memory"]) == ("\u2013", "\u2013"), "the node is gone"
    visited(tab, page, "#view=nodes&node=gpu-b-02")
    assert tab.texts(".node-view .commands code")[0] == "kubectl describe node gpu-b-02"
    assert tab.evaluate(TILES) == 0, "GPUs of a gone node have no values"
    assert "Idle GPUs" not in tab.texts(".node-view thead th"), "idle GPUs are unknown, not 0"
    assert tab.texts(".node-view tbody th") == ["asr-0"]


def test_a_removed_gpu_is_forgotten_by_a_click(tab: Tab, url: str, shown: Showing) -> None:
    opened(tab, url, f"#gpu={LOST}")
    tab.wait_for("document.querySelector('.forget > .quiet')?.innerText === 'Forget this GPU'")
    tab.click(".forget > .quiet")
    tab.wait_for("document.querySelector('.forget > .quiet').innerText === 'Forgotten'")
    assert shown.forgotten == [LOST]


def test_where_the_server_refuses_the_page_says_what_to_run(tab: Tab, shown: Showing) -> None:
    shown.may_forget = False
    with shown.served() as client:
        opened(tab, client.address.url, f"#gpu={LOST}")
        tab.click(".forget > .quiet")
        tab.wait_for("document.querySelector('.forget code')?.checkVisibility()", "the command")
        assert tab.texts(".forget code") == [f"podgpu forget {LOST}"]
        assert "--web-enable-lifecycle=false" in tab.text(".forget p")
        assert shown.forgotten == []
        tab.errors[:] = [error for error in tab.errors if "403" not in error]


ANSWERED = "!document.querySelector('main').innerText.includes('Loading')"
VIEWS = (
    "",
    "#state=broken",
    "#show=map",
    "#cost=1",
    f"#gpu={LOST}",
    "#gpu=GPU-gpu-a-02-0005-4c5e-9d3f-000000000000",
    "#pod=serving/rerank",
    "#view=pods",
    "#view=pods&by=namespace",
    "#view=nodes",
    "#view=nodes&node=gpu-b-02",
    "#view=events",
    "#view=cost",
    "#view=cost&by=owner&from=1794800000&to=1794900000",
    "#at=1794800000",
    f"#at=1794800000&gpu={LOST}",
)


FINDINGS = """axe.run(document, {resultTypes: ['violations'], ...OPTIONS}).then(found =>
  found.violations.flatMap(rule => rule.nodes.map(node => `${rule.id}: ${node.target}`)))"""


STRETCHED = """[...document.querySelectorAll('main .tile')].filter(tile => {
  const height = tile.offsetHeight;
  tile.style.alignSelf = 'start';
  const own = tile.offsetHeight;
  tile.style.alignSelf = '';
  return height > own + 1;
}).length"""
PITCHES = """[...document.querySelectorAll('.tile')].flatMap(tile => {
  const boxes = [...tile.querySelectorAll('.row-pod')].map(link => link.getBoundingClientRect());
  const middles = boxes.map(box => (box.top + box.bottom) / 2);
  return middles.slice(1).map((middle, i) => middle - middles[i]);
})"""


@pytest.mark.parametrize("width", [1024, 2560])
def test_tiles_beside_a_broken_one_are_not_stretched(tab: Tab, page: str, width: int) -> None:
    tab.look(width)
    visited(tab, page, "#node=gpu-a-01")
    assert tab.count("main .tile") == 8
    assert tab.evaluate(STRETCHED) == 0


@pytest.mark.parametrize("width", [390, 1024, 1440, 2560])
def test_targets_are_large_enough_for_touch(tab: Tab, page: str, width: int) -> None:
    tab.look(width)
    visited(tab, page, "#view=nodes")
    heights = (
        "[...document.querySelectorAll('.total')].filter(t => t.checkVisibility())"
        ".map(t => t.getBoundingClientRect().height)"
    )
    assert min(tab.evaluate(heights)) >= 24
    visited(tab, page)
    assert min(tab.evaluate(PITCHES)) >= 24


@pytest.mark.parametrize(
    ("theme", "options"), [("light", "{}"), ("dark", "{runOnly: ['color-contrast']}")]
)
def test_axe_finds_no_barrier(tab: Tab, page: str, theme: str, options: str) -> None:
    """axe-core checks contrast, names, roles and landmarks. Only contrast depends on the theme."""
    package = pytest.importorskip("axe_core_python", reason="pip install axe-core-python")
    tab.look(theme=theme)
    visited(tab, page)
    tab.evaluate(f"{(Path(package.__file__).parent / 'axe.min.js').read_text()};0")
    for view in VIEWS:
        visited(tab, page, view)
        tab.wait_for(ANSWERED, "all there is to show")
        assert tab.evaluate(FINDINGS.replace("OPTIONS", options)) == [], view


def test_a_gpu_that_only_kubernetes_calls_unhealthy_is_not_broken(
    tab: Tab, url: str, shown: Showing
) -> None:
    refused = ConditionView(
        condition="kubernetes_unhealthy",
        since=time.time() - 600,
        says="Kubernetes calls it unhealthy, but podgpu finds no problem",
        do="Check the device plugin.",
    )
    device = gpu(0, "n1", utilization=0.9, conditions=[refused])
    shown.more, shown.picture = None, picture(node("n1", [device, gpu(1, "n1")]))
    opened(tab, url)
    assert tab.texts(".total-broken .total-value") == ["0"]
    assert tab.texts(".total-broken .total-more") == ["Kubernetes calls 1 unhealthy"]
    assert "broken" not in tab.text("#status-text")
    assert tab.evaluate(f"{STATUS}.health") == "warning"
    assert "Kubernetes calls it unhealthy" in tile(tab, "GPU 0 of n1")
    assert tab.count(".tile.is-broken, .tile.has-broken") == 0
    assert tab.count(".tile.has-warning") == 1
    went(tab, "#show=map")
    assert tab.count(".square.is-broken") == 0
    assert "Kubernetes calls it unhealthy" in str(
        tab.evaluate("document.querySelector('.square').ariaLabel")
    )
    went(tab, "#view=nodes")
    assert "Kubernetes calls 1 unhealthy" in tab.text(".nodes-table")
    went(tab, f"#gpu={device.uuid}")
    assert tab.texts(".pod-title .badge") == ["Kubernetes calls it unhealthy"]
    went(tab, "#state=broken")
    assert "No GPU is broken." in tab.text("main")
