"""The past in Prometheus or a compatible server, and its series (`/api/v1/history`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from msgspec.structs import replace as replace_fields

from podgpu.charge import Figures
from podgpu.fleet.choose import describe_condition
from podgpu.fleet.prices import Prices, ReadPrices, no_prices
from podgpu.fleet.read.pages import GpuQuery, PrometheusSelection
from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer, RangeSeries
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.known import select_known
from podgpu.metrics.adapter import (
    UUID_LABELS,
    WORKLOAD_LABELS,
    LabelMap,
    first_label,
    read_workload,
)
from podgpu.metrics.conditions import NODE_GONE, words_for
from podgpu.metrics.fields import ENGINE, FB_USED, POWER, TEMPERATURE, UTIL, field_named
from podgpu.metrics.promql import HELD_NAMES, by, field_query, quote, select_gpus, select_held
from podgpu.metrics.values import MAX_RATIO
from podgpu.model import (
    MIB,
    Condition,
    PodName,
    Workload,
    parts_of,
)
from podgpu.past.bills.bill import RangeAnswer, RangeQuery
from podgpu.past.bills.costs import CostsAnswer, CostsQuery, select_budgets
from podgpu.past.events import EventQuery, EventsAnswer
from podgpu.past.gpu_history import (
    JSON,
    MAX_POINTS,
    GpuHistory,
    HolderSpan,
    Mark,
    PodHistory,
    make_pod_history,
    round_series,
    sparkline_times,
    sparklines_json,
)
from podgpu.past.interface import Past
from podgpu.past.prometheus.prometheus_charges import read_bill, read_costs
from podgpu.past.prometheus.prometheus_events import MAX_GAP_SECONDS, read_prometheus_events
from podgpu.past.prometheus.prometheus_savings import read_savings
from podgpu.past.savings.savings import SavingsAnswer, SavingsQuery
from podgpu.past.time_steps import COARSE, FINE, ceil_time

CACHE_SECONDS = 15.0  # of sparklines
_ANSWER_SECONDS = 300.0  # of costs and savings: every open page requests them; days change slowly
_MAX_ANSWERS = 32
_MAX_SAMPLES = 20_000  # per series in a range query; VictoriaMetrics allows 30,000
_MAX_GPUS_OF_POD = 256
_GPUS_PER_QUERY = 16  # VictoriaMetrics rejects queries of more than 16 KiB
_HOLDER_SERIES = {
    "utilization_ratio": "podgpu_container_gpu_utilization_ratio",
    "memory_used_bytes": "podgpu_container_gpu_memory_used_bytes",
}
_KEYS = (*UUID_LABELS, "GPU_I_ID")

UuidAndInstance = tuple[str, str]
Values = list[float | None]  # one per step
_TimeSpan = tuple[float, float | None]  # until None: it goes on


class Window(NamedTuple):
    start: float
    step: int
    steps: int

    @property
    def end(self) -> float:
        return self.start + self.step * self.steps

    def find_steps(self, points: Iterable[tuple[float, float]]) -> dict[int, float]:
        """Maps the number of each step to the point at its end."""
        steps = {}
        for at, value in points:
            number = round((at - self.start) / self.step) - 1
            if 0 <= number < self.steps:
                steps[number] = value
        return steps

    def align(self, figure: str, points: Iterable[tuple[float, float]]) -> Values:
        """Returns one value per step, or None if there is no valid value."""
        values: Values = [None] * self.steps
        for number, value in self.find_steps(points).items():
            if figure != "utilization_ratio":
                values[number] = value
            elif 0 <= value <= MAX_RATIO:
                values[number] = min(value, 1.0)
        return values

    def find_runs(self, steps: Iterable[int]) -> list[_TimeSpan]:
        """Returns the start and end of each run of steps without a long gap.

        The end is None if the run goes on.
        """
        runs: list[tuple[int, int]] = []  # first and last step
        for step in sorted(steps):
            first = step
            if runs:
                missing = step - runs[-1][1] - 1
                if missing * self.step <= MAX_GAP_SECONDS:
                    first, _ = runs.pop()
            runs.append((first, step))

        return [self._make_span(first, last) for first, last in runs]

    def _make_span(self, first: int, last: int) -> _TimeSpan:
        start = self.start + first * self.step
        if last == self.steps - 1:
            return start, None

        next_step = last + 1
        return start, self.start + next_step * self.step


_Query = TypeVar("_Query")
_Answer = TypeVar("_Answer")


class _AnswerCache(Generic[_Query, _Answer]):
    """Keeps answers for `_ANSWER_SECONDS`. A change of the prices makes another answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With the time until which an answer is used.
        self._answers: dict[tuple[_Query, Prices], tuple[float, _Answer]] = {}

    def find(self, query: _Query, prices: Prices) -> _Answer | None:
        cached = self._answers.get((query, prices))
        if cached is None:
            return None

        used_until, answer = cached
        if self._clock() > used_until:
            return None
        return answer

    def add(self, query: _Query, prices: Prices, answer: _Answer) -> None:
        while len(self._answers) >= _MAX_ANSWERS:
            oldest = next(iter(self._answers))
            del self._answers[oldest]

        used_until = self._clock() + _ANSWER_SECONDS
        self._answers[query, prices] = used_until, answer


