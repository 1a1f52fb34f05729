"""Stores the samples of the last rounds, and publishes the snapshot that requests use.

Rounds are numbered by the wall clock, and a round is used only some time after its end. Two replicas that read the same
nodes therefore return the same values, even if one finishes its round a second earlier.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from podgpu.autoscale.pods import PodSeen, RunningPods
from podgpu.autoscale.refusal import no_data
from podgpu.autoscale.samples import IdleSeconds, PodKey, ScopeKey, UsageRates, sample_round
from podgpu.clock import Clock
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState
from podgpu.kube.objects import Pairs

_SPARE_ROUNDS = 2  # extra rounds to store, because requests may still use an older snapshot
_SETTLED = 1 / 3  # fraction of an interval to wait before a round is used
_STARTING_SECONDS = 30.0
_EARLY = 1 / 16  # a round may end early by this fraction of an interval and still gets its own number
_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)


class SampleRings(Generic[K]):
    """Stores the rows of the last rounds by key. NaN means unknown."""

    def __init__(self, rounds: int) -> None:
        """`rounds` is the number of rounds in the longest window."""
        self._rounds = rounds + _SPARE_ROUNDS
        self._rows: dict[K, dict[int, Sequence[float]]] = {}  # by round number, oldest first
        self._last: int | None = None

    def add(self, number: int, rows: Mapping[K, Sequence[float]]) -> None:
        """Stores a round. Drops all stored rounds if the number is lower, because the clock was set back."""
        if self._last is not None and number < self._last:
            self._rows = {}
        self._last = number
        for key, row in rows.items():
            self._rows.setdefault(key, {})[number] = row
        for key, by_number in list(self._rows.items()):
            while by_number and (oldest := next(iter(by_number))) <= number - self._rounds:
                del by_number[oldest]
            if not by_number:
                del self._rows[key]

    def __contains__(self, key: K) -> bool:
        return key in self._rows

    def known(self, key: K, column: int, last: int, rounds: int) -> dict[int, float]:
        """Returns the known values of the last `rounds` rounds up to round `last`, by round number."""
        by_number = self._rows.get(key, {})
        known = {}
        for number in range(last - rounds + 1, last + 1):
            row = by_number.get(number)
            if row is not None and not math.isnan(row[column]):
                known[number] = row[column]
        return known


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The complete state after one round."""

    number: int
    interval: float
    holding: Mapping[PodKey, IdleSeconds]
    held_before: frozenset[PodKey]  # running pods that have ever held a GPU and may still hold it
    pods: RunningPods
    pod_samples: SampleRings[PodKey]
    scope_samples: SampleRings[ScopeKey]
    stale_nodes: Mapping[str, float] = field(default_factory=dict)  # seconds since the last reading, by node
    nodes: tuple[str, ...] = ()  # nodes that are not stale
    node_labels: Mapping[str, Pairs] | None = None  # None if not available yet
    notes: tuple[str, ...] = ()

    @property
    def ends_at(self) -> float:
        """End of the round and of all windows, as Unix time."""
        return self.number * self.interval

    def rounds_in(self, window: float) -> int:
        return max(1, math.ceil(window / self.interval))

    def needs_gpu(self, pod: PodSeen) -> bool:
        return pod.key in self.holding or pod.requests_gpu or pod.key in self.held_before

    def is_starting(self, pod: PodSeen) -> bool:
        """Returns whether the pod started so recently that its node's exporter may not report it yet."""
        return pod.started_at > self.ends_at - 2 * self.interval - _STARTING_SECONDS

    def rounds_of(self, pod: PodSeen, window: float) -> int:
        """Returns the number of rounds in the window since the pod started.

        Earlier samples belong to a previous pod of the same name.
        """
        if pod.started_at <= self.ends_at - window - self.interval:
            return self.rounds_in(window)
        lived = math.floor(self.ends_at / self.interval - pod.started_at / self.interval) + 1
        return min(self.rounds_in(window), max(0, lived))


class SampleStore:
    """Stores rounds and provides snapshots. Only the cluster loop's thread may add rounds."""

    def __init__(
        self,
        settings: ViewSettings,
        max_window: float,
        pods: Callable[[], RunningPods],
        node_labels: Callable[[], Mapping[str, Pairs] | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.max_window = max_window
        self._pods = pods
        self._node_labels = node_labels
        self._clock = clock or Clock()
        rounds = math.ceil(max_window / settings.interval)
        self._pod_samples: SampleRings[PodKey] = SampleRings(rounds)
        self._scope_samples: SampleRings[ScopeKey] = SampleRings(rounds)
        self._rates = UsageRates(settings.stale_after)
        self._held_before: frozenset[PodKey] = frozenset()
        self._ignored: frozenset[PodKey] = frozenset()  # pods with ignored values in the last round
        self._snapshots: tuple[MetricsSnapshot, ...] = ()  # the current one and the next one

    def add_round(self, state: ClusterState) -> None:
        """Adds the samples of a finished round and publishes a new snapshot."""
        taken_at = state.taken_at or 0.0
        number = math.floor(taken_at / self.settings.interval + _EARLY)
        pods, node_labels = self._pods(), self._node_labels()
        node_names = {*(node_labels or ()), *(pod.node for pod in pods.by_key.values())}
        samples = sample_round(state, self._rates, pods, node_names)
        self._log_ignored(samples.ignored, pods)
        self._pod_samples.add(number, samples.pods)
        self._scope_samples.add(number, samples.scopes)
        if not pods.trouble:
            self._held_before = frozenset(key for key in (*self._held_before, *samples.holding) if key in pods.by_key)
        snapshot = MetricsSnapshot(
            number,
            self.settings.interval,
            samples.holding,
            self._held_before,
            pods,
            self._pod_samples,
            self._scope_samples,
            {node.name: node.age_seconds or 0.0 for node in state.nodes if node.stale},
            tuple(node.name for node in state.nodes if not node.stale),
            node_labels,
            tuple(dict.fromkeys((*state.notes, *(outcome.text for outcome in state.outcomes if outcome.error)))),
        )
        earlier = [other for other in self._snapshots if other.number < number]
        self._snapshots = (*earlier[-1:], snapshot)

    def _log_ignored(self, ignored: Mapping[PodKey, Sequence[str]], pods: RunningPods) -> None:
        for key, nodes in ignored.items():
            pod = pods.by_key.get(key)
            if pod is not None and key not in self._ignored:
                _log.warning(
                    "the exporter of %s reports the pod %s/%s, which runs on %s: its values are ignored",
                    *(", ".join(nodes), *key, pod.node or "no node"),
                )
        self._ignored = frozenset(ignored)

    def snapshot(self) -> MetricsSnapshot:
        """Raises Refusal if there is no snapshot yet, or if it is too old."""
        snapshots = self._snapshots
        if not snapshots:
            raise no_data("podgpu autoscale has not finished its first round yet: retry later")
        interval, wall = self.settings.interval, self._clock.wall()
        newest = math.floor(wall / interval - _SETTLED)
        snapshot = next((each for each in reversed(snapshots) if each.number <= newest), snapshots[0])
        late = wall - snapshot.ends_at
        if late > self.settings.stale_after + 2 * interval:
            raise no_data(
                f"podgpu autoscale's last round ended {late:.0f} s ago: it reads the nodes too slowly; see its log"
            )
        return snapshot
