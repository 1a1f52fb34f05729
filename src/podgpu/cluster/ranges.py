"""Computes GPU-hours, energy, cost and waste by pod, owner, namespace or pod label, and summaries of pods.

`/api/v1/waste` returns the rows of `/api/v1/range`, sorted by waste and without unallocated GPUs.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from sqlite3 import Connection
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from podgpu.cluster.parts import MPS_REASON, HeldPart, device_utilization, sum_held
from podgpu.cluster.past import read_past
from podgpu.cluster.prices import Prices
from podgpu.cluster.state import ClusterState, describe_unpriced
from podgpu.errors import UsageError, utc_text
from podgpu.history.answers import (
    HolderSpan,
    Mark,
    PodHistory,
    UsageSum,
    make_pod_history,
    parse_range,
    parse_time,
    read_pod,
    read_range,
    read_usage_start,
)
from podgpu.history.events import IDLE, EventQuery, EventsAnswer, read_events
from podgpu.history.recorder import HistoryRecorder
from podgpu.history.store import COARSE, DAY, FINE, UNALLOCATED, Amounts, UsageAccount
from podgpu.metrics.fields import DRAM_ACTIVE, TENSOR_ACTIVE
from podgpu.model import DeviceState, WorkloadOwner, group_by_key

Order = Literal["cost", "wasted"]
_LABEL = "label:"
_DIGITS = 4
_JOULES_PER_KWH = 3_600_000
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
_LONGEST = 8 * DAY  # samples are stored for this many seconds
_BRIEF = 60.0  # seconds; pods that hold a GPU together for a shorter time do not share it
_SHORTEST = 900.0  # seconds; a pod that ran for a shorter time gets no hint
_THROTTLING = ("thermal", "power_brake")
_MIG_PARTS = ((1, 1), (2, 2), (3, 4), (4, 4))  # each MIG profile: sevenths of compute, eighths of memory
_MIG_MODELS = ("A100", "H100", "H200", "GH200", "B200")
_MAX_SHARE = 0.6  # a pod that needs a larger fraction of a GPU gets no hint
_GIB = 1024**3
# Returns the times when a pod held a GPU. If the node was gone at the end, the time includes the outage.
_SPANS = """
SELECT span.started, iif(gone.gpu IS NULL, span.ended, gone.ended), owner_kind, owner_name
FROM span JOIN account ON account.id = span.account
LEFT JOIN span AS gone ON gone.gpu = span.gpu AND gone.name = 'node_gone' AND gone.started = span.ended
WHERE namespace = ? AND pod = ? ORDER BY span.started"""


class RangeQuery(NamedTuple):
    by: str = "pod"  # pod, owner, namespace or label:NAME
    seconds: int = DAY
    start: float | None = None  # Unix time; None: `seconds` before the end
    end: float | None = None  # Unix time; None: now
    is_csv: bool = False
    order: Order = "cost"

    @property
    def label(self) -> str:
        """Name of the pod label, as exporters and kube-state-metrics write it. Empty if `by` is not a label."""
        return re.sub(r"[^a-zA-Z0-9_]", "_", self.by.removeprefix(_LABEL)) if self.by.startswith(_LABEL) else ""

    def bounds(self, now: float) -> tuple[float, float]:
        end = now if self.end is None else min(self.end, now)
        return end - self.seconds if self.start is None else min(self.start, end), end


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
    cost: float | None = None
    wasted: float | None = None
    unpriced_hours: float | None = None  # part of `gpu_hours` that `cost` does not include; None if 0


class RangeRow(RangeFigures, kw_only=True):
    """A row. `gpus` and the fields after it are current values. They are set only if the range ends now."""

    unallocated: bool = False
    cluster: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    uid: str = ""
    container_id: str = ""
    owner: WorkloadOwner | None = None
    label: str = ""
    labels: dict[str, str] = {}  # pod labels, if the row is a pod
    methods: list[str] = []  # how the use of the GPUs was measured; empty if unknown
    gpus: float | None = None
    idle_gpus: float | None = None
    cost_per_hour: float | None = None
    idle_since: int | None = None
    unknown_because: str = ""  # reason why the idle time of some GPUs is unknown


class RangeTotals(RangeFigures, kw_only=True):
    unallocated_cost: float | None = None


class RangeAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    by: str
    currency: str = ""
    prices: str = ""
    source: str = ""  # with Prometheus: name of the recording rule, or `counters`
    simulated: bool = False
    recorded_from: float | None = None  # start of the oldest record, if it is later than `from`
    methods: list[str] = []  # how the use of the GPUs was measured
    labels: list[str] = []  # names of the pod labels in the range
    notes: list[str] = []  # messages about missing data
    totals: RangeTotals
    rows: list[RangeRow]


class UsageAnswers(Protocol):
    """Provides `/api/v1/range` and `/api/v1/waste`."""

    async def range(self, query: RangeQuery) -> RangeAnswer:
        """Raises SourceError if the usage cannot be read."""


def parse_range_query(query: Mapping[str, str], order: Order = "cost") -> RangeQuery:
    by, form, name = query.get("by", "pod"), query.get("format", "json"), query.get("range", "24h")
    if by not in ("pod", "owner", "namespace") and not (by.startswith(_LABEL) and by != _LABEL):
        raise UsageError(f"by={by[:60]!r}: use pod, owner, namespace or label:NAME")
    if form not in ("json", "csv"):
        raise UsageError(f"format={form[:60]!r}: use json or csv")
    seconds = parse_range(name)
    start, end = (parse_time(query, name) for name in ("from", "to"))
    if start is not None and end is not None and start >= end:
        raise UsageError(f"from={start:.15g} is not before to={end:.15g}")
    return RangeQuery(by, seconds, start, end, form == "csv", order)


RowName = tuple[tuple[str, Any], ...]
"""Names and values of the fields of `RangeRow` that identify a row, such as namespace and pod."""


def make_range(
    query: RangeQuery,
    bounds: tuple[float, float],
    usage: Sequence[UsageSum],
    prices: Prices,
    notes: Sequence[str] = (),
    simulated: bool = False,
    now: Mapping[RowName, Mapping[str, Any]] | None = None,
    source: str = "",
) -> RangeAnswer:
    """Groups the usage into rows and adds it up. `now`: current values by row."""
    groups = group_by_key((name_row(one, query), one) for one in usage)
    methods, is_pod = sorted({method for one in usage for method in one.methods}), query.by == "pod"
    rows = [
        RangeRow(
            **{
                **dict(name),
                "methods": sorted({method for one in groups.get(name, ()) for method in one.methods}),
                "labels": next((json.loads(o.account.labels or "{}") for o in groups.get(name, ()) if is_pod), {}),
                **add_up(groups.get(name, ()), prices.currency),
                **(now or {}).get(name, {}),
            }
        )
        for name in dict.fromkeys((*groups, *(now or ())))
    ]
    if query.order == "wasted":
        rows = [row for row in rows if not row.unallocated]
        rows.sort(key=lambda row: (-(row.wasted or 0.0), -row.idle_hours, describe_row(row)))
    else:
        rows.sort(key=lambda row: (row.unallocated, -(row.cost or 0.0), -row.gpu_hours, describe_row(row)))
    totals = RangeTotals(
        **add_up(usage, prices.currency),
        unallocated_cost=add_up([one for one in usage if one.account == UNALLOCATED], prices.currency)["cost"],
    )
    missing = list(_describe_missing(query.label, prices, usage, rows))
    if "mps" in methods and totals.unknown_hours:
        missing.append(
            f"the use of {totals.unknown_hours:,} GPU-hours is unknown, because containers share GPUs by MPS"
            f" ({MPS_REASON}): these hours count neither as used, nor as idle or wasted"
        )
    return RangeAnswer(
        from_=bounds[0],
        to=bounds[1],
        by=query.by,
        currency=prices.currency,
        prices=prices.source,
        source=source,
        simulated=simulated,
        methods=methods,
        labels=sorted({name for text in {one.account.labels for one in usage} if text for name in json.loads(text)}),
        notes=[*notes, *missing],
        totals=totals,
        rows=rows,
    )


def group_now(state: ClusterState, usage: Sequence[UsageSum], query: RangeQuery) -> dict[RowName, dict[str, Any]]:
    """Maps each row to its current values. A pod that has ended has 0 GPUs."""
    clusters = {one.cluster for one in usage}
    cluster = clusters.pop() if len(clusters) == 1 else ""  # with a single cluster, `part.cluster` is empty
    known = {("", one.account[:5]): one for one in usage}  # if only the range has several clusters, not the last round
    known |= {(one.cluster, one.account[:5]): one for one in usage}
    groups: dict[RowName, list[HeldPart]] = {name_row(one, query): [] for one in usage if one.account != UNALLOCATED}
    parts = [(part, node.state.pod_labels) for node in state.nodes for part in node.held]
    for part, pod_labels in parts:
        if part.holder.key:  # a reservation for an unknown pod has no row
            account = account_of(part, pod_labels)
            name = part.cluster or cluster
            one = known.get((name, account[:5])) or UsageSum(account, "", Amounts(), name)
            groups.setdefault(name_row(one, query), []).append(part)
    return {name: _add_up_now(held) for name, held in groups.items()}


def account_of(part: HeldPart, pod_labels: Mapping[str, Mapping[str, str]] | None = None) -> UsageAccount:
    holder, owner = part.holder, part.owner
    labels = pod_labels.get(f"{holder.namespace}/{holder.pod}") if pod_labels else None
    return UsageAccount(
        namespace=holder.namespace,
        pod=holder.pod,
        job=holder.job_or_user,
        uid="" if holder.pod else holder.uid,
        container_id="" if holder.pod else holder.container_id,
        owner_kind=owner.kind if owner else "",
        owner_name=owner.name if owner else "",
        labels=json.dumps(labels, sort_keys=True) if labels else "",
        methods=part.device.usage.method if part.device.usage else "",
    )


def name_row(one: UsageSum, query: RangeQuery) -> RowName:
    account, cluster = one.account, ("cluster", one.cluster)
    if account == UNALLOCATED:
        return ("unallocated", True), cluster
    if query.label:
        labels = json.loads(account.labels) if account.labels else {}
        return cluster, ("label", labels.get(query.label, ""))
    namespace = ("namespace", account.namespace)
    if query.by == "namespace":
        return cluster, namespace
    owner = WorkloadOwner(account.owner_kind, account.owner_name) if account.owner_name else None
    if query.by == "owner" and owner is not None:
        return cluster, namespace, ("owner", owner)
    return (cluster, *zip(UsageAccount._fields[:5], account[:5], strict=True), ("owner", owner))


def add_up(usage: Sequence[UsageSum], currency: str) -> dict[str, Any]:
    """Returns the sums of the usage as fields of `RangeFigures`. Costs include only usage priced in `currency`."""
    everything = _sum_amounts(usage)
    held = _sum_amounts([one for one in usage if one.account != UNALLOCATED])
    priced = [one for one in usage if currency and one.currency == currency]
    cost = _sum_amounts(priced)
    return {
        "gpu_hours": _hours(everything.allocated_seconds),
        "allocated_hours": _hours(held.allocated_seconds),
        "used_hours": _hours(held.busy_seconds),
        "used_hours_min": _hours(held.busy_min_seconds),
        "used_hours_max": _hours(held.busy_max_seconds),
        "idle_hours": _hours(held.idle_seconds),
        "unknown_hours": _hours(held.allocated_seconds - held.measured_seconds),
        "waited_hours": _hours(held.waited_seconds) or None,
        "mean_use": round(held.busy_seconds / held.measured_seconds, _DIGITS) if held.measured_seconds else None,
        "energy_kwh": round(everything.energy_joules / _JOULES_PER_KWH, _DIGITS) if everything.energy_joules else None,
        "cost": round(cost.cost, _DIGITS) if priced else None,
        "wasted": round(cost.idle_cost, _DIGITS) if priced else None,
        "unpriced_hours": _hours(everything.allocated_seconds - cost.allocated_seconds) or None if currency else None,
    }


def _sum_amounts(usage: Sequence[UsageSum]) -> Amounts:
    return Amounts(*(math.fsum(column) for column in zip(Amounts(), *(one.amounts for one in usage), strict=True)))


def _hours(seconds: float) -> float:
    return round(seconds / 3600, _DIGITS)


def _add_up_now(held: Sequence[HeldPart]) -> dict[str, Any]:
    now = sum_held(held).rounded()
    since = [part.idle_since for part in held if part.idle_since is not None]
    return {
        "gpus": now.allocated,
        "idle_gpus": now.idle,
        "cost_per_hour": now.cost_per_hour,
        "idle_since": round(max(since)) if since and len(since) == len(held) else None,
        "unknown_because": max((part.unknown_because for part in held), default=""),
    }


def _describe_missing(label: str, prices: Prices, usage: Sequence[UsageSum], rows: Sequence[RangeRow]) -> Iterable[str]:
    if label and not any(row.label for row in rows):
        yield (
            f"no pod has the label {label[:60]!r}: check its name, and that the exporters run with"
            " --kubernetes-enable-pod-labels (with --prometheus: that kube-state-metrics exports it in kube_pod_labels)"
        )
    if not prices.currency:
        yield "there are no prices: start podgpu with --prices"
        return
    hours = sum(one.amounts.allocated_seconds for one in usage if one.currency != prices.currency) / 3600
    if hours >= 10**-_DIGITS:
        yield f"{hours:,.2f} GPU-hours have no price in {prices.currency} and are not included in the cost"


def describe_row(row: RangeRow, nameless: str = "(none)") -> str:
    if row.unallocated:
        return "/".join(filter(None, (row.cluster, "unallocated")))
    owner = f"{row.owner.kind}/{row.owner.name}" if row.owner and not row.pod else ""
    job = f"job {row.job}" if row.job and not row.job.startswith("user ") else row.job
    names = (row.cluster, row.namespace, owner, row.pod, job, row.uid or row.container_id, row.label)
    return "/".join(filter(None, names)) or nameless


def encode_range_csv(answer: RangeAnswer) -> bytes:
    """Writes CSV with the columns of FOCUS (a format for bills). Other columns begin with `x_`. Unknown is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_make_cells(answer, RangeRow())), lineterminator="\r\n")
    writer.writeheader()
    for row in answer.rows:
        cells = _make_cells(answer, row)
        writer.writerow({name: escape_cell(v) if isinstance(v, str) else v for name, v in cells.items()})
    return text.getvalue().encode()


