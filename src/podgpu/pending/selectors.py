"""Which nodes a pod may use: node selectors, node affinity, taints and tolerations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from podgpu.kube.objects import KubeObject, read_list, read_map

CORDON_TAINT = "node.kubernetes.io/unschedulable"
_NOT_READY_TAINTS = frozenset(
    {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/network-unavailable",
        "node.cloudprovider.kubernetes.io/uninitialized",
    }
)
_REPELLING = ("NoSchedule", "NoExecute")
_FIELD_PREFIX = "field:"
NAME_FIELD = f"{_FIELD_PREFIX}metadata.name"
"""Key under which `Requirement` finds the name of a node."""


class Requirement(NamedTuple):
    """A condition on a label of a node, or on its name."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def accepts(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        if self.operator == "Exists":
            return value is not None
        if self.operator == "DoesNotExist":
            return value is None

        # Gt and Lt have one value. An operator that is not known here may have none.
        limit = self.values[0] if self.values else ""
        return _compares(self.operator, value or "", limit)

    @property
    def text(self) -> str:
        key = self.key.removeprefix(_FIELD_PREFIX)
        values = ",".join(self.values)
        if self.operator == "In" and len(self.values) == 1:
            return f"{key}={values}"

        if not values:
            return f"{key} {self.operator}"
        return f"{key} {self.operator} ({values})"


def _compares(operator: str, value: str, limit: str) -> bool:
    """Returns False if one of the texts is not a number, or the operator is unknown."""
    try:
        difference = int(value) - int(limit)
    except ValueError:
        return False

    if operator == "Gt":
        return difference > 0
    return operator == "Lt" and difference < 0


Term = tuple[Requirement, ...]
"""All requirements must be met. An empty term accepts no node."""


class NodeSelector(NamedTuple):
    """One of the terms must be met. Without `is_set`, every node is accepted."""

    terms: tuple[Term, ...] = ()
    is_set: bool = False

    def accepts(self, labels: Mapping[str, str]) -> bool:
        if not self.is_set:
            return True
        for term in self.terms:
            if term and all(requirement.accepts(labels) for requirement in term):
                return True
        return False


ANY_NODE = NodeSelector()


def parse_node_selector(body: KubeObject | None) -> NodeSelector:
    """Parses a NodeSelector of the API. None accepts every node."""
    if body is None:
        return ANY_NODE

    terms = []
    for term in read_list(body, "nodeSelectorTerms"):
        requirements = []
        for expression in read_list(term, "matchExpressions"):
            requirements.append(_parse_requirement(expression, ""))

        for expression in read_list(term, "matchFields"):
            requirements.append(_parse_requirement(expression, _FIELD_PREFIX))

        terms.append(tuple(requirements))

    return NodeSelector(tuple(terms), is_set=True)


def _parse_requirement(body: KubeObject, prefix: str) -> Requirement:
    values = tuple(read_list(body, "values"))
    return Requirement(prefix + body["key"], body["operator"], values)


def parse_pod_selectors(spec: KubeObject) -> tuple[NodeSelector, ...]:
    """Returns what a pod requires of its node. All selectors must be met."""
    selectors = []
    labels = read_map(spec, "nodeSelector")
    if labels:
        term = []
        for key, value in sorted(labels.items()):
            term.append(Requirement(key, "In", (value,)))

        selectors.append(NodeSelector((tuple(term),), is_set=True))

    affinity = read_map(read_map(spec, "affinity"), "nodeAffinity")
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    # An empty one accepts no node.
    if required is not None:
        selectors.append(parse_node_selector(required))

    return tuple(selectors)


def list_unmet(
    selectors: Iterable[NodeSelector], nodes: Collection[Mapping[str, str]]
) -> list[Requirement]:
    """Returns the requirements that no node meets. If each is met by a node, returns all.

    `nodes`: the labels of each node.
    """
    # A dict, because it keeps the order.
    every: dict[Requirement, None] = {}
    for selector in selectors:
        for term in selector.terms:
            every.update(dict.fromkeys(term))

    unmet = []
    for requirement in every:
        if not any(requirement.accepts(labels) for labels in nodes):
            unmet.append(requirement)

    return unmet or list(every)


class Taint(NamedTuple):
    key: str
    value: str
    effect: str

    @property
    def text(self) -> str:
        value = f"={self.value}" if self.value else ""
        return f"{self.key}{value}:{self.effect}"

    @property
    def is_not_ready(self) -> bool:
        return self.key in _NOT_READY_TAINTS


class Toleration(NamedTuple):
    key: str
    operator: str
    value: str
    effect: str

    def tolerates(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        if self.operator == "Exists":
            return True
        if self.operator in ("Gt", "Lt"):
            return _compares(self.operator, taint.value, self.value)

        return bool(self.key) and self.value == taint.value


def parse_taints(entries: Iterable[KubeObject]) -> tuple[Taint, ...]:
    """Returns the taints that keep new pods away."""
    taints = []
    for entry in entries:
        effect = entry.get("effect")
        if effect in _REPELLING:
            value = entry.get("value") or ""
            taints.append(Taint(entry["key"], value, effect))
    return tuple(taints)


def parse_tolerations(entries: Iterable[KubeObject]) -> tuple[Toleration, ...]:
    tolerations = []
    for entry in entries:
        toleration = Toleration(
            entry.get("key") or "",
            entry.get("operator") or "Equal",
            entry.get("value") or "",
            entry.get("effect") or "",
        )
        tolerations.append(toleration)

    return tuple(tolerations)


def list_untolerated(taints: Iterable[Taint], tolerations: Iterable[Toleration]) -> list[Taint]:
    untolerated = []
    for taint in taints:
        if not any(toleration.tolerates(taint) for toleration in tolerations):
            untolerated.append(taint)
    return untolerated
