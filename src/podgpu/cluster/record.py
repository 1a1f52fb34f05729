"""Records the cluster's state in SQLite, with each holder's usage since the previous record, and reads the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from podgpu.cluster.collect import NodeEntry
from podgpu.cluster.idle import describe_idle, wasteful_since
from podgpu.cluster.loop import Cluster
from podgpu.cluster.nodes import describe_condition
from podgpu.cluster.parts import HeldPart, device_memory, device_model, device_utilization, divide_gpu, key_of
from podgpu.cluster.past import read_past
from podgpu.cluster.ranges import RangeAnswer, RangeQuery, account_of, read_range_answer
from podgpu.cluster.state import ClusterState
from podgpu.cluster.summary import JobSummary, read_summary
from podgpu.history.events import IDLE, EventQuery, EventsAnswer, read_events
from podgpu.history.recorder import HistoryRecorder
from podgpu.history.store import Amounts, Figures, GpuSample, HolderSample
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import MJ, NS, DeviceState, HolderUsage, MigInstance, WorkloadKey

_OWN_DIFFERENCE = 0.05  # minimum difference from the GPU's utilisation for storing a sole holder's own values
MAX_GPUS = 8000  # limit of the SQLite history; measured with 1,000 nodes of 8 GPUs
_MAX_CELSIUS = 1000  # larger values are dropped; an integer above 64 bits would make SQLite reject all samples
LONGEST_GAP = 60.0  # seconds; a longer time between two records is not charged
_PartKey = tuple[str, WorkloadKey]  # device key, holder
_Counters = tuple[float, str, Sequence[int | None]]
"""Monotonic time, exporter id, and counters. A counter is None if the exporter does not have it."""


@dataclass
class SampleReader:
    """Reads the current state, with the usage since the previous call."""

    read_state: Callable[[], ClusterState | None]  # returns None if there is no current state
    longest_gap: float  # seconds; a longer time between two calls is not charged
    _before: dict[_PartKey, _Counters] = field(default_factory=dict)  # at the last call
    _now: dict[_PartKey, _Counters] = field(default_factory=dict)

    def __call__(self) -> list[GpuSample] | None:
        state = self.read_state()
        if state is None or state.taken_at is None:
            return None
        self._before, self._now = self._now, {}
        return [sample for node in state.nodes for sample in self._read_node(node, state)]

    def _read_node(self, node: NodeEntry, state: ClusterState) -> Iterator[GpuSample]:
        """Skips GPUs without a UUID, because the UUID is the key in the history. If the node is gone, omits holders."""
        held = {} if node.gone else node.held_by_device()
        at, idle_after = node.reading.read_at + state.clock_offset, state.settings.idle_after
        for gpu in node.gpus:
            users_joules = 0.0
            for instance, device_size in divide_gpu(gpu) if gpu.uuid else ():
                parts = held.get(key_of(gpu, instance), [])
                parts = [part for part in parts if part.holder.key]  # excludes reservations for unknown pods
                has_figures = not node.stale
                own_figures = has_figures and (len(parts) > 1 or any(map(_differs, parts)))
                holders = [self._read_holder(part, node, state, own_figures) for part in parts]
                users = [sample for part, sample in zip(parts, holders, strict=True) if not part.holder.has_labels]
                users_joules += sum(sample.amounts.energy_joules for sample in users)
                price = node.prices.of(device_model(gpu, instance)).gpu_hour
                rest = self._read_rest(gpu, instance, node, device_size, price, holders, users_joules)
                yield GpuSample(
                    uuid=gpu.uuid,
                    instance="" if instance is None else str(instance.id),
                    node=node.name,
                    gpu_index=gpu.index,
                    figures=_figures(gpu, instance) if has_figures else None,
                    holders=holders,
                    holders_known=node.silent is None,
                    conditions=[
                        *((condition.name, describe_condition(condition)[0]) for condition in gpu.conditions),
                        *((IDLE, describe_idle(part.holder)) for part in parts if wasteful_since(part, at, idle_after)),
                    ],
                    since={c.name: c.since for c in gpu.conditions if c.since and c.name != NODE_GONE},
                    unallocated=Amounts() if node.silent else rest,  # the holders are unknown
                    currency="" if price is None else state.prices.currency,
                )

    def _read_holder(self, part: HeldPart, node: NodeEntry, state: ClusterState, own_figures: bool) -> HolderSample:
        usage = part.holder.usage
        figures = Figures(usage.utilization_ratio, usage.memory_used_bytes) if own_figures and usage else None
        amounts = self._read_amounts(part, node, node.reading.read_at + state.clock_offset)
        currency = "" if part.cost_per_hour is None else state.prices.currency
        account = account_of(part, node.state.pod_labels)
        return HolderSample(account, part.holder.container, amounts, figures, currency)

    def _read_amounts(self, part: HeldPart, node: NodeEntry, at: float) -> Amounts:
        """Returns the holder's usage until the Unix time `at`."""
        usage = part.holder.usage or HolderUsage()
        counters = usage.busy_ns, usage.busy_min_ns, usage.busy_max_ns, usage.wait_ns, usage.energy_mj
        seconds, increases = self._measure_increase((part.device_key, part.holder.key), node, counters)
        if not seconds:
            return Amounts()
        busy, busy_min, busy_max, waited = (None if ns is None else ns / NS for ns in increases[:4])
        energy_mj = increases[4]
        if usage.busy_ns is None:
            ratio = _utilization(part)
            busy = None if ratio is None else ratio * seconds
        allocated = part.gpu_fraction * seconds
        joules = (energy_mj or 0) / MJ
        if energy_mj is None and part.gpu.usage is None:
            joules = (part.gpu.power_mw or 0) / 1000 * allocated
        idle = _idle_seconds(part, seconds, at)
        hourly = (part.cost_per_hour or 0.0) / 3600
        return Amounts(
            allocated_seconds=allocated,
            idle_seconds=part.gpu_fraction * idle,
            cost=hourly * seconds,
            idle_cost=hourly * idle,
            measured_seconds=part.gpu_fraction * idle if busy is None else allocated,
            busy_seconds=(busy or 0.0) * part.device_size,
            busy_min_seconds=(busy_min or 0.0) * part.device_size,
            busy_max_seconds=max(seconds - idle if busy_max is None else busy_max, busy or 0.0) * part.device_size,
            energy_joules=joules,
            waited_seconds=(waited or 0.0) * part.device_size,
        )

    def _read_rest(
        self,
        gpu: DeviceState,
        instance: MigInstance | None,
        node: NodeEntry,
        device_size: float,
        price: float | None,
        holders: Iterable[HolderSample],
        users_joules: float,
    ) -> Amounts:
        """Returns the time and the energy of a GPU or MIG instance that are not charged to a holder.

        `users_joules`: energy charged to containers that use the GPU without holding it. It is subtracted.
        """
        counted = None if instance is not None or gpu.usage is None else gpu.usage.unattributed_energy_mj
        seconds, [energy_mj] = self._measure_increase((key_of(gpu, instance), ()), node, [counted])
        joules = (energy_mj or 0) / MJ
        rest = max(0.0, device_size * seconds - sum(holder.amounts.allocated_seconds for holder in holders))
        if gpu.usage is None:
            joules = (gpu.power_mw or 0) / 1000 * rest
        # The price of a MIG instance is per instance, so its time is not scaled by its fraction of the GPU.
        charged = rest if instance is None else rest / device_size if device_size else 0.0
        return Amounts(rest, cost=(price or 0.0) * charged / 3600, energy_joules=max(0.0, joules - users_joules))

    def _measure_increase(
        self, key: _PartKey, node: NodeEntry, counters: Sequence[int | None]
    ) -> tuple[float, list[int | None]]:
        """Returns the seconds and each counter's increase since the last call. After a long gap, these are 0 and None.

        If the exporter restarted, its counters restarted at 0, so their current values are the increase.
        """
        read_at, exporter_id = node.reading.read_at, node.state.exporter_id
        last_read_at, last_exporter_id, last_counters = self._before.get(key, (read_at, "", counters))
        self._now[key] = read_at, exporter_id, counters
        seconds = read_at - last_read_at
        if not 0 < seconds <= self.longest_gap:
            return 0.0, [None] * len(counters)
        growth: list[int | None] = []
        for before, now in zip(last_counters, counters, strict=True):
            if before is None or now is None:
                growth.append(None)
            else:
                growth.append(now if exporter_id != last_exporter_id or now < before else now - before)
        return seconds, growth


