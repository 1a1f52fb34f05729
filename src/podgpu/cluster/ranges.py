"""GPU-hours, energy and cost in a range of time, by pod, owner, namespace or pod label (`/api/v1/range`)."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from podgpu.cluster.prices import describe_unpriced
from podgpu.cluster.state import ClusterState, list_models
from podgpu.cluster.waste import escape_cell
from podgpu.errors import UsageError
from podgpu.history.answers import RANGES
from podgpu.history.queries import UsageSum
from podgpu.history.store import DAY, UNALLOCATED, Amounts, UsageAccount
from podgpu.model import WorkloadOwner

LONG_RANGES = RANGES | {"30d": 30 * DAY}
_LABEL = "label:"
_DIGITS = 4
_JOULES_PER_KWH = 3_600_000


class RangeQuery(NamedTuple):
    by: str = "pod"  # pod, owner, namespace or label:NAME
    seconds: int = DAY
    start: float | None = None  # Unix times; None for the last `seconds`
    end: float | None = None
    is_csv: bool = False

    @property
    def label(self) -> str:
        """Name of the pod label, as exporters and kube-state-metrics write it. Empty if `by` is not a label."""
        return re.sub(r"[^a-zA-Z0-9_]", "_", self.by.removeprefix(_LABEL)) if self.by.startswith(_LABEL) else ""

    def bounds(self, now: float) -> tuple[float, float]:
        end = now if self.end is None else min(self.end, now)
        return end - self.seconds if self.start is None else min(self.start, end), end


class RangeFigures(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums over a range. Unknown members are omitted from the JSON."""

    gpu_hours: float
    used_hours: float
    idle_hours: float
    unknown_hours: float = 0.0  # the part of `gpu_hours` for which `used_hours` is not known
    mean_use: float | None = None  # of the time for which the use is known
    energy_kwh: float | None = None
    cost: float | None = None
    wasted: float | None = None


class RangeRow(RangeFigures, kw_only=True):
    unallocated: bool = False
    namespace: str = ""
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""
    owner: WorkloadOwner | None = None
    label: str = ""


class RangeTotals(RangeFigures, kw_only=True):
    """`gpu_hours` and `cost` include unallocated GPUs."""

    allocated_hours: float
    unallocated_cost: float | None = None


class RangeAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    by: str
    currency: str = ""
    prices: str = ""
    simulated: bool = False
    methods: list[str] = []  # how the use is measured now
    notes: list[str] = []  # what is missing
    totals: RangeTotals
    rows: list[RangeRow]


ReadRange = Callable[[RangeQuery, ClusterState], Awaitable[RangeAnswer]]


def parse_range_query(query: Mapping[str, str]) -> RangeQuery:
    """Raises UsageError."""
    by, form, name = query.get("by", "pod"), query.get("format", "json"), query.get("range", "24h")
    if by not in ("pod", "owner", "namespace") and not (by.startswith(_LABEL) and by != _LABEL):
        raise UsageError(f"by={by[:60]!r}: use pod, owner, namespace or label:NAME")
    if form not in ("json", "csv"):
        raise UsageError(f"format={form[:60]!r}: use json or csv")
    if name not in LONG_RANGES:
        raise UsageError(f"range={name[:60]!r}: use one of {', '.join(LONG_RANGES)}, or from= and to= as Unix times")
    start, end = (_parse_time(query, name) for name in ("from", "to"))
    if start is not None and end is not None and start >= end:
        raise UsageError(f"from={start:g} is not before to={end:g}")
    return RangeQuery(by, LONG_RANGES[name], start, end, form == "csv")


def _parse_time(query: Mapping[str, str], name: str) -> float | None:
    if name not in query:
        return None
    try:
        time = float(query[name])
    except ValueError:
        time = math.nan
    if not 0 <= time < 1e11:
        raise UsageError(f"{name}={query[name][:60]!r}: write a Unix time in seconds")
    return time


def make_range(
    query: RangeQuery,
    state: ClusterState,
    start: float,
    end: float,
    usage: Iterable[UsageSum],
    notes: Sequence[str] = (),
) -> RangeAnswer:
    """Adds up the usage in rows, the most expensive first. Prices and notes are those of `state`."""
    currency = state.prices.currency
    groups: dict[tuple[tuple[str, Any], ...], list[UsageSum]] = defaultdict(list)
    for one in usage:
        groups[_name_row(one.account, query)].append(one)
    rows = [RangeRow(**dict(name), **_add_up(group, currency)) for name, group in groups.items()]
    rows.sort(key=lambda row: (row.unallocated, -(row.cost or 0.0), -row.gpu_hours, describe_row(row)))
    everything = [one for group in groups.values() for one in group]
    allocated = [one for one in everything if one.account != UNALLOCATED]
    rest = _add_up([one for one in everything if one.account == UNALLOCATED], currency)
    totals = _add_up(allocated, currency)
    totals |= {
        "allocated_hours": totals["gpu_hours"],
        "unallocated_cost": rest["cost"],
        **{name: _plus(totals[name], rest[name]) for name in ("gpu_hours", "energy_kwh", "cost")},
    }
    return RangeAnswer(
        from_=start,
        to=end,
        by=query.by,
        currency=currency,
        prices=state.prices.source,
        simulated=state.simulated,
        methods=sorted(
            {s.usage.method for n in state.nodes for g in n.gpus for s in (g, *g.instances) if s.usage} - {""}
        ),
        notes=[*notes, *_describe_missing(query.label, state, everything, rows)],
        totals=RangeTotals(**totals),
        rows=rows,
    )


