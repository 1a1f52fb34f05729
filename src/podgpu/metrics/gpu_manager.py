"""Renders tkestack gpu-manager's four families for every container on a GPU, with gpu-manager's labels and units.

Cards are gpu0, gpu1 and so on, and `total` is their sum. A MIG instance is counted as a fraction of the card. If the
usage of a card is unknown, that card has no series and the container has no total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import fsum

from podgpu.metrics.encode import Family, Labels, Sample
from podgpu.metrics.families import make_families
from podgpu.metrics.labels import Policy, all_slots
from podgpu.metrics.mig import part_of_gpu
from podgpu.model import DeviceState, Holder, HolderUsage, MigInstance, NodeState, Slot, VcudaRequest

_CORES_OF_A_CARD = 100
_BLOCK_MIB = 256
_MIB = 1024 * 1024
_DECIMALS = 6
_NAMES = ("pod_name", "namespace", "node", "container_name")

Key = tuple[str, ...]
Number = int | float | None
Shown = Callable[[Number], Number]


@dataclass(frozen=True, slots=True)
class _HeldSlot:
    """A GPU or MIG instance that a container holds or uses."""

    gpu: DeviceState
    slot: Slot
    holder: Holder

    @property
    def part_of_card(self) -> float | None:
        return part_of_gpu(self.gpu.model, self.slot.profile) if isinstance(self.slot, MigInstance) else 1.0

    @property
    def usage(self) -> HolderUsage:
        return self.holder.usage or HolderUsage()

    @property
    def memory_mib(self) -> int | None:
        total = self.slot.memory_total_bytes
        return None if total is None or self.slot.hidden else total // _MIB


@dataclass(slots=True)
class _Container:
    slots: list[_HeldSlot] = field(default_factory=list)
    vcuda: VcudaRequest | None = None

    @property
    def assigned(self) -> list[_HeldSlot]:
        return [held for held in self.slots if held.holder.source]


Containers = Sequence[tuple[Key, _Container]]


def render_gpu_manager(state: NodeState, policy: Policy) -> list[Family]:
    containers, node = sorted(_containers(state).items(), key=lambda item: item[0]), policy.hostname
    samples = {
        "container_gpu_utilization": _card_samples(containers, node, "gpu", _utilization, _percent),
        "container_gpu_memory_total": _card_samples(containers, node, "gpu_memory", _memory, _whole_mib),
        "container_request_gpu_utilization": _request_samples(containers, node, "req_of_gpu", _requested_cards),
        "container_request_gpu_memory": _request_samples(containers, node, "req_of_gpu_memory", _requested_mib),
    }
    return make_families("gpu-manager", samples)


def _containers(state: NodeState) -> dict[Key, _Container]:
    """Returns the containers that hold, use or requested a device. HPC jobs are omitted, because they have no pod."""
    containers: dict[Key, _Container] = {}
    for _, gpu, slot in all_slots(state):
        for holder in slot.holders:
            if holder.pod:
                containers.setdefault(holder.key, _Container()).slots.append(_HeldSlot(gpu, slot, holder))
    for request in state.vcuda:
        if request.pod:
            containers.setdefault(request.key, _Container()).vcuda = request
    return containers


# Usage


def _card_samples(
    containers: Containers,
    node: str,
    label: str,
    number: Callable[[_HeldSlot], Number],
    shown: Shown,
) -> list[Sample]:
    samples = []
    for key, container in containers:
        cards = {f"gpu{index}": shown(value) for index, value in _by_card(container.slots, number).items()}
        values = {**cards, "total": _tidy(_add(cards.values()))}
        samples += [Sample(_labels(key, node, label, card), v) for card, v in values.items() if v is not None]
    return samples


def _by_card(slots: Iterable[_HeldSlot], number: Callable[[_HeldSlot], Number]) -> dict[int, Number]:
    """Sums the numbers of each card, ordered by card index."""
    numbers: dict[int, list[Number]] = {}
    for held in slots:
        if held.gpu.index is not None and not held.slot.hidden:
            numbers.setdefault(held.gpu.index, []).append(number(held))
    return {index: _add(numbers[index]) for index in sorted(numbers)}


def _utilization(held: _HeldSlot) -> Number:
    return _times(held.usage.utilization_ratio, held.part_of_card)


def _percent(ratio: Number) -> Number:
    return None if ratio is None else _tidy(ratio * 100)


def _memory(held: _HeldSlot) -> Number:
    return held.usage.memory_used_bytes


def _whole_mib(size: Number) -> Number:
    return None if size is None else int(size // _MIB)


# Requests


def _request_samples(
    containers: Containers, node: str, label: str, number: Callable[[_Container], Number]
) -> list[Sample]:
    numbers = ((key, number(container)) for key, container in containers)
    return [Sample(_labels(key, node, label, "total"), value) for key, value in numbers if value is not None]


def _requested_cards(container: _Container) -> Number:
    if container.vcuda is not None and container.vcuda.cores:
        return container.vcuda.cores / _CORES_OF_A_CARD
    return _tidy(_add(_times(held.holder.share_ratio, held.part_of_card) for held in container.assigned))


def _requested_mib(container: _Container) -> Number:
    if container.vcuda is not None and container.vcuda.memory_blocks:
        return container.vcuda.memory_blocks * _BLOCK_MIB
    total = _add(_times(held.holder.share_ratio, held.memory_mib) for held in container.assigned)
    return None if total is None else round(total)


def _times(ratio: float | None, whole: Number) -> Number:
    return None if ratio is None or whole is None else ratio * whole


def _add(numbers: Iterable[Number]) -> Number:
    """Returns None if there are no numbers, or if one of them is unknown."""
    addends: list[int | float] = []
    for number in numbers:
        if number is None:
            return None
        addends.append(number)
    exact = all(isinstance(number, int) for number in addends)
    return (sum(addends) if exact else fsum(addends)) if addends else None  # fsum does not depend on the order


def _tidy(number: Number) -> Number:
    """Rounds, so that the series shows 57 instead of 56.99999999999999."""
    return round(number, _DECIMALS) if isinstance(number, float) else number


@lru_cache(maxsize=4096)
def _labels(key: Key, node: str, label: str, card: str) -> Labels:
    _, namespace, pod, container = key
    named = zip(_NAMES, (pod, namespace, node or None, container), strict=True)
    return Labels([*((name, value) for name, value in named if value is not None), (label, card)])
