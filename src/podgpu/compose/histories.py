"""Puts a history recorder beside a node's agent or the cluster's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from podgpu.agent.loop import Agent
from podgpu.cluster.loop import Cluster
from podgpu.cluster.prices import ReadPrices, no_prices
from podgpu.cluster.record import RoundReader
from podgpu.cluster.state import ClusterState
from podgpu.cluster.waste import RESTORED
from podgpu.history.queries import UsageRow, read_first_usage, read_usage
from podgpu.history.recorder import HistoryRecorder
from podgpu.web.node_page import NodeWaste, build_state

_LONGEST_GAP = 60.0  # seconds between two rounds of history; a longer time is not charged


def node_recorder(
    agent: Agent, directory: str = "", waste: NodeWaste | None = None, prices: ReadPrices | None = None
) -> HistoryRecorder:
    """Raises UsageError."""

    def read_state() -> ClusterState | None:
        return build_state(agent, prices or no_prices) if agent.is_fresh(agent.published) else None

    recorder = HistoryRecorder(RoundReader(read_state, _LONGEST_GAP), agent.clock, directory)
    agent.notes_beside = recorder.warnings
    if directory and waste is not None:
        _restore(recorder, waste.restore, agent.clock.wall())
    return recorder


def cluster_recorder(cluster: Cluster, directory: str = "") -> HistoryRecorder:
    """Raises UsageError."""

    def read_state() -> ClusterState | None:
        return cluster.published.state if cluster.turns and cluster.published.state.nodes else None

    gap = max(_LONGEST_GAP, cluster.settings.stale_after)
    recorder = HistoryRecorder(RoundReader(read_state, gap), cluster.clock, directory)
    cluster.notes_beside = recorder.warnings
    if directory:
        _restore(recorder, cluster.restore_waste, cluster.clock.wall())
    return recorder


def _restore(
    recorder: HistoryRecorder, restore: Callable[[Iterable[UsageRow], float | None], None], wall: float
) -> None:
    with recorder.reader() as db:
        restore(read_usage(db, 0, wall, RESTORED), read_first_usage(db))
