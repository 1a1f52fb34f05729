"""Cost and waste on the page: totals, tiles, the view of a pod, namespaces, and the table for
export.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.fleet.setup import SetupHint
from tests.browser.chromium import Tab, opened, reloaded, visited
from tests.browser.pictures import Showing, three_nodes
from tests.browser.records import owned, priced, records_of

TILES = "document.querySelectorAll('main .tile[data-key]').length"


@pytest.fixture(scope="module")
def usual() -> Showing:
    cluster = owned(priced(three_nodes()))
    return Showing(cluster, records_of(cluster))


def totals(tab: Tab) -> dict[str, str]:
    return dict(zip(tab.texts(".total-name"), tab.texts(".total-value"), strict=True))


# Totals, tiles, a pod, namespaces


def test_without_prices_a_hint_says_how_to_set_them(tab: Tab, url: str, shown: Showing) -> None:
    missing = SetupHint("prices", "There are no prices.", "--prices=FILE")
    shown.picture = replace(three_nodes(), currency="", setup=[missing])
    opened(tab, url)
    assert "Cost/h" not in totals(tab)
    assert tab.text("#setup-summary") == "To set up: your prices"
    tab.click("#setup-summary")
    assert "--prices=FILE" in tab.text("#setup-list")
    assert tab.count(".toggle") == 0
    visited(tab, url, "#ns=notebooks")
    assert "price" not in tab.text("#shown")
    with_prices = priced(three_nodes())
    shown.picture = replace(with_prices, nodes=[*with_prices.nodes[1:], three_nodes().nodes[0]])
    tab.look_again()
    tab.wait_for(
        "document.querySelector('.total-cost')?.innerText.includes('without 8 GPUs')",
        "the cost is incomplete",
    )


def test_cost_and_waste_per_hour(tab: Tab, page: str) -> None:
    visited(tab, page)
    assert (totals(tab)["Cost/h"], totals(tab)["Wasted/h"]) == ("$49.64", "$10.00")
    more = "idle\xa0$5.00, unallocated\xa0$5.00, under-used not known \xb7 by whom \u2192"
    assert tab.text(".total-wasted .total-more") == more
    assert tab.count("#setup") == 0
    tab.choose("ns", "notebooks")
    tab.wait_for(
        "document.querySelector('#shown').innerText.includes('$5.00/h wasted')",
        "of what is filtered too",
    )


def test_cost_on_tiles_only_when_asked(tab: Tab, page: str) -> None:
    visited(tab, page, "#q=rerank")
    assert "$" not in tab.text("main")
    tab.click(".toggle input")
    tab.wait_for("location.hash.includes('cost=1')", "the address says it")
    assert tab.texts("main .row-cost") == ["$1.25/h", "$0.63/h", "$0.63/h"]
    reloaded(tab)
    tab.wait_for(
        "document.querySelectorAll('main .row-cost:not([hidden])').length === 3",
        "after a reload too",
    )
    visited(tab, page, "#state=idle&cost=1")
    assert tab.count("main .row-cost.wasted") == 2, "idle GPUs have a cost too"


def test_cost_of_a_range_by_namespace_and_label(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.click("#tab-cost")
    tab.wait_for("document.querySelectorAll('.cost tbody tr').length === 3", "rows")
    assert tab.texts(".cost tbody th") == ["nlp", "unallocated", "vision"]
    assert tab.text(".cost thead th") == "team", "team is the default"
    assert (
        tab.evaluate("document.querySelector('.cost tbody th a').hash")
        == "#view=cost&by=pod&range=24h&q=team%3Dnlp"
    )
    sums = dict(zip(tab.texts(".cost .sums dt"), tab.texts(".cost .sums dd"), strict=True))
    assert sums["Cost"] == "$720.00"
    assert {name: text for name, text in sums.items() if name.startswith("Wasted")} == {
        "Wasted": "$535.20",
        "Wasted: idle": "$120.00",
        "Wasted: under-used": "$175.20",
        "Wasted: unallocated": "$240.00",
    }
    free = dict(
        zip(
            tab.texts(".cost thead th"),
            tab.texts(".cost tbody tr:nth-child(2) :is(th, td)"),
            strict=True,
        )
    )
    assert (free["Cost"], free["Wasted"], free["Unallocated cost"]) == ("$240.00",) * 3
    assert (sums["Allocated"], sums["Busy (weighted)"], sums["Idle"]) == (
        "192.0 h",
        "72.0 h",
        "48.0 h",
    )
    tab.click(".cost thead button[name=wasted]")
    tab.wait_for(
        "document.querySelector('.cost th[aria-sort]').innerText.startsWith('Wasted')",
        "sorted by waste",
    )
    tab.wait_for("location.hash === '#view=cost&order=wasted'")
    tab.click(".cost .tabs a:nth-child(4)")
    tab.wait_for("document.querySelector('.cost .sums').innerText.includes('5,760.0 h')", "30 days")
    assert "(48\xa0h) \xb7 records since" in tab.text(".cost .about")
    assert tab.evaluate("document.querySelector('.cost a[download]').getAttribute('href')") == (
        "api/v1/range?range=30d&by=label%3Ateam&format=csv"
    )
    assert tab.texts(".cost nav[aria-label='Cost by'] a") == [
        "Pods",
        "Owners",
        "Namespaces",
        "Label app",
        "Label team",
    ]
    tab.click(".cost nav[aria-label='Cost by'] a:last-child")
    tab.wait_for("document.querySelector('.cost thead th')?.innerText === 'team'", "by label")
    assert tab.evaluate("location.hash") == "#view=cost&by=label%3Ateam&order=wasted&range=30d"
    tab.evaluate(
        "(() => { const field = document.querySelector('.cost input[type=search]'); field.value = "
        "'stage';"
        " field.dispatchEvent(new Event('change')); })()"
    )
    tab.wait_for(
        "document.querySelector('.cost thead th')?.innerText === 'stage'",
        "by a label that is typed",
    )
    notes = tab.text(".cost > .message:last-child")
    assert notes.startswith("No record before")
    assert "Z " not in notes, "times are local"


def test_the_cost_says_whether_a_restart_loses_the_history(
    tab: Tab, url: str, shown: Showing
) -> None:
    shown.picture = priced(three_nodes())
    answer_of = records_of(shown.picture)

    def records(path: str, query: Mapping[str, str]) -> Mapping[str, Any] | None:
        answer = answer_of(path, query)
        if path != "range" or answer is None:
            return answer
        return {**answer, "in_memory": in_memory}

    shown.records = records
    for in_memory, note in ((True, "Kept in memory"), (False, "Stored in SQLite")):
        opened(tab, url, "#view=cost")
        tab.wait_for(f"document.querySelector('.cost').innerText.includes('{note}')", note)
        assert ("a restart of podgpu loses it" in tab.text(".cost")) == in_memory


def test_a_young_history_is_not_drawn_as_costs(tab: Tab, url: str, shown: Showing) -> None:
    """Twelve of 17 days have no record."""
    shown.picture = priced(three_nodes())
    answer_of = records_of(shown.picture)

    def forget(figures: dict[str, Any]) -> None:
        for values in figures["steps"].values():
            values[:12] = [None] * 12

    def records(path: str, query: Mapping[str, str]) -> Mapping[str, Any] | None:
        answer = answer_of(path, query)
        if path == "costs" and answer is not None:
            for row in (answer["totals"], *answer["rows"]):
                forget(row)
        return answer

    shown.records = records
    opened(tab, url, "#view=cost&range=month&by=label:team")
    tab.wait_for("document.querySelectorAll('.costs .cost-step').length === 17", "the chart")
    bars = "document.querySelectorAll('.costs .cost-step .cost-1').length"
    assert tab.evaluate(bars) == 5
    (empty,) = tab.texts(".cost-empty")
    assert empty.startswith("no record before ")
    assert "no record: 12 days" in tab.texts(".costs .chart-legend li")
    visited(tab, url)
    tab.wait_for("document.querySelector('#small-costs')?.checkVisibility()", "a small chart")
    assert tab.text("#small-costs span").startswith("Cost, last 5 days: $")
    assert tab.evaluate("document.querySelectorAll('#small-costs .cost-step').length") == 5
    assert tab.evaluate("document.querySelectorAll('#small-costs .cost-gap').length") == 0


def test_the_first_screen_has_a_small_chart_of_cost_and_use(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.wait_for("document.querySelector('#small-costs')?.checkVisibility()", "a chart")
    text = tab.text("#small-costs span")
    assert text.startswith("Cost, last 17 days: $")
    bars = "document.querySelectorAll('#small-costs .cost-others').length"
    assert tab.evaluate(bars) == 16, "a day without a record has no bar"
    assert tab.evaluate("document.querySelectorAll('#small-costs .line').length") == 1
    tab.click("#small-costs")
    tab.wait_for("location.hash.includes('view=cost')", "it leads to the Cost view")
    tab.wait_for("!document.querySelector('#small-costs').checkVisibility()", "not in other views")


def test_cost_over_time_is_a_stack_for_each_day(tab: Tab, page: str) -> None:
    visited(tab, page, "#view=cost&range=month&by=label:team")
    tab.wait_for(
        "document.querySelector('.costs')?.checkVisibility() &&"
        " document.querySelectorAll('.costs .cost-step').length === 17",
        "a bar for each day",
    )
    parts = (
        "[...document.querySelectorAll('.costs .cost-step')].map((step) => step.children.length)"
    )
    assert tab.evaluate(parts) == [3, 3, 3, 1, *[3] * 13]
    gaps = "document.querySelectorAll('.costs .cost-step .cost-gap').length"
    assert tab.evaluate(gaps) == 1, "a day without a record is a gap"
    partial = "document.querySelectorAll('.costs .cost-step.is-partial').length"
    assert tab.evaluate(partial) == 1, "today"
    before, budget, pale, gap = tab.texts(".costs .chart-legend li")[3:]
    assert before == "period before"
    assert budget.startswith("budget per day ")
    assert pale == "pale: the day is not complete"
    assert gap == "no record: 1 day"
    height = "document.querySelector('.cost-gap').getBoundingClientRect().height"
    assert tab.evaluate(height) < 5, "a day without a record does not look like a cost"
    assert tab.evaluate("getComputedStyle(document.querySelector('.cost-gap')).fill") == "none"
    [free] = [text for text in tab.texts(".costs .chart-legend li") if "unallocated" in text]
    assert free == "unallocated (paid for, held by nobody)"
    [nlp] = [text for text in tab.texts(".costs .chart-legend li") if text.startswith("nlp")]
    assert nlp == "nlp ($7,000 this month, next month $7,750)", "the table has the cost so far"
    assert tab.texts(".budgets li") == [
        "team=nlp $4,400.00 of $4,000.00 this month (110 %), forecast $7,000.00 over budget",
        "team=vision $1,500.00 of $3,000.00 this month (50 %), forecast $2,500.00",
    ]
    assert tab.texts(".costs .chart-legend bdi") == ["nlp", "vision", "unallocated"]
    about = tab.text(".costs .about")
    assert "12 % more than in the period before" in about.replace("\u202f", " ")
    assert "$21k = $11k so far this month + $500.00 a day (mean of 7 complete days)" in about
    assert about.endswith("next month: $15.5k")
    tab.evaluate("document.querySelector('.costs .plot').focus()")
    tab.press("Home")
    assert "nlp $216.00 \xb7 vision $72.00 \xb7 unallocated $144.00" in tab.text(
        ".costs .chart-value"
    )
    tab.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert "no record" in tab.text(".costs .chart-value")
    visited(tab, page, "#view=cost&range=month&by=label:team&q=vision")
    tab.wait_for("document.querySelectorAll('.costs .chart-legend bdi').length === 1", "filtered")
    assert tab.text(".costs .about") == "UTC days"
    visited(tab, page, "#view=cost&range=1h")
    tab.wait_for("!document.querySelector('.costs').checkVisibility()", "an hour has no bars")


def test_cost_of_a_chosen_time_and_who_hardly_uses_what_it_holds(tab: Tab, page: str) -> None:
    about = "document.querySelector('.cost .about')?.innerText.replace(/\\s+/g, ' ')"
    visited(tab, page, "#view=cost&by=pod")
    tab.wait_for(f"{about}.includes('(24 h)')", "the range")
    tab.click(".under-used summary")
    assert tab.texts(".under-used li") == ["vision held 48.0 GPU-hours at 4 %, $115.20 wasted"]
    assert tab.count(".bounds") == 0
    tab.click(".cost nav[aria-label=Range] a:last-child")
    tab.wait_for("document.querySelector('.bounds')?.checkVisibility()", "two times")
    tab.evaluate(
        "(() => { for (const [field, value] of [['From', '2026-11-16T10:00'], ['To', "
        "'2026-11-16T15:30']]) {"
        " const input = document.querySelector(`.bounds input[aria-label=${field}]`); input.value "
        "= value;"
        " input.dispatchEvent(new Event('change')); } })()"
    )
    tab.wait_for(f"{about}.includes('Nov 16 10:00 to Nov 16 15:30 (5.5 h)')", "of that time")
    assert "44.0 h" in tab.texts(".cost .sums dd"), "allocated"
    href = tab.evaluate("document.querySelector('.cost a[download]').getAttribute('href')")
    assert href.startswith("api/v1/range?from=17")
    reloaded(tab)
    tab.wait_for(f"{about}.includes('(5.5 h)')", "the address says it")
    visited(tab, page)
    tab.click(".total-cost")
    tab.wait_for(
        f"{about}.includes(' 1 00:00 to') || {about}.includes('records since')", "this month"
    )
    assert tab.texts(".cost nav a[aria-current]") == ["This month", "Label team"], (
        "the first view's selection is kept"
    )
    visited(tab, page, "#view=cost&by=namespace&ns=vision")
    tab.wait_for(f"{about}.startsWith('Filtered rows')", "the sums of the row that is shown")
    assert tab.texts(".cost .sums dd")[4:7] == ["4 %", "48.0 h", "1.9 h"]
    assert tab.texts(".cost a[download]") == ["CSV of all rows"]
    visited(tab, page, "#view=cost&from=1794900000&to=1794800000")
    assert tab.text(".cost > .message") == "The start of the range must be before its end."


def facts_of_tokens(tab: Tab, shown: Showing, url: str, tokens: dict[str, Any]) -> dict[str, str]:
    """Returns the facts of the page of a pod with an LLM engine."""
    summary = {
        "from": time.time() - 7200,
        "duration_seconds": 7200,
        "gpus": 1,
        "gpu_hours": 2.0,
        "errors": 0,
        "currency": "USD",
        "prompt_tokens": 3_000_000,
        "generated_tokens": 1_000_000,
        "tokens": tokens,
    }
    shown.records = lambda path, query: summary if path.startswith("summary") else None
    opened(tab, url, "#pod=notebooks/jupyter-ada")
    tab.wait_for("document.querySelector('.summary')?.innerText.includes('Tokens')", "its tokens")
    names = tab.texts(".summary dt")
    texts = [text.replace("\u202f", " ") for text in tab.texts(".summary dd")]
    return dict(zip(names, texts, strict=True))


SPLIT = {
    "prompt_gpu_seconds": 85.2028,
    "generated_gpu_seconds": 417.0232,
    "residual_ratio": 0.1002,
    "steps": 42,
}


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_page_of_a_pod_shows_the_cost_of_prompt_and_generated_tokens(
    tab: Tab, url: str, shown: Showing, width: int, theme: str
) -> None:
    tab.look(width, 900, theme)
    costs = {"prompt_cost": 0.0663, "generated_cost": 0.3244}
    facts = facts_of_tokens(tab, shown, url, {"per_million": SPLIT | costs})
    assert facts["Million prompt tokens"] == "$0.07, 85.2 GPU-seconds"
    assert facts["Million generated tokens"] == "$0.32, 417.0 GPU-seconds"
    error = "10 % of the GPU time of 5 minutes, by regression over 3 h 30 min"
    assert facts["Error of these two"] == error
    assert "Prompt and generated, each" not in facts
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_prices_the_page_of_a_pod_shows_their_gpu_time(
    tab: Tab, url: str, shown: Showing
) -> None:
    facts = facts_of_tokens(tab, shown, url, {"per_million": SPLIT})
    assert facts["Million prompt tokens"] == "85.2 GPU-seconds"


def test_the_page_of_a_pod_says_why_they_are_absent(tab: Tab, url: str, shown: Showing) -> None:
    reason = "prompt and generated tokens always had the same ratio"
    facts = facts_of_tokens(tab, shown, url, {"per_million_reason": reason})
    assert facts["Prompt and generated, each"] == f"not known: {reason}"
    assert "Million prompt tokens" not in facts
    old = facts_of_tokens(tab, shown, url, {"per_second": 1.0})
    assert "Prompt and generated, each" not in old, "a podgpu that gives no reason"


def test_the_parts_of_waste_add_up_as_they_are_shown(tab: Tab, url: str, shown: Showing) -> None:
    """Three parts of $0.334 are 1.00 together, and 0.99 if each is rounded alone."""
    shown.picture = priced(three_nodes())
    answer_of = records_of(shown.picture)
    cost = {"idle": 0.334, "underused": 0.334, "unallocated": 0.334}

    def records(path: str, query: Mapping[str, str]) -> Mapping[str, Any] | None:
        answer = answer_of(path, query)
        if path != "range" or answer is None:
            return answer
        totals = {**answer["totals"], "waste": {"cost": cost, "hours": {}}}
        return {**answer, "totals": totals}

    shown.records = records
    opened(tab, url, "#view=cost&by=pod")
    tab.wait_for("document.querySelector('.cost .sums')?.checkVisibility()", "the sums")
    sums = dict(zip(tab.texts(".cost .sums dt"), tab.texts(".cost .sums dd"), strict=True))
    assert sums["Wasted"] == "$1.00"
    parts = [text for name, text in sums.items() if name.startswith("Wasted: ")]
    assert sorted(parts) == ["$0.33", "$0.33", "$0.34"]


@pytest.mark.parametrize(
    ("amount", "currency", "text"),
    [
        ("1234.5", "USD", "$1,234.50"),
        ("1234.5", "JPY", "¥1,235"),
        ("1234.5", "KWD", "KWD\xa01,234.500"),
        ("1234.5", "credits", "1,234.50 credits"),
        ("0.005", "USD", "$0.01"),
        ("0.0034", "USD", "$0.0034"),
        ("-0.0034", "USD", "-$0.0034"),
        ("0.00000123", "credits", "0.0000012 credits"),
        ("0.3", "JPY", "¥0.3"),
        ("1e-13", "USD", "$0.00"),
        ("0", "USD", "$0.00"),
        ("undefined", "USD", "–"),
    ],
)
def test_money_has_the_decimals_of_its_currency(
    tab: Tab, page: str, amount: str, currency: str, text: str
) -> None:
    visited(tab, page)
    call = f"import('/page/format.js').then(all => all.money({amount}, '{currency}'))"
    assert tab.evaluate(call) == text


def test_parts_of_waste_add_up_as_they_are_shown(tab: Tab, page: str) -> None:
    visited(tab, page)

    def shown(currency: str, idle: float, underused: float) -> str:
        parts = f"{{idle: {idle}, underused: {underused}}}"
        return str(
            tab.evaluate(
                "Promise.all([import('/page/totals.js'), import('/page/format.js')]).then("
                f"([t, f]) => t.wasteOf({parts}).fullText(f.money, '{currency}'))"
            )
        )

    assert shown("USD", 1.004, 1.004) == "$2.01 (idle\xa0$1.01, under-used\xa0$1.00)"
    assert shown("JPY", 100.4, 100.4) == "¥201 (idle\xa0¥101, under-used\xa0¥100)"
    assert shown("USD", 0.0012, 0.0022) == "$0.0034 (idle\xa0$0.0012, under-used\xa0$0.0022)"
