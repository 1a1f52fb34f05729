"""The page and the waste of one node: the exporter's own view, built from its document."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from podgpu.agent.loop import Agent
from podgpu.agent.publish import Published
from podgpu.clock import FaultLog
from podgpu.cluster.alerts import describe_node, sort_alerts
from podgpu.cluster.prices import ReadPrices, no_prices
from podgpu.cluster.record import LONGEST_GAP, RoundReader, restore_waste
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState, build_single_node_state
from podgpu.cluster.view import PageState
from podgpu.cluster.waste import GroupBy, WasteAnswer, WasteLedger
from podgpu.errors import StartError
from podgpu.history.queries import UsageRow
from podgpu.history.recorder import HistoryRecorder
from podgpu.model import NodeState

WASTE_SECONDS = 5.0
_MAX_MISSED = 3  # a machine that was suspended for longer was not idle
_STOP_SECONDS = 2.0
_LOG_SECONDS = 3600.0
_log = logging.getLogger(__name__)


def node_state(agent: Agent, published: Published) -> NodeState:
    return published.state if published.state.node else replace(published.state, node="this node")


def build_state(agent: Agent, prices: ReadPrices = no_prices, notes: Iterable[str] = ()) -> ClusterState:
    """The present state of the node."""
    published = agent.published
    tags, problems = prices()
    return build_single_node_state(
        node_state(agent, published),
        ViewSettings(interval=agent.settings.interval, idle_after=None),
        agent.clock.monotonic(),
        agent.clock.wall(),
        fresh=agent.is_fresh(published),
        prices=tags,
        notes=(*notes, *problems),
    )


def describe_alerts(agent: Agent) -> list[str]:
    state = node_state(agent, agent.published)
    return [alert.text for alert in sort_alerts(describe_node(state.node, state))]


def describe_problems(agent: Agent) -> list[str]:
    """One line for each source that fails, and for other problems."""
    state = agent.published.state
    lines = [f"{source.name}: {source.error}: {source.message}" for source in state.sources if source.up is False]
    has_answer = any(source.up is not None for source in state.sources)
    if has_answer and not lines and not state.gpus_visible and state.gpus_expected:
        lines.append(
            f"the PCI bus shows {state.gpus_expected} GPUs, the driver none: `podgpu doctor` says what to look at"
        )
    return [*lines, *agent.notes_beside()]


class NodePage:
    """Builds the data of the page once per snapshot, in the thread of the first request."""

    def __init__(self, agent: Agent, prices: ReadPrices | None = None) -> None:
        self._agent = agent
        self._prices = prices or no_prices
        self._lock = threading.Lock()
        self._cached: tuple[Published, bool, PageState] | None = None

    def latest(self) -> PageState:
        with self._lock:
            published = self._agent.published
            fresh = self._agent.is_fresh(published)
            if self._cached is None or self._cached[0] is not published or self._cached[1] is not fresh:
                self._cached = published, fresh, self._make(published, fresh)
            return self._cached[2]

    def _make(self, published: Published, fresh: bool) -> PageState:
        notes = describe_problems(self._agent)
        if not fresh and published.state.taken_at:
            notes = ["the figures are too old to be shown: the driver has not been read in time", *notes]
        elif not fresh:
            notes = ["there are no figures yet: the driver has never been read", *notes]
        return PageState.of(build_state(self._agent, self._prices, notes))


class NodeWaste:
    """Counts the waste of a node every few seconds. Runs beside the agent."""

    def __init__(self, agent: Agent, prices: ReadPrices | None = None) -> None:
        self.fatal: StartError | None = None
        self._agent = agent
        self._prices = prices or no_prices
        self._ledger = WasteLedger()
        self._since: float | None = None  # monotonic
        self._source = "", False  # of the prices; whether figures are simulated
        self._lock = threading.Lock()
        self._faults: FaultLog[str] = FaultLog(agent.clock.monotonic, _LOG_SECONDS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self) -> None:
        """Charges the time since the last call. Figures that are too old to be shown are not charged."""
        with self._lock:
            agent = self._agent
            state = build_state(agent, self._prices)
            now = agent.clock.monotonic()
            self._since = now if self._since is None else self._since
            self._source = state.prices.source, state.simulated
            if not state.nodes[0].stale:
                longest_gap = max(agent.settings.stale_after, _MAX_MISSED * WASTE_SECONDS)
                self._ledger.update(state, now, longest_gap)

    def answer(self, by: GroupBy) -> WasteAnswer:
        if self._since is None:
            self.update()
        with self._lock:
            offset = self._agent.clock.wall() - self._agent.clock.monotonic()
            since = None if self._since is None else self._since + offset
            return self._ledger.answer(by, offset, since, *self._source)

    def restore(self, rows: Iterable[UsageRow], since: float | None) -> None:
        """Continues from the usage in a history file, which begins at the Unix time `since`."""
        now, wall = self._agent.clock.monotonic(), self._agent.clock.wall()
        with self._lock:
            self._ledger.restore(rows, now, wall)
            if since is not None:
                self._since = since - wall + now

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal  # podgpu runs on without waste
        self._thread = threading.Thread(target=self._run, name="waste", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(WASTE_SECONDS):
            try:
                self.update()
            except Exception:  # noqa: BLE001 - the outermost frame of a thread
                if self._faults.fail("bug", "bug"):
                    _log.exception("unexpected error while counting waste, please report it; podgpu continues")

    def reload(self) -> None:
        """Prices are read again with every update."""

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)


def node_recorder(
    agent: Agent, directory: str = "", waste: NodeWaste | None = None, prices: ReadPrices | None = None
) -> HistoryRecorder:
    """Raises UsageError."""

    def read_state() -> ClusterState | None:
        return build_state(agent, prices or no_prices) if agent.is_fresh(agent.published) else None

    recorder = HistoryRecorder(RoundReader(read_state, LONGEST_GAP, agent.clock.wall), agent.clock, directory)
    agent.notes_beside = recorder.warnings
    if directory and waste is not None:
        restore_waste(recorder, waste.restore, agent.clock.wall())
    return recorder
