"""Computes cost over time: sums per hour or UTC day, the period before, and a forecast.

Charges and sums are those of `/api/v1/range` (`past/bills/bill.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import fsum
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import msgspec

from podgpu.charge import Charge, scale_bill
from podgpu.errors import UsageError
from podgpu.fleet.budgets import BudgetUse
from podgpu.fleet.prices import Prices
from podgpu.known import select_known
from podgpu.model import group_by
from podgpu.past.bills.bill import (
    PeriodAnswer,
    RangeFigures,
    RangeQuery,
    RangeRow,
    RowName,
    add_up,
    describe_row,
    make_range,
    name_row,
    parse_range_query,
)
from podgpu.past.time_steps import DAY, HOUR, ceil_time, floor_time

MAX_STEPS = 400  # bounds the answer, and the points of a query to Prometheus
MOST_ROWS = 8  # a stacked chart with more colours is not readable
MONTH = "month"
_STEPS = {"hour": HOUR, "day": DAY}
_MEAN_DAYS = 7  # a week, so that weekends count
_DIGITS = 4
_OTHERS: RowName = (("others", True),)


class CostsQuery(NamedTuple):
    range: RangeQuery
    step: int = DAY
    is_month: bool = False  # the current month (UTC)
    most_rows: int | None = MOST_ROWS  # the others become one row. None: all
    kept_since: int = 0  # older steps were deleted

    @property
    def has_forecast(self) -> bool:
        return self.range.end is None

    def first_step(self, now: float) -> int:
        """Returns the start of the oldest step that an answer needs."""
        previous = self.windows(now).previous_start
        if self.has_forecast and self.step == DAY:
            return min(previous, first_forecast_day(now))
        return previous

    def windows(self, now: float) -> CostsWindows:
        start, end = self.range.bounds(now)
        last = ceil_time(end, self.step)
        if self.is_month:
            first = month_start(now)
        elif self.range.start is None:
            # 24 hours are 24 steps, although both ends may be in the middle of an hour.
            first = last - ceil_time(end - start, self.step)
        else:
            first = floor_time(start, self.step)

        previous = first - (last - first)
        if self.is_month:
            previous = month_start(now, -1)

        steps = (last - first) // self.step
        if steps > MAX_STEPS:
            advice = "give a shorter range"
            if self.step == HOUR:
                advice += ", or step=day"
            raise UsageError(f"the range has {steps:,} steps, but at most {MAX_STEPS}: {advice}")

        # Steps that were deleted are not shown.
        first = min(last, max(first, self.kept_since))
        return CostsWindows(first, last, previous, end)


class CostsWindows(NamedTuple):
    """Unix times. The first three are limits of whole steps."""

    start: int
    end: int
    previous_start: int  # as many steps before, or the month before
    recorded_until: float  # now, or the requested end. At most `end`


def month_start(now: float, months: int = 0) -> int:
    """Returns the start of a month (UTC), as Unix time. `months`: 1 is the month after `now`."""
    today = datetime.fromtimestamp(now, UTC)
    months_since_year_0 = today.year * 12 + today.month - 1 + months
    year, month_index = divmod(months_since_year_0, 12)
    start = datetime(year, month_index + 1, 1, tzinfo=UTC)
    return int(start.timestamp())


class CostStep(NamedTuple):
    """The charges of an hour or UTC day. Without charges, there is no record of it."""

    start: int
    charges: Sequence[Charge]
    # The step is over, and no hour of a day is without a record. Only such days are compared, and
    # count for a forecast.
    is_complete: bool


class StepFigures(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One value per step. None if there is no record of the step, or if the value is unknown."""

    cost: list[float | None] = []
    gpu_hours: list[float | None] = []
    mean_use: list[float | None] = []


class CostsTotals(RangeFigures, kw_only=True):
    steps: StepFigures = msgspec.field(default_factory=StepFigures)


class CostsRow(RangeRow, kw_only=True):
    others: bool = False  # the sum of rows with a lower cost
    forecast: float | None = None  # cost of the current month
    next_month: float | None = None  # at the same cost per day
    steps: StepFigures = msgspec.field(default_factory=StepFigures)


Steps = Sequence[CostStep | None]
"""None if there is no record of a step. A row may have no charges in a recorded step."""
Row = TypeVar("Row", CostsTotals, CostsRow)


class Comparison(msgspec.Struct, kw_only=True):
    """Compares the steps that are complete in this period and in the period before."""

    steps: int
    cost: float
    previous_cost: float


class PreviousPeriod(msgspec.Struct, omit_defaults=True, kw_only=True):
    from_: float = msgspec.field(name="from")
    to: float
    totals: CostsTotals
    compared: Comparison | None = None


class Forecast(msgspec.Struct, kw_only=True):
    """Cost of the current month: the cost so far, and a mean day for each day that is left."""

    from_: float = msgspec.field(name="from")  # start and end of the month
    to: float
    cost: float
    cost_so_far: float
    cost_per_day: float  # mean of the complete ones of the last seven days
    days: int  # number of these days
    next_month: float  # cost of the next month, at the same cost per day


