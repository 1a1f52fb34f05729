"""The answer of `/api/v1/queue` (docs/queue.md): pending pods, grouped by the same explanation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from podgpu.errors import UsageError
from podgpu.known import add_known, round_known
from podgpu.model import WorkloadOwner, group_by
from podgpu.pending.cluster_index import FreeGpus
from podgpu.pending.cluster_objects import PendingPod
from podgpu.pending.explain import Explanation, Need, QueueState
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.reasons import Reason, advise, amount, describe
from podgpu.pending.unblocking import Unblock

_MAX_GROUPS = 200
_MAX_PODS = 20  # that a group names
_MAX_NAME = 256


class QueueQuery(NamedTuple):
    """Empty fields select everything."""

    namespace: str = ""
    pod: str = ""

    def selects(self, pod: PendingPod) -> bool:
        if self.namespace and pod.namespace != self.namespace:
            return False
        if not self.pod or pod.name == self.pod:
            return True

        # Users know the name of their Job, and not those of its pods.
        return pod.owner is not None and pod.owner.name == self.pod


def parse_queue_query(query: Mapping[str, str]) -> QueueQuery:
    for name in ("ns", "pod"):
        if len(query.get(name, "")) > _MAX_NAME:
            raise UsageError(f"{name}= is longer than {_MAX_NAME} characters")
    return QueueQuery(query.get("ns", ""), query.get("pod", ""))


class ReasonView(Reason, frozen=True, omit_defaults=True, kw_only=True):
    says: str
    do: str = ""


class NeedView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    resource: str
    amount: float
    says: str


class QueuedPod(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`kind`: of an object that stands for `pods` pods, which may not exist yet. Usually empty."""

    namespace: str
    pod: str
    kind: str = ""
    pods: int = 1
    owner: WorkloadOwner | None = None
    since: float  # Unix time


class UnblockView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """If all these idle pods ended, one pod of the group would fit on the node."""

    node: str
    pods: list[IdlePod]
    cost_per_hour: float | None = None


