"""This module makes nodes of a round's samples: whose sample it is, what the node is called, which copy is the newest.
Pure.

Each target's samples are put together again as the exposition they were scraped from, and read as every exposition is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from podgpu.catalog import families as f
from podgpu.catalog.fields import Field
from podgpu.cluster.prom.targets import Labels, Target, Targets, own_namespace, with_own_holder, with_own_pods
from podgpu.cluster.reading import NamespaceCounters, NodeReading, is_about_now, moment
from podgpu.cluster.scraping.exposition import LEAST_SKEW_SECONDS
from podgpu.exposition.parse import ParsedSample
from podgpu.figures.device import DeviceFigures
from podgpu.figures.from_exposition import figure_names, figures_of

_COUNTERS = {
    f.NAMESPACE_ALLOCATED.name: "allocated_seconds",
    f.NAMESPACE_BUSY.name: "busy_seconds",
    f.NAMESPACE_ENERGY.name: "energy_joules",
}
_ADDRESS = "instance"


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


class LabelSet(NamedTuple):
    """What is said under the same labels. There are five times as many samples as these, and what only labels tell is
    looked up once for all of them."""

    labels: Labels
    figures: list[tuple[str, float]]
    """Name and value."""


def nodes_of(
    samples: Iterable[ParsedSample], sampled_at: Mapping[Target, float], targets: Targets, of: Round
) -> tuple[NodeReading, ...]:
    """`sampled_at`: Unix time of each target's newest sample."""
    everything = _by_labels(samples)
    targets = with_own_pods(targets, ((labels, (name for name, _ in figures)) for labels, figures in everything))
    found: dict[tuple[str, str], list[NodeReading]] = {}
    for target, series in _by_target(everything, targets).items():
        own = targets.own_pods.get(target[:2], frozenset())
        for node in _read_target(series, target, own, sampled_at.get(target, of.at), of):
            found.setdefault((f"{target.job}/{target.instance}", node.node), []).append(node)
    return tuple(node for copies in found.values() for node in newest_copies(copies))


def _by_labels(samples: Iterable[ParsedSample]) -> list[LabelSet]:
    """Equal labels may come in several of these, where they were read apart."""
    found: dict[int, LabelSet] = {}
    for name, labels, value, _ in samples:
        known = found.get(id(labels))
        if known is None:
            known = found[id(labels)] = LabelSet(labels, [])
        known.figures.append((name, value))
    return list(found.values())


def _by_target(series: Iterable[LabelSet], targets: Targets) -> dict[Target, list[LabelSet]]:
    found: dict[Target, list[LabelSet]] = {}
    for of in series:
        found.setdefault(targets.of(of.labels), []).append(of)
    return found


# One target


def _read_target(
    series: Sequence[LabelSet],
    target: Target,
    own_pods: frozenset[tuple[str, str]],
    sampled_at: float,
    of: Round,
) -> list[NodeReading]:
    measured = of.used_field.name
    names = _Names(series, of.node_labels)
    told = _gathered(series, names, own_pods, figure_names(measured, of.beside))
    readings = []
    for node in told.samples.keys() | told.counters.keys():
        view, _, is_podgpu = figures_of(told.samples.get(node, ()), measured, beside=of.beside)
        readings.append(
            NodeReading(
                target=target.instance or node,
                node=node,
                named=names.are_names,
                devices=tuple(_on(node, device, told.profiles, of.totals) for device in view.devices),
                namespaces=tuple(told.counters.get(node, {}).values()),
                read_at=of.read_at(sampled_at),
                taken_at=moment(told.at),
                dated=is_about_now(told.at, sampled_at),
                skew_seconds=_skew(moment(told.at), sampled_at),
                notes=view.notes,
                trouble=view.trouble,
                simulated=view.simulated,
                tells_lost=is_podgpu,
            )
        )
    return readings


@dataclass(slots=True)
class _Told:
    """What one target's series tell, sorted by the node they are about."""

    samples: dict[str, list[ParsedSample]] = field(default_factory=dict)
    counters: dict[str, dict[tuple[str, str], NamespaceCounters]] = field(default_factory=dict)
    profiles: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of MIG instances, by GPU and instance."""
    at: float | None = None
    """When the GPUs were read, by the exporter's own clock."""


