"""This module owns what questions are answered from: the rounds' samples, and of the last few rounds who held a GPU and
who ran.

Rounds have numbers on the wall clock, and a round is answered from only a while after its instant: two replicas that
read the same nodes at the same instants then answer alike, though one of them is done a second before the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from podgpu.autoscale.pods import PodSeen, RunningPods
from podgpu.autoscale.refusal import no_data
from podgpu.autoscale.ring import Rings
from podgpu.autoscale.samples import Holding, PodKey, Rates, ScopeKey, sample_round
from podgpu.clock import Clock
from podgpu.cluster.reading import round_number
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView
from podgpu.kube.objects import Pairs

MOST_PODS = 50_000
_MOST_SCOPES = 20_000
_SCENES = 2
"""The one that is answered from, and the one that will be in a moment."""
_SETTLED = 1 / 3
"""Part of an interval after a round's instant from which on it is answered from."""
_STARTING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Scene:
    """One round, whole."""

    number: int
    interval: float
    holding: Mapping[PodKey, Holding]
    held: frozenset[PodKey]
    """Pods that run and were seen holding a GPU at any time: that one is not seen now does not mean it has none."""
    pods: RunningPods
    pod_rings: Rings[PodKey]
    scope_rings: Rings[ScopeKey]
    old_nodes: Mapping[str, float] = field(default_factory=dict)
    """Nodes that were not heard of lately -> seconds."""
    nodes: tuple[str, ...] = ()
    """Those that were heard of."""
    node_labels: Mapping[str, Pairs] | None = None
    """None: nobody has told."""
    notes: tuple[str, ...] = ()
    """What is not as it should be, for messages."""

    @property
    def ends_at(self) -> float:
        """Unix time at which its windows end."""
        return self.number * self.interval

    def rounds_in(self, window: float) -> int:
        return max(1, math.ceil(window / self.interval))

    def is_about(self, pod: PodSeen) -> bool:
        """It has a GPU, or should have."""
        return pod.key in self.holding or pod.asks_gpu or pod.key in self.held

    def is_starting(self, pod: PodSeen) -> bool:
        """It began so lately that its node's exporter may not have told of it."""
        return pod.started_at > self.ends_at - 2 * self.interval - _STARTING_SECONDS

    def rounds_of(self, pod: PodSeen, window: float) -> int:
        """Those of the window in which it ran: rounds before that are of an earlier pod with its name."""
        if pod.started_at <= self.ends_at - window - self.interval:
            return self.rounds_in(window)
        lived = math.floor(self.ends_at / self.interval - pod.started_at / self.interval) + 1
        return min(self.rounds_in(window), max(0, lived))


class Store:
    """Takes every round in, on the rounds' thread, and hands out scenes on any."""

    def __init__(
        self,
        settings: ViewSettings,
        longest_window: float,
        pods: Callable[[], RunningPods],
        node_labels: Callable[[], Mapping[str, Pairs] | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.longest_window = longest_window
        self._pods = pods
        self._node_labels = node_labels
        self._clock = clock or Clock()
        rounds = math.ceil(longest_window / settings.interval)
        self._pod_rings: Rings[PodKey] = Rings(rounds, MOST_PODS)
        self._scope_rings: Rings[ScopeKey] = Rings(rounds, _MOST_SCOPES)
        self._rates = Rates()
        self._held: frozenset[PodKey] = frozenset()
        self._scenes: tuple[Scene, ...] = ()
        """The newest last; one reference, swapped whole."""

    def take(self, view: ClusterView) -> None:
        """A round has ended."""
        number = round_number(view.taken_at, self.settings.interval)
        sampled = sample_round(view, self._rates)
        self._pod_rings.add(number, sampled.pods)
        self._scope_rings.add(number, sampled.scopes)
        pods = self._pods()
        if not pods.trouble:  # else nobody knows which of them still run
            self._held = frozenset(key for key in (*self._held, *sampled.holding) if key in pods.keys)
        scene = Scene(
            number,
            self.settings.interval,
            sampled.holding,
            self._held,
            pods,
            self._pod_rings,
            self._scope_rings,
            {node.name: node.age for node in view.nodes if node.old},
            tuple(node.name for node in view.nodes if not node.old),
            self._node_labels(),
            tuple(dict.fromkeys((*view.notes, *(o.said for o in view.outcomes if o.error)))),
        )
        before = tuple(s for s in self._scenes if s.number < number)  # others: the clock was set back
        self._scenes = (*before, scene)[-_SCENES:]

    def scene(self) -> Scene:
        """What to answer from now. Raises Refusal while there is nothing new enough."""
        scenes = self._scenes
        if not scenes:
            raise no_data("podgpu autoscale has not finished its first round yet: ask again in a moment")
        interval, wall = self.settings.interval, self._clock.wall()
        newest = math.floor(wall / interval - _SETTLED)
        scene = next((scene for scene in reversed(scenes) if scene.number <= newest), scenes[0])
        late = wall - scene.ends_at
        if late > self.settings.stale_after + 2 * interval:
            raise no_data(
                f"podgpu autoscale's last round ended {late:.0f} s ago: it is too slow at reading the nodes; "
                "see its log"
            )
        return scene
