"""This module owns what `/api/v1/waste` answers (docs/api.md): waste by pod, owner or namespace, as JSON and as a table
that a spreadsheet opens without harm. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, get_args

from podgpu.errors import UsageError
from podgpu.figures.device import Owner
from podgpu.figures.parts import WHOLE
from podgpu.figures.waste import NOTHING, Amounts, PodWaste, WasteStatement

By = Literal["pod", "owner", "namespace"]
Format = Literal["json", "csv"]
_DIGITS = 4
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
"""A cell that begins so may be run by whoever opens the table."""
_COLUMNS = (
    *("namespace", "pod", "owner_kind", "owner_name", "job", "uid", "container_id"),
    *("gpus", "idle_gpus", "idle_hours", "allocated_hours", "wasted", "cost_per_hour"),
    *("currency", "prices", "idle_since", "ended_at"),
)


class Name(NamedTuple):
    """Whom a row is about. What it is not about is empty."""

    namespace: str = ""
    pod: str = ""
    owner: Owner | None = None
    job: str = ""
    uid: str = ""
    container_id: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Several pods together, or one."""

    name: Name
    pods: Sequence[PodWaste]
    more: Amounts = NOTHING
    """What those came to that are not among the pods any more."""

    @property
    def amounts(self) -> Amounts:
        total = self.more
        for pod in self.pods:
            total = total.plus(pod.amounts)
        return total

    @property
    def idle_since(self) -> float | None:
        """Since when nothing of what they have now is used."""
        there = [pod for pod in self.pods if pod.ended_at is None]
        known = [pod.idle_since for pod in there if pod.idle_since is not None]
        return max(known) if known and len(known) == len(there) else None

    @property
    def ended_at(self) -> float | None:
        ended = [pod.ended_at for pod in self.pods if pod.ended_at is not None]
        return max(ended) if ended and len(ended) == len(self.pods) else None


def rows_by(statement: WasteStatement, by: By) -> list[Row]:
    """The most expensive first, then the longest idle; by name where neither tells."""
    pods: dict[Name, list[PodWaste]] = {}
    for pod in statement.pods:
        pods.setdefault(_name(pod, by), []).append(pod)
    more: dict[Name, Amounts] = {}
    if by != "pod":
        for (namespace, owner), amounts in statement.left.items():
            name = Name(namespace) if by == "namespace" else Name(namespace, owner=owner)
            more[name] = more.get(name, NOTHING).plus(amounts)
    rows = [Row(name, pods.get(name, ()), more.get(name, NOTHING)) for name in dict.fromkeys((*pods, *more))]
    sums = {id(row): row.amounts for row in rows}
    return sorted(rows, key=lambda row: (-(sums[id(row)].wasted or 0), -sums[id(row)].idle, _sortable(row.name)))


def _name(pod: PodWaste, by: By) -> Name:
    of = pod.pod
    if by == "namespace":
        return Name(of.namespace)
    if by == "owner" and pod.owner is not None:
        return Name(of.namespace, owner=pod.owner)
    return Name(of.namespace, of.pod, pod.owner, of.job, of.uid, of.container_id)


def _sortable(name: Name) -> tuple[str, ...]:
    return (name.namespace, *(name.owner or ("", "")), name.pod, name.job, name.uid, name.container_id)


class HourlyCost(NamedTuple):
    """What an hour costs now, and what of that is idle."""

    cost: float
    wasted: float


def hourly_by_namespace(statement: WasteStatement) -> dict[str, HourlyCost]:
    """Of each namespace that holds anything with a price."""
    found: dict[str, list[PodWaste]] = {}
    for pod in statement.pods:
        if pod.cost is not None and pod.pod.namespace:
            found.setdefault(pod.pod.namespace, []).append(pod)
    return {name: HourlyCost(sum(p.cost_per_hour or 0 for p in pods), sum(p.wasted_per_hour or 0 for p in pods))
            for name, pods in found.items()}  # fmt: skip


# What is answered


class Source(NamedTuple):
    """What has to be said of all figures."""

    prices: str = ""
    """`example` or `file`; empty without prices."""
    simulated: bool = False


def waste_json(statement: WasteStatement, by: By, source: Source) -> bytes:
    document = _known(
        api="podgpu/v1",
        counting_since=statement.counting_since,
        currency=statement.currency or None,
        prices=source.prices or None,
        simulated=source.simulated or None,
        by=by,
        rows=[_row_json(row) for row in rows_by(statement, by)],
    )
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _row_json(row: Row) -> dict[str, Any]:
    name = row.name
    owner = None if name.owner is None else {"kind": name.owner.kind, "name": name.owner.name}
    named = {field: getattr(name, field) or None for field in ("pod", "job", "uid", "container_id")}
    return _known(namespace=name.namespace, **named, owner=owner, **_figures(row))


def _figures(row: Row) -> dict[str, float | None]:
    amounts, costs = row.amounts, [pod.cost_per_hour for pod in row.pods if pod.cost_per_hour is not None]
    return {
        "gpus": round(sum(pod.part for pod in row.pods) / WHOLE, _DIGITS),
        "idle_gpus": round(sum(pod.idle_part for pod in row.pods) / WHOLE, _DIGITS),
        "idle_hours": round(amounts.idle_hours, _DIGITS),
        "allocated_hours": round(amounts.allocated_hours, _DIGITS),
        "wasted": None if amounts.money is None else round(amounts.money, _DIGITS),
        "cost_per_hour": round(sum(costs), _DIGITS) if costs else None,
        "idle_since": None if row.idle_since is None else round(row.idle_since),
        "ended_at": None if row.ended_at is None else round(row.ended_at),
    }


def waste_csv(statement: WasteStatement, by: By, source: Source) -> bytes:
    """With a header; what is not known is an empty cell, a time is in UTC."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\r\n")
    writer.writeheader()
    for row in rows_by(statement, by):
        writer.writerow(_cells(row, statement.currency, source.prices))
    return text.getvalue().encode()


def _cells(row: Row, currency: str, prices: str) -> dict[str, object]:
    name, figures = row.name, _figures(row)
    owner = name.owner or Owner("", "")
    texts = {
        "namespace": name.namespace,
        "pod": name.pod,
        "owner_kind": owner.kind,
        "owner_name": owner.name,
        "job": name.job,
        "uid": name.uid,
        "container_id": name.container_id,
        "currency": currency,
        "prices": prices,
    }
    cells: dict[str, object] = {column: harmless(text) for column, text in texts.items()}
    cells |= {column: value for column, value in figures.items() if value is not None}
    for column in ("idle_since", "ended_at"):
        value = figures[column]
        if value is not None:
            cells[column] = datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return cells


def harmless(text: str) -> str:
    """As a cell that no spreadsheet takes for a formula: with an apostrophe before it where it might."""
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULAS) else text


def csv_name(by: By, source: Source) -> str:
    return f"podgpu-waste-by-{by}{'-SIMULATED' if source.simulated else ''}.csv"


def waste_asked(query: Mapping[str, str]) -> tuple[By, Format]:
    """Raises UsageError."""
    by, form = query.get("by", "pod"), query.get("format", "json")
    for name, value, allowed in (("by", by, get_args(By)), ("format", form, get_args(Format))):
        if value not in allowed:
            raise UsageError(f"{name}={value[:60]!r}: there are {_listed(allowed)}")
    return by, form  # type: ignore[return-value]


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _known(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
