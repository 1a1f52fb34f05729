"""This module answers what autoscalers ask of a scene: a workload's figure, each pod's, a node's, and whether it is at
work. Pure.

Time first, then pods: each pod's figure is the mean over the window, and the aggregate is over pods. Who is in it: pods
that run and hold a GPU. One that asks for a GPU and has no figures is not left out in silence: the answer is refused,
or, where the caller wants that, given without it. A workload is idle only when every pod of it surely is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.autoscale.metrics import MEAN, USED, USED_COUNT, UTILIZATION, Aggregate, Metric
from podgpu.autoscale.pods import PodSeen
from podgpu.autoscale.refusal import Refusal, bad_request, no_data, not_found, some_of
from podgpu.autoscale.ring import known
from podgpu.autoscale.samples import ScopeKey
from podgpu.autoscale.scene import Scene
from podgpu.autoscale.selectors import Selector

DEFAULT_WINDOW = 120.0
DEFAULT_IDLE = 300.0
LEAST = 0.001
"""What is told in place of 0 where somebody may be at work: an HPA that may scale to zero does it at 0."""


@dataclass(frozen=True, slots=True)
class Over:
    """How a figure is made."""

    window: float = DEFAULT_WINDOW
    aggregate: Aggregate = MEAN
    leave_out: bool = False
    """Pods without figures, instead of refusing."""
    idle_for: float = DEFAULT_IDLE


@dataclass(frozen=True, slots=True)
class Whom:
    """The pods that a question is about."""

    namespace: str
    """Empty: the whole cluster."""
    owner: tuple[str, str] | None = None
    """Kind and name of what made them."""
    selector: Selector | None = None

    def pods(self, scene: Scene) -> Sequence[PodSeen]:
        """Those that run. Raises Refusal where nobody knows."""
        running = scene.pods
        if running.trouble:
            raise no_data(running.trouble)
        if self.owner is not None:
            return running.by_owner.get((self.namespace, *self.owner), ())
        if not self.namespace:
            return tuple(running.everywhere())
        found = running.by_namespace.get(self.namespace, ())
        if self.selector is None or not self.selector.requirements:
            return found
        pairs = self.selector.pairs
        if pairs is None:
            return [pod for pod in found if self.selector.matches(dict(pod.labels))]
        for pair in pairs:
            found = [pod for pod in found if pair in pod.labels]
        return found

    @property
    def text(self) -> str:
        if self.owner is not None:
            return f"{self.owner[0]} {self.namespace}/{self.owner[1]}"
        if self.selector is not None and self.selector.requirements:
            return f"pods of {self.namespace} with {self.selector.text}"
        return f"namespace {self.namespace}" if self.namespace else "the cluster"


class Answer(NamedTuple):
    value: float
    at: float
    """Unix time at which its window ends."""
    window: float
    """Seconds that it is over: less than was asked for of a pod that is younger."""


class PodFigure(NamedTuple):
    name: str
    value: float
    rounds: int
    """Those of the window that it is over."""


class _Sorted(NamedTuple):
    """A workload's pods, by what can be told of them."""

    with_figures: list[tuple[PodSeen, float, int]]
    """Pod, its figure, and rounds that it is over."""
    starting: list[PodSeen]
    lacking: list[PodSeen]
    """On a node that answers, without this metric."""
    dark: list[PodSeen]
    """Ask for a GPU, and are in nobody's figures."""


def _pod_mean(scene: Scene, pod: PodSeen, metric: Metric, window: float) -> tuple[float, int] | None:
    """None, too, where less than half of the window is known: after a restart of ours one sample is no mean."""
    rounds = scene.rounds_of(pod, window)
    found = scene.pod_rings.mean(pod.key, metric.column, scene.number, rounds)
    return found if found is not None and _is_enough(found[1], rounds) else None


def _is_enough(known_rounds: int, rounds: int) -> bool:
    """The first round of a counter tells no rate."""
    return 2 * known_rounds >= rounds - 1


def _sort(scene: Scene, pods: Iterable[PodSeen], metric: Metric, window: float) -> _Sorted:
    sorted_ = _Sorted([], [], [], [])
    for pod in pods:
        if not scene.is_about(pod):
            continue
        holds = pod.key in scene.holding
        found = _pod_mean(scene, pod, metric, window) if holds else None
        if found is not None:
            sorted_.with_figures.append((pod, *found))
        elif scene.is_starting(pod):
            sorted_.starting.append(pod)
        else:
            (sorted_.lacking if holds else sorted_.dark).append(pod)
    return sorted_