def _name_row(account: UsageAccount, query: RangeQuery) -> tuple[tuple[str, Any], ...]:
    """Returns the members of `RangeRow` that name the row."""
    if account == UNALLOCATED:
        return (("unallocated", True),)
    if query.label:
        labels = json.loads(account.labels) if account.labels else {}
        return (("label", labels.get(query.label, "")),)
    namespace = ("namespace", account.namespace)
    if query.by == "namespace":
        return (namespace,)
    owner = WorkloadOwner(account.owner_kind, account.owner_name) if account.owner_name else None
    if query.by == "owner" and owner is not None:
        return namespace, ("owner", owner)
    return (*zip(UsageAccount._fields[:5], account[:5], strict=True), ("owner", owner))


def _add_up(usage: Sequence[UsageSum], currency: str) -> dict[str, Any]:
    """Returns the members of `RangeFigures`."""
    total = Amounts(*(math.fsum(column) for column in zip(Amounts(), *(one.amounts for one in usage), strict=True)))
    priced = [one.amounts for one in usage if currency and one.currency == currency]
    return {
        "gpu_hours": round(total.allocated_seconds / 3600, _DIGITS),
        "used_hours": round(total.busy_seconds / 3600, _DIGITS),
        "idle_hours": round(total.idle_seconds / 3600, _DIGITS),
        "unknown_hours": round(
            sum(one.amounts.allocated_seconds - one.amounts.measured_seconds for one in usage if any(one.account))
            / 3600,
            _DIGITS,
        ),
        "mean_use": round(total.busy_seconds / total.measured_seconds, _DIGITS) if total.measured_seconds else None,
        "energy_kwh": round(total.energy_joules / _JOULES_PER_KWH, _DIGITS) if total.energy_joules else None,
        "cost": round(math.fsum(amounts.cost for amounts in priced), _DIGITS) if priced else None,
        "wasted": round(math.fsum(amounts.idle_cost for amounts in priced), _DIGITS) if priced else None,
    }


def _plus(one: float | None, other: float | None) -> float | None:
    return round((one or 0.0) + (other or 0.0), _DIGITS) if one is not None or other is not None else None


def _describe_missing(
    label: str, state: ClusterState, usage: Sequence[UsageSum], rows: Sequence[RangeRow]
) -> Iterable[str]:
    currency = state.prices.currency
    if label and not any(row.label for row in rows):
        yield (
            f"no pod has the label {label[:60]!r}: check its name, and that the exporters run with"
            " --kubernetes-enable-pod-labels (with --prometheus: that kube-state-metrics exports it in kube_pod_labels)"
        )
    if not currency:
        yield "there are no prices: give podgpu the option --prices"
        return
    hours = sum(one.amounts.allocated_seconds for one in usage if one.currency != currency) / 3600
    if hours >= 10**-_DIGITS:
        yield f"{hours:.4g} GPU-hours have no price in {currency} and are not part of the cost"
        yield from describe_unpriced(list_models(state.nodes), state.prices)


def describe_row(row: RangeRow) -> str:
    if row.unallocated:
        return "unallocated"
    owner = f"{row.owner.kind}/{row.owner.name}" if row.owner and not row.pod else ""
    names = (row.namespace, owner, row.pod, row.job, row.uid or row.container_id, row.label)
    return "/".join(filter(None, names)) or "(none)"


def utc_text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def encode_range_csv(answer: RangeAnswer) -> bytes:
    """Writes CSV with the column names of FOCUS, and own columns that begin with `x_`. Unknown values are empty."""
    text = io.StringIO()
    no_row = RangeRow(gpu_hours=0.0, used_hours=0.0, idle_hours=0.0)
    writer = csv.DictWriter(text, list(_make_cells(answer, no_row)), lineterminator="\r\n")
    writer.writeheader()
    for row in answer.rows:
        cells = _make_cells(answer, row)
        writer.writerow({name: escape_cell(v) if isinstance(v, str) else v for name, v in cells.items()})
    return text.getvalue().encode()


def _make_cells(answer: RangeAnswer, row: RangeRow) -> dict[str, Any]:
    owner = "" if row.owner is None else f"{row.owner.kind}/{row.owner.name}"
    tags = {"namespace": row.namespace, "owner": owner, answer.by.removeprefix(_LABEL): row.label}
    return {
        **dict.fromkeys(("BilledCost", "EffectiveCost", "ListCost", "ContractedCost"), row.cost),
        "BillingCurrency": answer.currency,
        "ChargePeriodStart": utc_text(answer.from_),
        "ChargePeriodEnd": utc_text(answer.to),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"GPU hours: {describe_row(row)}",
        **dict.fromkeys(("PricingQuantity", "ConsumedQuantity"), row.gpu_hours),
        **dict.fromkeys(("PricingUnit", "ConsumedUnit"), "GPU-Hours"),
        "ServiceCategory": "Compute",
        "ServiceName": "GPU",
        "Tags": json.dumps({name: value for name, value in tags.items() if value}),
        "x_Namespace": row.namespace,
        "x_Pod": row.pod or row.job or row.uid or row.container_id,
        "x_Owner": owner,
        "x_Label": row.label,
        "x_UsedGpuHours": row.used_hours,
        "x_IdleGpuHours": row.idle_hours,
        "x_UnknownGpuHours": row.unknown_hours,
        "x_MeanUse": row.mean_use,
        "x_EnergyKwh": row.energy_kwh,
        "x_WastedCost": row.wasted,
        "x_UsageMethod": " ".join(answer.methods),
    }
