"""Answers `/api/v1/history` with range queries to Prometheus or a compatible server."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from podgpu.cluster.prometheus import FB_USED, GR_ENGINE, HOLDER_LABELS, POWER, TEMPERATURE, UTIL
from podgpu.cluster.promql import (
    PrometheusClient,
    PrometheusServer,
    RangeSeries,
    by,
    one_of,
    quote,
    select,
)
from podgpu.history.answers import (
    JSON,
    MAX_POINTS,
    GpuHistory,
    Series,
    Span,
    gpu_json,
    pod_json,
    sparkline_window,
    sparklines_json,
    utilization_byte,
)
from podgpu.metrics.adapter import POD_LABEL_VARIANTS, Labels, Pod, read_workload
from podgpu.metrics.conditions import conditions, words_for
from podgpu.metrics.fields import fields
from podgpu.metrics.names import generations, names_of, successors
from podgpu.model import Workload

CACHE_SECONDS = 15.0
_FINE, _COARSE = 15, 300  # steps in seconds, as in the SQLite store
_MAX_GAP_SECONDS = 300  # longest gap in a GPU's samples during which its holder is assumed to stay
_CONCURRENCY = 2
_MAX_GPUS_OF_POD = 256
_DCGM_BLANK = 0x7FFFFFF0
_MIB = 1024 * 1024
_UUIDS = ("UUID", "uuid", "gpu_uuid")
_FIGURES = ("utilization", "memory", "power", "temperature")
_KEYS = (*_UUIDS, "GPU_I_ID")
_HELD_NAMES = ("podgpu_allocation_info", *names_of(UTIL), *names_of(GR_ENGINE))

Device = tuple[str, str]  # UUID, MIG instance
Values = Sequence[float | None]  # one per step


class Window(NamedTuple):
    start: float
    step: int
    steps: int

    @property
    def end(self) -> float:
        return self.start + self.step * self.steps


class PrometheusHistory:
    """Implements `HistorySource`. Answers are cached for 15 s."""

    def __init__(self, server: PrometheusServer, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError."""
        PrometheusClient(server)
        self._server = server
        self._match = server.match
        self._node_labels = server.node_labels
        self._clock = clock
        self._cache: dict[tuple[object, ...], tuple[float, JSON | None]] = {}
        self._slots = asyncio.Semaphore(_CONCURRENCY)

    async def sparklines(self, points: int) -> JSON:
        answer = await self._read_cached(("sparklines", points), lambda: self._read_sparklines(points))
        return answer or {}

    async def gpu(self, uuid: str, instance: str, seconds: int) -> JSON | None:
        key = "gpu", uuid, instance, seconds
        return await self._read_cached(key, lambda: self._read_gpu((uuid, instance), seconds))

    async def pod(self, namespace: str, pod: str, seconds: int) -> JSON | None:
        key = "pod", namespace, pod, seconds
        return await self._read_cached(key, lambda: self._read_pod((namespace, pod), seconds))

    async def _read_cached(self, key: tuple[object, ...], read: Callable[[], Awaitable[JSON | None]]) -> JSON | None:
        async with self._slots:
            now = self._clock()
            self._cache = {k: cached for k, cached in self._cache.items() if now - cached[0] <= CACHE_SECONDS}
            if key not in self._cache:
                self._cache[key] = now, await read()
            return self._cache[key][1]

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[PrometheusClient]:
        client = PrometheusClient(self._server)
        try:
            yield client
        finally:
            await client.close()

    async def _read_sparklines(self, points: int) -> JSON:
        async with self._open() as client:
            window = Window(*sparkline_window(points, await client.query_time()))
            reader = _RangeReader(client, window, self._match, self._node_labels)
            lines = await reader.read(reader.figures()["utilization"])
        devices = {}
        for line in lines:
            uuid, instance = _read_device(line.labels)
            if uuid:
                values = bytes(utilization_byte(_check_ratio(value)) for value in _read_values(line.points, window))
                devices[f"{uuid}/{instance}" if instance else uuid] = values
        return sparklines_json(window.start, window.step, devices, window.steps)

    async def _read_gpu(self, device: Device, seconds: int) -> JSON | None:
        async with self._open() as client:
            reader = await self._make_reader(client, seconds)
            devices = await reader.read_devices([device[0]])
        return gpu_json(devices[device].history()) if device in devices else None

    async def _read_pod(self, pod: Pod, seconds: int) -> JSON | None:
        async with self._open() as client:
            reader = await self._make_reader(client, seconds)
            uuids = {_read_device(line.labels)[0] for line in await reader.read(reader.held_by(pod))} - {""}
            devices = await reader.read_devices(sorted(uuids)[:_MAX_GPUS_OF_POD]) if uuids else {}
        histories = [device.history_of_pod(pod) for device in devices.values()]
        held = [history for history in histories if history is not None]
        held.sort(key=lambda history: (history.node, history.gpu_index or 0, history.uuid, history.instance))
        return pod_json(*pod, held)

    async def _make_reader(self, client: PrometheusClient, seconds: int) -> _RangeReader:
        step = _FINE if seconds <= MAX_POINTS * _FINE else _COARSE * -(-seconds // (_COARSE * MAX_POINTS))
        count = seconds // step
        end = await client.query_time() // _FINE * _FINE
        return _RangeReader(client, Window(end - count * step, step, count), self._match, self._node_labels)


class _RangeReader:
    """Runs the queries for one time window. Each value is the mean over its step, sampled every 15 s."""

    def __init__(self, client: PrometheusClient, window: Window, match: str, node_labels: Sequence[str]) -> None:
        self._client = client
        self._window = window
        self._match = match
        self._node_labels = node_labels

    async def read(self, query: str) -> list[RangeSeries]:
        """Raises SourceError."""
        window = self._window
        return await self._client.query_range(query, window.start + window.step, window.end, window.step)

    async def read_devices(self, uuids: Sequence[str]) -> dict[Device, _DeviceLines]:
        """Raises SourceError."""
        figures = self.figures(uuids)
        own_pods, held, ratios, memory, health, *lines = await asyncio.gather(
            self.read(self._own_pods(uuids)),
            self.read(self._held(uuids)),
            self.read(self._of_holders("podgpu_container_gpu_utilization_ratio", uuids)),
            self.read(self._of_holders("podgpu_container_gpu_memory_used_bytes", uuids)),
            self.read(self._health(uuids)),
            *(self.read(query) for query in figures.values()),
        )
        exporter_pods: dict[tuple[str, str], set[Pod]] = defaultdict(set)  # Prometheus may add their names to series
        for labels in (line.labels for line in own_pods if line.labels.get("pod")):
            exporter_pods[_read_target(labels)].add((labels.get("namespace", ""), labels["pod"]))
        devices: dict[Device, _DeviceLines] = {}

        def read(lines: Iterable[RangeSeries]) -> Iterator[tuple[_DeviceLines, Labels, Values, Workload | None]]:
            for labels, points in lines:
                device = _read_device(labels)
                if device[0]:
                    device_lines = devices.setdefault(device, _DeviceLines(device, self._window))
                    holder = read_workload(labels, exporter_pods[_read_target(labels)])
                    yield device_lines, labels, _read_values(points, self._window), holder

        for device, labels, values, holder in read(held):
            device.add_presence(labels, values, holder, self._node_labels)
        for name, series in zip(figures, lines, strict=True):
            for device, _, values, _ in read(series):
                device.add_figures(name, values)
        for name, series in (("utilization", ratios), ("memory", memory)):
            for device, _, values, holder in read(series):
                if holder is not None:
                    device.add_figures(name, values, holder)
        for device, labels, values, _ in read(health):
            device.add_condition(labels.get("condition", ""), values)
        return devices

    # PromQL

    def figures(self, uuids: Sequence[str] = ()) -> dict[str, str]:
        """Returns queries for ratios, bytes, watts and degrees of the given devices, or of all devices."""
        memory = f"max {by(*_KEYS)} ({self._select(('podgpu_device_memory_used_bytes',), uuids)})"
        queries = {
            "utilization": f"({self._field(UTIL, uuids)}) / 100 or {self._field(GR_ENGINE, uuids)}",
            "memory": f"({self._field(FB_USED, uuids)}) * {_MIB} or {memory}",
            "power": self._field(POWER, uuids),
            "temperature": self._field(TEMPERATURE, uuids),
        }
        return {name: self._over_steps("avg", query) for name, query in queries.items()}

    def held_by(self, pod: Pod) -> str:
        series = " or ".join(
            select(_HELD_NAMES, f"{namespace}={quote(pod[0])}", f"{name}={quote(pod[1])}", self._match)
            for namespace, name, _ in POD_LABEL_VARIANTS
        )
        return self._over_steps("max", f"group {by(*_KEYS)} ({series})")

    def _held(self, uuids: Sequence[str]) -> str:
        labels = by(*_KEYS, "job", "instance", "gpu", *self._node_labels, *HOLDER_LABELS)
        return self._over_steps("max", f"group {labels} ({self._select(_HELD_NAMES, uuids)})")

    def _own_pods(self, uuids: Sequence[str]) -> str:
        exporters = f"group by (job, instance) ({self._select(_HELD_NAMES, uuids)})"
        targets = f"group by (job, instance, namespace, pod) (up) and on (job, instance) ({exporters})"
        return self._over_steps("max", targets)

    def _of_holders(self, name: str, uuids: Sequence[str]) -> str:
        labels = by(*_KEYS, "job", "instance", *HOLDER_LABELS)
        return self._over_steps("avg", f"max {labels} ({self._select((name,), uuids)})")

    def _health(self, uuids: Sequence[str]) -> str:
        series = f"({self._select(('podgpu_device_health',), uuids)}) == 1"
        return self._over_steps("max", f"max {by(*_KEYS, 'condition')} ({series})")

    def _field(self, number: int, uuids: Sequence[str]) -> str:
        """Returns a query in the unit of dcgm-exporter 4.8. GPU fields repeated on MIG instances count for the GPU."""
        labels = by(*_KEYS) if fields()[number].per_instance else by(*_UUIDS)
        old_names, new_names = generations(number)
        query = f"max {labels} (({self._select(old_names, uuids)}) < {_DCGM_BLANK})"
        if new_names:
            successor = successors().get(number)
            factor = 1.0 if successor is None else successor.factor
            newer = f"max {labels} (({self._select(new_names, uuids)}) < {_DCGM_BLANK * factor:.0f})"
            query += f" or {newer} / {factor!r}"
        return query

    def _select(self, names: Sequence[str], uuids: Sequence[str]) -> str:
        matchers = [one_of(label, uuids) if uuids else f'{label}!=""' for label in _UUIDS]
        return " or ".join(select(names, matcher, self._match) for matcher in matchers)

    def _over_steps(self, function: str, query: str) -> str:
        step = self._window.step
        return query if step <= _FINE else f"{function}_over_time(({query})[{step}s:{_FINE}s])"


# Answers


class _DeviceLines:
    """The values of one device, by step."""

    def __init__(self, device: Device, window: Window) -> None:
        self._device = device
        self._window = window
        self._node = ""
        self._node_rank = 1000  # position of the node's label in --node-label
        self._index: int | None = None
        self._figures: dict[str, Values] = {name: [None] * window.steps for name in _FIGURES}
        self._known: set[int] = set()
        self._holders: dict[Workload, set[int]] = defaultdict(set)
        self._holder_figures: dict[tuple[Workload, str], Values] = {}
        self._conditions: dict[str, set[int]] = defaultdict(set)

    def add_presence(self, labels: Labels, values: Values, holder: Workload | None, node_labels: Sequence[str]) -> None:
        steps = _known_steps(values)
        self._known |= steps
        rank = next((rank for rank, name in enumerate(node_labels) if labels.get(name)), self._node_rank)
        if rank < self._node_rank:
            self._node, self._node_rank = labels[node_labels[rank]], rank
        index = labels.get("gpu", "")
        self._index = int(index) if index.isdecimal() and len(index) < 9 else self._index
        if holder is not None:
            self._holders[holder] |= steps

    def add_figures(self, name: str, values: Values, holder: Workload | None = None) -> None:
        if name == "utilization":
            values = [_check_ratio(value) for value in values]
        if holder is None:
            self._figures[name] = values
        else:
            self._holder_figures[holder, name] = values

    def add_condition(self, name: str, values: Values) -> None:
        self._conditions[name] |= _known_steps(values)

    def history(self) -> GpuHistory:
        return self._make_history(self._figures)

    def history_of_pod(self, pod: Pod) -> GpuHistory | None:
        """Returns the figures of the time in which the pod held the device. None if it never did.

        Uses the pod's own figures, or those of the device if no other pod held it.
        """
        own = {holder: steps for holder, steps in self._holders.items() if (holder.namespace, holder.pod) == pod}
        held = {step for steps in own.values() for step in steps}
        shared = {step for holder, steps in self._holders.items() if holder not in own for step in steps}
        if not held:
            return None
        figures: dict[str, list[float | None]] = {name: [None] * self._window.steps for name in _FIGURES}
        for name, values in figures.items():
            lines = [line for holder in own if (line := self._holder_figures.get((holder, name))) is not None]
            for step in held:
                parts = [part for line in lines if (part := line[step]) is not None]
                if parts:
                    values[step] = sum(parts)
                elif step not in shared or name == "temperature":
                    values[step] = self._figures[name][step]
        return self._make_history(figures)

    def _make_history(self, figures: Mapping[str, Values]) -> GpuHistory:
        series = Series(self._window.start, self._window.step, {name: list(v) for name, v in figures.items()})
        return GpuHistory(*self._device, self._node, self._index, series, self._spans())

    def _spans(self) -> list[Span]:
        spans = []
        for holder, steps in self._holders.items():
            names = holder.namespace, holder.pod, holder.job, holder.uid, holder.container_id
            for start, end in find_runs(steps, self._window, self._known):
                spans.append(Span("holder", start, end, holder.container, "", *names))
        for name, steps in self._conditions.items():
            message = words_for(name)[0] if name in conditions() else name
            for start, end in find_runs(steps, self._window, self._known):
                spans.append(Span("condition", start, end, name, message))
        return sorted(spans, key=lambda span: span.started)


def find_runs(steps: Iterable[int], window: Window, known: Iterable[int] = ()) -> list[tuple[float, float | None]]:
    """Returns start and end of each run of steps. The end is None if the run has not ended.

    A run continues over a single missing step, and over up to five minutes without any sample of the device.
    """
    runs: list[list[int]] = []
    known = set(known)
    for step in sorted(steps):
        missing = range(runs[-1][1] + 1, step) if runs else range(0)
        is_unknown = len(missing) * window.step <= _MAX_GAP_SECONDS and known.isdisjoint(missing)
        if runs and (len(missing) <= 1 or is_unknown):
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return [
        (
            window.start + first * window.step,
            None if last >= window.steps - 1 else window.start + (last + 1) * window.step,
        )
        for first, last in runs
    ]


def _read_device(labels: Mapping[str, str]) -> Device:
    return next((labels[name] for name in _UUIDS if labels.get(name)), ""), labels.get("GPU_I_ID", "")


def _read_target(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _read_values(points: Iterable[tuple[float, float]], window: Window) -> list[float | None]:
    """Returns one value per step, evaluated at the end of the step."""
    values: list[float | None] = [None] * window.steps
    for at, value in points:
        number = round((at - window.start) / window.step) - 1
        if 0 <= number < window.steps:
            values[number] = value
    return values


def _known_steps(values: Values) -> set[int]:
    return {number for number, value in enumerate(values) if value is not None}


def _check_ratio(value: float | None) -> float | None:
    return None if value is None or not 0 <= value <= 1.01 else min(value, 1.0)
