"""Records the cluster's state in SQLite, with each holder's usage since the previous record, and
reads the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, HeldTime, charge, charge_rest
from podgpu.fleet.choose import describe_condition
from podgpu.fleet.hold import describe_idle, estimate_idle, wasteful_since
from podgpu.fleet.parts import (
    HeldPart,
    device_memory,
    device_price,
    device_utilization,
    divide_gpu,
    key_of,
)
from podgpu.fleet.readings import NodeEntry
from podgpu.fleet.round import Cluster
from podgpu.fleet.state import ClusterState
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import MJ, NS, DeviceState, HolderUsage, MigInstance, WorkloadKey
from podgpu.past.bill import RangeAnswer, RangeQuery, account_of, read_range_answer
from podgpu.past.events import IDLE, EventQuery, EventsAnswer, read_events
from podgpu.past.job import JobSummary, read_summary
from podgpu.past.moment import read_past
from podgpu.past.recorder import HistoryRecorder
from podgpu.past.store import GpuSample

_OWN_DIFFERENCE = (
    0.05  # minimum difference from the GPU's utilisation for storing a sole holder's own values
)
MAX_GPUS = 8000  # limit of the SQLite history; measured with 1,000 nodes of 8 GPUs
_MAX_CELSIUS = (
    1000  # larger values are dropped; an integer above 64 bits would make SQLite reject all samples
)
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
        """Skips GPUs without a UUID, because the UUID is the key in the history. If the node is
        gone, omits holders.
        """
        held = {} if node.gone else node.held_by_device()
        at, idle_after = node.reading.read_at + state.clock_offset, state.settings.idle_after
        for gpu in node.gpus:
            users_joules = 0.0
            for instance, device_size in divide_gpu(gpu) if gpu.uuid else ():
                parts = held.get(key_of(gpu, instance), [])
                parts = [
                    part for part in parts if part.holder.key
                ]  # excludes reservations for unknown pods
                has_figures = not node.stale
                own_figures = has_figures and (len(parts) > 1 or any(map(_differs, parts)))
                charges = [self._charge_holder(part, node, state, own_figures) for part in parts]
                users = [
                    one
                    for part, one in zip(parts, charges, strict=True)
                    if not part.holder.has_labels
                ]
                users_joules += sum(one.amounts.energy_joules for one in users)
                price = device_price(node.prices, gpu, instance, device_size)
                held_seconds = sum(one.amounts.allocated_seconds for one in charges)
                seconds, joules = self._measure_rest(gpu, instance, node)
                rest = charge_rest(seconds, device_size, held_seconds, price)
                if joules is None:
                    joules = (gpu.power_mw or 0) / 1000 * rest.allocated_seconds
                # The energy of containers that use the GPU without holding it is a part of the
                # unattributed energy.
                rest = rest._replace(energy_joules=max(0.0, joules - users_joules))
                if any(rest) and not node.silent:  # if it is silent, the holders are unknown
                    currency = "" if price is None else state.prices.currency
                    charges.append(Charge(UNALLOCATED, amounts=rest, currency=currency))
                yield GpuSample(
                    uuid=gpu.uuid,
                    instance="" if instance is None else str(instance.id),
                    node=node.name,
                    gpu_index=gpu.index,
                    figures=_figures(gpu, instance) if has_figures else None,
                    charges=charges,
                    holders_known=node.silent is None,
                    conditions=[
                        *(
                            (condition.name, describe_condition(condition)[0])
                            for condition in gpu.conditions
                        ),
                        *(
                            (IDLE, describe_idle(part.holder))
                            for part in parts
                            if wasteful_since(part, at, idle_after)
                        ),
                    ],
                    since={
                        c.name: c.since for c in gpu.conditions if c.since and c.name != NODE_GONE
                    },
                )

    def _charge_holder(
        self, part: HeldPart, node: NodeEntry, state: ClusterState, own_figures: bool
    ) -> Charge:
        usage = part.holder.usage
        figures = (
            Figures(usage.utilization_ratio, usage.memory_used_bytes)
            if own_figures and usage
            else None
        )
        time = self._measure_time(part, node, node.reading.read_at + state.clock_offset)
        amounts = Amounts() if time is None else charge(time, part.device_size, part.price)
        currency = "" if part.price is None else state.prices.currency
        return Charge(
            account_of(part, node.state.pod_labels),
            part.holder.container,
            amounts,
            figures,
            currency,
        )

    def _measure_time(self, part: HeldPart, node: NodeEntry, at: float) -> HeldTime | None:
        """Returns the holder's time since the last call, until the Unix time `at`. None after a
        long gap.
        """
        usage = part.holder.usage or HolderUsage()
        times = usage.busy_ns, usage.busy_min_ns, usage.busy_max_ns, usage.idle_ns, usage.wait_ns
        seconds, increases = self._measure_increase(
            (part.device_key, part.holder.key), node, (*times, usage.energy_mj)
        )
        if not seconds:
            return None
        busy, busy_min, busy_max, idle, waited = (
            None if ns is None else ns / NS for ns in increases[:5]
        )
        energy_mj = increases[5]
        if usage.busy_ns is None:
            ratio = _utilization(part)
            busy = None if ratio is None else ratio * seconds
        if idle is None:
            idle = estimate_idle(part, seconds, at)
        joules = (energy_mj or 0) / MJ
        if energy_mj is None and part.gpu.usage is None:
            joules = (part.gpu.power_mw or 0) / 1000 * part.gpu_fraction * seconds
        return HeldTime(seconds, part.share, busy, busy_min, busy_max, idle, waited, joules)

    def _measure_rest(
        self, gpu: DeviceState, instance: MigInstance | None, node: NodeEntry
    ) -> tuple[float, float | None]:
        """Returns the seconds since the last call, and the unattributed energy. None if the node
        does not count it.
        """
        counted = (
            None if instance is not None or gpu.usage is None else gpu.usage.unattributed_energy_mj
        )
        seconds, [energy_mj] = self._measure_increase((key_of(gpu, instance), ()), node, [counted])
        return seconds, None if gpu.usage is None else (energy_mj or 0) / MJ

    def _measure_increase(
        self, key: _PartKey, node: NodeEntry, counters: Sequence[int | None]
    ) -> tuple[float, list[int | None]]:
        """Returns the seconds and each counter's increase since the last call. After a long gap,
        these are 0 and None.

        If the exporter restarted, its counters restarted at 0, so their current values are the
        increase.
        """
        read_at, exporter_id = node.reading.read_at, node.state.exporter_id
        last_read_at, last_exporter_id, last_counters = self._before.get(
            key, (read_at, "", counters)
        )
        self._now[key] = read_at, exporter_id, counters
        seconds = read_at - last_read_at
        if not 0 < seconds <= self.longest_gap:
            return 0.0, [None] * len(counters)
        growth: list[int | None] = []
        for before, now in zip(last_counters, counters, strict=True):
            if before is None or now is None:
                growth.append(None)
            else:
                growth.append(
                    now if exporter_id != last_exporter_id or now < before else now - before
                )
        return seconds, growth


def _utilization(part: HeldPart) -> float | None:
    """Returns the holder's utilisation, or the device's if no other holder shares it. None for a
    client of MPS.
    """
    if part.is_mps_client:
        return None
    own = part.holder.usage.utilization_ratio if part.holder.usage else None
    return device_utilization(part.device) if own is None and part.share == 1 else own


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
            f"history, waste and cost of {gpus:,} GPUs are stored in SQLite, which supports "
            f"{MAX_GPUS:,}:"
            " for larger clusters, use a Prometheus server (--prometheus)"
        )


def cluster_recorder(cluster: Cluster, directory: str = "") -> HistoryRecorder:

    def read_state() -> ClusterState | None:
        return (
            cluster.published.state
            if cluster.is_on_time and cluster.published.state.nodes
            else None
        )

    gap = max(LONGEST_GAP, cluster.settings.stale_after)
    recorder = HistoryRecorder(SampleReader(read_state, gap), cluster.clock, directory)
    cluster.other_warnings = lambda: (
        *recorder.warnings(),
        *_describe_limit(cluster.published.state),
    )
    return recorder


class RecordedUsage:
    """Implements `UsageAnswers` with the history in SQLite, and provides `/api/v1/events` and
    `/api/v1/summary`.

    All methods raise SourceError if the history cannot be read.
    """

    def __init__(self, recorder: HistoryRecorder, read_state: Callable[[], ClusterState]) -> None:
        self._recorder = recorder
        self._read_state = read_state

    async def range(self, query: RangeQuery) -> RangeAnswer:
        return await self._recorder.ask(
            lambda db, now: read_range_answer(db, query, now, self._read_state())
        )

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await self._recorder.ask(lambda db, now: read_events(db, query, now))

    async def past(self, at: float) -> ClusterState:
        return await self._recorder.ask(lambda db, _: read_past(db, at, self._read_state()))

    async def summary(self, namespace: str, pod: str) -> JobSummary | None:
        """Returns None if there is no record of the pod."""
        return await self._recorder.ask(
            lambda db, now: read_summary(db, namespace, pod, now, self._read_state())
        )