def escape_cell(text: str) -> str:
    """Prevents spreadsheets from running the cell as a formula."""
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA_STARTS) else text


def _make_cells(answer: RangeAnswer, row: RangeRow) -> dict[str, Any]:
    owner = "" if row.owner is None else f"{row.owner.kind}/{row.owner.name}"
    tags = {"cluster": row.cluster, "namespace": row.namespace, "owner": owner}
    if answer.by.startswith(_LABEL):
        tags[answer.by.removeprefix(_LABEL)] = row.label
    return {
        **dict.fromkeys(("BilledCost", "EffectiveCost", "ListCost", "ContractedCost"), row.cost),
        "BillingCurrency": answer.currency,
        **dict.fromkeys(("BillingPeriodStart", "ChargePeriodStart"), utc_text(answer.from_)),
        **dict.fromkeys(("BillingPeriodEnd", "ChargePeriodEnd"), utc_text(answer.to)),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"GPU hours: {describe_row(row)}",
        **dict.fromkeys(("PricingQuantity", "ConsumedQuantity"), row.gpu_hours),
        **dict.fromkeys(("PricingUnit", "ConsumedUnit"), "GPU-Hours"),
        "ServiceCategory": "Compute",
        "ServiceName": "GPU",
        "Tags": json.dumps({name: value for name, value in tags.items() if value}),
        **dict.fromkeys(("SubAccountId", "SubAccountName"), row.cluster),
        "x_Namespace": row.namespace,
        "x_Pod": row.pod or row.job or row.uid or row.container_id,
        "x_Owner": owner,
        "x_Label": row.label,
        "x_UsedGpuHours": row.used_hours,
        "x_UsedGpuHoursMin": row.used_hours_min,
        "x_UsedGpuHoursMax": row.used_hours_max,
        "x_IdleGpuHours": row.idle_hours,
        "x_UnknownGpuHours": row.unknown_hours,
        "x_WaitedGpuHours": row.waited_hours,
        "x_MeanUse": row.mean_use,
        "x_EnergyKwh": row.energy_kwh,
        "x_WastedCost": row.wasted,
        "x_UsageMethod": " ".join(row.methods),
    }


