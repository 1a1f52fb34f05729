"""Converts the cluster's state to rounds of history, with each holder's usage since the previous round."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from podgpu.clock import Clock
from podgpu.cluster.alerts import describe_condition
from podgpu.cluster.loop import Cluster
from podgpu.cluster.nodes import NodeEntry
from podgpu.cluster.parts import HeldPart, SlotKey, divide_gpu, slot_memory, slot_utilization
from podgpu.cluster.state import ClusterState
from podgpu.cluster.waste import GroupBy, ReadWaste, WasteAnswer, make_waste
from podgpu.history.queries import read_usage, read_usage_start
from podgpu.history.recorder import HistoryRecorder
from podgpu.history.store import (
    Amounts,
    Figures,
    GpuSample,
    HistoryRound,
    HolderSample,
    UsageAccount,
)
from podgpu.model import DeviceState, MigInstance, WorkloadKey

_OWN_DIFFERENCE = 0.05  # a sole holder's own figures are stored if its utilisation differs more from the device's
LONGEST_GAP = 60.0  # longest time between two rounds that is charged, in seconds
_PartKey = tuple[SlotKey, WorkloadKey]


class RoundReader:
    """Converts the present state to a `HistoryRound`, with the usage since the previous round."""

    def __init__(
        self,
        read_state: Callable[[], ClusterState | None],
        longest_gap: float,
        wall: Callable[[], float],
        with_figures: bool = True,
    ) -> None:
        """`read_state` returns None if there is no current state. Gaps over `longest_gap` seconds are not charged.

        `with_figures` is False if Prometheus stores the figures. Then only usage is recorded.
        """
        self._with_figures = with_figures
        self._read_state = read_state
        self._wall = wall
        self._longest_gap = longest_gap
        self._before: dict[_PartKey, float] = {}  # monotonic time of the last reading of each held part
        self._now: dict[_PartKey, float] = {}

    def __call__(self) -> HistoryRound | None:
        state = self._read_state()
        if state is None or state.taken_at is None:
            return None
        self._before, self._now = self._now, {}
        return HistoryRound(self._wall(), [sample for node in state.nodes for sample in self._read_node(node, state)])

    def _read_node(self, node: NodeEntry, state: ClusterState) -> Iterator[GpuSample]:
        """Skips GPUs without a UUID, because they cannot be distinguished from those of other nodes.

        The holders of a node that is gone are not known any more.
        """
        held = {} if node.gone else node.held_by_slot()
        for gpu in node.gpus:
            for instance, _ in divide_gpu(gpu) if gpu.uuid else ():
                parts = held.get((gpu.uuid, None if instance is None else instance.id), [])
                parts = [part for part in parts if part.holder.key]  # without reserved GPUs whose pods are unknown
                has_figures = self._with_figures and not node.stale
                own_figures = has_figures and (len(parts) > 1 or any(map(_differs, parts)))
                yield GpuSample(
                    uuid=gpu.uuid,
                    instance="" if instance is None else str(instance.id),
                    node=node.name,
                    gpu_index=gpu.index,
                    figures=_figures(gpu, instance) if has_figures else None,
                    holders=[self._read_holder(part, node, state, own_figures) for part in parts],
                    conditions=[(condition.name, describe_condition(condition)[0]) for condition in gpu.conditions],
                )

    def _read_holder(self, part: HeldPart, node: NodeEntry, state: ClusterState, own_figures: bool) -> HolderSample:
        usage, key = part.holder.usage, (part.slot_key, part.holder.key)
        figures = None
        if own_figures and usage is not None:
            figures = Figures(usage.utilization_ratio, usage.memory_used_bytes)
        seconds = node.read_at - self._before.get(key, node.read_at)
        self._now[key] = node.read_at
        amounts = Amounts()
        if 0 < seconds <= self._longest_gap:
            idle = _idle_seconds(part, seconds, node.read_at + state.clock_offset)
            hourly = (part.cost_per_hour or 0.0) / 3600
            amounts = Amounts(part.part * seconds, part.part * idle, hourly * seconds, hourly * idle)
        currency = "" if part.cost_per_hour is None else state.prices.currency
        return HolderSample(_account(part), part.holder.container, amounts, figures, currency)


def _idle_seconds(part: HeldPart, seconds: float, at: float) -> float:
    """Returns the idle part of the last `seconds` before the Unix time `at`."""
    if part.use != "idle":
        return 0.0
    return seconds if part.idle_since is None else max(0.0, min(seconds, at - part.idle_since))


def _figures(gpu: DeviceState, instance: MigInstance | None) -> Figures | None:
    slot = instance or gpu
    power = None if instance is not None or gpu.power_mw is None else gpu.power_mw / 1000
    temperature = None if instance is not None else gpu.temperature_celsius
    figures = Figures(slot_utilization(slot), slot_memory(slot), power, temperature)
    return None if figures == Figures() else figures


def _differs(part: HeldPart) -> bool:
    own = None if part.holder.usage is None else part.holder.usage.utilization_ratio
    whole = slot_utilization(part.slot)
    return own is not None and (whole is None or abs(whole - own) > _OWN_DIFFERENCE)


def _account(part: HeldPart) -> UsageAccount:
    holder, owner = part.holder, part.owner
    return UsageAccount(
        namespace=holder.namespace,
        pod=holder.pod,
        job=holder.job,
        uid="" if holder.pod else holder.uid,
        container_id="" if holder.pod else holder.container_id,
        owner_kind=owner.kind if owner else "",
        owner_name=owner.name if owner else "",
    )


def cluster_recorder(cluster: Cluster, directory: str = "", with_figures: bool = True) -> HistoryRecorder:
    """Raises UsageError."""

    def read_state() -> ClusterState | None:
        return cluster.published.state if cluster.turns and cluster.published.state.nodes else None

    gap = max(LONGEST_GAP, cluster.settings.stale_after)
    read_round = RoundReader(read_state, gap, cluster.clock.wall, with_figures)
    recorder = HistoryRecorder(read_round, cluster.clock, directory)
    cluster.notes_beside = recorder.warnings
    return recorder


def cluster_waste(cluster: Cluster, recorder: HistoryRecorder) -> ReadWaste:
    return waste_reader(recorder, lambda: cluster.published.state, cluster.clock)


def waste_reader(recorder: HistoryRecorder, read_state: Callable[[], ClusterState], clock: Clock) -> ReadWaste:
    """Returns a function that computes the waste. That function raises SourceError if history cannot be read."""

    def read(by: GroupBy) -> WasteAnswer:
        state = read_state()
        with recorder.reader() as db:
            usage, since = read_usage(db, state.prices.currency), read_usage_start(db)
        return make_waste(by, state, usage, since, clock.wall())

    return read
