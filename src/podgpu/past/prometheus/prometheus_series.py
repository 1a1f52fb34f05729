"""Reads the series of GPUs and their holders from Prometheus, for `/api/v1/history`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.charge import Figures
from podgpu.fleet.choose import describe_condition
from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer, RangeSeries
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
from podgpu.metrics.promql import HELD_NAMES, by, field_query, select_gpus, select_held
from podgpu.metrics.values import MAX_RATIO
from podgpu.model import (
    MIB,
    Condition,
    PodName,
    Workload,
    parts_of,
)
from podgpu.past.gpu_history import GpuHistory, HolderSpan, Mark, round_series
from podgpu.past.prometheus.prometheus_events import MAX_GAP_SECONDS
from podgpu.past.time_steps import FINE, ceil_time

_MAX_SAMPLES = 20_000  # per series in a range query; VictoriaMetrics allows 30,000
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


class HistoryReader:
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
    ) -> dict[UuidAndInstance, DeviceLines]:
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
class DeviceLines:
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
        self.devices: dict[UuidAndInstance, DeviceLines] = {}
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

    def _find(self, labels: LabelMap) -> DeviceLines:
        key = read_device(labels)
        return self.devices.setdefault(key, DeviceLines(key, self._window))

    def _read_holder(self, labels: LabelMap) -> Workload | None:
        own_pods = self._exporters[_read_target(labels)]
        return read_workload(labels, own_pods)


def read_device(labels: LabelMap) -> UuidAndInstance:
    return first_label(labels, UUID_LABELS), labels.get("GPU_I_ID", "")


def _read_target(labels: LabelMap) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")