# A workload


def of_workload(scene: Scene, whom: Whom, metric: Metric, over: Over) -> Answer:
    """Raises Refusal."""
    pods = whom.pods(scene)
    found = _sort(scene, pods, metric, over.window)
    if not found.with_figures or ((found.lacking or found.dark) and not over.leave_out):
        raise _without(scene, whom, pods, found, metric)
    rounds = max(count for _, _, count in found.with_figures)
    value = (
        _used(scene, [pod for pod, _, _ in found.with_figures], over.window)
        if metric is USED
        else over.aggregate.of([value for _, value, _ in found.with_figures])
    )
    return _not_zero(Answer(value, scene.ends_at, rounds * scene.interval), scene, pods, over)


def _not_zero(answer: Answer, scene: Scene, pods: Iterable[PodSeen], over: Over) -> Answer:
    """Unless all of them are surely idle: whatever the metric is, an HPA scales to zero at 0."""
    is_sure = answer.value >= LEAST or _all_idle(scene, pods, over.idle_for)
    return answer if is_sure else answer._replace(value=LEAST)


def _used(scene: Scene, pods: Sequence[PodSeen], window: float) -> float:
    """The mean over devices in use of each round, and the mean of that over the rounds."""
    rounds = scene.rounds_in(window)
    totals, counts = [0.0] * rounds, [-1.0] * rounds
    for pod in pods:
        own = scene.rounds_of(pod, window)
        sums = scene.pod_rings.values(pod.key, USED.column, scene.number, own)
        devices = scene.pod_rings.values(pod.key, USED_COUNT, scene.number, own)
        for back in range(1, len(sums) + 1):
            if not math.isnan(sums[-back]):
                totals[-back] += sums[-back]
                counts[-back] = max(0.0, counts[-back]) + devices[-back]
    means = [total / count if count else 0.0 for total, count in zip(totals, counts, strict=True) if count >= 0]
    return math.fsum(means) / len(means)


def figure_of(scene: Scene, whom: Whom, metric: Metric, over: Over) -> Answer:
    """One figure for all of them. The used GPUs of a namespace or the cluster are counted each once, whoever shares
    them. Raises Refusal."""
    if metric is USED and over.aggregate != MEAN:
        raise bad_request(
            f"{metric.name} is a mean over GPUs in use, so that aggregate {over.aggregate.name} cannot be had of it: "
            f"write aggregate mean, or take {UTILIZATION.name}"
        )
    is_plain = whom.owner is None and (whom.selector is None or not whom.selector.requirements)
    if metric is not USED or not is_plain:
        return of_workload(scene, whom, metric, over)
    pods = whom.pods(scene)
    dark = [pod for pod in _without_figures(scene, pods) if not scene.is_starting(pod)]
    if dark and not over.leave_out:
        raise _without(scene, whom, pods, _Sorted([], [], [], dark), metric)
    scope = ("namespace", whom.namespace) if whom.namespace else ("cluster", "")
    return _not_zero(of_scope(scene, scope, metric, over.window), scene, pods, over)


def _without_figures(scene: Scene, pods: Iterable[PodSeen]) -> list[PodSeen]:
    """Those that have a GPU, or should have, and are in nobody's figures."""
    return [pod for pod in pods if pod.key not in scene.holding and scene.is_about(pod)]


def of_scope(scene: Scene, scope: ScopeKey, metric: Metric, window: float) -> Answer:
    """Of a node, which is never told as 0: nobody can be sure from its figures alone that all of it is idle; of a
    namespace or the cluster the used GPUs alone. Raises Refusal."""
    rounds = scene.rounds_in(window)
    values = scene.scope_rings.values(scope, metric.column, scene.number, rounds)
    if not values or math.isnan(values[-1]):
        raise _no_scope(scene, scope, metric)
    if metric is USED:
        devices = scene.scope_rings.values(scope, USED_COUNT, scene.number, rounds)
        found = [s / d if d else 0.0 for s, d in zip(values, devices, strict=True) if s == s]
    else:
        found = known(values)
    if not _is_enough(len(found), rounds):
        raise no_data(
            f"{metric.name} of {_name_of(scope)} is known for {len(found)} of the window's {rounds} rounds, less than "
            "half of them: ask again soon, or for a shorter window"
        )
    value = math.fsum(found) / len(found)
    return Answer(max(value, LEAST) if scope[0] == "node" else value, scene.ends_at, len(found) * scene.interval)


