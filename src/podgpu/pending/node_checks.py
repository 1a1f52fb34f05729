"""Repeats the filters of the scheduler for one pod and one node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from podgpu.pending.cluster_index import CandidateNode, ClusterIndex
from podgpu.pending.cluster_objects import (
    MILLI,
    POD_SLOTS,
    GpuShare,
    NodeRecord,
    PodNeeds,
    ResourceAmounts,
)
from podgpu.pending.device_supply import Supply, Taken
from podgpu.pending.dra_objects import ClaimSpec, DeviceRequest
from podgpu.pending.reasons import STAGES
from podgpu.pending.selectors import CORDON_TAINT, NodeSelector, Taint, list_untolerated

SHARE_RESOURCE = "gpu-fraction"
GPU_RESOURCE = "nvidia.com/gpu"
_ROUNDING = 1e-9  # error of sums of fractions
_CORDON = Taint(CORDON_TAINT, "", "NoSchedule")


class Wish(NamedTuple):
    """What has to fit: the same for all pods of a job."""

    needs: PodNeeds
    gpus: ResourceAmounts  # its requests of GPUs
    others: ResourceAmounts  # its other requests
    # Of claims that have no devices yet. Each has at least one request.
    specs: tuple[ClaimSpec, ...] = ()
    # Where claims that have devices can be used, with the names of the claims.
    claim_selectors: tuple[tuple[str, NodeSelector], ...] = ()


class Failure(NamedTuple):
    key: str
    resource: str = ""


class Check(NamedTuple):
    """What excludes a node. Without failures, the pod fits."""

    candidate: CandidateNode
    failures: tuple[Failure, ...]
    supplies: Mapping[str, Supply]  # by resource

    @property
    def is_unknown(self) -> bool:
        return any(supply.is_unknown for supply in self.supplies.values())

    @property
    def lacking(self) -> list[str]:
        """The GPU resources that the node does not have at all."""
        return [name for name, supply in self.supplies.items() if not supply.total]

    @property
    def resource(self) -> str:
        """The GPU resource that counts in reasons without one."""
        return next(iter(self.supplies))


def check_node(
    cluster: ClusterIndex,
    wish: Wish,
    candidate: CandidateNode,
    taken: Taken,
) -> Check:
    """`taken`: what claims have of the devices."""
    supplies = _list_supplies(cluster, wish, candidate, taken)
    check = Check(candidate, (), supplies)
    # Reasons are about nodes that offer what is requested.
    if check.lacking:
        return check

    failures = list(_list_fixed(wish, candidate.node, supplies))
    busy = list(_list_busy(wish, candidate, supplies))
    failures += busy
    if not busy and _is_reserved(cluster, wish, candidate, taken):
        failures.append(Failure("nominated", check.resource))

    failures.sort(key=lambda failure: STAGES.index(failure.key))
    return check._replace(failures=tuple(failures))


def _list_supplies(
    cluster: ClusterIndex,
    wish: Wish,
    candidate: CandidateNode,
    taken: Taken,
) -> dict[str, Supply]:
    node = candidate.node
    supplies = {}
    specs = list(wish.specs)
    for name, milli in wish.gpus:
        has_plugin = bool(node.allocatable.get(name))
        if name in cluster.extended and not has_plugin:
            request = DeviceRequest(cluster.extended[name], number=milli // MILLI)
            specs.append(ClaimSpec(((request,),)))
        else:
            supplies[name] = candidate.measure(name, milli)

    if wish.needs.share is not None:
        supplies[SHARE_RESOURCE] = _measure_share(wish.needs.share, candidate)
    if specs:
        preferred = specs[0].requests[0][0]
        supplies[preferred.device_class] = cluster.devices.supply(specs, node, taken)
    if not supplies:
        # All its claims have devices already. The first one stands for them.
        claim, _ = wish.claim_selectors[0]
        supplies[claim] = Supply(1, 1, 1, fits_empty=True, fits=True)

    return supplies


def _is_reserved(cluster: ClusterIndex, wish: Wish, candidate: CandidateNode, taken: Taken) -> bool:
    """Returns True if the rest of the node is for pods that preempt others there.

    As in the scheduler, a pod may not take the place of such a pod of its own priority or a higher.
    """
    nominated = []
    for pod in cluster.nominated.get(candidate.node.name, ()):
        if pod.needs.priority >= wish.needs.priority:
            nominated.append(pod)

    if not nominated:
        return False

    with_nominated = CandidateNode(candidate.node, candidate.pods)
    for pod in nominated:
        with_nominated.reserve(pod.needs.amounts)

    supplies = _list_supplies(cluster, wish, with_nominated, taken)
    return any(_list_busy(wish, with_nominated, supplies))


def _measure_share(share: GpuShare, candidate: CandidateNode) -> Supply:
    """Each group of KAI is one GPU. Its reservation pod requests the whole GPU."""
    total = candidate.node.allocatable.get(GPU_RESOURCE, 0) // MILLI
    used_gpus = candidate.used[GPU_RESOURCE] // MILLI
    whole = max(0, total - used_gpus)
    rooms = [1.0 - used for used in candidate.used_groups.values()]
    rooms += [1.0] * whole

    fraction = share.on(candidate.node)
    # 1.0 - 0.9 is less than 0.1.
    fitting = [room for room in rooms if room >= fraction - _ROUNDING]

    return Supply(
        needed=fraction * share.devices,
        total=total,
        free=round(sum(rooms), 4),
        fits_empty=fraction <= 1 and share.devices <= total,
        fits=len(fitting) >= share.devices,
    )


def _list_fixed(wish: Wish, node: NodeRecord, supplies: Mapping[str, Supply]) -> Iterator[Failure]:
    """Yields what excludes a node even if it were empty."""
    needs = wish.needs
    if not all(selector.accepts(node.labels) for selector in needs.selectors):
        yield Failure("selector")
    if not all(selector.accepts(node.labels) for _, selector in wish.claim_selectors):
        yield Failure("claim_node")

    for name, supply in supplies.items():
        if not supply.fits_empty:
            yield Failure("too_large", name)

    for name, milli in wish.others:
        if milli > node.allocatable.get(name, 0):
            yield Failure("other_too_large", name)

    yield from _list_closed(needs, node)


def _list_closed(needs: PodNeeds, node: NodeRecord) -> Iterator[Failure]:
    """Yields what keeps new pods away from the node."""
    untolerated = list_untolerated(node.taints, needs.tolerations)
    if any(taint.is_not_ready for taint in untolerated):
        yield Failure("not_ready")

    is_cordoned = node.is_cordoned or CORDON_TAINT in [taint.key for taint in node.taints]
    if is_cordoned and list_untolerated([_CORDON], needs.tolerations):
        yield Failure("cordoned")
    # Taints of the node's state are already reported above.
    if select_own_taints(untolerated):
        yield Failure("taint")


def select_own_taints(taints: Iterable[Taint]) -> list[Taint]:
    """Returns the taints that a person or a controller set, not those of a node's state."""
    return [taint for taint in taints if not taint.is_not_ready and taint.key != CORDON_TAINT]


def _list_busy(
    wish: Wish, candidate: CandidateNode, supplies: Mapping[str, Supply]
) -> Iterator[Failure]:
    """Yields what other pods have of the node, so that not enough is left."""
    for name, supply in supplies.items():
        if supply.fits_empty and not supply.fits:
            yield Failure("in_use", name)

    for name, milli in (*wish.others, (POD_SLOTS, MILLI)):
        total = candidate.node.allocatable.get(name, 0)
        fits_empty = milli <= total
        fits = milli + candidate.used[name] <= total
        if fits_empty and not fits:
            yield Failure("other_in_use", name)
