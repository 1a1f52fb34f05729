"""Stale, missing and unknown values on the page, and how values and long names are written."""

from __future__ import annotations

import json
import time

import pytest
from msgspec.structs import replace

from podgpu.fleet.choose import Alert
from podgpu.fleet.view import ConditionView
from podgpu.metrics.usage_methods import IMPROVEMENTS, NO_CAPABILITY
from podgpu.model import WaitPart
from tests.browser.chromium import Tab, opened, went
from tests.browser.pictures import Showing, gpu, held, mig, node, picture, three_nodes
from tests.browser.test_money import totals


@pytest.fixture
def shown() -> Showing:
    return Showing(three_nodes())


def test_the_mean_of_used_is_that_of_the_tiles(tab: Tab, url: str, shown: Showing) -> None:
    instances = [
        mig("1", "3g.40gb", 0.4, holders=[held("notebooks", "a")]),
        mig("9", "1g.10gb", 0.0),
    ]
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
    tab.wait_for(
        "document.querySelector('#shown').innerText.includes('mean of used 37')",
        "the same below the filter",
    )


def test_the_view_of_a_gpu_shows_how_long_each_holder_waited(
    tab: Tab, url: str, shown: Showing
) -> None:
    others = (
        WaitPart("batch", "embed-0", "main", seconds=0.13, ratio=0.128),
        WaitPart(seconds=0.12, ratio=0.117),
    )
    chat = held("serving", "chat-0", utilization=0.4, wait_ratio=0.268, waits_for=others)
    runs = held("batch", "embed-0", utilization=0.5, wait_ratio=0.0)
    hosts = held(
        "batch",
        "ocr-0",
        utilization=0.1,
        wait_ratio=0.02,
        waits_for=(WaitPart(seconds=0.021, ratio=0.02),),
    )
    shared = gpu(0, "n1", utilization=1.0, holders=(chat, runs, hosts))
    shown.picture = picture(node("n1", [shared]))
    opened(tab, url, f"#gpu={shared.uuid}")
    texts = [text.replace("\u2009", " ") for text in tab.texts(".gpu .row-wait")]
    waits = ["waited 27 % (13 % for batch/embed-0)", "waited 2 % for processes outside pods"]
    assert [text for text in texts if text] == waits
    table = (
        "[...document.querySelectorAll('.waits tr')].map(row => [...row.cells].map(cell => "
        "cell.innerText))"
    )
    assert tab.evaluate(table) == [
        [
            "Waits for",
            "serving/chat-0",
            "batch/embed-0",
            "batch/ocr-0",
            "processes outside pods",
            "Total",
        ],
        ["serving/chat-0", "\u2013", "0.13", "0.00", "0.12", "0.25"],
        ["batch/embed-0", "0.00", "\u2013", "0.00", "0.00", "0.00"],
        ["batch/ocr-0", "0.00", "0.00", "\u2013", "0.02", "0.02"],
    ]


FACTS = (
    "Object.fromEntries([...document.querySelectorAll('.pod .facts div')].filter(fact => "
    "fact.checkVisibility()).map(fact => [...fact.children].map(part => part.innerText)))"
)
"""JavaScript expression for the figures of a pod, by their titles."""


def test_the_power_of_a_pod_is_its_own_or_unknown(tab: Tab, url: str, shown: Showing) -> None:
    both = (
        held("serving", "chat-0", utilization=0.4, power_watts=210.0),
        held("batch", "embed-0", utilization=0.5),
    )
    shared = gpu(0, "n1", utilization=0.9, power_watts=600.0, holders=both)
    whole = gpu(1, "n1", power_watts=400.0, holders=[held("batch", "train-0")])
    on_gone = gpu(0, "n2", power_watts=334.0, holders=[held("batch", "lost-0")])
    gone = node("n2", [on_gone], old=True, gone=True, age_seconds=600.0)
    shown.picture = picture(node("n1", [shared, whole]), gone)
    opened(tab, url)
    powers = {}
    for pod in ("serving/chat-0", "batch/embed-0", "batch/train-0", "batch/lost-0"):
        went(tab, f"#pod={pod}")
        powers[pod] = tab.evaluate(FACTS)["Power"]
    assert powers == {
        "serving/chat-0": "210\u00a0W",
        "batch/embed-0": "–",
        "batch/train-0": "400\u00a0W",
        "batch/lost-0": "–",
    }


