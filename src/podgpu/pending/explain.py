"""Explains why pods that request GPUs are pending: a pure function of the objects of the API
server and of the idle holders.

It repeats what the scheduler filters by, node by node. The rest is in `reasons.UNCHECKED`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.kube.objects import is_gpu_resource
from podgpu.model import MIB, PodName, group_by_key
from podgpu.pending.cluster_objects import (
    DEFAULT_SCHEDULER,
    MILLI,
    POD_SLOTS,
    Amounts,
    BoundPod,
    GpuShare,
    NodeRecord,
    PendingPod,
    PodNeeds,
)
from podgpu.pending.device_supply import Devices, Supply, Taken
from podgpu.pending.dra_objects import (
    ClaimSpec,
    DeviceClassRecord,
    DeviceRequest,
)
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.quotas import (
    KUEUE_KIND,
    HeldWorkload,
    Quotas,
    Shortage,
    find_shortage,
)
from podgpu.pending.reasons import STAGES, Reason
from podgpu.pending.selectors import (
    CORDON_TAINT,
    NodeSelector,
    Taint,
    list_unmet,
    list_untolerated,
)

SHARE_RESOURCE = "gpu-fraction"
SHARE_MEMORY = "gpu-memory"
GPU_RESOURCE = "nvidia.com/gpu"
_UNSEEN_SECONDS = 30.0  # so long, a scheduler may not have looked at a new pod yet
_MAX_KINDS = 500  # different pods that are explained
_MAX_CHECKS = 200_000  # of such a pod and a node; 100,000 take about two seconds
_LEAST_KINDS = 20
_MAX_OPTIONS = 3
_MAX_OPTION_NODES = 20  # nodes on which holders that block a pod are searched
_NAMED = 5
_MAX_EXPRESSION = 200
_CORDON = Taint(CORDON_TAINT, "", "NoSchedule")


class Need(NamedTuple):
    resource: str
    amount: float
    gpus: float = 0.0  # 0 for CPU, memory, and parts of a GPU that are not counted in GPUs


class Unblock(NamedTuple):
    """If all these pods ended, the pod would fit on the node."""

    node: str
    pods: tuple[IdlePod, ...]


class FitExplanation(NamedTuple):
    reasons: tuple[Reason, ...]
    unblock: tuple[Unblock, ...] = ()


class Explanation(NamedTuple):
    pod: PendingPod
    gpus: float
    needs: tuple[Need, ...]
    reasons: tuple[Reason, ...]
    unblock: tuple[Unblock, ...] = ()


class FreeGpus(NamedTuple):
    """The GPUs of one resource and model on nodes that accept new pods."""

    resource: str
    model: str
    total: float
    free: float
    largest: float  # free on one node
    nodes: int
    closed: float = 0.0  # free on nodes that are cordoned or not ready


# Nodes and what pods have of them


@dataclass
class _Usage:
    """What pods have of one node."""

    amounts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    groups: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def of(cls, node: NodeRecord, pods: Iterable[BoundPod]) -> _Usage:
        usage = cls()
        for pod in pods:
            usage.add(node, pod)
        return usage

    def add(self, node: NodeRecord, pod: BoundPod) -> None:
        self.add_amounts(pod.amounts)
        if pod.share is not None:
            for group in pod.groups:
                self.groups[group] += pod.share.on(node)

    def add_amounts(self, amounts: Iterable[tuple[str, int]]) -> None:
        self.amounts[POD_SLOTS] += MILLI
        for name, milli in amounts:
            self.amounts[name] += milli

    def copy(self) -> _Usage:
        other = _Usage()
        other.amounts.update(self.amounts)
        other.groups.update(self.groups)
        return other


class _Place(NamedTuple):
    """A node with its pods."""

    node: NodeRecord
    pods: Sequence[BoundPod]
    usage: _Usage


class _Wish(NamedTuple):
    """What has to fit: the same for all pods of a job."""

    needs: PodNeeds
    gpus: Amounts  # its requests of GPUs
    others: Amounts  # its other requests
    specs: tuple[ClaimSpec, ...] = ()  # of claims that have no devices yet
    # Where claims that have devices can be used, with the names of the claims.
    places: tuple[tuple[str, NodeSelector], ...] = ()


class _Failure(NamedTuple):
    key: str
    resource: str = ""


class _Check(NamedTuple):
    """What excludes a node. Without failures, the pod fits."""

    place: _Place
    failures: tuple[_Failure, ...]
    supplies: Mapping[str, Supply]  # by resource
    is_unknown: bool = False

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(failure.key for failure in self.failures)

    @property
    def resource(self) -> str:
        """The GPU resource that counts in reasons without one."""
        return next(iter(self.supplies))


class _Cluster:
    """The objects with their indexes."""

    def __init__(self, objects: ClusterObjects) -> None:
        self.classes = {each.name: each for each in objects.classes}
        self.claims = {claim.key: claim for claim in objects.claims}
        self.devices = Devices(objects.slices, self.classes, objects.claims)
        self.extended = _find_extended(objects.classes)
        pods = group_by_key((pod.node, pod) for pod in objects.bound)
        self.places = []
        for node in sorted(objects.nodes, key=lambda each: each.name):
            here = pods.get(node.name, [])
            self.places.append(_Place(node, here, _Usage.of(node, here)))
        nominated = [pod for pod in objects.pending if pod.nominated_node and not pod.node]
        self.nominated = group_by_key((pod.nominated_node, pod) for pod in nominated)
        self.quotas = Quotas(objects.quotas, objects.local_queues, objects.workloads)
        self.claims_of = group_by_key(
            (user, claim) for claim in objects.claims for user in claim.users
        )

    def find_workload(self, pod: PendingPod) -> HeldWorkload | None:
        """Returns the Kueue Workload that holds the pod back."""
        return self.quotas.find_workload(pod.namespace, pod.workload, (pod.uid, pod.owner_uid))

    def find_classes(self, pod: PendingPod) -> Iterator[str]:
        """Yields the device classes that the claims of a pod name."""
        for named in pod.claims:
            claim = self.claims.get((pod.namespace, named.claim))
            if claim is not None:
                for alternatives in claim.spec.requests:
                    yield from (request.device_class for request in alternatives)


def _find_extended(classes: Iterable[DeviceClassRecord]) -> dict[str, str]:
    """Returns the classes whose devices satisfy requests for an extended resource."""
    extended = {}
    for each in classes:
        extended[f"deviceclass.resource.kubernetes.io/{each.name}"] = each.name
        if each.extended_resource:
            extended[each.extended_resource] = each.name
    return extended


# Free GPUs


def _list_free(cluster: _Cluster) -> list[FreeGpus]:
    """Returns what nodes offer, by resource and model."""
    rows: dict[tuple[str, str], list[tuple[float, float, bool]]] = defaultdict(list)
    for place in cluster.places:
        node = place.node
        is_open = not node.is_cordoned and not any(taint.is_not_ready for taint in node.taints)
        for name, total in node.allocatable.items():
            if total and is_gpu_resource(name):
                free = max(0, total - place.usage.amounts[name])
                rows[name, node.model].append((total / MILLI, free / MILLI, is_open))
        for driver, counts in _count_devices(cluster, node).items():
            rows[driver, node.model].append((*counts, is_open))
    return [_make_free(*key, entries) for key, entries in sorted(rows.items())]


def _make_free(resource: str, model: str, entries: Sequence[tuple[float, float, bool]]) -> FreeGpus:
    opened = [(total, free) for total, free, is_open in entries if is_open]
    return FreeGpus(
        resource=resource,
        model=model,
        total=sum(total for total, _ in opened),
        free=sum(free for _, free in opened),
        largest=max((free for _, free in opened), default=0.0),
        nodes=len(opened),
        closed=sum(free for _, free, is_open in entries if not is_open),
    )


def _count_devices(cluster: _Cluster, node: NodeRecord) -> dict[str, tuple[float, float]]:
    """Returns all and free devices of each driver. Without drivers that are not for GPUs."""
    drivers = {candidate.id[0] for candidate in cluster.devices.list_on(node.name, node.labels)}
    counts = {}
    for driver in filter(is_gpu_resource, drivers):
        counts[driver] = cluster.devices.count(driver, node.name, node.labels)
    return counts


# Explanations


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
        kind = waiting if explainer.requests_gpu(pod) else others
        kind.append(explainer.explain(pod))
    waiting += explainer.list_held(objects.pending)
    waiting.sort(key=lambda explanation: (explanation.pod.created, explanation.pod.key))
    return QueueState(waiting, others, _list_free(explainer.cluster))


class Explainer:
    """Pods with the same needs are explained once."""

    def __init__(
        self, objects: ClusterObjects, idle: Mapping[PodName, IdlePod], now: float
    ) -> None:
        self.cluster = _Cluster(objects)
        self._idle = idle
        self._now = now
        self._known: dict[tuple[_Wish, str], FitExplanation] = {}
        affordable = _MAX_CHECKS // max(1, len(self.cluster.places))
        self._max_kinds = min(_MAX_KINDS, max(_LEAST_KINDS, affordable))

    def requests_gpu(self, pod: PendingPod) -> bool:
        if pod.needs.gpu_amounts or pod.needs.share is not None:
            return True
        for named in pod.claims:
            # Nobody knows what a missing claim would have requested.
            if (pod.namespace, named.claim) not in self.cluster.claims:
                return True
        return any(map(self._is_gpu_class, self.cluster.find_classes(pod)))

    def _is_gpu_class(self, name: str) -> bool:
        device_class = self.cluster.classes.get(name, DeviceClassRecord(name))
        return device_class.is_for_gpus

    def explain(self, pod: PendingPod) -> Explanation:
        wish = self._make_wish(pod)
        needs = tuple(self._list_needs(pod))
        gpus = sum(need.gpus for need in needs)
        if not self.requests_gpu(pod):
            return Explanation(pod, 0.0, needs, (Reason(key="no_gpu"),))
        obstacle = self._find_obstacle(pod)
        if obstacle is not None:
            return Explanation(pod, gpus, needs, (obstacle,))
        fit = self._explain_fit(wish, pod)
        reasons = fit.reasons
        if not pod.is_seen and self._now - pod.created > _UNSEEN_SECONDS:
            unseen = Reason(key="unseen", names=(pod.needs.scheduler,))
            others = [reason for reason in reasons if reason.key not in ("fits", "unchecked")]
            reasons = unseen, *others
        return Explanation(pod, gpus, needs, reasons, fit.unblock)

    def _list_needs(self, pod: PendingPod) -> Iterator[Need]:
        for name, milli in pod.needs.gpu_amounts:
            amount = milli / MILLI
            yield Need(name, amount, amount if _counts_gpus(name) else 0.0)
        share = pod.needs.share
        if share is not None and share.fraction:
            gpus = share.fraction * share.devices
            yield Need(SHARE_RESOURCE, gpus, gpus)
        elif share is not None:
            yield Need(SHARE_MEMORY, share.memory_mib * MIB * share.devices)
        for named in pod.claims:
            claim = self.cluster.claims.get((pod.namespace, named.claim))
            for alternatives in claim.spec.requests if claim is not None else ():
                request = alternatives[0]
                is_gpu = self._is_gpu_class(request.device_class)
                gpus = float(request.number) if is_gpu else 0.0
                yield Need(request.device_class, request.number, gpus)
        for name, milli in pod.needs.other_amounts:
            yield Need(name, milli / MILLI)

    def _find_obstacle(self, pod: PendingPod) -> Reason | None:
        """Returns what keeps the pod waiting whatever nodes have."""
        if pod.node:
            return Reason(key="starting", names=(pod.node, *pod.waiting[:_NAMED]))
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
            return Reason(key="gated", names=pod.gates[:_NAMED])
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
        queue = self.cluster.quotas.find_kai_queue(pod.kai_queue) if pod.kai_queue else None
        if queue is None:
            return None
        share = pod.needs.share
        amounts = pod.needs.amounts
        if share is not None and share.fraction:
            amounts = ((GPU_RESOURCE, round(share.fraction * share.devices * MILLI)),)
        shortage = find_shortage([queue], amounts)
        return None if shortage is None else _make_quota_reason(shortage)

    def list_held(self, pods: Iterable[PendingPod]) -> Iterator[Explanation]:
        """Yields the workloads that a quota holds back, if their pods do not exist."""
        existing = {id(self.cluster.find_workload(pod)) for pod in pods if pod.gates}
        for workload in self.cluster.quotas.workloads:
            if id(workload) in existing:
                continue
            if workload.kind == KUEUE_KIND:
                yield self._hold(workload, self._explain_workload(workload))
                continue
            quotas = self.cluster.quotas.list_of_namespace(workload.namespace)
            shortage = find_shortage(quotas, workload.needs.amounts)
            # Without a shortage, its controller is about to create the pods.
            if shortage is not None:
                yield self._hold(workload, _make_quota_reason(shortage))

    def _hold(self, workload: HeldWorkload, reason: Reason) -> Explanation:
        pod = PendingPod(
            namespace=workload.namespace,
            name=workload.name,
            uid=workload.uid,
            created=workload.created,
            needs=workload.needs,
            owner=workload.owner,
            message=workload.message,
            kind=workload.kind,
            count=workload.pods,
        )
        gpus = sum(
            milli / MILLI
            for name, milli in workload.total
            if is_gpu_resource(name) and _counts_gpus(name)
        )
        return Explanation(pod, gpus, tuple(self._list_needs(pod)), (reason,))

    def _make_wish(self, pod: PendingPod) -> _Wish:
        specs = []
        places = []
        for named in pod.claims:
            claim = self.cluster.claims.get((pod.namespace, named.claim))
            if claim is not None and claim.is_allocated:
                places.append((claim.name, claim.node_selector))
            elif claim is not None:
                specs.append(claim.spec)
        needs = pod.needs
        return _Wish(needs, needs.gpu_amounts, needs.other_amounts, tuple(specs), tuple(places))

    def _explain_fit(self, wish: _Wish, pod: PendingPod) -> FitExplanation:
        # Nominated pods keep places only from others.
        own = pod.uid if pod.nominated_node else ""
        key = wish, own
        if key not in self._known:
            if len(self._known) >= self._max_kinds:
                return FitExplanation((Reason(key="many", total=self._max_kinds),))
            self._known[key] = self._compute_fit(wish, pod)
        return self._known[key]

    def _compute_fit(self, wish: _Wish, pod: PendingPod) -> FitExplanation:
        checks = []
        missing: dict[str, None] = {}  # GPU resources that no node offers together with the others
        is_unknown = False
        taken = self.cluster.devices.taken
        for place in self.cluster.places:
            check = self._check(wish, pod, place, place.usage, taken)
            is_unknown = is_unknown or check.is_unknown
            lacking = [name for name, supply in check.supplies.items() if not supply.total]
            if lacking:
                missing.update(dict.fromkeys(lacking))
            else:
                checks.append(check)
        if not checks and is_unknown:
            return FitExplanation((Reason(key="unchecked", names=("dra_selector",), nodes=0),))
        if not checks:
            return FitExplanation(tuple(self._list_missing(wish, missing)))
        if any(not check.failures for check in checks):
            return FitExplanation((_explain_free(wish.needs, checks),))
        reasons = _list_reasons(wish, checks)
        reasons += _list_circumstances(wish.needs, checks)
        return FitExplanation(tuple(reasons), tuple(self._find_unblocking(wish, pod, checks)))

    def _list_missing(self, wish: _Wish, missing: Iterable[str]) -> Iterator[Reason]:
        offered: set[str] = set()
        for place in self.cluster.places:
            offered.update(filter(is_gpu_resource, place.node.allocatable))
            offered.update(_count_devices(self.cluster, place.node))
        selectors = _list_expressions(wish.specs)
        lacking = [name for name in missing if name not in offered]
        for name in lacking or missing:
            if name in self.cluster.classes and selectors:
                yield Reason(key="no_device", resource=name, names=selectors)
            else:
                names = tuple(sorted(offered))[: _NAMED + 1]
                yield Reason(key="not_offered", resource=name, names=names)

    # One node

    def _check(
        self,
        wish: _Wish,
        pod: PendingPod,
        place: _Place,
        usage: _Usage,
        taken: Taken,
    ) -> _Check:
        node = place.node
        supplies = self._list_supplies(wish, node, usage, taken)
        if not all(supply.total for supply in supplies.values()):
            unknown = any(supply.is_unknown for supply in supplies.values())
            return _Check(place, (), supplies, unknown)
        failures = [
            *_list_fixed(wish, node, supplies),
            *_list_busy(wish, node, usage, supplies),
        ]
        is_busy = any(failure.key in ("in_use", "other_in_use") for failure in failures)
        if not is_busy and self._is_kept(wish, pod, place, usage, taken):
            failures.append(_Failure("nominated", next(iter(supplies))))
        failures.sort(key=lambda failure: STAGES.index(failure.key))
        is_unknown = any(supply.is_unknown for supply in supplies.values())
        return _Check(place, tuple(failures), supplies, is_unknown)

    def _list_supplies(
        self,
        wish: _Wish,
        node: NodeRecord,
        usage: _Usage,
        taken: Taken,
    ) -> dict[str, Supply]:
        supplies = {}
        specs = list(wish.specs)
        for name, milli in wish.gpus:
            total = node.allocatable.get(name, 0)
            if not total and name in self.cluster.extended:
                request = DeviceRequest(name, self.cluster.extended[name], number=milli // MILLI)
                specs.append(ClaimSpec(((request,),)))
                continue
            free = total - usage.amounts[name]
            supplies[name] = Supply(
                needed=milli / MILLI,
                total=total / MILLI,
                free=max(0, free) / MILLI,
                fits_empty=milli <= total,
                fits=milli <= free,
            )
        if wish.needs.share is not None:
            supplies[SHARE_RESOURCE] = _find_share(wish.needs.share, node, usage)
        if specs:
            name = _name_specs(specs)
            supplies[name] = self.cluster.devices.supply(specs, node.name, node.labels, taken)
        if not supplies:
            # All its claims have devices already.
            supplies[_name_places(wish)] = Supply(1, 1, 1, fits_empty=True, fits=True)
        return supplies

    def _is_kept(
        self,
        wish: _Wish,
        pod: PendingPod,
        place: _Place,
        usage: _Usage,
        taken: Taken,
    ) -> bool:
        """Returns True if preempting pods need the rest of the node."""
        preempting = []
        for other in self.cluster.nominated.get(place.node.name, ()):
            if other.uid != pod.uid and other.needs.priority >= wish.needs.priority:
                preempting.append(other)
        if not preempting:
            return False
        later = usage.copy()
        for other in preempting:
            later.add_amounts(other.needs.amounts)
        supplies = self._list_supplies(wish, place.node, later, taken)
        return bool(list(_list_busy(wish, place.node, later, supplies)))

    # Holders that block a pod

    def _find_unblocking(
        self, wish: _Wish, pod: PendingPod, checks: Iterable[_Check]
    ) -> list[Unblock]:
        options = []
        tried = 0
        for check in checks if self._idle else ():
            if not check.keys <= {"in_use", "other_in_use"} or tried >= _MAX_OPTION_NODES:
                continue
            idle = [each for each in check.place.pods if each.key in self._idle]
            if not idle:
                continue
            tried += 1
            ended = self._find_fewest(wish, pod, check.place, idle)
            if ended:
                pods = tuple(self._idle[each.key] for each in ended)
                options.append(Unblock(check.place.node.name, pods))
        options.sort(key=lambda option: (len(option.pods), option.pods[0].idle_since))
        return options[:_MAX_OPTIONS]

    def _find_fewest(
        self, wish: _Wish, pod: PendingPod, place: _Place, idle: Sequence[BoundPod]
    ) -> list[BoundPod]:
        """Returns idle pods without which the pod would fit: those that are idle for longest."""
        ended = sorted(idle, key=lambda each: (self._idle[each.key].idle_since, each.key))
        if not self._fits_without(wish, pod, place, ended):
            return []
        for each in reversed(list(ended)):
            fewer = [other for other in ended if other is not each]
            if self._fits_without(wish, pod, place, fewer):
                ended = fewer
        return ended

    def _fits_without(
        self, wish: _Wish, pod: PendingPod, place: _Place, ended: Sequence[BoundPod]
    ) -> bool:
        uids = {each.uid for each in ended}
        left = [each for each in place.pods if each.uid not in uids]
        taken = dict(self.cluster.devices.taken)
        for uid in uids:
            for claim in self.cluster.claims_of.get(uid, ()):
                # A claim is free when none of its pods is left.
                if uids.issuperset(claim.users):
                    for held in claim.devices:
                        rest = [each for each in taken[held.device] if each is not held]
                        taken[held.device] = rest
        usage = _Usage.of(place.node, left)
        return not self._check(wish, pod, place, usage, taken).failures


def _counts_gpus(resource: str) -> bool:
    """Returns False for parts of a GPU, such as its memory or hundredths of its cores."""
    return not any(word in resource.lower() for word in ("mem", "core", "percent", "ratio"))


def _name_specs(specs: Iterable[ClaimSpec]) -> str:
    for spec in specs:
        for alternatives in spec.requests:
            return alternatives[0].device_class
    return "devices"


def _list_expressions(specs: Iterable[ClaimSpec]) -> tuple[str, ...]:
    """Returns the selectors of claims. A tenant writes them, so they are cut."""
    expressions = []
    for spec in specs:
        for alternatives in spec.requests:
            expressions += [text[:_MAX_EXPRESSION] for text in alternatives[0].selectors]
    return tuple(expressions[:_NAMED])


def _name_places(wish: _Wish) -> str:
    return next((name for name, _ in wish.places), "devices")


def _find_share(share: GpuShare, node: NodeRecord, usage: _Usage) -> Supply:
    """Each group of KAI is one GPU. Its reservation pod requests the whole GPU."""
    total = node.allocatable.get(GPU_RESOURCE, 0) // MILLI
    whole = max(0, total - usage.amounts[GPU_RESOURCE] // MILLI)
    each = share.on(node)
    rooms = [1.0 - used for used in usage.groups.values()] + [1.0] * whole
    fitting = [room for room in rooms if room >= each - 1e-9]
    return Supply(
        needed=each * share.devices,
        total=total,
        free=round(sum(rooms), 4),
        fits_empty=each <= 1 and share.devices <= total,
        fits=len(fitting) >= share.devices,
    )


def _list_fixed(
    wish: _Wish, node: NodeRecord, supplies: Mapping[str, Supply]
) -> Iterator[_Failure]:
    """Yields what excludes a node even if it were empty."""
    needs = wish.needs
    if not all(selector.accepts(node.labels) for selector in needs.selectors):
        yield _Failure("selector")
    if not all(selector.accepts(node.labels) for _, selector in wish.places):
        yield _Failure("claim_node")
    for name, supply in supplies.items():
        if not supply.fits_empty:
            yield _Failure("too_large", name)
    for name, milli in wish.others:
        if milli > node.allocatable.get(name, 0):
            yield _Failure("other_too_large", name)
    yield from _list_closed(needs, node)


def _list_closed(needs: PodNeeds, node: NodeRecord) -> Iterator[_Failure]:
    """Yields what keeps new pods away from the node."""
    untolerated = list_untolerated(node.taints, needs.tolerations)
    if any(taint.is_not_ready for taint in untolerated):
        yield _Failure("not_ready")
    is_cordoned = node.is_cordoned or any(taint.key == CORDON_TAINT for taint in node.taints)
    if is_cordoned and list_untolerated([_CORDON], needs.tolerations):
        yield _Failure("cordoned")
    if _select_own_taints(untolerated):
        yield _Failure("taint")


def _select_own_taints(taints: Iterable[Taint]) -> list[Taint]:
    """Returns the taints that a person or a controller set, not those of a node's state."""
    return [taint for taint in taints if not taint.is_not_ready and taint.key != CORDON_TAINT]