# The history in SQLite


class JobSummary(RangeFigures, kw_only=True):
    """Response of `/api/v1/summary`. Peaks are maxima of means over `step_seconds`. Unknown values are omitted."""

    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    namespace: str
    pod: str
    owner: WorkloadOwner | None = None
    from_: float = msgspec.field(name="from")
    to: float | None = None  # None while the pod holds a GPU
    duration_seconds: float  # time for which the pod held a GPU
    gpus: int = 0
    nodes: tuple[str, ...] = ()
    peak_use: float | None = None
    p95_use: float | None = None
    peak_memory_bytes: float | None = None
    step_seconds: int = 0
    shared: bool = False  # another pod used one of its GPUs meanwhile, so the next five values are unknown
    mean_power_watts: float | None = None  # of one GPU
    power_limit_watts: float | None = None  # mean of its GPUs, now
    current_use: float | None = None  # mean of its GPUs, now
    tensor_active_ratio: float | None = None  # mean of its GPUs, now
    dram_active_ratio: float | None = None  # mean of its GPUs, now
    wait_seconds: float = 0.0
    throttled_seconds: float = 0.0
    errors: int = 0
    currency: str = ""
    hint: str = ""


class RecordedUsage:
    """Implements `UsageAnswers` with the history in SQLite, and provides `/api/v1/events` and `/api/v1/summary`.

    All methods raise SourceError if the history cannot be read.
    """

    def __init__(self, recorder: HistoryRecorder, read_state: Callable[[], ClusterState]) -> None:
        self._recorder = recorder
        self._read_state = read_state

    async def range(self, query: RangeQuery) -> RangeAnswer:
        return await self._recorder.ask(lambda db, now: read_range_answer(db, query, now, self._read_state()))

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await self._recorder.ask(lambda db, now: read_events(db, query, now))

    async def past(self, at: float) -> ClusterState:
        return await self._recorder.ask(lambda db, _: read_past(db, at, self._read_state()))

    async def summary(self, namespace: str, pod: str) -> JobSummary | None:
        """Returns None if there is no record of the pod."""
        return await self._recorder.ask(lambda db, now: read_summary(db, namespace, pod, now, self._read_state()))


