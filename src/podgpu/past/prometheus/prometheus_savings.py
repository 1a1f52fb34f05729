"""Reads what each pod did in every 5 minutes from Prometheus, for savings (`advice.py`).

A query returns one number per GPU and step: the busy seconds, less 1 if the GPU was certainly idle.
Without a number, the step is unknown.

With too many GPUs to read each of them, recording rules (podgpu-savings.yaml) store these numbers,
and how much of a GPU is unused in the busiest 5 minutes of each hour. The latter find the pods that
use least of their GPUs, and only these are read.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from podgpu.charge import HeldTime, UsageAccount, charge, price_hours
from podgpu.errors import SourceError
from podgpu.fleet.prices import Prices
from podgpu.fleet.read.pages import TargetGpu
from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer
from podgpu.fleet.readings import FleetCounts
from podgpu.fleet.state import ClusterState
from podgpu.known import sum_all
from podgpu.metrics.adapter import UUID_LABELS, WORKLOAD_LABELS, first_label, read_workload
from podgpu.metrics.mig import parent_and_fraction
from podgpu.metrics.promql import by, one_of, select, sum_increase
from podgpu.model import DeviceState
from podgpu.past.accounts import account_of
from podgpu.past.busy_steps import CERTAINLY_IDLE, FULL, UNKNOWN, step_value, write_steps
from podgpu.past.savings.advice import make_savings
from podgpu.past.savings.held_pods import AccountKey, HeldPod, PodKey, collect_held, list_rooms
from podgpu.past.savings.savings import (
    MAX_DAYS,
    FleetLoad,
    SavingsAnswer,
    SavingsQuery,
    SharedLoad,
    SharedPodLoad,
    UnreadPods,
)
from podgpu.past.time_steps import COARSE, DAY, HOUR, floor_time

_TIMEOUT = 60.0
_STEP_RULE = "podgpu:savings:step5m"
_UNUSED_RULE = "podgpu:savings:unused1h"  # series of each container and device, once per hour
_RULE_AGE = "2h"  # finds the last sample of an hourly rule, also just before the next one
_MEMORY_RULE = "podgpu:savings:memory1h"
_MAX_PODS_OF_MANY = 600  # their nodes are read, too, so that an answer takes less than 10 s
MAX_PODS = 1500  # 2,016 numbers each; the cheaper pods of a larger cluster are left out and counted
# VictoriaMetrics rejects queries of more than 16 KiB, and each UUID is in it 5 times.
_GPUS_PER_QUERY = 70
_MAX_QUERIES = 4  # at the same time
_IDLE = -0.5  # a value below it says that the GPU was certainly idle
_KEYS = (*UUID_LABELS, "GPU_I_ID", *WORKLOAD_LABELS)
_RULE_LABELS = ("namespace", "pod", "hpc_job")  # of a pod in the rules
_MANY_GPUS = 2.0  # of a job: any number above 1 marks it as training
_ALLOCATED = "podgpu_container_gpu_allocated_seconds_total"
_BUSY = "podgpu_container_gpu_busy_seconds_total"
_MOST_BUSY = "podgpu_container_gpu_busy_seconds_max_total"
_IDLE_TIME = "podgpu_container_gpu_idle_seconds_total"
_WAITED = "podgpu_container_gpu_wait_seconds_total"
_GPU_MEMORY = "podgpu_device_memory_used_bytes"
_POD_MEMORY = "podgpu_container_gpu_memory_used_bytes"
_ANNOTATION = 'annotation_podgpu_io_savings="false"'
ReadGpus = Callable[[Sequence[TargetGpu]], Awaitable[ClusterState]]

_Peaks = dict[tuple[str, PodKey | None], float]
"""Largest memory by UUID and pod. With None instead of a pod: that of the whole GPU."""


class _GpuSteps(NamedTuple):
    """What a pod did on one GPU."""

    uuid: str
    seconds: array[float]  # the result of the query in each step; NaN: unknown


class _GpuSeries(NamedTuple):
    """What was read of several GPUs."""

    steps: list[tuple[PodKey, _GpuSteps]]
    peaks: _Peaks


class _HeldModel(NamedTuple):
    """GPUs of one model and node that a pod or job held."""

    cluster: str
    model: str
    node: str
    namespace: str
    pod: str
    job: str


async def read_savings(
    server: PrometheusServer,
    query: SavingsQuery,
    prices: Prices,
    state: ClusterState,
    read_gpus: ReadGpus,
) -> SavingsAnswer:
    """Returns the answer to `/api/v1/savings`. Raises SourceError."""
    server = replace(server, timeout=_TIMEOUT)
    async with aclosing(PrometheusClient(server)) as client:
        end = floor_time(await client.query_time(), COARSE)
        fleet = FleetLoad(end - query.seconds, end)
        reader = _LoadReader(client, server, fleet, state)
        if state.totals_only is None:
            await reader.read()
        else:
            await _read_many(reader, state.totals_only, prices, read_gpus)

    answer = make_savings(query, fleet, prices.currency)
    answer.prices = prices.source
    answer.simulated = state.simulated
    answer.source = "counters"
    unique_notes = list(dict.fromkeys(client.notes))
    answer.notes = unique_notes + answer.notes
    return answer


async def _read_many(
    reader: _LoadReader, counts: FleetCounts, prices: Prices, read_gpus: ReadGpus
) -> None:
    """Reads the pods that use least of their GPUs. The others are only counted."""
    fleet = reader.fleet
    if not await reader.find_recorded_start():
        fleet.notes.append(
            "there are too many GPUs to read what each pod did: install the recording rules"
            " podgpu-savings.yaml, or choose clusters or nodes with --match"
        )
        return

    accounts, gpus = await reader.find_candidates(_MAX_PODS_OF_MANY)
    reader.state = await read_gpus(gpus)
    await reader.read_recorded(accounts)
    pods = await reader.count_pods()
    fleet.unread = _count_unread(fleet, counts, prices, pods)
    if fleet.unread.pods:
        fleet.notes.append(
            f"of {counts.gpus:,} GPUs, the {len(fleet.pods)} pods that use least of theirs are"
            " examined; free GPUs of several nodes, and pods that share GPUs already, are not"
        )


def _count_unread(fleet: FleetLoad, counts: FleetCounts, prices: Prices, pods: int) -> UnreadPods:
    """Subtracts the pods that were read from all. `pods`: the number of all."""
    gpus = 0.0
    costs: list[float | None] = []
    for share in counts.held:
        _, fraction = parent_and_fraction(share.model)
        size = 1.0 if fraction is None else fraction
        gpus += share.allocated * size
        gpu_hour = prices.of(share.model).gpu_hour if prices.currency else None
        costs.append(price_hours(share.allocated, gpu_hour))

    for pod in fleet.pods:
        gpus -= pod.gpus
        costs.append(None if pod.price is None else -pod.price)

    cost = sum_all(costs)
    if cost is not None:
        cost = max(0.0, cost)

    unread = max(0, pods - len(fleet.pods))
    return UnreadPods(unread, max(0.0, gpus), cost)


@dataclass
class _LoadReader:
    client: PrometheusClient
    server: PrometheusServer
    fleet: FleetLoad
    state: ClusterState
    held: dict[PodKey, HeldPod] = field(default_factory=dict)
    gpus: dict[str, DeviceState] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)  # UUID -> node
    is_recorded: bool = False  # by the rules

    async def read(self) -> None:
        self._add_nodes()
        self.held = collect_held(self.state)
        self.fleet.pods = [pod.load for pod in self.held.values()]
        await self._find_start()
        await self._find_kept()

        chosen = self._choose()
        await asyncio.gather(self._read_pods(chosen), self._read_sizes())
        self.fleet.rooms = list(list_rooms(self.state, self.fleet.pods))
        await self._read_shared()

    async def find_recorded_start(self) -> bool:
        """Shortens the range to what the rules recorded. Returns whether they recorded anything."""
        self.is_recorded = True
        series = self.server.select(_UNUSED_RULE)
        query = f"max(count_over_time({series}[{self._window}]))"
        counts = await self.client.query(query, self.fleet.end)
        hours = counts[0].value if counts else 0.0
        self._set_start(self.fleet.end - hours * HOUR)
        return hours > 0

    async def find_candidates(self, most: int) -> tuple[set[AccountKey], list[TargetGpu]]:
        """Returns the pods that use least of their GPUs, and these GPUs."""
        cluster_label = self.server.cluster_label
        accounts: set[AccountKey] = set()
        gpus = set()
        query = self._write_candidates(most)
        for sample in await self.client.query(query, self.fleet.end):
            labels = sample.labels
            workload = read_workload(labels)
            if workload is None:
                continue

            account = UsageAccount(workload.namespace, workload.pod, workload.job_or_user)
            accounts.add(account.key)
            cluster = labels.get(cluster_label, "")
            target = labels.get("instance", "")
            gpus.add(TargetGpu(cluster, target, labels.get("UUID", "")))

        return accounts, sorted(gpus)

    def _write_candidates(self, most: int) -> str:
        labels = (self.server.cluster_label, *_RULE_LABELS)
        rule = self.server.select(_UNUSED_RULE)
        unused = f"sum {by(*labels)} (sum_over_time({rule}[{self._window}]))"
        least = f"topk({most}, {unused})"

        held = self.server.select("podgpu_allocation_info")
        of_gpu = by(self.server.cluster_label, "instance", "UUID", *_RULE_LABELS)
        on_labels = f"on ({', '.join(labels)})"
        return f"group {of_gpu} ({held}) and {on_labels} {least}"

    async def count_pods(self) -> int:
        """Returns the number of pods that the rules have recorded lately."""
        labels = by(self.server.cluster_label, *_RULE_LABELS)
        series = self.server.select(_UNUSED_RULE)
        pods = f"group {labels} (last_over_time({series}[{_RULE_AGE}]))"
        samples = await self.client.query(f"count({pods})", self.fleet.end)
        if not samples:
            return 0
        return round(samples[0].value)

    async def read_recorded(self, accounts: Collection[AccountKey]) -> None:
        """Reads the pods of these accounts."""
        for (cluster, account), pod in collect_held(self.state).items():
            if account in accounts:
                # Other pods of its job may be on nodes that are not read.
                pod.load.job_gpus = max(pod.load.job_gpus, _MANY_GPUS)
                self.held[cluster, account] = pod

        self.fleet.pods = [pod.load for pod in self.held.values()]
        self._add_nodes()
        await self._find_kept()
        await self._read_pods(self._choose())

    def _add_nodes(self) -> None:
        for node in self.state.nodes:
            for gpu in node.gpus:
                self.gpus[gpu.uuid] = gpu
                self.nodes[gpu.uuid] = node.name

    def _choose(self) -> list[HeldPod]:
        """Returns the pods to read. If there are too many, marks the cheapest ones as not read."""
        unknown = write_steps([UNKNOWN] * self._count)
        pods = []
        for pod in self.held.values():
            # Until they are read, if they are.
            pod.load.steps = unknown
            if not pod.load.problem:
                pods.append(pod)

        pods.sort(key=lambda pod: pod.load.account.key)
        pods.sort(key=_rank_cost, reverse=True)
        for pod in pods[MAX_PODS:]:
            pod.load.problem = "many"

        return pods[:MAX_PODS]

    @property
    def _count(self) -> int:
        """The number of steps."""
        return round(self.fleet.seconds / COARSE)

    @property
    def _window(self) -> str:
        """The length of the range in PromQL."""
        return f"{round(self.fleet.seconds)}s"

    async def _find_start(self) -> None:
        """Shortens the range if the server has no older counters."""
        series = self.server.select(_ALLOCATED)
        series_points = await self.client.query_range(
            f"group({series})", self.fleet.start + COARSE, self.fleet.end, COARSE
        )
        first = self.fleet.end
        for _, points in series_points:
            for timestamp, _ in points:
                first = min(first, timestamp - COARSE)

        self._set_start(first)

    def _set_start(self, first: float) -> None:
        """`first`: start of the first known use."""
        if first > self.fleet.start:
            self.fleet.start = first
            self.fleet.known_from = first

    async def _find_kept(self) -> None:
        """Marks the pods that are annotated to be left out."""
        series = self.server.select("kube_pod_annotations", _ANNOTATION)
        labels = by(self.server.cluster_label, *WORKLOAD_LABELS)
        try:
            kept = f"group {labels} ({series})"
            samples = await self.client.query(kept, self.fleet.end)
        except SourceError:
            # kube-state-metrics is optional.
            return

        for sample in samples:
            key = self._key_of(sample.labels)
            if key is not None:
                self.held[key].load.problem = "annotation"

    # Steps

    async def _read_pods(self, chosen: Sequence[HeldPod]) -> None:
        """A pod may hold GPUs of several queries, so all are read before they are added up."""
        gpus: set[str] = set()
        for pod in chosen:
            gpus.update(part.gpu.uuid for part in pod.parts)
        uuids = sorted(gpus)

        limit = asyncio.Semaphore(_MAX_QUERIES)
        queries = []
        for first in range(0, len(uuids), _GPUS_PER_QUERY):
            chunk = uuids[first : first + _GPUS_PER_QUERY]
            queries.append(self._read_gpus(chunk, limit))

        steps: dict[PodKey, list[_GpuSteps]] = defaultdict(list)
        peaks: _Peaks = {}
        for series in await asyncio.gather(*queries):
            peaks |= series.peaks
            for key, of_gpu in series.steps:
                steps[key].append(of_gpu)

        for key, of_gpus in steps.items():
            self._add_steps(self.held[key], of_gpus)
        for pod in chosen:
            pod.load.peak_bytes = _sum_peaks(pod, peaks)

    async def _read_gpus(self, uuids: Sequence[str], limit: asyncio.Semaphore) -> _GpuSeries:
        start = self.fleet.start + COARSE
        query = self._busy_query(uuids)
        if self.is_recorded:
            keys = by(self.server.cluster_label, *_KEYS)
            query = f"max {keys} ({self._select((_STEP_RULE,), uuids)})"

        async with limit:
            series = await self.client.query_range(query, start, self.fleet.end, COARSE)
            peaks = await self._read_memory(uuids)

        steps = []
        for labels, points in series:
            key = self._key_of(labels)
            if key is None:
                continue
            uuid = first_label(labels, UUID_LABELS)
            steps.append((key, _GpuSteps(uuid, self._align(points, start))))

        return _GpuSeries(steps, peaks)

    def _align(self, points: Sequence[tuple[float, float]], start: float) -> array[float]:
        """Returns a number for each step. NaN: unknown."""
        line = array("d", [math.nan]) * self._count
        for timestamp, seconds in points:
            number = round(timestamp - start) // COARSE
            if number < self._count:
                line[number] = seconds
        return line

    def _key_of(self, labels: Mapping[str, str]) -> PodKey | None:
        workload = read_workload(labels)
        if workload is None:
            return None

        cluster = self.server.cluster_of(labels)
        job = workload.job_or_user
        account = UsageAccount(workload.namespace, workload.pod, job).key
        # With a single cluster, the state names none.
        for name in (cluster, ""):
            if (name, account) in self.held:
                return name, account

        return None

    def _add_steps(self, pod: HeldPod, own: Sequence[_GpuSteps]) -> None:
        """`own`: all GPUs that the pod held in the range."""
        load = pod.load
        values = _add_up(own, load.devices)
        load.steps = write_steps(values)
        if load.price is not None:
            known_seconds = (len(values) - values.count(UNKNOWN)) * COARSE
            charged = charge(HeldTime(known_seconds), 1.0, load.price)
            load.cost = round(charged.cost, 2)

        uuids = [of_gpu.uuid for of_gpu in own]
        if not load.problem and self._has_other_model(pod, uuids):
            load.problem = "model"

    def _has_other_model(self, pod: HeldPod, uuids: Sequence[str]) -> bool:
        """Returns whether the pod held a GPU of another model, or of a model that is not known.

        `uuids`: of all GPUs that it held.
        """
        current = {part.gpu.uuid for part in pod.parts}
        for uuid in uuids:
            gpu = self.gpus.get(uuid)
            is_same_model = gpu is not None and gpu.model == pod.load.model
            if uuid not in current and not is_same_model:
                return True
        return False

    def _busy_query(self, uuids: Sequence[str]) -> str:
        # The label of the cluster may be one of the keys.
        keys = dict.fromkeys((self.server.cluster_label, *_KEYS))
        on_keys = f"on ({', '.join(keys)})"

        busy = self._increase(_BUSY, uuids)
        most_busy = self._increase(_MOST_BUSY, uuids)
        allocated = self._increase(_ALLOCATED, uuids)
        idle = self._increase(_IDLE_TIME, uuids)

        # Counted times of a share are multiplied by it, idle times are not.
        is_idle = f"({idle} >= bool {on_keys} {CERTAINLY_IDLE} * {allocated})"
        value = f"(({most_busy} or {busy}) - {on_keys} {is_idle})"
        return f"{value} and {on_keys} ({allocated} > 0)"

    def _increase(self, name: str, uuids: Sequence[str]) -> str:
        return self._sum_increase(self._select((name,), uuids), f"{COARSE}s")

    def _sum_increase(self, selected: str, window: str) -> str:
        keys = (self.server.cluster_label, *_KEYS)
        return sum_increase(selected, window, keys)

    def _select(self, names: Sequence[str], uuids: Sequence[str]) -> str:
        return select(names, one_of("UUID", uuids), self.server.match)

    async def _read_memory(self, uuids: Sequence[str]) -> _Peaks:
        """Returns the largest memory of each GPU, and of each pod on it.

        It is read of the longest range: a peak that comes once a week is not in a short one.
        """
        peaks: _Peaks = {}
        for name in (_GPU_MEMORY, _POD_MEMORY):
            query = self._write_memory(name, uuids)
            for sample in await self.client.query(query, self.fleet.end):
                labels = sample.labels
                if labels.get("GPU_I_ID"):
                    continue

                pod_key = None
                if name == _POD_MEMORY:
                    pod_key = self._key_of(labels)
                    if pod_key is None:
                        continue

                key = first_label(labels, UUID_LABELS), pod_key
                peaks[key] = max(peaks.get(key, 0.0), sample.value)

        return peaks

    def _write_memory(self, name: str, uuids: Sequence[str]) -> str:
        selected = self._select((name,), uuids)
        if self.is_recorded:
            of = "device" if name == _GPU_MEMORY else "container"
            matcher = one_of("UUID", uuids)
            selected = self.server.select(_MEMORY_RULE, f'of="{of}"', matcher)
        keys = by(self.server.cluster_label, *_KEYS)
        return f"max {keys} (max_over_time({selected}[{MAX_DAYS * DAY}s]))"

    async def _read_sizes(self) -> None:
        """Finds how many GPUs of a node the pods of the range held."""
        keys = by(self.server.cluster_label, *_KEYS)
        series = self.server.select("podgpu_allocation_info")
        query = f"group {keys} (last_over_time({series}[{self._window}]))"
        counts: Counter[_HeldModel] = Counter()
        for sample in await self.client.query(query, self.fleet.end):
            labels = sample.labels
            uuid = first_label(labels, UUID_LABELS)
            gpu = self.gpus.get(uuid)
            workload = read_workload(labels)
            if gpu is None or workload is None or labels.get("GPU_I_ID"):
                continue

            cluster = self.server.cluster_of(labels)
            node = self.nodes[uuid]
            held = _HeldModel(cluster, gpu.model, node, *workload.pod_name, workload.job)
            counts[held] += 1

        for held, count in counts.items():
            # With a single cluster, the state names none.
            for cluster in (held.cluster, ""):
                sizes = self.fleet.sizes.setdefault((cluster, held.model), set())
                sizes.add(count)

    # Pods that share a GPU

    async def _read_shared(self) -> None:
        gpus = list(self._list_shared())
        if not gpus:
            return

        waited = await self._read_waited()
        for node, keys in gpus:
            if any(key not in waited for key in keys):
                continue

            pods = []
            for key in keys:
                load = self.held[key].load
                ratio = waited[key] / self.fleet.seconds
                pods.append(SharedPodLoad(load.account, load.steps, ratio))

            cluster, _ = keys[0]
            self.fleet.shared.append(SharedLoad(cluster, node, pods))

    async def _read_waited(self) -> dict[PodKey, float]:
        """Returns the seconds for which each pod waited for a GPU."""
        selected = self.server.select(_WAITED)
        query = self._sum_increase(selected, self._window)
        waited: dict[PodKey, float] = {}
        for sample in await self.client.query(query, self.fleet.end):
            key = self._key_of(sample.labels)
            if key is not None:
                waited[key] = waited.get(key, 0.0) + sample.value

        return waited

    def _list_shared(self) -> Iterator[tuple[str, Sequence[PodKey]]]:
        """Yields the node and the pods of each GPU with several pods."""
        for node in self.state.nodes:
            if node.gone:
                continue

            for parts in node.held_by_device().values():
                # Each container of a pod has a part.
                keys = dict.fromkeys((part.cluster, account_of(part).key) for part in parts)
                pods = [key for key in keys if key in self.held]
                if len(pods) > 1 and parts[0].instance is None:
                    yield node.name, pods


def _add_up(own: Sequence[_GpuSteps], devices: int) -> list[int]:
    """Returns the value of each step. It is unknown if that of a GPU is.

    `own`: all GPUs that a pod held. `devices`: how many it holds at a time.
    """
    count = len(own[0].seconds)
    known_gpus = [0] * count
    idle_gpus = [0] * count
    busy_seconds = [0.0] * count
    for of_gpu in own:
        for number, seconds in enumerate(of_gpu.seconds):
            if math.isnan(seconds):
                continue
            known_gpus[number] += 1
            if seconds < _IDLE:
                idle_gpus[number] += 1
            elif seconds > 0:
                busy_seconds[number] += seconds

    values = [UNKNOWN] * count
    for number, gpus in enumerate(known_gpus):
        if gpus >= devices:
            is_idle = idle_gpus[number] == gpus
            value = step_value(busy_seconds[number] / COARSE, is_idle)
            # Prometheus extrapolates increases, so they may exceed the step.
            values[number] = min(devices * FULL, value)

    return values


def _rank_cost(pod: HeldPod) -> tuple[float, float]:
    return pod.load.price or 0.0, pod.load.gpus


def _sum_peaks(pod: HeldPod, peaks: _Peaks) -> float | None:
    """Returns the sum of the peaks of its GPUs, which is at least the peak of the sum."""
    key = pod.load.cluster, pod.load.account.key
    total = 0.0
    for uuid in {part.gpu.uuid for part in pod.parts}:
        peak = peaks.get((uuid, key))
        # All of a whole GPU is the pod's, so the value of the GPU counts. It is also known if
        # usage is not read.
        if pod.load.is_whole:
            peak = peaks.get((uuid, None), peak)
        if peak is None:
            return None
        total += peak

    return total
