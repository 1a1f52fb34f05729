"""Writes a bill as CSV in the format FOCUS 1.4, which tools for cloud costs import.

podgpu's own columns begin with `x_`. An unknown value is an empty cell.
"""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from podgpu.charge import AMOUNTS, Waste
from podgpu.errors import UsageError, utc_text
from podgpu.past.bills.bill import (
    RangeAnswer,
    RangeFigures,
    RangeQuery,
    RangeRow,
    RangeWaste,
    describe_owner,
    describe_row,
)
from podgpu.past.bills.costs import month_start
from podgpu.past.bills.token_costs import TokenFigures
from podgpu.past.time_steps import COARSE, DAY, floor_time

_MAX_DAYS = 366  # each day is a query
_ISSUER = "podgpu"
_UNIT = "GPU-Hours"
_METHOD = "podgpu:allocated-time"  # a pod pays for the time, and the share, that it was allocated
_FORMULA_STARTS = frozenset("=+-@|%")
_SEPARATORS = ",;"  # if the file is opened with another separator, a cell may begin behind them


def split_days(query: RangeQuery, whole: RangeAnswer) -> list[RangeQuery]:
    """Returns a query for each UTC day of the range. `whole`: the answer to `query`."""
    start = whole.from_
    if whole.recorded_from is not None:
        # Usage may be stored in the 5 minutes before the first round, if the clock was corrected.
        start = max(start, whole.recorded_from - COARSE)
    if whole.to - start > _MAX_DAYS * DAY:
        raise UsageError(f"format=csv: a range has at most {_MAX_DAYS} days; ask for a shorter one")

    days = []
    while start < whole.to:
        midnight = floor_time(start, DAY) + DAY
        end = min(midnight, whole.to)
        days.append(query._replace(start=start, end=end))
        start = midnight

    return days


def encode_csv(days: Iterable[RangeAnswer]) -> bytes:
    """Writes the rows of each day. `days`: the bills of single UTC days, or of parts of a day."""
    # The columns are the same for all rows, also for one of an empty bill.
    empty = RangeAnswer(from_=0.0, to=0.0, by="pod", totals=RangeFigures(), rows=[])
    columns = _make_cells(empty, RangeRow()).keys()
    rows = []
    for day in days:
        rows += [_make_cells(day, row) for row in day.rows]
    return write_table(columns, rows)


