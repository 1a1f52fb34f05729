"""Renders tkestack gpu-manager's four families for every container on a GPU, with gpu-manager's labels and units.

Cards are gpu0, gpu1 and so on, and `total` is their sum. A MIG instance is counted as a fraction of the card. If the
usage of a card is unknown, that card has no series and the container has no total.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import fsum
from typing import NamedTuple

from podgpu.metrics.encode import Family, Labels, Sample, families_in, make_families
from podgpu.metrics.labels import Policy, all_slots
from podgpu.metrics.mig import fraction_of_gpu
from podgpu.model import MIB, DeviceState, Holder, HolderUsage, MigInstance, NodeState, Slot, VcudaRequest

_CORES_OF_A_CARD = 100
_BLOCK_MIB = 256
_DECIMALS = 6  # rounds 56.99999999999999 to 57

Number = int | float | None


class _HeldSlot(NamedTuple):
    """A GPU or MIG instance that a container holds or uses."""

    gpu: DeviceState
    slot: Slot
    holder: Holder

    @property
    def fraction_of_card(self) -> float | None:
        return fraction_of_gpu(self.gpu.model, self.slot.profile) if isinstance(self.slot, MigInstance) else 1.0

    @property
    def usage(self) -> HolderUsage:
        return self.holder.usage or HolderUsage()


def render_gpu_manager(state: NodeState, policy: Policy) -> list[Family]:
    """Renders the containers that hold, use or requested a device. HPC jobs are omitted, because they have no pod."""
    held: dict[tuple[str, ...], list[_HeldSlot]] = defaultdict(list)
    for gpu, slot in all_slots(state):
        for holder in slot.holders:
            if holder.pod:
                held[holder.key].append(_HeldSlot(gpu, slot, holder))
    requests = {request.key: request for request in state.vcuda if request.pod}
    samples: dict[str, list[Sample]] = {name: [] for name in families_in("gpu-manager")}
    for key in sorted(held.keys() | requests.keys()):
        for family, values in _container_values(held[key], requests.get(key, VcudaRequest())).items():
            label = families_in("gpu-manager")[family].labels[-1]
            samples[family] += [
                Sample(_labels(key, policy.hostname, label, card), v) for card, v in values.items() if v is not None
            ]
    return make_families("gpu-manager", samples)


def _container_values(slots: Sequence[_HeldSlot], request: VcudaRequest) -> dict[str, dict[str, Number]]:
    """Returns the values of one container by family and card."""
    cards: dict[int, list[_HeldSlot]] = defaultdict(list)
    for held in slots:
        if held.gpu.index is not None and not held.slot.hidden:
            cards[held.gpu.index].append(held)
    percents: dict[str, Number] = {}
    mebibytes: dict[str, Number] = {}
    for index, on_card in sorted(cards.items()):
        ratios = (_multiply(held.usage.utilization_ratio, held.fraction_of_card) for held in on_card)
        percents[f"gpu{index}"] = _add(_multiply(ratio, 100) for ratio in ratios)
        size = _add(held.usage.memory_used_bytes for held in on_card)
        mebibytes[f"gpu{index}"] = None if size is None else int(size // MIB)
    return {
        "container_gpu_utilization": {**percents, "total": _add(percents.values())},
        "container_gpu_memory_total": {**mebibytes, "total": _add(mebibytes.values())},
        "container_request_gpu_utilization": {"total": _requested_cards(slots, request)},
        "container_request_gpu_memory": {"total": _requested_mib(slots, request)},
    }


def _requested_cards(slots: Sequence[_HeldSlot], request: VcudaRequest) -> Number:
    if request.cores:
        return request.cores / _CORES_OF_A_CARD
    return _add(_multiply(held.holder.share_ratio, held.fraction_of_card) for held in slots if held.holder.source)


def _requested_mib(slots: Sequence[_HeldSlot], request: VcudaRequest) -> Number:
    if request.memory_blocks:
        return request.memory_blocks * _BLOCK_MIB
    sizes = ((held.holder, None if held.slot.hidden else held.slot.memory_total_bytes) for held in slots)
    size = _add(_multiply(holder.share_ratio, size) for holder, size in sizes if holder.source)
    return None if size is None else round(size / MIB)


def _multiply(ratio: Number, whole: Number) -> Number:
    return None if ratio is None or whole is None else ratio * whole


def _add(numbers: Iterable[Number]) -> Number:
    """Returns None if there are no numbers, or if one of them is unknown."""
    addends = list(numbers)
    known = [number for number in addends if number is not None]
    if not known or len(known) < len(addends):
        return None
    if all(isinstance(number, int) for number in known):
        return sum(known)
    return round(fsum(known), _DECIMALS)  # fsum does not depend on the order


@lru_cache(maxsize=4096)
def _labels(key: tuple[str, ...], node: str, label: str, card: str) -> Labels:
    _, namespace, pod, container = key
    host = [("node", node)] if node else []
    return Labels([("pod_name", pod), ("namespace", namespace), *host, ("container_name", container), (label, card)])
