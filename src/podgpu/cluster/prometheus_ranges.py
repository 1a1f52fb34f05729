"""Answers `/api/v1/range` from the counters in Prometheus or a compatible server. Nothing is kept in the process."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from podgpu.cluster.prices import Prices
from podgpu.cluster.prometheus import GR_ENGINE, TEMPERATURE, UTIL, PodOwners
from podgpu.cluster.promql import PrometheusClient, PrometheusServer, by, select
from podgpu.cluster.ranges import RangeAnswer, RangeQuery, make_range, utc_text
from podgpu.cluster.state import ClusterState
from podgpu.errors import SourceError
from podgpu.history.queries import UsageSum
from podgpu.history.store import FINE, UNALLOCATED, Amounts, UsageAccount
from podgpu.metrics.adapter import (
    MODEL_LABELS,
    TARGET_LABELS,
    UUID_LABELS,
    WORKLOAD_LABELS,
    LabelMap,
    PodName,
    read_gpu_id,
    read_workload,
)
from podgpu.metrics.mig import billed_name, parent_and_fraction
from podgpu.metrics.names import names_of
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Workload, WorkloadOwner

_TIMEOUT = 60.0
_MAX_STEPS = 2880  # maximum number of times at which the GPUs are counted
_COUNTERS = {
    "allocated hours": "podgpu_container_gpu_allocated_seconds_total",
    "used hours": "podgpu_container_gpu_busy_seconds_total",
    "idle hours": "podgpu_container_gpu_idle_seconds_total",
    "waiting hours": "podgpu_container_gpu_wait_seconds_total",
    "energy": "podgpu_container_gpu_energy_joules_total",
    "energy of unallocated GPUs": "podgpu_device_unattributed_energy_joules_total",
}
_GPU_NAMES = (
    *(name for field in (TEMPERATURE, UTIL, GR_ENGINE) for name in names_of(field)),
    "podgpu_device_energy_joules_total",
)
_GPU_KEYS = (*UUID_LABELS, *MODEL_LABELS)
_HOLDER_KEYS = (*_GPU_KEYS, "GPU_I_ID", "GPU_I_PROFILE", *WORKLOAD_LABELS)


class _Part(NamedTuple):
    """A holder's part of a GPU or MIG instance."""

    gpu: str
    instance: str
    workload: Workload