def read_range_answer(db: Connection, query: RangeQuery, now: float, state: ClusterState) -> RangeAnswer:
    start, end, sums = read_range(db, *query.bounds(now))
    since = read_usage_start(db)
    notes, recorded_from = [], None
    if since is None or start + COARSE < since:
        recorded_from = now if since is None else float(since)
        notes.append(f"there is no record before {utc_text(recorded_from)}")
    notes.extend(describe_unpriced(state.nodes, state.prices))
    now_by_row = None if query.end is not None else group_now(state, sums, query)
    answer = make_range(query, (start, min(end, now)), sums, state.prices, notes, state.simulated, now_by_row)
    answer.recorded_from = recorded_from
    return answer


def read_summary(db: Connection, namespace: str, pod: str, now: float, state: ClusterState) -> JobSummary | None:
    spans = db.execute(_SPANS, (namespace, pod)).fetchall()
    if not spans:
        return None
    started, _, owner_kind, owner_name = spans[0]
    end = duration = 0.0
    for span_started, span_ended, *_ in spans:
        until = max(end, span_ended or now)
        duration += until - max(end, span_started)
        end = until
    start = max(started, end - _LONGEST)
    gpus = read_pod(db, namespace, pod, start - FINE, end + FINE)
    history = make_pod_history(namespace, pod, gpus)
    _, _, sums = read_range(db, started, end)
    own = [one for one in sums if one.account[:2] == (namespace, pod)]
    currency = state.prices.currency
    summary = JobSummary(
        **add_up(own, currency),
        namespace=namespace,
        pod=pod,
        owner=WorkloadOwner(owner_kind, owner_name) if owner_name else None,
        from_=started,
        to=None if any(span_ended is None for _, span_ended, *_ in spans) else end,
        duration_seconds=duration,
        wait_seconds=round(sum(one.amounts.waited_seconds for one in own), 1),
        currency=currency,
    )
    if history is not None:
        _add_history(summary, history, end, state)
        summary.shared = any(_is_shared(gpu.holders, namespace, pod) for gpu in gpus)
        if not summary.shared:
            _add_activity(summary, history, state)
    return summary