class PrometheusPast(Past):
    """The past in Prometheus. It has no summaries of pods.

    Sparklines and costs are cached, because every open page requests them.
    """

    def __init__(
        self,
        server: PrometheusServer,
        cluster: Cluster,
        prices: ReadPrices = no_prices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._cluster = cluster
        self._prices = prices
        self._select = PrometheusSelection(server, cluster, prices)
        self._clock = clock
        self._sparklines: JSON = {}
        self._sparklines_at = -math.inf
        self._lock = asyncio.Lock()
        self._costs: _AnswerCache[CostsQuery, CostsAnswer] = _AnswerCache(clock)
        self._savings: _AnswerCache[SavingsQuery, SavingsAnswer] = _AnswerCache(clock)

    async def range(self, query: RangeQuery) -> RangeAnswer:
        state = self._cluster.published.state
        prices, _ = self._prices()
        return await read_bill(self._server, query, prices, state)

    async def costs(self, query: CostsQuery) -> CostsAnswer:
        state = self._cluster.published.state
        prices, _ = self._prices()
        answer = self._costs.find(query, prices)
        if answer is None:
            answer = await read_costs(self._server, query, prices, state)
            self._costs.add(query, prices, answer)

        budgets = select_budgets(state.budgets, query.range)
        return replace_fields(answer, budgets=budgets)

    async def savings(self, query: SavingsQuery) -> SavingsAnswer:
        query = query._replace(is_csv=False)
        prices, _ = self._prices()
        answer = self._savings.find(query, prices)
        if answer is None:
            state = self._cluster.published.state
            read_gpus = self._select.read_gpus
            answer = await read_savings(self._server, query, prices, state, read_gpus)
            # Before the first round, no pod holds a GPU.
            if answer.totals.before.gpus:
                self._savings.add(query, prices, answer)

        return answer

    async def find(self, query: GpuQuery) -> PublishedState:
        return await self._select(query)

    async def sparklines(self) -> JSON:
        async with self._lock:
            now = self._clock()
            if now - self._sparklines_at > CACHE_SECONDS:
                async with aclosing(PrometheusClient(self._server)) as client:
                    self._sparklines = await self._read_sparklines(client)
                self._sparklines_at = now
            return self._sparklines

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        async with aclosing(PrometheusClient(self._server)) as client:
            reader = await self._make_reader(client, seconds)
            devices = await reader.read_devices([uuid])
            device = devices.get((uuid, instance))
            if device is None:
                return None
            return device.make_history(device.figures)

    async def pod(
        self, namespace: str, pod: str, seconds: int, cluster: str | None = None
    ) -> PodHistory | None:
        name = namespace, pod
        matcher = ""
        if cluster is not None:
            matcher = f"{self._server.cluster_label}={quote(cluster)}"

        devices: dict[UuidAndInstance, _DeviceLines] = {}
        async with aclosing(PrometheusClient(self._server)) as client:
            reader = await self._make_reader(client, seconds, matcher)
            held: set[str] = set()
            for line in await reader.read("max", reader.held_by(name)):
                uuid, _ = _read_device(line.labels)
                held.add(uuid)

            uuids = sorted(held - {""})[:_MAX_GPUS_OF_POD]
            for first in range(0, len(uuids), _GPUS_PER_QUERY):
                chunk = uuids[first : first + _GPUS_PER_QUERY]
                devices |= await reader.read_devices(chunk, name)

        histories = []
        for device in devices.values():
            history = device.history_of_pod(name)
            if history is not None:
                histories.append(history)

        histories.sort(key=lambda gpu: (gpu.node, gpu.index or 0, gpu.uuid, gpu.instance))
        return make_pod_history(namespace, pod, histories)

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await read_prometheus_events(self._server, query, self._cluster.published.state)

    async def _read_sparklines(self, client: PrometheusClient) -> JSON:
        times = sparkline_times(await client.query_time())
        window = Window(times.start, times.step, len(times))
        reader = _HistoryReader(client, window, self._server)
        query = reader.figures()["utilization_ratio"]

        lines = {}
        for labels, points in await reader.read("avg", query):
            uuid, instance = _read_device(labels)
            key = uuid
            if instance:
                key = f"{uuid}/{instance}"
            lines[key] = window.align("utilization_ratio", points)

        return sparklines_json(times, lines)

    async def _make_reader(
        self, client: PrometheusClient, seconds: int, matcher: str = ""
    ) -> _HistoryReader:
        step = FINE
        if seconds > MAX_POINTS * FINE:
            step = ceil_time(seconds / MAX_POINTS, COARSE)

        count = seconds // step
        end = await client.query_time() // FINE * FINE
        window = Window(end - count * step, step, count)

        matchers = filter(None, (matcher, self._server.match))
        server = replace(self._server, match=",".join(matchers))
        return _HistoryReader(client, window, server)


class _HistoryReader:
    """Runs the queries for one time window."""

    def __init__(self, client: PrometheusClient, window: Window, server: PrometheusServer) -> None:
        self._client = client
        self._window = window
        self._match = server.match
        self._node_labels = server.node_labels

    async def read(self, function: str, query: str) -> list[RangeSeries]:
        """Reads the query's mean (`avg`) or largest value (`max`) in each step."""
        start, step, steps = self._window
        first_end = start + step
        if step > FINE:
            # At most `_MAX_SAMPLES` are read of each series.
            seconds_per_sample = step * steps / _MAX_SAMPLES
            resolution = ceil_time(seconds_per_sample, FINE)
            query = f"{function}_over_time(({query})[{step}s:{resolution}s])"
        return await self._client.query_range(query, first_end, self._window.end, step)

    async def read_devices(
        self, uuids: Sequence[str], pod: PodName | None = None
    ) -> dict[UuidAndInstance, _DeviceLines]:
        """Reads devices. With `pod`, reads values and conditions only while the pod held them.

        Raises SourceError.
        """
        of_holders = {}
        for name, series in _HOLDER_SERIES.items():
            of_holders[name] = self._of_holders(series, uuids)

        own_pods, held, health, figures, holder_figures = await asyncio.gather(
            self.read("max", self._own_pods(uuids)),
            self.read("max", self._held(uuids)),
            self.read("max", self._health(uuids, pod)),
            self._read_means(self.figures(uuids, pod)),
            self._read_means(of_holders),
        )

        collector = _DeviceCollector(self._window, self._node_labels)
        # Holders can only be told from exporters after this.
        collector.add_exporters(own_pods)
        collector.add_held(held)
        collector.add_health(health)
        for name, lines in figures.items():
            collector.add_figures(name, lines)
        for name, lines in holder_figures.items():
            collector.add_holder_figures(name, lines)

        return collector.devices

    async def _read_means(self, queries: Mapping[str, str]) -> dict[str, list[RangeSeries]]:
        """`queries`: by the name of a figure."""
        reads = [self.read("avg", query) for query in queries.values()]
        results = await asyncio.gather(*reads)
        return dict(zip(queries, results, strict=True))

    # PromQL

    def figures(self, uuids: Sequence[str] = (), pod: PodName | None = None) -> dict[str, str]:
        """Returns queries for the figures of the given devices, or of all devices."""
        util = self._field(UTIL, uuids)
        engine = self._field(ENGINE, uuids)
        used_mib = self._field(FB_USED, uuids)
        series = self._select(("podgpu_device_memory_used_bytes",), uuids)
        used_bytes = f"max {by(*_KEYS)} ({series})"
        queries = {
            "utilization_ratio": f"({util}) / 100 or {engine}",
            "memory_used_bytes": f"({used_mib}) * {MIB} or {used_bytes}",
            "power_watts": self._field(POWER, uuids),
            "temperature_celsius": self._field(TEMPERATURE, uuids),
        }
        return {name: self._while_held(query, pod) for name, query in queries.items()}

    def held_by(self, pod: PodName) -> str:
        series = select_held(*pod, self._match)
        return f"group {by(*_KEYS)} ({series})"

    def _while_held(self, query: str, pod: PodName | None) -> str:
        if pod is None:
            return query
        on_device = f"on ({', '.join(_KEYS)})"
        return f"({query}) and {on_device} ({self.held_by(pod)})"

    def _held(self, uuids: Sequence[str]) -> str:
        series = self._select(HELD_NAMES, uuids)
        labels = by(*_KEYS, "job", "instance", "gpu", *self._node_labels, *WORKLOAD_LABELS)
        return f"group {labels} ({series})"

    def _own_pods(self, uuids: Sequence[str]) -> str:
        exporters = f"group by (job, instance) ({self._select(HELD_NAMES, uuids)})"
        return f"group by (job, instance, namespace, pod) (up) and on (job, instance) ({exporters})"

    def _of_holders(self, name: str, uuids: Sequence[str]) -> str:
        series = self._select((name,), uuids)
        labels = by(*_KEYS, "job", "instance", *WORKLOAD_LABELS)
        return f"max {labels} ({series})"

    def _health(self, uuids: Sequence[str], pod: PodName | None) -> str:
        series = self._select(("podgpu_device_health",), uuids)
        labels = by(*_KEYS, "condition")
        return self._while_held(f"max {labels} (({series}) == 1)", pod)

    def _field(self, name: str, uuids: Sequence[str]) -> str:
        field = field_named(name)
        labels = by(*UUID_LABELS)
        if field is not None and field.per_instance:
            labels = by(*_KEYS)
        return field_query(name, labels, lambda names: self._select(names, uuids))

    def _select(self, names: Sequence[str], uuids: Sequence[str]) -> str:
        return select_gpus(names, uuids, self._match)


# Answers


@dataclass(slots=True)
class _DeviceLines:
    device: UuidAndInstance
    window: Window
    node: str = ""
    index: int | None = None
    figures: dict[str, Values] = field(default_factory=dict)
    holders: dict[Workload, set[int]] = field(default_factory=lambda: defaultdict(set))
    holder_figures: dict[tuple[Workload, str], Values] = field(default_factory=dict)
    conditions: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    present: set[int] = field(default_factory=set)  # steps in which it was scraped

    def history_of_pod(self, pod: PodName) -> GpuHistory | None:
        """Returns the values while the pod held the device. None if it did not hold it."""
        own = []
        held: set[int] = set()
        shared: set[int] = set()
        for holder, steps in self.holders.items():
            if holder.pod_name == pod:
                own.append(holder)
                held |= steps
            else:
                shared |= steps

        if not held:
            return None

        figures = {}
        for name in Figures._fields:
            of_containers = [self.holder_figures.get((holder, name)) for holder in own]
            # All pods of a device have its temperature.
            of_device = held if name == "temperature_celsius" else held - shared
            figures[name] = self._select_values(name, select_known(of_containers), held, of_device)

        return self.make_history(figures)

    def _select_values(
        self, name: str, of_containers: Sequence[Values], held: set[int], of_device: set[int]
    ) -> Values:
        """Returns the sum of the pod's containers in the steps `held`.

        If it is unknown, uses the value of the device in the steps `of_device`.
        """
        unknown: Values = [None] * self.window.steps
        device_values = self.figures.get(name, unknown)
        values = list(unknown)
        for step in held:
            known = select_known(line[step] for line in of_containers)
            if known:
                values[step] = sum(known)
            elif step in of_device:
                values[step] = device_values[step]
        return values

    def make_history(self, figures: Mapping[str, Values]) -> GpuHistory:
        unknown: Values = [None] * self.window.steps
        series = {name: figures.get(name, unknown) for name in Figures._fields}
        holders = sorted(self._list_holders(), key=lambda span: span.from_)
        marks = sorted(self._list_marks(), key=lambda mark: mark.at)
        uuid, instance = self.device

        return GpuHistory(
            uuid=uuid,
            instance=instance,
            node=self.node,
            index=self.index,
            from_=self.window.start,
            to=self.window.end,
            step_seconds=self.window.step,
            series=round_series(series),
            holders=holders,
            marks=marks,
        )

    def _list_holders(self) -> Iterator[HolderSpan]:
        for holder, steps in self.holders.items():
            for start, end in self.window.find_runs(steps):
                yield HolderSpan(*parts_of(holder), from_=start, to=end)

    def _list_marks(self) -> Iterator[Mark]:
        for name, steps in self.conditions.items():
            says, _ = describe_condition(Condition(name))
            for start, end in self.window.find_runs(steps):
                yield Mark(start, end, name, says)

        last_step = self.window.steps - 1
        last_present = max(self.present, default=last_step)
        if last_present < last_step:
            first_missing = last_present + 1
            gone_at = self.window.start + first_missing * self.window.step
            says, _ = words_for(NODE_GONE)
            yield Mark(gone_at, None, NODE_GONE, says)


class _DeviceCollector:
    """Collects the series of a query by device."""

    def __init__(self, window: Window, node_labels: Sequence[str]) -> None:
        self.devices: dict[UuidAndInstance, _DeviceLines] = {}
        self._window = window
        self._node_labels = node_labels
        # Pods of the exporters themselves are not holders.
        self._exporters: dict[tuple[str, str], set[PodName]] = defaultdict(set)

    def add_exporters(self, series: Iterable[RangeSeries]) -> None:
        for labels, _ in series:
            if labels.get("pod"):
                pod = labels.get("namespace", ""), labels["pod"]
                self._exporters[_read_target(labels)].add(pod)

    def add_held(self, series: Iterable[RangeSeries]) -> None:
        for labels, points in series:
            device = self._find(labels)
            device.node = first_label(labels, self._node_labels)
            if labels.get("gpu", "").isdecimal():
                device.index = int(labels["gpu"])

            steps = self._window.find_steps(points).keys()
            device.present |= steps
            holder = self._read_holder(labels)
            if holder is not None:
                device.holders[holder] |= steps

    def add_health(self, series: Iterable[RangeSeries]) -> None:
        for labels, points in series:
            device = self._find(labels)
            steps = self._window.find_steps(points).keys()
            device.present |= steps
            condition = labels.get("condition", "")
            device.conditions[condition] |= steps

    def add_figures(self, name: str, series: Iterable[RangeSeries]) -> None:
        for labels, points in series:
            device = self._find(labels)
            device.figures[name] = self._window.align(name, points)

    def add_holder_figures(self, name: str, series: Iterable[RangeSeries]) -> None:
        for labels, points in series:
            holder = self._read_holder(labels)
            if holder is not None:
                device = self._find(labels)
                device.holder_figures[holder, name] = self._window.align(name, points)

    def _find(self, labels: LabelMap) -> _DeviceLines:
        key = _read_device(labels)
        return self.devices.setdefault(key, _DeviceLines(key, self._window))

    def _read_holder(self, labels: LabelMap) -> Workload | None:
        own_pods = self._exporters[_read_target(labels)]
        return read_workload(labels, own_pods)


def _read_device(labels: LabelMap) -> UuidAndInstance:
    return first_label(labels, UUID_LABELS), labels.get("GPU_I_ID", "")


def _read_target(labels: LabelMap) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")
