"""Answers `/api/v1/events` with queries to Prometheus or a compatible server.

Prometheus returns only the times when a node, a holder or a condition came or went. So the answer
is short, also if there are many GPUs.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing
from itertools import pairwise
from typing import NamedTuple

from podgpu.fleet.choose import describe_condition
from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer
from podgpu.fleet.state import ClusterState
from podgpu.metrics.adapter import (
    UUID_LABELS,
    WORKLOAD_LABELS,
    LabelMap,
    first_label,
    read_workload,
)
from podgpu.metrics.conditions import NODE_GONE
from podgpu.metrics.promql import HELD_NAMES, by, select_gpus, select_held
from podgpu.model import Condition, PodName, Workload
from podgpu.past.events import MAX_SPANS, EventQuery, EventsAnswer, make_events
from podgpu.past.spans import CONDITION, HOLDER, Interval, Span
from podgpu.past.time_steps import FINE, ceil_time

_STEPS = 480
_STEPS_OF_MANY = 120  # if there are too many GPUs to read all
MAX_GAP_SECONDS = 300  # a holder or condition continues through a shorter gap: a scrape may fail
_GPU_LABELS = (*UUID_LABELS, "GPU_I_ID", "gpu")


class _Gpu(NamedTuple):
    uuid: str
    instance: str
    node: str
    number: int | None  # its index on the node


class _Series(NamedTuple):
    """A series that came or went, with the times."""

    labels: LabelMap
    came: Sequence[float]
    went: Sequence[float]


class _NodeHistory(NamedTuple):
    known_from: float  # what was there at this time may have begun earlier
    outages: Sequence[Interval] = ()
    ignored: Sequence[Interval] = ()  # outages and gaps of Prometheus


async def read_prometheus_events(
    server: PrometheusServer, query: EventQuery, state: ClusterState
) -> EventsAnswer:
    """Raises SourceError. Times are exact to a step, which is 15 s in a range of two hours."""
    most_steps = _STEPS if state.totals_only is None else _STEPS_OF_MANY
    step = ceil_time(query.seconds / most_steps, FINE)
    has_clusters = any(node.reading.cluster for node in state.nodes)
    async with aclosing(PrometheusClient(server)) as client:
        end = await client.query_time() // FINE * FINE
        if query.end is not None:
            end = min(end, query.end // FINE * FINE)

        start = end - query.seconds // step * step

        reader = _EventReader(client, server, start, end, step, has_clusters)
        spans = await reader.read_spans(query)
        return make_events(spans, start, end, start)


class _EventReader:
    def __init__(
        self,
        client: PrometheusClient,
        server: PrometheusServer,
        start: float,
        end: float,
        step: int,
        has_clusters: bool,
    ) -> None:
        self._client = client
        self._server = server
        self._start = start
        self._end = end
        self._step = step
        self._has_clusters = has_clusters

    async def read_spans(self, query: EventQuery) -> list[Span]:
        """Returns the newest spans that began or ended in the range."""
        uuids = await self._find_gpus(query)
        if query.selector == "pod" and not uuids:
            return []

        match = self._server.match
        node_labels = (self._server.cluster_label, *self._server.node_labels)
        gpu_labels = (*node_labels, *_GPU_LABELS)
        gpus = select_gpus(HELD_NAMES, uuids, match)
        health = select_gpus(("podgpu_device_health",), uuids, match)
        own_pods, gaps, nodes, holders, conditions = await asyncio.gather(
            self._read_own_pods(),
            self._find_gaps(),
            self._read_changes(f"group {by(*node_labels)} ({gpus})"),
            self._read_changes(f"group {by(*gpu_labels, *WORKLOAD_LABELS)} ({gpus})"),
            self._read_changes(f"group {by(*gpu_labels, 'condition')} (({health}) == 1)"),
        )

        histories = self._find_histories(nodes, gaps)
        spans = list(self._list_holders(holders, own_pods, histories))
        spans += self._list_conditions(conditions, holders, histories)
        spans = _select_spans(spans, query)
        spans.sort(key=_changed_at, reverse=True)
        return spans[:MAX_SPANS]

    def _find_histories(
        self, nodes: Iterable[_Series], gaps: list[Interval]
    ) -> Mapping[str, _NodeHistory]:
        """`gaps`: when Prometheus scraped nothing. A node without changes had no outages."""
        unchanged = _NodeHistory(self._start, ignored=gaps)
        histories: dict[str, _NodeHistory] = defaultdict(lambda: unchanged)
        for series in nodes:
            name = self._name_node(series.labels)
            periods = _find_periods(series, gaps)
            outages = _find_outages(periods)
            known_from = periods[0].start + self._step
            histories[name] = _NodeHistory(known_from, outages, gaps + outages)
        return histories

    def _list_holders(
        self,
        holders: Iterable[_Series],
        own_pods: Set[PodName],
        nodes: Mapping[str, _NodeHistory],
    ) -> Iterator[Span]:
        accounts: dict[tuple[str, ...], int] = {}
        for series in holders:
            holder = read_workload(series.labels, own_pods)
            if holder is None:
                continue

            account = (holder.namespace, _name_workload(holder))
            number = accounts.setdefault(account, len(accounts))
            gpu = self._read_gpu(series.labels)
            node = nodes[gpu.node]
            for period in _find_periods(series, node.ignored):
                # A pod that was seen first together with its node may have started earlier.
                if period.start <= node.known_from:
                    period = period._replace(start=-math.inf)
                yield _holder_span(gpu, period, holder, number)

    def _list_conditions(
        self,
        conditions: Iterable[_Series],
        holders: Iterable[_Series],
        nodes: Mapping[str, _NodeHistory],
    ) -> Iterator[Span]:
        """Yields the conditions of GPUs. Each GPU of `holders` has the outages of its node."""
        for series in conditions:
            gpu = self._read_gpu(series.labels)
            name = series.labels.get("condition", "")
            for period in _find_periods(series, nodes[gpu.node].ignored):
                yield _condition_span(gpu, period, name)

        gpus = {self._read_gpu(series.labels) for series in holders}
        for gpu in gpus:
            if gpu.instance:
                continue
            for period in nodes[gpu.node].outages:
                yield _condition_span(gpu, period, NODE_GONE)

    async def _find_gpus(self, query: EventQuery) -> list[str]:
        """Returns the UUIDs of the GPUs of the query. Empty if it has no GPU or pod."""
        if query.selector == "gpu":
            return [query.value]
        if query.selector != "pod":
            return []

        namespace, _, name = query.value.partition("/")
        series = select_held(namespace, name, self._server.match)
        held = f"group {by(*UUID_LABELS)} ({series})"
        lines = await self._client.query_range(held, self._start, self._end, self._step)
        uuids = {first_label(line.labels, UUID_LABELS) for line in lines}

        uuids.discard("")
        return sorted(uuids)

    async def _read_own_pods(self) -> set[PodName]:
        """Returns the pods of the exporters. They are no holders."""
        series = select_gpus(HELD_NAMES, (), self._server.match)
        exporters = f"group by (job, instance) ({series})"
        query = f"group by (namespace, pod) (up and on (job, instance) {exporters})"
        length = round(self._end - self._start)
        ever = f"max_over_time(({query})[{length}s:{self._step}s])"

        pods = set()
        for sample in await self._client.query(ever, self._end):
            namespace = sample.labels.get("namespace", "")
            name = sample.labels.get("pod", "")
            pods.add((namespace, name))

        return pods

    async def _find_gaps(self) -> list[Interval]:
        """Returns the periods in which Prometheus scraped nothing."""
        gaps = []
        for series in await self._read_changes("group(up)"):
            gaps += _find_outages(_find_periods(series))
        return gaps

    async def _read_changes(self, query: str) -> list[_Series]:
        """Returns the series of the query's result that came or went."""
        # The subquery has one point, because an expression cannot have an offset.
        before = f"last_over_time(({query})[1s:1s] offset {self._step}s)"
        came, went = await asyncio.gather(
            self._read_times(f"({query}) unless ({before})"),
            self._read_times(f"({before}) unless ({query})"),
        )
        series = []
        for key in came.keys() | went.keys():
            came_at = came.get(key, ())
            went_at = went.get(key, ())
            series.append(_Series(dict(key), came_at, went_at))

        return series

    async def _read_times(self, query: str) -> dict[frozenset[tuple[str, str]], list[float]]:
        """Returns the times of the points of each series, by its labels."""
        first = self._start + self._step
        lines = await self._client.query_range(query, first, self._end, self._step)
        times = {}
        for labels, points in lines:
            key = frozenset(labels.items())
            times[key] = [timestamp for timestamp, _ in points]
        return times

    def _read_gpu(self, labels: LabelMap) -> _Gpu:
        index = labels.get("gpu", "")
        return _Gpu(
            first_label(labels, UUID_LABELS),
            labels.get("GPU_I_ID", ""),
            self._name_node(labels),
            int(index) if index.isdecimal() else None,
        )

    def _name_node(self, labels: LabelMap) -> str:
        name = first_label(labels, self._server.node_labels)
        cluster = self._server.cluster_of(labels)
        if self._has_clusters and cluster:
            return f"{cluster}/{name}"
        return name


