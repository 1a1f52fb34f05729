"""This module puts a keeper of history beside a node's agent or the cluster's loop: it takes its samples of what those
publish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from podgpu.agent.loop import Agent
from podgpu.history.answering import RingHistory
from podgpu.history.keeper import Keeper
from podgpu.history.ring import Told

if TYPE_CHECKING:  # the exporter has no cluster
    from podgpu.agent.waste_watch import WasteWatch
    from podgpu.clock import Clock
    from podgpu.cluster.loop import Cluster
    from podgpu.cluster.publish import Publisher
    from podgpu.cluster.reading import MakeBackend


def node_keeper(agent: Agent, directory: str = "", waste: WasteWatch | None = None) -> Keeper:
    """Raises UsageError."""
    beside = None
    if directory and waste is not None:
        from podgpu.history.waste_file import WasteFile

        beside = WasteFile(directory, lambda: waste.wasted()[0], waste.restore, agent.clock.wall)
    keeper = Keeper(lambda: told_by_node(agent), agent.clock, directory, beside)
    agent.notes_beside = keeper.notes
    return keeper


def told_by_node(agent: Agent) -> Iterable[Told]:
    """Nothing when what was published is too old to be shown: then nothing is known."""
    from podgpu.figures.from_state import view_of_state

    published = agent.published
    if agent.is_fresh(published):
        yield Told(view_of_state(published.state, agent.settings.policy.hostname).devices)


def cluster_with_keeper(
    make_backend: MakeBackend, publisher: Publisher, clock: Clock | None = None, directory: str = ""
) -> tuple[Cluster, Keeper]:
    """Raises UsageError."""
    from podgpu.cluster.loop import Cluster

    cluster = Cluster(make_backend, publisher, clock)
    beside = None
    if directory:
        from podgpu.history.waste_file import WasteFile

        beside = WasteFile(directory, publisher.waste, publisher.restore_waste, cluster.clock.wall)
    keeper = Keeper(lambda: told_by_cluster(cluster), cluster.clock, directory, beside)
    publisher.notes_beside = keeper.notes
    return cluster, keeper


def told_by_cluster(cluster: Cluster) -> Iterable[Told]:
    """Of nodes that are old only what is wrong. GPUs without a UUID cannot be told apart from another node's."""
    from podgpu.figures.device import has_identity

    if not cluster.turns:
        return
    for node in cluster.published.view.nodes:
        if all(has_identity(device.uuid) for device in node.devices):
            yield Told(node.devices, fresh=not node.old)
        else:
            yield Told([device for device in node.devices if has_identity(device.uuid)], fresh=not node.old)


def history_of(keeper: Keeper) -> RingHistory:
    return RingHistory(keeper.ring, keeper.clock)