def _no_scope(scene: Scene, scope: ScopeKey, metric: Metric) -> Refusal:
    kind, name = scope
    if kind == "node":
        if name in scene.old_nodes:
            return no_data(
                f"node {name} was not heard of for {scene.old_nodes[name]:.0f} s: see that its exporter runs"
            )
        if not scene.scope_rings.values(scope, metric.column, scene.number, 1):
            return not_found(f"no exporter has figures of node {name}: see that podgpu's exporter runs there")
    return no_data(f"no exporter provides {metric.name} of {_name_of(scope)}: {metric.needs}{_notes(scene)}")


def _name_of(scope: ScopeKey) -> str:
    kind, name = scope
    return f"{kind} {name}" if name else "the cluster"


# Each pod


def of_pods(scene: Scene, pods: Iterable[PodSeen], metric: Metric, window: float) -> list[PodFigure]:
    """Those that have the figure. Missing ones are for the HPA to judge: it knows which are ready."""
    figures = []
    for pod in pods:
        found = _pod_mean(scene, pod, metric, window)
        if found is not None:
            value = found[0] if metric is not USED else _used(scene, [pod], window)
            figures.append(PodFigure(pod.name, value, found[1]))
    return figures


def why_no_pods(scene: Scene, whom: Whom, pods: Sequence[PodSeen], metric: Metric, window: float) -> Refusal:
    """For a list of pods that is empty."""
    return _without(scene, whom, pods, _sort(scene, pods, metric, window), metric)


# At work?


def is_active(scene: Scene, whom: Whom, idle_for: float) -> bool:
    """False only when every pod that holds a GPU has surely been idle for so long. Raises Refusal where nobody knows,
    and where there is no pod: nobody can see from here whether one is needed."""
    pods = whom.pods(scene)
    holding = [pod for pod in pods if pod.key in scene.holding]
    dark = _without_figures(scene, pods)
    if any(not _is_idle(scene, pod, idle_for) for pod in holding) or any(map(scene.is_starting, dark)):
        return True
    if dark or not holding:
        raise _without(scene, whom, pods, _Sorted([], [], [], dark), UTILIZATION)
    return False


def _is_idle(scene: Scene, pod: PodSeen, idle_for: float) -> bool:
    since = scene.holding[pod.key].idle_since
    return since is not None and scene.ends_at - max(since, pod.started_at) >= idle_for


def _all_idle(scene: Scene, pods: Iterable[PodSeen], idle_for: float) -> bool:
    return all(_is_idle(scene, pod, idle_for) if pod.key in scene.holding else not scene.is_about(pod) for pod in pods)


# Why not


def _without(scene: Scene, whom: Whom, pods: Sequence[PodSeen], found: _Sorted, metric: Metric) -> Refusal:
    if not pods:
        return not_found(
            f"{whom.text}: no running pod: check the name, the labels and the namespace; a workload at zero has no "
            "GPU to be seen, so that a second trigger has to wake it"
        )
    if found.dark:
        where = some_of(f"{pod.name} on {pod.node or 'no node'}{_age(scene, pod.node)}" for pod in found.dark)
        return no_data(
            f"{whom.text}: {len(found.dark)} of {len(pods)} pods ask for a GPU and are in no exporter's figures "
            f"({where}): see that podgpu's exporter runs on these nodes and is read{_notes(scene)}"
        )
    if found.lacking:
        names = some_of(pod.name for pod in found.lacking)
        return no_data(
            f"{whom.text}: no exporter provides {metric.name} of {names}, or not yet for half of the window: "
            f"{metric.needs}"
        )
    if found.starting:
        return no_data(
            f"{whom.text}: its pods have just begun, and no exporter has figures of them yet: ask again soon"
        )
    return not_found(f"{whom.text}: none of its {len(pods)} running pods holds a GPU{_notes(scene)}")


def _age(scene: Scene, node: str) -> str:
    age = scene.old_nodes.get(node)
    return "" if age is None else f", not heard of for {age:.0f} s"


def _notes(scene: Scene) -> str:
    return f" ({some_of(scene.notes)})" if scene.notes else ""
