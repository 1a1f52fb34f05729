"""Reads usage from the history in SQLite: `/api/v1/range`, and the summary of a pod with a hint for a smaller GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from sqlite3 import Connection

import msgspec

from podgpu.cluster.ranges import RangeAnswer, RangeFigures, RangeQuery, add_up, group_now, make_range, utc_text
from podgpu.cluster.state import ClusterState
from podgpu.history.answers import Mark, PodHistory, make_pod_history, read_pod, read_range, read_usage_start
from podgpu.history.events import IDLE, EventQuery, EventsAnswer, read_events
from podgpu.history.recorder import HistoryRecorder
from podgpu.history.store import COARSE, DAY, FINE
from podgpu.model import DeviceState, WorkloadOwner

_LONGEST = 8 * DAY  # how long values are stored
_SHORTEST = 900.0  # seconds: a hint needs at least this much history
_THROTTLING = ("thermal", "power_brake")
_MIG_PARTS = ((1, 1), (2, 2), (3, 4), (4, 4))  # sevenths of compute and eighths of memory in each MIG profile
_MIG_MODELS = ("A100", "H100", "H200", "GH200", "B200")
_MAX_SHARE = 0.6  # a pod that needs more than this gets no hint
_GIB = 1024**3
# While a node does not answer, its pods have not ended.
_SPANS = """
SELECT span.started, iif(gone.gpu IS NULL, span.ended, gone.ended), owner_kind, owner_name
FROM span JOIN account ON account.id = span.account
LEFT JOIN span AS gone ON gone.gpu = span.gpu AND gone.name = 'node_gone' AND gone.started = span.ended
WHERE namespace = ? AND pod = ? ORDER BY span.started"""


class JobSummary(RangeFigures, kw_only=True):
    """Unknown members are omitted from the JSON. Peaks are maxima of means over `step_seconds`."""

    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    namespace: str
    pod: str
    owner: WorkloadOwner | None = None
    from_: float = msgspec.field(name="from")
    to: float | None = None  # None while the pod holds a GPU
    duration_seconds: float  # time when the pod held a GPU, without pauses between runs
    gpus: int = 0
    nodes: tuple[str, ...] = ()
    peak_use: float | None = None
    p95_use: float | None = None
    peak_memory_bytes: float | None = None
    step_seconds: int = 0
    wait_seconds: float = 0.0
    throttled_seconds: float = 0.0
    errors: int = 0
    currency: str = ""
    hint: str = ""


class RecordedUsage:
    """Implements `UsageAnswers` with the history in SQLite, and provides `/api/v1/events` and `/api/v1/summary`.

    The methods raise SourceError if history cannot be read.
    """

    def __init__(self, recorder: HistoryRecorder, read_state: Callable[[], ClusterState]) -> None:
        self._recorder = recorder
        self._read_state = read_state

    async def range(self, query: RangeQuery) -> RangeAnswer:
        return await self._recorder.ask(lambda db, now: read_range_answer(db, query, now, self._read_state()))

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await self._recorder.ask(lambda db, now: read_events(db, query, now))

    async def summary(self, namespace: str, pod: str) -> JobSummary | None:
        """Returns None if there is no record of the pod."""
        return await self._recorder.ask(lambda db, now: read_summary(db, namespace, pod, now, self._read_state()))


def read_range_answer(db: Connection, query: RangeQuery, now: float, state: ClusterState) -> RangeAnswer:
    start, end, sums = read_range(db, *query.bounds(now))
    since = read_usage_start(db)
    notes = []
    if since is None or start + COARSE < since:
        notes.append(f"there is no record before {utc_text(now if since is None else since)}")
    methods = {s.usage.method for n in state.nodes for g in n.gpus for s in (g, *g.instances) if s.usage} - {""}
    now_by_row = None if query.end is not None else group_now(state, sums, query)
    return make_range(
        query, (start, min(end, now)), sums, state.prices, notes, state.simulated, sorted(methods), now_by_row
    )


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
    history = make_pod_history(namespace, pod, read_pod(db, namespace, pod, start - FINE, end + FINE))
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
    return summary


def _add_history(summary: JobSummary, history: PodHistory, end: float, state: ClusterState) -> None:
    series = [device.series for device in history.devices]
    use = [_known(one["utilization_ratio"]) for one in series]
    memory = [value for one in series for value in _known(one["memory_used_bytes"])]
    summary.gpus = len(history.devices)
    summary.nodes = tuple(sorted({device.node for device in history.devices}))
    known = [value for values in use for value in values]
    summary.peak_use = max(known, default=None)
    # Mean and peak are parts of the GPU or MIG instance; /api/v1/range has the mean of the pod's share of it.
    summary.mean_use = round(sum(known) / len(known), 4) if known else summary.mean_use
    summary.p95_use = max((_p95(values) for values in use if values), default=None)
    summary.peak_memory_bytes = max(memory, default=None)
    summary.step_seconds = history.step_seconds
    summary.throttled_seconds = sum(
        _overlap(mark, history, end) for mark in history.marks if mark.condition in _THROTTLING
    )
    summary.errors = sum(mark.condition not in (*_THROTTLING, IDLE) for mark in history.marks)
    held_whole = summary.allocated_hours * 3600 > 0.9 * summary.duration_seconds * summary.gpus
    if summary.duration_seconds >= _SHORTEST and held_whole:
        gpus = {gpu.uuid: gpu for node in state.nodes for gpu in node.gpus}
        p95 = [_p95(values) for values in use if values]
        summary.hint = _hint(summary, p95, [gpus[d.uuid] for d in history.devices if d.uuid in gpus])


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _overlap(mark: Mark, history: PodHistory, end: float) -> float:
    """Returns the seconds for which the GPU had the condition while the pod held the GPU."""
    spans = [span for device in history.devices if device.uuid == mark.uuid for span in device.holders]
    until = end if mark.until is None else mark.until
    return sum(max(0.0, min(until, span.to or end) - max(mark.at, span.from_)) for span in spans)


def _hint(summary: JobSummary, p95: list[float], gpus: list[DeviceState]) -> str:
    """Names a smaller part of a GPU that is enough for the peak memory and 95 % of the use. Empty if there is none."""
    peak, total = summary.peak_memory_bytes, min((gpu.memory_total_bytes or 0 for gpu in gpus), default=0)
    if not p95 or peak is None or not total:
        return ""
    if not summary.peak_use:
        return f"Nothing ran on its {'GPU, so it' if len(p95) == 1 else f'{len(p95)} GPUs, so they'} can be released."
    usual = f"below {max(1, round(max(p95) * 100))} % for 95 % of the time, at most {peak / _GIB:.1f} GiB of memory"
    proviso = "if its use stays as before: " + usual
    if len(p95) > 1:
        needed = max(1, math.ceil(sum(p95)), math.ceil(peak * len(p95) / total))
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
