"""Cost over time, in SQLite and from a real Prometheus: equal to the range, gaps, forecast."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from podgpu.errors import UsageError
from podgpu.fleet.budgets import BudgetUse, read_budgets
from podgpu.fleet.prices import NO_PRICES, Price, Prices
from podgpu.fleet.read.prometheus import PrometheusServer
from podgpu.past.bills.bill import RangeQuery, RangeRow, describe_row
from podgpu.past.bills.costs import (
    CostsAnswer,
    CostsQuery,
    CostsRow,
    month_start,
    parse_costs_query,
    select_budgets,
)
from podgpu.past.budget_watch import BudgetWatch
from tests.fleet.prometheus_double import running_double
from tests.fleet.states import WALL, gpu, holder, prometheus_past, state_of, value
from tests.fleet.test_prometheus_live import Serving
from tests.fleet.test_prometheus_ranges import END, both_servers, points
from tests.fleet.test_prometheus_ranges import PRICES as PROMETHEUS_PRICES
from tests.fleet.test_ranges import PRICES, Cluster
from tests.nodes.clock import wait_until

HOUR, DAY = 3600, 86_400
LABELS = {"ml/a": {"team": "nlp"}, "ml/b": {"team": "vision"}}


class Days(Cluster):
    """Two GPUs at 10 EUR an hour, the first allocated to a pod. Rounds are 15 minutes apart."""

    def __init__(self, **more: Any) -> None:
        midnight = -WALL % DAY
        super().__init__(at=midnight - 899, longest_gap=2000.0, **more)
        self.midnight = WALL + midnight

    def run(self, hours: float, pod: str = "a", namespace: str = "ml") -> None:
        for _ in range(round(hours * 4)):
            one = gpu(0, holder(pod, namespace))
            self.round(one, gpu(1), seconds=900.0, pod_labels=LABELS)

    def costs(self, **query: str) -> CostsAnswer:
        return asyncio.run(self.past.costs(parse_costs_query(query)))


def rows_of(answer: CostsAnswer) -> dict[str, CostsRow]:
    return {("others" if row.others else describe_row(row)): row for row in answer.rows}


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Days:
    """A complete day, one without a record, a complete one, and half of today."""
    days = Days(directory=str(tmp_path_factory.mktemp("history")))
    days.run(24)
    days.at += DAY
    days.run(24)
    days.run(12, "b")
    return days


def test_a_day_is_a_sum_and_a_day_without_a_record_is_a_gap(days: Days) -> None:
    answer = days.costs(range="5d")
    assert (answer.from_, answer.step_seconds) == (days.midnight - DAY, DAY)
    assert answer.to == days.midnight + 3.5 * DAY - 899
    assert answer.totals.steps.cost == [None, 475.0, None, 475.0, 240.0]
    assert answer.totals.steps.gpu_hours == [None, 47.5, None, 47.5, 24.0]
    assert answer.complete == [False, True, False, True, False]
    assert answer.recorded_from is not None
    rows = rows_of(answer)
    assert list(rows) == ["ml", "unallocated"]
    assert rows["ml"].steps.cost == [None, 237.5, None, 237.5, 117.5]
    assert rows["ml"].cost == 592.5
    assert rows["unallocated"].cost == 597.5
    assert answer.totals.cost == days.range(seconds=5 * DAY).totals.cost == 1190.0


def test_a_row_without_usage_in_a_recorded_day_is_zero(days: Days) -> None:
    rows = rows_of(days.costs(range="5d", by="label:team"))
    assert list(rows) == ["nlp", "vision", "unallocated"]
    assert rows["vision"].steps.cost == [None, 0.0, None, 0.0, 117.5]
    assert rows["nlp"].steps.gpu_hours == [None, 23.75, None, 23.75, 0.0]


@pytest.mark.parametrize("by", ["pod", "owner", "namespace", "label:team"])
def test_rows_are_those_of_the_range(days: Days, by: str) -> None:
    rows = rows_of(days.costs(range="4d", by=by))
    same = {describe_row(row): row for row in days.range(by, seconds=4 * DAY).rows}
    assert rows.keys() == same.keys()
    for name, row in rows.items():
        assert (row.cost, row.gpu_hours) == (same[name].cost, same[name].gpu_hours)
        assert sum(cost or 0 for cost in row.steps.cost) == row.cost


def test_hours_are_steps_of_their_own(days: Days) -> None:
    answer = days.costs(range="14h", step="hour")
    assert answer.step_seconds == HOUR
    assert answer.totals.steps.cost == [20.0] * 14
    assert answer.complete == [True] * 13 + [False]
    assert rows_of(answer)["ml"].steps.cost == [10.0] * 2 + [7.5] + [10.0] * 11


def test_the_forecast_is_the_cost_so_far_and_a_mean_day_for_each_day_left(days: Days) -> None:
    answer = days.costs(range="1d")
    forecast = answer.forecast
    assert forecast is not None
    left = (forecast.to - answer.to) / DAY
    assert (forecast.to - forecast.from_) == 30 * DAY
    assert 12.5 < left < 12.52
    assert (forecast.days, forecast.cost_per_day, forecast.cost_so_far) == (2, 475.0, 1190.0)
    assert forecast.cost == pytest.approx(1190.0 + left * 475.0)
    ml = rows_of(answer)["ml"]
    assert ml.forecast == pytest.approx(592.5 + left * 237.5)
    assert forecast.next_month == pytest.approx(31 * 475.0), "December"
    assert ml.next_month == pytest.approx(31 * 237.5)
    assert days.costs(range="1d", step="hour").forecast == forecast
    past = days.costs(**{"from": str(days.midnight), "to": str(days.midnight + DAY)})
    assert past.forecast is None


def test_less_than_a_day_makes_no_forecast() -> None:
    days = Days()
    days.run(23)
    answer = days.costs()
    assert answer.totals.cost == 455.0
    assert answer.forecast is None
    assert answer.rows[0].forecast is None


def test_a_forecast_uses_the_last_seven_days_only() -> None:
    days = Days(prices=Prices("EUR", {"*": Price(1000.0)}))
    days.run(24)
    days.prices = PRICES
    days.run(7 * 24 + 2)
    forecast = days.costs(range="1d").forecast
    assert forecast is not None
    assert forecast.days == 7
    assert 470 < forecast.cost_per_day < 490


def test_only_complete_days_are_compared_with_the_period_before(days: Days) -> None:
    answer = days.costs(range="2d")
    previous = answer.previous
    assert (previous.from_, previous.to) == (days.midnight, days.midnight + 2 * DAY)
    assert previous.totals.steps.cost == [475.0, None]
    assert previous.compared is not None
    compared = previous.compared
    assert (compared.steps, compared.cost, compared.previous_cost) == (1, 475.0, 475.0)


def test_a_month_is_compared_with_the_month_before(days: Days) -> None:
    answer = days.costs(range="month")
    assert (answer.from_, answer.previous.from_) == (month_start(WALL), month_start(WALL, -1))
    assert len(answer.totals.steps.cost) == len(answer.previous.totals.steps.cost) == 18
    assert month_start(WALL) - month_start(WALL, -1) == 31 * DAY
    assert answer.previous.to == answer.previous.from_ + 18 * DAY


def test_rows_of_a_low_cost_become_one() -> None:
    days = Days()
    for number in range(12):
        days.run(1 if number < 10 else 2, f"pod-{number:02}", f"team-{number:02}")
    rows = rows_of(days.costs(range="1d"))
    names = [f"team-{number:02}" for number in (10, 11, *range(6))]
    assert list(rows) == [*names, "others", "unallocated"]
    assert rows["others"].gpu_hours == 3.0
    assert rows["others"].steps.cost == [30.0]


def test_hidden_namespaces_are_one_row() -> None:
    days = Days()
    days.run(1)
    days.run(1, "secret", "secret")
    for by in ("pod", "owner", "namespace", "label:team"):
        query = parse_costs_query({"range": "1d", "by": by})
        query = query._replace(range=query.range._replace(visible=frozenset({"ml"})))
        answer = asyncio.run(days.past.costs(query))
        hidden = rows_of(answer)["other namespaces"]
        assert (hidden.gpu_hours, hidden.steps.cost) == (0.75, [7.5])
        assert b"secret" not in msgspec.json.encode(answer)


def test_without_prices_there_are_hours() -> None:
    days = Days(prices=NO_PRICES)
    days.run(24)
    answer = days.costs(range="1d")
    assert answer.totals.steps.gpu_hours == [47.5]
    assert answer.totals.steps.cost == [None]
    assert answer.forecast is None
    assert "there are no prices" in answer.notes[-1]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"step": "week"}, "step='week': use hour or day"),
        ({"range": "90d", "step": "hour"}, "at most 400: give a shorter range, or step=day"),
        ({"range": "500d"}, "at most 400: give a shorter range"),
        ({"range": "month", "from": "1"}, "range=month: from and to cannot"),
        ({"range": "x"}, "range='x'"),
        ({"by": "x"}, "by='x': use pod, owner, namespace, model or label:NAME"),
    ],
)
def test_invalid_queries_are_refused(query: dict[str, str], message: str) -> None:
    days = Days()
    days.run(1)
    with pytest.raises(UsageError, match=re.escape(message)):
        days.costs(**query)


def test_hours_of_expired_days_are_reported_and_their_days_stay_complete() -> None:
    days = Days()
    days.run(3 * 24)
    answer = days.costs(range="3d", step="hour")
    assert answer.from_ == days.midnight + DAY
    assert len(answer.totals.steps.cost) == len(answer.complete) == 48
    assert "are not kept: use days" in answer.notes[0]
    assert answer.totals.cost == days.range(start=answer.from_, end=answer.to).totals.cost
    assert days.costs(range="3d").complete == [True, True, False]


@pytest.mark.parametrize("step", ["hour", "day"])
@pytest.mark.parametrize("by", ["pod", "owner", "namespace", "label:team"])
def test_a_period_has_the_same_sums_as_the_range(days: Days, by: str, step: str) -> None:
    """Also if it begins or ends within an hour or a day."""
    now = days.costs().to
    for hours, length in ((0, 12.0), (0.3, 5.9), (13.7, 7.77), (20, 36.51), (70.25, 10.0)):
        end = now - hours * HOUR
        query = {"from": str(end - length * HOUR), "to": str(end), "by": by, "step": step}
        answer = days.costs(**query)
        assert answer.to == pytest.approx(end, abs=1.0)
        assert answer.from_ <= end - length * HOUR < answer.from_ + answer.step_seconds
        # An end that is given selects no current values.
        same = days.range(by, start=answer.from_, end=answer.to)
        rows = rows_of(answer)
        assert rows.keys() == {describe_row(row) for row in same.rows}
        for row in (*same.rows, same.totals):
            own = rows[describe_row(row)] if isinstance(row, RangeRow) else answer.totals
            for name in ("cost", "gpu_hours", "idle_hours", "wasted", "mean_use"):
                assert getattr(own, name) == pytest.approx(getattr(row, name), abs=2e-4)
            parts = [cost or 0.0 for cost in own.steps.cost]
            assert sum(parts) == pytest.approx(own.cost or 0.0, abs=1e-3)


def test_an_hour_that_the_period_ends_in_is_not_complete(days: Days) -> None:
    end = days.midnight + 6.5 * HOUR
    query = {"from": str(days.midnight + 5 * HOUR), "to": str(end), "step": "hour"}
    answer = days.costs(**query)
    assert answer.totals.steps.cost == [20.0, 10.0]
    assert answer.complete == [True, False]


# Budgets

BUDGETS = """
currency: EUR
budgets:
  - {namespace: ml, per_month: 500}
  - {label: team, value: vision, per_month: 235}
  - {namespace: none, per_month: 10}