def _list_busy(
    wish: _Wish, node: NodeRecord, usage: _Usage, supplies: Mapping[str, Supply]
) -> Iterator[_Failure]:
    """Yields what other pods have of the node, so that not enough is left."""
    for name, supply in supplies.items():
        if supply.fits_empty and not supply.fits:
            yield _Failure("in_use", name)
    for name, milli in (*wish.others, (POD_SLOTS, MILLI)):
        total = node.allocatable.get(name, 0)
        if milli <= total < milli + usage.amounts[name]:
            yield _Failure("other_in_use", name)


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


def _explain_free(needs: PodNeeds, checks: Iterable[_Check]) -> Reason:
    fitting = [check for check in checks if not check.failures]
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


def _list_reasons(wish: _Wish, checks: Sequence[_Check]) -> list[Reason]:
    """Returns one reason for each thing that excludes nodes.

    First comes the stage that excludes the last nodes, then what alone keeps the pod from a node.
    """
    groups = group_by_key((check.failures[0], check) for check in checks)
    reasons = [_make_reason(wish, failure, group) for failure, group in groups.items()]
    last = max(reasons, key=lambda reason: STAGES.index(reason.key))
    reasons.sort(key=lambda reason: (reason is not last, not reason.alone, -(reason.nodes or 0)))
    return reasons


