"""History on the page: sparklines, and the views of a GPU and of a pod with a time axis."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from tests.browser.chromium import Tab, opened, visited
from tests.browser.pictures import Records, Showing
from tests.browser.records import troubled, troubled_showing

ILL = "GPU-gpu-a-01-0005-4c5e-9d3f-000000000000"
CUT = "GPU-gpu-a-02-0004-4c5e-9d3f-000000000000"
CHARTS = (
    "[...document.querySelectorAll('.chart-value')].filter(v => v.checkVisibility() && "
    "v.textContent).length"
)
"""Number of charts with a value. Charts are empty until the history is loaded."""


@pytest.fixture(scope="module")
def usual() -> Showing:
    return troubled_showing()


@pytest.mark.parametrize(
    "told",
    [
        {"from": 0, "step_seconds": 0, "points": 60, "devices": {}},
        {"from": "x", "step_seconds": "y", "points": 1e9, "devices": None},
        {
            "from": time.time(),
            "step_seconds": 60,
            "points": 60,
            "devices": {ILL: "no base64 !", CUT: 7},
        },
        {"from": -1e18, "step_seconds": 60, "points": 60, "devices": {ILL: "AAAA"}},
    ],
)
def test_a_history_that_makes_no_sense_leaves_the_page_whole(
    tab: Tab, url: str, shown: Showing, told: Mapping[str, Any]
) -> None:
    shown.records = lambda path, query: told if path == "history" else None
    opened(tab, url)
    assert tab.count("main .tile[data-key]") == 20
    shown.picture = troubled(1)
    tab.look_again()
    tab.wait_for(
        "document.querySelector('main .spark-line').getAttribute('d')", "a line of this tab's own"
    )


def test_a_gpu_has_a_view_of_its_own(tab: Tab, page: str) -> None:
    visited(tab, page, "#node=gpu-a-01")
    tab.click(".tile.has-broken:nth-child(6) .tile-name")
    tab.wait_for(f"{CHARTS} === 4", "its history")
    assert tab.evaluate("location.hash") == f"#gpu={ILL}"
    assert tab.text(".pod-title").split("\n")[:3] == ["GPU 5", "H100 80GB HBM3", "on gpu-a-01"]
    assert "Drain the node and reset the GPU." in tab.text(".gpu > .troubles")
    assert tab.texts(".chart-name") == ["Utilisation", "Memory used", "Power", "Temperature"]
    assert tab.texts(".lane-name") == [
        "batch/nightly-0/main",
        "research/llm-pretrain-gpu-a-01/trainer",
    ]
    assert tab.texts(".gpu .row-memory") == ["71.0 GiB"], "also for the only holder"
    tab.wait_for(
        "document.querySelector('.groups').innerText.includes('XID 79')",
        "the error, not a number of errors",
    )
    assert len(tab.texts(".axis span")) >= 5
    assert tab.evaluate("document.querySelectorAll('.chart .mark').length") == 8, (
        "each chart has both marks"
    )
    tab.evaluate("history.back()")
    tab.wait_for(
        "document.querySelectorAll('main .tile[data-key]').length === 8", "back to the node"
    )


def test_events_are_filtered_and_lead_to_their_gpu_and_pod(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.click("#tab-events")
    tab.wait_for("document.querySelectorAll('.events li').length === 6", "all events")
    assert "ended on GPU 0, 1 of gpu-a-02 (after 2 h 0 min)" in tab.texts(".events li")[1]
    tab.click(".events .tabs[aria-label=Kind] a:nth-child(2)")
    tab.wait_for("document.querySelectorAll('.events li').length === 3", "problems")
    assert tab.evaluate("location.hash") == "#view=events&by=problems&range=24h"
    assert tab.texts(".events .badge") == ["Node gone", "Recovered", "Lost"]
    assert (
        tab.texts(".events .mark-says")[1]
        == "GPU 6 of gpu-a-01: slowed down (recovered after 1 min)"
    )
    tab.press("/")
    tab.type("bus")
    tab.wait_for("document.querySelectorAll('.events li').length === 1", "filtered")
    tab.click(".events li a")
    tab.wait_for(
        "document.querySelectorAll('.gpu section .marks time').length === 2", "the GPU's own events"
    )
    assert tab.evaluate("location.hash").endswith("&range=6h"), "a range that contains the event"


def test_the_summary_of_a_pod_says_what_would_be_enough(tab: Tab, page: str) -> None:
    visited(tab, page, "#pod=notebooks/jupyter-ada")
    tab.wait_for("document.querySelector('.summary')?.checkVisibility()", "its summary")
    told = " ".join(tab.text(".summary").split())
    assert (
        "GPU-hours 2.0 Mean use of the GPU 7 % Peak use of the GPU 31 % Peak memory 5.0 GiB" in told
    )
    assert "7 % of the time" in tab.text(".judged .verdict-warning:not([hidden])").replace(
        "\u202f", " "
    )
    assert "A MIG instance 1g (10 GiB) or 10 % of a GPU would be enough" in tab.text(".judged")


def test_the_verdict_ranks_what_slowed_a_pod_down(tab: Tab, url: str, shown: Showing) -> None:
    summary = {
        "from": time.time() - 7200,
        "duration_seconds": 7200,
        "gpus": 1,
        "gpu_hours": 2.0,
        "mean_use": 0.7,
        "mean_device_use": 0.7,
        "errors": 0,
        "verdict": "slowed_down",
        "causes": [
            {"cause": "waiting", "seconds": 2808, "ratio": 0.39},
            {"cause": "throttling", "seconds": 1200, "ratio": 0.1667},
            {"cause": "failing", "seconds": 1500, "ratio": 0.02, "brief": True},
        ],
    }
    shown.records = lambda path, query: summary if path.startswith("summary") else None
    opened(tab, url, "#pod=notebooks/jupyter-ada")
    tab.wait_for("document.querySelector('.judged')?.checkVisibility()", "its verdict")
    text = (
        tab.text(".judged .verdict-warning:not([hidden])")
        .replace("\u202f", " ")
        .replace("\u00a0", " ")
    )
    assert text == (
        "Slowed down: waited for other containers 39 % of the time, throttled 17 % of the time, "
        "with a lost or failing GPU for 25 min (busy 70 % of the time)"
    )


@pytest.mark.parametrize(
    ("verdict", "causes", "text"),
    [
        (
            "well_used",
            [{"cause": "throttling", "seconds": 1200, "ratio": 0.011, "brief": True}],
            "Well used, but throttled for 20 min: busy 70 % of the time",
        ),
        (
            "little_computed",
            [
                {"cause": "low_activity", "now": True, "value": 0.02},
                {"cause": "pcie", "now": True, "value": 32e9},
            ],
            "Little computed: busy 70 % of the time, but tensor cores active only 2 % now, "
            "32.0 GB/s over PCIe now",
        ),
        (
            "slowed_down",
            [
                {"cause": "waiting", "seconds": 147_600, "ratio": 0.4},
                {"cause": "low_activity", "now": True, "value": 0.02},
            ],
            "Slowed down: waited for other containers 40 % of the time (busy 70 % of the time), "
            "and tensor cores active only 2 % now",
        ),
    ],
)
def test_the_verdict_names_short_and_current_causes(
    tab: Tab, url: str, shown: Showing, verdict: str, causes: list[dict[str, Any]], text: str
) -> None:
    summary = {
        "from": time.time() - 369_000,
        "duration_seconds": 369_000,
        "gpus": 1,
        "gpu_hours": 100.0,
        "mean_use": 0.7,
        "mean_device_use": 0.7,
        "errors": 0,
        "verdict": verdict,
        "causes": causes,
    }
    shown.records = lambda path, query: summary if path.startswith("summary") else None
    opened(tab, url, "#pod=notebooks/jupyter-ada")
    tab.wait_for("document.querySelector('.judged')?.checkVisibility()", "its verdict")
    said = tab.text(".judged .verdict:not([hidden])").replace("\u202f", " ").replace("\u00a0", " ")
    assert said == text


def test_the_page_says_what_slowed_a_pod_down_and_what_is_not_known(
    tab: Tab, url: str, shown: Showing
) -> None:
    none = {"cause": "failing", "state": "none", "title": "a lost GPU", "says": "None was lost"}
    missing = {
        "cause": "throttling",
        "state": "not_measured",
        "title": "throttling",
        "says": "It is not known",
        "do": "run podgpu's exporter",
    }
    found = {
        "cause": "low_use",
        "state": "found",
        "title": "too little work",
        "says": "<img src=x onerror=alert(1)>",
        "do": "look at data loading",
    }
    summary = {
        "from": time.time() - 7200,
        "duration_seconds": 7200,
        "gpus": 1,
        "gpu_hours": 2.0,
        "mean_use": 0.7,
        "mean_device_use": 0.7,
        "errors": 0,
        "why_slow": "Nothing slowed it down, of all that podgpu measures.",
        "checks": [none],
    }
    shown.records = lambda path, query: summary if path.startswith("summary") else None
    opened(tab, url, "#pod=notebooks/jupyter-ada")
    tab.wait_for("document.querySelector('.slow')?.checkVisibility()", "the causes")
    assert tab.texts(".slow-answer.is-good") == [summary["why_slow"]]
    assert tab.texts(".slow-check.is-none") == ["\u2713 a lost GPU: no None was lost."]

    summary["checks"] = [found, none, missing]
    opened(tab, url, "#pod=notebooks/jupyter-ada")
    tab.wait_for("document.querySelectorAll('.slow-check').length === 3", "the causes")
    assert tab.count(".slow-answer") == 0, "the first line says it"
    assert "To do: look at data loading." in tab.text(".slow-check.is-found")
    assert "To measure it: run podgpu's exporter." in tab.text(".slow-check.is-not_measured")
    assert tab.count(".slow img") == 0


def test_a_pod_that_ended_opens_on_its_whole_run(tab: Tab, url: str, shown: Showing) -> None:
    records, now = shown.records, time.time()
    assert records is not None
    series = {"utilization_ratio": [0.5] * 240 + [None] * 240}
    past = {
        "from": now - 7200,
        "to": now,
        "step_seconds": 15,
        "devices": [{"uuid": ILL, "index": 5, "series": series}],
    }
    asked: list[str] = []

    def answer(path: str, query: Mapping[str, str]) -> Mapping[str, Any] | None:
        if not path.startswith("history/pods"):
            return records(path, query)
        asked.append(query["range"])
        return past

    shown.records = answer
    opened(tab, url, "#pod=batch/nightly-0")
    tab.wait_for(f"{CHARTS} === 1", "its history")
    assert set(asked) <= {"2h", "3h"}
    assert tab.texts(".timeline .tabs a[aria-current]") == ["whole run"]
    last = "document.querySelector('.chart .line').getAttribute('d').match(/L([\\d.]+),[^L]*$/)[1]"
    assert float(tab.evaluate(last)) > 980, "the axis ends with the pod"
    assert tab.text(".summary h2").startswith("From ")


def test_hostile_records_are_only_text(tab: Tab, url: str, shown: Showing) -> None:
    name = "<img src=x onerror=alert(1)>"
    now = time.time()
    past = {
        **{"from": now - 3600, "to": now, "step_seconds": 60},
        "series": {"utilization_ratio": [0.5, None, "x", 1e300] * 15},
        "holders": [{"from": now - 100, "namespace": name, "pod": name, "container": name}],
        "marks": [{"at": now - 200, "condition": name, "says": name}],
    }
    field = {"name": name, "help": name, "unit": name, "value": name, "source": name}
    known = {
        "fields": [field],
        "xids": [{"xid": name, "says": name}],
        "sources": [{"source": name, "ok": False}],
    }
    told = {
        "events": [{"at": now, "kind": name, "text": name, "pod": name, "node": name, "uuid": name}]
    }
    parts: dict[str, Any] = {"history": past, "gpus": known, "events": told}
    answers: Records = lambda path, query: parts.get(path.split("/")[0])  # noqa: E731
    shown.records = answers
    opened(tab, url, f"#gpu={ILL}")
    tab.wait_for("document.querySelector('.lane-name')")
    tab.wait_for("document.querySelector('.field')")
    assert tab.evaluate("document.images.length") == 0
    assert name in tab.text(".lane-name")
    assert name in str(
        tab.evaluate(
            "[...document.querySelectorAll('.marks')].map((list) => list.textContent).join()"
        )
    )


def test_the_time_menu_offers_steps_and_any_time(tab: Tab, url: str, shown: Showing) -> None:
    opened(tab, url)
    ages = [
        int(value)
        for value in tab.evaluate("[...document.querySelector('#time').options].map(o => o.value)")
        if value.isdecimal()
    ]
    assert ages[0] == 300
    assert ages[-1] >= 7 * 86_400
    steps = pairwise(ages)
    assert all(1 < later / earlier <= 3 for earlier, later in steps), "no large jump"

    def choose(value: str) -> None:
        tab.evaluate(
            f"document.querySelector('#time').value = '{value}', "
            "document.querySelector('#time').dispatchEvent(new Event('change'))"
        )

    choose("7200")
    tab.wait_for("document.querySelector('#status').dataset.state === 'past'", "two hours ago")
    assert "2\u00a0h 0\u00a0min ago" in tab.text("#past-time")
    tab.click("#past-hour-earlier")
    tab.wait_for(
        "document.querySelector('#past-time').innerText.includes('3\u00a0h 0\u00a0min ago')"
    )
    tab.click("#past-hour-later")
    tab.wait_for(
        "document.querySelector('#past-time').innerText.includes('2\u00a0h 0\u00a0min ago')"
    )
    choose("other")
    tab.wait_for("document.activeElement.id === 'past-input'", "a time can be typed")
