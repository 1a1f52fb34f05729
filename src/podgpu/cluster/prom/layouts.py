"""This module puts each target's samples together again as the exposition they were scraped from: which node a sample
is about and what it tells, by its name and labels alone. Pure.

A target that has the series it had in the round before keeps its layout, and only the values are put in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.cluster.prom.targets import Labels, PodName, Target, Targets, own_namespace, own_pod_told, with_own_holder
from podgpu.cluster.reading import NamespaceCounters, NodeReading, is_about_now, moment
from podgpu.cluster.scraping.exposition import LEAST_SKEW_SECONDS
from podgpu.figures.from_exposition import figure_names
from podgpu.figures.layout import Layout
from podgpu.metrics import families as f
from podgpu.metrics.fields import Field
from podgpu.metrics.parse import ParsedSample

_COUNTERS = {f.NAMESPACE_ALLOCATED.name: 0, f.NAMESPACE_BUSY.name: 1, f.NAMESPACE_ENERGY.name: 2}
"""Name -> its place among the figures of `NamespaceCounters`."""
_ADDRESS = "instance"
_LabelSet = tuple[Labels, list[int]]
"""What is said under the same labels: numbers of samples."""


@dataclass(frozen=True, slots=True)
class Round:
    """What was asked and when, to tell how old each sample is."""

    at: float
    """Unix time by the server's clock."""
    at_monotonic: float
    """Ours at that moment: the two clocks are never compared otherwise."""
    node_labels: tuple[str, ...]
    used_field: Field
    beside: tuple[int, ...] = ()
    totals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Memory of devices, where the round did not ask for it."""

    def read_at(self, sampled_at: float) -> float:
        return self.at_monotonic - max(0.0, self.at - sampled_at)


@dataclass(slots=True)
class TargetSeries:
    """All that one target told in a round, in order."""

    names: list[str] = field(default_factory=list)
    labels: list[Labels] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def is_like(self, other: TargetSeries) -> bool:
        """But for values. Labels met before are the same object, so that this takes next to no time."""
        return self.names == other.names and self.labels == other.labels

    def without_values(self) -> TargetSeries:
        return TargetSeries(self.names, self.labels)

    def own_pods(self) -> frozenset[PodName]:
        return frozenset(filter(None, map(own_pod_told, self.names, self.labels)))


@dataclass(frozen=True, slots=True)
class AllSeries:
    """What all targets told in a round."""

    by_target: dict[Target, TargetSeries]
    label_sets: tuple[Labels, ...]
    """Each at least once."""

    @classmethod
    def of(cls, samples: Iterable[ParsedSample], targets: Targets) -> AllSeries:
        by_target: dict[Target, TargetSeries] = {}
        by_labels: dict[int, TargetSeries] = {}
        label_sets: list[Labels] = []
        for name, labels, value, _ in samples:
            series = by_labels.get(id(labels))
            if series is None:
                series = by_labels[id(labels)] = by_target.setdefault(targets.of(labels), TargetSeries())
                label_sets.append(labels)
            series.names.append(name)
            series.labels.append(labels)
            series.values.append(value)
        return cls(by_target, tuple(label_sets))


class _Node(NamedTuple):
    """What one target tells of one node. Numbers are those of its samples."""

    name: str
    samples: tuple[int, ...]
    layout: Layout
    counters: tuple[tuple[tuple[str, str], tuple[int | None, ...]], ...]
    """Namespace and model, and where their counters are."""


class TargetLayout:
    """Of a target's series."""

    def __init__(self, series: TargetSeries, own_pods: frozenset[PodName], of: Round) -> None:
        """`own_pods`: those the target itself may run in."""
        sets = _label_sets(series)
        names = _Names(sets, of.node_labels)
        self._are_names = names.are_names
        self._taken_at: int | None = None
        """By the exporter's own clock."""
        wanted = figure_names(of.used_field.name, of.beside)
        samples: dict[str, list[tuple[int, ParsedSample]]] = {}
        counters: dict[str, dict[tuple[str, str], list[int | None]]] = {}
        profiles: dict[tuple[str, str], str] = {}
        for theirs, numbers in sets:
            node = names.of(theirs)
            labels = with_own_holder(theirs, own_pods)
            if "GPU_I_PROFILE" in labels:
                profiles[_uuid(labels), labels.get("GPU_I_ID", "")] = labels["GPU_I_PROFILE"]
            for at in numbers:
                name = series.names[at]
                if name in wanted:
                    samples.setdefault(node, []).append((at, ParsedSample(name, labels, series.values[at])))
                elif name in _COUNTERS:
                    of_node, namespace = counters.setdefault(node, {}), own_namespace(theirs)
                    if namespace:
                        key = namespace, theirs.get("modelName", "")
                        of_node.setdefault(key, [None] * len(_COUNTERS))[_COUNTERS[name]] = at
                elif name == f.SNAPSHOT_TIMESTAMP.name:
                    self._taken_at = at
        self._nodes = tuple(
            _Node(
                node,
                tuple(at for at, _ in samples.get(node, ())),
                Layout([s for _, s in samples.get(node, ())], of.used_field.name, (), node, of.beside, profiles),
                tuple((key, tuple(places)) for key, places in counters.get(node, {}).items()),
            )
            for node in dict.fromkeys((*samples, *counters))
        )
        self.lasts = all(node.layout.lasts for node in self._nodes)
        """False: other values need a layout of their own."""

    def nodes(self, values: Sequence[float], target: Target, sampled_at: float, of: Round) -> Iterable[NodeReading]:
        """`values`: of the series the layout is of, or of some like them."""
        told_at = None if self._taken_at is None else values[self._taken_at]
        taken_at = moment(told_at)
        for node in self._nodes:
            view = node.layout.view([values[at] for at in node.samples], of.totals)
            yield NodeReading(
                target=target.instance or node.name,
                node=node.name,
                named=self._are_names,
                devices=view.devices,
                namespaces=tuple(
                    NamespaceCounters(*key, *(None if at is None else values[at] for at in places))
                    for key, places in node.counters
                ),
                read_at=of.read_at(sampled_at),
                taken_at=taken_at,
                dated=is_about_now(told_at, sampled_at),
                skew_seconds=_skew(taken_at, sampled_at),
                notes=view.notes,
                trouble=view.trouble,
                simulated=view.simulated,
                tells_lost=node.layout.is_podgpu,
            )


