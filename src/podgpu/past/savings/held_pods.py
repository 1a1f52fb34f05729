"""The pods and jobs that hold GPUs now, and the GPUs of each node: where savings begin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from podgpu.charge import UsageAccount
from podgpu.fleet.hold import find_unheld
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import HeldPart, device_price, is_blind
from podgpu.fleet.state import ClusterState
from podgpu.known import sum_all
from podgpu.model import group_by
from podgpu.past.accounts import account_of
from podgpu.past.savings.savings import NodeRoom, PodLoad

AccountKey = tuple[str, ...]
PodKey = tuple[str, AccountKey]  # cluster and account


class HeldPod(NamedTuple):
    """A pod that holds GPUs now. The steps of `load` are not read yet."""

    load: PodLoad
    parts: list[HeldPart]


def collect_held(state: ClusterState) -> dict[PodKey, HeldPod]:
    """Returns all pods and jobs that hold a GPU now, except those of nodes that do not answer."""
    parts: dict[PodKey, list[tuple[NodeEntry, HeldPart]]] = defaultdict(list)
    for node in state.nodes:
        if node.gone:
            continue
        for part in node.held:
            # Only a holder that is identified can be a pod or job.
            if part.holder.key:
                key = part.cluster, account_of(part).key
                parts[key].append((node, part))

    pods = {}
    job_gpus: dict[tuple[str, ...], float] = defaultdict(float)
    for (cluster, account), own in parts.items():
        load = _make_load(cluster, own, state)
        job_gpus[_job_of(load)] += load.gpus
        pods[cluster, account] = HeldPod(load, [part for _, part in own])

    for held in pods.values():
        held.load.job_gpus = job_gpus[_job_of(held.load)]

    return pods


def _job_of(load: PodLoad) -> tuple[str, ...]:
    """Returns the key of the owner. Without one, a pod is a job of its own."""
    account = load.account
    if account.owner_name:
        return load.cluster, account.namespace, account.owner_kind, account.owner_name
    return load.cluster, *account.key


def _make_load(
    cluster: str, own: Sequence[tuple[NodeEntry, HeldPart]], state: ClusterState
) -> PodLoad:
    devices: set[tuple[str, str]] = set()
    models = set()
    sizes = []
    costs = []
    is_whole = True
    for node, part in own:
        devices.add((node.name, part.device_key))
        models.add(part.gpu.model)
        sizes.append(part.gpu.memory_total_bytes)
        costs.append(part.cost_per_hour)
        if not _is_whole(part):
            is_whole = False

    # Of GPUs of different sizes, the smallest limits the pod. Unknown if one of them is.
    smallest = min(size or 0 for size in sizes)
    gpu_bytes = float(smallest) if smallest else None

    first_node, first_part = own[0]
    load = PodLoad(
        account_of(first_part),
        steps=b"",
        cluster=cluster,
        node=first_node.name,
        model=first_part.gpu.model,
        devices=len(devices),
        gpus=sum(part.gpu_fraction for _, part in own),
        is_whole=is_whole,
        gpu_bytes=gpu_bytes,
        price=sum_all(costs),
    )
    load.problem = _find_problem(load.account, state)
    is_model_known = len(models) == 1 and "" not in models
    if not load.problem and not is_model_known:
        load.problem = "model"

    return load


def _find_problem(account: UsageAccount, state: ClusterState) -> str:
    """Returns the reason why savings must leave out a pod. Empty if there is none."""
    if account.namespace in state.settings.savings_skip_namespaces:
        return "namespace"
    if (account.namespace, account.pod) in state.kept_pods:
        return "annotation"
    return ""


def _is_whole(part: HeldPart) -> bool:
    """Returns whether the part is a GPU that no other pod shares."""
    if part.instance is not None or part.gpu.instances:
        return False
    pods = {(holder.pod_name, holder.job_or_user) for holder in part.device.holders}
    return part.share >= 1 and len(pods) <= 1


def list_rooms(state: ClusterState, pods: Sequence[PodLoad]) -> Iterator[NodeRoom]:
    """Yields the whole GPUs of each node and model, with the pods that hold them."""
    pods_by_place = group_by(pods, lambda pod: (pod.cluster, pod.node, pod.model))
    for node in state.nodes:
        if node.gone or node.stale or node.silent is not None:
            continue

        held = node.held_by_device()
        cluster = node.reading.cluster
        whole = []
        for gpu in node.gpus:
            if not gpu.instances and not is_blind(gpu):
                whole.append(gpu)

        models = group_by(whole, lambda gpu: gpu.model)
        for model, gpus in models.items():
            free = 0
            for gpu in gpus:
                unallocated = find_unheld(node, gpu, held).unallocated
                if (unallocated.gpus.unallocated or 0.0) >= 1:
                    free += 1

            price = device_price(node.prices, gpus[0], instance=None, size=1.0)
            own = pods_by_place.get((cluster, node.name, model), [])
            total = len(gpus)
            yield NodeRoom(cluster, node.name, model, total, free, own, price)
