"""What GPUs cost and who wastes them: in the head, on tiles, in a pod's view, by namespace, as a table to take away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.browser.chromium import Tab, opened, reloaded, visited
from tests.browser.flat_pictures import NodePicture
from tests.browser.pictures import Showing, gpu, held, picture, three_nodes
from tests.browser.records import owned, priced, records_of

TILES = "document.querySelectorAll('main .tile[data-key]').length"
CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => { window.copied = t; }}})"


@pytest.fixture(scope="module")
def usual() -> Showing:
    cluster = owned(priced(three_nodes()))
    return Showing(cluster, records_of(cluster))


@pytest.fixture
def shown(usual: Showing) -> Showing:
    return replace(usual)


def totals(tab: Tab) -> dict[str, str]:
    return dict(zip(tab.texts(".total-name"), tab.texts(".total-value"), strict=True))


def rows(tab: Tab) -> list[str]:
    tab.wait_for("document.querySelectorAll('.waste tbody tr').length", "rows")
    return tab.texts(".waste tbody tr")


# -- the head, tiles, a pod, namespaces ------------------------------------------------------------------------------


def test_example_prices_are_marked_as_such(tab: Tab, url: str, shown: Showing) -> None:
    shown.more = lambda view: {**view, "prices": "example"}
    opened(tab, url)
    assert tab.texts(".total-cost .total-more") == ["examples"]
    assert tab.text("#prices-hint") == "The prices are examples. Set yours with --prices FILE."


def test_without_prices_a_hint_says_how_to_set_them(tab: Tab, url: str, shown: Showing) -> None:
    shown.picture = replace(three_nodes(), currency="")
    opened(tab, url)
    assert "Cost/h" not in totals(tab)
    assert tab.text("#prices-hint") == (
        "No cost is shown, as no prices are set. Start podgpu with --prices FILE for yours, or --prices example to try"
        " it out."
    )
    assert tab.count(".toggle") == 0


def test_cost_and_waste_per_hour(tab: Tab, page: str) -> None:
    visited(tab, page)
    assert (totals(tab)["Cost/h"], totals(tab)["Wasted/h"]) == ("$44.64", "$5.00")
    assert tab.count("#prices-hint") == 0
    tab.choose("ns", "notebooks")
    tab.wait_for("document.querySelector('#shown').innerText.includes('$5.00/h wasted')", "of what is filtered too")


def test_what_is_wasted_leads_to_who_wastes_it(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.click("a.total-wasted")
    tab.wait_for("location.hash === '#view=waste' && document.querySelector('.waste')", "the waste view")


def test_cost_on_tiles_only_when_asked(tab: Tab, page: str) -> None:
    visited(tab, page, "#q=rerank")
    assert "$" not in tab.text("main")
    tab.click(".toggle input")
    tab.wait_for("location.hash.includes('cost=1')", "the address says it")
    assert tab.texts("main .row-cost") == ["$1.25/h", "$0.63/h", "$0.63/h"]
    reloaded(tab)
    tab.wait_for("document.querySelectorAll('main .row-cost:not([hidden])').length === 3", "after a reload too")
    visited(tab, page, "#state=idle&cost=1")
    assert tab.count("main .row-cost.wasted") == 2, "what idles costs too"


def test_a_pods_view_has_its_owner_and_its_cost(tab: Tab, page: str) -> None:
    visited(tab, page, "#pod=notebooks/jupyter-ada")
    facts = tab.text(".facts")
    assert "Notebook/jupyter" in facts
    assert facts.count("$2.50/h") == 2, "cost, and all of it wasted"
    tab.click(".facts a")
    tab.wait_for(f"{TILES} === 2", "all that the owner has")
    assert tab.evaluate("document.querySelector('#q').value") == "Notebook/jupyter"


def test_words_find_an_owner(tab: Tab, page: str) -> None:
    visited(tab, page, "#q=deployment/chat")
    assert tab.texts("main .row-pod") == ["chat-0", "chat-1", "chat-2", "chat-3"]


def test_namespaces_have_what_they_cost_now(tab: Tab, page: str) -> None:
    visited(tab, page, "#view=namespaces&order=wastedNow")
    assert tab.texts("tbody th")[0] == "notebooks"
    assert "$7.14/h $5.00/h" in tab.texts("tbody tr")[0]
    tab.click("button[name=namespace]")
    tab.wait_for("location.hash.includes('order=-namespace')", "how it is sorted stands in the address")
    assert tab.texts("tbody th") == ["batch", "notebooks", "research", "serving"]
    tab.evaluate("history.back()")
    tab.wait_for("document.querySelector('tbody th').innerText === 'notebooks'", "and back")


# -- the table of waste ----------------------------------------------------------------------------------------------


def test_waste_by_pod_owner_and_namespace(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.click("#tab-waste")
    first = rows(tab)[0]
    assert first == "jupyter-ada notebooks Notebook/jupyter 1 1 1 d 3 h 26.0 26.0 100 % $2.50/h $65.00"
    assert tab.evaluate("location.hash") == "#view=waste"
    assert "wasted" in tab.text(".waste-head .about")
    tab.click(".waste-head a:nth-child(2)")
    tab.wait_for("document.querySelector('.waste tbody th')?.innerText === 'Notebook/jupyter'", "owners")
    assert tab.evaluate("location.hash") == "#view=waste&by=owner"
    tab.click(".waste-head a:nth-child(3)")
    tab.wait_for("document.querySelector('.waste tbody th')?.innerText === 'notebooks'", "namespaces")
    tab.evaluate("history.go(-2)")
    tab.wait_for("document.querySelector('.waste tbody th')?.innerText === 'jupyter-ada'", "back to pods")


def test_waste_is_sorted_and_the_address_says_how(tab: Tab, page: str) -> None:
    visited(tab, page, "#view=waste")
    rows(tab)
    tab.click("button[name=gpus]")
    assert rows(tab)[0].startswith("llm-pretrain-gpu-a-01")
    tab.wait_for("location.hash.includes('order=gpus')")
    tab.click("button[name=gpus]")
    assert rows(tab)[0].startswith(("rerank", "ocr-v2")), "smallest first"
    assert tab.evaluate("document.querySelector('th[aria-sort]').ariaSort") == "ascending"
    assert tab.evaluate("document.activeElement.name") == "gpus", "the focus stays"
    tab.wait_for("location.hash.includes('order=-gpus')")
    opened(tab, page, str(tab.evaluate("location.hash")))
    assert rows(tab)[0].startswith(("rerank", "ocr-v2"))


def test_waste_is_filtered_by_words(tab: Tab, page: str) -> None:
    visited(tab, page, "#view=waste")
    assert len(rows(tab)) > 5
    tab.press("/")
    tab.type("notebook/ ada")
    tab.wait_for("document.querySelectorAll('.waste tbody tr').length === 1", "one row")
    tab.press("Escape")
    tab.wait_for("document.querySelectorAll('.waste tbody tr').length > 5", "all again")
    tab.press("Escape")
    tab.wait_for(f"{TILES} === 20", "and out of it")


def test_waste_is_copied_and_leads_to_csv(tab: Tab, page: str) -> None:
    visited(tab, page, "#view=waste&by=owner")
    rows(tab)
    tab.evaluate(CLIPBOARD)
    tab.click(".waste-head button")
    tab.wait_for("document.querySelector('.waste-head button').innerText === 'Copied'")
    head, first, *_ = str(tab.evaluate("window.copied")).split("\n")
    assert head.split("\t")[:3] == ["Owner", "Namespace", "GPUs"]
    assert first.split("\t")[:2] == ["Notebook/jupyter", "notebooks"]
    link = tab.evaluate("document.querySelector('.waste-head a[download]').href")
    assert link == f"{page}/api/v1/waste?by=owner&format=csv"


def test_a_hostile_row_is_only_text(tab: Tab, url: str, shown: Showing) -> None:
    name = "<img src=x onerror=alert(1)>\tx"
    row = {"namespace": name, "pod": name, "owner": name, "gpus": 1, "idle_hours": 2.0, "allocated_hours": 0}
    shown.records = lambda path, query: {"rows": [row], "by": "pod"} if path == "waste" else None
    opened(tab, url, "#view=waste")
    assert rows(tab)[0].startswith("<img src=x onerror=alert(1)>\ufffdx")
    assert tab.evaluate("document.images.length") == 0


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (None, "keeps no account of waste"),
        (lambda path, query: {"rows": []}, "Nothing was wasted so far"),
    ],
)
def test_no_table_says_why(tab: Tab, url: str, shown: Showing, records: object, words: str) -> None:
    shown.records = records  # type: ignore[assignment]
    opened(tab, url, "#view=waste")
    tab.wait_for(f"document.querySelector('.waste')?.innerText.includes({words!r})", words)


def test_thousands_of_rows_are_shown_bit_by_bit(tab: Tab, url: str, shown: Showing) -> None:
    pods = [
        {"namespace": "a", "pod": f"pod-{i}", "gpus": 1, "idle_hours": i, "allocated_hours": 9000} for i in range(5000)
    ]
    shown.records = lambda path, query: {"rows": pods} if path == "waste" else None
    shown.picture = picture(NodePicture("n1", (gpu(0, "n1", utilization=0.4, holders=(held("a", "pod-1"),)),)))
    opened(tab, url, "#view=waste")
    assert rows(tab)[0].startswith("pod-4999")
    assert tab.count(".waste tbody tr") == 200
    tab.click(".waste .more")
    tab.wait_for("document.querySelectorAll('.waste tbody tr').length === 400")
