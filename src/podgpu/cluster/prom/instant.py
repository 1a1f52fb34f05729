"""This module works out an instant of the rolling average from a round's own samples, where the round is of that
instant. Pure.

It is what the server would answer to `RollingQueries.all()` at that time, without asking it: the questions take
Prometheus half a second for 8,000 GPUs, and all they are about has been answered already.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from podgpu.cluster.prom.rolling import NAMESPACE_OF, OVER_FULL, RollingQueries
from podgpu.cluster.prom.targets import Labels, Targets, is_own_pod
from podgpu.cluster.reading import Scope
from podgpu.metrics import families as f
from podgpu.metrics.families import EXPORTED
from podgpu.metrics.mig import billed_name
from podgpu.metrics.names import generations, names_of, successors
from podgpu.metrics.parse import ParsedSample

Key = Hashable
"""Of a device: its UUID, with the instance where the field is one of instances."""
_Name = tuple[str, str, str]
"""Of a group: its kind, and by what it is one. There are far fewer groups than devices to be put into them."""


def figures_at(samples: Iterable[ParsedSample], targets: Targets, queries: RollingQueries) -> dict[Scope, float]:
    """Of the instant that the samples are of. `targets`: as `up` tells."""
    return _Instant(samples, targets, queries).figures()


@dataclass(slots=True)
class _Group:
    """Devices of one scope, by one of the labels that may name it."""

    scope: Scope
    values: dict[Key, float]


class _Instant:
    def __init__(self, samples: Iterable[ParsedSample], targets: Targets, queries: RollingQueries) -> None:
        self._queries = queries
        self._targets = targets
        self._per_instance = queries.used_field.per_instance
        self._full = queries.settings.full
        names = frozenset(names_of(queries.used_field.id))
        told = [sample for sample in samples if sample.name in names or sample.name in _OF_HOLDERS]
        self._of_field = [sample for sample in told if sample.name in names]
        self._allocations = [sample.labels for sample in told if sample.name == f.ALLOCATION_INFO.name]
        self._processes = [sample for sample in told if sample.name == f.CONTAINER_PROCESSES.name]

    def figures(self) -> dict[Scope, float]:
        found: dict[Scope, float] = {}
        is_used, is_there = self._tests()
        for group in self._groups():
            devices = {key: value for key, value in group.values.items() if is_there is None or key in is_there}
            if devices:
                used = [value for key, value in devices.items() if (value > 0 if is_used is None else key in is_used)]
                mean = sum(used) / len(used) / self._full if used else 0.0
                found[group.scope] = max(mean, found.get(group.scope, 0.0))
        return found

    def _tests(self) -> tuple[set[Key] | None, set[Key] | None]:
        """Devices in use, and those of which that can be told; None: those above 0, and all."""
        match self._queries.settings.used_means:
            case "busy":
                return None, None
            case "allocated":
                return set(self._held()), None
            case "processes":
                return (
                    {self._key(sample.labels) for sample in self._processes if sample.value > 0},
                    {self._key(sample.labels) for sample in self._processes},
                )

    # Scopes

    def _groups(self) -> Iterable[_Group]:
        cluster = _Group(Scope("cluster"), {})
        groups: dict[_Name, _Group] = {("cluster", "", ""): cluster}
        for labels, value in self._devices():
            key = self._key_of_field(labels)
            _take_higher(cluster.values, key, value)
            for name in self._names(labels):
                group = groups.get(name) or groups.setdefault(name, _Group(_scope(name), {}))
                _take_higher(group.values, key, value)
        for key, namespace in self._held_from():
            if namespace and key in cluster.values:
                name = "namespace", namespace, ""
                group = groups.get(name) or groups.setdefault(name, _Group(_scope(name), {}))
                group.values[key] = cluster.values[key]
        return groups.values()

    def _names(self, labels: Labels) -> Iterator[_Name]:
        for label in self._queries.node_labels:
            if name := labels.get(label):
                yield "node", name, label
                break
        yield "model", labels.get("modelName", ""), labels.get("GPU_I_PROFILE", "") if self._per_instance else ""

    # Devices

    def _devices(self) -> list[tuple[Labels, float]]:
        """Series of the field that are a device's, in its own unit."""
        most = self._full * OVER_FULL
        values = [(s.labels, value) for s, value in self._in_own_unit() if _spelling(s.labels)]
        if self._per_instance:  # a GPU whose instances have the field does not count beside them
            cut = {_spelling(labels) for labels, _ in values if "GPU_I_ID" in labels}
            values = [(of, value) for of, value in values if "GPU_I_ID" in of or _spelling(of) not in cut]
        return [(labels, value) for labels, value in values if value <= most]

    def _in_own_unit(self) -> list[tuple[ParsedSample, float]]:
        """Where a series is there under both names, the older one's counts."""
        old_names, _ = generations(self._queries.used_field.id)
        new = successors().get(self._queries.used_field.id)
        renamed = [sample for sample in self._of_field if sample.name not in old_names]
        old = [(sample, sample.value) for sample in self._of_field if sample.name in old_names]
        if not renamed:
            return old
        had = {_text(sample.labels) for sample, _ in old}
        factor = 1.0 if new is None else new.factor
        return old + [(sample, sample.value / factor) for sample in renamed if _text(sample.labels) not in had]

    def _key_of_field(self, labels: Labels) -> Key:
        uuid = labels.get("UUID") or labels["uuid"]
        return (uuid, labels.get("GPU_I_ID", "")) if self._per_instance else uuid

    # Holders

    def _key(self, labels: Labels) -> Key:
        uuid = labels.get("UUID", "")
        return (uuid, labels.get("GPU_I_ID", "")) if self._per_instance else uuid

    def _held_key(self, labels: Labels) -> Key:
        uuid = labels.get("uuid") or labels.get("UUID", "")
        return (uuid, labels.get("GPU_I_ID", "")) if self._per_instance else uuid

    def _held(self) -> Iterator[Key]:
        for labels in (*self._allocations, *(sample.labels for sample in self._processes)):
            yield self._held_key(labels)
        for sample in self._of_field:
            if any(self._is_holder(sample.labels, label) for label in self._queries.spelt.pods):
                yield self._held_key(sample.labels)

    def _held_from(self) -> Iterator[tuple[Key, str]]:
        spelt = [label for label in self._queries.spelt.pods if label in NAMESPACE_OF]
        for labels in (*(sample.labels for sample in self._of_field), *self._allocations):
            for label in spelt:
                if self._is_holder(labels, label):
                    yield self._held_key(labels), labels.get(NAMESPACE_OF[label], "")

    def _is_holder(self, labels: Labels, label: str) -> bool:
        """A plain `pod` may be the scrape target's own, put on by Prometheus."""
        if label != "pod":
            return label in labels
        return "pod" in labels and EXPORTED["pod"] not in labels and not is_own_pod(labels, self._targets)


def _scope(name: _Name) -> Scope:
    kind, of, also = name
    match kind:
        case "node":
            return Scope("node", node=of)
        case "model":
            return Scope("model", model=billed_name(of, also) if also else of)
        case _:
            return Scope("namespace", of)


_OF_HOLDERS = frozenset((f.ALLOCATION_INFO.name, f.CONTAINER_PROCESSES.name))


def _spelling(labels: Labels) -> tuple[str, str] | None:
    for label in ("UUID", "uuid"):
        if label in labels:
            return label, labels[label]
    return None


def _text(labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _take_higher(values: dict[Key, float], key: Key, value: float) -> None:
    known = values.get(key)
    if known is None or value > known:
        values[key] = value
