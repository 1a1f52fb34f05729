"""Computes GPU-hours, energy, cost and waste by pod, owner, namespace or pod label.

`/api/v1/waste` returns the rows of `/api/v1/range`, sorted by waste and without unallocated GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from podgpu.charge import AMOUNTS, UNALLOCATED, Amounts, Charge, UsageAccount, Waste, sum_charges
from podgpu.errors import UsageError
from podgpu.fleet.parts import MPS_REASON, HeldPart, sum_held
from podgpu.fleet.prices import Prices
from podgpu.fleet.state import ClusterState
from podgpu.known import select_known
from podgpu.model import WorkloadOwner, group_by
from podgpu.past.accounts import account_of
from podgpu.past.bills.token_costs import TokenFigures, make_token_figures, sum_engines
from podgpu.past.bills.token_fit import NoFit, TokenFit, fit_tokens
from podgpu.past.queries import parse_is_csv, parse_range, parse_time
from podgpu.past.time_steps import DAY

Order = Literal["cost", "wasted"]
_LABEL = "label:"
_DIGITS = 4
_LEAST_HOURS = 0.005  # less is written as 0.00
# The bill shows hours, kWh and money.
_DIVISORS = {"seconds": 3600, "joules": 3_600_000, "money": 1}


class RangeQuery(NamedTuple):
    by: str = "pod"  # pod, owner, namespace, model (of LLM engines) or label:NAME
    seconds: int = DAY
    start: float | None = None  # Unix time; None: `seconds` before the end
    end: float | None = None  # Unix time; None: now
    is_csv: bool = False
    order: Order = "cost"
    # Namespaces that the user may see. The others become one row. None: all.
    visible: frozenset[str] | None = None

    @property
    def label(self) -> str:
        """Name of the pod label, as exporters and kube-state-metrics write it.

        Empty if `by` is not a label.
        """
        if not self.by.startswith(_LABEL):
            return ""
        return re.sub(r"[^a-zA-Z0-9_]", "_", self.by.removeprefix(_LABEL))

    def shows(self, account: UsageAccount) -> bool:
        return self.visible is None or account.namespace in self.visible

    def bounds(self, now: float) -> tuple[float, float]:
        end = now
        if self.end is not None:
            end = min(self.end, now)
        start = end - self.seconds
        if self.start is not None:
            start = min(self.start, end)
        return start, end


class RangeWaste(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was wasted in a time range. The parts do not overlap."""

    hours: Waste
    cost: Waste | None = None
    # Allocated hours for which no exporter counted the under-used time.
    unknown_hours: float | None = None