def _find_periods(series: _Series, ignored: Sequence[Interval] = ()) -> list[Interval]:
    """Returns the periods in which the series was present, at least one.

    A short gap, and a gap in an `ignored` period, does not end a period.
    """
    periods: list[Interval] = []
    for period in _list_presence(series):
        if periods:
            gap = Interval(periods[-1].end, period.start)
            if _is_ignored(gap, ignored):
                period = Interval(periods.pop().start, period.end)
        periods.append(period)

    if _is_in_outage(periods[-1].end, ignored):
        # Its node is gone. It is not known whether the holder or condition ended.
        periods[-1] = periods[-1]._replace(end=math.inf)

    return periods


def _list_presence(series: _Series) -> Iterator[Interval]:
    """Yields the periods between coming and going. The first and the last may be open."""
    came = [(timestamp, True) for timestamp in series.came]
    went = [(timestamp, False) for timestamp in series.went]
    changes = sorted(came + went)
    start = -math.inf
    # What goes first was there before.
    _, comes_first = changes[0]
    is_present = not comes_first
    for timestamp, comes in changes:
        if comes and not is_present:
            start = timestamp
        elif not comes and is_present:
            yield Interval(start, timestamp)
        is_present = comes

    if is_present:
        yield Interval(start, math.inf)


