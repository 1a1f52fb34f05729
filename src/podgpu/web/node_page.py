"""Data of the exporter's own web page: the current state, the history and the waste of one node."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from podgpu.agent.loop import Agent
from podgpu.agent.publish import Published
from podgpu.cluster.collect import ViewSettings
from podgpu.cluster.loop import PublishedState
from podgpu.cluster.nodes import describe_node, sort_alerts
from podgpu.cluster.prices import ReadPrices, no_prices
from podgpu.cluster.record import LONGEST_GAP, RoundReader
from podgpu.cluster.state import ClusterState, build_single_node_state
from podgpu.cluster.summary import RecordedUsage
from podgpu.history.recorder import HistoryRecorder


def build_state(agent: Agent, prices: ReadPrices = no_prices, notes: Iterable[str] = ()) -> ClusterState:
    """Builds a cluster state that contains only this node."""
    published = agent.published
    tags, problems = prices()
    return build_single_node_state(
        published.state,
        ViewSettings(interval=agent.settings.interval, idle_after=None),
        agent.clock.monotonic(),
        agent.clock.wall(),
        fresh=agent.is_fresh(published),
        prices=tags,
        notes=(*notes, *problems),
    )


def describe_alerts(agent: Agent) -> list[str]:
    state = agent.published.state
    return [alert.text for alert in sort_alerts(describe_node(state.node, state))]


def describe_problems(agent: Agent) -> list[str]:
    """Returns one line for each failing source and each other problem."""
    state = agent.published.state
    lines = [f"{source.name}: {source.error}: {source.message}" for source in state.sources if source.up is False]
    has_answer = any(source.up is not None for source in state.sources)
    if has_answer and not lines and not state.gpus_visible and state.gpus_expected:
        lines.append(f"the PCI bus shows {state.gpus_expected} GPUs, but the driver shows none: run `podgpu doctor`")
    return [*lines, *agent.notes_beside()]


class NodePage:
    """Caches the data of the web page for each snapshot. Thread-safe."""

    def __init__(self, agent: Agent, prices: ReadPrices | None = None) -> None:
        self._agent = agent
        self._prices = prices or no_prices
        self._lock = threading.Lock()
        self._cached: tuple[Published, bool, PublishedState] | None = None

    def latest(self) -> PublishedState:
        with self._lock:
            published = self._agent.published
            fresh = self._agent.is_fresh(published)
            if self._cached is None or self._cached[0] is not published or self._cached[1] is not fresh:
                self._cached = published, fresh, self._make(published, fresh)
            return self._cached[2]

    def _make(self, published: Published, fresh: bool) -> PublishedState:
        notes = describe_problems(self._agent)
        if not fresh and published.state.taken_at:
            notes = ["the readings are too old to be shown: the driver has not been read recently", *notes]
        elif not fresh:
            notes = ["there are no readings yet: the driver has not been read yet", *notes]
        return PublishedState(build_state(self._agent, self._prices, notes))


def node_recorder(agent: Agent, directory: str = "", prices: ReadPrices = no_prices) -> HistoryRecorder:
    """Raises UsageError if `directory` is not a directory."""

    def read_state() -> ClusterState | None:
        return build_state(agent, prices) if agent.is_fresh(agent.published) else None

    recorder = HistoryRecorder(RoundReader(read_state, LONGEST_GAP, agent.clock.wall), agent.clock, directory)
    agent.notes_beside = recorder.warnings
    return recorder


def node_usage(agent: Agent, recorder: HistoryRecorder, prices: ReadPrices = no_prices) -> RecordedUsage:
    return RecordedUsage(recorder, lambda: build_state(agent, prices))
