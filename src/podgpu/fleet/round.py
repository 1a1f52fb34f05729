"""Reads all nodes in rounds, in a thread with its own event loop, and publishes the results.

Rounds start at multiples of --interval, so that the rolling mean equals `avg_over_time` in
Prometheus. Request handlers read `Cluster.published`. A published object is never modified.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from podgpu.clock import Clock, FaultLog
from podgpu.errors import ReadNotes, SourceError, StartError, collect_notes
from podgpu.fleet.budgets import BudgetUses
from podgpu.fleet.jobs import JobDetector
from podgpu.fleet.parts import is_lost
from podgpu.fleet.prices import ReadPrices, no_prices
from podgpu.fleet.readings import ClusterReading, Collector
from podgpu.fleet.saved_gpus import NO_SAVINGS, SavingsFigures
from podgpu.fleet.series import cluster_families, node_families, self_families
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import AVERAGED, ClusterState, Scope, UsedMean, build_cluster_state
from podgpu.fleet.view import View, make_view
from podgpu.metrics.encode import Body, encode, etag_of
from podgpu.once import computed_once
from podgpu.workers import run_loop

LATE_ROUNDS = 3.0
_FIRST_ROUND_SECONDS = 30.0  # the first round of a large cluster is slow
_CLOSE_SECONDS = 3.0
_REPEAT_SECONDS = 600.0
_log = logging.getLogger(__name__)
MakeCollector = Callable[[], Collector]
"""Creates the collector. Called in the loop's thread, because an HTTP session belongs to one event
loop.
"""
GpuPresence = Literal["unknown", "present", "missing"]


@dataclass
class PublishedState:
    """The results of a round. Metrics and JSON are rendered on the first request, then cached."""

    state: ClusterState
    rolling: Mapping[Scope, float] = field(default_factory=dict)

    @computed_once
    def metrics(self) -> Body:
        return Body(encode(cluster_families(self.state, self.rolling)))

    @computed_once
    def nodes(self) -> Body:
        """The body of `/metrics/nodes`."""
        return Body(encode(node_families(self.state)))

    @computed_once
    def stale(self) -> Body:
        """Metrics about podgpu itself. Served if no round has completed for too long."""
        return Body(encode(self_families(self.state)))

    @computed_once
    def view(self) -> View:
        return make_view(self.state)

    @computed_once
    def view_json(self) -> tuple[Body, str]:
        """The body of `/api/v1/view` and its ETag."""
        plain = msgspec.json.encode(self.view)
        return Body(plain), etag_of(plain)


class _UsedRatios(NamedTuple):
    read_at: float  # monotonic time
    ratios: Mapping[Scope, float]


class RollingAverage:
    """Computes mean utilisation over --window, for the cluster and each namespace, node, model."""

    def __init__(self) -> None:
        self._rounds: deque[_UsedRatios] = deque()

    def add(self, now: float, settings: ViewSettings, used: Mapping[Scope, UsedMean]) -> None:
        ratios = {}
        for scope, mean in used.items():
            if scope.scope in AVERAGED:
                ratios[scope] = mean.mean / settings.full
        self._rounds.append(_UsedRatios(now, ratios))

        # Half an interval, because rounds are not exactly on time.
        oldest = now - settings.window + settings.interval / 2
        # With a window below the interval, the last reading is the whole window.
        while len(self._rounds) > 1 and self._rounds[0].read_at < oldest:
            self._rounds.popleft()

    def means(self) -> dict[Scope, float]:
        by_scope: dict[Scope, list[float]] = defaultdict(list)
        for used in self._rounds:
            for scope, ratio in used.ratios.items():
                by_scope[scope].append(ratio)
        return {scope: fmean(ratios) for scope, ratios in by_scope.items()}


class Cluster:
    def __init__(
        self,
        make_collector: MakeCollector,
        settings: ViewSettings,
        prices: ReadPrices = no_prices,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock or Clock()
        self.fatal: StartError | None = None
        self.warnings: list[ReadNotes] = []  # of other components, for the page and probes
        self.published = PublishedState(ClusterState(settings, self.clock.wall()))
        self._make_collector = make_collector
        self._prices = prices
        # Returns the Unix time for prices that change. A recorder replaces it by its own clock.
        self.read_time: Callable[[], float] = self.clock.wall
        # Returns the use of budgets, and notes. A `BudgetWatch` replaces it.
        self.read_budgets: Callable[[], BudgetUses] = lambda: ((), ())
        # Returns the figures of savings. A `SavingsWatch` replaces it.
        self.read_savings: Callable[[], SavingsFigures] = lambda: NO_SAVINGS
        self.recorded_nodes: Mapping[str, str] = {}  # the node of each GPU in the history
        self.readers: list[Callable[[ClusterState], None]] = []  # called after every round
        self._previous: ClusterState | None = None
        self._rolling = RollingAverage()
        self._detector = JobDetector(settings.compared_seconds)
        # UUIDs of lost GPUs that were removed with `podgpu forget`
        self._removed_gpus: set[str] = set()
        self._faults: FaultLog[str] = FaultLog(self.clock.monotonic, _REPEAT_SECONDS)
        self._collector: Collector | None = None
        self._round_at = float("-inf")
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    # Rounds

    async def round(self, collector: Collector) -> None:
        self._collector = collector
        self._publish(await collector.run_round())
        self._log_changes(self.published.state)
        self._round_at = self.clock.monotonic()

    def _publish(self, reading: ClusterReading) -> None:
        now = self.clock.monotonic()
        prices, notes = self._prices()
        budgets, budget_notes = self.read_budgets()
        removed = frozenset(self._removed_gpus)
        state = build_cluster_state(
            reading,
            self._previous,
            self.settings,
            now,
            self.clock.wall(),
            prices=prices.at(self.read_time()),
            removed=removed,
            notes=(*notes, *budget_notes, *collect_notes(self.warnings)),
            recorded=self.recorded_nodes,
            budgets=budgets,
            savings=self.read_savings(),
            detector=self._detector,
        )
        self._previous = state
        # A GPU that works again is shown when it is lost the next time.
        for uuid in removed:
            if self._find_presence(state, uuid) == "present":
                self._removed_gpus.discard(uuid)

        self._rolling.add(now, self.settings, state.used)
        self.published = PublishedState(state, self._rolling.means())
        for reader in self.readers:
            reader(state)

    def render_metrics(self) -> Body:
        if self.is_on_time:
            return self.published.metrics
        return self.published.stale

    async def fetch(self, target: str, path: str) -> bytes:
        """Requests a path from a node's exporter. Raises SourceError."""
        if self._collector is None:
            raise SourceError("not_asked", "the nodes have not been read yet")
        return await self._collector.fetch(target, path)

    async def _rounds(self) -> None:
        self._task = asyncio.current_task()
        interval = self.settings.interval
        collector = self._make_collector()
        try:
            while True:
                await self.round(collector)
                # Waits for the next multiple of the interval, or for `reload`.
                with suppress(TimeoutError):
                    seconds = interval - self.clock.wall() % interval
                    await asyncio.wait_for(self._wake.wait(), seconds)
                self._wake.clear()
        finally:
            await collector.close()

    # Removal of missing GPUs

    def forget(self, uuid: str) -> GpuPresence:
        """Hides a lost GPU, or a GPU of a node that is gone, until the GPU is readable again."""
        presence = self._find_presence(self.published.state, uuid)
        if presence == "missing":
            self._removed_gpus.add(uuid)
            self.reload()
        return presence

    @staticmethod
    def _find_presence(state: ClusterState, uuid: str) -> GpuPresence:
        """A GPU that several nodes report is present if it is present on one of them."""
        presence: GpuPresence = "unknown"
        for node in state.nodes:
            for gpu in node.state.devices:
                if gpu.uuid != uuid:
                    continue
                if not node.gone and not is_lost(gpu):
                    return "present"
                presence = "missing"

        return presence

    # Start and stop

    def start(self, on_fatal: Callable[[], object]) -> None:
        """Starts the thread. The thread sets `fatal` and calls `on_fatal` if the loop fails."""
        self._round_at = self.clock.monotonic()  # the time limit of the first round starts here
        self._thread = threading.Thread(
            target=self._run, args=(on_fatal,), name="cluster", daemon=True
        )
        self._thread.start()

    def _run(self, on_fatal: Callable[[], object]) -> None:
        def run_rounds() -> None:
            with suppress(asyncio.CancelledError):  # stopped
                asyncio.run(self._rounds())

        self.fatal = run_loop("cluster", run_rounds)
        if self.fatal is not None:
            on_fatal()

    @property
    def is_on_time(self) -> bool:
        """Returns True if the last round ended less than `late_after` seconds ago."""
        return self.clock.monotonic() - self._round_at <= self.late_after

    @property
    def has_results(self) -> bool:
        return self._previous is not None

    @property
    def late_after(self) -> float:
        return LATE_ROUNDS * self.settings.interval + _FIRST_ROUND_SECONDS

    def reload(self) -> None:
        """Starts a round immediately (SIGHUP)."""
        self._call(self._wake.set)

    def stop(self) -> None:
        if self._task is not None:
            self._call(self._task.cancel)
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _call(self, act: Callable[[], object]) -> None:
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed already
                self._task.get_loop().call_soon_threadsafe(act)

    def _log_changes(self, state: ClusterState) -> None:
        """Logs targets and nodes that failed or recovered since the last round, and new notes."""
        faults = _find_faults(state)
        names = {outcome.target for outcome in state.outcomes}
        names.update(node.name for node in state.nodes)
        for name, (reason, text) in faults.items():
            if self._faults.fail(name, reason):
                _log.warning("%s", text)

        for name in sorted(names - faults.keys()):
            if self._faults.recover(name):
                _log.info("%s: answers again", name)

        self._faults.remove(lambda name: name not in names and name not in faults)


def _find_faults(state: ClusterState) -> dict[str, tuple[str, str]]:
    """Maps each target, node or note with a fault to the reason and a text for the log."""
    faults = {}
    for outcome in state.outcomes:
        if outcome.error:
            faults[outcome.target] = (outcome.error, f"{outcome.text}; podgpu will retry")

    for node in state.nodes:
        if node.stale:
            faults[node.name] = ("stale", f"{node.name}: stale, no current values")

    for note in state.notes:
        if note.is_logged:
            continue
        # The note of a target that cannot be read has the target's name as its key.
        faults.setdefault(note.key, ("note", note.text))

    return faults
