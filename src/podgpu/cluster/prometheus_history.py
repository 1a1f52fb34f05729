"""Answers `/api/v1/history` with range queries to Prometheus or a compatible server."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from podgpu.cluster.prometheus import (
    FB_USED,
    GR_ENGINE,
    HOLDER_LABELS,
    POWER,
    TEMPERATURE,
    UTIL,
)
from podgpu.cluster.promql import (
    Line,
    PrometheusClient,
    PrometheusServer,
    by,
    check_matchers,
    check_node_labels,
    one_of,
    quote,
    select,
)
from podgpu.errors import SourceError
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
from podgpu.metrics import families
from podgpu.metrics.adapter import POD_LABELS, Labels, Pod, read_workload
from podgpu.metrics.conditions import conditions, words_for
from podgpu.metrics.fields import fields
from podgpu.metrics.names import generations, names_of, successors
from podgpu.model import Workload

CACHE_SECONDS = 15.0
_FINE, _COARSE = 15, 300  # seconds, as in the SQLite store
_MAX_GAP_SECONDS = 300  # a holder is assumed to stay while nothing is known of its GPU for this long
_CACHE_SIZE = 64
_CONCURRENCY = 2
_MAX_GPUS_OF_POD = 256
_DCGM_BLANK = 0x7FFFFFF0
_MIB = 1024 * 1024
_UUIDS = ("UUID", "uuid", "gpu_uuid")
_KEYS = (*_UUIDS, "GPU_I_ID")
_HELD_NAMES = (families.ALLOCATION_INFO.name, *names_of(UTIL), *names_of(GR_ENGINE))

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
    """Implements `History`. Equal requests within 15 s share one answer."""

    def __init__(self, server: PrometheusServer, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError."""
        PrometheusClient(server)
        self._server = server
        self._match = check_matchers(server.match)
        self._node_labels = check_node_labels(server.node_labels)
        self._clock = clock
        self._cache: dict[tuple[object, ...], tuple[float, asyncio.Future[Any]]] = {}
        self._slots = asyncio.Semaphore(_CONCURRENCY)

    async def sparklines(self, points: int) -> JSON:
        answer: JSON = await self._read_cached(("sparklines", points), lambda: self._read_sparklines(points))
        return answer

    async def gpu(self, uuid: str, instance: str, seconds: int) -> JSON | None:
        key = "gpu", uuid, instance, seconds
        answer: JSON | None = await self._read_cached(key, lambda: self._read_gpu((uuid, instance), seconds))
        return answer

    async def pod(self, namespace: str, pod: str, seconds: int) -> JSON | None:
        key = "pod", namespace, pod, seconds
        answer: JSON | None = await self._read_cached(key, lambda: self._read_pod((namespace, pod), seconds))
        return answer

    async def _read_cached(self, key: tuple[object, ...], read: Callable[[], Awaitable[Any]]) -> Any:
        cached = self._cache.pop(key, None)
        if cached is None or self._clock() - cached[0] > CACHE_SECONDS:
            future = asyncio.ensure_future(read())
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
            cached = self._clock(), future
        self._cache[key] = cached
        if len(self._cache) > _CACHE_SIZE:
            del self._cache[next(iter(self._cache))]
        try:
            return await asyncio.shield(cached[1])
        except SourceError:
            if self._cache.get(key) is cached:
                del self._cache[key]
            raise

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[PrometheusClient]:
        async with self._slots:
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
                values = bytes(utilization_byte(_check_ratio(value)) for value in _read_values(line, window))
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
    """Queries about one window. Each value is the mean of its step, sampled every 15 s."""

    def __init__(self, client: PrometheusClient, window: Window, match: str, node_labels: Sequence[str]) -> None:
        self._client = client
        self._window = window
        self._match = match
        self._node_labels = node_labels

    async def read(self, query: str) -> list[Line]:
        """Raises SourceError."""
        window = self._window
        return await self._client.query_range(query, window.start + window.step, window.end, window.step)

    async def read_devices(self, uuids: Sequence[str]) -> dict[Device, _DeviceLines]:
        """Raises SourceError."""
        figures = self.figures(uuids)
        own_pods, held, ratios, memory, health, *lines = await asyncio.gather(
            self.read(self._own_pods(uuids)),
            self.read(self._held(uuids)),
            self.read(self._of_holders(families.CONTAINER_UTILIZATION.name, uuids)),
            self.read(self._of_holders(families.CONTAINER_MEMORY.name, uuids)),
            self.read(self._health(uuids)),
            *(self.read(query) for query in figures.values()),
        )
        builder = _DeviceBuilder(self._window, self._node_labels, own_pods)
        for line in held:
            builder.add_presence(line)
        for name, found in zip(figures, lines, strict=True):
            for line in found:
                builder.add_figures(name, line)
        for name, found in (("utilization", ratios), ("memory", memory)):
            for line in found:
                builder.add_holder_figures(name, line)
        for line in health:
            builder.add_condition(line)
        return {device: lines for device, lines in builder.devices.items() if device[0]}

    # PromQL

    def figures(self, uuids: Sequence[str] = ()) -> dict[str, str]:
        """Ratios, bytes, watts and degrees. Without `uuids`, of all devices."""
        memory = f"max {by(*_KEYS)} ({self._select((families.DEVICE_MEMORY.name,), uuids)})"
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
            for namespace, name, _ in POD_LABELS
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
        series = f"({self._select((families.DEVICE_HEALTH.name,), uuids)}) == 1"
        return self._over_steps("max", f"max {by(*_KEYS, 'condition')} ({series})")

    def _field(self, number: int, uuids: Sequence[str]) -> str:
        """In 4.8's unit. Fields of the GPU that dcgm-exporter repeats on its instances stay the GPU's."""
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
    """What was read of one device."""

    def __init__(self, device: Device, window: Window) -> None:
        self.device = device
        self.window = window
        self.node = ""
        self.node_rank = 1000  # position of the node's label in --node-label
        self.index: int | None = None
        nothing: Values = [None] * window.steps
        self.figures: dict[str, Values] = dict.fromkeys(("utilization", "memory", "power", "temperature"), nothing)
        self.known_steps: set[int] = set()
        self.holders: dict[Workload, set[int]] = defaultdict(set)  # -> steps
        self.holder_figures: dict[tuple[Workload, str], Values] = {}
        self.conditions: dict[str, set[int]] = defaultdict(set)  # -> steps

    def history(self) -> GpuHistory:
        series = Series(self.window.start, self.window.step, {name: list(v) for name, v in self.figures.items()})
        return GpuHistory(*self.device, self.node, self.index, series, self._spans())

    def history_of_pod(self, pod: Pod) -> GpuHistory | None:
        """Its own figures while it held the device, or the device's if no other pod held it. None: it never did."""
        own = {holder: steps for holder, steps in self.holders.items() if (holder.namespace, holder.pod) == pod}
        others = {step for holder, steps in self.holders.items() if holder not in own for step in steps}
        held = {step for steps in own.values() for step in steps}
        if not held:
            return None
        values: dict[str, list[float | None]] = {}
        for name, figures in self.figures.items():
            of_holders = [self.holder_figures[holder, name] for holder in own if (holder, name) in self.holder_figures]
            values[name] = [None] * self.window.steps
            for step in held:
                parts = [part for line in of_holders if (part := line[step]) is not None]
                if parts:
                    values[name][step] = sum(parts)
                elif step not in others or name == "temperature":
                    values[name][step] = figures[step]
        return self.history()._replace(figures=Series(self.window.start, self.window.step, values))

    def _spans(self) -> list[Span]:
        spans = []
        for holder, steps in self.holders.items():
            for start, end in find_runs(steps, self.window, self.known_steps):
                names = {"namespace": holder.namespace, "pod": holder.pod, "job": holder.job}
                ids = {"uid": holder.uid, "container_id": holder.container_id}
                spans.append(Span("holder", start, end, holder.container, **names, **ids))
        for name, steps in self.conditions.items():
            message = words_for(name)[0] if name in conditions() else name
            spans += [
                Span("condition", start, end, name, message)
                for start, end in find_runs(steps, self.window, self.known_steps)
            ]
        return sorted(spans, key=lambda span: span.started)