def _is_ignored(gap: Interval, ignored: Iterable[Interval]) -> bool:
    if gap.end - gap.start <= MAX_GAP_SECONDS:
        return True
    return any(other.start <= gap.start and gap.end <= other.end for other in ignored)


def _is_in_outage(end: float, ignored: Iterable[Interval]) -> bool:
    """Returns whether a period ends in an outage that goes on."""
    return any(gap.start <= end and gap.end == math.inf for gap in ignored)


def _find_outages(periods: Sequence[Interval]) -> list[Interval]:
    """Returns the gaps between the periods, and that after the last one."""
    outages = []
    for earlier, later in pairwise(periods):
        outages.append(Interval(earlier.end, later.start))
    if periods[-1].end < math.inf:
        outages.append(Interval(periods[-1].end, math.inf))
    return outages


def _name_workload(holder: Workload) -> str:
    return holder.pod or holder.job or holder.uid or f"container {holder.container_id[:12]}"


def _holder_span(gpu: _Gpu, period: Interval, holder: Workload, account: int) -> Span:
    span = _make_span(gpu, period, HOLDER)
    return span._replace(
        name=holder.container,
        account=account,
        namespace=holder.namespace,
        pod=holder.pod,
        workload=_name_workload(holder),
    )


def _condition_span(gpu: _Gpu, period: Interval, name: str) -> Span:
    text, _ = describe_condition(Condition(name))
    span = _make_span(gpu, period, CONDITION)
    return span._replace(name=name, message=text)


def _make_span(gpu: _Gpu, period: Interval, kind: str) -> Span:
    return Span(
        started=period.start,
        ended=None if period.end == math.inf else period.end,
        kind=kind,
        uuid=gpu.uuid,
        instance=gpu.instance,
        node=gpu.node,
        gpu_index=gpu.number,
    )


def _select_spans(spans: Sequence[Span], query: EventQuery) -> list[Span]:
    if query.selector == "node":
        return [span for span in spans if span.node == query.value]
    if query.selector == "pod":
        return _select_pod(spans, query.value)
    return list(spans)


def _select_pod(spans: Sequence[Span], pod: str) -> list[Span]:
    """Returns the spans of a pod, and the conditions of its GPUs while it held them."""
    own: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        name = f"{span.namespace}/{span.pod}"
        if span.kind == HOLDER and name == pod:
            own[span.uuid].append(span)

    selected = []
    for span in spans:
        if span in own[span.uuid]:
            selected.append(span)
        elif span.kind != HOLDER:
            # Without a change of its holder, the pod held the GPU in the whole range.
            held = own[span.uuid]
            if not held or any(_overlap(span, other) for other in held):
                selected.append(span)

    return selected


def _overlap(span: Span, other: Span) -> bool:
    if span.ended is not None and span.ended < other.started:
        return False
    return other.ended is None or other.ended >= span.started


def _changed_at(span: Span) -> float:
    if span.ended is None:
        return span.started
    return max(span.started, span.ended)
