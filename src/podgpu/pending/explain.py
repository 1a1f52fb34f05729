"""Explains why pods that request GPUs are pending: a pure function of the objects of the API
server and of the idle holders.

It repeats what the scheduler filters by, node by node. The rest is in `reasons.UNCHECKED`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from podgpu.kube.objects import is_gpu_resource
from podgpu.model import MIB, PodName, group_by
from podgpu.pending.cluster_index import ClusterIndex, FreeGpus, list_drivers, list_free
from podgpu.pending.cluster_objects import (
    DEFAULT_SCHEDULER,
    MILLI,
    POD_SLOTS,
    NodeRecord,
    PendingPod,
    PodNeeds,
    ResourceAmounts,
)
from podgpu.pending.device_supply import Supply
from podgpu.pending.dra_objects import ClaimSpec, DeviceClassRecord
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.node_checks import (
    GPU_RESOURCE,
    SHARE_RESOURCE,
    Check,
    Failure,
    Wish,
    check_node,
    select_own_taints,
)
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.quotas import KUEUE_KIND, HeldWorkload, Shortage, find_shortage
from podgpu.pending.reasons import STAGES, Reason, cut_names
from podgpu.pending.selectors import list_unmet, list_untolerated
from podgpu.pending.unblocking import Unblock, UnblockingSearch

SHARE_MEMORY = "gpu-memory"
_UNSEEN_SECONDS = 30.0  # a scheduler may need this long until it looks at a new pod
# How many wishes (pods with different needs) are explained: fewer if there are many nodes.
_MAX_WISHES = 500
_MIN_WISHES = 20
_MAX_CHECKS = 200_000  # of a wish and a node; 100,000 take about two seconds
_MAX_EXPRESSION = 200
_PART_OF_GPU = re.compile("mem|core|percent|ratio", re.IGNORECASE)


class Need(NamedTuple):
    resource: str
    amount: float
    gpus: float = 0.0  # 0 for CPU, memory, and parts of a GPU that are not counted in GPUs


class FitExplanation(NamedTuple):
    reasons: tuple[Reason, ...]
    unblock: tuple[Unblock, ...] = ()


class Explanation(NamedTuple):
    pod: PendingPod
    gpus: float
    needs: tuple[Need, ...]
    reasons: tuple[Reason, ...]
    unblock: tuple[Unblock, ...] = ()


class QueueState(NamedTuple):
    """`waiting`: pods that request GPUs, the oldest first. `others`: pending pods without one."""

    waiting: list[Explanation]
    others: list[Explanation]
    free: list[FreeGpus]


def explain_queue(
    objects: ClusterObjects, idle: Mapping[PodName, IdlePod], now: float
) -> QueueState:
    """Explains all pending pods. `now`: Unix time."""
    explainer = Explainer(objects, idle, now)
    waiting: list[Explanation] = []
    others: list[Explanation] = []
    for pod in sorted(objects.pending, key=lambda pod: (pod.created, pod.key)):
        explanation = explainer.explain(pod)
        if explainer.requests_gpu(pod):
            waiting.append(explanation)
        else:
            others.append(explanation)

    waiting += explainer.list_held(objects.pending)
    waiting.sort(key=lambda explanation: (explanation.pod.created, explanation.pod.key))
    free = list_free(explainer.cluster)
    return QueueState(waiting, others, free)


class Explainer:
    """Pods with the same needs are explained once."""

    def __init__(
        self, objects: ClusterObjects, idle: Mapping[PodName, IdlePod], now: float
    ) -> None:
        self.cluster = ClusterIndex(objects)
        self._search = UnblockingSearch(self.cluster, idle)
        self._now = now
        self._fits: dict[Wish, FitExplanation] = {}

        nodes = max(1, len(self.cluster.candidates))
        affordable = _MAX_CHECKS // nodes
        self._max_wishes = min(_MAX_WISHES, max(_MIN_WISHES, affordable))

    def requests_gpu(self, pod: PendingPod) -> bool:
        if pod.needs.gpu_amounts or pod.needs.share is not None:
            return True
        for named in pod.claims:
            # A missing claim may have requested GPUs.
            if (pod.namespace, named.claim) not in self.cluster.claims:
                return True
        return any(map(self._is_gpu_class, self.cluster.find_classes(pod)))

    def _is_gpu_class(self, name: str) -> bool:
        device_class = self.cluster.classes.get(name, DeviceClassRecord(name))
        return device_class.is_for_gpus

    def explain(self, pod: PendingPod) -> Explanation:
        needs = tuple(self._list_needs(pod))
        if not self.requests_gpu(pod):
            return Explanation(pod, 0.0, needs, (Reason(key="no_gpu"),))

        gpus = sum(need.gpus for need in needs)
        obstacle = self._find_obstacle(pod)
        if obstacle is not None:
            return Explanation(pod, gpus, needs, (obstacle,))

        fit = self._explain_fit(self._make_wish(pod))
        reasons = list(fit.reasons)
        if not pod.is_seen and self._now - pod.created > _UNSEEN_SECONDS:
            # Free GPUs do not matter if no scheduler looks at the pod.
            reasons = [reason for reason in reasons if reason.key not in ("fits", "unchecked")]
            reasons.insert(0, Reason(key="unseen", names=(pod.needs.scheduler,)))

        return Explanation(pod, gpus, needs, tuple(reasons), fit.unblock)

    def _list_needs(self, pod: PendingPod) -> Iterator[Need]:
        for name, milli in pod.needs.gpu_amounts:
            amount = milli / MILLI
            gpus = amount if _counts_gpus(name) else 0.0
            yield Need(name, amount, gpus)

        share = pod.needs.share
        if share is not None and share.fraction:
            gpus = share.fraction * share.devices
            yield Need(SHARE_RESOURCE, gpus, gpus)
        elif share is not None:
            yield Need(SHARE_MEMORY, share.memory_mib * MIB * share.devices)

        yield from self._list_claim_needs(pod)
        for name, milli in pod.needs.other_amounts:
            yield Need(name, milli / MILLI)

    def _list_claim_needs(self, pod: PendingPod) -> Iterator[Need]:
        for named in pod.claims:
            claim = self.cluster.claims.get((pod.namespace, named.claim))
            if claim is None:
                continue

            for alternatives in claim.spec.requests:
                request = alternatives[0]
                is_gpu = self._is_gpu_class(request.device_class)
                gpus = float(request.number) if is_gpu else 0.0
                yield Need(request.device_class, request.number, gpus)

    def _find_obstacle(self, pod: PendingPod) -> Reason | None:
        """Returns what keeps the pod waiting whatever nodes have."""
        if pod.node:
            waiting = cut_names(pod.waiting)
            names = (pod.node, *waiting.shown)
            return Reason(key="starting", names=names, unnamed=waiting.unnamed)

        if pod.gates:
            return self._explain_gates(pod)

        for named in pod.claims:
            if not named.claim:
                return Reason(key="claim_not_created", names=(named.template,))
            if (pod.namespace, named.claim) not in self.cluster.claims:
                return Reason(key="claim_missing", names=(named.claim,))

        for name in self.cluster.find_classes(pod):
            if name not in self.cluster.classes:
                return Reason(key="class_missing", names=(name,))

        if pod.nominated_node:
            return Reason(key="preempting", names=(pod.nominated_node,))

        return self._find_kai_limit(pod)

    def _explain_gates(self, pod: PendingPod) -> Reason:
        workload = self.cluster.find_workload(pod)
        if workload is None:
            gates = cut_names(pod.gates)
            return Reason(key="gated", names=gates.shown, unnamed=gates.unnamed)
        return self._explain_workload(workload)

    def _explain_workload(self, workload: HeldWorkload) -> Reason:
        """Explains why Kueue has not admitted the workload."""
        queue = self.cluster.quotas.find_cluster_queue(workload)
        if queue is None:
            return Reason(key="queue_missing", names=(workload.queue or "without a name",))
        shortage = find_shortage([queue], workload.total)
        if shortage is None:
            return Reason(key="queued", names=(queue.text,))
        return _make_quota_reason(shortage)

    def _find_kai_limit(self, pod: PendingPod) -> Reason | None:
        queue = self.cluster.quotas.find_kai_queue(pod.kai_queue)
        if queue is None:
            return None

        amounts = pod.needs.amounts
        share = pod.needs.share
        if share is not None:
            gpus = share.fraction * share.devices
            amounts = ((GPU_RESOURCE, round(gpus * MILLI)),)

        shortage = find_shortage([queue], amounts)
        if shortage is None:
            return None

        return _make_quota_reason(shortage)

    def list_held(self, pods: Iterable[PendingPod]) -> Iterator[Explanation]:
        """Yields the workloads that a quota holds back, if their pods do not exist."""
        explained = set()
        for pod in pods:
            if not pod.gates:
                continue
            # `explain` says of this pod why the workload waits.
            workload_of_pod = self.cluster.find_workload(pod)
            if workload_of_pod is not None:
                explained.add(workload_of_pod.pod.uid)

        for workload in self.cluster.quotas.workloads:
            if workload.pod.uid in explained:
                continue
            pod = workload.pod
            if pod.kind == KUEUE_KIND:
                yield self._hold(workload, self._explain_workload(workload))
                continue

            quotas = self.cluster.quotas.list_of_namespace(pod.namespace)
            shortage = find_shortage(quotas, pod.needs.amounts)
            # Without a shortage, its controller is about to create the pods.
            if shortage is not None:
                yield self._hold(workload, _make_quota_reason(shortage))

    def _hold(self, workload: HeldWorkload, reason: Reason) -> Explanation:
        gpus = 0.0
        for name, milli in workload.total:
            if is_gpu_resource(name) and _counts_gpus(name):
                gpus += milli / MILLI

        needs = tuple(self._list_needs(workload.pod))
        return Explanation(workload.pod, gpus, needs, (reason,))

    def _make_wish(self, pod: PendingPod) -> Wish:
        specs = []
        claim_selectors = []
        for named in pod.claims:
            # `_find_obstacle` has found that all claims exist.
            claim = self.cluster.claims[pod.namespace, named.claim]
            if claim.is_allocated:
                claim_selectors.append((claim.name, claim.node_selector))
            # A claim for monitoring (adminAccess) takes no device, so it fits everywhere.
            elif claim.spec.requests:
                specs.append(claim.spec)

        gpus = self._select_checked(pod.needs)
        return Wish(pod.needs, gpus, pod.needs.other_amounts, tuple(specs), tuple(claim_selectors))

    def _select_checked(self, needs: PodNeeds) -> ResourceAmounts:
        """Leaves out what only the pod's own scheduler knows, such as HAMi's memory of GPUs."""
        gpus = needs.gpu_amounts
        if needs.scheduler == DEFAULT_SCHEDULER:
            return gpus

        offered = []
        for name, milli in gpus:
            if name in self.cluster.offered:
                offered.append((name, milli))

        return tuple(offered) or gpus

    def _explain_fit(self, wish: Wish) -> FitExplanation:
        if wish in self._fits:
            return self._fits[wish]
        if len(self._fits) >= self._max_wishes:
            too_many = Reason(key="many", total=self._max_wishes)
            return FitExplanation((too_many,))

        self._fits[wish] = self._compute_fit(wish)
        return self._fits[wish]

    def _compute_fit(self, wish: Wish) -> FitExplanation:
        if not self.cluster.candidates:
            return FitExplanation((Reason(key="no_nodes"),))

        every = []
        taken = self.cluster.devices.taken
        for candidate in self.cluster.candidates:
            every.append(check_node(self.cluster, wish, candidate, taken))

        checks = [check for check in every if not check.lacking]
        if not checks:
            return FitExplanation(tuple(self._list_missing(wish, every)))

        fitting = [check for check in checks if not check.failures]
        if fitting:
            return FitExplanation((_explain_free(wish.needs, fitting),))

        reasons = _list_reasons(wish, checks)
        reasons += _list_circumstances(wish.needs, checks)
        unblock = self._search.find(wish, checks)
        return FitExplanation(tuple(reasons), tuple(unblock))

    def _list_missing(self, wish: Wish, checks: Iterable[Check]) -> Iterator[Reason]:
        """Yields a reason for each GPU resource that no node offers.

        If each is offered by some node, no node offers all of them together, so all are listed.
        """
        # A dict, because it keeps the order.
        missing: dict[str, None] = {}
        for check in checks:
            # Devices that the selector may select would be on this node.
            if check.is_unknown:
                yield Reason(key="unchecked", names=("dra_selector",), nodes=0)
                return

            missing.update(dict.fromkeys(check.lacking))

        nodes = [candidate.node for candidate in self.cluster.candidates]
        offered = self._list_offered(nodes)
        resources = cut_names(sorted(offered))
        selectors = cut_names(_list_expressions(wish.specs))
        offered_nowhere = [name for name in missing if name not in offered]
        for name in offered_nowhere or missing:
            if name in self.cluster.classes and selectors.shown:
                key = "no_device"
                names = selectors
            else:
                key = "not_offered"
                names = resources

            unhealthy = sum(node.count_unhealthy(name) for node in nodes)
            yield Reason(
                key=key,
                resource=name,
                names=names.shown,
                unnamed=names.unnamed,
                unhealthy=unhealthy or None,
            )

    def _list_offered(self, nodes: Iterable[NodeRecord]) -> set[str]:
        """Returns the GPU resources of the nodes, and their drivers (DRA)."""
        offered: set[str] = set()
        for node in nodes:
            offered |= list_drivers(self.cluster, node)
            for name, milli in node.allocatable.items():
                # A device plugin that has stopped, or all of whose GPUs are unhealthy, leaves a 0.
                if milli and is_gpu_resource(name):
                    offered.add(name)
        return offered


def _counts_gpus(resource: str) -> bool:
    """Returns False for parts of a GPU, such as its memory or hundredths of its cores."""
    return _PART_OF_GPU.search(resource) is None


def _list_expressions(specs: Iterable[ClaimSpec]) -> list[str]:
    """Returns the selectors of claims. A tenant writes them, so they are cut."""
    expressions = []
    for spec in specs:
        for alternatives in spec.requests:
            expressions += [text[:_MAX_EXPRESSION] for text in alternatives[0].selectors]
    return expressions


# From checks to reasons


def _make_quota_reason(shortage: Shortage) -> Reason:
    record = shortage.record
    return Reason(
        key="quota",
        resource=record.resource,
        needed=shortage.needed / MILLI,
        free=record.free / MILLI,
        total=record.limit / MILLI,
        names=(shortage.quota,),
    )


def _explain_free(needs: PodNeeds, fitting: Sequence[Check]) -> Reason:
    unchecked = list(needs.unchecked)
    if all(check.is_unknown for check in fitting):
        unchecked.append("dra_selector")
    if needs.scheduler != DEFAULT_SCHEDULER:
        unchecked.append("scheduler")

    key = "unchecked" if unchecked else "fits"
    resource = fitting[0].resource
    free = sum(check.supplies[resource].free for check in fitting)
    names = tuple(unchecked)
    return Reason(key=key, nodes=len(fitting), names=names, resource=resource, free=free)


def _list_reasons(wish: Wish, checks: Sequence[Check]) -> list[Reason]:
    """Returns one reason for each thing that excludes nodes, sorted by how close the pod came.

    First comes the reason of the latest stage: its nodes passed all other stages. Then come
    reasons that are the only one on some node, then others, each with the most nodes first.
    """
    reasons = []
    groups = group_by(checks, lambda check: check.failures[0])
    for failure, group in groups.items():
        reasons.append(_make_reason(wish, failure, group))

    latest = max(reasons, key=lambda reason: STAGES.index(reason.key))
    reasons.remove(latest)
    reasons.sort(key=lambda reason: (reason.alone, reason.nodes or 0), reverse=True)
    return [latest, *reasons]


def _make_reason(wish: Wish, failure: Failure, checks: Sequence[Check]) -> Reason:
    key = failure.key
    resource = failure.resource or checks[0].resource
    names = cut_names(_list_names(key, wish, checks))
    supplies = [_find_supply(wish, check, resource) for check in checks]
    needed = max(supply.needed for supply in supplies)
    free = sum(supply.free for supply in supplies)

    largest = max(supply.free for supply in supplies)
    if key in ("too_large", "other_too_large"):
        largest = max(supply.total for supply in supplies)

    # The pod could use repaired GPUs only if nothing else excludes these nodes.
    unhealthy = 0.0
    if key in ("in_use", "too_large"):
        unhealthy = sum(check.candidate.node.count_unhealthy(resource) for check in checks)

    # One GPU, or a part of it, is never spread over nodes.
    has_several = len(checks) > 1 and needed > 1
    if key == "in_use" and has_several and free >= needed:
        key = "fragmented"

    return Reason(
        key=key,
        resource=resource,
        needed=needed,
        free=free,
        largest=largest,
        total=sum(supply.total for supply in supplies),
        unhealthy=unhealthy or None,
        nodes=len(checks),
        names=names.shown,
        unnamed=names.unnamed,
        alone=any(len(check.failures) == 1 for check in checks),
    )


def _find_supply(wish: Wish, check: Check, resource: str) -> Supply:
    supply = check.supplies.get(resource)
    if supply is not None:
        return supply

    needs = dict(wish.needs.amounts)
    needs[POD_SLOTS] = MILLI
    return check.candidate.measure(resource, needs.get(resource, 0))


def _list_names(key: str, wish: Wish, checks: Sequence[Check]) -> list[str]:
    """Returns what a reason names, for example the taints that exclude these nodes."""
    if key == "claim_node":
        return [name for name, _ in wish.claim_selectors]

    nodes = [check.candidate.node for check in checks]
    if key == "selector":
        unmet = list_unmet(wish.needs.selectors, [node.labels for node in nodes])
        return [requirement.text for requirement in unmet]

    if key in ("cordoned", "not_ready"):
        return [node.name for node in nodes]

    names = []
    if key == "taint":
        for node in nodes:
            taints = list_untolerated(node.taints, wish.needs.tolerations)
            names += [taint.text for taint in select_own_taints(taints)]
    return names


def _list_circumstances(needs: PodNeeds, checks: Iterable[Check]) -> Iterator[Reason]:
    """Yields facts about the pods that hold the GPUs of nodes that the pod may use."""
    held: Counter[tuple[str, str]] = Counter()  # thousandths, by key of a reason and resource
    for check in checks:
        first, *_ = check.failures
        if first.key != "in_use":
            continue

        for pod in check.candidate.pods:
            milli = dict(pod.amounts).get(first.resource, 0)
            if pod.is_ending:
                held["ending", first.resource] += milli
            elif pod.priority < needs.priority and needs.never_preempts:
                held["never_preempts", first.resource] += milli

    for (key, resource), milli in sorted(held.items()):
        if milli:
            yield Reason(key=key, resource=resource, free=milli / MILLI)