def _label_sets(series: TargetSeries) -> list[_LabelSet]:
    """There are five times as many samples as these, and what only labels tell is looked up once for all of them. Equal
    labels may come in several, where they were read apart."""
    found: dict[int, _LabelSet] = {}
    for at, labels in enumerate(series.labels):
        found.setdefault(id(labels), (labels, []))[1].append(at)
    return list(found.values())


def _skew(taken_at: float | None, sampled_at: float) -> float | None:
    """Against the server's clock. Figures from the past may as well be old: only those from the future tell."""
    ahead = 0.0 if taken_at is None else taken_at - sampled_at
    return ahead if ahead > LEAST_SKEW_SECONDS else None


class _Names:
    """What the nodes of one target are called.

    The best label any of its series has counts for all of them: `podgpu_allocation_info` has no Hostname, and the label
    `node` that Prometheus puts on it may name the same node otherwise.
    """

    def __init__(self, sets: Iterable[_LabelSet], labels: Sequence[str]) -> None:
        self._labels = labels
        self._rank = len(labels)
        found: dict[int, Counter[str]] = {}
        by_uuid: dict[int, dict[str, str]] = {}
        for of, numbers in sets:
            rank = self._rank_of(of)
            if rank < len(labels):
                name = of[labels[rank]]
                found.setdefault(rank, Counter())[name] += len(numbers)
                by_uuid.setdefault(rank, {})[_uuid(of)] = name
        self._rank = min(found, default=len(labels))
        self._usual = min(found[self._rank].items(), key=lambda kv: (-kv[1], kv[0]))[0] if found else ""
        self._by_uuid = by_uuid.get(self._rank, {})

    @property
    def are_names(self) -> bool:
        """Not only the target's address."""
        return self._rank < len(self._labels) and self._labels[self._rank] != _ADDRESS

    def of(self, labels: Labels) -> str:
        if self._rank_of(labels) == self._rank < len(self._labels):
            return labels[self._labels[self._rank]]
        return self._by_uuid.get(_uuid(labels), self._usual) or labels.get(_ADDRESS, "")

    def _rank_of(self, labels: Labels) -> int:
        for rank, name in enumerate(self._labels):
            if labels.get(name):
                return rank
        return len(self._labels)


def _uuid(labels: Labels) -> str:
    return labels.get("UUID") or labels.get("uuid", "")
