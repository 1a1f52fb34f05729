"""This module says what made each pod, from kube-state-metrics: `kube_pod_owner`, and for ReplicaSets their Deployment.
Pure.

A pod's owner never changes, so only pods not known yet are asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.promql import Matcher, by, is_
from podgpu.cluster.prom.targets import PodName, own_namespace
from podgpu.cluster.reading import NodeReading
from podgpu.figures.device import Owner
from podgpu.metrics.families import EXPORTED
from podgpu.metrics.parse import ParsedSample

MOST_AT_A_TIME = 500
"""Pods in one query; the others' turn comes in the next rounds."""
ASK_AGAIN = 60.0
"""Seconds until a pod without an owner is asked about again: kube-state-metrics may have been late."""
_CONTROLLER = is_("owner_is_controller", "true")
_REPLICA_SET = "ReplicaSet"
OwnersOf = Callable[[frozenset[PodName]], Mapping[PodName, Owner]]
"""What somebody else (the API server) knows of pods now; must not wait."""


@dataclass(frozen=True, slots=True)
class OwnerQueries:
    match: tuple[Matcher, ...]

    def pods(self, pods: Iterable[PodName]) -> str:
        names = promql.any_of(sorted({pod for _, pod in pods}))
        labels = by("namespace", "pod", *EXPORTED.values(), "owner_kind", "owner_name")
        each = (self._owned("kube_pod_owner", Matcher(label, "=~", names)) for label in ("pod", EXPORTED["pod"]))
        return f"max{labels} ({' or '.join(each)})"

    def replica_sets(self, names: Iterable[str]) -> str:
        labels = by("namespace", EXPORTED["namespace"], "replicaset", "owner_kind", "owner_name")
        wanted = Matcher("replicaset", "=~", promql.any_of(sorted(set(names))))
        return f"max{labels} ({self._owned('kube_replicaset_owner', wanted)})"

    def _owned(self, name: str, wanted: Matcher) -> str:
        return promql.selector((name,), _CONTROLLER, wanted, *self.match)


class Owners:
    """Of the pods that are there; those that are gone are forgotten."""

    def __init__(self) -> None:
        self._known: dict[PodName, Owner] = {}
        self._pods: frozenset[PodName] = frozenset()
        self._asked_at: dict[PodName, float] = {}

    def pods(self, nodes: Iterable[NodeReading], now: float) -> tuple[PodName, ...]:
        """Which of the holders to ask about now."""
        self._pods = holders_of(nodes)
        self._known = {pod: owner for pod, owner in self._known.items() if pod in self._pods}
        self._asked_at = {pod: at for pod, at in self._asked_at.items() if pod in self._pods}
        due = (p for p in self._pods if p not in self._known and now - self._asked_at.get(p, -ASK_AGAIN) >= ASK_AGAIN)
        return tuple(sorted(due)[:MOST_AT_A_TIME])

    def take(self, asked: Iterable[PodName], found: Mapping[PodName, Owner], now: float) -> None:
        self._asked_at.update(dict.fromkeys(asked, now))
        self._known.update({pod: owner for pod, owner in found.items() if pod in self._pods})

    def known(self, elsewhere: OwnersOf | None = None) -> Mapping[PodName, Owner]:
        """`elsewhere` is asked about those that kube-state-metrics does not know."""
        missing = self._pods - self._known.keys()
        if elsewhere is None or not missing:
            return dict(self._known)
        return {**elsewhere(missing), **self._known}


def holders_of(nodes: Iterable[NodeReading]) -> frozenset[PodName]:
    holders = (of.holder for node in nodes for device in node.devices for of in device.holders)
    return frozenset((holder.namespace, holder.pod) for holder in holders if holder.pod)


def parse_pod_owners(samples: Iterable[ParsedSample]) -> dict[PodName, Owner]:
    found: dict[PodName, Owner] = {}
    for sample in samples:
        labels = sample.labels
        pod = labels.get(EXPORTED["pod"]) or labels.get("pod", "")
        owner = _owner(labels)
        if pod and owner is not None:
            key = own_namespace(labels), pod
            found[key] = min(owner, found.get(key, owner))  # two may be told: always the same one
    return found


def parse_replica_set_owners(samples: Iterable[ParsedSample]) -> dict[tuple[str, str], Owner]:
    """(namespace, ReplicaSet) -> what made it."""
    found: dict[tuple[str, str], Owner] = {}
    for sample in samples:
        owner = _owner(sample.labels)
        if owner is not None:
            found[own_namespace(sample.labels), sample.labels.get("replicaset", "")] = owner
    return found


def replica_sets_in(owners: Mapping[PodName, Owner]) -> frozenset[str]:
    return frozenset(owner.name for owner in owners.values() if owner.kind == _REPLICA_SET)


def resolved(owners: Mapping[PodName, Owner], makers: Mapping[tuple[str, str], Owner]) -> dict[PodName, Owner]:
    """Pods of a ReplicaSet belong to its Deployment, where that is known."""
    return {
        pod: makers.get((pod[0], owner.name), owner) if owner.kind == _REPLICA_SET else owner
        for pod, owner in owners.items()
    }


def _owner(labels: Mapping[str, str]) -> Owner | None:
    """Older kube-state-metrics write <none> where there is none."""
    kind, name = labels.get("owner_kind", ""), labels.get("owner_name", "")
    return Owner(kind, name) if kind and name and "<none>" not in (kind, name) else None