class PrometheusRanges:
    """Implements `UsageAnswers`."""

    def __init__(self, server: PrometheusServer, read_state: Callable[[], ClusterState]) -> None:
        """`read_state` returns the state that has the prices, and owners that kube-state-metrics does not report."""
        self._server = replace(server, timeout=_TIMEOUT)
        self._read_state = read_state

    async def range(self, query: RangeQuery) -> RangeAnswer:
        """Raises SourceError."""
        client = PrometheusClient(self._server)
        try:
            start, end = query.bounds(await client.query_time())
            step = FINE * max(1, math.ceil((end - start) / FINE / _MAX_STEPS))
            end = end // step * step
            start = min(start // step * step, end - step)
            return await _RangeReader(client, self._server.match, query, start, end, step).read(self._read_state())
        finally:
            await client.close()


class _RangeReader:
    def __init__(
        self, client: PrometheusClient, match: str, query: RangeQuery, start: float, end: float, step: int
    ) -> None:
        self._client = client
        self._match = match
        self._query = query
        self._start, self._end, self._step = start, end, step
        self._window = f"{round(end - start)}s"
        self._notes: list[str] = []

    async def read(self, state: ClusterState) -> RangeAnswer:
        """Runs the queries. Adds a note for each failed query. Raises SourceError without allocated hours."""
        gpus = select(_GPU_NAMES, self._match)
        length = round((self._end - self._start) * 1000) - 1  # milliseconds; excludes the start of the range
        shares = select(("podgpu_allocation_share_ratio",), self._match)
        queries = {what: self._increase(name) for what, name in _COUNTERS.items()}
        queries["shares of GPUs"] = f"avg {by(*_HOLDER_KEYS)} (avg_over_time({shares}[{self._window}]))"
        queries["hours of unallocated GPUs"] = (
            f"count_over_time((group {by(*_GPU_KEYS)} ({gpus}))[{length}ms:{self._step}s])"
        )
        found = dict(zip(queries, await asyncio.gather(*(self._ask(*item) for item in queries.items())), strict=True))
        if not await self._client.query(f"group({gpus})", self._start + self._step):
            self._notes.append(f"Prometheus has no GPU metrics at {utc_text(self._start)}, the start of the range")
        if not found["allocated hours"]:
            self._notes.append("Prometheus has no counters of podgpu's exporters in this range")
        accounts = await self._read_accounts(found["allocated hours"], state)
        held = list(_divide(found, accounts, state.prices))
        usage = [one for _, one in held]
        usage += _find_rest(found, held, self._step, state.prices)
        usage.sort()  # makes rounding independent of the order of query results
        notes = dict.fromkeys((*self._notes, *self._client.notes))
        return make_range(self._query, (self._start, self._end), usage, state.prices, tuple(notes), state.simulated)

    async def _ask(self, what: str, query: str) -> list[ParsedSample]:
        try:
            return await self._client.query(query, self._end)
        except SourceError as error:
            if what == "allocated hours":
                raise
            self._notes.append(f"missing: {what}: {error}")
            return []

    def _increase(self, name: str) -> str:
        """Counts copies from an HA pair of Prometheus servers once. Adds up series of an exporter that moved."""
        grown = f"increase({select((name,), self._match)}[{self._window}])"
        return f"sum {by(*_HOLDER_KEYS)} (max {by(*_HOLDER_KEYS, *TARGET_LABELS)} ({grown}))"

    async def _read_accounts(self, samples: Iterable[ParsedSample], state: ClusterState) -> dict[PodName, UsageAccount]:
        """Returns owner and label of the pods."""
        pods = sorted({(w.namespace, w.pod) for s in samples if (w := read_workload(s.labels)) is not None and w.pod})
        owners: dict[PodName, WorkloadOwner] = {}
        labels: dict[PodName, str] = {}
        if self._query.label:
            labels = await self._read_labels(self._query.label)
        elif self._query.by != "namespace":
            try:
                owners = await PodOwners(self._client, self._match).read(pods, self._window, self._end)
            except SourceError as error:
                self._notes.append(f"missing: owners of pods: {error}")
        accounts = {}
        for pod in pods:
            owner = owners.get(pod) or state.owners.get(pod) or WorkloadOwner("", "")
            accounts[pod] = UsageAccount(*pod, owner_kind=owner.kind, owner_name=owner.name, labels=labels.get(pod, ""))
        return accounts

    async def _read_labels(self, name: str) -> dict[PodName, str]:
        """Returns the label of pods as JSON, from kube-state-metrics, else from the series of the exporters."""
        found: dict[PodName, str] = {}
        for names, label in ((_GPU_NAMES, name), (("kube_pod_labels",), f"label_{name}")):
            matcher = f'{label}!=""'
            series = f"last_over_time({select(names, matcher, self._match)}[{self._window}])"
            for sample in await self._ask(f"label {label}", f"group {by(*WORKLOAD_LABELS, label)} ({series})"):
                pod = read_workload(sample.labels)
                if pod is not None and pod.pod:
                    found[pod.namespace, pod.pod] = json.dumps({name: sample.labels[label]})
        return found


def _divide(
    found: Mapping[str, list[ParsedSample]], accounts: Mapping[PodName, UsageAccount], prices: Prices
) -> Iterator[tuple[str, UsageSum]]:
    """Yields the usage of each holder of each device, with the model of the GPU."""
    billed_models: dict[_Part, tuple[str, str]] = {}
    for sample in found["allocated hours"]:
        if (part := _read_part(sample.labels)) is not None:
            billed_models[part] = _read_model(sample.labels), sample.labels.get("GPU_I_PROFILE", "")
    allocated, busy, idle, waited, energy, shares = (
        _add_by_part(found[what])
        for what in ("allocated hours", "used hours", "idle hours", "waiting hours", "energy", "shares of GPUs")
    )
    for part, seconds in allocated.items():
        model, profile = billed_models[part]
        billed = billed_name(model, profile) if profile else model
        size = parent_and_fraction(billed)[1] or 0.0
        unused = min(seconds, idle.get(part, 0.0) * shares.get(part, 1.0))
        price = prices.of(billed).gpu_hour if prices.currency else None
        workload = part.workload
        account = accounts.get((workload.namespace, workload.pod)) or UsageAccount(
            workload.namespace, "", workload.job, workload.uid, workload.container_id
        )
        amounts = Amounts(
            allocated_seconds=seconds * size,
            idle_seconds=unused * size,
            cost=(price or 0.0) * seconds / 3600,
            idle_cost=(price or 0.0) * unused / 3600,
            measured_seconds=seconds * size if part in busy else 0.0,
            busy_seconds=busy.get(part, 0.0) * size,
            energy_joules=energy.get(part, 0.0),
            waited_seconds=waited.get(part, 0.0) * size,
        )
        yield model, UsageSum(account, "" if price is None else prices.currency, amounts)


def _find_rest(
    found: Mapping[str, list[ParsedSample]], held: Iterable[tuple[str, UsageSum]], step: int, prices: Prices
) -> Iterator[UsageSum]:
    """Yields the time of each GPU model that no pod held, if the GPUs could be counted."""
    if not found["hours of unallocated GPUs"]:
        return
    seconds: dict[str, float] = defaultdict(float)
    joules: dict[str, float] = defaultdict(float)
    for sample in found["hours of unallocated GPUs"]:
        if read_gpu_id(sample.labels):
            seconds[_read_model(sample.labels)] += sample.value * step
    for sample in found["energy of unallocated GPUs"]:
        joules[_read_model(sample.labels)] += sample.value
    for model, usage in held:
        seconds[model] -= usage.amounts.allocated_seconds
    for model in sorted(seconds):
        price = prices.of(model).gpu_hour if prices.currency else None
        rest = max(0.0, seconds[model])
        amounts = Amounts(rest, cost=(price or 0.0) * rest / 3600, energy_joules=joules[model])
        yield UsageSum(UNALLOCATED, "" if price is None else prices.currency, amounts)


def _add_by_part(samples: Iterable[ParsedSample]) -> dict[_Part, float]:
    parts: dict[_Part, float] = defaultdict(float)
    for sample in samples:
        if (part := _read_part(sample.labels)) is not None:
            parts[part] += sample.value
    return dict(parts)


def _read_part(labels: LabelMap) -> _Part | None:
    workload = read_workload(labels)
    return None if workload is None else _Part(read_gpu_id(labels), labels.get("GPU_I_ID", ""), workload)


def _read_model(labels: LabelMap) -> str:
    return next((labels[name] for name in MODEL_LABELS if labels.get(name)), "")
