"""Stores the samples of the last rounds, and publishes the snapshot that requests use."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from podgpu.autoscale.pods import PodSeen, RunningPods
from podgpu.autoscale.refusal import no_data
from podgpu.autoscale.samples import RoundSamples, SampleKey, UsageRates, sample_round
from podgpu.clock import Clock
from podgpu.cluster.collect import ViewSettings
from podgpu.cluster.state import ClusterState

_STARTING_SECONDS = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The complete state after one round."""

    rounds: tuple[RoundSamples, ...]  # the rounds of the longest window, oldest first
    ends_at: float  # end of the last round and of all windows, as Unix time
    interval: float
    held_before: frozenset[SampleKey]  # running pods that have ever held a GPU and may still hold it
    pods: RunningPods
    stale_nodes: Mapping[str, float]  # seconds since the last reading, by node
    notes: tuple[str, ...]

    @property
    def last(self) -> RoundSamples:
        return self.rounds[-1]

    def rounds_in(self, window: float) -> Sequence[RoundSamples]:
        first = (
            self.last.at - window + self.interval / 2
        )  # tolerance, because rounds do not end exactly after an interval
        return self.rounds[bisect_right(self.rounds, first, key=attrgetter("at")) :]

    def count_rounds(self, window: float) -> int:
        return max(1, math.ceil(window / self.interval))

    def age(self, pod: PodSeen) -> float:
        return self.ends_at - pod.started_at

    def needs_gpu(self, pod: PodSeen) -> bool:
        return pod.key in self.last.rows or pod.requests_gpu or pod.key in self.held_before

    def is_starting(self, pod: PodSeen) -> bool:
        """Returns whether the pod started so recently that its node's exporter may not report it yet."""
        return self.age(pod) < 2 * self.interval + _STARTING_SECONDS


class SampleStore:
    """Stores rounds and provides snapshots. Only the cluster loop's thread may add rounds."""

    def __init__(
        self, settings: ViewSettings, max_window: float, pods: Callable[[], RunningPods], clock: Clock | None = None
    ) -> None:
        self.settings = settings
        self.max_window = max_window
        self._pods = pods
        self._clock = clock or Clock()
        self._rates = UsageRates(settings.stale_after)
        self._ignored: frozenset[SampleKey] = frozenset()  # pods with ignored values in the last round
        self._snapshot: MetricsSnapshot | None = None

    def add_round(self, state: ClusterState) -> None:
        """Adds the samples of a finished round and publishes a new snapshot."""
        before, now, pods = self._snapshot, self._clock.monotonic(), self._pods()
        samples = sample_round(state, self._rates, pods, now)
        self._log_ignored(samples.ignored, pods)
        rounds = [one for one in before.rounds if one.at > now - self.max_window] if before else []
        held_before = before.held_before if before else frozenset()
        if not pods.trouble:
            held_before = frozenset(key for key in (*held_before, *samples.rows) if key in pods.by_key)
        keys = {key: key for key in rounds[-1].rows} if rounds else {}  # shared by all rounds, to save memory
        rows = {keys.get(key, key): row for key, row in samples.rows.items()}
        self._snapshot = MetricsSnapshot(
            (*rounds, samples._replace(rows=rows)),
            state.taken_at or 0.0,
            self.settings.interval,
            held_before,
            pods,
            {node.name: node.age_seconds or 0.0 for node in state.nodes if node.stale},
            tuple(dict.fromkeys((*state.notes, *(outcome.text for outcome in state.outcomes if outcome.error)))),
        )

    def _log_ignored(self, ignored: Mapping[SampleKey, Sequence[str]], pods: RunningPods) -> None:
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
        snapshot = self._snapshot
        if snapshot is None:
            raise no_data("podgpu autoscale has not finished its first round yet: retry later")
        late = self._clock.monotonic() - snapshot.last.at
        if late > self.settings.stale_after + 2 * self.settings.interval:
            raise no_data(
                f"podgpu autoscale's last round ended {late:.0f} s ago: it reads the nodes too slowly; see its log"
            )
        return snapshot