class RangeFigures(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums over a time range. Unknown values are omitted from the JSON."""

    gpu_hours: float = 0.0
    allocated_hours: float = 0.0  # excludes unallocated GPUs
    used_hours: float = 0.0
    used_hours_min: float = 0.0
    used_hours_max: float = 0.0
    idle_hours: float = 0.0
    unknown_hours: float = 0.0  # allocated hours for which the use is unknown
    waited_hours: float | None = None  # time spent waiting for a shared GPU; None if 0 or unknown
    mean_use: float | None = None  # mean over the time for which the use is known
    energy_kwh: float | None = None
    prompt_tokens: int | None = None  # of LLM engines; None if no engine was read
    generated_tokens: int | None = None
    tokens: TokenFigures | None = None
    cost: float | None = None
    wasted: float | None = None  # cost of the idle hours
    waste: RangeWaste | None = None
    unpriced_hours: float | None = None  # hours that `cost` does not include; None if 0
    unallocated_cost: float | None = None  # only in totals
    # Of the hours that nobody is known to have held: those in which something ran, which are not
    # wasted. None if 0.
    unheld_hours: float | None = None


class RangeRow(RangeFigures, kw_only=True):
    """A row of the bill.

    `gpus` and the fields after it are current values. They are set only if the range ends now.
    """

    unallocated: bool = False
    hidden: bool = False  # the sum of what the user may not see
    cluster: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    user: str = ""  # if the workload is neither a pod nor a job; `job` is then "user NAME"
    uid: str = ""
    container_id: str = ""
    owner: WorkloadOwner | None = None
    label: str = ""
    model: str = ""  # that the LLM engine serves; several names are separated by commas
    labels: dict[str, str] = {}  # pod labels, if the row is a pod
    methods: list[str] = []  # how the use of the GPUs was measured; empty if unknown
    gpus: float | None = None
    idle_gpus: float | None = None
    cost_per_hour: float | None = None
    idle_since: int | None = None
    unknown_because: str = ""  # reason why the idle time of some GPUs is unknown
    do: str = ""  # what to do about its waste; only in `/api/v1/waste`


class PeriodAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the answers about a period have in common."""

    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    currency: str = ""
    prices: str = ""
    source: str = ""  # with Prometheus: name of the recording rule, or `counters`
    simulated: bool = False
    in_memory: bool = False  # a restart of podgpu loses the history
    notes: list[str] = []  # messages about missing data
    recorded_from: float | None = None  # start of the oldest record, if it is later than `from`


class RangeAnswer(PeriodAnswer, kw_only=True):
    by: str
    # How the use of the GPUs was measured.
    methods: list[str] = msgspec.field(default_factory=list)
    # Names of the pod labels in the range.
    labels: list[str] = msgspec.field(default_factory=list)
    totals: RangeFigures
    rows: list[RangeRow]


def parse_range_query(query: Mapping[str, str], order: Order = "cost") -> RangeQuery:
    by = query.get("by", "pod")
    is_label = by.startswith(_LABEL) and by != _LABEL
    if by not in ("pod", "owner", "namespace", "model") and not is_label:
        raise UsageError(f"by={by[:60]!r}: use pod, owner, namespace, model or label:NAME")

    is_csv = parse_is_csv(query)
    seconds = parse_range(query.get("range", "24h"))
    start = parse_time(query, "from")
    end = parse_time(query, "to")
    if start is not None and end is not None and start >= end:
        raise UsageError(f"from={start:.15g} is not before to={end:.15g}")

    return RangeQuery(by, seconds, start, end, is_csv, order)


class StepCharge(NamedTuple):
    step: int  # number of 5 minutes since 1970, or start of the hour or day
    charge: Charge


RowName = tuple[tuple[str, Any], ...]
"""Names and values of the fields of `RangeRow` that identify a row, such as namespace and pod."""
CurrentRows = dict[RowName, dict[str, Any]]
"""Current values of the fields of rows, such as `gpus`."""


def make_range(
    query: RangeQuery,
    bounds: tuple[float, float],
    usage: Sequence[Charge],
    prices: Prices,
    current: CurrentRows,
    recorded_from: float = 0.0,
    token_steps: Iterable[StepCharge] = (),
) -> RangeAnswer:
    """Groups the usage into rows and adds it up.

    `token_steps`: charges of pods with LLM engines in 5 minutes.
    """
    fits = _fit_rows(token_steps, query)
    fit_without_steps = fit_charges(())
    start, end = bounds
    recorded_seconds = end - max(start, recorded_from)
    groups = group_by(usage, lambda charge: name_row(charge, query))

    rows = []
    # A pod that has just started has current values, but no usage yet.
    for name in dict.fromkeys((*groups, *current)):
        charges = groups.get(name, [])
        row = RangeRow(**dict(name), **current.get(name, {}))
        fit = fits.get(name, fit_without_steps)
        add_up(row, charges, prices.currency)
        add_tokens(row, charges, prices.currency, recorded_seconds, fit)
        row.methods = _list_methods(charges)
        if charges and query.by == "pod" and not row.hidden:
            account = charges[0].account
            row.labels = _read_labels(account)
            row.model = account.model

        rows.append(row)

    answer = RangeAnswer(
        from_=start,
        to=end,
        by=query.by,
        currency=prices.currency,
        prices=prices.source,
        methods=_list_methods(usage),
        labels=_list_labels(usage, query),
        totals=_make_totals(usage, prices.currency, recorded_seconds),
        rows=_sort_rows(rows, query.order),
    )
    answer.notes = list(_describe_missing(query.label, answer))
    return answer


def _make_totals(usage: Sequence[Charge], currency: str, seconds: float) -> RangeFigures:
    totals = RangeFigures()
    add_up(totals, usage, currency)
    add_tokens(totals, usage, currency, seconds)
    if totals.waste is not None and totals.waste.cost is not None:
        totals.unallocated_cost = totals.waste.cost.unallocated
    return totals


def _list_labels(usage: Iterable[Charge], query: RangeQuery) -> list[str]:
    """Returns the names of all labels that the query may show."""
    accounts = {charge.account for charge in usage}
    labels: set[str] = set()
    for account in accounts:
        if query.shows(account):
            labels.update(_read_labels(account))
    return sorted(labels)


def _sort_rows(rows: Sequence[RangeRow], order: Order) -> list[RangeRow]:
    """Returns the rows with the largest amounts first. By waste, omits unallocated GPUs."""
    if order == "wasted":
        held = [row for row in rows if not row.unallocated]
        held.sort(key=describe_row)
        held.sort(key=_wasted, reverse=True)
        return held

    return sorted(
        rows,
        key=lambda row: (row.unallocated, -(row.cost or 0.0), -row.gpu_hours, describe_row(row)),
    )


def _wasted(row: RangeRow) -> tuple[float, float]:
    """Returns what was wasted in money and hours: the sums of all parts."""
    waste = row.waste or RangeWaste(Waste())
    cost = waste.cost or Waste()
    return cost.total, waste.hours.total


def group_now(state: ClusterState, usage: Sequence[Charge], query: RangeQuery) -> CurrentRows:
    """Maps each row to its current values. A pod that has ended has 0 GPUs."""
    # If the last round has a single cluster, `part.cluster` is empty.
    clusters = {charge.cluster for charge in usage}
    only_cluster = clusters.pop() if len(clusters) == 1 else ""
    # So charges are also found without a cluster.
    known = {("", charge.account.key): charge for charge in usage}
    known |= {(charge.cluster, charge.account.key): charge for charge in usage}

    groups: dict[RowName, list[HeldPart]] = {}
    for charge in usage:
        if charge.account != UNALLOCATED:
            groups[name_row(charge, query)] = []

    for node in state.nodes:
        for part in node.held:
            # A reservation for an unknown pod has no row.
            if not part.holder.key:
                continue

            account = account_of(part, node.state.pod_labels)
            cluster = part.cluster or only_cluster
            # The recorded account may have an owner and labels that the node does not report.
            charge = known.get((cluster, account.key), Charge(account, cluster=cluster))
            name = name_row(charge, query)
            groups.setdefault(name, []).append(part)

    return {name: _add_up_now(held) for name, held in groups.items()}


def name_row(charge: Charge, query: RangeQuery) -> RowName:
    """Returns the fields that the charge has in common with the others of its row."""
    account = charge.account
    cluster = ("cluster", charge.cluster)
    if account == UNALLOCATED:
        return ("unallocated", True), cluster
    if not query.shows(account):
        return ("hidden", True), cluster
    if query.label:
        return cluster, ("label", _read_labels(account).get(query.label, ""))

    namespace = ("namespace", account.namespace)
    if query.by == "namespace":
        return cluster, namespace
    if query.by == "model":
        return cluster, namespace, ("model", account.model)

    owner = account.owner
    if query.by == "owner" and owner is not None:
        return cluster, namespace, ("owner", owner)

    return (
        cluster,
        namespace,
        ("pod", account.pod),
        ("job", account.job),
        ("uid", account.uid),
        ("container_id", account.container_id),
        ("user", account.user),
        ("owner", owner),
    )


def _read_labels(account: UsageAccount) -> dict[str, str]:
    labels: dict[str, str] = json.loads(account.labels or "{}")
    return labels


def add_up(figures: RangeFigures, usage: Sequence[Charge], currency: str) -> None:
    """Sets the sums of the usage. Costs include only usage priced in `currency`."""
    _add_hours(figures, usage)
    if currency:
        _add_cost(figures, usage, currency)


def _add_hours(figures: RangeFigures, usage: Sequence[Charge]) -> None:
    """Sets hours, energy, mean use and wasted hours."""
    held = _sum_amounts(usage, is_held=True)
    rest = _sum_amounts(usage, is_held=False)
    everything = held.plus(rest)
    figures.gpu_hours = _hours(everything.allocated_seconds)
    if everything.energy_joules:
        _set_fields(figures, "joules", everything)

    _set_fields(figures, "seconds", held)
    figures.unheld_hours = _hours(rest.unheld_seconds) or None
    figures.unknown_hours = _hours(held.allocated_seconds - held.measured_seconds)
    figures.waited_hours = figures.waited_hours or None
    if held.measured_seconds:
        figures.mean_use = round(held.busy_seconds / held.measured_seconds, _DIGITS)

    if everything.allocated_seconds:
        unallocated = rest.allocated_seconds - rest.unheld_seconds
        seconds = _make_waste(held, held.idle_seconds, held.underused_seconds, unallocated)
        hours = seconds.times(1 / _DIVISORS["seconds"])
        uncounted = _hours(held.allocated_seconds - held.counted_seconds)
        figures.waste = RangeWaste(hours.rounded(_DIGITS), unknown_hours=uncounted or None)


def _add_cost(figures: RangeFigures, usage: Sequence[Charge], currency: str) -> None:
    """Sets cost, cost of the waste, and hours without a price."""
    priced = [charge for charge in usage if charge.currency == currency]
    unpriced = [charge for charge in usage if charge.currency != currency]
    figures.unpriced_hours = _hours(sum_charges(unpriced).allocated_seconds) or None
    if not priced:
        return

    held = _sum_amounts(priced, is_held=True)
    rest = _sum_amounts(priced, is_held=False)
    _set_fields(figures, "money", held.plus(rest))
    if figures.waste is not None:
        unallocated = rest.cost - rest.unheld_cost
        cost = _make_waste(held, held.idle_cost, held.underused_cost, unallocated)
        figures.waste = replace(figures.waste, cost=cost.rounded(_DIGITS))


def _fit_rows(steps: Iterable[StepCharge], query: RangeQuery) -> dict[RowName, TokenFit | NoFit]:
    rows = group_by(steps, lambda step: name_row(step.charge, query))
    return {name: fit_charges(row_steps) for name, row_steps in rows.items()}


def fit_charges(steps: Iterable[StepCharge]) -> TokenFit | NoFit:
    """Adds up the pods of a row in each 5 minutes, and separates the two kinds of tokens."""
    sums: dict[int, Amounts] = {}
    for step, charge in steps:
        earlier = sums.get(step, Amounts())
        sums[step] = earlier.plus(charge.amounts)
    return fit_tokens(sums.values())


def add_tokens(
    figures: RangeFigures,
    usage: Sequence[Charge],
    currency: str,
    seconds: float,
    fit: TokenFit | NoFit | None = None,
) -> None:
    """Sets the tokens of LLM engines, and what they cost. Does nothing without an engine.

    `seconds`: recorded time of the range. `fit`: None if it was not computed.
    """
    engines = sum_engines(usage, currency)
    if engines is None:
        return
    figures.prompt_tokens = round(engines.amounts.prompt_tokens)
    figures.generated_tokens = round(engines.amounts.generated_tokens)
    figures.tokens = make_token_figures(engines, currency, seconds, fit)


def _sum_amounts(usage: Iterable[Charge], is_held: bool) -> Amounts:
    selected = []
    for charge in usage:
        if (charge.account != UNALLOCATED) == is_held:
            selected.append(charge)
    return sum_charges(selected)


def _make_waste(held: Amounts, idle: float, underused: float, unallocated: float) -> Waste:
    """Returns these parts, or None for those that are unknown.

    Without holders, their parts are unknown. So is under-used time if no exporter counts it.
    """
    is_counted = held.counted_seconds > 0
    return Waste(
        idle=idle if held.allocated_seconds else None,
        underused=underused if is_counted else None,
        unallocated=unallocated or None,
    )


def _set_fields(figures: RangeFigures, unit: str, amounts: Amounts) -> None:
    """Sets the fields of the amounts with this unit: in hours, kWh or money."""
    for amount in AMOUNTS:
        if amount.key and amount.unit == unit:
            value = getattr(amounts, amount.field) / _DIVISORS[unit]
            setattr(figures, amount.key, round(value, _DIGITS))


def _list_methods(usage: Iterable[Charge]) -> list[str]:
    methods: set[str] = set()
    for charge in usage:
        methods.update(charge.account.methods.split())
    return sorted(methods)


def _hours(seconds: float) -> float:
    return round(seconds / _DIVISORS["seconds"], _DIGITS)


def _add_up_now(held: Sequence[HeldPart]) -> dict[str, Any]:
    now = sum_held(held).rounded()
    idle_since = None
    idle_starts = select_known(part.idle_since for part in held)
    # A row is idle if all its parts are. It became idle with the last of them.
    if held and len(idle_starts) == len(held):
        idle_since = round(max(idle_starts))

    # The largest is one that is not empty, if there is any.
    reasons = [part.unknown_because for part in held]

    return {
        "gpus": now.allocated,
        "idle_gpus": now.idle,
        "cost_per_hour": now.cost_per_hour,
        "idle_since": idle_since,
        "unknown_because": max(reasons, default=""),
    }


def _describe_missing(label: str, answer: RangeAnswer) -> Iterable[str]:
    is_shown = any(row.label for row in answer.rows)
    if label and not is_shown:
        yield (
            f"no pod has the label {label[:60]!r}: check its name, and that the exporters run with"
            " --kubernetes-enable-pod-labels (with --prometheus: that kube-state-metrics exports"
            " it in kube_pod_labels)"
        )

    unpriced = answer.totals.unpriced_hours or 0.0
    if not answer.currency:
        yield "there are no prices: start podgpu with --prices"
    elif unpriced >= _LEAST_HOURS:
        yield (
            f"{unpriced:,.2f} GPU-hours have no price in {answer.currency} and are not included in"
            " the cost"
        )

    unheld = answer.totals.unheld_hours or 0.0
    if unheld >= _LEAST_HOURS:
        yield (
            f"{unheld:,.2f} unallocated GPU-hours were in use, although nobody"
            " is known to hold these GPUs: they cost money, but are not counted as wasted"
        )
    if "mps" in answer.methods and answer.totals.unknown_hours:
        yield (
            f"the use of {answer.totals.unknown_hours:,} GPU-hours is unknown, because containers"
            f" share GPUs by MPS ({MPS_REASON}): these hours count neither as used, nor as idle or"
            " wasted"
        )


def describe_owner(owner: WorkloadOwner | None) -> str:
    if owner is None:
        return ""
    return owner.text


def describe_row(row: RangeRow, nameless: str = "(none)") -> str:
    if row.unallocated:
        return _join_names(row.cluster, "unallocated")
    if row.hidden:
        return _join_names(row.cluster, "other namespaces")

    job = row.job
    if job and not row.user:
        job = f"job {job}"

    owner = ""
    model = ""
    if not row.pod:
        owner = describe_owner(row.owner)
        model = row.model

    place = _join_names(row.cluster, row.namespace, owner, row.pod, job)
    container = row.uid or row.container_id
    return _join_names(place, container, row.label, model) or nameless


def _join_names(*names: str) -> str:
    return "/".join(filter(None, names))