def _gathered(
    series: Iterable[LabelSet], names: _Names, own_pods: frozenset[tuple[str, str]], wanted: Collection[str]
) -> _Told:
    told = _Told()
    for theirs, figures in series:
        node = names.of(theirs)
        labels = with_own_holder(theirs, own_pods)
        if "GPU_I_PROFILE" in labels:
            told.profiles[_uuid(labels), labels.get("GPU_I_ID", "")] = labels["GPU_I_PROFILE"]
        for name, value in figures:
            if name in wanted:
                told.samples.setdefault(node, []).append(ParsedSample(name, labels, value))
            elif name in _COUNTERS:
                _count(told.counters.setdefault(node, {}), name, theirs, value)
            elif name == f.SNAPSHOT_TIMESTAMP.name:
                told.at = value
    return told


def _on(
    node: str, device: DeviceFigures, profiles: Mapping[tuple[str, str], str], totals: Mapping[tuple[str, str], int]
) -> DeviceFigures:
    """`podgpu_allocation_info` names no profile, and may be all that its instance's labels were taken from."""
    profile = device.profile or profiles.get(device.key, "")
    total = totals.get(device.key) if device.memory_total is None else device.memory_total
    if (device.node, device.profile, device.memory_total) == (node, profile, total):
        return device
    return replace(device, node=node, profile=profile, memory_total=total)


def _skew(taken_at: float | None, sampled_at: float) -> float | None:
    """Against the server's clock. Figures from the past may as well be old: only those from the future tell."""
    ahead = 0.0 if taken_at is None else taken_at - sampled_at
    return ahead if ahead > LEAST_SKEW_SECONDS else None


def _count(found: dict[tuple[str, str], NamespaceCounters], name: str, labels: Labels, value: float) -> None:
    key = own_namespace(labels), labels.get("modelName", "")
    if key[0]:
        counters = found.get(key) or NamespaceCounters(*key)
        found[key] = counters._replace(**{_COUNTERS[name]: value})  # type: ignore[arg-type]


class _Names:
    """What the nodes of one target are called.

    The best label any of its series has counts for all of them: `podgpu_allocation_info` has no Hostname, and the label
    `node` that Prometheus puts on it may name the same node otherwise.
    """

    def __init__(self, series: Iterable[LabelSet], labels: Sequence[str]) -> None:
        self._labels = labels
        self._rank = len(labels)
        found: dict[int, Counter[str]] = {}
        by_uuid: dict[int, dict[str, str]] = {}
        for of, figures in series:
            rank = self._rank_of(of)
            if rank < len(labels):
                name = of[labels[rank]]
                found.setdefault(rank, Counter())[name] += len(figures)
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


# Copies


def newest_copies(copies: Sequence[NodeReading]) -> list[NodeReading]:
    """Readings of one target and node that are about the same GPUs are one: the newest; of equally new ones the higher
    figures. Those about other GPUs are other nodes under the same name (two clusters), and stay."""
    kept: list[NodeReading] = []
    for reading in sorted(copies, key=lambda r: (-r.read_at, repr(r.devices))):
        at = next((n for n, other in enumerate(kept) if _same_gpus(reading, other)), None)
        if at is None:
            kept.append(reading)
        elif reading.read_at == kept[at].read_at:
            kept[at] = _higher(kept[at], reading)
    return kept


def _same_gpus(a: NodeReading, b: NodeReading) -> bool:
    keys = {device.key for device in a.devices}
    return not keys or not b.devices or not keys.isdisjoint(device.key for device in b.devices)


def _higher(a: NodeReading, b: NodeReading) -> NodeReading:
    devices = {device.key: device for device in a.devices}
    for device in b.devices:
        devices[device.key] = max(devices.get(device.key, device), device, key=_load)
    return replace(a, devices=tuple(devices.values()))


def _load(device: DeviceFigures) -> tuple[float, float]:
    return device.utilization or 0.0, device.measured or 0.0