def test_what_is_unknown_on_a_shared_gpu_does_not_include_power(
    tab: Tab, url: str, shown: Showing
) -> None:
    summary = {
        "from": time.time() - 7200,
        "duration_seconds": 7200,
        "gpus": 1,
        "shared": True,
        "gpu_hours": 2.0,
        "allocated_hours": 1.0,
        "used_hours": 0.7,
        "mean_use": 0.35,
        "mean_device_use": 0.35,
        "mean_share_use": 0.7,
        "energy_kwh": 0.4,
        "errors": 0,
        "verdict": "well_used",
    }
    shown.records = lambda path, query: summary if path.startswith("summary") else None
    both = (held("serving", "chat-0", power_watts=210.0), held("batch", "embed-0"))
    shown.picture = picture(node("n1", [gpu(0, "n1", holders=both)]))
    opened(tab, url, "#pod=serving/chat-0")
    tab.wait_for("document.querySelector('.judged')?.checkVisibility()", "its verdict")
    assert "Tensor activity is not known on a shared GPU" in tab.text(".judged")
    assert "power" not in tab.text(".judged").lower()


def test_free_memory_has_one_value(tab: Tab, url: str, shown: Showing) -> None:
    """A part of the memory is reserved, so the total minus the used memory is not free."""
    fields = [
        {"name": "DCGM_FI_DEV_FB_FREE", "unit": "MiB", "value": 18 * 1024},
        {"name": "DCGM_FI_DEV_FB_RESERVED", "unit": "MiB", "value": 2 * 1024},
    ]
    shown.picture = picture(node("n1", [one := gpu(0, "n1", memory=60, total=80)]))
    shown.records = lambda path, query: {"fields": fields} if path.startswith("gpus") else None
    opened(tab, url, f"#gpu={one.uuid}")
    tab.wait_for("document.querySelector('.field')", "its fields")
    memory = tab.text(".groups section:nth-child(2)").replace("\u00a0", " ").split("\n")
    assert memory[memory.index("Free") + 1] == "18.0 GiB"
    assert "20.0 GiB" not in tab.evaluate("document.body.textContent").replace("\u00a0", " ")


def test_how_usage_is_measured_and_what_would_improve_it(
    tab: Tab, url: str, shown: Showing
) -> None:
    better = IMPROVEMENTS[NO_CAPABILITY]
    answer = {"fields": [], "method": "switches", "improvement": better}
    shown.picture = picture(node("n1", [one := gpu(0, "n1")]))
    shown.records = lambda path, query: answer if path.startswith("gpus") else None
    opened(tab, url, f"#gpu={one.uuid}")
    text = f"Usage measured by: switches. Better: {better}"
    tab.wait_for(f"document.body.textContent.includes({json.dumps(text)})", text)


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
        "Use unknown": "1",
        "Free": "1",
        "Holder unknown": "2",
        "Broken": "0",
        "Power": "\u2013",
    }
    assert tab.texts(".total-unheld .total-more") == ["2 busy, so not wasted"], (
        "busy without a known holder"
    )
    assert tab.texts(".tile-ratio") == ["\u2013", "\u2013", "\u2013", "50 %"]
    told = tab.texts("main .row")
    assert told[1:] == ["Free", "Holder unknown", "Holder unknown"]
    for state, number in (("unknown", 1), ("unheld", 2), ("free", 1)):
        tab.choose("state", state)
        tab.wait_for(f"document.querySelectorAll('.tile[data-key]').length === {number}", state)
    usage = Alert("warning", "podgpu cannot read usage: see its log", "n1", sources=("usage",))
    for alerts in ([], [usage]):
        shown.picture = replace(
            picture(node("n1", [gpu(0, "n1", utilization=0.9)]), alerts=alerts), scope="node"
        )
        opened(tab, url, "#view=pods")
        why = "".join(alert.text for alert in alerts) or "No process was found on it."
        assert (
            tab.text(".pods .message") == f"1 GPU is busy, but it is not known who uses it. {why}"
        )


def test_use_is_of_the_gpu_or_instance_and_weighted_by_what_is_held(
    tab: Tab, url: str, shown: Showing
) -> None:
    instances = [mig("1", "3g.40gb", 0.4, holders=[held("a", "small")]), mig("9", "1g.10gb", 0.0)]
    whole = gpu(1, "n1", utilization=1.0, holders=[held("a", "large")])
    shown.picture = picture(node("n1", [gpu(0, "n1", instances=instances), whole]))
    opened(tab, url, "#view=pods&by=namespace")
    assert "82 %" in tab.text(".pods tbody tr").replace("\u202f", " "), (
        "3/7 of a GPU at 40 %, one at 100 %"
    )
    tab.evaluate("location.hash = '#pod=a/small'")
    tab.wait_for(
        "document.querySelector('.tile-whole')?.innerText === 'of its instance'",
        "not of the whole GPU",
    )