class CostsAnswer(PeriodAnswer, kw_only=True):
    step_seconds: int
    by: str
    complete: list[bool]  # by step
    totals: CostsTotals
    rows: list[CostsRow]
    previous: PreviousPeriod
    # Of the namespaces or labels by which rows are made.
    budgets: list[BudgetUse] = msgspec.field(default_factory=list)
    forecast: Forecast | None = None  # None without a complete day, or for a past period


def parse_costs_query(query: Mapping[str, str]) -> CostsQuery:
    step = query.get("step", "day")
    if step not in _STEPS:
        raise UsageError(f"step={step[:60]!r}: use hour or day")

    is_month = query.get("range") == MONTH
    if is_month and ("from" in query or "to" in query):
        raise UsageError("range=month: from and to cannot be combined with it")

    range_query = {"by": "namespace", "range": "30d", **query}
    # The answer has no CSV.
    range_query.pop("format", "")
    if is_month:
        # Not a length of time, which `parse_range_query` requires.
        del range_query["range"]

    return CostsQuery(parse_range_query(range_query), _STEPS[step], is_month)


def select_budgets(budgets: Iterable[BudgetUse], query: RangeQuery) -> list[BudgetUse]:
    """Returns the budgets of what the rows show, and of namespaces that the user may see."""
    selected = []
    for budget in budgets:
        if budget.label:
            # Pods of any namespace may have the label.
            is_visible = query.visible is None
            is_a_row = query.label == RangeQuery(f"label:{budget.label}").label
        else:
            is_visible = query.visible is None or budget.namespace in query.visible
            is_a_row = query.by == "namespace"

        if is_visible and is_a_row:
            selected.append(budget)

    return selected


def widest_range(query: CostsQuery, now: float) -> RangeQuery:
    """Returns the range of all that an answer may name."""
    previous_start = query.windows(now).previous_start
    first = min(previous_start, first_forecast_day(now))
    # The clock of the books may differ from the machine's.
    seconds = round(now) - first + DAY
    return query.range._replace(by="namespace", seconds=seconds, start=None, end=None)


def first_forecast_day(now: float) -> int:
    """Returns the start of the oldest day that a forecast needs."""
    first_mean_day = floor_time(now, DAY) - _MEAN_DAYS * DAY
    return min(month_start(now), first_mean_day)


def make_costs(
    query: CostsQuery,
    now: float,
    prices: Prices,
    steps: Sequence[CostStep],
    days: Sequence[CostStep],
) -> CostsAnswer:
    """`steps`: of the period and the one before. `days`: those that a forecast needs."""
    windows = query.windows(now)
    currency = prices.currency
    recorded = {step.start: step for step in steps if step.charges}
    period: list[CostStep | None] = []
    before: list[CostStep | None] = []
    for time in range(windows.start, windows.end, query.step):
        period.append(recorded.get(time))
        time_before = windows.previous_start + (time - windows.start)
        # A month may be longer than the one before: its last days have no day to compare with.
        has_time_before = time_before < windows.start
        before.append(recorded.get(time_before) if has_time_before else None)

    previous_end = windows.previous_start + (windows.end - windows.start)
    previous = PreviousPeriod(
        from_=windows.previous_start,
        to=min(windows.start, previous_end),
        totals=_add_up_steps(CostsTotals(), before, currency),
        compared=_compare(period, before, currency),
    )
    now = windows.recorded_until
    # Its notes say which hours have no price.
    bill = make_range(query.range, (windows.start, now), _list_charges(period), prices, {})

    return CostsAnswer(
        from_=windows.start,
        to=now,
        step_seconds=query.step,
        by=query.range.by,
        currency=currency,
        prices=prices.source,
        notes=bill.notes,
        complete=[step is not None and step.is_complete for step in period],
        totals=_add_up_steps(CostsTotals(), period, currency),
        rows=_make_rows(query, period, days, now, currency),
        previous=previous,
        forecast=_forecast(days, now, currency),
    )


def _list_charges(steps: Steps) -> list[Charge]:
    charges: list[Charge] = []
    for step in steps:
        if step is not None:
            charges += step.charges
    return charges


def _make_rows(
    query: CostsQuery, steps: Steps, days: Sequence[CostStep], now: float, currency: str
) -> list[CostsRow]:
    charges = _list_charges(steps)
    names = _choose_names(charges, query, currency)
    steps_of_rows = _split(steps, names, query.range)
    days_of_rows = _split(days, names, query.range)

    rows = []
    for name, row_steps in steps_of_rows.items():
        row = CostsRow(**dict(name))
        _add_up_steps(row, row_steps, currency)
        row_days = select_known(days_of_rows[name])
        forecast = _forecast(row_days, now, currency)
        if forecast:
            row.forecast = forecast.cost
            row.next_month = forecast.next_month
        rows.append(row)

    return sorted(rows, key=_row_order)