def write_table(columns: Collection[str], rows: Iterable[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\r\n")
    writer.writeheader()
    for cells in rows:
        for name, value in cells.items():
            if isinstance(value, str):
                cells[name] = escape_cell(value)
        writer.writerow(cells)

    return text.getvalue().encode()


def escape_cell(text: str) -> str:
    """Prevents spreadsheets from running the cell as a formula."""
    is_formula = _first_visible(text) in _FORMULA_STARTS
    # Some programs remove these characters, or begin a new cell behind them.
    has_break = text.lstrip(" ").startswith(("\t", "\r", "\n"))
    if is_formula or has_break:
        return f"'{text}"
    return text


def _first_visible(text: str) -> str:
    """Returns the first character that a reader sees. Fullwidth signs become ASCII.

    Spreadsheets skip spaces, control characters (C) and other separators (Z) before a formula.
    """
    for character in text:
        is_skipped = unicodedata.category(character)[0] in "CZ" or character in _SEPARATORS
        if not is_skipped:
            return unicodedata.normalize("NFKC", character)[0]
    return ""


def _make_cells(day: RangeAnswer, row: RangeRow) -> dict[str, Any]:
    return {
        **_make_billing(day, row),
        **_make_allocation(day, row),
        **_make_own_cells(day, row),
    }


def _make_billing(day: RangeAnswer, row: RangeRow) -> dict[str, Any]:
    """Returns the columns of FOCUS that are the same for all billing systems."""
    return {
        "BilledCost": row.cost,
        "EffectiveCost": row.cost,
        "ListCost": row.cost,
        "ContractedCost": row.cost,
        "BillingCurrency": day.currency,
        "BillingAccountId": _ISSUER,
        "BillingAccountName": _ISSUER,
        "BillingPeriodStart": utc_text(month_start(day.from_)),
        "BillingPeriodEnd": utc_text(month_start(day.from_, 1)),
        "ChargePeriodStart": utc_text(day.from_),
        "ChargePeriodEnd": utc_text(day.to),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"GPU hours: {describe_row(row)}",
        "ChargeFrequency": "Usage-Based",
        "HostProviderName": _ISSUER,
        "InvoiceIssuerName": _ISSUER,
        "ServiceProviderName": _ISSUER,
        "ServiceCategory": "Compute",
        "ServiceName": "GPU",
        # A row adds up GPUs of different models, so it has no SKU, and thus no pricing quantity.
        "PricingQuantity": None,
        "PricingUnit": None,
        "ConsumedQuantity": row.gpu_hours,
        "ConsumedUnit": _UNIT,
    }


def _make_own_cells(day: RangeAnswer, row: RangeRow) -> dict[str, Any]:
    """Returns the tags, the account, and the columns that only podgpu has."""
    owner = describe_owner(row.owner)
    tags = {"cluster": row.cluster, "namespace": row.namespace, "owner": owner}
    if day.by.startswith("label:"):
        label = day.by.removeprefix("label:")
        tags[label] = row.label

    amounts = {}
    for amount in AMOUNTS:
        if amount.cell:
            amounts[amount.cell] = getattr(row, amount.key)

    waste = row.waste or RangeWaste(Waste())
    tokens = row.tokens or TokenFigures()
    per_million = tokens.cost_per_million

    return {
        "Tags": _write_object(tags),
        "SubAccountId": row.cluster,
        "SubAccountName": row.cluster,
        "x_Namespace": row.namespace,
        "x_Pod": row.pod or row.job or row.uid or row.container_id,
        "x_Owner": owner,
        "x_Label": row.label,
        **amounts,
        "x_Model": row.model,
        "x_JoulesPerToken": tokens.joules_per_token,
        "x_CostPerMillionTokens": None if per_million is None else per_million.total,
        "x_UnknownGpuHours": row.unknown_hours,
        "x_UnderusedGpuHours": waste.hours.underused,
        "x_UnderusedCost": None if waste.cost is None else waste.cost.underused,
        "x_MeanUse": row.mean_use,
        "x_UsageMethod": " ".join(row.methods),
    }


def _make_allocation(day: RangeAnswer, row: RangeRow) -> dict[str, str]:
    """Returns the columns of FOCUS for divided costs: to whom, and which part of the day's cost.

    They are empty for unallocated GPUs.
    """
    cells = dict.fromkeys(
        (
            "AllocatedMethodId",
            "AllocatedMethodDetails",
            "AllocatedResourceId",
            "AllocatedResourceName",
            "AllocatedTags",
        ),
        "",
    )
    if row.unallocated:
        return cells

    cells["AllocatedMethodId"] = _METHOD
    if row.cost is not None and day.totals.cost:
        # The two costs are rounded, so that a row may cost more than the day.
        ratio = min(1.0, row.cost / day.totals.cost)
        element = {
            "AllocatedRatio": round(ratio, 9),
            "UsageUnit": _UNIT,
            "UsageQuantity": row.gpu_hours,
        }
        cells["AllocatedMethodDetails"] = json.dumps({"Elements": [element]})

    name = row.pod or row.job or row.uid or row.container_id
    if row.owner is not None:
        name = name or row.owner.name

    cells["AllocatedResourceId"] = describe_row(row)
    cells["AllocatedResourceName"] = name or row.label or row.namespace
    cells["AllocatedTags"] = _write_object(row.labels)
    return cells


def _write_object(values: Mapping[str, str]) -> str:
    known = {name: value for name, value in values.items() if value}
    return json.dumps(known)