def test_an_error_of_the_page_is_said_until_the_figures_are_shown(
    tab: Tab, url: str, shown: Showing
) -> None:
    opened(tab, url)
    shown.more = lambda view: {**view, "nodes": [{"name": "n1", "gpus": 7}]}
    shown.picture = three_nodes(1)
    tab.look_again()
    tab.wait_for(
        "document.querySelector('#status').dataset.state === 'failed'",
        "the page says that it has an error",
    )
    for _ in range(2):  # the error stays if the server has no new values
        tab.look_again()
        tab.evaluate("new Promise(done => setTimeout(done, 200))")
        assert tab.text("#status-text").startswith("Page error (")
        assert "reload the page" in tab.text("#status-text")
    shown.more, shown.picture = None, three_nodes(2)
    tab.look_again()
    tab.wait_for(
        "document.querySelector('#status').dataset.state === 'live'", "the next figures are shown"
    )
    tab.evaluate("0")
    assert tab.errors.pop(0).startswith("console: ")
    tab.errors.clear()


def test_the_page_goes_on_if_the_server_is_away_after_a_time_without_a_record(
    tab: Tab, url: str
) -> None:
    opened(tab, url)
    state = "document.querySelector('#status').dataset.state"
    answer = """new Response('{"error": "no record of this time"}', {status: 400})"""
    tab.evaluate(f"window.server = fetch, window.fetch = async () => {answer}, 0")
    tab.evaluate("location.hash = '#at=1700000000'")
    tab.wait_for("document.querySelector('#status-text').innerText === 'No record'")
    tab.evaluate("window.fetch = async () => { throw new TypeError('no connection') }, 0")
    tab.evaluate("location.hash = '#'")
    tab.wait_for(f"{state} === 'lost'", "the connection is lost")
    tab.evaluate("window.fetch = window.server, 0")
    tab.wait_for(f"{state} === 'live'", "the page asks again", patience=20)


def test_times_that_are_no_date_are_not_known(tab: Tab, url: str, shown: Showing) -> None:
    lost = ConditionView(condition="lost", since=1e308, says="it is lost", do="")
    shown.picture = picture(node("n1", [gpu(0, "n1", utilization=0.5, conditions=[lost])]))
    uuid = shown.picture.nodes[0].gpus[0].uuid
    xids = [{"xid": 79, "says": "GPU has fallen off the bus", "at": 1e308}]
    shown.records = lambda path, query: {"xids": xids} if path.startswith("gpus/") else None
    opened(tab, url, f"#gpu={uuid}")
    tab.wait_for(
        "document.querySelector('.known .mark-when')?.textContent === '\u2013'",
        "the XID without a time",
    )
    assert "GPU has fallen off the bus" in tab.text(".known")


SHARED = """[...document.querySelectorAll('main .tile[data-key]')].map(tile => [tile, ...tile.querySelectorAll('.row')])
  .filter(([, ...rows]) => rows.length > 1).map(([tile, ...rows]) => [tile.querySelector('.tile-ratio'),
    ...rows.map(row => row.querySelector('.row-figure'))].map(figure => parseInt(figure.innerText) || 0))"""
"""For each shared GPU, the percentages on its tile: that of the GPU, then those of its holders."""


def test_the_holders_of_a_shared_gpu_never_show_more_than_the_gpu(
    tab: Tab, url: str, shown: Showing
) -> None:
    loads = [
        (0.215, 0.225),
        (0.005, 0.435),
        (0.146, 0.147, 0.148),
        (0.335, 0.335, 0.33),
        (0.125,) * 8,
    ]
    gpus = [
        gpu(
            number,
            "n1",
            utilization=sum(ratios),
            holders=[held("a", f"p{n}", "c", r) for n, r in enumerate(ratios)],
        )
        for number, ratios in enumerate(loads)
    ]
    shown.picture = picture(node("n1", gpus))
    opened(tab, url)
    # The figures of the tiles may be drawn after the tiles.
    tab.wait_for(f"({SHARED})[0][0] > 0", "figures")
    figures = tab.evaluate(SHARED)
    assert [whole for whole, *_ in figures] == [44, 44, 44, 100, 100]
    for whole, *parts in figures:
        assert sum(parts) <= whole <= sum(parts) + 1, figures