def _make_reason(wish: _Wish, failure: _Failure, checks: Sequence[_Check]) -> Reason:
    key = failure.key
    resource = failure.resource or checks[0].resource
    needed: float | None = None
    if resource in checks[0].supplies:
        supplies = [check.supplies[resource] for check in checks]
        totals = [supply.total for supply in supplies]
        frees = [supply.free for supply in supplies]
        needed = max(supply.needed for supply in supplies)
    else:
        totals = [check.place.node.allocatable.get(resource, 0) / MILLI for check in checks]
        used = [check.place.usage.amounts[resource] / MILLI for check in checks]
        frees = [max(0.0, a - b) for a, b in zip(totals, used, strict=True)]
        needed = dict((*wish.needs.amounts, (POD_SLOTS, MILLI))).get(resource, 0) / MILLI
    if key == "in_use" and len(checks) > 1 and needed > 1 and sum(frees) >= needed:
        key = "fragmented"
    return Reason(
        key=key,
        resource=resource,
        needed=needed,
        free=sum(frees),
        largest=max(totals if key.endswith("too_large") else frees),
        total=sum(totals),
        nodes=len(checks),
        names=tuple(_list_names(failure.key, wish, checks)),
        alone=any(len(check.keys) == 1 for check in checks),
    )


def _list_names(key: str, wish: _Wish, checks: Sequence[_Check]) -> list[str]:
    nodes = [check.place.node for check in checks]
    names: dict[str, None] = {}
    if key == "selector":
        unmet = list_unmet(wish.needs.selectors, [node.labels for node in nodes])
        names.update(dict.fromkeys(requirement.text for requirement in unmet))
    elif key == "taint":
        for node in nodes:
            taints = list_untolerated(node.taints, wish.needs.tolerations)
            names.update(dict.fromkeys(taint.text for taint in _select_own_taints(taints)))
    elif key == "claim_node":
        names.update(dict.fromkeys(name for name, _ in wish.places))
    elif key in ("cordoned", "not_ready"):
        names.update(dict.fromkeys(node.name for node in nodes))
    return list(names)[:_NAMED]


def _list_circumstances(needs: PodNeeds, checks: Iterable[_Check]) -> Iterator[Reason]:
    """Yields facts about the pods that hold the GPUs of nodes that the pod may use."""
    ending = 0
    lower = 0
    resource = ""
    for check in checks:
        if check.failures[0].key != "in_use":
            continue
        resource = check.failures[0].resource
        for pod in check.place.pods:
            held = dict(pod.amounts).get(resource, 0)
            if pod.is_ending:
                ending += held
            elif pod.priority < needs.priority:
                lower += held
    if ending:
        yield Reason(key="ending", resource=resource, free=ending / MILLI)
    if lower and needs.never_preempts:
        yield Reason(key="never_preempts", resource=resource, free=lower / MILLI)
