"""Reads and writes the bill of a period (`/api/v1/range`), for `report`, `cost` and `waste`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import click

from podgpu.charge import Waste
from podgpu.cli.tables import UNKNOWN, write_amount, write_period, write_table
from podgpu.cli.view_options import PERIOD_SECONDS, open_view, parse_at, print_answer
from podgpu.errors import UsageError, one_line
from podgpu.past.bills.bill import (
    RangeAnswer,
    RangeFigures,
    RangeRow,
    describe_row,
    parse_range_query,
)
from podgpu.past.bills.costs import month_start
from podgpu.past.queries import parse_range

RANGE_PATH = "api/v1/range"
WASTE_PATH = "api/v1/waste"
_EXAMPLE_PRICES = "The prices are examples: set yours with podgpu cluster --prices FILE"
_DO_UNALLOCATED = "podgpu why: do pods wait for them? If none, fewer nodes would do"
_MONTH = "month"
_MORE_THAN_SHARE = 1.005  # the least use that is written as more than 100 %


class BillColumn(NamedTuple):
    title: str
    write: Callable[[RangeFigures], str]


def _write_use(figures: RangeFigures) -> str:
    use = figures.mean_use
    if use is None:
        return UNKNOWN
    if use >= _MORE_THAN_SHARE:
        # On a shared GPU, a pod can use time that the other pods leave free.
        return f"{use:.0%} of its share"
    return f"{use:.0%}"


def _write_cost(amount: float | None, figures: RangeFigures) -> str:
    """Writes a lower bound if some hours have no price. A bound of 0 would say nothing."""
    text = write_amount(amount)
    if amount and figures.unpriced_hours:
        return f"≥ {text}"
    return text


def _wasted_hours(figures: RangeFigures) -> Waste:
    return Waste() if figures.waste is None else figures.waste.hours


def _wasted_cost(figures: RangeFigures) -> Waste:
    if figures.waste is None:
        return Waste()
    return figures.waste.cost or Waste()


def _write_wasted(figures: RangeFigures) -> str:
    waste = _wasted_cost(figures)
    # No part is known.
    if waste == Waste():
        return UNKNOWN
    return _write_cost(waste.total, figures)


COLUMNS = {
    "gpu_hours": BillColumn("GPU-hours", lambda row: write_amount(row.gpu_hours)),
    "allocated": BillColumn("Allocated, h", lambda row: write_amount(row.allocated_hours)),
    "used": BillColumn("Busy (weighted), h", lambda row: write_amount(row.used_hours)),
    "idle": BillColumn("Idle, h", lambda row: write_amount(row.idle_hours)),
    "underused": BillColumn(
        "Under-used, h", lambda row: write_amount(_wasted_hours(row).underused)
    ),
    "waited": BillColumn("Waited, h", lambda row: write_amount(row.waited_hours)),
    "use": BillColumn("Use of what it holds", _write_use),
    "energy": BillColumn("Energy, kWh", lambda row: write_amount(row.energy_kwh)),
    "cost": BillColumn("Cost{}", lambda row: _write_cost(row.cost, row)),
    "wasted": BillColumn("Wasted{}", _write_wasted),
    "wasted_idle": BillColumn(
        "Wasted{}, idle", lambda row: _write_cost(_wasted_cost(row).idle, row)
    ),
    "wasted_underused": BillColumn(
        "Wasted{}, under-used",
        lambda row: _write_cost(_wasted_cost(row).underused, row),
    ),
    "wasted_unallocated": BillColumn(
        "Wasted{}, unallocated",
        lambda row: _write_cost(_wasted_cost(row).unallocated, row),
    ),
}
"""All columns of a bill, in their order. The currency replaces `{}`."""


def write_titles(names: Sequence[str], currency: str) -> list[str]:
    money = f" {currency}" if currency else ""
    return [COLUMNS[name].title.format(money) for name in names]


def write_cells(names: Sequence[str], figures: RangeFigures) -> list[str]:
    return [COLUMNS[name].write(figures) for name in names]


def make_range_query(period: str, by: str, at: float | None) -> dict[str, str]:
    """Returns the query of a period that ends at a Unix time, or now if `at` is None.

    Raises UsageError for wrong options.
    """
    query = {"by": by}

    try:
        if period == _MONTH:
            end = time.time() if at is None else at
            # A period that ends when a month begins is the month before.
            query["from"] = str(month_start(end - 1.0))
        elif at is None:
            query["range"] = period
        else:
            query["from"] = str(max(0.0, at - parse_range(period)))
        if at is not None:
            query["to"] = str(at)
        # Reports a wrong option before the view is opened.
        parse_range_query(query)
    except UsageError as error:
        # The API does not know `month`, so its message does not name it.
        also = ", or month" if error.facts.get("parameter") == "range" else ""
        # by='x' becomes --by='x'
        raise UsageError(f"--{error}{also}") from error
    return query


def print_bill(ctx: click.Context, path: str, title: str, names: Sequence[str]) -> None:
    """Prints the answer of `path` as a table with these columns, as JSON or as CSV."""
    options = ctx.params
    query = make_range_query(options["range"], options["by"], parse_at(options["at"]))
    namespace = options["namespace"]
    output = options["output"]
    if namespace and output != "table":
        raise UsageError("--namespace selects rows of the table: leave it out with -o")
    if namespace and options["by"].startswith("label:"):
        raise UsageError("--namespace needs --by pod, owner, namespace or model")

    client = open_view(ctx, PERIOD_SECONDS)
    write = partial(_write_bill, title, names, namespace)
    print_answer(client, path, query, output, RangeAnswer, write)


def _write_bill(
    title: str, names: Sequence[str], namespace: str, answer: RangeAnswer
) -> Iterator[str]:
    yield write_period(title, answer.from_, answer.to, answer.simulated)
    is_waste = "wasted" in names
    if is_waste:
        yield _write_waste(answer)

    rows = [row for row in answer.rows if not namespace or row.namespace == namespace]
    notes = list_bill_notes(answer)
    if namespace and not rows:
        notes.append(f"no pod of the namespace {namespace!a} held a GPU in this period")
    if answer.totals.allocated_hours and _wasted_hours(answer.totals).underused is None:
        notes.append("under-used time is not known: no exporter counted it (docs/usage.md#waste)")
    if is_waste:
        notes.append("podgpu savings says which of these GPUs could be given back")
    for note in notes:
        yield f"- {one_line(note)}"
    yield ""

    yield from _write_rows(answer, rows, names, namespace)


def _write_rows(
    answer: RangeAnswer, rows: Sequence[RangeRow], names: Sequence[str], namespace: str
) -> Iterator[str]:
    """Writes the table. The table of waste has one more column: what to do."""
    is_waste = "wasted" in names
    header = [name_group(answer).capitalize(), *write_titles(names, answer.currency)]
    # The totals include the rows of the other namespaces, which are not shown.
    total = "Total of all namespaces" if namespace else "Total"
    totals = [total, *write_cells(names, answer.totals)]
    if is_waste:
        header.append("What to do")
        totals.append(UNKNOWN)

    table = []
    for row in rows:
        cells = [name_row(answer, row), *write_cells(names, row)]
        if is_waste:
            cells.append(row.do or UNKNOWN)
        table.append(cells)
    if is_waste and _wasted_hours(answer.totals).unallocated:
        table.append(_write_unallocated(names, answer.totals))
    table.append(totals)
    yield from write_table(header, table, text_columns=1, ends_with_text=is_waste)


def _write_waste(answer: RangeAnswer) -> str:
    """Writes how much was wasted of everything, in money or, without prices, in GPU-hours."""
    totals = answer.totals
    if totals.cost is None:
        waste = _wasted_hours(totals)
        whole = totals.gpu_hours
        unit = "GPU-hours"
    else:
        waste = _wasted_cost(totals)
        whole = totals.cost
        unit = answer.currency
    ratio = f" ({waste.total / whole:.0%})" if whole else ""
    parts = [
        ("idle", waste.idle),
        ("under-used", waste.underused),
        ("unallocated", waste.unallocated),
    ]
    written = [f"{name} {write_amount(part)}" for name, part in parts]
    wasted = f"{write_amount(waste.total)} of {write_amount(whole)} {unit}{ratio}"
    return f"Wasted: {wasted}: {', '.join(written)}."


def _write_unallocated(names: Sequence[str], totals: RangeFigures) -> list[str]:
    """Returns a row for the GPUs that nobody held. `/api/v1/waste` has it only in its totals."""
    cost = write_amount(_wasted_cost(totals).unallocated)
    cells = dict.fromkeys(names, UNKNOWN)
    cells["wasted"] = cost
    cells["wasted_unallocated"] = cost
    return ["unallocated", *cells.values(), _DO_UNALLOCATED]


def name_group(answer: RangeAnswer) -> str:
    """Returns what a row stands for, such as `pod` or the name of a label."""
    return answer.by.removeprefix("label:")


def name_row(answer: RangeAnswer, row: RangeRow) -> str:
    nameless = "(no namespace)" if answer.by == "namespace" else "(without this label)"
    return describe_row(row, nameless)


def list_bill_notes(answer: RangeAnswer) -> list[str]:
    """Returns what a reader of the bill must know, as sentences."""
    notes = list(answer.notes)
    if answer.prices == "example":
        notes.insert(0, _EXAMPLE_PRICES)
    return notes
