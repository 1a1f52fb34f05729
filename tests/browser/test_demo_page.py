"""The faults of `podgpu demo` in a real browser: shown within two rounds, filtered by a click, and
kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.browser.chromium import Tab, went
from tests.cli.test_demo import STEP, Demo

TILES = "document.querySelectorAll('main .tile[data-key]').length"


@pytest.fixture
def demo() -> Iterator[Demo]:
    with ExitStack() as opened:
        yield Demo(opened)


def after(tab: Tab, demo: Demo, at: float) -> str:
    """Advances the demo to this time, waits for the page, and returns the texts of its alerts."""
    told = demo.go_to(at)["totals"]
    tab.look_again()
    for name, number in (
        ("broken", told["broken"]),
        ("held", told["allocated"]),
        ("idle", told["idle"]),
    ):
        text = f"document.querySelector('.total-{name} .total-value')?.innerText"
        tab.wait_for(f"Math.abs(Number({text}) - {number}) < 0.011", f"{number} {name} at {at} s")
    return " ".join(tab.texts(".alert-text"))


@pytest.mark.fault(
    "A GPU has an XID, another is lost, a node dies, a driver is unloaded",
    (
        "The page says each in words within two rounds, filters them by a click, and keeps them "
        "until "
        "they are well"
    ),
)
def test_each_fault_is_seen_within_two_rounds_and_stays(tab: Tab, demo: Demo) -> None:
    tab.open(demo.page.address.url)
    assert after(tab, demo, 14.0) == "", "no fault yet"
    assert tab.evaluate("document.querySelector('#status').dataset.health") == ""
    assert "XID 48" in after(tab, demo, 14.0 + 2 * STEP)
    assert tab.text("#status-text").startswith("1 broken.")
    said = after(tab, demo, 20.0 + 2 * STEP)
    assert "GPU 3 of node-2" in said
    assert "the driver no longer lists it" in said
    assert tab.texts(".total-broken .total-value") == ["2"]
    said = after(tab, demo, 30.0 + 6.0 + 2 * STEP)
    assert "node-3 does not answer, with its 4 GPUs" in said
    tab.click(".total-broken")
    tab.wait_for(f"{TILES} === 2", "one with an XID, one lost, and a row for the node")
    badges = tab.texts("main .badge")
    assert sorted(badges)[:2] == ["Lost", "Needs recovery +1"]
    assert badges[2].startswith("gone, last seen")
    lost = tab.evaluate(
        "document.querySelector('.tile.has-broken[data-key*=\"node-2\"]').innerText"
    )
    assert "To do" not in lost or "see dmesg on the node" in lost
    after(tab, demo, 80.0)
    assert tab.texts("main .badge")[:2] == badges[:2], "faults stay until they are repaired"
    after(tab, demo, 130.0)
    tab.wait_for(
        "document.querySelector('main').innerText.includes('No GPU is broken')", "all is well again"
    )
    # A job with a slow GPU stays.
    assert tab.evaluate("document.querySelector('#status').dataset.health") == "warning"


def test_a_job_with_a_slow_gpu(tab: Tab, demo: Demo) -> None:
    tab.open(demo.page.address.url)
    after(tab, demo, 130.0)
    slow = "PyTorchJob research/llm-train: GPU 1 of node-2 is slower than its siblings"
    alerts = "[...document.querySelectorAll('.alert-text')]"
    tab.wait_for(f"{alerts}.some(e => e.textContent.includes('{slow}'))", slow)
    [index] = [
        number
        for number, text in enumerate(tab.texts(".alert-text"))
        if "slower than its siblings" in text
    ]
    tab.evaluate(f"document.querySelectorAll('.alert-link')[{index}].click()")
    tab.wait_for("document.querySelectorAll('.job tbody tr').length === 4", "the GPUs of the job")
    assert "#job=PyTorchJob/research/llm-train" in tab.evaluate("location.href")
    assert "PyTorchJob/research/llm-train" in tab.evaluate("document.title")
    verdict = "document.querySelector('.job .verdict').innerText"
    tab.wait_for(f"{verdict}.startsWith('GPU 1 of node-2 is slower than its siblings')")
    assert tab.texts(".job tbody th")[-1] == "node-2 GPU 1 \u00b7 slowest"
    assert tab.texts(".job tbody td.wasted") == ["1,861 MHz"], "the reason is marked"
    tab.wait_for("document.querySelector('.job .facts').innerText.includes('last 1h')", "the cost")
    facts = dict(zip(tab.texts(".job dt"), tab.texts(".job dd"), strict=True))
    assert facts["Holds"] == "4 GPUs on 2 nodes"
    assert facts["Cost"] == "$11.20/h"
    assert float(facts["Cost, last 1h"].removeprefix("$")) == pytest.approx(0.40, abs=0.02)
    tab.wait_for("document.querySelectorAll('.job .chart-legend li').length >= 4", "a line per GPU")

    tab.evaluate("location.hash = '#view=pods&by=job'")
    tab.wait_for("document.querySelector('.pods td.is-long.wasted')", "the slowest GPU of the job")
    assert "PyTorchJob/llm-train" in tab.texts(".pods tbody th")
    assert "Deployment/chat" not in tab.texts(".pods tbody th"), "its pods have unequal work"
    tab.evaluate("location.hash = '#pod=research/llm-train-1'")
    tab.wait_for("document.querySelector('.pod .facts a')?.innerText === 'PyTorchJob/llm-train'")
    tab.wait_for("document.querySelector('.judged').innerText.includes('GPU 1 of node-2: slower')")
    tab.evaluate("document.querySelector('.pod .facts a').click()")
    tab.wait_for("document.querySelector('.job h2')?.innerText.includes('research/llm-train')")
    tab.evaluate("location.hash = '#job=PyTorchJob/research/nothing'")
    none = "document.querySelector('.job .message')?.innerText"
    tab.wait_for(f"{none} === 'No pod of this job holds a GPU now.'", "a job that does not exist")
    tab.evaluate("location.hash = '#job=nonsense'")
    tab.wait_for(
        "document.querySelector('#wrong').innerText.includes('is not KIND/NAMESPACE/NAME')",
        "a wrong link",
    )


SIDEWAYS = """[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)
  .filter(hidden => hidden > 0)"""


def test_tables_need_no_sideways_scrolling_at_1024_pixels(tab: Tab, demo: Demo) -> None:
    tab.open(demo.page.address.url)
    after(tab, demo, 60.0)
    tab.look(1024)
    # With a text of the table that arrives after its rows.
    for view, text in (
        ("#view=pods", ""),
        ("#view=pods&by=job", "GPU 1 of node-2"),
        ("#view=pods&by=owner", ""),
        ("#view=nodes", ""),
        ("#view=cost&by=pod", ""),
        ("#view=cost&by=label:team", ""),
        ("#job=PyTorchJob/research/llm-train", "GPU 1 · slowest"),
    ):
        went(tab, view)
        rows = "[...document.querySelectorAll('main tbody tr')]"
        tab.wait_for(f"{rows}.some(row => row.innerText.includes('{text}'))", view)
        assert tab.evaluate(SIDEWAYS) == [], view


def test_money_and_owners_are_there_from_the_start(tab: Tab, demo: Demo) -> None:
    tab.open(demo.page.address.url)
    after(tab, demo, 14.0)
    told = demo.ask("/api/v1/view")["totals"]
    said = dict(zip(tab.texts(".total-name"), tab.texts(".total-value"), strict=True))
    waste = told["waste"]["cost_per_hour"]
    assert set(waste) == {"idle", "underused", "unallocated"}
    cost = told["cost_per_hour"] + waste["unallocated"]
    assert said["Cost/h"] == f"${cost:.2f}"
    assert said["Wasted/h"] == f"${sum(waste.values()):.2f}"
    of_tile = tab.text(".total-wasted .total-more")
    assert all(part in of_tile for part in ("idle", "under-used", "unallocated"))
    assert tab.texts("#simulated") == ["Simulated"]
    tab.evaluate("location.hash = '#view=waste&by=owner'")  # the URL of version 0.2
    most = "document.querySelector('.cost tbody th')?.innerText"
    tab.wait_for(f"{most} === 'serving/Deployment/chat'", "who wastes most")
    link = tab.evaluate("document.querySelector('.table-head a[download]').href")
    tab.evaluate("location.hash = '#view=nodes&node=workstation-1'")
    tab.wait_for(
        "document.querySelectorAll('main tbody tr').length === 3",
        "who is on the node without Kubernetes",
    )
    assert tab.texts("main tbody th") == ["user ada", "job 4711", "user cleo"]
    assert "Users and jobs" in tab.texts("main h2, main h3")
    assert "no Kubernetes" in tab.text("main .pod-title")
    tab.evaluate("location.hash = '#view=cost&by=namespace'")
    tab.wait_for(
        "document.querySelector('.cost table')?.innerText.includes('(no namespace)')",
        "users and jobs",
    )
    tab.evaluate("location.hash = '#view=cost&by=pod'")
    tab.wait_for(
        "document.querySelector('.cost table')?.innerText.includes('job 4711')", "the name of a job"
    )
    mig = next(
        g for n in demo.ask("/api/v1/view")["nodes"] for g in n["gpus"] if g.get("instances")
    )
    tab.evaluate(f"location.hash = '#gpu={mig['uuid']}/{mig['instances'][0]['id']}'")
    size = f"{mig['instances'][0]['memory_total_bytes'] / 1024**3:.1f}"
    tab.wait_for(
        f"document.querySelector('.plot')?.innerText.includes('{size}')",
        "the memory of the instance",
    )
    csv = demo.page.ask(link.removeprefix(demo.page.address.url)).text
    assert "jupyter-ada" in csv


def test_the_page_shows_the_gpus_of_a_past_time(tab: Tab) -> None:
    banner, lost = (
        "document.querySelector('#past').hidden",
        "document.querySelectorAll('main .tile.has-broken').length",
    )
    with ExitStack() as opened:
        demo = Demo(opened, past=True)
        url, at = demo.page.address.url, int(demo.time.wall()) - 3500
        tab.open(f"{url}#view=events")
        tab.wait_for(
            "document.querySelector('.events .marks a[href^=\"#at\"]')", "events with links"
        )
        assert tab.evaluate(banner)
        tab.evaluate(
            "[...document.querySelectorAll('.events li')].find(row => "
            "row.innerText.includes('Lost')).lastChild.click()"
        )
        tab.wait_for(f"{lost} === 1", "the GPU that was lost then")
        assert not tab.evaluate(banner)
        tab.evaluate(f"location.hash = '#at={at}'")
        tab.wait_for(
            "document.querySelector('main').innerText.includes('finetune-5')",
            "a job that has ended since",
        )
        assert "You are looking at" in tab.text("#past-time")
        assert "under-used not known" in tab.text(".total-wasted .total-more")
        tab.wait_for(
            "document.querySelectorAll('#past-events li').length > 1", "the events around that time"
        )
        assert not tab.evaluate(
            "[...document.querySelectorAll('.spark')].some(line => line.checkVisibility())"
        )
        tab.click("main .tile.has-broken .tile-name")
        tab.wait_for(
            "document.querySelector('.gpu .mark-moment.is-past')", "charts with a line at that time"
        )
        assert tab.evaluate("location.hash").startswith(f"#at={at}&gpu="), "links keep the time"
        tab.evaluate("history.back()")
        for bad in ("1e308", "abc", str(at + 200_000), str(at - 200_000)):
            tab.evaluate(f"location.hash = '#at={bad}'")
            tab.wait_for(
                "document.querySelector('#status').innerText === 'No record'",
                f"a message about {bad}",
            )
            assert tab.count("main .message") == 1
            assert "You are looking at" not in tab.text("#past-time")
        tab.wait_for("document.querySelector('main .message a')", "a link to the first record")
        tab.click("main .message a")
        tab.wait_for(
            "document.querySelector('#past-time').innerText.startsWith('You are looking at')",
            "the first record",
        )
        tab.click("#past-now")
        tab.wait_for(f"{banner} && {TILES} === 22 && {lost} === 0", "the GPUs of now")
        assert tab.evaluate("location.hash") == ""
        tab.open("about:blank")
        tab.open(f"{url}#at=abc")
        tab.wait_for("document.querySelector('#tab-cost').checkVisibility()", "the tabs")
        assert tab.evaluate("document.querySelector('#tab-cost').hash") == "#view=cost", (
            "a way back to now"
        )
        tab.errors[:] = [error for error in tab.errors if "status of 400" not in error]