def _add_history(summary: JobSummary, history: PodHistory, end: float, state: ClusterState) -> None:
    # The mean of an unfinished step still changes, so it counts only if a device has no other.
    finished = None if summary.to is not None else int((end - history.from_) // history.step_seconds)

    def read(name: str) -> list[list[float]]:
        columns = [device.series[name] for device in history.devices]
        return [_known(column[:finished]) or _known(column) for column in columns]

    use, memory = read("utilization_ratio"), read("memory_used_bytes")
    summary.gpus = len(history.devices)
    summary.nodes = tuple(sorted({device.node for device in history.devices}))
    known = [value for values in use for value in values]
    summary.peak_use = max(known, default=None)
    # Here, use is relative to the whole GPU or MIG instance. In /api/v1/range, it is relative to the pod's share.
    summary.mean_use = round(sum(known) / len(known), 4) if known else summary.mean_use
    p95 = [_p95(values) for values in use if values]
    summary.p95_use = max(p95, default=None)
    summary.peak_memory_bytes = peak = max((value for values in memory for value in values), default=None)
    summary.step_seconds = history.step_seconds
    throttled = (mark for mark in history.marks if mark.condition in _THROTTLING)
    summary.throttled_seconds = sum(_overlap(mark, history, end) for mark in throttled)
    summary.errors = sum(mark.condition not in (*_THROTTLING, IDLE) for mark in history.marks)
    held_whole = summary.allocated_hours * 3600 > 0.9 * summary.duration_seconds * summary.gpus
    if summary.duration_seconds >= _SHORTEST and held_whole:
        gpus = {gpu.uuid: gpu for node in state.nodes for gpu in node.gpus}
        peaks = [max(values, default=peak or 0.0) for values in memory]
        summary.hint = _hint(summary, p95, peaks, [gpus[d.uuid] for d in history.devices if d.uuid in gpus])


def _is_shared(spans: Sequence[HolderSpan], namespace: str, pod: str) -> bool:
    """Returns whether others held the GPU while the pod held it."""
    own = [span for span in spans if (span.namespace, span.pod) == (namespace, pod)]
    others = [span for span in spans if span not in own]
    return any(min(a.to or math.inf, b.to or math.inf) - max(a.from_, b.from_) > _BRIEF for a in own for b in others)


def _add_activity(summary: JobSummary, history: PodHistory, state: ClusterState) -> None:
    """Adds values of whole devices. Call it only for a pod that does not share its devices."""

    def mean(values: Sequence[float]) -> float | None:
        return round(sum(values) / len(values), 4) if values else None

    pod, uuids = (summary.namespace, summary.pod), {device.uuid for device in history.devices if not device.instance}
    limits = [gpu.power_limit_mw for node in state.nodes for gpu in node.gpus if gpu.uuid in uuids]
    summary.power_limit_watts = mean([limit / 1000 for limit in limits if limit is not None])
    summary.mean_power_watts = mean([w for device in history.devices for w in _known(device.series["power_watts"])])
    parts = (part for node in state.nodes if not node.stale for part in node.held)
    devices = {part.device_key: part.device for part in parts if (part.holder.namespace, part.holder.pod) == pod}
    if all((holder.namespace, holder.pod) == pod for device in devices.values() for holder in device.holders):
        summary.current_use = mean(_known(device_utilization(device) for device in devices.values()))
        for member, field in (("tensor_active_ratio", TENSOR_ACTIVE), ("dram_active_ratio", DRAM_ACTIVE)):
            values = [(device.fields or {}).get(field) for device in devices.values()]
            setattr(summary, member, mean([value for value in values if isinstance(value, float)]))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _overlap(mark: Mark, history: PodHistory, end: float) -> float:
    """Returns the seconds for which the GPU had the condition while the pod held the GPU."""
    spans = [span for device in history.devices if device.uuid == mark.uuid for span in device.holders]
    until = end if mark.until is None else mark.until
    return sum(max(0.0, min(until, span.to or end) - max(mark.at, span.from_)) for span in spans)


def _hint(summary: JobSummary, p95: list[float], peaks: list[float], gpus: list[DeviceState]) -> str:
    """Suggests fewer or smaller GPUs, enough for the peak memory and 95th percentile of use. "" if there are none."""
    peak, total = summary.peak_memory_bytes, min((gpu.memory_total_bytes or 0 for gpu in gpus), default=0)
    if not p95 or peak is None or not total:
        return ""
    if not summary.peak_use:
        return f"Nothing ran on its {'GPU, so it' if len(p95) == 1 else f'{len(p95)} GPUs, so they'} can be released."
    usual = f"below {max(1, round(max(p95) * 100))} % for 95 % of the time, at most {peak / _GIB:.1f} GiB of memory"
    proviso = "if its use stays as before: " + usual
    if len(p95) > 1:
        needed = max(1, math.ceil(sum(p95)), math.ceil(sum(peaks) / total))
        return f"{needed} of its {len(p95)} GPUs would be enough, {proviso} on each." if needed < len(p95) else ""
    share = max(p95[0], peak / total)
    if share > _MAX_SHARE:
        return ""
    part = f"{max(1, math.ceil(share * 10)) * 10} % of a GPU"
    if any(name in gpus[0].model for name in _MIG_MODELS):
        fitting = [(s, m) for s, m in _MIG_PARTS if s / 7 >= p95[0] and m / 8 * total >= peak]
        if fitting:
            slices, eighths = fitting[0]
            part = f"a MIG instance {slices}g ({eighths / 8 * total / _GIB:.0f} GiB) or {part}"
    return f"{part[0].upper()}{part[1:]} would be enough, {proviso}."