"""


def test_budgets_are_compared_with_the_month_and_its_forecast(days: Days, tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text(BUDGETS)
    watch = BudgetWatch(days.past, read_budgets(str(file)))
    watch.start(lambda: None)
    wait_until(lambda: watch.read()[0], "a result of the thread")
    watch.stop()
    uses, notes = watch.read()
    assert notes == ()
    assert watch.pause == 60.0
    ml, vision, none = uses
    assert (ml.cost, ml.ratio) == (592.5, 1.185)
    assert ml.forecast == rows_of(days.costs(range="month"))["ml"].forecast
    assert (vision.cost, vision.ratio) == (117.5, 0.5)
    assert (none.cost, none.ratio, none.warning) == (0.0, 0.0, "")

    state = state_of(budgets=uses)
    [alert] = [alert for alert in state.alerts if "namespace ml" in alert.text]
    assert alert.severity == "warning"
    assert alert.text == ("namespace ml: 592.50 EUR exceed the budget of 500.00 EUR per month")
    assert value(state, "podgpu_budget_ratio", namespace="ml", currency="EUR") == 1.185
    labels = {"label": "team", "value": "vision", "currency": "EUR"}
    assert value(state, "podgpu_budget_ratio", **labels) == 0.5
    forecast = value(state, "podgpu_budget_forecast_ratio", namespace="ml", currency="EUR")
    assert forecast == ml.forecast_ratio

    file.write_text(BUDGETS.replace("500", "-500"))
    watch.update()
    uses, [note] = watch.read()
    assert uses[0].per_month == 500
    assert note.text.startswith(f"--budgets: {file}: ")
    assert note.text.endswith("the last valid budgets are used")
    file.write_text(BUDGETS.replace("EUR", "USD"))
    watch.update()
    uses, [note] = watch.read()
    assert not uses
    assert "the budgets are in USD, but the prices in EUR" in note.text
    assert watch.pause == 5.0, "until there is a result"


def test_a_budget_of_pods_without_a_price_is_not_known(tmp_path: Path) -> None:
    """The other namespace has a price."""
    cheap = {"H100": Price(1.0)}
    days = Days(directory=str(tmp_path), prices=Prices("EUR", cheap))
    # The month begins now, so each of its days is known.
    days.at = month_start(WALL, 1) - WALL + 1.0
    for _ in range(4):
        gpus = [gpu(0, holder("a", "ml"), model="H100"), gpu(1, holder("b", "web"), model="L4")]
        days.round(*gpus, seconds=900.0, pod_labels=LABELS)
    file = tmp_path / "budgets.yaml"
    budgets = "{namespace: ml, per_month: 10}, {namespace: web, per_month: 10}"
    file.write_text(f"currency: EUR\nbudgets: [{budgets}]\n")
    watch = BudgetWatch(days.past, read_budgets(str(file)))
    watch.update()
    [use] = watch.read()[0]
    assert use.namespace == "ml"
    assert use.cost > 0


def test_a_forecast_over_the_budget_is_a_warning() -> None:
    use = BudgetUse(
        namespace="ml", currency="EUR", per_month=100.0, cost=60.0, ratio=0.6, forecast=130.0
    )
    assert use.warning == (
        "namespace ml: the forecast of 130.00 EUR exceeds the budget of 100.00 EUR per month"
        " (60% are used)"
    )
    harmless = replace(use, forecast=100.0, ratio=1.0, cost=100.0)
    assert harmless.warning == ""
    assert [alert.text for alert in state_of(budgets=[harmless, use]).alerts] == [use.warning]


def test_only_budgets_of_what_is_shown_are_answered() -> None:
    known: Any = {"currency": "EUR", "per_month": 1.0, "cost": 1.0, "ratio": 1.0}
    mine = BudgetUse(namespace="ml", **known)
    other = BudgetUse(namespace="secret", **known)
    team = BudgetUse(label="my-team", value="x", **known)
    every = [mine, other, team]
    assert select_budgets(every, RangeQuery("namespace")) == [mine, other]
    assert select_budgets(every, RangeQuery("label:my_team")) == [team]
    assert select_budgets(every, RangeQuery("label:team")) == []
    assert select_budgets(every, RangeQuery("owner")) == []
    ann = frozenset({"ml"})
    assert select_budgets(every, RangeQuery("namespace", visible=ann)) == [mine]
    assert select_budgets(every, RangeQuery("label:my-team", visible=ann)) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{namespace: ml, per_month: -1}", "per_month"),
        ("{namespace: ml, per_month: 0}", "per_month"),
        ("{namespace: ml}", "per_month"),
        ("{namespace: ml, per_month: 1, per_year: 2}", "per_year"),
        ("{per_month: 1}", "a budget needs either a namespace, or a label and its value"),
        ("{label: team, per_month: 1}", "a budget needs either a namespace, or a label"),
        ("{namespace: ml, label: team, per_month: 1}", "a budget needs either a namespace"),
        ("{namespace: ml, value: vision, per_month: 1}", "a budget needs either a namespace"),
        ("{namespace: ml, label: a, value: b, per_month: 1}", "a budget needs either"),
        ("{namespace: ml, per_month: 1}, {namespace: ml, per_month: 2}", "ml has several budgets"),
    ],
)
def test_invalid_budgets_are_refused(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text(f"currency: EUR\nbudgets: [{line}]\n")
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        read_budgets(str(file))
    assert str(error.value).startswith("--budgets: ")


def test_a_budget_without_a_forecast_warns_when_it_is_exceeded() -> None:
    """The first minutes of a month have no forecast yet."""
    early = BudgetUse(namespace="ml", currency="EUR", per_month=10.0, cost=10.0, ratio=1.0)
    assert early.warning == ""
    assert early.forecast_ratio is None
    over = BudgetUse(namespace="ml", currency="EUR", per_month=10.0, cost=10.1, ratio=1.01)
    assert over.warning == "namespace ml: 10.10 EUR exceed the budget of 10.00 EUR per month"


# Prometheus


@both_servers
def test_steps_from_prometheus_are_those_of_the_range(serving: Serving, tmp_path: Path) -> None:
    hour = END // HOUR * HOUR - HOUR
    with serving(tmp_path, points(longer=HOUR)) as url:
        past = prometheus_past(PrometheusServer(url), state_of(), PROMETHEUS_PRICES)
        for by in ("owner", "label:team"):
            whole = RangeQuery(by, start=hour - 2 * HOUR, end=hour + HOUR)
            answer = asyncio.run(past.costs(CostsQuery(whole, HOUR)))
            one = asyncio.run(past.range(RangeQuery(by, start=hour, end=hour + HOUR)))
            assert answer.totals.steps.cost[-1] == pytest.approx(one.totals.cost)
            rows = rows_of(answer)
            for row in one.rows:
                own = rows[describe_row(row)].steps
                assert own.cost[-1] == pytest.approx(row.cost), describe_row(row)
                assert own.gpu_hours[-1] == pytest.approx(row.gpu_hours)
            assert answer.complete == [True] * 3
            assert answer.source == "counters"

            # A period that ends within an hour.
            half = RangeQuery(by, start=hour, end=hour + HOUR / 2)
            part = asyncio.run(past.costs(CostsQuery(half, HOUR)))
            same = asyncio.run(past.range(half))
            assert (part.from_, part.to, part.complete) == (same.from_, same.to, [False])
            assert part.totals.cost == pytest.approx(same.totals.cost)
            assert 0.4 * one.totals.gpu_hours < part.totals.gpu_hours < 0.6 * one.totals.gpu_hours
        before = RangeQuery("pod", start=hour - 9 * HOUR, end=hour - 6 * HOUR)
        empty = asyncio.run(past.costs(CostsQuery(before, HOUR)))
        assert empty.totals.steps.gpu_hours == [None] * 3


def test_the_number_of_queries_does_not_depend_on_the_range() -> None:
    numbers = []
    for length in ("7d", "60d"):
        with running_double() as double:
            past = prometheus_past(PrometheusServer(double.url), state_of(), PROMETHEUS_PRICES)
            asyncio.run(past.costs(parse_costs_query({"range": length, "by": "pod"})))
            numbers.append(len(double.asked))
    assert numbers[0] == numbers[1] < 60


def test_costs_from_prometheus_are_cached_for_a_while() -> None:
    now = 0.0
    with running_double() as double:
        server = PrometheusServer(double.url)
        past = prometheus_past(server, state_of(), PROMETHEUS_PRICES, clock=lambda: now)
        numbers = []
        for at, by in ((0.0, "pod"), (299.0, "pod"), (299.0, "owner"), (301.0, "pod")):
            now = at
            before = len(double.asked)
            asyncio.run(past.costs(parse_costs_query({"by": by})))
            numbers.append(len(double.asked) - before)
    assert numbers[1] == 0
    assert min(numbers[0], numbers[2], numbers[3]) > 0
