"""This module says whom Prometheus scraped: each exporter's own pod, which is nobody's holder, and the copies of an HA
pair. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.cluster.prom.queries import SAMPLE_LABELS
from podgpu.metrics import families as f
from podgpu.metrics.families import EXPORTED, POD_LABELS
from podgpu.metrics.parse import ParsedSample

MOST_COPY_LABELS = 4
Labels = Mapping[str, str]
PodName = tuple[str, str]
_OF_THE_EXPORTER = frozenset((f.BUILD_INFO.name, f.SNAPSHOT_TIMESTAMP.name, f.SOURCE_UP.name))


class Target(NamedTuple):
    """One scrape target as one server saw it."""

    job: str
    instance: str
    copy: tuple[str, ...] = ()
    """Values of the labels in which copies of its series differ."""


@dataclass(frozen=True, slots=True)
class Targets:
    own_pods: Mapping[tuple[str, str], frozenset[PodName]] = field(default_factory=dict)
    """(job, instance) -> namespace and pod that the target itself runs in."""
    copy_labels: tuple[str, ...] = ()

    def of(self, labels: Labels) -> Target:
        copy = tuple([labels.get(name, "") for name in self.copy_labels]) if self.copy_labels else ()
        return Target(labels.get("job", ""), labels.get("instance", ""), copy)

    def times(self, samples: Iterable[ParsedSample]) -> dict[Target, float]:
        """The value of each, which is Unix time."""
        return {self.of(sample.labels): sample.value for sample in samples}


def targets_of(up: Iterable[ParsedSample], node_labels: Iterable[str] = ()) -> Targets:
    """From `up` with all its labels. Where a target has several series of it, they are copies of one."""
    by_target: dict[tuple[str, str], list[Labels]] = {}
    for sample in up:
        labels = sample.labels
        by_target.setdefault((labels.get("job", ""), labels.get("instance", "")), []).append(labels)
    own = {target: frozenset(map(_pod, series)) - {("", "")} for target, series in by_target.items()}
    known = {*SAMPLE_LABELS, *node_labels}
    differing = {name for series in by_target.values() if len(series) > 1 for name in _differing(series)}
    return Targets(own, tuple(sorted(differing - known)[:MOST_COPY_LABELS]))


def own_pod_told(name: str, labels: Labels) -> PodName | None:
    """What a series itself tells of its exporter's pod, should `up` be missing.

    podgpu's series on itself name no pod, and those with `exported_pod` have their own there: `pod` is the target's.
    """
    if "pod" in labels and (EXPORTED["pod"] in labels or name in _OF_THE_EXPORTER):
        return _pod(labels)
    return None


def with_own_holder(labels: Labels, own_pods: frozenset[PodName]) -> Labels:
    """The holder's names under `namespace`, `pod` and `container`, or none of them.

    `exported_pod` is the series' own. Without it `pod` may be the scrape target's, put on by Prometheus.
    """
    if labels.get(EXPORTED["pod"]) or labels.get(EXPORTED["namespace"]):
        named = {name: labels[exported] for name, exported in EXPORTED.items() if exported in labels}
    elif "pod" not in labels or _pod(labels) in own_pods:
        named = {}
    else:
        return labels
    rest = {name: value for name, value in labels.items() if name not in _HOLDERS}
    return rest | named


def is_own_pod(labels: Labels, targets: Targets) -> bool:
    """Whether `pod` is the scrape target's own."""
    return _pod(labels) in targets.own_pods.get((labels.get("job", ""), labels.get("instance", "")), frozenset())


def own_namespace(labels: Labels) -> str:
    """Of a series that is about a namespace and has one by nature."""
    return labels.get(EXPORTED["namespace"]) or labels.get("namespace", "")


_HOLDERS = frozenset((*POD_LABELS, *EXPORTED.values()))


def _pod(labels: Labels) -> PodName:
    return labels.get("namespace", ""), labels.get("pod", "")


def _differing(series: list[Labels]) -> set[str]:
    names = {name for labels in series for name in labels}
    return {name for name in names if len({labels.get(name, "") for labels in series}) > 1}