def _utilization(part: HeldPart) -> float | None:
    """Returns the holder's utilisation, or the device's if no other holder shares it. None for a client of MPS."""
    if part.is_mps_client:
        return None
    own = part.holder.usage.utilization_ratio if part.holder.usage else None
    return device_utilization(part.device) if own is None and part.share == 1 else own


def _idle_seconds(part: HeldPart, seconds: float, at: float) -> float:
    """Returns how long the part was idle in the `seconds` before `at` (Unix time)."""
    if part.use != "idle":
        return 0.0
    return seconds if part.idle_since is None else max(0.0, min(seconds, at - part.idle_since))


def _figures(gpu: DeviceState, instance: MigInstance | None) -> Figures | None:
    device = instance or gpu
    power = None if instance is not None or gpu.power_mw is None else gpu.power_mw / 1000
    temperature = None if instance is not None else gpu.temperature_celsius
    if temperature is not None and abs(temperature) > _MAX_CELSIUS:
        temperature = None
    figures = Figures(device_utilization(device), device_memory(device), power, temperature)
    return None if figures == Figures() else figures


def _differs(part: HeldPart) -> bool:
    own = None if part.holder.usage is None else part.holder.usage.utilization_ratio
    whole = device_utilization(part.device)
    return own is not None and (whole is None or abs(whole - own) > _OWN_DIFFERENCE)


def _describe_limit(state: ClusterState) -> Iterator[str]:
    gpus = sum(len(node.state.devices) for node in state.nodes)
    if gpus > MAX_GPUS:
        yield (
            f"history, waste and cost of {gpus:,} GPUs are stored in SQLite, which supports {MAX_GPUS:,}:"
            " for larger clusters, use a Prometheus server (--prometheus)"
        )


def cluster_recorder(cluster: Cluster, directory: str = "") -> HistoryRecorder:

    def read_state() -> ClusterState | None:
        return cluster.published.state if cluster.is_on_time and cluster.published.state.nodes else None

    gap = max(LONGEST_GAP, cluster.settings.stale_after)
    recorder = HistoryRecorder(SampleReader(read_state, gap), cluster.clock, directory)
    cluster.other_warnings = lambda: (*recorder.warnings(), *_describe_limit(cluster.published.state))
    return recorder


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
