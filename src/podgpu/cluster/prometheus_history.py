"""Answers `/api/v1/history` with range queries to Prometheus or a compatible server."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from podgpu.cluster.prometheus import PrometheusClient, PrometheusServer, RangeSeries
from podgpu.cluster.promql import by, field_query, one_of, quote, select
from podgpu.history.answers import (
    JSON,
    MAX_POINTS,
    SPARKLINE_POINTS,
    SPARKLINE_STEP,
    GpuHistory,
    HolderSpan,
    Mark,
    PodHistory,
    make_pod_history,
    round_series,
    sparkline_start,
    sparklines_json,
    utilization_byte,
)
from podgpu.history.store import Figures
from podgpu.metrics.adapter import POD_LABEL_VARIANTS, UUID_LABELS, WORKLOAD_LABELS, LabelMap, PodName, read_workload
from podgpu.metrics.conditions import conditions, words_for
from podgpu.metrics.fields import ENGINE, FB_USED, POWER, TEMPERATURE, UTIL, field_named, names_of
from podgpu.model import MIB, Workload

CACHE_SECONDS = 15.0
_FINE, _COARSE = 15, 300  # steps in seconds, as in the SQLite store
_MAX_SAMPLES = 20_000  # per series in a range query; VictoriaMetrics allows 30,000
_MAX_GAP_SECONDS = 300  # a holder or condition continues through a shorter gap, because a scrape may fail
_MAX_GPUS_OF_POD = 256
_GPUS_PER_QUERY = 16  # VictoriaMetrics rejects queries of more than 16 KiB
_KEYS = (*UUID_LABELS, "GPU_I_ID")
_HELD_NAMES = ("podgpu_allocation_info", *names_of(UTIL), *names_of(ENGINE))

Device = tuple[str, str]  # UUID, MIG instance
Values = list[float | None]  # one per step


class Window(NamedTuple):
    start: float
    step: int
    steps: int

    @property
    def end(self) -> float:
        return self.start + self.step * self.steps

    def align(self, points: Iterable[tuple[float, float]]) -> Values:
        """Returns one value per step: the point at the end of the step, or None."""
        values: Values = [None] * self.steps
        for at, value in points:
            number = round((at - self.start) / self.step) - 1
            if 0 <= number < self.steps:
                values[number] = value
        return values

    def find_runs(self, steps: Iterable[int]) -> list[tuple[float, float | None]]:
        """Returns the start and end of each run of steps without a long gap. The end is None if the run goes on."""
        runs: list[list[int]] = []
        for step in sorted(steps):
            if runs and (step - runs[-1][1] - 1) * self.step <= _MAX_GAP_SECONDS:
                runs[-1][1] = step
            else:
                runs.append([step, step])
        starts = [self.start + first * self.step for first, _ in runs]
        ends = [None if last >= self.steps - 1 else self.start + (last + 1) * self.step for _, last in runs]
        return list(zip(starts, ends, strict=True))


class PrometheusHistory:
    """Implements `HistorySource`. Sparklines are cached for 15 s, because every open page requests them."""

    def __init__(self, server: PrometheusServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._sparklines: JSON = {}
        self._sparklines_at = -math.inf
        self._lock = asyncio.Lock()

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
            device = (await reader.read_devices([uuid])).get((uuid, instance))
            return None if device is None else device.make_history(device.figures)

    async def pod(self, namespace: str, pod: str, seconds: int, cluster: str | None = None) -> PodHistory | None:
        name = namespace, pod
        of_cluster = "" if cluster is None else f"{self._server.cluster_label}={quote(cluster)}"
        async with aclosing(PrometheusClient(self._server)) as client:
            reader = await self._make_reader(client, seconds, of_cluster)
            uuids = sorted({_read_device(line.labels)[0] for line in await reader.read(reader.held_by(name))} - {""})
            devices: dict[Device, _DeviceLines] = {}
            for first in range(0, min(len(uuids), _MAX_GPUS_OF_POD), _GPUS_PER_QUERY):
                devices |= await reader.read_devices(uuids[first : first + _GPUS_PER_QUERY], name)
        histories = [device.history_of_pod(name) for device in devices.values()]
        held = [history for history in histories if history is not None]
        held.sort(key=lambda history: (history.node, history.index or 0, history.uuid, history.instance))
        return make_pod_history(namespace, pod, held)

    async def _read_sparklines(self, client: PrometheusClient) -> JSON:
        window = Window(sparkline_start(await client.query_time()), SPARKLINE_STEP, SPARKLINE_POINTS)
        reader = _HistoryReader(client, window, self._server)
        lines = {}
        for labels, values in await reader.read(reader.figures()["utilization_ratio"]):
            uuid, instance = _read_device(labels)
            if uuid:
                ratios = (_check_ratio(value) for value in window.align(values))
                lines[f"{uuid}/{instance}" if instance else uuid] = bytes(map(utilization_byte, ratios))
        return sparklines_json(window.start, lines)

    async def _make_reader(self, client: PrometheusClient, seconds: int, matcher: str = "") -> _HistoryReader:
        step = _FINE if seconds <= MAX_POINTS * _FINE else _COARSE * -(-seconds // (_COARSE * MAX_POINTS))
        count = seconds // step
        end = await client.query_time() // _FINE * _FINE
        server = replace(self._server, match=",".join(filter(None, (matcher, self._server.match))))
        return _HistoryReader(client, Window(end - count * step, step, count), server)


class _HistoryReader:
    """Runs the queries for one time window. Each value is the mean over its step."""

    def __init__(self, client: PrometheusClient, window: Window, server: PrometheusServer) -> None:
        self._client = client
        self._window = window
        self._match = server.match
        self._node_labels = server.node_labels

    async def read(self, query: str) -> list[RangeSeries]:
        window = self._window
        return await self._client.query_range(query, window.start + window.step, window.end, window.step)

    async def read_devices(self, uuids: Sequence[str], pod: PodName | None = None) -> dict[Device, _DeviceLines]:
        """Reads devices. With `pod`, reads values and conditions only while the pod held them. Raises SourceError."""
        queries = {
            "own_pods": self._own_pods(uuids),
            "held": self._held(uuids),
            "health": self._health(uuids, pod),
            "utilization_ratio of holders": self._of_holders("podgpu_container_gpu_utilization_ratio", uuids),
            "memory_used_bytes of holders": self._of_holders("podgpu_container_gpu_memory_used_bytes", uuids),
            **self.figures(uuids, pod),
        }
        results = dict(zip(queries, await asyncio.gather(*map(self.read, queries.values())), strict=True))
        own_pods: dict[tuple[str, str], set[PodName]] = defaultdict(set)  # the exporters' pods, which are not holders
        for labels in (line.labels for line in results.pop("own_pods") if line.labels.get("pod")):
            own_pods[_read_target(labels)].add((labels.get("namespace", ""), labels["pod"]))
        devices: dict[Device, _DeviceLines] = {}
        for what, lines in results.items():
            for labels, points in lines:
                key = _read_device(labels)
                if key[0]:
                    device = devices.setdefault(key, _DeviceLines(key, self._window))
                    holder = read_workload(labels, own_pods[_read_target(labels)])
                    device.add(what, labels, self._window.align(points), holder, self._node_labels)
        return devices

    # PromQL

    def figures(self, uuids: Sequence[str] = (), pod: PodName | None = None) -> dict[str, str]:
        """Returns queries for ratios, bytes, watts and degrees of the given devices, or of all devices."""
        memory = f"max {by(*_KEYS)} ({self._select(('podgpu_device_memory_used_bytes',), uuids)})"
        queries = {
            "utilization_ratio": f"({self._field(UTIL, uuids)}) / 100 or {self._field(ENGINE, uuids)}",
            "memory_used_bytes": f"({self._field(FB_USED, uuids)}) * {MIB} or {memory}",
            "power_watts": self._field(POWER, uuids),
            "temperature_celsius": self._field(TEMPERATURE, uuids),
        }
        return {name: self._over_steps("avg", self._while_held(query, pod)) for name, query in queries.items()}

    def held_by(self, pod: PodName) -> str:
        return self._over_steps("max", self._held_by(pod))

    def _held_by(self, pod: PodName) -> str:
        series = " or ".join(
            select(_HELD_NAMES, f"{namespace}={quote(pod[0])}", f"{name}={quote(pod[1])}", self._match)
            for namespace, name, _ in POD_LABEL_VARIANTS
        )
        return f"group {by(*_KEYS)} ({series})"

    def _while_held(self, query: str, pod: PodName | None) -> str:
        return f"({query}) and on ({', '.join(_KEYS)}) ({self._held_by(pod)})" if pod else query

    def _held(self, uuids: Sequence[str]) -> str:
        labels = by(*_KEYS, "job", "instance", "gpu", *self._node_labels, *WORKLOAD_LABELS)
        return self._over_steps("max", f"group {labels} ({self._select(_HELD_NAMES, uuids)})")

    def _own_pods(self, uuids: Sequence[str]) -> str:
        exporters = f"group by (job, instance) ({self._select(_HELD_NAMES, uuids)})"
        targets = f"group by (job, instance, namespace, pod) (up) and on (job, instance) ({exporters})"
        return self._over_steps("max", targets)

    def _of_holders(self, name: str, uuids: Sequence[str]) -> str:
        labels = by(*_KEYS, "job", "instance", *WORKLOAD_LABELS)
        return self._over_steps("avg", f"max {labels} ({self._select((name,), uuids)})")

    def _health(self, uuids: Sequence[str], pod: PodName | None) -> str:
        series = f"({self._select(('podgpu_device_health',), uuids)}) == 1"
        return self._over_steps("max", self._while_held(f"max {by(*_KEYS, 'condition')} ({series})", pod))

    def _field(self, name: str, uuids: Sequence[str]) -> str:
        field = field_named(name)
        labels = by(*_KEYS) if field is not None and field.per_instance else by(*UUID_LABELS)
        return field_query(name, labels, lambda names: self._select(names, uuids))

    def _select(self, names: Sequence[str], uuids: Sequence[str]) -> str:
        matchers = [one_of(label, uuids) if uuids else f'{label}!=""' for label in UUID_LABELS]
        return " or ".join(select(names, matcher, self._match) for matcher in matchers)

    def _over_steps(self, function: str, query: str) -> str:
        step = self._window.step
        resolution = _FINE * math.ceil(step * self._window.steps / _MAX_SAMPLES / _FINE)
        return query if step <= _FINE else f"{function}_over_time(({query})[{step}s:{resolution}s])"


# Answers


@dataclass(slots=True)
class _DeviceLines:
    device: Device
    window: Window
    node: str = ""
    index: int | None = None
    figures: dict[str, Values] = field(default_factory=dict)
    holders: dict[Workload, set[int]] = field(default_factory=lambda: defaultdict(set))
    holder_figures: dict[tuple[Workload, str], Values] = field(default_factory=dict)
    conditions: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(
        self, what: str, labels: LabelMap, values: Values, holder: Workload | None, node_labels: Sequence[str]
    ) -> None:
        steps = {number for number, value in enumerate(values) if value is not None}
        figure = what.removesuffix(" of holders")
        if figure == "utilization_ratio":
            values = [_check_ratio(value) for value in values]
        if what == "held":
            self.node = next((labels[name] for name in node_labels if labels.get(name)), "")
            index = labels.get("gpu", "")
            self.index = int(index) if index.isdecimal() else self.index
            if holder is not None:
                self.holders[holder] |= steps
        elif what == "health":
            self.conditions[labels.get("condition", "")] |= steps
        elif what == figure:
            self.figures[figure] = values
        elif holder is not None:
            self.holder_figures[holder, figure] = values

    def history_of_pod(self, pod: PodName) -> GpuHistory | None:
        """Returns the values from the time when the pod held the device. None if the pod never held it.

        Prefers the pod's own values. Without them, uses the device's values while no other pod held the device.
        """
        own = {holder: steps for holder, steps in self.holders.items() if (holder.namespace, holder.pod) == pod}
        held = {step for steps in own.values() for step in steps}
        shared = {step for holder, steps in self.holders.items() if holder not in own for step in steps}
        if not held:
            return None
        figures: dict[str, Values] = {name: [None] * self.window.steps for name in Figures._fields}
        for name, values in figures.items():
            lines = [line for holder in own if (line := self.holder_figures.get((holder, name))) is not None]
            device = self.figures.get(name)
            for step in held:
                parts = [part for line in lines if (part := line[step]) is not None]
                if parts:
                    values[step] = sum(parts)
                elif device is not None and (step not in shared or name == "temperature_celsius"):
                    values[step] = device[step]
        return self.make_history(figures)

    def make_history(self, figures: Mapping[str, Values]) -> GpuHistory:
        unknown: Values = [None] * self.window.steps
        holders = [
            HolderSpan(*run, h.container, h.namespace, h.pod, h.job, h.uid, h.container_id)
            for h, steps in self.holders.items()
            for run in self.window.find_runs(steps)
        ]
        marks = [
            Mark(*run, name, words_for(name)[0] if name in conditions() else name)
            for name, steps in self.conditions.items()
            for run in self.window.find_runs(steps)
        ]
        uuid, instance = self.device
        return GpuHistory(
            uuid=uuid,
            instance=instance,
            node=self.node,
            index=self.index,
            from_=self.window.start,
            to=self.window.end,
            step_seconds=self.window.step,
            series=round_series({name: figures.get(name, unknown) for name in Figures._fields}),
            holders=sorted(holders, key=lambda span: span.from_),
            marks=sorted(marks, key=lambda mark: mark.at),
        )


def _read_device(labels: LabelMap) -> Device:
    return next((labels[name] for name in UUID_LABELS if labels.get(name)), ""), labels.get("GPU_I_ID", "")


def _read_target(labels: LabelMap) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _check_ratio(value: float | None) -> float | None:
    return None if value is None or not 0 <= value <= 1.01 else min(value, 1.0)