class QueueGroup(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Pending pods with the same needs and the same reasons."""

    pods: int
    gpus: float  # of all these pods
    since: float  # of the oldest
    reasons: list[ReasonView]  # the most important first
    needs: list[NeedView]  # of one pod
    priority: int = 0
    scheduler: str = ""
    message: str = ""  # what the scheduler says of the oldest pod
    examples: list[QueuedPod]  # the oldest
    unblock: list[UnblockView] = []


class QueueAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`/api/v1/queue`."""

    api: Literal["podgpu/v1"] = msgspec.field(default_factory=lambda: "podgpu/v1")
    taken_at: float
    simulated: bool = False
    currency: str = ""
    notes: list[str] = []
    pods: int = 0  # all that wait, also those that the user may not see
    gpus: float = 0.0
    hidden_pods: int = 0  # of namespaces that the user may not see
    hidden_gpus: float = 0.0
    free: list[FreeGpus] = []
    groups: list[QueueGroup] = []  # the longest waiting first
    omitted_groups: int = 0
    omitted_pods: int = 0


class QueueSnapshot(NamedTuple):
    """What the API server and the GPUs said at one time."""

    taken_at: float
    queue: QueueState
    notes: Sequence[str] = ()
    currency: str = ""
    simulated: bool = False

    def list_namespaces(self) -> list[str]:
        """Returns the namespaces that an answer may name, with repetitions."""
        names = []
        for explanation in (*self.queue.waiting, *self.queue.others):
            names.append(explanation.pod.namespace)
            for option in explanation.unblock:
                names += [pod.namespace for pod in option.pods]
        return names


def make_queue(
    snapshot: QueueSnapshot, query: QueueQuery, visible: Collection[str] | None = None
) -> QueueAnswer:
    """`visible`: the namespaces that the user may see; None if he may see all."""
    shown = _select(snapshot.queue.waiting, query, visible)
    # A pod that requests no GPU is shown only to a query with its name.
    others: list[Explanation] = []
    if query.pod:
        others = _select(snapshot.queue.others, query, visible)

    # An answer to a query does not say how many hidden pods the query would select.
    hidden: list[Explanation] = []
    if not query.namespace and not query.pod:
        hidden = [each for each in snapshot.queue.waiting if not _is_visible(each, visible)]

    # `others` request no GPU, so they are not counted.
    counted = shown + hidden
    groups = _group(shown + others, visible)
    omitted = groups[_MAX_GROUPS:]

    return QueueAnswer(
        taken_at=snapshot.taken_at,
        simulated=snapshot.simulated,
        currency=snapshot.currency,
        notes=list(snapshot.notes) if visible is None else [],
        pods=_count_pods(counted),
        gpus=_sum_gpus(counted),
        hidden_pods=_count_pods(hidden),
        hidden_gpus=_sum_gpus(hidden),
        free=snapshot.queue.free,
        groups=groups[:_MAX_GROUPS],
        omitted_groups=len(omitted),
        omitted_pods=sum(group.pods for group in omitted),
    )


def _select(
    explanations: Iterable[Explanation], query: QueueQuery, visible: Collection[str] | None
) -> list[Explanation]:
    selected = []
    for explanation in explanations:
        if query.selects(explanation.pod) and _is_visible(explanation, visible):
            selected.append(explanation)
    return selected


def _is_visible(explanation: Explanation, visible: Collection[str] | None) -> bool:
    return visible is None or explanation.pod.namespace in visible


def _sum_gpus(explanations: Iterable[Explanation]) -> float:
    return round(sum(explanation.gpus for explanation in explanations), 4)


def _count_pods(explanations: Iterable[Explanation]) -> int:
    return sum(explanation.pod.count for explanation in explanations)


class _Kind(NamedTuple):
    """Explanations that are equal in all of this are one group."""

    reasons: tuple[Reason, ...]
    needs: tuple[Need, ...]
    unblock: tuple[Unblock, ...]
    priority: int
    scheduler: str


def _group(
    explanations: Iterable[Explanation], visible: Collection[str] | None
) -> list[QueueGroup]:
    """The explanations are sorted by time, so the groups are, too."""
    groups = group_by(explanations, _find_kind)
    return [_make_group(kind, members, visible) for kind, members in groups.items()]


def _find_kind(explanation: Explanation) -> _Kind:
    return _Kind(
        explanation.reasons,
        explanation.needs,
        explanation.unblock,
        explanation.pod.needs.priority,
        explanation.pod.needs.scheduler,
    )


def _make_group(
    kind: _Kind, members: Sequence[Explanation], visible: Collection[str] | None
) -> QueueGroup:
    oldest = members[0].pod
    return QueueGroup(
        pods=_count_pods(members),
        gpus=_sum_gpus(members),
        since=oldest.created,
        reasons=[_view_reason(reason) for reason in kind.reasons],
        needs=[_view_need(need) for need in kind.needs],
        priority=kind.priority,
        scheduler=kind.scheduler,
        message=oldest.message,
        examples=[_view_pod(explanation.pod) for explanation in members[:_MAX_PODS]],
        unblock=[_view_unblock(option, visible) for option in kind.unblock],
    )


def _view_reason(reason: Reason) -> ReasonView:
    return ReasonView(**asdict(reason), says=describe(reason), do=advise(reason))


def _view_need(need: Need) -> NeedView:
    says = amount(need.amount, need.resource)
    return NeedView(resource=need.resource, amount=need.amount, says=says)


def _view_pod(pod: PendingPod) -> QueuedPod:
    return QueuedPod(
        namespace=pod.namespace,
        pod=pod.name,
        kind=pod.kind,
        pods=pod.count,
        owner=pod.owner,
        since=pod.created,
    )


def _view_unblock(option: Unblock, visible: Collection[str] | None) -> UnblockView:
    pods = []
    cost: float | None = None
    for pod in option.pods:
        pods.append(_hide_pod(pod, visible))
        cost = add_known(cost, pod.cost_per_hour)
    return UnblockView(node=option.node, pods=pods, cost_per_hour=round_known(cost))


def _hide_pod(pod: IdlePod, visible: Collection[str] | None) -> IdlePod:
    if visible is None or pod.namespace in visible:
        return pod
    return replace(pod, namespace="", pod="", owner=None, hidden=True)