def _row_order(row: CostsRow) -> tuple[Any, ...]:
    cost = row.cost or 0.0
    name = describe_row(row)
    return row.unallocated, row.others, -cost, -row.gpu_hours, name


def _choose_names(
    charges: Iterable[Charge], query: CostsQuery, currency: str
) -> dict[RowName, RowName]:
    """Maps the name of each charge to that of its row. Those with the lowest costs share a row."""
    groups = group_by(charges, lambda charge: name_row(charge, query.range))
    orders: dict[RowName, tuple[Any, ...]] = {}
    names: dict[RowName, RowName] = {}
    for name, group in groups.items():
        row = CostsRow(**dict(name))
        if row.unallocated or row.hidden:
            names[name] = name
            continue
        add_up(row, group, currency)
        orders[name] = _row_order(row)

    most = len(orders) if query.most_rows is None else query.most_rows
    for place, name in enumerate(sorted(orders, key=orders.__getitem__)):
        names[name] = name if place < most else _OTHERS

    return names


def _split(
    steps: Steps, names: Mapping[RowName, RowName], query: RangeQuery
) -> dict[RowName, list[CostStep | None]]:
    """Returns all steps for each row, with only the charges of the row.

    A recorded step may have no charges of a row.
    """
    rows: dict[RowName, list[CostStep | None]] = {name: [] for name in names.values()}
    for step in steps:
        if step is None:
            for row_steps in rows.values():
                row_steps.append(None)
            continue

        charges: dict[RowName, list[Charge]] = defaultdict(list)
        for charge in step.charges:
            # The days of a forecast may name what the period does not.
            name = names.get(name_row(charge, query), _OTHERS)
            charges[name].append(charge)
        for name, row_steps in rows.items():
            row_steps.append(step._replace(charges=charges[name]))

    return rows


def _add_up_steps(row: Row, steps: Steps, currency: str) -> Row:
    """Sets the sums of all steps and of each step."""
    add_up(row, _list_charges(steps), currency)
    figures = StepFigures(cost=[], gpu_hours=[], mean_use=[])
    for step in steps:
        if step is None:
            for values in (figures.cost, figures.gpu_hours, figures.mean_use):
                values.append(None)
            continue

        sums = _add_up_step(step.charges, currency)
        figures.cost.append(sums.cost)
        figures.gpu_hours.append(sums.gpu_hours)
        figures.mean_use.append(sums.mean_use)

    row.steps = figures
    return row


def _add_up_step(charges: Sequence[Charge], currency: str) -> RangeFigures:
    """The cost is None if there are no prices, or if nothing of the usage has one."""
    sums = RangeFigures()
    add_up(sums, charges, currency)
    if currency and not charges:
        sums.cost = 0.0
    return sums


def _cost_of(charges: Sequence[Charge], currency: str) -> float | None:
    return _add_up_step(charges, currency).cost


def _compare(own: Steps, before: Steps, currency: str) -> Comparison | None:
    costs = []
    earlier_costs = []
    for step, earlier in zip(own, before, strict=True):
        if step is None or earlier is None:
            continue
        if not (step.is_complete and earlier.is_complete):
            continue

        cost = _cost_of(step.charges, currency)
        earlier_cost = _cost_of(earlier.charges, currency)
        if cost is not None and earlier_cost is not None:
            costs.append(cost)
            earlier_costs.append(earlier_cost)

    if not costs:
        return None

    return Comparison(
        steps=len(costs),
        cost=round(fsum(costs), _DIGITS),
        previous_cost=round(fsum(earlier_costs), _DIGITS),
    )


def _forecast(days: Sequence[CostStep], now: float, currency: str) -> Forecast | None:
    """Forecasts the month's cost. Returns None if there is no complete day, or no price."""
    start = month_start(now)
    end = month_start(now, 1)
    first_day = floor_time(now, DAY) - _MEAN_DAYS * DAY
    recent_costs = []
    so_far: list[Charge] = []
    for day in days:
        if day.start >= start:
            so_far += day.charges
        if day.is_complete and day.start >= first_day:
            recent_costs.append(_cost_of(day.charges, currency))

    known_costs = select_known(recent_costs)
    cost_so_far = _cost_of(so_far, currency)
    if not known_costs or cost_so_far is None:
        return None

    per_day = fmean(known_costs)
    cost = cost_so_far + scale_bill(per_day, DAY, end - now)
    next_month = scale_bill(per_day, DAY, month_start(now, 2) - end)

    return Forecast(
        from_=start,
        to=end,
        cost=round(cost, _DIGITS),
        cost_so_far=cost_so_far,
        cost_per_day=round(per_day, _DIGITS),
        days=len(known_costs),
        next_month=round(next_month, _DIGITS),
    )