class _DeviceBuilder:
    def __init__(self, window: Window, node_labels: Sequence[str], own_pods: Iterable[Line]) -> None:
        """`own_pods`: the exporters' pods, which Prometheus may have added to their series."""
        self.devices: dict[Device, _DeviceLines] = {}
        self._window = window
        self._node_labels = node_labels
        self._own_pods: dict[tuple[str, str], set[Pod]] = defaultdict(set)
        for labels in (line.labels for line in own_pods):
            if labels.get("pod"):
                self._own_pods[_read_target(labels)].add((labels.get("namespace", ""), labels["pod"]))

    def _find(self, line: Line) -> _DeviceLines:
        device = _read_device(line.labels)
        return self.devices.setdefault(device, _DeviceLines(device, self._window))

    def _read_holder(self, labels: Labels) -> Workload | None:
        return read_workload(labels, self._own_pods[_read_target(labels)])

    def add_presence(self, line: Line) -> None:
        device, steps = self._find(line), _read_steps(line, self._window)
        device.known_steps |= steps
        for rank, name in enumerate(self._node_labels):
            if line.labels.get(name) and rank < device.node_rank:
                device.node, device.node_rank = line.labels[name], rank
        index = line.labels.get("gpu", "")
        device.index = int(index) if index.isdecimal() and len(index) < 9 else device.index
        holder = self._read_holder(line.labels)
        if holder is not None:
            device.holders[holder] |= steps

    def add_figures(self, name: str, line: Line) -> None:
        values = _read_values(line, self._window)
        self._find(line).figures[name] = [_check_ratio(v) for v in values] if name == "utilization" else values

    def add_holder_figures(self, name: str, line: Line) -> None:
        holder, values = self._read_holder(line.labels), _read_values(line, self._window)
        if holder is not None:
            checked = [_check_ratio(value) for value in values] if name == "utilization" else values
            self._find(line).holder_figures[holder, name] = checked

    def add_condition(self, line: Line) -> None:
        self._find(line).conditions[line.labels.get("condition", "")] |= _read_steps(line, self._window)


def find_runs(steps: Iterable[int], window: Window, known: Iterable[int] = ()) -> list[tuple[float, float | None]]:
    """Start and end of runs of steps. None: it lasts.

    A single missing step does not end a run, nor up to five minutes in which nothing is known of the device.
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


def _read_values(line: Line, window: Window) -> list[float | None]:
    """One value per step, evaluated at the step's end."""
    values: list[float | None] = [None] * window.steps
    for at, value in line.points:
        number = round((at - window.start) / window.step) - 1
        if 0 <= number < window.steps:
            values[number] = value
    return values


def _read_steps(line: Line, window: Window) -> set[int]:
    return {number for number, value in enumerate(_read_values(line, window)) if value is not None}


def _check_ratio(value: float | None) -> float | None:
    return None if value is None or not 0 <= value <= 1.01 else min(value, 1.0)
